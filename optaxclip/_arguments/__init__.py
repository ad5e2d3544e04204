"""What users pass in: how it is checked, matched with trees, and shown.

checks         arguments and states. Errors name call, argument and value
updates        arguments of `update`: gradients, weights, trees in the state
prefixes       options for parts of a tree
functions      functions as JAX takes them
foreign_names  hints where a name or an argument is that of another library
other_names    names of other libraries
reprs          how states, and calls that make clippers, are shown
"""
