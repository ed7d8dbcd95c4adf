"""``python -m dispatcher``, the same as the command ``dispatcher``."""

import contextlib
import os
import sys

with contextlib.suppress(OSError):  # the current folder may be gone
    if sys.path[0] in ("", os.getcwd()):  # what lies in it must not stand in for modules that are installed
        del sys.path[0]

from dispatcher.cli import main

if __name__ == "__main__":
    sys.exit(main())
