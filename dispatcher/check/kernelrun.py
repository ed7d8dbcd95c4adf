"""Running a user's kernel: the child process in which :mod:`dispatcher.check.judging` has that done."""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dispatcher import registry
from dispatcher.check.comparison import poisoned
from dispatcher.check.trial import find_again
from dispatcher.check.verifying import checksums
from dispatcher.device.childprocess import Report
from dispatcher.errors import BuildError, DeviceError, DispatcherError, InputError, KernelError, first_line
from dispatcher.interface import MARGIN, KernelHost, LoadedKernel
from dispatcher.problem.userkernel import UserKernel

#: Bytes of results of repeated launches that are kept for the comparison, where they differ from the first.
KEPT_RESULTS = 1 << 30
#: The margins' value in repeated launches, so that it shows when a kernel writes the first launch's there.
OTHER_MARGIN = 0x7F
#: Where a result is left: that of a set of inputs, by number, or of a repeated launch.
OUTPUT_FILE = "result-{}.npy"
_REPEATED = "repeated-{}"


def child(report: Report, folder: str) -> None:
    """What the child process does: build the kernel, run it on each set of inputs, time it, and report."""
    _dump_no_core()
    try:
        _try_out(report, Path(folder))
    except BuildError as error:
        report(_failure("BuildError", error, error.log))
    except MemoryError as error:
        report(_failure("memory", error))
    except DispatcherError as error:
        kinds = (InputError, DeviceError, KernelError)
        report(_failure(next(kind.__name__ for kind in kinds if isinstance(error, kind)), error))
    except Exception as error:
        report(_failure(type(error).__name__, error))


def _dump_no_core() -> None:
    """A crash is a verdict here; nobody wants a core file of it."""
    try:
        import resource  # POSIX only
    except ImportError:
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _failure(kind: str, error: BaseException, log: str = "") -> dict[str, Any]:
    return {"failure": {"kind": kind, "message": first_line(error), "log": log}}


def _try_out(report: Report, folder: Path) -> None:
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    report({"stage": "opening the device"})
    backend = registry.load(request["module"])
    device = find_again(backend, request["index"], request["name"])
    if not isinstance(backend, KernelHost):
        raise DeviceError(f"backend {device.backend} runs no kernels of its users")
    report({"stage": "building"})
    start = time.perf_counter()
    kernel = _step_aside(UserKernel.from_dict(request["kernel"]), folder)
    loaded = backend.load_kernel(kernel, device, folder)
    report({"build_s": time.perf_counter() - start})

    runs = _Runs(loaded, kernel, folder, request)
    after = []
    for number, kind in enumerate(request["kinds"]):
        report({"stage": f"running on inputs {kind!r}"})
        runs.place(number, MARGIN)
        loaded.launch(runs.numbers)
        after.append(runs.look(MARGIN))
        np.save(folder / OUTPUT_FILE.format(number), runs.result)
        if number == 0:
            first = {**after[0], "crc": zlib.crc32(runs.result.data)}
    report({"stage": f"timing on inputs {request['kinds'][0]!r}"})
    runs.place(0, OTHER_MARGIN)
    report({**runs.repeat(first), "after": after, "stage": "ending"})


def _step_aside(kernel: UserKernel, folder: Path) -> UserKernel:
    """Go to an empty folder, since some compilers look for included files in the current one first; returns the kernel
    with build options that mean there what they meant here."""
    here, empty = os.getcwd(), folder / "empty"
    empty.mkdir()
    os.chdir(empty)
    return kernel.seen_from(here, folder)


