"""Files that a user names: reading one, and keeping results out of those that are read."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from dispatcher.errors import InputError


class NotRegularError(Exception):
    """The path is that of a directory, or of something else that is no regular file; the message says which."""


class TooLargeError(Exception):
    """The file has more bytes than its reader wants: ``size``."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.size = size


def read_regular(path: str | os.PathLike[str], most: int) -> bytes:
    """The bytes of a regular file. Opening a pipe would wait for somebody to write, and a device may never end.

    Args:
        path: where it is.
        most: bytes that it may have.

    Raises:
        NotRegularError: it is not a regular file.
        TooLargeError: it has more than ``most`` bytes.
        OSError: it does not exist or cannot be read.
        ValueError: no file can have that name.
    """
    info = os.stat(path)
    if not stat.S_ISREG(info.st_mode):
        raise NotRegularError("a directory" if stat.S_ISDIR(info.st_mode) else "not a regular file")
    if info.st_size > most:
        raise TooLargeError(info.st_size)
    with open(path, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:  # it grew, or does not say how long it is
        raise TooLargeError(len(content))
    return content


def check_apart(what: str, target: str | os.PathLike[str], read: Iterable[str | os.PathLike[str]]) -> None:
    """Check that a result does not take the place of a file that is read, under whatever name, or of its folder.

    Args:
        what: the option that names the result, for messages.
        target: where the result goes.
        read: what is read; a path where nothing is counts for nothing.

    Raises:
        InputError: it does.
    """
    place = Path(os.path.realpath(target))
    for source in read:
        if os.path.exists(source) and (
            place in Path(os.path.realpath(source)).parents or (place.exists() and os.path.samefile(source, place))
        ):
            where = f"{what} {os.fspath(target)!r} would replace {os.fspath(source)!r}, which is read"
            raise InputError(f"{where}; give the output a place of its own")
