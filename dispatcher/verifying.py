"""Running problems and checking the results against the reference."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from dispatcher.arguments import bind_arguments, sort_arguments
from dispatcher.compiled import CompiledOperator, PreparedCall, ProblemLike
from dispatcher.errors import DeviceError, KernelError
from dispatcher.explanation import device_dict, operator_dict, skipped_list
from dispatcher.inputs import check_seed, random_tensors
from dispatcher.interface import Device
from dispatcher.loader import load_problem, problem_names
from dispatcher.operator import Operator
from dispatcher.problem import Problem
from dispatcher.selection import devices, first_usable, parse_request
from dispatcher.verification import Comparison, poisoned, verify_result, verify_results

Outcome = Literal["passed", "failed", "error", "unsupported"]

#: Told the problem, the device and the fraction done of one check.
CheckProgress = Callable[[str, str, float], None]


@dataclass(frozen=True)
class Verification:
    """One problem on one device.

    Attributes:
        problem: the problem's name.
        case: the case its sizes come from.
        seed: seed of the input tensors.
        device: where it ran, or would have run.
        outcome: ``passed``, ``failed``, ``error`` (a kernel did not build or run) or ``unsupported``.
        reason: one line; empty when passed.
        operator: what was computed.
        comparison: the error figures; None when there was no result.
        skipped: (device or backend, reason) of each device that was preferred and passed over.
    """

    problem: str
    case: str | None
    seed: int
    device: Device
    outcome: Outcome
    reason: str
    operator: Operator
    comparison: Comparison | None = None
    skipped: tuple[tuple[str, str], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain lists, dicts, texts and numbers; non-finite numbers stay as they are."""
        return {
            **operator_dict(self.operator),
            "case": self.case,
            "seed": self.seed,
            "device": device_dict(self.device),
            "skipped": skipped_list(self.skipped),
            "outcome": self.outcome,
            "reason": self.reason,
            "comparison": comparison_dict(self.comparison),
        }


def comparison_dict(comparison: Comparison | None) -> dict[str, Any] | None:
    """The figures of a comparison, ready for JSON but for numbers that are not finite."""
    if comparison is None:
        return None
    index = comparison.worst_index
    return {
        "passed": comparison.passed,
        "max_abs_error": comparison.max_abs_error,
        "max_error_over_bound": comparison.max_error_over_bound,
        "normwise_error": comparison.normwise,
        "worst_index": None if index is None else list(index),
        "worst_value": comparison.worst_value,
        "worst_reference": comparison.worst_reference,
        "reason": comparison.reason,
    }


def verify(
    problems: ProblemLike | Sequence[ProblemLike] | None = None,
    *,
    device: str | Device | None = "all",
    case: str | None = "sample",
    seed: int = 0,
    precision: str = "fp32",
    dtype: str | None = None,
    kind: str = "signed",
    options: Mapping[str, Any] | None = None,
    progress: CheckProgress | None = None,
    **arguments: Any,
) -> list[Verification]:
    """Run problems on random inputs and compare every element with the reference.

    Args:
        problems: one problem or several; all bundled ones when left out.
        device: ``all`` for every usable device, or a device request as for :func:`dispatcher.compile`.
        case: the case that the sizes come from; None when ``arguments`` give them all.
        seed: seed of the input tensors, from 0 to 2**64 - 1.
        precision: ``fp32`` or ``tf32``.
        dtype: of every tensor; float32 when left out.
        kind: the kind of random numbers, one of :data:`dispatcher.inputs.KINDS`.
        options: tuning choices for the backends.
        progress: told how far each check is.
        **arguments: sizes and scalars that hold instead of the case's.

    Returns:
        One entry for each problem and device; a failure is an entry too.

    Raises:
        InputError: an argument is wrong.
        DeviceError: the device that was named does not exist.
    """
    check_seed(seed)
    if device != "all":
        parse_request(device)
    if problems is None:
        problems = problem_names()
    elif not isinstance(problems, Sequence) or isinstance(problems, str):
        problems = [problems]
    operators = [
        bind_arguments(loaded, sort_arguments(loaded, arguments), case=case, dtype=dtype, precision=precision)
        for loaded in (load_problem(problem) for problem in problems)
    ]
    if device == "all":
        places = [found for found in devices() if found.available]
        requests: list[str | Device | None] = [found.id for found in places]
    else:
        places, requests = [first_usable(parse_request(device))[0]], [device]
    results = []
    for operator in operators:
        tensors = random_tensors(operator, seed, kind=kind)
        runs = [
            _run(operator, request, place, tensors, options)
            for request, place in zip(requests, places, strict=True)
        ]
        arrays = [run.result for run in runs if run.result is not None]
        where = ", ".join(run.device.id for run in runs if run.result is not None)
        told = progress and partial(progress, operator.problem.name, where)
        comparisons = iter(verify_results(operator, tensors, arrays, told) if arrays else [])
        results += [run.judge(operator, case, seed, comparisons) for run in runs]
    return results


