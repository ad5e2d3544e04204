"""Programs, each of which runs by itself. Imported as a package, as in the tests, they
find `_shared` and each other as scripts do.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
