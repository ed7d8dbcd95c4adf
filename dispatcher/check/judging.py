"""Verifying and timing a user's own kernel for a problem, by the rules that our own devices are held to.

The kernel is a function that has the problem's parameters in their order: tensors as pointers, ``size_t`` and
``double`` by value. It runs in a process of its own, within a time limit, so that a crash, a hang or a wrong answer is
a verdict like any other. What it computes is compared in this process, whose memory it cannot reach.
"""

from __future__ import annotations

import json
import math
import numbers
import os
import re
import stat
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dispatcher import registry
from dispatcher.call.compiled import ProblemLike
from dispatcher.call.explanation import device_dict, operator_dict, skipped_list
from dispatcher.check.comparison import Comparison, poisoned, verify_results
from dispatcher.check.inputs import check_seed, random_tensors
from dispatcher.check.userkernel import MARGIN, OTHER_MARGIN, KernelHost, Kind, LoadedKernel, UserKernel
from dispatcher.check.verifying import changed_inputs, check_inputs, checksums, comparison_dict, sets_for
from dispatcher.device import selftest
from dispatcher.device.childprocess import LONGEST_S, Ended, Report, run_child, unwound_by_signals
from dispatcher.device.selection import backend_devices, candidates, first_usable, parse_request
from dispatcher.errors import BuildError, DeviceError, DispatcherError, InputError, KernelError
from dispatcher.interface import Device
from dispatcher.problem.arguments import bind_numbers, brief
from dispatcher.problem.expressions import Expression
from dispatcher.problem.loader import load_problem
from dispatcher.problem.model import Problem
from dispatcher.problem.operator import Operator

TIMEOUT_S = 60.0
ENTRY = "solution"
#: Timing ends early where it would take more than this share of the time limit.
TIMING_SHARE = 0.5
#: Lines of a compiler's log that a report shows.
LOG_LINES = 30
#: Bytes of the largest kernel file: far more than anybody writes.
LARGEST_FILE = 1 << 24
#: Bytes of results of repeated launches that are kept for the comparison, where they differ from the first.
KEPT_RESULTS = 1 << 30
#: Names that size expressions may use for the extents of the result besides the problem's own sizes.
OUTPUT_SIZES = ("output_batch", "output_channels", "output_depth", "output_height", "output_width")
OUTPUT_ELEMENTS = "output_elements"

Outcome = Literal["passed", "wrong", "crashed", "timed out", "out of memory", "build failed", "unsupported"]
#: A size as an expression, a number, or several of these: for x, y and z.
Sizes = str | int | Sequence[str | int]

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_OUTPUT = "result-{}.npy"
_REPEATED = "repeated-{}"


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


