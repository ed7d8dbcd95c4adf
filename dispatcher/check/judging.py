"""Verifying and timing a user's own kernel for a problem, by the rules that our own devices are held to.

The kernel is a function that has the problem's parameters in their order: tensors as pointers, ``size_t`` and
``double`` by value. It runs in a process of its own, within a time limit, so that a crash, a hang or a wrong answer is
a verdict like any other. What it computes is compared in this process, whose memory it cannot reach.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dispatcher import registry
from dispatcher.check.comparison import Comparison, Progress, part, verify_result
from dispatcher.check.inputs import random_tensors, varied
from dispatcher.check.kernelfile import Sizes, as_texts, read_kernel
from dispatcher.check.kernelrun import INPUT_FILE, OUTPUT_FILE
from dispatcher.check.verifying import SMALL_FLOPS, changed_inputs, check_inputs, checksums, comparison_dict, sets_for
from dispatcher.device import selftest
from dispatcher.device.childprocess import LONGEST_S, Ended, run_child, unwound_by_signals
from dispatcher.device.selection import backend_devices, candidates, first_usable, parse_request, skipped_list
from dispatcher.device.splitting import batch_parameter, batched_tensors, with_batch
from dispatcher.errors import BuildError, DeviceError, InputError, KernelError
from dispatcher.interface import Device, Tensors, device_dict
from dispatcher.problem.arguments import bind_numbers
from dispatcher.problem.loader import ProblemLike, load_problem
from dispatcher.problem.messages import picked
from dispatcher.problem.operator import Operator, check_c_type, operator_dict
from dispatcher.problem.shown import Drawn
from dispatcher.problem.userkernel import UserKernel
from dispatcher.problem.values import count_value, seconds_value, seed_value

TIMEOUT_S = 60.0
ENTRY = "solution"
#: Timing ends early where it would take more than this share of the time limit.
TIMING_SHARE = 0.5
#: Lines of a compiler's log that a report shows.
LOG_LINES = 30

Outcome = Literal["passed", "wrong", "crashed", "timed out", "out of memory", "build failed", "unsupported"]


# ---- what comes of it --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Check:
    """A kernel on one set of inputs.

    Attributes:
        inputs: the kind of random numbers, one of :data:`dispatcher.check.inputs.INPUT_SETS`.
        launch: ``first``, or ``repeated`` where a launch for the times did something else than the first; of several,
            the worst.
        passed: whether the result is right and nothing else was touched.
        reason: what is wrong, in one line; empty when passed.
        comparison: the figures of the comparison with the reference; None where there is no result.
    """

    inputs: str
    launch: Literal["first", "repeated"]
    passed: bool
    reason: str
    comparison: Comparison | None


@dataclass(frozen=True, repr=False)
class Judgement(Drawn):
    """What came of a user's kernel.

    Attributes:
        operator: what it was to compute.
        kernel: what was run.
        case: the case that the sizes come from.
        seed: seed of the input tensors.
        device: where it ran.
        skipped: (device or backend, reason) of each device that was preferred and passed over.
        outcome: ``passed``; ``wrong``: a wrong result, a changed input or a write beside a tensor; ``crashed``: it
            killed its process, or the driver refused or lost it; ``timed out``; ``out of memory``; ``build failed``;
            ``unsupported``: one of several devices cannot run it.
        reason: one line; empty when passed.
        log: what the compiler said, where it refused the kernel.
        checks: one entry for each set of inputs that it ran on.
        build_s: seconds to build it.
        times_s: seconds of each timed launch on the host's clock, from the launch to the end of the kernel, with
            all tensors on the device; empty unless passed.
        kernel_s: the same on the device's clock; empty where that does not tell.
    """

    operator: Operator
    kernel: UserKernel
    case: str | None
    seed: int
    device: Device
    skipped: tuple[tuple[str, str], ...]
    outcome: Outcome
    reason: str = ""
    log: str = ""
    checks: tuple[Check, ...] = ()
    build_s: float | None = None
    times_s: tuple[float, ...] = ()
    kernel_s: tuple[float, ...] = ()

    def _headline(self) -> str:
        what = f"{self.kernel.entry} in {self.kernel.file} for {self.operator.problem.name}"
        return f"of {what} on {self.device.id}: {self.outcome}"

    def _facts(self) -> Mapping[str, object]:
        checks = [
            f"{each.inputs}: {'passed' if each.passed else 'wrong'}"
            + (f", {each.comparison.severity:.2g} of what is allowed" if each.comparison else "")
            for each in self.checks
        ]
        return {"reason": self.reason, "case": self.case, "checks": checks, "median, seconds": self.median_s}

    @property
    def passed(self) -> bool:
        """Whether it is right, on all sets of inputs."""
        return self.outcome == "passed"

    @property
    def exit_code(self) -> int:
        """What the command line ends with: 0 passed, 4 build failed, else 1; 0 too where a device cannot run it."""
        return {"passed": 0, "unsupported": 0, "build failed": BuildError.exit_code}.get(self.outcome, 1)

    @property
    def median_s(self) -> float | None:
        """Median of the device's times, or of the host's where there are none; None unless passed."""
        times = self.kernel_s or self.times_s
        return statistics.median(times) if times else None

    @property
    def gflops(self) -> float | None:
        """Billions of floating-point operations of the convolutions per second, at the median time."""
        return None if self.median_s is None else self.operator.flops / self.median_s / 1e9

    def as_dict(self) -> dict[str, Any]:
        """Plain lists, dicts, texts and numbers; non-finite numbers stay as they are."""
        kernel = self.kernel
        return {
            **operator_dict(self.operator),
            **picked(self, "case", "seed"),
            "device": device_dict(self.device),
            "skipped": skipped_list(self.skipped),
            "kernel": kernel.file,
            **picked(kernel, "entry", "global_size", "local_size", "build_options"),
            **picked(self, "outcome", "reason", "log"),
            "checks": [{**vars(each), "comparison": comparison_dict(each.comparison)} for each in self.checks],
            **picked(self, "build_s", "times_s", "kernel_s", "median_s", "gflops"),
        }


# ---- in this process ---------------------------------------------------------------------------------------
def verify_kernel(
    problem: ProblemLike,
    kernel: str | Path,
    *,
    entry: str = ENTRY,
    device: str | Device | None = "all",
    case: str | None = "sample",
    global_size: Sizes | None = None,
    local_size: Sizes | None = None,
    build_options: Sequence[str] = (),
    timeout_s: float = TIMEOUT_S,
    inputs: str | Sequence[str] | None = None,
    seed: int = 0,
    dtype: str | None = None,
    precision: str = "fp32",
    repeats: int = 10,
    warmup: int = 2,
    progress: Progress | None = None,
    **arguments: Any,
) -> list[Judgement]:
    """Run a user's own kernel, compare every element of its result with the reference, and time it.

    The function has the problem's parameters in their order. In an OpenCL file it is a ``__kernel``, whose ``size_t``
    are ``ulong``, and ``global_size`` says over how many work items it is launched. In a CUDA file it is a function of
    the host that takes device pointers, or, with ``global_size`` and ``local_size``, a ``__global__`` kernel.

    Args:
        problem: see :func:`dispatcher.compile`, as for ``precision`` and ``dtype``.
        kernel: path of a ``.cl`` or ``.cu`` file.
        entry: name of the function.
        device: ``all`` for every usable device that such files are for, or a device request as for
            :func:`dispatcher.compile`; None and ``auto`` stand for the best of them.
        case: the case that the sizes come from; None when ``arguments`` give them all.
        global_size: work items (threads) along x, y and z: up to three numbers or integer expressions in the
            problem's sizes, ``output_batch``, ``output_width`` and the like, ``output_elements``, or a text with
            commas between them. Rounded up to a multiple of ``local_size``.
        local_size: work items of a group (threads of a block), likewise.
        build_options: for the compiler, as they are, except that relative folders in ``-I`` count from here.
        timeout_s: seconds that building and running may take together, at most :data:`LONGEST_S`.
        inputs: sets of inputs, as for :func:`dispatcher.verify`: the kernel runs on each, and is timed on the first.
        seed: seed of the input tensors, from 0 to 2**64 - 1.
        repeats: timed launches, 1 or more; fewer where they would take too much of the time limit.
        warmup: launches before them.
        progress: told the fraction done of the comparison.
        **arguments: sizes and scalars that hold instead of the case's.

    Returns:
        A verdict for each device; that the kernel does not build is one too.

    Raises:
        InputError: an argument is wrong, the file cannot be read, or it has no such function with these parameters.
        DeviceError: no device of the request can run such files.
        KernelError: something failed that is not the kernel's fault.
    """
    seed = seed_value("seed", seed)
    timeout_s = seconds_value("timeout_s", timeout_s, LONGEST_S)
    repeats, warmup = count_value("repeats", repeats, 1), count_value("warmup", warmup, 0)
    wanted = check_inputs(inputs if inputs is None or isinstance(inputs, str) else as_texts("inputs", inputs))
    loaded = load_problem(problem)
    check_c_type(dtype, "a kernel of your own")
    operator = bind_numbers(loaded, arguments, "verify", case=case, dtype=dtype, precision=precision)
    source, backend = read_kernel(operator, kernel, entry, global_size, local_size, build_options)
    judgements: list[Judgement] = []
    unusable: DeviceError | None = None
    try:
        places = _places(backend, device, source.file)
    except DeviceError as error:
        first, *others = backend_devices(backend)
        if any(each.available for each in (first, *others)):
            raise
        unusable, places = error, [(first, ())]  # on which it is built alone
    for place, skipped in places:
        with unwound_by_signals(), tempfile.TemporaryDirectory(prefix="kernel-dispatcher-") as folder:
            kinds = sets_for(operator, wanted) if place.available else ()
            run = _ChildRun(operator, source, place, Path(folder), kinds, seed, usable=place.available)
            run.prepare(timeout_s, repeats, warmup)
            try:
                verdict = run.judge(run.run(timeout_s), timeout_s, progress)
            except DeviceError as error:
                if unusable is not None:
                    raise DeviceError(f"{unusable}; {error}") from error
                if place is places[-1][0] and all(each.outcome == "unsupported" for each in judgements):
                    raise
                verdict = {"outcome": "unsupported", "reason": str(error)}
        judgements.append(Judgement(operator, source, case, seed, place, skipped, **verdict))
    return judgements


Places = list[tuple[Device, tuple[tuple[str, str], ...]]]


def _places(backend: str, device: str | Device | None, file: str) -> Places:
    """The devices of ``backend`` that a request means, each with those passed over for it.

    Raises:
        DeviceError: there is none.
    """
    if device == "all":
        first_usable(parse_request(backend))  # says why, where there is none
        return [(found, ()) for found in backend_devices(backend) if found.available]
    request = parse_request(device)
    if request.terms == (("auto", ""),):
        request = parse_request(backend)
    skipped: list[tuple[str, str]] = []
    for label, found in candidates(request):
        if isinstance(found, Device) and found.backend == backend:
            return [(found, tuple(skipped))]
        other = f"it cannot run {Path(file).suffix} files"
        skipped.append((label, found if isinstance(found, str) else other))
    reasons = "; ".join(f"{label}: {reason}" for label, reason in skipped)
    raise DeviceError(
        f"{request.origin} {request.text}: no device can run {file}: {reasons}; name a device of {backend}"
    )


@dataclass
class _ChildRun:
    """One run of a kernel in a process of its own, and what that leaves in a folder."""

    operator: Operator
    kernel: UserKernel
    device: Device
    folder: Path
    kinds: Sequence[str]
    seed: int
    tensors: list[dict[str, np.ndarray]] = field(default_factory=list)
    usable: bool = True

    def prepare(self, timeout_s: float, repeats: int, warmup: int) -> None:
        """Write down what the process has to do.

        Raises:
            KernelError: the folder for temporary files is too small.
        """
        operator = self.operator
        try:
            for number, kind in enumerate(self.kinds):
                self.tensors.append(random_tensors(operator, self.seed, kind=kind))
                for name, array in self.tensors[-1].items():
                    np.save(self.folder / INPUT_FILE.format(name, number), array)
            share, keep = _to_check(operator, warmup + repeats + 2)
            request = {
                "module": registry.BACKENDS[self.device.backend],
                "device": picked(self.device, "backend", "index", "name", "kind", "available"),
                "kernel": asdict(self.kernel),
                "kinds": list(self.kinds),
                "numbers": {**operator.sizes, **operator.scalars},
                "output_shape": operator.output_shape,
                "timing_s": TIMING_SHARE * timeout_s,
                "repeats": repeats,
                "warmup": warmup,
                "share": share,
                "keep": keep,
            }
            (self.folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        except OSError as error:
            raise KernelError(
                f"the tensors cannot be written to {self.folder.parent}: {error.strerror}; "
                "set TMPDIR to a folder with more room"
            ) from error

    def run(self, timeout_s: float) -> Ended:
        """Run the process to its end."""
        # What compilers and drivers leave in the folder for temporary files goes away with it.
        environment = {selftest.VARIABLE: "off", "TMPDIR": str(self.folder)}
        try:
            return run_child(
                "dispatcher.check.kernelrun:child", [str(self.folder)], timeout_s, environment, self.folder
            )
        except OSError as error:
            raise KernelError(f"no process to run {self.kernel.file} in: {error}") from error

    def judge(self, ended: Ended, timeout_s: float, progress: Progress | None) -> dict[str, Any]:
        """The verdict, as fields of a :class:`Judgement`.

        Raises:
            DispatcherError: what failed was not the kernel.
        """
        reports: dict[str, Any] = {}
        for report in ended.reports:
            reports.update(report)
        stage = reports.get("stage", "")
        failure = reports.get("failure")
        if failure is not None:
            return self.failed(failure, stage)
        if "compiled" in reports:
            file, built = self.kernel.file, reports["compiled"]
            raise DeviceError(f"{file} compiles {built} and has the problem's parameters, but it could not be run")
        if ended.code != 0 or "after" not in reports:
            how = f"no end within {timeout_s:g} s" if ended.code is None else _ending(ended)
            if stage in ("", "opening the device") or not self.usable:
                raise DeviceError(f"{self.device.id} ({self.device.name}) could not be opened: {how}")
            outcome = "timed out" if ended.code is None else "crashed"
            return {"outcome": outcome, "reason": f"{how}, while {stage}"}
        return self.compared(reports, progress)

    def failed(self, failure: Mapping[str, str], stage: str) -> dict[str, Any]:
        """The verdict on an error that the process has caught."""
        message, log = failure["message"], failure["log"]
        match failure["kind"]:
            case "BuildError":
                return {"outcome": "build failed", "reason": message, "log": trimmed(log)}
            case "memory":
                return {"outcome": "out of memory", "reason": f"{message}, while {stage}"}
            case "KernelError":
                return {"outcome": "crashed", "reason": f"{message}, while {stage}"}
            case "LateError":
                return {"outcome": "wrong", "reason": f"{message}, while {stage}"}
            case "InputError":
                raise InputError(message)
            case _ if not self.usable:
                raise DeviceError(f"it was not compiled either: {message}")
            case "DeviceError":
                raise DeviceError(message)
            case _:
                raise KernelError(f"{self.device.id} failed while {stage}: {message}")

    def compared(self, reports: Mapping[str, Any], progress: Progress | None) -> dict[str, Any]:
        """The verdict on the results that the process has left."""
        checks = []
        count = len(self.kinds) + len(reports["repeated"])
        for number, (kind, tensors) in enumerate(zip(self.kinds, self.tensors, strict=True)):
            result = np.load(self.folder / OUTPUT_FILE.format(number), mmap_mode="r")
            told = None if progress is None else part(progress, number, count)
            comparison = verify_result(self.operator, tensors, result, told)
            wrong = _faults(checksums(tensors), reports["after"][number], comparison)
            checks.append(Check(kind, "first", not wrong, wrong, comparison))
        for number, launch in enumerate(reports["repeated"], len(self.kinds)):
            result = np.load(self.folder / OUTPUT_FILE.format(launch["result"]), mmap_mode="r")
            tensors = varied(self.tensors[0], launch["inputs"])
            told = None if progress is None else part(progress, number, count)
            comparison = verify_result(*_items(self.operator, tensors, launch["start"], len(result)), result, told)
            wrong = _faults(checksums(tensors), launch, comparison)
            if wrong:
                wrong = f"a repeated launch did something else than the first: {wrong}"
                checks.append(Check(self.kinds[0], "repeated", False, wrong, comparison))
                break
        build_s = reports["build_s"]
        failed = next((check for check in checks if not check.passed), None)
        if failed is not None:
            because = f"on inputs {failed.inputs!r}: {failed.reason}"
            return {"outcome": "wrong", "reason": because, "checks": tuple(checks), "build_s": build_s}
        times = {name: tuple(reports[name]) for name in ("times_s", "kernel_s")}
        return {"outcome": "passed", "checks": tuple(checks), "build_s": build_s, **times}


def _to_check(operator: Operator, launches: int) -> tuple[int, int]:
    """How much of the launches on other inputs is compared with the reference: as much as takes the time of one whole
    result, or of three where the batch cannot be split into as many parts, or not long.

    Returns:
        Batch items of each result, and the number of results.
    """
    batch = operator.output_shape[0]
    parts = batch if batch_parameter(operator)[0] else 1
    most = max(parts, 3, SMALL_FLOPS * parts // max(1, operator.flops))
    share = min(parts, max(1, most // launches))
    return batch // parts * share, most // share


def _items(operator: Operator, tensors: Tensors, start: int, count: int) -> tuple[Operator, Tensors]:
    """What computes ``count`` batch items from ``start`` on."""
    if count == operator.output_shape[0]:
        return operator, tensors
    parameter, _ = batch_parameter(operator)
    batched = batched_tensors(operator, parameter)
    cut = {name: array[start : start + count] if name in batched else array for name, array in tensors.items()}
    return with_batch(operator, parameter, count), cut


def _faults(before: Mapping[str, int], seen: Mapping[str, Any], found: Comparison) -> str:
    """What is wrong after a launch, as one reason: empty when nothing is.

    Args:
        before: checksums of the inputs.
        seen: what the process saw of it.
        found: what the comparison of its result, or of some batch items of it, found.
    """
    reasons = [changed_inputs(before, seen["checksums"]), *seen["beside"]]
    if seen.get("recalled") and not found.passed:
        reasons.append("its result is that of an earlier launch on other inputs")
    if "recalled" in seen and seen["unwritten"]:
        reasons.append(f"{seen['unwritten']} elements of its result are what was there before")
    return "; ".join(filter(None, (*reasons, found.reason)))


def _ending(ended: Ended) -> str:
    """How a process ended that was not ended by us, in words."""
    if ended.code == 0:
        return f"the process ended before it was done{ended.last_line}"
    if not ended.signal:
        return f"the process ended with exit code {ended.code}{ended.last_line}"
    hint = ", which systems send when memory runs out" if ended.signal == "SIGKILL" else ""
    return f"it crashed with {ended.signal}{hint}{ended.last_line}"


def trimmed(log: str) -> str:
    """The first lines of a compiler's log, and how many more there are."""
    lines = log.splitlines()
    more = [f"... and {len(lines) - LOG_LINES} more lines"] if len(lines) > LOG_LINES else []
    return "\n".join(lines[:LOG_LINES] + more)
