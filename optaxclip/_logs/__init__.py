"""The one reader of training logs, for `replay` and `doctor`.

files        from a file to rows, a dict for each line or step
columns      from rows to columns of numbers
norms        which columns are norms of the gradient, and which is the loss
after_clip   whether norms were logged after a clip
output       what the commands of `replay` and `doctor` print
"""
