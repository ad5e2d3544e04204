"""What the other process does: makes the rows that standard input names, by a function
of the module that the command names, and prints them as JSON.
"""

import json
import sys
from importlib import import_module

module = import_module(sys.argv[1])
rows = []
for arguments in json.load(sys.stdin):
    row = module.row(*arguments)
    print("compiled:", *row.values(), file=sys.stderr, flush=True)
    rows.append(row)
json.dump(rows, sys.stdout)