@dataclass(frozen=True)
class Judgement:
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

    def __repr__(self) -> str:
        what = f"{self.kernel.entry} in {self.kernel.file} for {self.operator.problem.name}"
        return f"<Judgement of {what} on {self.device.id}: {self.outcome}>"

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
        return {
            **operator_dict(self.operator),
            "case": self.case,
            "seed": self.seed,
            "device": device_dict(self.device),
            "skipped": skipped_list(self.skipped),
            "kernel": self.kernel.file,
            "entry": self.kernel.entry,
            "global_size": None if self.kernel.global_size is None else list(self.kernel.global_size),
            "local_size": None if self.kernel.local_size is None else list(self.kernel.local_size),
            "build_options": list(self.kernel.build_options),
            "outcome": self.outcome,
            "reason": self.reason,
            "log": self.log,
            "checks": [
                {
                    "inputs": check.inputs,
                    "launch": check.launch,
                    "passed": check.passed,
                    "reason": check.reason,
                    "comparison": comparison_dict(check.comparison),
                }
                for check in self.checks
            ],
            "build_s": self.build_s,
            "times_s": list(self.times_s),
            "kernel_s": list(self.kernel_s),
            "median_s": self.median_s,
            "gflops": self.gflops,
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
    progress: Callable[[float], None] | None = None,
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
            problem's sizes, :data:`OUTPUT_SIZES` and ``output_elements``, or a text with commas between them.
            Rounded up to a multiple of ``local_size``.
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
    seed = check_seed(seed)
    timeout_s = _check_timeout(timeout_s)
    repeats, warmup = _check_count("repeats", repeats, 1), _check_count("warmup", warmup, 0)
    wanted = check_inputs(inputs if inputs is None or isinstance(inputs, str) else _texts("inputs", inputs))
    loaded = load_problem(problem)
    operator = bind_numbers(loaded, arguments, "verify", case=case, dtype=dtype, precision=precision)
    source, backend = _read_kernel(operator, kernel, entry, global_size, local_size, build_options)
    judgements: list[Judgement] = []
    places = _places(backend, device, source.file)
    for place, skipped in places:
        with unwound_by_signals(), tempfile.TemporaryDirectory(prefix="kernel-dispatcher-") as folder:
            trial = _Trial(operator, source, place, Path(folder), sets_for(operator, wanted), seed)
            trial.prepare(timeout_s, repeats, warmup)
            try:
                verdict = trial.judge(trial.run(timeout_s), timeout_s, progress)
            except DeviceError as error:
                if place is places[-1][0] and all(each.outcome == "unsupported" for each in judgements):
                    raise
                verdict = {"outcome": "unsupported", "reason": str(error)}
        judgements.append(Judgement(operator, source, case, seed, place, skipped, **verdict))
    return judgements


def _check_timeout(timeout_s: Any) -> float:
    """The seconds as a float.

    Raises:
        InputError: it is not a number, or out of range.
    """
    real = isinstance(timeout_s, numbers.Real) and not isinstance(timeout_s, bool)
    if not real or not 0 < timeout_s <= LONGEST_S:
        raise InputError(
            f"timeout_s is {brief(timeout_s)}; expected a number of seconds above 0 and up to {LONGEST_S:.0f}"
        )
    return float(timeout_s)


def _check_count(name: str, count: Any, least: int) -> int:
    """The count as an int.

    Raises:
        InputError: it is not a whole number, or below ``least``.
    """
    whole = isinstance(count, numbers.Integral) and not isinstance(count, bool)
    if not whole or count < least:
        raise InputError(f"{name} is {brief(count)}; expected a whole number of {least} or more")
    return int(count)


def _texts(name: str, values: Any) -> tuple[str, ...]:
    """Several texts as a tuple.

    Raises:
        InputError: it is something else, such as one text.
    """
    found = tuple(values) if isinstance(values, Iterable) and not isinstance(values, str | bytes) else None
    if found is None or not all(isinstance(value, str) for value in found):
        raise InputError(f"{name} is {brief(values)}; expected a list of texts")
    return found


def _read_kernel(
    operator: Operator,
    path: str | Path,
    entry: str,
    global_size: Sizes | None,
    local_size: Sizes | None,
    build_options: Sequence[str],
) -> tuple[UserKernel, str]:
    """The kernel, and the backend that its file is for.

    Raises:
        InputError: an argument is wrong, or the file cannot be read.
    """
    files = _files(path)
    file = Path(path)
    text = _read_text(file)
    if not isinstance(entry, str) or not _IDENTIFIER.fullmatch(entry):
        raise InputError(f"entry is {brief(entry)}; expected the name of a function in {_printable(file)}")
    options = _texts("build_options", build_options)
    for option in options:
        if "\0" in option or not _encodes(option):
            raise InputError(
                f"build option {option!r} has a NUL, or bytes that are no text here; expected text in UTF-8"
            )
    names = size_names(operator)
    local = None if local_size is None else _evaluate("local_size", local_size, names)
    whole = None if global_size is None else _evaluate("global_size", global_size, names)
    if whole is None and not files.host_functions:
        raise InputError(
            f"global_size is missing, which {file.suffix} files need; expected up to three sizes, such as "
            f"{OUTPUT_ELEMENTS}"
        )
    if local is None and whole is not None and files.groups_needed:
        raise InputError(
            f"global_size is given without local_size, which {file.suffix} files need; give both"
        )
    if local is not None and whole is None:
        raise InputError("local_size is given without global_size; give both")
    if local is not None and whole is not None:
        if len(local) != len(whole):
            raise InputError(
                f"local_size is {local_size!r} and global_size {global_size!r}; expected as many sizes in both"
            )
        whole = tuple(-(-size // step) * step for size, step in zip(whole, local, strict=True))
    kernel = UserKernel(
        _printable(file), text, str(file.resolve().parent), entry, _parameters(operator.problem), operator.dtype, whole,
        local, options,
    )  # fmt: skip
    return kernel, files.backend


def _read_text(file: Path) -> str:
    """What is in a kernel file, without a byte order mark.

    Raises:
        InputError: it cannot be read, or is no text that compilers take.
    """
    name = f"kernel {_printable(file)!r}"
    try:
        # Opening a pipe would wait for somebody to write, and a device may never end.
        regular = stat.S_ISREG(file.stat().st_mode)
        content = b""
        if regular:
            with file.open("rb") as stream:
                content = stream.read(LARGEST_FILE + 1)
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror}") from error
    except ValueError as error:  # a NUL in the path, or letters that the file system's encoding lacks
        raise InputError(f"{name} cannot be read: no file can have this name: {error}") from error
    if not regular:
        raise InputError(f"{name} is not a regular file; expected one with the source of a kernel")
    if len(content) > LARGEST_FILE:
        raise InputError(f"{name} has more than {LARGEST_FILE} bytes; expected the source of a kernel")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{name} cannot be read: it is not a text in UTF-8") from error
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise InputError(f"{name} has a NUL in line {line}, where compilers would stop reading; take it out")
    return text


def _encodes(text: str) -> bool:
    """Whether a text is one: what the system gave us as bytes may be none."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _printable(file: Path) -> str:
    """A path as text, in which bytes that are none, and what moves a terminal's cursor, are escaped."""
    path = str(file)
    text = path if _encodes(path) else os.fsencode(path).decode("ascii", "backslashreplace")
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def _parameters(problem: Problem) -> tuple[tuple[str, Kind], ...]:
    """Name and kind of each parameter of the problem."""
    kinds: dict[str, Kind] = {"size_t": "size", "double": "double"}
    return tuple(
        (parameter.name, kinds.get(parameter.type, "input" if parameter.const else "output"))
        for parameter in problem.parameters
    )


def size_names(operator: Operator) -> dict[str, int]:
    """What size expressions may use: the extents of the result, and the problem's own sizes."""
    shape = operator.output_shape
    return {
        **dict(zip(OUTPUT_SIZES, shape, strict=True)),
        OUTPUT_ELEMENTS: math.prod(shape),
        **operator.sizes,
    }


def _evaluate(argument: str, sizes: Sizes, names: Mapping[str, int]) -> tuple[int, ...]:
    """One to three sizes.

    Raises:
        InputError: they are not that, or one is below 1.
    """
    parts: Sequence[Any]
    if isinstance(sizes, str):
        parts = sizes.split(",")
    else:
        parts = sizes if isinstance(sizes, Sequence) and not isinstance(sizes, bytes) else [sizes]
    if not 1 <= len(parts) <= 3:
        raise InputError(f"{argument} is {brief(sizes)}; expected one to three sizes")
    values = []
    for part in parts:
        if isinstance(part, bool) or not isinstance(part, numbers.Integral | str):
            raise InputError(f"{argument} is {brief(sizes)}; expected numbers or expressions")
        try:
            expression = Expression.parse(part if isinstance(part, str) else int(part))
            unknown = sorted(expression.names - set(names))
            if unknown:
                raise InputError(f"there is no size {unknown[0]!r}; there are {', '.join(names)}")
            value = expression.evaluate(names)
        except InputError as error:
            raise InputError(f"{argument} {part!r}: {error}") from error
        if value < 1:
            raise InputError(f"{argument} {part!r} is {value}; expected 1 or more")
        values.append(value)
    return tuple(values)


def _files(kernel: str | Path) -> registry.KernelFiles:
    """How files such as this one are run.

    Raises:
        InputError: it is not the path of a kernel file.
    """
    if not isinstance(kernel, str | Path):
        raise InputError(
            f"kernel is {brief(kernel)}; expected the path of a {' or '.join(registry.KERNEL_FILES)} file"
        )
    files = registry.KERNEL_FILES.get(Path(kernel).suffix.lower())
    if files is None:
        suffixes = " or ".join(registry.KERNEL_FILES)
        raise InputError(f"kernel is {str(kernel)!r}; expected a file that ends in {suffixes}")
    return files


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
    for candidate in candidates(request):
        found, reason = candidate.device, candidate.reason
        if found is not None and found.backend == backend:
            return [(found, tuple(skipped))]
        if found is not None:
            reason = f"it cannot run {Path(file).suffix} files"
        skipped.append((candidate.label, reason))
    reasons = "; ".join(f"{label}: {reason}" for label, reason in skipped)
    raise DeviceError(
        f"{request.origin} {request.text}: no device can run {file}: {reasons}; name a device of {backend}"
    )


@dataclass
class _Trial:
    """One run of a kernel in a process of its own, and what that leaves in a folder."""

    operator: Operator
    kernel: UserKernel
    device: Device
    folder: Path
    kinds: Sequence[str]
    seed: int
    tensors: list[dict[str, np.ndarray]] = field(default_factory=list)

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
                    np.save(self.folder / f"{name}-{number}.npy", array)
            request = {
                "module": registry.BACKENDS[self.device.backend],
                "index": self.device.index,
                "name": self.device.name,
                "kernel": asdict(self.kernel),
                "kinds": list(self.kinds),
                "numbers": {**operator.sizes, **operator.scalars},
                "output_shape": operator.output_shape,
                "timing_s": TIMING_SHARE * timeout_s,
                "repeats": repeats,
                "warmup": warmup,
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
                "dispatcher.check.judging:child", [str(self.folder)], timeout_s, environment, self.folder
            )
        except OSError as error:
            raise KernelError(f"no process to run {self.kernel.file} in: {error}") from error

    def judge(
        self, ended: Ended, timeout_s: float, progress: Callable[[float], None] | None
    ) -> dict[str, Any]:
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
        if ended.code != 0 or "after" not in reports:
            how = f"no end within {timeout_s:g} s" if ended.code is None else _ending(ended)
            if stage in ("", "opening the device"):
                raise DeviceError(f"{self.device.id} ({self.device.name}) could not be opened: {how}")
            if ended.code is None:
                return {"outcome": "timed out", "reason": f"{how}, while {stage}"}
            return {"outcome": "crashed", "reason": f"{how}, while {stage}"}
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
            case "InputError":
                raise InputError(message)
            case "DeviceError":
                raise DeviceError(message)
            case _:
                raise KernelError(f"{self.device.id} failed while {stage}: {message}")

    def compared(
        self, reports: Mapping[str, Any], progress: Callable[[float], None] | None
    ) -> dict[str, Any]:
        """The verdict on the results that the process has left."""
        checks = []
        for number, (kind, tensors) in enumerate(zip(self.kinds, self.tensors, strict=True)):
            repeated = reports["repeated"] if number == 0 else None
            ways = [str(number)] if repeated is None else [str(number), *repeated["results"]]
            results = [np.load(self.folder / _OUTPUT.format(way), mmap_mode="r") for way in ways]
            told = None if progress is None else _part(progress, number, len(self.kinds))
            comparison, *others = verify_results(self.operator, tensors, results, told)
            before = checksums(tensors)
            wrong = _faults(before, reports["after"][number], comparison)
            checks.append(Check(kind, "first", not wrong, wrong, comparison))
            if repeated is not None:
                worst = max(others, key=lambda each: (not each.passed, each.severity), default=comparison)
                wrong = _faults(before, repeated, worst)
                if wrong:
                    wrong = f"a repeated launch did something else than the first: {wrong}"
                checks.append(Check(kind, "repeated", not wrong, wrong, worst))
        build_s = reports["build_s"]
        failed = next((check for check in checks if not check.passed), None)
        if failed is not None:
            because = f"on inputs {failed.inputs!r}: {failed.reason}"
            return {"outcome": "wrong", "reason": because, "checks": tuple(checks), "build_s": build_s}
        return {
            "outcome": "passed",
            "checks": tuple(checks),
            "build_s": build_s,
            "times_s": tuple(reports["times_s"]),
            "kernel_s": tuple(reports["kernel_s"]),
        }


def _faults(before: Mapping[str, int], seen: Mapping[str, Any], found: Comparison) -> str:
    """What is wrong after a run, as one reason: empty when nothing is.

    Args:
        before: checksums of the inputs.
        seen: see :meth:`_Runs.look`.
        found: what the comparison of its result found.
    """
    return "; ".join(filter(None, (changed_inputs(before, seen["checksums"]), *seen["beside"], found.reason)))


def _ending(ended: Ended) -> str:
    """How a process ended that was not ended by us, in words."""
    if ended.code == 0:
        return f"the process ended before it was done{ended.last_line}"
    if not ended.signal:
        return f"the process ended with exit code {ended.code}{ended.last_line}"
    hint = ", which systems send when memory runs out" if ended.signal == "SIGKILL" else ""
    return f"it crashed with {ended.signal}{hint}{ended.last_line}"


def _part(progress: Callable[[float], None], number: int, count: int) -> Callable[[float], None]:
    return lambda done: progress((number + done) / count)


def trimmed(log: str) -> str:
    """The first lines of a compiler's log, and how many more there are."""
    lines = log.splitlines()
    more = [f"... and {len(lines) - LOG_LINES} more lines"] if len(lines) > LOG_LINES else []
    return "\n".join(lines[:LOG_LINES] + more)


# ---- in the child process ----------------------------------------------------------------------------------
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
    message = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return {"failure": {"kind": kind, "message": message, "log": log}}


def _try_out(report: Report, folder: Path) -> None:
    request = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    report({"stage": "opening the device"})
    backend = registry.load(request["module"])
    device = selftest.find_again(backend, request["index"], request["name"])
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
        np.save(folder / _OUTPUT.format(number), runs.result)
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

    def __init__(
        self, loaded: LoadedKernel, kernel: UserKernel, folder: Path, request: Mapping[str, Any]
    ) -> None:
        self.loaded, self.kernel, self.folder, self.request = loaded, kernel, folder, request
        self.numbers: Mapping[str, int | float] = request["numbers"]
        self.output = next(name for name, kind in kernel.parameters if kind == "output")
        self.result = np.empty(request["output_shape"], kernel.dtype)
        self.inputs: dict[str, np.ndarray] = {}

    def place(self, number: int, margin: int) -> None:
        """Put a set of inputs and a poisoned output on the device."""
        self.inputs = {
            name: np.load(self.folder / f"{name}-{number}.npy", mmap_mode="r")
            for name, kind in self.kernel.parameters
            if kind == "input"
        }
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
                np.save(self.folder / _OUTPUT.format(results[crc]), self.result)
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
        return {
            "times_s": times,
            "kernel_s": kernel_times,
            "repeated": None if same else {**seen, "results": list(results.values())},
        }


def _stray(name: str, found: bytes, margin: int, side: int) -> str:
    """What was written beside a tensor: before it (-1) or behind it (1); empty when nothing was."""
    touched = np.flatnonzero(np.frombuffer(found, np.uint8) != margin)
    if not touched.size:
        return ""
    nearest = int(touched[0]) if side > 0 else len(found) - 1 - int(touched[-1])
    where = "behind the end" if side > 0 else "in front"
    return f"it wrote beside {name}: {touched.size} bytes, the nearest {nearest} bytes {where} of it"
