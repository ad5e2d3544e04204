"""Transformations around a clipper or an optimizer.

skipping      steps that stand out change nothing
judge         whether a step stands out
rows          the numbers that the states of these keep
select_early  an optimizer's update, or its old state
carry         what was cut off is added to the next gradient
constrain     weights are clipped, after a step
"""
