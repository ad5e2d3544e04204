"""`metrics(state)`: what clippers and wrappers found, as numbers for a log.

metrics  the report
states   the states that are in a tree
rows     the numbers of each state
"""
