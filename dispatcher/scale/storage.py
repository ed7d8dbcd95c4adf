"""Arrays in files, larger than memory: .npy files and Zarr folders, read and written by batch items."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from dispatcher.errors import InputError, install
from dispatcher.problem.commandline import read_array
from dispatcher.problem.messages import brief

SUFFIXES = (".npy", ".zarr")


def check_path(option: str, text: str) -> Path:
    """The path that an option names.

    Raises:
        InputError: it is neither a .npy file's nor a Zarr folder's.
    """
    path = Path(text).absolute()
    if path.suffix not in SUFFIXES:
        raise InputError(f"{option} is {brief(text)}; expected a path that ends in {' or '.join(SUFFIXES)}")
    return path


def open_array(path: Path) -> Any:
    """An array that is there, read where it is indexed.

    Raises:
        InputError: it cannot be read.
    """
    if path.suffix == ".npy":
        return read_array(repr(str(path)), path)
    try:
        return _zarr().open_array(str(path), mode="r")
    except (OSError, ValueError, KeyError) as error:
        reason = "No such file or directory" if not path.exists() else " ".join(str(error).split())
        raise InputError(f"{str(path)!r} cannot be read: {reason}; expected the folder of a Zarr array") from error


def read_items(path: Path, first: int, last: int, into: np.ndarray | None = None) -> np.ndarray:
    """Batch items of an array, as a C-contiguous array.

    Args:
        into: what an earlier call for as many items returned, and nobody needs any more: fresh memory takes as long as
            half of the reading.

    Raises:
        OSError: they are not in the file any more, for one.
    """
    array = open_array(path)
    if not (isinstance(array, np.memmap) and array.flags.c_contiguous):
        return np.ascontiguousarray(array[first:last])
    items = np.empty((last - first, *array.shape[1:]), array.dtype) if into is None else into
    with path.open("rb") as file:  # sooner there than page by page
        file.seek(array.offset + first * array[0].nbytes)
        if file.readinto(items.view(np.uint8).data) != items.nbytes:
            raise OSError(f"{str(path)!r} has become shorter")
    return items


def make_array(path: Path, shape: tuple[int, ...], dtype: str, chunk: int) -> None:
    """Make an array of zeros, in chunks of ``chunk`` batch items; a Zarr array is not compressed.

    Raises:
        OSError: it cannot be made; there is not enough room for it, for one.
    """
    if path.suffix == ".npy":
        np.lib.format.open_memmap(path, "w+", dtype, shape).flush()
        if hasattr(os, "posix_fallocate"):  # now is the time to learn that the disk is full; writes are faster, too
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    else:
        zarr, how = _zarr(), {"shape": shape, "chunks": (chunk, *shape[1:]), "dtype": dtype}
        if hasattr(zarr, "create_array"):  # zeros are written too, since negative ones count as such
            zarr.create_array(str(path), compressors=None, config={"write_empty_chunks": True}, **how)
        else:
            zarr.open_array(str(path), mode="w", compressor=None, **how)


def write_items(path: Path, first: int, items: np.ndarray) -> None:
    """Put batch items, C-contiguous ones, into an array that is there; they are in the file when this returns.

    Raises:
        OSError: the disk is full, for one.
    """
    if path.suffix == ".npy":
        start = open_array(path).offset + first * items[0].nbytes
        with path.open("r+b") as file:  # a full disk would be the end of a process that writes to mapped memory
            file.seek(start)
            file.write(items.view(np.uint8).data)
    else:
        _zarr().open_array(str(path), mode="r+")[first : first + len(items)] = items


def batch_chunk(array: Any) -> int:
    """Batch items that lie in one piece of a file: 1 where any number does."""
    return int(array.chunks[0]) if hasattr(array, "chunks") else 1


def _zarr() -> Any:
    try:
        import zarr
    except ImportError as error:
        raise InputError(f"Zarr arrays need the extra scale: {install('scale')}") from error
    return zarr
