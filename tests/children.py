"""What the tests of child processes share: calling a child's function here, and processes that heed signals."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dispatcher.device.childprocess import Ended


def run_here(
    function: str,
    arguments: Sequence[str],
    limit_s: float,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> Ended:
    """What :func:`dispatcher.device.childprocess.run_child` does, here: for functions that neither end nor crash."""
    reports: list[Any] = []
    module, name = function.split(":")
    here = os.getcwd()
    try:
        getattr(importlib.import_module(module), name)(
            lambda value: reports.append(json.loads(json.dumps(value))), *arguments
        )
    finally:
        os.chdir(here)
    return Ended(0, "", tuple(reports), "")


def heeding(number: int, words: Sequence[str]) -> list[str]:
    """A command line of Python that a signal ends as usual, even where whoever runs the tests ignores it."""
    usual = "default_int_handler" if number == 2 else "SIG_DFL"
    start = (
        "import os, signal, sys; "
        f"number = {int(number)}; signal.signal(number, signal.{usual}) if number != 9 else None; "
        "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    )
    return [sys.executable, "-c", start, *words]


def soon(happens: Callable[[], bool]) -> bool:
    """Whether something happens within fifteen seconds."""
    end = time.monotonic() + 15
    while not happens() and time.monotonic() < end:
        time.sleep(0.02)
    return happens()
