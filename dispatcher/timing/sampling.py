"""Samples: reading the clock, emptying the caches, taking turns, and what samples come to.

In a round everybody gets one turn, so that slow spells of the machine meet all alike.
A shared or virtual machine has slow spells. Where there is a *probe* of its speed, a short kernel of fused
multiply-adds runs beside every sample; a sample whose probe is slow says more about the machine than about the library
and does not count, by the same rule for everybody. How many were dropped is part of every result.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, TypeVar

import numpy as np

from dispatcher.device.machine import cores, last_level_cache_bytes
from dispatcher.device.selection import describe
from dispatcher.problem.messages import picked

#: No sample is shorter than this: what the clock cannot tell from nothing is not nothing.
CLOCK_RESOLUTION_S = max(time.get_clock_info("perf_counter").resolution, 1e-9)
#: Half the width of a median's notch, in interquartile ranges over the square root of the number of samples: notches
#: that do not overlap differ at about the 95 % level (McGill, Tukey and Larsen, "Variations of box plots", The American
#: Statistician 32, 1978).
NOTCH = 1.57
RESAMPLES = 4000

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


def seconds_since(start: float) -> float:
    """Seconds since ``start`` on ``time.perf_counter``; never less than the clock can tell."""
    return max(time.perf_counter() - start, CLOCK_RESOLUTION_S)


def rate(amount: float, seconds: float) -> float | None:
    """``amount`` in 1e9 a second; None where that would not be a number above zero."""
    if not (amount > 0 and 0 < seconds < math.inf):
        return None
    value = amount / seconds / 1e9
    return value if 0 < value < math.inf else None


# ---- times -------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Times:
    """Samples of one thing.

    Attributes:
        seconds: every sample that counts, in the order in which it was taken; at least one.
        dropped: samples that were taken and do not count; see :func:`quiet_times`.
        noisy: no sample was quiet, so that all of them stand here for want of better ones.
    """

    seconds: tuple[float, ...]
    dropped: int = 0
    noisy: bool = False

    @property
    def median_s(self) -> float:
        """Their median."""
        return statistics.median(self.seconds)

    @property
    def quartiles_s(self) -> tuple[float, float]:
        """Their first and third quartile, interpolated linearly."""
        low, high = np.quantile(self.seconds, [0.25, 0.75])
        return float(low), float(high)

    @property
    def min_s(self) -> float:
        """The shortest."""
        return min(self.seconds)

    @property
    def uncertainty(self) -> float | None:
        """Half the width of the median's notch (see :data:`NOTCH`), as a share of the median; None of zeros."""
        if self.median_s <= 0.0:
            return None
        low, high = self.quartiles_s
        return NOTCH * (high - low) / math.sqrt(len(self.seconds)) / self.median_s

    def as_dict(self) -> dict[str, Any]:
        """Plain lists and numbers, ready for JSON."""
        return picked(self, "median_s", "quartiles_s", "min_s", "uncertainty", "seconds")


@dataclass(frozen=True)
class Sample:
    """One timed call, and the machine's speed in GFLOP/s right before and right after it."""

    seconds: float
    before: float
    after: float

    def quiet(self, threshold: float) -> bool:
        """True when both readings reached ``threshold`` GFLOP/s."""
        return min(self.before, self.after) >= threshold


def quiet_times(samples: Sequence[Sample], threshold: float) -> Times:
    """The samples whose readings reached ``threshold`` GFLOP/s; all of them when none did.

    Raises:
        ValueError: there is no sample.
    """
    if not samples:
        raise ValueError("there are no samples to summarise")
    quiet = tuple(sample.seconds for sample in samples if sample.quiet(threshold))
    everything = tuple(sample.seconds for sample in samples)
    return Times(quiet or everything, len(samples) - len(quiet), not quiet)


@dataclass(frozen=True)
class Ratio:
    """How many times as long the other takes.

    Attributes:
        value: the other's median over ours.
        low: the other's first quartile over our third one.
        high: the other's third quartile over our first one.
        noisy: one of the two has no quiet sample.
    """

    value: float
    low: float
    high: float
    noisy: bool = False


def ratio(other: Times, ours: Times) -> Ratio:
    """How many times as long ``other`` takes as ``ours``, with the spread that the quartiles make."""
    (other_low, other_high), (low, high) = other.quartiles_s, ours.quartiles_s
    value = other.median_s / ours.median_s
    return Ratio(value, other_low / high, other_high / low, other.noisy or ours.noisy)


def bootstrap_ratio(new: Times, old: Times, confidence: float) -> tuple[float, float]:
    """A percentile bootstrap interval for the ratio of two medians, ``new`` over ``old``.

    Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13. The resampling is seeded, so that
    the same samples give the same interval.
    """
    generator = np.random.default_rng(0)
    tail = (1.0 - confidence) / 2.0
    medians = resampled_medians(new, generator) / resampled_medians(old, generator)
    low, high = np.quantile(medians, [tail, 1.0 - tail])
    return float(low), float(high)


def resampled_medians(times: Times, generator: np.random.Generator) -> np.ndarray:
    """Medians of :data:`RESAMPLES` resamples of ``times``, drawn with replacement; float64.

    Only the middle of each resample is drawn, so that many samples cost no more than few. A resample of ``n`` takes
    the element ``floor(n u)`` of the sorted samples for each of ``n`` uniform numbers ``u``. The smaller middle one of
    these, the k-th smallest of all, has the distribution Beta(k, n + 1 - k), and the next larger one is the smallest
    of ``n - k`` uniform numbers between it and 1 (Devroye, "Non-Uniform Random Variate Generation", 1986, chapter V).
    """
    values = np.sort(np.asarray(times.seconds))
    count = len(values)
    middle = (count + 1) // 2
    low = high = generator.beta(middle, count + 1 - middle, RESAMPLES)
    if count % 2 == 0:
        high = 1.0 - (1.0 - low) * generator.random(RESAMPLES) ** (1.0 / (count - middle))
    chosen = [np.minimum((count * uniform).astype(np.int64), count - 1) for uniform in (low, high)]
    result: np.ndarray = (values[chosen[0]] + values[chosen[1]]) / 2.0
    return result


# ---- caches ------------------------------------------------------------------------------------------------
class HostCaches:
    """The caches of the host's processor.

    Attributes:
        nbytes: how much memory :meth:`flush` touches: twice what the last-level caches hold.
    """

    def __init__(self) -> None:
        self.nbytes = 2 * last_level_cache_bytes()
        threads = cores()
        self._parts = [np.ones(self.nbytes // threads // 8, np.int64) for _ in range(threads)]
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="dispatcher-flush")

    def flush(self) -> None:
        """Push everything else out of the caches: every core reads and writes a part of a large buffer."""
        for _ in self._pool.map(lambda part: np.add(part, 1, out=part), self._parts):
            pass


@cache
def host_caches() -> HostCaches:
    """The one :class:`HostCaches` of this process."""
    return HostCaches()


# ---- turns -------------------------------------------------------------------------------------------------
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
