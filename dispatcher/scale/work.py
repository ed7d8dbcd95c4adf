"""A problem on a batch in chunks: what is known before anything is computed, and the operator that computes
a chunk wherever it is sent."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dispatcher.call.compiled import CompiledOperator, compile
from dispatcher.device.splitting import batch_parameter, batched_tensors
from dispatcher.errors import InputError
from dispatcher.problem.arguments import bind_arguments, sort_arguments
from dispatcher.problem.model import Problem
from dispatcher.problem.operator import Operator

#: Operators that came to this process with a chunk, by their token: the last few of them.
_here: dict[str, Work] = {}
_KEPT = 4


class Work:
    """A compiled operator with its weights, as it goes to other processes. Each compiles it once, at the first chunk.

    Args:
        compiled: the operator.
        token: the same for its copies.
    """

    def __init__(self, compiled: CompiledOperator, token: str = "") -> None:
        self.compiled, self.token = compiled, token or uuid.uuid4().hex

    def __call__(self, **tensors: np.ndarray) -> np.ndarray:
        """The result for the batch items of ``tensors``."""
        result: np.ndarray = self.compiled(**tensors)
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrived, (self.compiled, self.token)


def _arrived(compiled: CompiledOperator, token: str) -> Work:
    if token not in _here:
        _here[token] = Work(compiled, token)
        for old in list(_here)[:-_KEPT]:
            _here.pop(old, None)
    return _here[token]


@dataclass(frozen=True)
class BatchPlan:
    """A problem bound to a whole batch.

    Attributes:
        operator: of the whole batch, from which shapes and the dtype follow.
        batched: names of the tensors that come in chunks.
        given: tensors and numbers that are the same for every chunk.
    """

    operator: Operator
    batched: frozenset[str]
    given: Mapping[str, Any]

    def work(self, device: Any, options: Mapping[str, Any] | None = None) -> Work:
        """What computes a chunk on ``device``, a device request as for :func:`dispatcher.compile`."""
        operator = self.operator
        return Work(
            compile(
                operator.problem, device=device, precision=operator.precision, dtype=operator.dtype, options=options,
                **self.given,
            )
        )  # fmt: skip


def plan_batch(
    problem: Problem, arguments: Mapping[str, Any], *, case: str | None, dtype: str | None, precision: str
) -> BatchPlan:
    """Bind ``problem`` to a batch that is worked on in chunks.

    Args:
        problem: what to compute.
        arguments: tensors, of which those with a batch may be stand-ins with the right shape and dtype; numbers.
        case: a named case whose numbers hold where nothing else gives one.
        dtype: of every tensor; that of the tensors if None.
        precision: ``fp32`` or ``tf32``.

    Raises:
        InputError: an argument is wrong or missing, or a step mixes batch items.
    """
    sorted_arguments = sort_arguments(problem, dict(arguments))
    operator = bind_arguments(problem, sorted_arguments, case=case, dtype=dtype, precision=precision)
    parameter, reason = batch_parameter(operator)
    if operator.mixing:
        reason = f"step {operator.mixing[0].op.partition('.')[0]} mixes batch items"
    if reason:
        raise InputError(f"{problem.name} cannot be worked on in chunks of its batch: {reason}; use run")
    batched = frozenset(batched_tensors(operator, parameter))
    missing = [tensor.name for tensor in problem.tensors if tensor.name not in arguments]
    if missing:
        raise InputError(f"tensor {missing[0]} is missing; give it by name")
    numbers = {**operator.sizes, **operator.scalars}
    numbers.pop(parameter)
    tensors = {name: arguments[name] for name in operator.tensor_shapes if name not in batched}
    return BatchPlan(operator, batched, {**numbers, **tensors})


def stand_in(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array of that shape which takes no memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)
