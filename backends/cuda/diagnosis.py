"""What ``dispatcher doctor`` says of CUDA: the driver, PyCUDA, the compiler, what hides devices."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from dispatcher.backends.cuda import toolkit
from dispatcher.errors import install
from dispatcher.interface import Finding

_LIBRARY = "nvcuda.dll" if os.name == "nt" else "libcuda.so.1"
_DRIVER = Path("/proc/driver/nvidia/version")


def diagnose() -> Iterator[Finding]:
    """Look at everything that CUDA needs; never raises.

    Without an NVIDIA driver on the machine, nothing that is missing is called a problem.
    """
    present = _DRIVER.exists()
    missing = "problem" if present else "note"
    if present:
        line = next(iter(_DRIVER.read_text(errors="replace").splitlines()), "")
        yield Finding("cuda", "NVIDIA driver", "ok", line)
    else:
        yield Finding("cuda", "NVIDIA driver", "note", f"there is none ({_DRIVER} does not exist)")
    try:
        ctypes.CDLL(_LIBRARY)
        yield Finding("cuda", _LIBRARY, "ok", "it loads")
    except OSError as error:
        remedy = "install the NVIDIA driver; in a container, start it with --gpus all"
        yield Finding("cuda", _LIBRARY, missing, f"it cannot be loaded: {error}", remedy)  # type: ignore[arg-type]
    try:
        yield Finding("cuda", "PyCUDA", "ok", metadata.version("pycuda"))
    except metadata.PackageNotFoundError:
        remedy = f"run {toolkit.INSTALL}, or where there is a CUDA toolkit: {install('cuda')}"
        yield Finding("cuda", "PyCUDA", missing, "it is not installed", remedy)  # type: ignore[arg-type]
    found = toolkit.find()
    if isinstance(found, str):
        yield Finding("cuda", "nvcc", missing, found.removesuffix(f"; {toolkit.REMEDY}"), toolkit.REMEDY)  # type: ignore[arg-type]
    else:
        release = "of an unknown release" if found.release is None else "{}.{}".format(*found.release)
        yield Finding("cuda", "nvcc", "ok", f"{' '.join(found.command)}, {release}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        detail = f"is {visible!r}: only these devices are visible"
        yield Finding("cuda", "CUDA_VISIBLE_DEVICES", "note", detail, "unset CUDA_VISIBLE_DEVICES")
