"""Finding the fastest options for an operator on a device: every candidate is verified before it is timed.

Candidates are timed in turns: all of them in the heats, then the default and the fastest few in the final. The
fastest one wins if it is faster than the default by more than the spread of the times (the test of
:func:`dispatcher.timing.differences.judge`), and once more against the default alone: the fastest of many is so by luck
as well, and luck does not hold. Nothing is kept of what was measured while other programs kept the machine busy.

A backend that can be tuned has two more methods than :class:`dispatcher.interface.Backend` asks for: ``candidates``
(options worth measuring) and ``remember`` (use these from now on). Tuners made for GPUs drive single kernels that they
compile themselves; here an option also changes how the host packs weights, lays out scratch and cuts the work, so
that what has to be timed is a whole compiled operator.

A call's time is the host's, from arrays to arrays. On a GPU that records the time of its kernels it is that time
instead: copying arrays there and back takes longer than many an operator, and no option changes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from dispatcher.check.comparison import Progress, bounded_reference, compare
from dispatcher.check.inputs import random_tensors
from dispatcher.device import machine
from dispatcher.device.selection import describe, first_usable, parse_request
from dispatcher.device.splitting import JoinedDevice
from dispatcher.errors import DeviceError, DispatcherError, InputError
from dispatcher.interface import Backend, Device, Executable, Timings, Tunable
from dispatcher.problem.arguments import bind_numbers
from dispatcher.problem.loader import ProblemLike, load_problem
from dispatcher.problem.messages import counted, picked
from dispatcher.problem.operator import Operator
from dispatcher.problem.shown import Drawn
from dispatcher.registry import backend
from dispatcher.timing.differences import judge
from dispatcher.timing.sampling import Schedule, Times, seconds_since, take_turns

#: Rounds of the heats, and seconds after which no further one begins.
HEATS, HEATS_S = 3, 20.0
#: Candidates that reach the final, besides the default.
FINALISTS = 4
#: Rounds of the final, and of the winner against the default: at least, at most, and seconds after which none begins.
LEAST_ROUNDS, MOST_ROUNDS, ROUNDS_S = 7, 31, 0.5
#: The winner has to be this much faster than the default to be kept.
LEAST_GAIN = 1.03
#: Share of a search that the reference takes, as long as nothing better is known.
REFERENCE_SHARE = 0.05

Clock = Literal["host", "device"]


@dataclass(frozen=True)
class Candidate:
    """One measured set of options.

    Attributes:
        options: what was compiled.
        time_s: median time of a warm call in seconds, or None when it was not timed.
        reason: why it was not timed or did not reach the final; empty otherwise.
        quartiles_s: first and third quartile of these times, or None when it was not timed.
    """

    options: Mapping[str, Any]
    time_s: float | None
    reason: str = ""
    quartiles_s: tuple[float, float] | None = None


@dataclass(frozen=True, repr=False)
class TuneResult(Drawn):
    """What a search found.

    Attributes:
        device: the device's id.
        problem: the problem's name.
        candidates: every candidate, the default first, then fastest first.
        best: options of the winner; empty when nothing beats the default.
        gain: how many times the default's speed the winner has, when they met alone; 1.0 when nothing beats it.
        clock: of all times: ``host`` for whole calls, ``device`` for their kernels alone.
        kept: whether the winner, or that there is none, is used on this device from now on.
        busy: why nothing that was measured can be kept; empty where the machine was quiet.
        note: why there is no winner; empty where there is one.
    """

    device: str
    problem: str
    candidates: tuple[Candidate, ...]
    best: Mapping[str, Any]
    gain: float
    clock: Clock
    kept: bool = False
    busy: str = ""
    note: str = ""

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
        found = picked(self, "problem", "device", "best", "gain", "clock", "kept", "busy", "note")
        return {**found, "candidates": [picked(each, *vars(each)) for each in self.candidates]}

    def _headline(self) -> str:
        found = f"{self.gain:.2f} times the default's speed, {counted(len(self.candidates), 'candidate')}"
        return f"{self.problem} on {self.device}: {found}"

    def _facts(self) -> Mapping[str, object]:
        names = {"best options": dict(self.best) or "the default", "kept": "yes" if self.kept else "no"}
        times = [
            f"{dict(each.options)}: {each.reason if each.time_s is None else f'{each.time_s:.3g} s'}"
            for each in self.candidates
        ]
        return {**names, "note": self.note, "busy": self.busy, "candidates": times}


class _Entrant:
    """A candidate that is right.

    Attributes:
        options: what was compiled.
        call: runs it; gives seconds, and on which clock.
        times: of its turns in the last rounds that it took part in; there are none before these.
        clock: of these.
        reason: why it did not reach the final; empty otherwise.
    """

    times: Times

    def __init__(self, options: Mapping[str, Any], call: Callable[[], tuple[float, Clock]]) -> None:
        self.options, self.call = options, call
        self.clock: Clock = "host"
        self.reason = ""

    def median_s(self) -> float:
        return self.times.median_s

    def candidate(self) -> Candidate:
        return Candidate(self.options, self.median_s(), self.reason, self.times.quartiles_s)


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
    """Measure the backend's candidates for ``operator`` on ``device`` and keep the fastest, once nothing can fail.

    Args:
        tuned: the backend of ``device``.
        tensors: input tensors, as :class:`dispatcher.interface.Executable` takes them.
        verify: gets a candidate's result; returns why it is wrong, or an empty text.
        progress: called with the share of the time that has passed, as far as that can be told.
        keep: make the winner the device's default for such operators, unless the machine was busy.

    Raises:
        DeviceError: the backend cannot be tuned, or has nothing to tune for this operator.
    """
    options = list(tuned.candidates(operator, device)) if isinstance(tuned, Tunable) else []
    if not options:
        raise _nothing_to_tune(operator, device)
    tell, start = progress or (lambda share: None), time.perf_counter()
    running: list[_Entrant] = []
    failed: list[Candidate] = []
    for number, entry in enumerate(options, start=1):
        try:
            executable = tuned.compile(operator, device, entry)
            called = time.perf_counter()
            result = executable(tensors)
            call_s = time.perf_counter() - called
            wrong = verify(result)
        except DispatcherError as error:
            wrong = describe(error)
        if not wrong:
            running.append(_Entrant(entry, partial(_timed, executable, tensors, device)))
        elif number == 1:
            raise DeviceError(f"{device.id}: the default itself is wrong: {wrong}")
        else:
            failed.append(Candidate(entry, None, wrong))
        spent_s = time.perf_counter() - start
        calls = HEATS * len(options) + LEAST_ROUNDS * (FINALISTS + 3)
        ready = spent_s / (spent_s / number * len(options) + call_s * calls)
        tell(ready)
    load = machine.foreign_load()
    meter = machine.LoadMeter.start()
    ranked, gain, note = _compete(running, lambda share: tell(ready + (1.0 - ready) * share))
    # In a shorter time than that the system's clocks are too coarse.
    lately = meter.foreign_cores() if time.perf_counter() - meter.wall_s >= machine.WATCH_S else None
    busy = machine.busy_reason(load) or machine.busy_reason(lately) or ""
    best = ranked[1].options if gain > 1.0 else {}
    kept = False
    if keep and not busy and isinstance(tuned, Tunable):  # in place of what an earlier search kept
        kept = tuned.remember(operator, device, best or ranked[0].options, gain) is not False
    tell(1.0)
    candidates = (*(each.candidate() for each in ranked), *failed)
    clock = ranked[0].clock
    return TuneResult(device.id, operator.problem.name, candidates, best, gain, clock, kept, busy, note)


def _compete(running: Sequence[_Entrant], tell: Progress) -> tuple[list[_Entrant], float, str]:
    """Time the candidates that are right.

    Args:
        running: the default first.
        tell: told the share of that which is done.

    Returns:
        The default and then the others, fastest first; how many times as fast as the default the first of these is,
        1.0 where that is not certain; and why it is not.
    """
    default, *others = running
    heats = Schedule(HEATS, 1, HEATS_S, pause_s=0.0, progress=lambda _, share: tell(0.5 * share))
    _take_rounds(running, heats)
    others.sort(key=_Entrant.median_s)
    for each in others[FINALISTS:]:
        each.reason = "slower than the finalists"
    finalists = others[:FINALISTS]
    if not finalists:
        return [default], 1.0, "there is nothing else"
    final = Schedule(MOST_ROUNDS, LEAST_ROUNDS, ROUNDS_S, pause_s=0.0)
    _take_rounds([default, *finalists], final)
    finalists.sort(key=_Entrant.median_s)
    ranked = [default, *finalists, *others[FINALISTS:]]
    if not _gain(default, ranked[1]):
        return ranked, 1.0, "nothing is faster than the default by more than the noise"
    _take_rounds(ranked[:2], final)
    gain = _gain(default, ranked[1])
    return ranked, gain or 1.0, "" if gain else "what was fastest was not so in a second round"


def _take_rounds(entrants: Sequence[_Entrant], schedule: Schedule) -> None:
    """Let the entrants take turns; their times are then those of these rounds."""
    found: list[list[float]] = [[] for _ in entrants]

    def turn(number: int) -> None:
        seconds, entrants[number].clock = entrants[number].call()
        found[number].append(seconds)

    take_turns(range(len(entrants)), schedule, turn)
    for entrant, seconds in zip(entrants, found, strict=True):
        entrant.times = Times(tuple(seconds))


def _gain(default: _Entrant, other: _Entrant) -> float:
    """How many times as fast as the default another one is; 0.0 where that is within the noise, or too little."""
    found = judge(("", ""), "", default.times, other.times)
    return 1.0 / found.ratio if found.verdict == "faster" and found.ratio * LEAST_GAIN <= 1.0 else 0.0


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
        keep: make the winner the device's default for such operators, unless the machine was busy.
        progress: called with the share of the work that is done.

    Raises:
        InputError: an argument is wrong.
        DeviceError: the device does not exist, cannot run the problem, or has nothing to tune.
    """
    loaded = load_problem(problem)
    operator = bind_numbers(loaded, arguments, "tune", case=case, dtype=dtype, precision=precision)
    return tune_operator(operator, device, seed, keep, progress)


