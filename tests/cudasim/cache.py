"""The simulator's cache folder, and the one way things get into it."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

SOURCES = Path(__file__).resolve().parent


def cache_folder() -> Path:
    """Where built libraries, downloaded headers and wheels are kept.

    Returns:
        `$DISPATCHER_CUDA_SIM_CACHE`, or `kernel-dispatcher/cudasim` in the user's cache folder.
    """
    chosen = os.environ.get("DISPATCHER_CUDA_SIM_CACHE")
    if chosen:
        return Path(chosen).absolute()
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kernel-dispatcher" / "cudasim"


def content_hash(files: Iterable[Path], *texts: str) -> str:
    """A name for what is made from these files and texts; it changes when any of them does."""
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(f"{path.name}\0".encode())
        digest.update(path.read_bytes())
    for text in texts:
        digest.update(f"\0{text}".encode())
    return digest.hexdigest()[:24]


def cached_folder(kind: str, name: str, fill: Callable[[Path], None]) -> Path:
    """A folder in the cache, made on first use; several processes may ask for it at once.

    Args:
        kind: What it holds, such as "driver".
        name: Tells it from others of its kind; a content hash or a version.
        fill: Puts the files into an empty folder. What it leaves when it raises is thrown away.

    Returns:
        The complete folder. It is never seen half-made: it appears by one rename.
    """
    folder = cache_folder() / kind / name
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
    try:
        fill(partial)
        partial.chmod(0o755)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster, and made the same
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder
