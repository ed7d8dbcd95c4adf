"""Timing problems on devices, and beside other libraries: verify first, then sample in turns.

docs/benchmarking.md says how, and why.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dispatcher import __version__
from dispatcher.check.comparison import Progress
from dispatcher.check.inputs import random_tensors
from dispatcher.device import machine
from dispatcher.device.selection import first_usable, parse_request
from dispatcher.errors import BusyError
from dispatcher.interface import Device
from dispatcher.problem.arguments import bind_numbers, check_options
from dispatcher.problem.loader import ProblemLike, load_problem
from dispatcher.problem.operator import Operator
from dispatcher.problem.values import count_value, seconds_value, seed_value
from dispatcher.timing import sampling
from dispatcher.timing.contenders import Contender, Lineup, OtherLibrary, OurDevice, Witness
from dispatcher.timing.peers import DISTRIBUTIONS, parse_peers, settings_kept
from dispatcher.timing.results import Benchmark, Race
from dispatcher.timing.sampling import Schedule, host_caches, take_turns

#: Rounds that are made at least and at most, where the caller does not say how many.
LEAST_ROUNDS, MOST_ROUNDS = 5, 30
#: Sampling ends when the median's notch is narrower than this share of the median, for every contender.
SETTLED = 0.03
#: Seconds for each contender after which no further round begins, once there were a few, where the caller says neither
#: how many rounds nor how much time.
TIME_LIMIT_S, LEAST_ROUNDS_OF_LONG_CALLS = 5.0, 3


@dataclass(frozen=True)
class Rules:
    """How a problem is timed.

    Attributes:
        seed: of the input tensors, from 0 to 2**64 - 1.
        repeats: rounds, 1 or more; None for as many as it takes, within limits.
        warmup: calls after the first one that are not timed.
        time_limit_s: seconds after which no further round begins.
        check: verify the first result before timing, and each later one that differs from it.

    Raises:
        InputError: a number is not as it should be.
    """

    seed: int = 0
    repeats: int | None = None
    warmup: int = 2
    time_limit_s: float | None = None
    check: bool = True

    def __post_init__(self) -> None:
        checked: dict[str, float] = {"seed": seed_value("seed", self.seed)}
        checked["warmup"] = count_value("warmup", self.warmup, 0)
        if self.repeats is not None:
            checked["repeats"] = count_value("repeats", self.repeats, 1)
        if self.time_limit_s is not None:
            checked["time_limit_s"] = seconds_value("time_limit_s", self.time_limit_s)
        vars(self).update(checked)  # Python's numbers in place of NumPy's; the rest of a frozen class is as it was

    def schedule(self, contenders: int, progress: Callable[[int, float], None]) -> Schedule:
        """When that many contenders take turns, and when they end."""
        least, limit_s = 1, self.time_limit_s
        if self.repeats is None and limit_s is None:
            least, limit_s = LEAST_ROUNDS_OF_LONG_CALLS, TIME_LIMIT_S * max(1, contenders)
        most = MOST_ROUNDS if self.repeats is None else self.repeats
        pause_s = sampling.SETTLE_S if contenders > 1 else 0.0
        return Schedule(most, least, limit_s, pause_s, progress=progress)


def protocol() -> dict[str, Any]:
    """How everything here is measured, for result files."""
    caches = host_caches()
    return {
        "clock": "time.perf_counter",
        "clock_resolution_s": time.get_clock_info("perf_counter").resolution,
        "warm": "the same call came right before",
        "cold": f"{caches.nbytes} bytes of other memory were read and written on all cores right before; on a "
        "device with memory of its own, its cache was overwritten too",
        "order": "a round gives each contender one turn, in random order; a turn is a cold call, a cold call with "
        "the device's clock, a warm call, and a warm call with the device's clock",
        "rounds": f"{LEAST_ROUNDS} to {MOST_ROUNDS}, until 1.57 interquartile ranges over the square root of the "
        f"number of samples are below {SETTLED} of the median, or for {TIME_LIMIT_S:g} s for each contender, but "
        f"{LEAST_ROUNDS_OF_LONG_CALLS} at least; or as many, or for as long, as was asked for",
        "threads": machine.cores(),
    }


def environment() -> dict[str, Any]:
    """The machine and the versions of all that takes part, for result files."""
    known = ("kernel-dispatcher", "numpy", "pyopencl", "intel-opencl-rt", "pycuda", *DISTRIBUTIONS)
    versions = {**machine.versions(known), "kernel-dispatcher": __version__}
    return {"machine": machine.machine_facts(), "versions": versions}


# ---- one problem on one device -----------------------------------------------------------------------------
def benchmark(
    problem: ProblemLike,
    *,
    device: str | Device | None = None,
    case: str | None = "sample",
    seed: int = 0,
    precision: str = "fp32",
    dtype: str | None = None,
    repeats: int | None = None,
    warmup: int = 2,
    time_limit_s: float | None = None,
    against: str | Sequence[str] = (),
    check: bool = True,
    force: bool = False,
    options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    **arguments: Any,
) -> Benchmark:
    """Time a problem on random inputs, after checking that its result is right.

    Each timed call takes arrays in host memory and writes into one result array that is allocated beforehand. It
    holds NaN before every call, and what is in it afterwards is checked.

    Args:
        problem: see :func:`dispatcher.compile`, as for ``device``, ``precision``, ``dtype`` and ``options``.
        case: the case that the sizes come from; None when ``arguments`` give them all.
        seed: seed of the input tensors, from 0 to 2**64 - 1.
        repeats: rounds, 1 or more; without it, as many as it takes, within limits.
        warmup: calls after the first one that are not timed.
        time_limit_s: seconds after which no further round begins.
        against: peers that take turns with the device, such as ``["torch", "openvino"]``.
        check: verify the first result before timing, and each later one that differs from it.
        force: measure although other programs keep the machine busy.
        progress: told the fraction done.
        **arguments: sizes and scalars that hold instead of the case's.

    Raises:
        VerificationError: a result is wrong; nothing is reported then.
        InputError: an argument is wrong or a tensor, a peer is not installed, or the batch is empty, so that there
            is nothing to time.
        DeviceError: no device of the request can run the problem; as BusyError, the machine is busy.
        KernelError: a kernel did not build or run on the device that was named.
    """
    rules = Rules(seed, repeats, warmup, time_limit_s, check)
    check_options(options)
    parse_peers(against)
    request = parse_request(device)
    operator = bind_numbers(load_problem(problem), arguments, "time", case=case, dtype=dtype, precision=precision)
    if not force:
        first_usable(request)  # where there is no device, that is what has to be said
        refuse_when_busy()
    outcome = race(operator, [device], rules, against=against, options=options, progress=progress)
    for failure in outcome.failures:
        if failure.error is not None:
            raise failure.error
    return outcome.results[0]


def refuse_when_busy() -> None:
    """Check that other programs leave the machine alone.

    Raises:
        BusyError: they do not.
    """
    reason = machine.busy_reason(machine.foreign_load())
    if reason is not None:
        raise BusyError(f"{reason}; wait until it is quiet, or force it (--force; force=True in Python)")


# ---- several contenders ------------------------------------------------------------------------------------
@settings_kept()
def race(
    operator: Operator,
    devices: Sequence[str | Device | None],
    rules: Rules | None = None,
    *,
    against: str | Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Race:
    """Time an operator on several devices and in other libraries, which take turns; see :func:`benchmark`.

    Args:
        operator: what to compute; not empty.
        devices: device requests. A device that fails is among the failures.
        rules: how; the usual ones when left out.
        against: peers that take turns with the devices.
        options: tuning choices for the backends.
        progress: told the fraction done.

    Raises:
        InputError: an argument is wrong.
        VerificationError: some contender has changed the inputs.
    """
    rules = rules or Rules()
    check_options(options)
    peers = parse_peers(against)
    for device in devices:
        parse_request(device)
    tell = progress or (lambda share: None)
    tensors = random_tensors(operator, rules.seed)
    lineup = Lineup(tensors, Witness(operator, tensors) if rules.check else None)
    for device in devices:
        label = device.id if isinstance(device, Device) else device or "auto"
        lineup.enter(label, partial(OurDevice, operator, tensors, device, options), ours=True)
    for name in peers:
        for place, where in _places(lineup.contenders).items():
            lineup.enter(name, partial(OtherLibrary, operator, tensors, name, place, where))
    lineup.judge()
    tell(0.3)
    for contender in list(lineup.contenders):
        for _ in range(rules.warmup):
            if contender in lineup.contenders:
                lineup.attempt(contender, contender.call)
    meter = machine.LoadMeter.start()
    made, settled = _sample(lineup, rules, tell)
    foreign_cores = meter.foreign_cores()
    lineup.judge()
    lineup.check_inputs()
    theirs = tuple(each.result() for each in lineup.contenders if isinstance(each, OtherLibrary))
    left_out = tuple((failure.name, failure.reason) for failure in lineup.failures if failure.error is None)
    ours = tuple(each.result(rules.seed, theirs, left_out) for each in lineup.contenders if isinstance(each, OurDevice))
    tell(1.0)
    return Race(ours, theirs, tuple(lineup.failures), made, settled, foreign_cores)


def _places(contenders: Sequence[Contender]) -> dict[str, Device]:
    """Where peers have to run to be compared with the devices: a name, and one of the devices there."""
    places: dict[str, Device] = {}
    for contender in contenders:
        if isinstance(contender, OurDevice):
            places.setdefault(contender.place, contender.device)
    return places


def _sample(lineup: Lineup, rules: Rules, tell: Progress) -> tuple[int, bool]:
    """Let the contenders take turns; gives the rounds made, and whether the medians are known well enough."""
    rounds_made = 0

    def told(count: int, share: float) -> None:
        nonlocal rounds_made
        rounds_made = count
        tell(0.3 + 0.6 * share)

    def settled() -> bool:
        enough = rules.repeats is None and rounds_made >= LEAST_ROUNDS
        return enough and all(each.uncertainty <= SETTLED for each in lineup.contenders)

    def turn(contender: Contender) -> None:
        if contender in lineup.contenders:  # else an earlier turn of the round has put it out
            lineup.attempt(contender, contender.turn)

    starters = list(lineup.contenders)
    take_turns(
        starters,
        rules.schedule(len(starters), told),
        turn,
        lambda contender: contender in lineup.contenders and not settled(),
    )
    return rounds_made, settled() or rounds_made == rules.repeats
