"""The dispatcher's command line with the simulator as CUDA device: ``python -m tests.cudasim run PROBLEM``."""

import os
import sys

from tests import cudasim

if __name__ == "__main__":
    os.environ.setdefault(cudasim.SWITCH, "1")
    os.environ.setdefault(f"{cudasim.SWITCH}_DEVICES", "1")
    os.environ.update(cudasim.activate().child_environment())
    from dispatcher.cli import main

    sys.exit(main(sys.argv[1:]))
