"""Running a user's kernel: the child process in which :mod:`dispatcher.check.judging` has that done."""

from __future__ import annotations

import json
import os
import secrets
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dispatcher import registry
from dispatcher.check.inputs import varied
from dispatcher.check.trial import find_again
from dispatcher.check.verifying import checksums
from dispatcher.device.childprocess import Report
from dispatcher.errors import BuildError, DeviceError, DispatcherError, InputError, KernelError, first_line
from dispatcher.interface import MARGIN, Device, KernelHost, LoadedKernel
from dispatcher.problem.userkernel import UserKernel

#: Bytes of results of repeated launches that are kept for the comparison.
KEPT_RESULTS = 1 << 30
#: Seconds after which an incomplete result is looked at again.
PATIENCE_S = 0.2
#: The margins' value in repeated launches, so that it shows when a kernel writes the first launch's there.
OTHER_MARGIN = 0x7F
#: Where an input tensor lies, by name and number of its set.
INPUT_FILE = "tensor-{}-{}.npy"
#: Where a result is left: that of a set of inputs, by number, or of a repeated launch.
OUTPUT_FILE = "result-{}.npy"
_REPEATED = "repeated-{}"


class LateError(Exception):
    """A kernel works on when its launch should be over."""


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
    if not isinstance(backend, KernelHost):
        raise DeviceError(f"backend {backend.name} runs no kernels of its users")
    device = Device(**request["device"])
    if device.available:
        device = find_again(backend, device.index, device.name)
    report({"stage": "building"})
    start = time.perf_counter()
    kernel = _step_aside(UserKernel.from_dict(request["kernel"]), folder)
    if not device.available:
        report({"compiled": backend.check_kernel(kernel, device, folder)})
        return
    loaded = backend.load_kernel(kernel, device, folder)
    report({"build_s": time.perf_counter() - start})

    runs = _Runs(loaded, kernel, folder, request)
    after = []
    for number, kind in enumerate(request["kinds"]):
        report({"stage": f"running on inputs {kind!r}"})
        runs.place(runs.load(number), MARGIN)
        runs.launch()
        after.append(runs.look(MARGIN))
        np.save(folder / OUTPUT_FILE.format(number), runs.result)
        if number == 0:
            first = zlib.crc32(runs.result.data)
    report({"stage": f"timing on inputs {request['kinds'][0]!r}"})
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
        self.inputs: Mapping[str, np.ndarray] = {}
        self.margins = (b"", b"")
        self.patience_s = PATIENCE_S

    def load(self, number: int) -> dict[str, np.ndarray]:
        """A set of inputs, as it lies in the folder."""
        names = [name for name, kind in self.kernel.parameters if kind == "input"]
        return {name: np.load(self.folder / INPUT_FILE.format(name, number), mmap_mode="r") for name in names}

    def place(self, inputs: Mapping[str, np.ndarray], margin: int) -> None:
        """Put inputs and a poisoned output on the device."""
        self.inputs = inputs
        for name, array in {**inputs, self.output: self.result}.items():
            self.loaded.place(name, array, margin)
        self.loaded.poison(self.output)

    def launch(self) -> tuple[float, float | None]:
        """Launch, and fetch the result at once; returns the seconds on the host's clock and on the device's."""
        start = time.perf_counter()
        on_device = self.loaded.launch(self.numbers)
        taken = time.perf_counter() - start
        self.margins = self.loaded.fetch(self.output, self.result)
        return max(taken, 1e-9), None if on_device is None else max(on_device, 1e-9)

    def look(self, margin: int) -> dict[str, Any]:
        """What the launch has done: the ``checksums`` of its inputs, what it wrote ``beside`` each tensor, and how many
        elements of its result are ``unwritten``.

        Raises:
            LateError: it went on writing its result after its end.
        """
        beside = _strays(self.output, self.margins, margin)
        sums: dict[str, int] = {}
        for name, like in self.inputs.items():
            array = np.empty(like.shape, like.dtype)
            beside += _strays(name, self.loaded.fetch(name, array), margin)
            sums.update(checksums({name: array}))
        unwritten = _unwritten(self.result)
        if unwritten and self.patience_s:
            time.sleep(self.patience_s)
            self.patience_s = 0.0
            later = np.empty_like(self.result)
            self.loaded.fetch(self.output, later)
            if _unwritten(later) < unwritten:
                raise LateError(f"it went on writing {self.output} after its end")
        return {"checksums": sums, "beside": beside, "unwritten": unwritten}

    def repeat(self, first: int) -> dict[str, Any]:
        """Launch again and again, on new inputs and into a poisoned output, and take the times.

        The timed launches have inputs that no launch had before, so that it is of no use to keep results. Before and
        after them comes a launch on inputs that differ from earlier ones in a few elements only, so that it shows who
        knows inputs again by a few of them; and at last one on those of the first launch. Which of these results, or
        which batch items of them, are compared with the reference is drawn after each launch.

        Args:
            first: checksum of the first launch's result.

        Returns:
            ``times_s`` and ``kernel_s``, seconds of each timed launch on the host's clock and on the device's; and
            ``repeated``, launches to be checked: what :meth:`look` says, the steps by which
            :func:`dispatcher.check.inputs.varied` makes their ``inputs``, the name of the ``result``, which begins with
            batch item ``start``, and whether it was ``recalled``: is that of an earlier launch on other inputs.
        """
        warmup, repeats, share, keep = (self.request[name] for name in ("warmup", "repeats", "share", "keep"))
        keep = min(keep, max(1, KEPT_RESULTS // max(1, share * self.result[:1].nbytes)))
        last = warmup + repeats + 1
        steps: list[tuple[str, int]] = []
        times: list[tuple[float, float | None]] = []
        kept: dict[int, dict[str, Any]] = {}
        results = {first}
        base = self.load(0)
        end = time.perf_counter() + self.request["timing_s"]
        for number in range(last + 2):
            begin = time.perf_counter()
            if number in (0, last):
                steps = [*steps, ("near", secrets.randbits(64))]
            else:
                steps = [("new", secrets.randbits(64))] if number < last else []
            self.place(varied(base, steps), OTHER_MARGIN)
            taken = self.launch()
            seen = self.look(OTHER_MARGIN)
            crc = zlib.crc32(self.result.data)
            faulty = seen["beside"] or seen["unwritten"]
            now = time.perf_counter()
            late = now + (now - begin) > end
            if warmup < number < last or (late and not times):
                times.append(taken)
            # Each has the same chance of being kept; what is wrong for sure is, and so is the last where it differs.
            certain = faulty or (not steps and crc != first)
            slot = keep if certain else number if number < keep else secrets.randbelow(number + 1)
            if certain or (steps and slot < keep):
                count = share if steps else len(self.result)
                start = secrets.randbelow(len(self.result) - count + 1)
                name = _REPEATED.format(slot)
                np.save(self.folder / OUTPUT_FILE.format(name), self.result[start : start + count])
                recalled = bool(steps) and crc in results
                kept[slot] = {**seen, "inputs": steps, "result": name, "start": start, "recalled": recalled}
            results.add(crc)
            if late or faulty:
                break
        return {
            "times_s": [host for host, _ in times],
            "kernel_s": [device for _, device in times if device is not None],
            "repeated": list(kept.values()),
        }


def _unwritten(result: np.ndarray) -> int:
    """How many elements are the NaN that was there before, bit for bit."""
    bits = result.view(f"u{result.itemsize}")
    return int(np.count_nonzero(bits == np.iinfo(bits.dtype).max))


def _strays(name: str, margins: tuple[bytes, bytes], margin: int) -> list[str]:
    """What was written beside a tensor."""
    strays = (_stray(name, found, margin, side) for found, side in zip(margins, (-1, 1), strict=True))
    return [stray for stray in strays if stray]


def _stray(name: str, found: bytes, margin: int, side: int) -> str:
    """What was written beside a tensor: before it (-1) or after it (1); empty when nothing was."""
    touched = np.flatnonzero(np.frombuffer(found, np.uint8) != margin)
    if not touched.size:
        return ""
    nearest = int(touched[0]) if side > 0 else len(found) - 1 - int(touched[-1])
    where = "behind the end" if side > 0 else "in front"
    return f"it wrote beside {name}: {touched.size} bytes, the nearest {nearest} bytes {where} of it"
