"""The command ``dispatcher``, also ``python -m dispatcher``."""

import contextlib
import os
import sys

with contextlib.suppress(OSError):  # the current folder may be gone
    if sys.path[0] in ("", os.getcwd()):  # what lies in it must not stand in for modules that are installed
        del sys.path[0]


def main() -> int:
    """Run the command line; returns the exit code. Ctrl-C is heeded while its modules are imported, too."""
    try:
        from dispatcher.cli import main as run

        return run()
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
