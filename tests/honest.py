"""An honest implementation in the operator's own arithmetic, with steps that a test may replace by wrong ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from dispatcher.backends.numpy_ref import steps as reference_steps
from dispatcher.ops.steps import Convolution, Pointwise, Step
from dispatcher.problem.operator import Operator

Tensors = Mapping[str, np.ndarray]
StepFunction = Callable[..., np.ndarray]


def conv_transpose3d(step: Convolution, x: np.ndarray, w: np.ndarray, *bias: np.ndarray) -> np.ndarray:
    """In the arithmetic of its arguments."""
    return reference_steps.convolution(step, x, w, *bias)


def pointwise(step: Pointwise, x: np.ndarray, *arguments: Any) -> np.ndarray:
    """In the arithmetic of its arguments; GELU by the textbook formula."""
    if step.function == "gelu":  # NumPy has no erf: the exact one is rounded to x's dtype
        erf = (2.0 * reference_steps.normal_cdf(x.astype(np.float64)) - 1.0).astype(x.dtype)
        return x.dtype.type(0.5) * x * (x.dtype.type(1) + erf)
    return reference_steps.POINTWISE[step.function](x, *arguments)


HONEST: dict[type[Step], StepFunction] = {**reference_steps.TABLE, Convolution: conv_transpose3d, Pointwise: pointwise}


def replaced(**functions: StepFunction) -> dict[type[Step], StepFunction]:
    """The honest functions with some replaced, by the name of the step's class."""
    return {kind: functions.get(kind.__name__, function) for kind, function in HONEST.items()}


def compute(
    operator: Operator,
    tensors: Tensors,
    steps: Mapping[type[Step], StepFunction] = HONEST,
    working: type[np.floating[Any]] | None = None,
) -> np.ndarray:
    """Compute a pipeline step after step.

    Args:
        operator: what to compute.
        tensors: every input tensor by name.
        steps: what to compute each class of steps with.
        working: the arithmetic; float32, or float64 for an operator of that dtype, when left out.

    Returns:
        The result in the operator's dtype.
    """
    if working is None:
        working = np.float64 if operator.dtype == "float64" else np.float32
    values = [tensors[operator.source].astype(working).reshape(operator.steps[0].input_shape)]

    def fetch(operand: Any) -> Any:
        if hasattr(operand, "name"):
            return tensors[operand.name].astype(working).reshape(operand.shape)
        return working(operand.value) if isinstance(operand.value, float) else values[operand.value]

    with np.errstate(all="ignore"):
        for step in operator.steps:
            operands = [fetch(operand) for operand in step.operands]
            value = steps[type(step)](step, values[step.source], *operands)
            values.append(np.ascontiguousarray(value.astype(working)))
        return values[-1].astype(operator.dtype).reshape(operator.output_shape)
