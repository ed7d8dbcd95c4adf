"""Arrays in files, larger than memory: .npy files and Zarr folders, read and written by batch items."""

from __future__ import annotations

import errno
import math
import mmap
import os
import sys
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dispatcher.errors import InputError, install
from dispatcher.problem.commandline import read_array
from dispatcher.problem.messages import brief

SUFFIXES = (".npy", ".zarr")
#: Linux's MADV_POPULATE_READ, to which Python gives no name.
_POPULATE_READ = 22


def check_path(option: str, text: str) -> Path:
    """The path that an option names.

    Raises:
        InputError: it is neither a .npy file's nor a Zarr folder's.
    """
    path = Path(text).absolute()
    if path.suffix not in SUFFIXES:
        raise InputError(f"{option} is {brief(text)}; expected a path that ends in {' or '.join(SUFFIXES)}")
    return path


def open_array(path: Path, mode: str = "r") -> Any:
    """An array that is there, read where it is indexed; a Zarr is written to with ``mode="r+"``.

    Raises:
        InputError: it cannot be read.
    """
    if path.suffix == ".npy":
        return read_array(repr(str(path)), path)
    try:
        return _zarr().open_array(str(path), mode=mode)
    except (OSError, ValueError, KeyError) as error:
        reason = "No such file or directory" if not path.exists() else " ".join(str(error).split())
        raise InputError(f"{str(path)!r} cannot be read: {reason}; expected the folder of a Zarr array") from error


def read_items(path: Path, first: int, last: int) -> np.ndarray:
    """Batch items of an array, as a C-contiguous array: where they lie in a file one after another, mapped, read-only.

    Raises:
        OSError: they are not in the file any more, for one.
    """
    array = open_array(path)
    shape, place = (last - first, *array.shape[1:]), _place(path, array, first, last)
    nbytes = _bytes(shape, array.dtype)
    if place is None or not nbytes or not place[0].exists():
        return np.ascontiguousarray(array[first:last])
    file, begin = place
    ahead = begin % mmap.ALLOCATIONGRANULARITY
    with file.open("rb") as source:
        try:
            mapped = mmap.mmap(source.fileno(), ahead + nbytes, access=mmap.ACCESS_READ, offset=begin - ahead)
        except ValueError as error:
            raise OSError(f"{str(file)!r} has become shorter") from error
    try:  # here and now, while another chunk is computed; what cannot be read is an error instead of a signal
        mapped.madvise(_POPULATE_READ)
    except OSError as error:
        if error.errno != errno.EINVAL:  # an old system does not know it
            raise
    items: np.ndarray = np.ndarray(shape, array.dtype, mapped, ahead)
    return items


def _place(path: Path, array: Any, first: int, last: int) -> tuple[Path, int] | None:
    """The file in which batch items lie one after another as they do in memory, and the byte where they begin in it.

    None where they do not; one of a Zarr need not be there as long as it holds the fill value alone.
    """
    item = _bytes(array.shape[1:], array.dtype)
    if isinstance(array, np.memmap):
        return (path, array.offset + first * item) if array.flags.c_contiguous else None
    if not hasattr(array, "metadata"):  # version 2 of the library
        return None
    coded = array.compressors or array.filters or array.shards or array.order != "C"
    stored = array.serializer.to_dict() if array.serializer is not None else {}  # the second format has none
    coded = coded or stored.get("name", "bytes") != "bytes"
    swapped = stored.get("configuration", {}).get("endian", sys.byteorder) != sys.byteorder
    length, *rest = array.chunks
    piece = first // length
    if coded or swapped or tuple(rest) != array.shape[1:] or last > (piece + 1) * length:
        return None
    return path / array.metadata.encode_chunk_key((piece, *(0 for _ in rest))), (first - piece * length) * item


def _reserve(file: BinaryIO, nbytes: int) -> None:
    """Give a file its room on the disk: writes take half as long then."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, nbytes)
    else:
        file.truncate(nbytes)


def _bytes(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    return math.prod(shape) * dtype.itemsize


def make_array(path: Path, shape: tuple[int, ...], dtype: str, chunk: int) -> None:
    """Make an array of zeros, in chunks of ``chunk`` batch items; a Zarr array is not compressed.

    Raises:
        OSError: it cannot be made; there is not enough room for it, for one.
    """
    if path.suffix == ".npy":
        np.lib.format.open_memmap(path, "w+", dtype, shape).flush()
        with path.open("r+b") as file:  # now is the time to learn that the disk is full
            _reserve(file, path.stat().st_size)
    else:
        zarr, how = _zarr(), {"shape": shape, "chunks": (chunk, *shape[1:]), "dtype": dtype}
        if hasattr(zarr, "create_array"):  # zeros are written too, since negative ones count as such
            zarr.create_array(str(path), compressors=None, config={"write_empty_chunks": True}, **how)
        else:
            zarr.open_array(str(path), mode="w", compressor=None, **how)


def write_items(path: Path, first: int, items: np.ndarray) -> None:
    """Put batch items, C-contiguous ones, into an array of :func:`make_array`; they are in the file when this returns.

    Raises:
        OSError: the disk is full, for one.
    """
    array = open_array(path, "r+")
    place = _place(path, array, first, first + len(items))
    if place is None:
        array[first : first + len(items)] = items
        return
    file, begin = place
    new = not file.exists()  # a piece of a Zarr; it is the fill value, 0, where nothing is written
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w+b" if new else "r+b") as out:  # a full disk would be the end of a process with mapped memory
        if new:
            _reserve(out, _bytes(array.chunks, array.dtype))
        out.seek(begin)
        out.write(items.view(np.uint8).data)


def batch_chunk(array: Any) -> int:
    """Batch items that lie in one piece of a file: 1 where any number does."""
    return int(array.chunks[0]) if hasattr(array, "chunks") else 1


def _zarr() -> Any:
    try:
        import zarr
    except ImportError as error:
        raise InputError(f"Zarr arrays need the extra scale: {install('scale')}") from error
    return zarr
