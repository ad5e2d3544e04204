"""What users pass in: how it is checked, matched with trees, and shown.

checks          arguments and states. Errors name call, argument and value
updates         arguments of `update`: gradients, weights, trees in the state
prefixes        options for parts of a tree
functions       functions as JAX takes them
other_names     tables: a name of another library, and what it is called here
helpful_errors  public modules: their errors look a wrong name up in these tables
reprs           how states, and calls that make clippers, are shown
"""
