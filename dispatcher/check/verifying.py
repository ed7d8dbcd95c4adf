"""Running problems and checking the results against the reference.

A check runs an operator on one set of inputs three times, so that a result which is right by chance or by
memory shows:

1. into an array filled with NaN: what is not written stays NaN;
2. without an output array: the result must be an array of its own, which later calls leave alone;
3. with the batch in reverse order: a result left over from an earlier call is now a wrong one. (Where batch
   items depend on each other, with negated data, and the result is not compared.)

All results are compared with one reference, and the inputs must be the same bytes afterwards.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np

from dispatcher.call.compiled import CompiledOperator, PreparedCall, Settings
from dispatcher.check.comparison import Comparison, Progress, part, poisoned, refusal, verify_result, verify_results
from dispatcher.check.inputs import INPUT_SETS, TELLING_SETS, meaningful_sets, random_tensors
from dispatcher.device.selection import first_usable, parse_request, skipped_list, usable_devices
from dispatcher.device.splitting import batch_parameter, batched_tensors
from dispatcher.errors import DeviceError, InputError, KernelError, VerificationError, suggest
from dispatcher.interface import Device, bits_of, device_dict
from dispatcher.problem.arguments import bind_numbers, check_options
from dispatcher.problem.loader import ProblemLike, load_problem, problem_names
from dispatcher.problem.messages import brief, counted, picked
from dispatcher.problem.operator import Operator, operator_dict
from dispatcher.problem.shown import Drawn
from dispatcher.problem.values import seed_value, whole_value

Outcome = Literal["passed", "failed", "error", "unsupported"]

#: Outcomes, the worst first.
OUTCOMES: tuple[Outcome, ...] = ("failed", "error", "unsupported", "passed")

#: Up to this many floating-point operations, every meaningful set of inputs is checked unless said otherwise;
#: beyond, the first alone, since the reference takes long there.
SMALL_FLOPS = 1 << 27

#: A result, and how it came about where that has to be said.
_Output = tuple[np.ndarray, str]

#: Told the problem, the device and the fraction done of one check.
CheckProgress = Callable[[str, str, float], None]


# ---- results -----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Check:
    """One problem on one device with one set of inputs.

    Attributes:
        inputs: name of the set, out of :data:`dispatcher.check.inputs.INPUT_SETS`.
        seed: seed of the input tensors.
        outcome: as for :class:`Verification`.
        reason: one line; empty when passed.
        comparison: the error figures; None when there was no result.
    """

    inputs: str
    seed: int
    outcome: Outcome
    reason: str
    comparison: Comparison | None = None

    @property
    def rank(self) -> tuple[int, float]:
        """Sorts checks from the worst to the best."""
        return (OUTCOMES.index(self.outcome), -(self.comparison.severity if self.comparison else math.inf))

    @property
    def label(self) -> str:
        """Error over bound, the larger of the elementwise and the normwise one; without it, the outcome."""
        if self.outcome == "passed" and self.comparison is not None:
            return f"{self.comparison.severity:.2g}"
        return self.outcome

    def as_dict(self) -> dict[str, Any]:
        """Plain lists, dicts, texts and numbers; non-finite numbers stay as they are."""
        return {**vars(self), "comparison": comparison_dict(self.comparison)}


@dataclass(frozen=True, repr=False)
class Verification(Drawn):
    """One problem on one device, with every set of inputs. Its figures are those of the worst check.

    Attributes:
        problem: the problem's name.
        case: the case its sizes come from.
        device: where it ran, or would have run.
        operator: what was computed.
        checks: every check that took place, in order; with an outcome of ``error`` or ``unsupported``, the one
            that ended it is the last.
        skipped: (device or backend, reason) of each device that was preferred and passed over.
    """

    problem: str
    case: str | None
    device: Device
    operator: Operator
    checks: tuple[Check, ...]
    skipped: tuple[tuple[str, str], ...] = ()

    @property
    def worst(self) -> Check:
        """The check with the worst outcome, and among equals, with the largest error over its bound."""
        return min(self.checks, key=lambda check: check.rank)

    @property
    def outcome(self) -> Outcome:
        """``passed``, ``failed``, ``error`` (a kernel did not build or run) or ``unsupported``."""
        return self.worst.outcome

    @property
    def passed(self) -> bool:
        """Whether every check passed."""
        return self.outcome == "passed"

    def _headline(self) -> str:
        return f"{self.problem} on {self.device.id}: {self.outcome}, {counted(len(self.checks), 'check')}"

    def _facts(self) -> Mapping[str, object]:
        checks = [f"{each.inputs}, seed {each.seed}: {each.label}" for each in self.checks]
        return {"reason": self.reason, "case": self.case, "error over bound": checks}

    @property
    def comparison(self) -> Comparison | None:
        """The error figures of the worst check; None when it had no result."""
        return self.worst.comparison

    @property
    def inputs(self) -> str:
        """The set of inputs of the worst check."""
        return self.worst.inputs

    @property
    def seed(self) -> int:
        """The seed of the worst check."""
        return self.worst.seed

    @property
    def reason(self) -> str:
        """Why it did not pass, in one line; empty when passed."""
        if self.outcome != "failed" or len(self.checks) == 1:
            return self.worst.reason
        wrong = [check for check in self.checks if check.outcome == "failed"]
        names = ", ".join(dict.fromkeys(check.inputs for check in wrong))
        return (
            f"{self.worst.reason} (inputs {self.inputs}, seed {self.seed}; "
            f"{len(wrong)} of {len(self.checks)} checks failed: {names})"
        )

    def worst_of(self, sets: Sequence[str]) -> list[str]:
        """For each of ``sets``, the largest error over its bound, another outcome, or nothing, as text."""
        cells = []
        for name in sets:
            ranked = sorted((check for check in self.checks if check.inputs == name), key=lambda c: c.rank)
            cells.append(ranked[0].label if ranked else "")
        return cells

    def as_dict(self) -> dict[str, Any]:
        """Plain lists, dicts, texts and numbers; non-finite numbers stay as they are."""
        return {
            **operator_dict(self.operator),
            **picked(self, "case", "inputs", "seed"),
            "device": device_dict(self.device),
            "skipped": skipped_list(self.skipped),
            **picked(self, "outcome", "reason"),
            "comparison": comparison_dict(self.comparison),
            "checks": [check.as_dict() for check in self.checks],
        }


def worst_first(results: Iterable[Verification]) -> list[Verification]:
    """``results`` from the worst to the best."""
    return sorted(results, key=lambda result: result.worst.rank)


def only_reference(results: Sequence[Verification]) -> bool:
    """Did nothing but the reference itself run, so that no device was compared with anything?"""
    return not any(result.device.kind != "reference" and result.outcome != "unsupported" for result in results)


def exit_code(results: Sequence[Verification], everywhere: bool) -> int:
    """What the command line ends with.

    Among all devices, one that cannot run a problem is no failure; that nothing but the reference can is one.
    """
    outcomes = {result.outcome for result in results}
    if "failed" in outcomes:
        return VerificationError.exit_code
    if "error" in outcomes:
        return KernelError.exit_code
    lacking = only_reference(results) if everywhere else "unsupported" in outcomes
    return DeviceError.exit_code if lacking else 0


def comparison_dict(comparison: Comparison | None) -> dict[str, Any] | None:
    """The figures of a comparison, ready for JSON but for numbers that are not finite."""
    if comparison is None:
        return None
    fields = picked(comparison, *(name for name in vars(comparison) if name != "profiles"))
    return {"normwise_error" if name == "normwise" else name: value for name, value in fields.items()}


# ---- verify ------------------------------------------------------------------------------------------------
def check_inputs(inputs: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """The names in a request for sets of inputs: a name, several with commas, a sequence of names, or ``all``.

    Returns:
        The names, each once; an empty tuple for ``all``; None for None.

    Raises:
        InputError: a name is not that of a set, or of one that shows nothing.
    """
    if inputs is None:
        return None
    if isinstance(inputs, str) and inputs == "all":
        return ()
    if not isinstance(inputs, str | Sequence):
        raise InputError(f"inputs is {brief(inputs)}; expected all, or names of sets of inputs")
    names = [name.strip() for name in inputs.split(",")] if isinstance(inputs, str) else list(inputs)
    usable = [name for name in INPUT_SETS if name != "uniform"]
    if any(isinstance(name, str) and name == "uniform" for name in names):
        raise InputError("inputs uniform hide many faults and are for timing only; use signed instead")
    wrong = [name for name in names if not isinstance(name, str) or name not in usable]
    if wrong or not names:
        given, meant = ("empty", "") if not wrong else (brief(wrong[0]), suggest(wrong[0], usable))
        raise InputError(f"inputs is {given}; expected all, or some of {', '.join(usable)}{meant}")
    return tuple(dict.fromkeys(names))


def check_seeds(seed: Any, seeds: Any) -> range:
    """The ``seeds`` seeds from ``seed`` on.

    Raises:
        InputError: ``seeds`` is not an integer of 1 or more, or a seed is out of range.
    """
    first = seed_value("seed", seed)
    count = whole_value("seeds", seeds, 1, 2**64, "an integer of 1 or more, up to 2**64")
    return range(first, seed_value("seed", first + count - 1) + 1)


def verify(
    problems: ProblemLike | Sequence[ProblemLike] | None = None,
    *,
    device: str | Device | None = "all",
    case: str | None = "sample",
    inputs: str | Sequence[str] | None = None,
    seed: int = 0,
    seeds: int = 1,
    precision: str = "fp32",
    dtype: str | None = None,
    options: Mapping[str, Any] | None = None,
    progress: CheckProgress | None = None,
    **arguments: Any,
) -> list[Verification]:
    """Run problems on random inputs and compare every element with the reference.

    Args:
        problems: one problem or several; all bundled ones when left out.
        device: ``all`` for every usable device, or a device request as for :func:`dispatcher.compile`.
        case: the case that the sizes come from; None when ``arguments`` give them all.
        inputs: the sets of inputs, out of :data:`dispatcher.check.inputs.INPUT_SETS`: names, or one text with commas
            between them; ``all`` for those that are meaningful for the problem. When left out, ``all`` for an
            operator of up to :data:`SMALL_FLOPS`, and ``signed`` beyond.
        seed: first seed of the input tensors, from 0 to 2**64 - 1.
        seeds: how many seeds, from ``seed`` on, for each set of inputs.
        precision: ``fp32`` or ``tf32``.
        dtype: of every tensor; float32 when left out.
        options: tuning choices for the backends.
        progress: told how far the checks of each problem are.
        **arguments: sizes and scalars that hold instead of the case's.

    Returns:
        One entry for each problem and device; a failure is an entry too.

    Raises:
        InputError: an argument is wrong or a tensor, or the batch is empty, so that there is nothing to compare.
        DeviceError: the device that was named does not exist.
    """
    wanted, numbers = check_inputs(inputs), check_seeds(seed, seeds)
    check_options(options)
    if not (isinstance(device, str) and device == "all"):
        parse_request(device)
    if problems is None:
        problems = problem_names()
    elif not isinstance(problems, Sequence) or isinstance(problems, str):
        problems = [problems]
    operators = [
        bind_numbers(loaded, arguments, "verify", case=case, dtype=dtype, precision=precision)
        for loaded in (load_problem(problem) for problem in problems)
    ]
    return verify_operators([(each, case) for each in operators], device, wanted, numbers, options, progress)


def verify_operators(
    operators: Sequence[tuple[Operator, str | None]],
    device: str | Device | None,
    inputs: tuple[str, ...] | None,
    seeds: Sequence[int],
    options: Mapping[str, Any] | None,
    progress: CheckProgress | None,
) -> list[Verification]:
    """:func:`verify` for operators that are bound already, each with the name of its case.

    Args:
        operators: with a batch that is not empty.
        inputs: from :func:`check_inputs`.
        seeds: from :func:`check_seeds`.
    """
    places: list[tuple[str | Device | None, Device]]
    if device == "all":
        places = [(found.id, found) for found in usable_devices()]
    else:
        places = [(device, first_usable(parse_request(device))[0])]
    results: list[Verification] = []
    following = [
        [_Subject(operator, request, place, options) for request, place in places] for operator, _ in operators
    ]
    with ThreadPoolExecutor(1, thread_name_prefix="dispatcher-compile") as aside:
        for operator, case in operators:
            subjects = following.pop(0)
            ahead = [aside.submit(subject.compile_small) for subject in (following[0] if following else ())]
            sets = [(name, number) for name in sets_for(operator, inputs) for number in seeds]
            for done, (name, number) in enumerate(sets):
                told = progress and part(partial(_advance, progress, operator, subjects), done, len(sets))
                _check_all(operator, subjects, name, number, told)
            results += [subject.finish(case) for subject in subjects]
            wait(ahead)
    return results


def sets_for(operator: Operator, wanted: tuple[str, ...] | None) -> tuple[str, ...]:
    """The sets of inputs that ``operator`` is checked with; ``wanted`` comes from :func:`check_inputs`: all that are
    meaningful, and where none is named and the reference takes long, the telling ones of them alone."""
    meaningful = meaningful_sets(operator)
    if wanted is None and operator.flops > SMALL_FLOPS:
        return tuple(name for name in meaningful if name in TELLING_SETS)
    return wanted or meaningful


def _advance(progress: CheckProgress, operator: Operator, subjects: Sequence[_Subject], fraction: float) -> None:
    """Tell how far the checks of a problem are, and where they still run."""
    where = ", ".join(subject.device.id for subject in subjects if not subject.ended)
    progress(operator.problem.name, where, fraction)


# ---- one operator on one device ----------------------------------------------------------------------------
@dataclass
class _Subject:
    """One operator on one device: compiled once, then checked with each set of inputs.

    Attributes:
        request: where it is to run.
        device: where it ran last; before that, the device to report where no other is chosen in the end.
        ended: True when it cannot run, so that no more is tried.
    """

    operator: Operator
    request: str | Device | None
    device: Device
    options: Mapping[str, Any] | None
    skipped: tuple[tuple[str, str], ...] = ()
    checks: list[Check] = field(default_factory=list)
    ended: bool = False
    compiled: CompiledOperator | None = None

    def compile_small(self) -> None:
        """Compile while the operator before is checked, where memory is no matter."""
        if self.operator.flops <= SMALL_FLOPS:
            self.compiled = compile_for(self.operator, self.request, self.options)
            self.compiled.prepare_bound(self.operator, {})  # what this raises, the first run raises again

    def run(self, name: str, seed: int, tensors: Mapping[str, np.ndarray]) -> list[_Output]:
        """Run three times; what fails becomes a check at once.

        Returns:
            What has to be compared with the reference; nothing when the check is there already.
        """
        try:
            if self.compiled is None:
                self.compiled = compile_for(self.operator, self.request, self.options)
            call = self.compiled.prepare_bound(self.operator, tensors)
            outputs = self._outputs(call, tensors)
            self.device, self.skipped = call.choice.device, call.choice.skipped
        except (KernelError, DeviceError) as error:
            self.ended = True
            outcome: Outcome = "error" if isinstance(error, KernelError) else "unsupported"
            self.checks.append(Check(name, seed, outcome, str(error)))
            return []
        if outputs is None:
            self.fail(name, seed, "a later call changed the array that an earlier call had returned")
        return outputs or []

    def fail(self, name: str, seed: int, reason: str) -> None:
        """Note a check that failed before anything could be compared."""
        self.checks.append(Check(name, seed, "failed", reason, refusal(reason)))

    def _outputs(self, call: PreparedCall, tensors: Mapping[str, np.ndarray]) -> list[_Output] | None:
        """The results of the three runs that differ; None when a later call changed an earlier result."""
        operator = self.operator
        assert self.compiled is not None
        outputs = [(call(output=poisoned(operator.output_shape, operator.dtype)), "")]
        fresh = call()
        mark = _checksum(fresh)
        turned = _reversed_batch(operator, tensors)
        other = turned or {**tensors, operator.source: np.negative(tensors[operator.source])}
        again = self.compiled.prepare_bound(operator, other)()
        if _checksum(fresh) != mark:
            return None
        outputs.append((fresh, "called again without an output array: "))
        if turned is not None:
            outputs.append((again[::-1], "called again with the batch in reverse order: "))
        first, *others = outputs
        return [first, *(output for output in others if not _same(output[0], first[0]))]

    def take(self, name: str, seed: int, outputs: Sequence[_Output], found: Sequence[Comparison]) -> None:
        """Make a check of the comparisons of a run's outputs: the worst of them counts."""
        at = max(range(len(found)), key=lambda i: (not found[i].passed, found[i].severity))
        reason = "" if found[at].passed else outputs[at][1] + found[at].reason
        self.checks.append(Check(name, seed, "passed" if found[at].passed else "failed", reason, found[at]))

    def finish(self, case: str | None) -> Verification:
        """The entry for all checks."""
        name = self.operator.problem.name
        return Verification(name, case, self.device, self.operator, tuple(self.checks), self.skipped)