@dataclass(frozen=True)
class _Run:
    """One operator on one device, before it is compared.

    Attributes:
        device: the device that ran it, or that was to.
        skipped: devices that were preferred and passed over.
        result: what came out, where there is something to compare.
        outcome: ``failed``, ``error`` or ``unsupported`` where there is not.
        reason: why there is not.
    """

    device: Device
    skipped: tuple[tuple[str, str], ...] = ()
    result: np.ndarray | None = None
    outcome: Outcome = "passed"
    reason: str = ""

    def judge(
        self, operator: Operator, case: str | None, seed: int, comparisons: Iterator[Comparison]
    ) -> Verification:
        """The entry for this run; a run with a result takes the next comparison."""
        comparison, outcome, reason = None, self.outcome, self.reason
        if self.result is not None:
            comparison = next(comparisons)
            outcome, reason = "passed" if comparison.passed else "failed", comparison.reason
        name = operator.problem.name
        return Verification(
            name, case, seed, self.device, outcome, reason, operator, comparison, self.skipped
        )


def _run(
    operator: Operator,
    request: str | Device | None,
    device: Device,
    tensors: Mapping[str, np.ndarray],
    options: Mapping[str, Any] | None,
) -> _Run:
    """Run one operator; ``device`` is the one to report where no other is chosen in the end."""
    before = checksums(tensors)
    try:
        call = call_on(operator, tensors, request, options)
        result = call(output=poisoned(operator.output_shape, operator.dtype))
    except KernelError as error:
        return _Run(device, outcome="error", reason=str(error))
    except DeviceError as error:
        return _Run(device, outcome="unsupported", reason=str(error))
    reason = changed_inputs(before, checksums(tensors))
    if reason:
        return _Run(call.choice.device, call.choice.skipped, outcome="failed", reason=reason)
    return _Run(call.choice.device, call.choice.skipped, result)


def call_on(
    operator: Operator,
    tensors: Mapping[str, Any],
    device: str | Device | None,
    options: Mapping[str, Any] | None = None,
) -> PreparedCall:
    """Prepare a call of ``operator`` with ``tensors``, compiled for the best device of the request.

    Raises:
        DeviceError: no device of the request can run it.
        KernelError: it did not build on the device that was named.
    """
    problem: Problem = operator.problem
    compiled = CompiledOperator(
        problem,
        device=device,
        precision=operator.precision,
        dtype=operator.dtype,
        options=options,
        arguments={**operator.sizes, **operator.scalars},
        eager=False,
    )
    return compiled.prepare(**tensors)


def checked_run(
    call: PreparedCall,
    tensors: Mapping[str, np.ndarray],
    progress: Callable[[float], None] | None = None,
) -> tuple[np.ndarray, Comparison]:
    """Run a call into a poisoned array and compare the result with the reference.

    Args:
        call: what to run.
        tensors: its input tensors.
        progress: told the fraction done of the comparison.

    Returns:
        The result and what the comparison found. An input that was changed is a failure.

    Raises:
        KernelError: the device failed.
    """
    before = checksums(tensors)
    result = call(output=poisoned(call.operator.output_shape, call.operator.dtype))
    return result, compare_run(call.operator, tensors, before, result, progress)


def compare_run(
    operator: Operator,
    tensors: Mapping[str, np.ndarray],
    before: Mapping[str, int],
    result: np.ndarray,
    progress: Callable[[float], None] | None = None,
) -> Comparison:
    """Compare a result with the reference, and the inputs with their :func:`checksums` before the run."""
    reason = changed_inputs(before, checksums(tensors))
    if reason:
        return Comparison(False, float("nan"), float("nan"), float("nan"), reason=reason)
    return verify_result(operator, tensors, result, progress)


def changed_inputs(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """Which inputs have other :func:`checksums` after a run than before, as a reason; empty when none has."""
    changed = [name for name, checksum in after.items() if checksum != before[name]]
    return f"the run changed the input tensor {' and '.join(changed)}" if changed else ""


def checksums(tensors: Mapping[str, np.ndarray]) -> dict[str, int]:
    """A checksum of each tensor's bytes."""
    return {name: zlib.crc32(np.ascontiguousarray(array).data) for name, array in tensors.items()}
