"""A cache folder for PoCL, which lists no device at all where it cannot make one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

VARIABLE = "POCL_CACHE_DIR"


def cache_folder() -> Path:
    """Where PoCL keeps compiled kernels."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path(os.environ.get("HOME", "/tmp")) / ".cache") / "pocl" / "kcache"


def unusable(folder: Path) -> str | None:
    """Why files cannot be made in ``folder``, which is made if need be; None when they can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return None
    except OSError as error:
        return f"{folder} cannot be written to: {error.strerror}"


def prepare_cache() -> None:
    """Give PoCL a temporary folder where it could not write to its own; a user's choice is left alone."""
    if os.environ.get(VARIABLE) or unusable(cache_folder()) is None:
        return
    folder = Path(tempfile.gettempdir()) / f"kernel-dispatcher-pocl-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if status.st_uid == os.geteuid() and not status.st_mode & 0o022:
            os.environ[VARIABLE] = str(folder)
    except OSError:
        return  # then PoCL has no device, and the probe says why
