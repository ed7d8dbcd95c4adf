"""What the stored values of the bundled problems were made from: their small cases, with inputs drawn by name."""

from __future__ import annotations

import zlib

import numpy as np

from dispatcher.problem.arguments import bind_arguments, sort_arguments
from dispatcher.problem.loader import load_problem
from dispatcher.problem.operator import Operator

#: The problems that the tests of kernels look at from all sides; the others have the same steps.
FIVE = (
    "conv-transpose-3d-asym-input-sq-kernel",
    "conv-transpose3d-avgpool-clamp-softmax-multiply",
    "conv-transpose3d-layernorm-gelu-scaling",
    "conv-transpose3d-max-max-sum",
    "conv-transpose3d-sum-layernorm-avgpool-gelu",
)
CASES = ("sample", "odd")
MOST_VALUES = 32  # that are kept of a result


def operator_for(name: str, case: str, dtype: str = "float32") -> Operator:
    """A bundled problem bound to a case."""
    problem = load_problem(name)
    return bind_arguments(problem, sort_arguments(problem, {}), case=case, dtype=dtype)


def drawn_tensors(operator: Operator, case: str) -> dict[str, np.ndarray]:
    """Normally distributed inputs, the same ones always."""

    def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
        seed = zlib.crc32(f"{operator.problem.name}/{case}/{name}".encode())
        return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)

    return {name: drawn(name, shape) for name, shape in operator.tensor_shapes.items()}


def kept(result: np.ndarray) -> np.ndarray:
    """The values of a result that are stored: evenly spread, both ends among them."""
    places = np.linspace(0, result.size - 1, min(MOST_VALUES, result.size)).round().astype(int)
    values: np.ndarray = np.asarray(result).ravel()[places]
    return values
