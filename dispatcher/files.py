"""Reading files that a user names."""

from __future__ import annotations

import os
import stat


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
