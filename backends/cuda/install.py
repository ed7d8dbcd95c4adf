"""``python -m dispatcher.backends.cuda.install``, for machines with an NVIDIA driver and no CUDA toolkit: installs nvcc
and CUDA's headers from PyPI, and PyCUDA, which it builds against them.

PyPI has nvcc for CUDA 13 only, which needs a driver of release 580 or later. cuRAND is left out: nothing here uses it.
"""

from __future__ import annotations

import ctypes
import importlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from dispatcher.backends.cuda import toolkit
from dispatcher.errors import DeviceError, DispatcherError, KernelError

PARTS = "cuda-toolkit[nvcc,nvvm,crt,cudart,cccl,profiler]==13.*"
PYCUDA = "pycuda>=2024.1"
DRIVER = "libcuda.so.1"


def pip(*arguments: str) -> None:
    """Run this Python's pip; it tells stderr what it does."""
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True, stdout=sys.stderr)


def build(requirement: str, settings: Mapping[str, object], folder: Path) -> Path:
    """Build a wheel of PyCUDA from its source, which is all that PyPI has.

    Args:
        requirement: which PyCUDA, as pip has it.
        settings: what its ``siteconf.py`` says.
        folder: where the wheel goes.
    """
    with tempfile.TemporaryDirectory() as scratch:
        pip("download", "--quiet", "--no-deps", "--no-binary", "pycuda", "--dest", scratch, requirement)
        (archive,) = Path(scratch).glob("*.tar.gz")
        shutil.unpack_archive(archive, scratch)
        (tree,) = (path for path in Path(scratch).iterdir() if path.is_dir())
        lines = [f"{name} = {value!r}\n" for name, value in {**settings, "CUDA_ENABLE_CURAND": False}.items()]
        (tree / "siteconf.py").write_text("".join(lines), encoding="utf-8")
        pip("wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(tree))
    (wheel,) = folder.glob("pycuda-*.whl")
    return wheel


def driver() -> Path:
    """The driver's library, which PyCUDA is linked with.

    Raises:
        DeviceError: there is none.
    """
    try:
        ctypes.CDLL(DRIVER)
    except OSError as error:
        raise DeviceError(f"{error}; install the NVIDIA driver first") from error
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return next(Path(line.split()[-1]) for line in maps if "/libcuda.so" in line)


def install() -> None:
    """Install all of it into this Python.

    Raises:
        DeviceError: there is no driver.
        KernelError: pip failed; stderr has its words.
    """
    folder_of_driver = driver().parent
    try:
        pip("install", PARTS)
        importlib.invalidate_caches()
        settings = {
            "CUDA_INC_DIR": [str(toolkit.from_pypi()[0].parents[1] / "include")],
            "CUDADRV_LIB_DIR": [str(folder_of_driver)],
            "CUDADRV_LIBNAME": [f":{DRIVER}"],  # a driver alone need not have the name that linkers look for
        }
        with tempfile.TemporaryDirectory() as folder:
            pip("install", str(build(PYCUDA, settings, Path(folder))))
    except subprocess.CalledProcessError as error:
        raise KernelError(f"{' '.join(error.cmd[1:])} failed with exit status {error.returncode}") from error


if __name__ == "__main__":
    try:
        install()
    except DispatcherError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
