"""Files that can be made again: compiled kernels and the like, in the user's cache folder.

A cache never fails its user: an entry that is missing, cut short, damaged or unreadable is no entry, and a folder
that cannot be written to keeps nothing, which is said once, with what it costs. Entries appear whole or not at all, so
that any number of processes may use one cache at once and any of them may be killed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_DIGEST_BYTES = hashlib.sha256().digest_size
#: How entries are called while they are written, and after how long one can no longer be in the making.
_PARTIAL = "partial-"
_STALE_S = 3600.0

#: What would give this process a cache.
REMEDY = "set XDG_CACHE_HOME to a folder that can be written to"
_told: set[str] = set()


class NoHomeError(OSError):
    """Nothing says where the user's files are."""


def cache_root() -> Path:
    """``$XDG_CACHE_HOME/kernel-dispatcher``, or ``~/.cache/kernel-dispatcher``.

    Raises:
        NoHomeError: neither is an absolute path.
    """
    base, home = os.environ.get("XDG_CACHE_HOME", ""), os.environ.get("HOME")
    if not os.path.isabs(base) and home != "":  # which would mean the root folder
        base = os.path.join(os.path.expanduser("~"), ".cache")  # "~" stays where there is no home
    if not os.path.isabs(base):
        given = "HOME is not set, and the system does not know this user" if home is None else f"HOME is {home!r}"
        raise NoHomeError(errno.ENOENT, f"there is no home folder for a cache ({given})")
    return Path(base) / "kernel-dispatcher"


def nothing_kept(error: OSError) -> str:
    """Why there is no cache, and what that costs."""
    cost = "so devices are tested and kernels compiled anew in every process"
    if isinstance(error, NoHomeError):
        return f"{error.strerror}, {cost}"
    return f"{cache_root()} cannot be written to ({error.strerror}), {cost}"


def _read(path: Path) -> bytes | None:
    """The entry in a file, or None when there is no intact one."""
    try:
        stored = path.read_bytes()
    except OSError:
        return None
    digest, data = stored[:_DIGEST_BYTES], stored[_DIGEST_BYTES:]
    if hashlib.sha256(data).digest() != digest:
        logger.info("cache entry %s is damaged and will be made again", path)
        return None
    return data


class Turns:
    """Locks by key: while one thread makes the thing of a key, others that want the same one wait.

    Whoever holds the lock looks first whether the thing is there. One that failed to make it, or was interrupted, lets
    the next one try.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locks: weakref.WeakValueDictionary[Any, threading.Lock] = weakref.WeakValueDictionary()

    def __call__(self, key: Any) -> threading.Lock:
        """The lock of ``key``, to be used in a ``with`` statement; it lives as long as somebody holds it or waits."""
        with self._guard:
            return self._locks.setdefault(key, threading.Lock())


class FileCache:
    """Byte strings by key, in one folder that only its user may enter.

    Args:
        name: folder under :func:`cache_root`.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def folder(self) -> Path:
        """Where the entries lie; it exists once something was put there."""
        return cache_root() / self._name

    def _path(self, key: str) -> Path:
        return self.folder / hashlib.sha256(key.encode()).hexdigest()

    def get(self, key: str) -> bytes | None:
        """The entry of ``key``, or None when there is no intact one."""
        with contextlib.suppress(NoHomeError):
            return _read(self._path(key))
        return None

    def entries(self) -> Iterator[tuple[Path, bytes]]:
        """Every intact entry, with the file that it is in."""
        with contextlib.suppress(NoHomeError):
            for path in sorted(self.folder.glob("*")):
                if (data := _read(path)) is not None:
                    yield path, data

    def drop(self, key: str) -> None:
        """Keep nothing under ``key``."""
        with contextlib.suppress(OSError):
            self._path(key).unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Remove what processes that were killed while they wrote have left behind."""
        for partial in self.folder.glob(f"{_PARTIAL}*"):
            with contextlib.suppress(OSError):
                if time.time() - partial.stat().st_mtime > _STALE_S:
                    partial.unlink()

    def put(self, key: str, data: bytes) -> bool:
        """Keep ``data`` under ``key``; False where the folder does not allow it."""
        try:
            path = self._path(key)
            self.folder.mkdir(parents=True, exist_ok=True)
            for folder in (cache_root(), self.folder):
                folder.chmod(0o700)
            self._sweep()
            handle, temporary = tempfile.mkstemp(prefix=_PARTIAL, dir=self.folder)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(hashlib.sha256(data).digest() + data)
                os.replace(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        except OSError as error:
            text = f"{nothing_kept(error)}; {REMEDY}"
            logger.log(logging.INFO if text in _told else logging.WARNING, "%s", text)
            _told.add(text)
            return False
        return True
