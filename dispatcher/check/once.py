"""One operator, run and timed a few times in a row, and what came of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from dispatcher.check.comparison import Comparison, poisoned
from dispatcher.check.inputs import random_tensors
from dispatcher.check.verifying import checksums, compare_run, comparison_dict, compile_for
from dispatcher.device.selection import Choice, skipped_list
from dispatcher.interface import device_dict
from dispatcher.problem.arrays import with_own_error_state
from dispatcher.problem.messages import picked
from dispatcher.problem.operator import Operator, operator_dict

#: Told what begins and in how many steps; gives a function that takes the fraction done.
Stage = Callable[[str, int], AbstractContextManager[Callable[[float], None]]]


@dataclass(frozen=True)
class TimedRun:
    """Calls of one operator with the same tensors.

    Attributes:
        operator: what was computed.
        tensors: its inputs.
        choice: the device, and those passed over.
        result: of the last call.
        compile_s: seconds to choose the device and compile.
        first_s: seconds of the first call.
        warm_s: seconds of each later one.
    """

    operator: Operator
    tensors: Mapping[str, np.ndarray]
    choice: Choice
    result: np.ndarray
    compile_s: float
    first_s: float
    warm_s: list[float]
    _before: Mapping[str, int]

    @property
    def median_s(self) -> float | None:
        """Median of the later calls, more than 0; None where there are none."""
        return max(statistics.median(self.warm_s), 1e-9) if self.warm_s else None

    @property
    def gflops(self) -> float | None:
        """Billions of floating-point operations of the convolutions per second, in later calls."""
        return None if self.median_s is None else self.operator.flops / self.median_s / 1e9

    def compare(self, stage: Stage) -> Comparison:
        """Compare the result with the reference, and the inputs with what they were."""
        with stage("verifying", 2) as advance:
            return compare_run(self.operator, self.tensors, self._before, self.result, advance)

    def as_dict(self, comparison: Comparison | None) -> dict[str, Any]:
        """Plain lists, dicts, texts and numbers; non-finite numbers stay as they are."""
        return {
            **operator_dict(self.operator),
            "device": device_dict(self.choice.device),
            "skipped": skipped_list(self.choice.skipped),
            **picked(self, "compile_s", "first_s", "warm_s"),
            "warm_median_s": self.median_s,
            "gflops": self.gflops,
            "verified": None if comparison is None else comparison.passed,
            "comparison": comparison_dict(comparison),
        }


@with_own_error_state
def input_tensors(operator: Operator, given: Mapping[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """Every input, random where none is given, in the operator's dtype and in C order, so that no call converts it."""
    made = {} if set(given) >= set(operator.tensor_shapes) else random_tensors(operator, seed)
    return {name: np.ascontiguousarray(array, dtype=operator.dtype) for name, array in {**made, **given}.items()}


def timed_run(
    operator: Operator,
    tensors: Mapping[str, np.ndarray],
    device: str | None,
    options: Mapping[str, Any],
    repeats: int,
    checked: bool,
    stage: Stage,
) -> TimedRun:
    """Compile ``operator``, call it once and then ``repeats`` times more.

    Args:
        operator: what to compute.
        tensors: of the operator's shapes and dtype, C-contiguous.
        device: a device request as for :func:`dispatcher.compile`.
        options: tuning choices for the backend.
        repeats: 0 or more.
        checked: the result will be compared, so that it has to be known what the inputs were.
        stage: for progress.

    Raises:
        DeviceError: no device of the request can run it.
        KernelError: it did not build or run on the device that was named.
    """
    start = time.perf_counter()
    with stage("compiling", 2):
        call = compile_for(operator, device, options).prepare_bound(operator, tensors)
    compile_s = time.perf_counter() - start
    before = checksums(tensors) if checked else {}
    times: list[float] = []
    with stage(f"running on {call.choice.device.id}", repeats + 1) as advance:
        for number in range(repeats + 1):
            result = poisoned(operator.output_shape, operator.dtype)
            start = time.perf_counter()
            call(output=result)
            times.append(time.perf_counter() - start)
            advance((number + 1) / (repeats + 1))
    return TimedRun(operator, tensors, call.choice, result, compile_s, times[0], times[1:], before)
