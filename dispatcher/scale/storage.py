"""Arrays in files, larger than memory: .npy files and Zarr folders, read and written by batch items."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dispatcher.errors import InputError, install
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
    try:
        if path.suffix == ".npy":
            return np.load(path, mmap_mode="r", allow_pickle=False)
        return _zarr().open_array(str(path), mode="r")
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{str(path)!r} cannot be read: {' '.join(str(error).split())}") from error


def make_array(path: Path, shape: tuple[int, ...], dtype: str, chunk: int) -> None:
    """Make an array of zeros, in chunks of ``chunk`` batch items."""
    if path.suffix == ".npy":
        np.lib.format.open_memmap(path, "w+", dtype, shape).flush()
    else:
        _zarr().open_array(str(path), mode="w", shape=shape, chunks=(chunk, *shape[1:]), dtype=dtype)


def write_items(path: Path, first: int, items: np.ndarray) -> None:
    """Put batch items into an array that is there; they are in the file when this returns."""
    last = first + len(items)
    if path.suffix == ".npy":
        array = np.lib.format.open_memmap(path, "r+")
        array[first:last] = items
        array.flush()
    else:
        _zarr().open_array(str(path), mode="r+")[first:last] = items


def batch_chunk(array: Any) -> int:
    """Batch items that lie in one piece of a file: 1 where any number does."""
    return int(array.chunks[0]) if hasattr(array, "chunks") else 1


def _zarr() -> Any:
    try:
        import zarr
    except ImportError as error:
        raise InputError(f"Zarr arrays need the extra scale: {install('scale')}") from error
    return zarr
