"""Progress bars on stderr, where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Takes the fraction done.
Advance = Callable[[float], None]


@contextmanager
def progress(what: str, steps: int = 2) -> Iterator[Advance]:
    """A progress bar for what takes a while; gives a function that takes the fraction done.

    Nothing is drawn where stderr is not a terminal or there is only one step.
    """
    if steps < 2 or sys.stderr is None or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import Progress

    # No thread that redraws: it would disturb what is being timed.
    with Progress(console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task(what, total=1.0)
        bar.refresh()
        yield lambda done: bar.update(task, completed=done, refresh=True)


def part(advance: Advance, number: int, count: int) -> Callable[..., None]:
    """Turn the progress of one thing out of ``count``, the last argument that it is told, into that of all."""
    return lambda *told: advance((number + told[-1]) / count)
