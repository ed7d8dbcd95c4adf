"""``python -m dispatcher`` is the command line."""

import sys

from dispatcher.cli import main

sys.exit(main())
