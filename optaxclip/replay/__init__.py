"""What would a rule have done? It is run over recorded norms, without training.

    python -m optaxclip.replay run.csv                      a table of candidate rules
    python -m optaxclip.replay run.csv --picture run.png    norms and clipped steps

    run             one rule over recorded norms
    suggest         candidate rules for them
    read_history    the norms of a log file
    spike_score     how often norms or losses stood out
    plot_history    draws norms, limits and clipped steps

What a replay knows: which steps a rule would have clipped, and by how much, had the
norms come as they did. What it cannot know: the norms that would have come. A clipped
step leads elsewhere, so after the first clipped step the record is of another run.
Norms recorded under clipping are those of the clipped run. Take the table as a place to
start, not as a forecast of the loss. From norms after a clip no limit is suggested.
"""

# `as` tells type checkers that a name is public.
from .._arguments import helpful_errors as _helpful_errors
from ._history import read_history as read_history
from ._run import Replay as Replay
from ._run import Suggestion as Suggestion
from ._run import plot_history as plot_history
from ._run import run as run
from ._run import spike_score as spike_score
from ._run import suggest as suggest

# A misspelt name, as in `replay.sugest`, raises an error with the right one.
_helpful_errors.with_helpful_errors(__name__)
