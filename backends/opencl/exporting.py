"""An operator as data for programs of any language: sources in OpenCL C, buffers with what is in them, and launches."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from dispatcher.backends.opencl.executable import shared_storage
from dispatcher.backends.opencl.implementations import choose, tasks_of
from dispatcher.backends.opencl.lowered import Counter, Lowered, Rows, Scratch, Table, Tensor, Value, Weights
from dispatcher.backends.opencl.options import Options
from dispatcher.backends.opencl.render import KernelOperands
from dispatcher.backends.opencl.runtime import BUILD_OPTIONS
from dispatcher.backends.opencl.target import Facts, Limits, Target
from dispatcher.errors import InputError, one_of
from dispatcher.interface import ExportRequest
from dispatcher.ops.steps import Convolution, ScalarOperand, TensorOperand
from dispatcher.problem.messages import brief
from dispatcher.problem.operator import Operator

_MEMORY = 1 << 40


def _facts(*, cpu: bool, vec: int, vec_double: int, cache: int) -> Facts:
    return Facts(cpu, 8 if cpu else 64, vec, vec_double, cache, _MEMORY, _MEMORY, unified=cpu, any_pointer=False)


#: What kernels are chosen for, and the algorithm: one that needs no other to fall back on.
DEVICE_CLASSES = {
    "cpu": (_facts(cpu=True, vec=8, vec_double=4, cache=256 << 10), Limits(4096, 32 << 10, 64, 8), "direct"),
    "cpu-avx512": (_facts(cpu=True, vec=16, vec_double=8, cache=512 << 10), Limits(4096, 32 << 10, 64, 8), "direct"),
    "gpu": (_facts(cpu=False, vec=1, vec_double=1, cache=0), Limits(256, 32 << 10, 32, 64), "tiled"),
}
_DIGIT = 1 << 20  # orders of weights are found in two digits, which float32 holds


@dataclass
class _Program:
    """What is being made: buffers by name, constant data, sources, launches."""

    operator: Operator
    real: np.dtype[Any]
    data: bytearray = field(default_factory=bytearray)
    buffers: list[dict[str, Any]] = field(default_factory=list)
    launches: list[dict[str, Any]] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)

    def constant(self, array: np.ndarray) -> dict[str, int]:
        """Where an array is in the data."""
        self.data += bytes(-len(self.data) % 16)
        place = {"offset": len(self.data), "bytes": array.nbytes}
        self.data += np.ascontiguousarray(array).tobytes()
        return place

    def buffer(self, name: str, elements: int, itemsize: int | None = None, **content: Any) -> dict[str, str]:
        """A buffer, as an argument."""
        if all(each["name"] != name for each in self.buffers):
            size = max(1, elements) * (itemsize or self.real.itemsize)
            self.buffers.append({"name": name, "bytes": size, **content})
        return {"buffer": name}


def export(request: ExportRequest) -> tuple[dict[str, Any], list[str], bytes]:
    """JSON, the sources that it numbers, and the data that it refers to; docs/export.md says what is in them.

    Raises:
        InputError: there are several cases, no such device class, or another dtype or precision than kernels have.
    """
    wanted = request.device_class or "cpu"
    if wanted not in DEVICE_CLASSES:
        raise InputError(f"the device class is {brief(wanted)}; {one_of(wanted, DEVICE_CLASSES)}")
    if len(request.cases) > 1:
        raise InputError(f"{len(request.cases)} cases are given, and an export to opencl holds one; export each")
    ((case, operator),) = request.cases.items()
    if operator.dtype == "float16" or operator.precision != "fp32":
        raise InputError("an export to opencl has float32 or float64, and precision fp32; leave the options out")
    facts, limits, algorithm = DEVICE_CLASSES[wanted]
    program = _Program(operator, np.dtype(operator.dtype))
    lowered = _lowered(operator, Target(facts, limits, f"exported {wanted}"), Options(algorithm, tuned="ignore"))
    homes = shared_storage([SimpleNamespace(lowered=each) for each in lowered])  # type: ignore[misc]
    for number, launch in enumerate(lowered):
        arguments = [_argument(program, homes, number, place, each) for place, each in enumerate(launch.arguments)]
        described = {"steps": list(launch.planned.steps), "algorithm": launch.planned.algorithm}
        sizes = {"global": launch.items, "local": launch.local}
        program.launches.append(
            {"source": number, "kernel": launch.kernel, **sizes, "arguments": arguments, **described}
        )
        program.sources.append(launch.text)
    shapes = {name: list(shape) for name, shape in operator.tensor_shapes.items()}
    document = {
        "schema": 1,
        "problem": request.problem.name,
        "case": case,
        "dtype": operator.dtype,
        "device_class": wanted,
        "build_options": " ".join(BUILD_OPTIONS),
        "inputs": shapes,
        "output": {"buffer": "output", "shape": list(operator.output_shape)},
        "buffers": program.buffers,
        "launches": program.launches,
    }
    return document, program.sources, bytes(program.data)


def _lowered(operator: Operator, target: Target, options: Options) -> list[Lowered]:
    """Every launch, in order."""
    refused: list[Convolution] = []
    while True:
        launches: list[Lowered] = []
        for task in tasks_of(operator, target, options, refused):
            launch = choose(task)[0].lower(task)
            if launch is None:
                assert task.group.convolution is not None
                refused.append(task.group.convolution)
                break
            launches.append(launch)
        else:
            return launches


def _argument(program: _Program, homes: dict[int, int], launch: int, place: int, argument: Any) -> dict[str, Any]:
    """An argument of a launch; its buffer is in the program then."""
    operator, name = program.operator, f"launch_{launch}_{place}"
    match argument:
        case Value(number=0):
            return _tensor(program, operator.source)
        case Value():
            home = homes[argument.number]
            elements = math.prod(operator.steps[home - 1].shape)
            return program.buffer("output" if home == len(operator.steps) else f"value_{home}", elements)
        case Rows():
            return program.buffer(f"rows_{argument.value}", argument.elements)
        case Tensor():
            return _tensor(program, argument.name)
        case Weights():
            order = _order(argument, operator.tensor_shapes[argument.name])
            content = {"tensor": argument.name, "order": program.constant(order)}
            return program.buffer(name, order.size, packed=content)
        case KernelOperands():
            placed = [
                {"at": at, "value": operand.value}
                if isinstance(operand, ScalarOperand)
                else {"at": at, "tensor": operand.name, "elements": operand.shape[1]}
                for at, operand in argument.entries
                if isinstance(operand, ScalarOperand | TensorOperand)
            ]
            return program.buffer(name, argument.size, operands=placed)
        case Table():
            return program.buffer(name, argument.numbers.nbytes, 1, data=program.constant(argument.numbers))
        case Scratch():
            return program.buffer(name, argument.elements, zeros=True)
        case Counter():
            return program.buffer(name, 3, 4, zeros=True)
    return {argument.dtype.name: int(argument)}


def _tensor(program: _Program, name: str) -> dict[str, str]:
    return program.buffer(f"input_{name}", math.prod(program.operator.tensor_shapes[name]), tensor=name)


def _order(weights: Weights, shape: tuple[int, ...]) -> np.ndarray:
    """Where each packed weight comes from, -1 for zeros."""
    places = np.arange(math.prod(shape)).reshape(shape)
    low, high = (
        np.asarray(weights.pack(digit.astype(np.float32))) for digit in (places % _DIGIT + 1, places // _DIGIT)
    )
    order = np.where(low > 0, high.astype(np.int64) * _DIGIT + low.astype(np.int64) - 1, -1).ravel()
    drawn = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    assert np.array_equal(np.where(order < 0, 0, drawn.ravel()[order]), np.ravel(weights.pack(drawn))), "not an order"
    return order.astype(np.int32)
