"""Caches of other libraries that must not stand in the way.

PoCL lists no device where it cannot make a cache folder, and aborts the process over a file in it that was cut
short. PyOpenCL keeps a database of its own, and cannot prepare a kernel where that cannot be written or read.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path

VARIABLE = "POCL_CACHE_DIR"
PYOPENCL_VARIABLE = "PYOPENCL_NO_CACHE"

logger = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Where PoCL keeps compiled kernels."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path(os.environ.get("HOME", "/tmp")) / ".cache") / "pocl" / "kcache"


def unusable(folder: Path) -> str | None:
    """Why ``folder`` cannot be made or written to; None when it can. Nothing is made."""
    nearest = next(place for place in (folder, *folder.parents) if place.exists())
    if not nearest.is_dir():
        return f"{folder} cannot be made, since {nearest} is not a folder"
    return None if os.access(nearest, os.W_OK | os.X_OK) else f"{nearest} cannot be written to"


def prepare_cache() -> None:
    """Give PoCL a temporary folder where it could not write to its own; a user's choice is left alone."""
    if os.environ.get(VARIABLE) or unusable(cache_folder()) is None:
        return
    folder = Path(tempfile.gettempdir()) / f"kernel-dispatcher-pocl-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return  # then PoCL has no device, and the probe says why
    if status.st_uid == os.geteuid() and not status.st_mode & 0o022:
        os.environ[VARIABLE] = str(folder)


def discard_damaged(folder: Path) -> None:
    """Remove the programs in PoCL's cache that have a file which was cut short."""
    for program in folder.glob("*/*"):
        with contextlib.suppress(OSError):  # another process may remove it meanwhile
            damaged = [file for file in program.rglob("*") if not _whole(file)]
            if damaged:
                logger.info("%s is damaged; its program will be compiled again", damaged[0])
                shutil.rmtree(program, ignore_errors=True)


def _whole(file: Path) -> bool:
    if file.suffix == ".so":
        return _whole_library(file)
    return file.suffix != ".bc" or _whole_bitcode(file)


def _whole_library(file: Path) -> bool:
    """Whether a 64-bit ELF file reaches to the end of its table of sections, which linkers put last."""
    with file.open("rb") as content:
        head = content.read(64)
    if len(head) < 64 or head[:4] != b"\x7fELF":
        return False
    if head[4] != 2:  # a 32-bit file has another layout
        return True
    start, entry, count = (int.from_bytes(head[a:b], sys.byteorder) for a, b in ((40, 48), (58, 60), (60, 62)))
    return start + entry * count <= file.stat().st_size


def _whole_bitcode(file: Path) -> bool:
    """Whether an LLVM bitcode file ends where its last block does.

    After the magic number come blocks: a word, the length of the rest in words, and the rest.
    """
    size, place = file.stat().st_size, 4
    with file.open("rb") as content:
        if content.read(4) != b"BC\xc0\xde":
            return size > 4  # wrapped, or of another kind
        while place < size:
            content.seek(place + 4)
            place += 8 + 4 * int.from_bytes(content.read(4), "little")
    return place == size and size > 4


def import_pyopencl() -> None:
    """Import PyOpenCL without its caches, which save nothing here; if it is imported already it stays as it is."""
    if "pyopencl" in sys.modules:
        return
    before = os.environ.get(PYOPENCL_VARIABLE)
    os.environ[PYOPENCL_VARIABLE] = "1"  # it is read once, while PyOpenCL is imported
    try:
        importlib.import_module("pyopencl")
    finally:
        if before is None:
            del os.environ[PYOPENCL_VARIABLE]
        else:
            os.environ[PYOPENCL_VARIABLE] = before
