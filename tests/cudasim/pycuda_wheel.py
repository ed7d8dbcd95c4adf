"""Builds a PyCUDA wheel without a GPU, a driver or a CUDA installation, and installs it.

    python -m tests.cudasim.pycuda_wheel              # prints the wheel's path, building it if need be
    python -m tests.cudasim.pycuda_wheel --install    # also installs it into this Python

PyCUDA comes from PyPI as source only. It is linked against the stand-in libcuda.so.1 and works with the real
one just as well: only the name is recorded. cuRAND is left out. The wheel is kept in the simulator's cache.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from tests.cudasim.build import driver_library
from tests.cudasim.cache import cached_folder, content_hash
from tests.cudasim.toolkit import HEADERS, include_folder

PYCUDA = "2026.1"

# PyCUDA's setup.py reads these from siteconf.py. The optimiser level of its own code hardly matters, and -O1
# halves the build time.
SETTINGS = """\
CUDA_INC_DIR = [{include!r}]
CUDADRV_LIB_DIR = [{library!r}]
CUDA_ENABLE_CURAND = False
CXXFLAGS = ["-O1", "-g0"]
LDFLAGS = ["-s", "-Wl,--no-as-needed"]
"""


def _pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True, stdout=sys.stderr)


def wheel() -> Path:
    """The PyCUDA wheel for this Python, built on first use (about a minute) and kept in the cache."""

    def fill(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            _pip("download", "--quiet", "--no-deps", "--no-binary", "pycuda", "--dest", scratch, f"pycuda=={PYCUDA}")
            (archive,) = Path(scratch).glob("*.tar.gz")
            shutil.unpack_archive(archive, scratch)
            (tree,) = (path for path in Path(scratch).iterdir() if path.is_dir())
            settings = SETTINGS.format(include=str(include_folder()), library=str(driver_library().parent))
            (tree / "siteconf.py").write_text(settings)
            _pip("wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(tree))

    # An extension is bound to the Python version, and one linked here to this machine's C library.
    python = f"{sys.implementation.cache_tag}-{sysconfig.get_platform()}-{sysconfig.get_config_var('SOABI')}"
    folder = cached_folder("pycuda", content_hash([], PYCUDA, SETTINGS, python, *HEADERS), fill)
    (built,) = folder.glob("pycuda-*.whl")
    return built


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--install", action="store_true", help="install it into this Python")
    given = parser.parse_args()
    built = wheel()
    if given.install:
        _pip("install", "--quiet", str(built))
    print(built)


if __name__ == "__main__":
    main()
