"""The child process of ``compare_checkouts.py``: runs the ``dispatcher`` package that PYTHONPATH names.

It knows the public API only, so that it works with checkouts older and newer than itself. A line of JSON on stdin is a
request, a line of JSON on stdout its answer.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np

import dispatcher


def new_timings() -> Any:
    """What a call fills in; None with a package that has it elsewhere."""
    try:
        from dispatcher.interface import Timings
    except ImportError:
        return None
    return Timings()


class Child:
    """Holds one prepared call at a time, and its result's array."""

    def start(self) -> dict[str, Any]:
        """Say which package this is."""
        return {"package": os.path.realpath(dispatcher.__file__)}

    def devices(self) -> dict[str, Any]:
        """The devices that it sees, id to name."""
        return {device.id: device.name for device in dispatcher.devices() if device.available}

    def prepare(
        self, problem: str, device: str, numbers: dict[str, Any], source: str, files: dict[str, str]
    ) -> dict[str, Any]:
        """Compile a problem for a device, with all tensors but the input known beforehand, and run it once.

        Args:
            problem: a bundled problem's name, or the path of a problem file.
            device: the device's id.
            numbers: sizes and scalars.
            source: the name of the input.
            files: tensor to the .npy file that holds it.
        """
        tensors = {name: np.load(path) for name, path in files.items()}
        x = {source: tensors.pop(source)}
        start = time.perf_counter()
        compiled = dispatcher.compile(problem, device=device, **numbers, **tensors)
        self._call = compiled.prepare(**x)
        self._output = np.array(self._call())
        launches = compiled.explain().as_dict()["launches"]
        return {"setup_s": time.perf_counter() - start, "launches": launches}

    def run(self, file: str) -> dict[str, Any]:
        """Run once into an array of NaN, and write the result to a .npy file."""
        self._output.fill(np.nan)
        self._call(output=self._output)
        np.save(file, self._output)
        return {}

    def sample(self) -> dict[str, Any]:
        """Seconds of a warm call, and of the kernels of another one; 0 where they are not known."""
        self._call(output=self._output)
        start = time.perf_counter()
        self._call(output=self._output)
        wall_s = time.perf_counter() - start
        timings = new_timings()
        if timings is not None:
            self._call(output=self._output, timings=timings)
        return {"wall_s": wall_s, "kernel_s": 0.0 if timings is None else timings.kernel_s}


def main() -> None:
    """Answer until stdin ends."""
    child = Child()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a driver prints is no answer
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = getattr(child, request.pop("task"))(**request)
        except Exception as error:  # the parent reports it
            answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
