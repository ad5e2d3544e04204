"""From a tree to its norms.

norms    which leaves have a norm together: all, each tensor, groups, units
options  the options of norms: labels, stacked layers, mesh axes
axes     which axes of a leaf count layers, and which are summed
reduce   from leaves to norms of any order, and their derivative
specs    how a leaf enters its norm
squares  norms of order 2 on each platform
sums     sums of one leaf
join     sums of leaves, joined over leaves and devices
moduli   moduli of elements
"""
