"""Programs, each of which runs by itself. Imported as a package, as the tests do, they
find `_shared` and each other as they do then.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
