"""Why does a run break? Reads its log, and names causes.

    python -m optaxclip.doctor run.jsonl                         a table
    python -m optaxclip.doctor run.jsonl --loss objective        the column of the loss
    optaxclip.doctor.diagnose("run.jsonl")                       a list, in Python

    diagnose    the findings of a log: cause, steps, evidence, and the page that helps
    examine     the same with what was looked at, and what could not be judged

Any log with a loss and a gradient norm will do. The doctor sees only the log: a cause
that leaves no mark in its numbers is not found, and where nothing is found the run may
break all the same.
"""

# `as` tells type checkers that a name is public.
from .._arguments import helpful_errors as _helpful_errors
from ._causes import Finding as Finding
from ._report import Report as Report
from ._report import diagnose as diagnose
from ._report import examine as examine

# A misspelt name, as in `doctor.diagnoze`, raises an error with the right one.
_helpful_errors.with_helpful_errors(__name__)