class _Runs:
    """Runs of a kernel on sets of inputs that lie in a folder."""

    def __init__(self, loaded: LoadedKernel, kernel: UserKernel, folder: Path, request: Mapping[str, Any]) -> None:
        self.loaded, self.kernel, self.folder, self.request = loaded, kernel, folder, request
        self.numbers: Mapping[str, int | float] = request["numbers"]
        self.output = next(name for name, kind in kernel.parameters if kind == "output")
        self.result = np.empty(request["output_shape"], kernel.dtype)
        self.inputs: dict[str, np.ndarray] = {}

    def place(self, number: int, margin: int) -> None:
        """Put a set of inputs and a poisoned output on the device."""
        names = [name for name, kind in self.kernel.parameters if kind == "input"]
        self.inputs = {name: np.load(self.folder / f"{name}-{number}.npy", mmap_mode="r") for name in names}
        for name, array in self.inputs.items():
            self.loaded.place(name, array, margin)
        self.loaded.place(self.output, poisoned(self.result.shape, self.kernel.dtype), margin)

    def look(self, margin: int) -> dict[str, Any]:
        """Fetch the result, and what a run has done to the inputs and to the memory beside each tensor."""
        beside = self.fetch(self.output, self.result, margin)
        sums: dict[str, int] = {}
        for name, like in self.inputs.items():
            array = np.empty(like.shape, like.dtype)
            beside += self.fetch(name, array, margin)
            sums.update(checksums({name: array}))
        return {"checksums": sums, "beside": beside}

    def fetch(self, name: str, array: np.ndarray, margin: int) -> list[str]:
        """Fetch a tensor; returns what was written beside it."""
        margins = self.loaded.fetch(name, array)
        strays = (_stray(name, found, margin, side) for found, side in zip(margins, (-1, 1), strict=True))
        return [stray for stray in strays if stray]

    def repeat(self, first: Mapping[str, Any]) -> dict[str, Any]:
        """Launch again and again, each time into a poisoned output, take the times, and look at what each launch did.

        Args:
            first: what :meth:`look` said of the first launch on these inputs, and the ``crc`` of its result.

        Returns:
            ``times_s`` and ``kernel_s``, seconds of each timed launch on the host's clock and on the device's; and
            ``repeated``: None where all launches did what the first did, else what they did, with the names of
            ``results`` that differ from the first's.
        """
        times: list[float] = []
        kernel_times: list[float] = []
        beside: list[str] = []
        results: dict[int, str] = {}
        warmup, most = self.request["warmup"], max(1, KEPT_RESULTS // max(1, self.result.nbytes))
        end = time.perf_counter() + self.request["timing_s"]
        for number in range(warmup + self.request["repeats"]):
            begin = time.perf_counter()
            self.loaded.poison(self.output)
            start = time.perf_counter()
            on_device = self.loaded.launch(self.numbers)
            taken = time.perf_counter() - start
            found = self.fetch(self.output, self.result, OTHER_MARGIN)
            beside = beside or found
            crc = zlib.crc32(self.result.data)
            if crc != first["crc"] and crc not in results and len(results) < most:
                results[crc] = _REPEATED.format(len(results))
                np.save(self.folder / OUTPUT_FILE.format(results[crc]), self.result)
            now = time.perf_counter()
            late = now + (now - begin) > end
            if number >= warmup or late:
                times.append(max(taken, 1e-9))
                kernel_times += [] if on_device is None else [max(on_device, 1e-9)]
            if late:
                break
        seen = self.look(OTHER_MARGIN)
        seen["beside"] = seen["beside"] or beside
        same = not results and all(seen[key] == first[key] for key in seen)
        repeated = None if same else {**seen, "results": list(results.values())}
        return {"times_s": times, "kernel_s": kernel_times, "repeated": repeated}


def _stray(name: str, found: bytes, margin: int, side: int) -> str:
    """What was written beside a tensor: before it (-1) or after it (1); empty when nothing was."""
    touched = np.flatnonzero(np.frombuffer(found, np.uint8) != margin)
    if not touched.size:
        return ""
    nearest = int(touched[0]) if side > 0 else len(found) - 1 - int(touched[-1])
    where = "behind the end" if side > 0 else "in front"
    return f"it wrote beside {name}: {touched.size} bytes, the nearest {nearest} bytes {where} of it"
