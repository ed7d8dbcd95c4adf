"""Look for wrong results for a while: ``make fuzz``, or ``python -m tests.fuzz --minutes 10 --seed 0``.

Draws pipelines, geometries and element types like the tests of random operators (:mod:`tests.strategies`), numbers
spread over twenty decades or one of the sets of :mod:`dispatcher.check.inputs`, and compares each device with the
reference. In every third example calls are broken off on the way, at any line of the dispatcher or of a backend, and
the call that comes after each is compared.

Every example has a number, from which all of it follows: the line that a finding ends with repeats it alone. The exit
code is 1 when anything was wrong. Of Oclgrind, which is slow, only ``--device`` makes one of the devices.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import time
import traceback
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded

import dispatcher
from dispatcher.call.compiled import CompiledOperator
from dispatcher.check.comparison import verify_result
from dispatcher.check.inputs import meaningful_sets, random_tensors
from dispatcher.check.verifying import compile_for
from dispatcher.interface import Tensors
from dispatcher.ops.steps import Normalize, Pointwise, Reduce
from dispatcher.problem.operator import Operator
from tests import cudasim

if cudasim.requested():  # before anything looks for devices
    cudasim.activate()

from tests.signals import no_signal_here
from tests.strategies import DTYPES, Recipe, convolutions, pipelines

DECADES = 20.0
BREAKS = 6  # calls of one example that are broken off
ROOT = Path(dispatcher.__file__).resolve().parent.parent


# ---- what is drawn -----------------------------------------------------------------------------------------
def draw(number: int) -> Recipe:
    """The operator of an example."""
    drawn: list[Recipe] = []

    @seeded(number)
    @settings(
        max_examples=2, phases=[Phase.generate], database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @given(pipelines(DTYPES) if number % 3 else convolutions(DTYPES))
    def keep(recipe: Recipe) -> None:
        drawn.append(recipe)

    keep()
    return drawn[-1]  # the first is the simplest of all, whatever the seed


def spread(operator: Operator, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Numbers of both signs over twenty decades, each element, channel or place of the source with one of its own.

    Where squares or exponentials would overflow honestly, and in float16, they reach no higher than that allows.
    """
    steep = any(isinstance(step, Normalize | Pointwise | Reduce) for step in operator.steps)
    top = 2.0 if operator.dtype == "float16" else 6.0 if steep else 14.0
    tensors = random_tensors(operator, int(rng.integers(2**32)))
    data = tensors[operator.source]
    along = rng.choice(["element", "channel", "place"])
    shape = [1 if (along, axis) in (("channel", 0), ("place", 1)) else n for axis, n in enumerate(data.shape)]
    if along == "channel":
        shape[2:] = [1] * (data.ndim - 2)
    powers = 10.0 ** (top - DECADES * rng.random(shape))
    with np.errstate(under="ignore"):
        tensors[operator.source] = (data.astype(np.float64) * powers).astype(data.dtype)
    return tensors


def inputs(operator: Operator, rng: np.random.Generator) -> tuple[str, dict[str, np.ndarray]]:
    """A set of inputs and its name."""
    name = str(rng.choice(["decades", *meaningful_sets(operator)]))
    if name == "decades":
        return name, spread(operator, rng)
    return name, random_tensors(operator, int(rng.integers(2**32)), kind=name)


# ---- breaking off ------------------------------------------------------------------------------------------
class Lines:
    """Counts the lines of the dispatcher and of the backends that this thread runs; stops it at one of them."""

    def __init__(self, last: float = float("inf")) -> None:
        self.count, self.last = 0, last

    def __call__(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith((str(ROOT / "dispatcher"), str(ROOT / "backends"))):
            return None
        if event == "line" and not no_signal_here(frame):
            self.count += 1
            if self.count == self.last:
                raise KeyboardInterrupt
        return self


def _not_breaks(unraisable: Any) -> None:
    """Python's report of what a finalizer raised, but for a call that was broken off inside one."""
    if not isinstance(unraisable.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)


@contextlib.contextmanager
def traced(lines: Lines) -> Iterator[None]:
    """Let ``lines`` see what this thread runs."""
    before, reports = sys.gettrace(), sys.unraisablehook
    sys.unraisablehook = _not_breaks
    sys.settrace(lines)
    try:
        yield
    finally:
        sys.settrace(before)
        sys.unraisablehook = reports


def after_breaks(compiled: CompiledOperator, operator: Operator, tensors: Tensors, rng: np.random.Generator) -> str:
    """Break calls off at a few lines; returns what was wrong with one that came after, nothing where all was right."""
    other = random_tensors(operator, 1)
    compiled(**other)
    lines = Lines()
    with traced(lines):
        compiled(**tensors)
    for _ in range(BREAKS):
        compiled(**other)
        last = int(rng.integers(1, lines.count + 1))
        with contextlib.suppress(KeyboardInterrupt), traced(Lines(last)):
            compiled(**tensors)
        comparison = verify_result(operator, tensors, compiled(**tensors))
        if not comparison.passed:
            return f"after a call that was broken off at line {last}: {comparison.reason}"
    return ""


# ---- one example -------------------------------------------------------------------------------------------
def example(number: int, device: str) -> str:
    """Run one example; returns what was wrong with it, nothing where all was right."""
    rng = np.random.default_rng(number)
    recipe = draw(number)
    operator = recipe.bind()
    name, tensors = inputs(operator, rng)
    compiled = compile_for(operator, device)
    comparison = verify_result(operator, tensors, compiled(**tensors))
    wrong = comparison.reason
    if comparison.passed and number % 3 == 2:
        wrong = after_breaks(compiled, operator, tensors, rng)
    return wrong and f"{recipe!r}\n  inputs {name}: {wrong}"


def main() -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long to look (%(default)g)")
    parser.add_argument("--seed", type=int, default=0, help="number of the first example (%(default)d)")
    parser.add_argument("--only", type=int, help="run the example of this number and no other")
    parser.add_argument("--device", action="append", help="such as opencl:0; all usable ones without it")
    given = parser.parse_args()
    usable = given.device or [d.id for d in dispatcher.devices() if d.available and "oclgrind" not in d.name.lower()]
    numbers = itertools.count(given.seed) if given.only is None else [given.only]
    end = time.monotonic() + 60.0 * given.minutes
    done: Counter[str] = Counter()
    findings = 0
    for number, device in ((number, device) for number in numbers for device in usable):
        try:
            wrong = example(number, device)
        except Exception:
            wrong = f"{draw(number)!r}\n{traceback.format_exc()}"
        done[device] += 1
        if wrong:
            findings += 1
            print(f"{device}: {wrong}\n  again: python -m tests.fuzz --device {device} --only {number}", flush=True)
        if time.monotonic() > end:
            break
    print(", ".join(f"{count} examples on {device}" for device, count in done.items()) + f"; {findings} findings")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
