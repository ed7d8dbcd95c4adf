"""Builds a PyCUDA wheel without a GPU, a driver or a CUDA installation, and installs it.

    python -m tests.cudasim.pycuda_wheel              # prints the wheel's path, building it if need be
    python -m tests.cudasim.pycuda_wheel --install    # also installs it into this Python

PyCUDA comes from PyPI as source only. It is linked against the stand-in libcuda.so.1 and works with the real
one just as well: only the name is recorded. cuRAND is left out. The wheel is kept in the simulator's cache.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from pathlib import Path

from dispatcher.backends.cuda.install import build, pip
from tests.cudasim.build import driver_library
from tests.cudasim.cache import cached_folder, content_hash
from tests.cudasim.toolkit import HEADERS, include_folder

PYCUDA = "pycuda==2026.1"
# The optimiser level of PyCUDA's own code hardly matters, and -O1 halves the build time.
FLAGS = {"CXXFLAGS": ["-O1", "-g0"], "LDFLAGS": ["-s", "-Wl,--no-as-needed"]}


def wheel() -> Path:
    """The PyCUDA wheel for this Python, built on first use (about a minute) and kept in the cache."""

    def fill(folder: Path) -> None:
        places = {"CUDA_INC_DIR": [str(include_folder())], "CUDADRV_LIB_DIR": [str(driver_library().parent)]}
        build(PYCUDA, {**places, **FLAGS}, folder)

    # An extension is bound to the Python version, and one linked here to this machine's C library.
    python = f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}-{sysconfig.get_config_var('SOABI')}"
    folder = cached_folder("pycuda", content_hash([], PYCUDA, repr(FLAGS), python, *HEADERS), fill)
    (built,) = folder.glob("pycuda-*.whl")
    return built


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true", help="install it into this Python")
    given = parser.parse_args()
    built = wheel()
    if given.install:
        pip("install", "--quiet", str(built))
    print(built)


if __name__ == "__main__":
    main()
