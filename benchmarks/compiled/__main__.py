"""What the other process does: makes the rows that standard input names, by a function
of the module that the command names, and prints them as JSON.
"""

import json
import sys
from importlib import import_module

module, rows = import_module(sys.argv[1]), []
for wanted in json.load(sys.stdin):
    rows.append(module.row(*wanted))
    print("compiled:", *rows[-1].values(), file=sys.stderr, flush=True)
json.dump(rows, sys.stdout)
