"""What broke this step: the chip, the dtype, the data, a layer or the model?

A skipped step leaves weights and moments as they were, so all that made it is still
there. It is saved, and replayed without each cause in turn.

    save        writes a step to a file, in the branch where a step was skipped
    why         replays it, and says what broke it

    python -m optaxclip.autopsy step.npz train:loss     the same as a command
"""

# `as` tells type checkers that a name is public.
from .._arguments import helpful_errors as _helpful_errors
from ._file import save as save
from ._why import Verdict as Verdict
from ._why import why as why

# A misspelt name, as in `autopsy.wy`, raises an error with the right one.
_helpful_errors.with_helpful_errors(__name__)
