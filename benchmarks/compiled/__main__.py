"""What the other process does: compiles the steps that standard input names.

It prints each row as a line of JSON as soon as it is there.
"""

import json
import sys

from . import step

for wanted in json.load(sys.stdin):
    print(json.dumps(step.row(*wanted)), flush=True)
