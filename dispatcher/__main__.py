"""``python -m dispatcher``, the same as the command ``dispatcher``."""

import sys

from dispatcher.cli import main

if __name__ == "__main__":
    sys.exit(main())
