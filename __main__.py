"""``python -m kvpager COMMAND``: the command line, where the command ``kvpager`` is not on the path."""

from __future__ import annotations

import sys

from .api.cli import main

if __name__ == "__main__":
    sys.exit(main())