def device_to_tune(operator: Operator, device: str | None) -> Device:
    """The best device of a request.

    Raises:
        InputError: it stands for several devices.
        DeviceError: it does not exist, cannot run the operator, or has nothing to tune.
    """
    chosen, _ = first_usable(parse_request(device))
    if isinstance(chosen, JoinedDevice):
        advice = f"tune measures one at a time: name it, such as {chosen.members[0].id}"
        raise InputError(f"device {chosen.id} stands for several devices; {advice}")
    refusal = backend(chosen.backend).supports(operator, chosen)
    if refusal is not None:
        raise DeviceError(f"{chosen.id} cannot run {operator.problem.name}: {refusal}; name another device")
    if not isinstance(backend(chosen.backend), Tunable):
        raise _nothing_to_tune(operator, chosen)
    return chosen


def _nothing_to_tune(operator: Operator, device: Device) -> DeviceError:
    return DeviceError(f"{device.id}: there is nothing to tune for {operator.problem.name} on this device")


def tune_operator(
    operator: Operator, device: str | None, seed: int = 0, keep: bool = True, progress: Progress | None = None
) -> TuneResult:
    """:func:`tune_problem` for an operator that is bound already."""
    chosen = device_to_tune(operator, device)
    tell, start = progress or (lambda share: None), time.perf_counter()
    tensors = random_tensors(operator, seed)
    reference, bound = bounded_reference(operator, tensors, lambda share: tell(REFERENCE_SHARE * share))
    before_s = time.perf_counter() - start

    def wrong(result: Any) -> str:
        return compare(result, reference, bound, dtype=operator.dtype).reason

    def searched(share: float) -> None:
        spent_s = time.perf_counter() - start
        tell(spent_s / (before_s + (spent_s - before_s) / share))

    return tune(backend(chosen.backend), operator, chosen, tensors, wrong, progress=searched, keep=keep)


def _timed(executable: Executable, tensors: Mapping[str, Any], device: Device) -> tuple[float, Clock]:
    """Seconds of a call of a compiled candidate, and on which clock."""
    timings = Timings() if device.kind == "gpu" else None
    start = time.perf_counter()
    executable(tensors, timings=timings)
    elapsed = seconds_since(start)
    if timings is None or timings.clock != "device" or timings.kernel_s <= 0:
        return elapsed, "host"
    return timings.kernel_s, "device"
