"""Where the worker threads of a CPU's runtime run while a call lasts.

Kernels of virtual machines may pack threads: one that is woken after a pause comes to the processor of the thread that
woke it, and waits there for milliseconds although another processor idles. A runtime that keeps a worker on one
processor does not help where the caller happens to be on that one.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

#: The threads of this process, where the system tells them.
TASKS = Path("/proc/self/task")
#: Workers that ended so many seconds ago, or later, are awake yet, or will be where they were.
AWAKE_S = 1e-3
#: With more of them, each of which costs some microseconds, nothing is done: large machines pack no threads.
MOST_WORKERS = 4


class Workers:
    """The worker threads of a runtime: those that start while :meth:`starting` lasts."""

    def __init__(self) -> None:
        self._threads: set[int] = set()
        self._lock = threading.Lock()
        self._ended = 0.0
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._threads.clear)

    @contextmanager
    def starting(self) -> Iterator[None]:
        """While the runtime starts workers. Threads of Python that start meanwhile are none."""
        before = _threads()
        yield
        self._threads.update(_threads() - before - {thread.native_id for thread in threading.enumerate()})

    @contextmanager
    def apart(self) -> Iterator[None]:
        """While workers compute for this thread: each is on a processor of its own, after a pause.

        One processor may be this thread's, where it sleeps meanwhile. Afterwards they may run where they might before.
        Where another thread's workers are being kept apart, and where there is not a worker for each processor, or for
        each but one, nothing is done.
        """
        mine = time.perf_counter() - self._ended > AWAKE_S and self._lock.acquire(blocking=False)
        before: Mapping[int, set[int]] = {}
        meanwhile: Mapping[int, set[int]] = {}
        try:
            if mine and 0 < len(self._threads) <= MOST_WORKERS:
                before, meanwhile = self._places()
            _restrict(meanwhile)
            yield
        finally:
            _restrict(before)
            self._ended = time.perf_counter()
            if mine:
                self._lock.release()

    def _places(self) -> tuple[Mapping[int, set[int]], Mapping[int, set[int]]]:
        """On which processors workers may run, and on which they are to, where that is something else."""
        try:
            masks = {thread: os.sched_getaffinity(thread) for thread in self._threads}
            processors = os.sched_getaffinity(0).union(*masks.values())
        except OSError:  # a worker has ended
            return {}, {}
        if len(processors) - len(masks) not in (0, 1):
            return {}, {}
        here = _libc().sched_getcpu()
        order = sorted(processors, key=lambda each: each == here)
        places = {thread: {place} for thread, place in zip(masks, order, strict=False) if masks[thread] != {place}}
        return {thread: masks[thread] for thread in places}, places


def _restrict(masks: Mapping[int, set[int]]) -> None:
    """Let threads run on those processors alone, unless one of the two is gone."""
    for thread, mask in masks.items():
        with suppress(OSError):
            os.sched_setaffinity(thread, mask)


def _threads() -> set[int]:
    return {int(each.name) for each in TASKS.iterdir()} if TASKS.is_dir() else set()


@cache
def _libc() -> ctypes.PyDLL:
    return ctypes.PyDLL(None)


@cache
def workers_of(platform: str) -> Workers:
    """The workers of the platform of that name."""
    return Workers()
