"""Taking turns: rounds in which everybody gets one turn, so that slow spells of the machine meet all alike.

A shared or virtual machine has slow spells. Where there is a *probe* of its speed, a short kernel of fused
multiply-adds runs beside every sample; a sample whose probe is slow says more about the machine than about the library
and does not count, by the same rule for everybody. How many were dropped is part of every result.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from dispatcher.device.selection import describe
from dispatcher.timing.sampling import Sample, seconds_since

#: Seconds in which thread pools that spin after their work go to sleep, before another contender's turn.
SETTLE_S = 0.06
#: A thread pool may still spin when the probe after its sample starts, so the probe may try again.
PROBE_TRIES = 6
PROBE_PAUSE_S = 0.005
#: Readings before the first sample.
CALIBRATION_RUNS = 50
#: Rounds for each quiet sample wanted, before sampling gives up.
ROUNDS_PER_REPEAT = 3

Contender = TypeVar("Contender", bound=Hashable)
Order = Literal["random", "mirrored"]


@dataclass(frozen=True)
class Schedule:
    """How turns follow each other, and when they end.

    Attributes:
        most: rounds at most.
        least: rounds that are made whatever the time.
        limit_s: seconds after which no further round begins; None for no limit.
        pause_s: seconds before each turn.
        order: of the turns in a round: at random, or each round in reverse order of the one before (A B, B A).
        progress: told the number of rounds made and the share of the work that is done, after each round.
    """

    most: int
    least: int = 1
    limit_s: float | None = None
    pause_s: float = SETTLE_S
    order: Order = "random"
    progress: Callable[[int, float], None] | None = None


def take_turns(
    contenders: Sequence[Contender],
    schedule: Schedule,
    turn: Callable[[Contender], None],
    lacking: Callable[[Contender], bool] = lambda contender: True,
) -> int:
    """Give the contenders turns until nobody lacks one, or the schedule ends.

    Args:
        contenders: who takes part.
        schedule: see there.
        turn: takes one contender's turn.
        lacking: whether a contender still has to have turns.

    Returns:
        How many rounds were made.
    """
    source, start, rounds = random.Random(0), time.perf_counter(), 0
    while rounds < schedule.most:
        elapsed = time.perf_counter() - start
        if rounds >= schedule.least and schedule.limit_s is not None and elapsed > schedule.limit_s:
            break
        order = [contender for contender in contenders if lacking(contender)]
        if not order:
            break
        if schedule.order == "random":
            source.shuffle(order)
        elif rounds % 2:
            order.reverse()
        for contender in order:
            time.sleep(schedule.pause_s)
            turn(contender)
        rounds += 1
        if schedule.progress is not None:
            shares = [rounds / schedule.most, 0.0 if schedule.limit_s is None else elapsed / schedule.limit_s]
            schedule.progress(rounds, min(1.0, max(shares)))
    return rounds


# ---- beside a probe ----------------------------------------------------------------------------------------
def threshold_gflops(limit: float, best: float) -> float:
    """The rate that a probe has to reach: ``limit`` itself when above 1, else that share of ``best``."""
    return limit if limit > 1 else limit * best


@dataclass
class Probe:
    """How fast the machine is right now: multiply-adds a second on all cores, by an OpenCL kernel of a millisecond.

    Attributes:
        name: the OpenCL device.
        best: the highest rate that it ever read, GFLOP/s.
        copy_gbytes_per_s: bytes read plus bytes written a second when copying memory, on all cores.
    """

    name: str = ""
    best: float = 0.0
    copy_gbytes_per_s: float = 0.0
    _run: Callable[[], float] = field(default=lambda: 0.0, repr=False)

    def calibrated(self) -> Probe:
        """The probe itself, after runs that find its best rate."""
        for _ in range(CALIBRATION_RUNS):
            self.read(math.inf)
        return self

    def read(self, limit: float) -> float:
        """The rate now, GFLOP/s; tries a few times to reach ``limit`` (see :func:`threshold_gflops`)."""
        fastest = 0.0
        for attempt in range(PROBE_TRIES if math.isfinite(limit) else 1):
            if attempt:
                time.sleep(PROBE_PAUSE_S)
            fastest = max(fastest, self._run())
            self.best = max(self.best, fastest)
            if fastest >= threshold_gflops(limit, self.best):
                break
        return fastest


@dataclass
class Sampling:
    """Samples by contender, and why a contender stopped in the middle."""

    samples: dict[str, list[Sample]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def timed(call: Callable[[], Any]) -> Callable[[], float]:
    """A function that makes a call and gives its seconds; what it returns is released outside the time."""

    def measure() -> float:
        start = time.perf_counter()
        result = call()
        seconds = seconds_since(start)
        del result
        return seconds

    return measure


def sample_beside(
    probe: Probe,
    limit: float,
    calls: Mapping[str, Callable[[], float]],
    repeats: int,
    *,
    pause_s: float = SETTLE_S,
    order: Order = "random",
    progress: Callable[[int, float], None] | None = None,
) -> Sampling:
    """Take samples in turns until each call has ``repeats`` quiet ones, or too many rounds have passed.

    A call that raises anything is out.

    Args:
        probe: reads the machine's speed right before and right after each sample.
        limit: see :func:`threshold_gflops`.
        calls: by name, warm already; each gives the seconds that it took (see :func:`timed`).
        repeats: quiet samples wanted of each.
        pause_s: see :class:`Schedule`, as for ``order`` and ``progress``.
    """
    schedule = Schedule(ROUNDS_PER_REPEAT * repeats, pause_s=pause_s, order=order, progress=progress)
    sampling = Sampling({name: [] for name in calls})

    def lacking(name: str) -> bool:
        threshold = threshold_gflops(limit, probe.best)
        quiet = sum(sample.quiet(threshold) for sample in sampling.samples[name])
        return name not in sampling.failures and quiet < repeats

    def turn(name: str) -> None:
        before = probe.read(limit)
        try:
            seconds = calls[name]()
        except Exception as error:
            sampling.failures[name] = describe(error)
        else:
            sampling.samples[name].append(Sample(seconds, before, probe.read(limit)))

    take_turns(list(calls), schedule, turn, lacking)
    return sampling
