"""A trace of what calls do, in the format of Chrome's tracing (chrome://tracing, Perfetto, speedscope)."""

from __future__ import annotations

import contextlib
import contextvars
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dispatcher.errors import InputError
from dispatcher.interface import Timings

_current: contextvars.ContextVar[Trace | None] = contextvars.ContextVar("trace", default=None)


class Trace:
    """Spans of time, each on the line of a device or of the host."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._lines: dict[str, int] = {"dispatcher": 0}
        self._events: list[dict[str, Any]] = []

    def add(
        self,
        name: str,
        start: float,
        duration_s: float,
        line: str = "dispatcher",
        detail: Mapping[str, str | int | float] | None = None,
    ) -> None:
        """Record one span.

        Args:
            name: what happened.
            start: on ``time.perf_counter``.
            duration_s: how long it took.
            line: whose line it is drawn on.
            detail: what else to show.
        """
        self._events.append(
            {
                "name": name,
                "ph": "X",
                "ts": round(1e6 * (start - self._begin), 3),
                "dur": round(1e6 * max(0.0, duration_s), 3),
                "pid": os.getpid(),
                "tid": self._lines.setdefault(line, len(self._lines)),
                "args": dict(detail or {}),
            }
        )

    def add_call(self, device: str, start: float, timings: Timings) -> None:
        """Record a call's upload, kernels and download, one after another on the device's line.

        Their lengths are measured, each on its own clock; where they begin is deduced from their order.
        """
        if timings.parts:
            for place, begin, part in timings.parts:
                self.add_call(place or device, begin, part)
            return
        self.add("upload", start, timings.upload_s, device)
        at = start + timings.upload_s
        for name, duration_s in timings.launches:
            self.add(name, at, duration_s, device)
            at += duration_s
        self.add("download", max(at, start + timings.upload_s + timings.kernel_s), timings.download_s, device)

    def as_dict(self) -> dict[str, Any]:
        """The trace, ready for JSON."""
        names = [
            {"name": "thread_name", "ph": "M", "pid": os.getpid(), "tid": number, "args": {"name": line}}
            for line, number in self._lines.items()
        ]
        return {"traceEvents": [*names, *self._events], "displayTimeUnit": "ms"}

    def write(self, path: str | Path) -> None:
        """Write it to a JSON file.

        Raises:
            InputError: the file cannot be written.
        """
        try:
            Path(path).write_text(json.dumps(self.as_dict()), encoding="utf-8")
        except OSError as error:
            raise InputError(f"the trace {str(path)!r} cannot be written: {error.strerror}") from error


def current() -> Trace | None:
    """The trace that this thread records into."""
    return _current.get()


@contextlib.contextmanager
def span(name: str, **detail: str | int | float) -> Iterator[None]:
    """A span of the current trace, if there is one."""
    trace, start = current(), time.perf_counter()
    try:
        yield
    finally:
        if trace is not None:
            trace.add(name, start, time.perf_counter() - start, detail=detail)


@contextlib.contextmanager
def recording(path: str | Path | None) -> Iterator[Trace | None]:
    """Record what this thread does inside, and write it to ``path`` at the end, also after a failure.

    Without a path nothing is recorded.

    Raises:
        InputError: the file cannot be written.
    """
    if path is None:
        yield None
        return
    trace = Trace()
    token = _current.set(trace)
    try:
        yield trace
    finally:
        _current.reset(token)
        trace.write(path)
