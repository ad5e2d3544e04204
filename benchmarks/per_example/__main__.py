"""What the other process does: compiles the gradients that standard input names.

It prints each row as a line of JSON as soon as it is there.
"""

import json
import sys

from . import devices

for wanted in json.load(sys.stdin):
    for row in devices.rows_of(*wanted):
        print(json.dumps(row), flush=True)