def _check_all(
    operator: Operator, subjects: Sequence[_Subject], name: str, seed: int, progress: Progress | None
) -> None:
    """Check every subject that still runs with one set of inputs, against one reference."""
    tensors = random_tensors(operator, seed, kind=name)
    before = checksums(tensors)
    runs = []
    for subject in [subject for subject in subjects if not subject.ended]:
        outputs = subject.run(name, seed, tensors)
        changed = changed_inputs(before, checksums(tensors))
        if changed:
            tensors = random_tensors(operator, seed, kind=name)  # the next ones are to get the right ones
            if outputs:
                subject.fail(name, seed, changed)
        else:
            runs.append((subject, outputs))
    arrays = [array for _, outputs in runs for array, _ in outputs]
    found = iter(verify_results(operator, tensors, arrays, progress) if arrays else [])
    for subject, outputs in runs:
        if outputs:
            subject.take(name, seed, outputs, [next(found) for _ in outputs])


def _reversed_batch(operator: Operator, tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray] | None:
    """The tensors with the batch in reverse order, or None where that does more than to reverse the result."""
    parameter, _ = batch_parameter(operator)
    if not parameter or operator.batch < 2:
        return None
    batched = batched_tensors(operator, parameter)
    turned = {name: np.ascontiguousarray(tensors[name][::-1]) for name in batched}
    return {**tensors, **turned}


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    """Have two arrays the same shape and the same bits?"""
    bits = np.dtype(f"u{one.itemsize}")
    return one.shape == other.shape and np.array_equal(one.view(bits), other.view(bits))


