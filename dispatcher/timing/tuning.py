"""Finding the fastest options for an operator on a device: every candidate is verified before it is timed.

A backend that can be tuned has two more methods than :class:`dispatcher.interface.Backend` asks for: ``candidates``
(options worth measuring) and ``remember`` (use these from now on). Tuners made for GPUs drive single kernels that they
compile themselves; here an option also changes how the host packs weights, lays out scratch and cuts the work, so
that what has to be timed is a whole compiled operator.

A call's time is the host's, from arrays to arrays. On a GPU that records the time of its kernels it is that time
instead: copying arrays there and back takes longer than many an operator, and no option changes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dispatcher.check.comparison import Progress, bounded_reference, compare
from dispatcher.check.inputs import random_tensors
from dispatcher.device.selection import describe, first_usable, parse_request
from dispatcher.device.splitting import JoinedDevice
from dispatcher.errors import DeviceError, DispatcherError, InputError
from dispatcher.interface import Backend, Device, Executable, Timings, Tunable
from dispatcher.problem.arguments import bind_numbers
from dispatcher.problem.loader import ProblemLike, load_problem
from dispatcher.problem.messages import picked
from dispatcher.problem.operator import Operator
from dispatcher.registry import backend
from dispatcher.timing.sampling import Schedule, Times, take_turns

#: Times that the candidates of the final are run, interleaved.
REPEATS = 7
#: Candidates that reach the final.
FINALISTS = 4
#: The winner has to be this much faster than the default to be kept.
LEAST_GAIN = 1.03

Clock = Literal["host", "device"]


@dataclass(frozen=True)
class Candidate:
    """One measured set of options.

    Attributes:
        options: what was compiled.
        time_s: median time of a warm call in seconds, or None when it was not timed.
        reason: why it was not timed or did not reach the final; empty otherwise.
    """

    options: Mapping[str, Any]
    time_s: float | None
    reason: str = ""


@dataclass(frozen=True)
class TuneResult:
    """What a search found.

    Attributes:
        device: the device's id.
        problem: the problem's name.
        candidates: every candidate, the default first, then fastest first.
        best: options of the winner; empty when nothing beats the default.
        gain: how many times the default's speed the winner has; 1.0 when nothing beats it.
        clock: of all times: ``host`` for whole calls, ``device`` for their kernels alone.
    """

    device: str
    problem: str
    candidates: tuple[Candidate, ...]
    best: Mapping[str, Any]
    gain: float
    clock: Clock

    @property
    def default_s(self) -> float:
        """Median time of the default."""
        return self.candidates[0].time_s or 0.0

    @property
    def best_s(self) -> float:
        """Median time of the winner."""
        return self.default_s / self.gain

    def as_dict(self) -> dict[str, Any]:
        """A dictionary for JSON."""
        found = picked(self, "problem", "device", "best", "gain", "clock")
        return {**found, "candidates": [picked(each, *vars(each)) for each in self.candidates]}


def tune(
    tuned: Backend,
    operator: Operator,
    device: Device,
    tensors: Mapping[str, Any],
    verify: Callable[[Any], str],
    *,
    progress: Progress | None = None,
    keep: bool = True,
) -> TuneResult:
    """Measure the backend's candidates for ``operator`` on ``device`` and keep the fastest.

    Args:
        tuned: the backend of ``device``.
        tensors: input tensors, as :class:`dispatcher.interface.Executable` takes them.
        verify: gets a candidate's result; returns why it is wrong, or an empty text.
        progress: called with the share of the work that is done.
        keep: make the winner the device's default for such operators.

    Raises:
        DeviceError: the backend cannot be tuned, or has nothing to tune for this operator.
    """
    options = list(tuned.candidates(operator, device)) if isinstance(tuned, Tunable) else []
    if not options:
        raise DeviceError(f"{device.id}: there is nothing to tune for {operator.problem.name} on this device")
    tell = progress or (lambda share: None)
    running: list[tuple[Mapping[str, Any], Executable, float]] = []
    failed: list[Candidate] = []
    for index, entry in enumerate(options):
        try:
            executable = tuned.compile(operator, device, entry)
            wrong = verify(executable(tensors))
        except DispatcherError as error:
            wrong = describe(error)
        if wrong:
            if index == 0:
                raise DeviceError(f"{device.id}: the default itself is wrong: {wrong}")
            failed.append(Candidate(entry, None, wrong))
        else:
            running.append((entry, executable, _timed(executable, tensors, device)[0]))
        tell(0.7 * (index + 1) / len(options))
    default, rest = running[0], sorted(running[1:], key=lambda run: run[2])
    final = [default, *rest[:FINALISTS]]
    times: list[list[tuple[float, Clock]]] = [[] for _ in final]
    schedule = Schedule(REPEATS, pause_s=0.0, progress=lambda made, share: tell(0.7 + 0.3 * share))
    take_turns(range(len(final)), schedule, lambda index: times[index].append(_timed(final[index][1], tensors, device)))
    medians = [Times(tuple(seconds for seconds, _ in run)).median_s for run in times]
    clock: Clock = "device" if any(clock == "device" for _, clock in times[0]) else "host"
    ranked = sorted(
        (Candidate(entry, median) for (entry, _, _), median in zip(final[1:], medians[1:], strict=True)),
        key=lambda candidate: candidate.time_s or 0.0,
    )
    slower = [Candidate(entry, first, "slower than the finalists") for entry, _, first in rest[FINALISTS:]]
    best: Mapping[str, Any] = {}
    gain = 1.0
    if ranked and ranked[0].time_s and medians[0] / ranked[0].time_s >= LEAST_GAIN:
        best, gain = ranked[0].options, medians[0] / ranked[0].time_s
    if keep and isinstance(tuned, Tunable):
        tuned.remember(operator, device, best or default[0], gain)  # in place of what an earlier search kept
    candidates = (Candidate(default[0], medians[0]), *ranked, *slower, *failed)
    return TuneResult(device.id, operator.problem.name, candidates, best, gain, clock)


def tune_problem(
    problem: ProblemLike,
    *,
    device: str | None = None,
    case: str | None = "sample",
    dtype: str | None = None,
    precision: str = "fp32",
    seed: int = 0,
    keep: bool = True,
    progress: Progress | None = None,
    **arguments: Any,
) -> TuneResult:
    """Find the fastest options for a problem on a device; see :func:`tune`.

    On OpenCL the choice holds for every batch: a small one, such as ``batch_size=2``, makes the search short. On CUDA
    it holds for every batch that fills the GPU as well; see docs/cuda.md.

    Args:
        problem: a name, a path, a mapping or a Problem.
        device: a device request as for :func:`dispatcher.compile`; its best device is tuned.
        case: the case that the sizes come from; ``arguments`` hold instead of the case's.
        dtype: of every tensor; float32 if None.
        precision: ``fp32`` or ``tf32``; each is tuned by itself.
        seed: of the random tensors.
        keep: make the winner the device's default for such operators.
        progress: called with the share of the work that is done.

    Raises:
        InputError: an argument is wrong.
        DeviceError: the device does not exist, cannot run the problem, or has nothing to tune.
    """
    loaded = load_problem(problem)
    operator = bind_numbers(loaded, arguments, "tune", case=case, dtype=dtype, precision=precision)
    return tune_operator(operator, device, seed, keep, progress)


def tune_operator(
    operator: Operator, device: str | None, seed: int = 0, keep: bool = True, progress: Progress | None = None
) -> TuneResult:
    """:func:`tune_problem` for an operator that is bound already."""
    chosen, _ = first_usable(parse_request(device))
    if isinstance(chosen, JoinedDevice):
        advice = f"tune measures one at a time: name it, such as {chosen.members[0].id}"
        raise InputError(f"device {chosen.id} stands for several devices; {advice}")
    refusal = backend(chosen.backend).supports(operator, chosen)
    if refusal is not None:
        raise DeviceError(f"{chosen.id} cannot run {operator.problem.name}: {refusal}; name another device")
    tensors = random_tensors(operator, seed)
    reference, bound = bounded_reference(operator, tensors)

    def wrong(result: Any) -> str:
        return compare(result, reference, bound, dtype=operator.dtype).reason

    return tune(backend(chosen.backend), operator, chosen, tensors, wrong, progress=progress, keep=keep)


def _timed(executable: Executable, tensors: Mapping[str, Any], device: Device) -> tuple[float, Clock]:
    """Seconds of a call of a compiled candidate, and on which clock."""
    timings = Timings() if device.kind == "gpu" else None
    start = time.perf_counter()
    executable(tensors, timings=timings)
    elapsed = time.perf_counter() - start
    if timings is None or timings.clock != "device" or timings.kernel_s <= 0:
        return elapsed, "host"
    return timings.kernel_s, "device"
