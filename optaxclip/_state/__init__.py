"""The state of a clipper: two arrays, whose rows have names.

state        `ClipState`
packed       arrays with named rows
first_state  the state before the first step
blocks       how the norms of a step fit into the state
outcome      what the state keeps of a step
nonfinite    the error of nonfinite="raise"
interop      states in jax.export and optax.tree_map_params
"""