def compile_for(
    operator: Operator, device: str | Device | None, options: Mapping[str, Any] | None = None
) -> CompiledOperator:
    """``operator`` for the best device of the request, to be compiled at the first call."""
    settings = Settings(device, precision=operator.precision, dtype=operator.dtype, options=options)
    return CompiledOperator(operator.problem, settings, {**operator.sizes, **operator.scalars}, eager=False)


def compare_run(
    operator: Operator,
    tensors: Mapping[str, np.ndarray],
    before: Mapping[str, int],
    result: np.ndarray,
    progress: Progress | None = None,
) -> Comparison:
    """Compare a result with the reference, and the inputs with their :func:`checksums` before the run."""
    reason = changed_inputs(before, checksums(tensors))
    if reason:
        return refusal(reason)
    return verify_result(operator, tensors, result, progress)


def changed_inputs(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """Which inputs have other :func:`checksums` after a run than before, as a reason; empty when none has."""
    changed = [name for name, checksum in after.items() if checksum != before[name]]
    return f"the run changed the input tensor {' and '.join(changed)}" if changed else ""


def checksums(tensors: Mapping[str, np.ndarray]) -> dict[str, int]:
    """A checksum of each tensor's bytes."""
    return {name: _checksum(array) for name, array in tensors.items()}


def _checksum(array: np.ndarray) -> int:
    return zlib.crc32(bits_of(np.ascontiguousarray(array)).data)
