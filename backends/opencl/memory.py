"""Host memory for results: aligned blocks that come back to a pool when the last array over them is gone.

Touching a fresh block of tens of megabytes for the first time costs more than the kernels that fill it, so
results of repeated calls reuse blocks. A block serves one array (and its views) at a time.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading
from collections import defaultdict
from typing import Any

import numpy as np

ALIGNMENT = 4096
HUGE_PAGE = 2 << 20


def _whole(nbytes: int) -> int:
    """The size of a block for so many bytes: whole pages, at least one."""
    return -(-max(1, nbytes) // ALIGNMENT) * ALIGNMENT


def _fresh(size: int) -> _Block:
    """A new block of ``size`` bytes; a large one in huge pages, where the system has them.

    A gigabyte in pages of 4 KiB takes a quarter of a million page faults, more than a second.
    """
    if size < HUGE_PAGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        raw, alignment = np.empty(size + ALIGNMENT, np.uint8), ALIGNMENT
    else:
        pages = mmap.mmap(-1, size + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
        raw, alignment = np.frombuffer(pages, np.uint8), HUGE_PAGE
    start = -raw.ctypes.data % alignment
    return raw[start : start + size].view(_Block)


class _Block(np.ndarray):
    """All bytes of an aligned block; one with a pool goes back there when the array over it, and its views, are gone.

    A subclass, since NumPy lets an array keep the owner of a plain view alive in place of the view.
    """

    pool: HostPool | None = None

    def __del__(self) -> None:
        if self.pool is not None:
            self.pool.give_back(self.base)


class HostPool:
    """A pool of host blocks, bounded in what it keeps idle. Safe for several threads.

    Args:
        keep_bytes: most bytes of idle blocks to keep.
    """

    def __init__(self, keep_bytes: int) -> None:
        self._keep_bytes = keep_bytes
        self._idle: dict[int, list[_Block]] = defaultdict(list)
        self._idle_bytes = 0
        # Garbage collection can run anywhere, also inside this class, so the lock is reentrant.
        self._lock = threading.RLock()

    def ready(self, nbytes: int) -> bool:
        """Whether a block for so many bytes lies idle."""
        return bool(self._idle.get(_whole(nbytes)))

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        """A C-contiguous array of undefined contents whose memory starts on a page."""
        size = _whole(math.prod(shape) * dtype.itemsize)
        with self._lock:
            blocks = self._idle.get(size)
            memory = blocks.pop() if blocks else None
            if memory is not None:
                self._idle_bytes -= size
            if blocks == []:
                del self._idle[size]
        if memory is None:
            memory = _fresh(size)
        block = memory.view()
        block.pool = self
        array: np.ndarray = np.ndarray(shape, dtype, block)
        return array

    def give_back(self, memory: Any) -> None:
        """Take a block back, or let it go when enough lie idle."""
        with self._lock:
            if self._idle_bytes + memory.nbytes <= self._keep_bytes:
                self._idle_bytes += memory.nbytes  # first, so that an interruption never lets it fall short
                self._idle[memory.nbytes].append(memory)
