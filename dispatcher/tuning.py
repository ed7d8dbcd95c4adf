"""Finding the fastest options for an operator on a device: every candidate is verified before it is timed.

A backend that can be tuned has two more methods than :class:`dispatcher.interface.Backend` asks for: ``candidates``
(options worth measuring) and ``remember`` (use these from now on). Tuners made for GPUs drive single kernels that they
compile themselves; here an option also changes how the host packs weights, lays out scratch and cuts the work, so
that what has to be timed is a whole compiled operator.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from dispatcher.arguments import bind_numbers
from dispatcher.compiled import ProblemLike
from dispatcher.errors import DeviceError, DispatcherError
from dispatcher.inputs import random_tensors
from dispatcher.interface import Backend, Device, Executable
from dispatcher.loader import load_problem
from dispatcher.operator import Operator
from dispatcher.registry import backend
from dispatcher.selection import first_usable, parse_request
from dispatcher.verification import bounded_reference, compare

#: Times that the candidates of the final are run, interleaved.
REPEATS = 7
#: Candidates that reach the final.
FINALISTS = 4
#: The winner has to be this much faster than the default to be kept.
LEAST_GAIN = 1.01


@runtime_checkable
class Tunable(Protocol):
    """What a backend offers that can be tuned."""

    def candidates(self, operator: Operator, device: Device) -> Sequence[Mapping[str, Any]]:
        """Options worth measuring; the first stand for the default without any tuning."""

    def remember(self, operator: Operator, device: Device, options: Mapping[str, Any], gain: float) -> None:
        """Use ``options`` for such operators on ``device`` from now on."""


@dataclass(frozen=True)
class Candidate:
    """One measured set of options.

    Attributes:
        options: what was compiled.
        time_s: median wall-clock time of a warm call, or None when it was not timed.
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
    """

    device: str
    problem: str
    candidates: tuple[Candidate, ...]
    best: Mapping[str, Any]
    gain: float

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
        return {
            "problem": self.problem,
            "device": self.device,
            "best": dict(self.best),
            "gain": self.gain,
            "candidates": [
                {"options": dict(each.options), "time_s": each.time_s, "reason": each.reason}
                for each in self.candidates
            ],
        }


def tune(
    tuned: Backend,
    operator: Operator,
    device: Device,
    tensors: Mapping[str, Any],
    verify: Callable[[Any], str],
    *,
    progress: Callable[[float], None] | None = None,
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
    running: list[tuple[Mapping[str, Any], Executable, float]] = []
    failed: list[Candidate] = []
    for index, entry in enumerate(options):
        try:
            executable = tuned.compile(operator, device, entry)
            wrong = verify(executable(tensors))
        except DispatcherError as error:
            wrong = str(error).splitlines()[0]
        if wrong:
            if index == 0:
                raise DeviceError(f"{device.id}: the default itself is wrong: {wrong}")
            failed.append(Candidate(entry, None, wrong))
        else:
            running.append((entry, executable, _once(executable, tensors)))
        if progress is not None:
            progress(0.7 * (index + 1) / len(options))
    default, rest = running[0], sorted(running[1:], key=lambda run: run[2])
    final = [default, *rest[:FINALISTS]]
    times: list[list[float]] = [[] for _ in final]
    for repeat in range(REPEATS):
        for run, (_, executable, _) in zip(times, final, strict=True):
            run.append(_once(executable, tensors))
        if progress is not None:
            progress(0.7 + 0.3 * (repeat + 1) / REPEATS)
    medians = [statistics.median(run) for run in times]
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
            tuned.remember(operator, device, best, gain)
    candidates = (Candidate(default[0], medians[0]), *ranked, *slower, *failed)
    return TuneResult(device.id, operator.problem.name, candidates, best, gain)


def tune_problem(
    problem: ProblemLike,
    *,
    device: str | None = None,
    case: str | None = "sample",
    dtype: str | None = None,
    seed: int = 0,
    keep: bool = True,
    progress: Callable[[float], None] | None = None,
    **arguments: Any,
) -> TuneResult:
    """Find the fastest options for a problem on a device; see :func:`tune`.

    Tiles do not depend on the batch: a small one, such as ``batch_size=2``, makes the search short.

    Args:
        problem: a name, a path, a mapping or a Problem.
        device: a device request as for :func:`dispatcher.compile`; its best device is tuned.
        case: the case that the sizes come from; ``arguments`` hold instead of the case's.

    Raises:
        InputError: an argument is wrong.
        DeviceError: the device does not exist, or has nothing to tune.
    """
    loaded = load_problem(problem)
    operator = bind_numbers(loaded, arguments, "tune", case=case, dtype=dtype)
    chosen, _ = first_usable(parse_request(device))
    tensors = random_tensors(operator, seed)
    reference, bound = bounded_reference(operator, tensors)

    def wrong(result: Any) -> str:
        return compare(result, reference, bound, dtype=operator.dtype).reason

    return tune(backend(chosen.backend), operator, chosen, tensors, wrong, progress=progress, keep=keep)


def _once(executable: Executable, tensors: Mapping[str, Any]) -> float:
    start = time.perf_counter()
    executable(tensors)
    return time.perf_counter() - start
