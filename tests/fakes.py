"""Backends that do what a test tells them to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dispatcher.backends.numpy_ref import reference
from dispatcher.interface import Device, PlannedLaunch, Tensors, Timings
from dispatcher.problem.operator import Operator

CONV = "conv-transpose-3d-asym-input-sq-kernel"
LAYERNORM = "conv-transpose3d-layernorm-gelu-scaling"
SOFTMAX = "conv-transpose3d-avgpool-clamp-softmax-multiply"
MAXMAX = "conv-transpose3d-max-max-sum"
SUM = "conv-transpose3d-sum-layernorm-avgpool-gelu"

#: Computes a result from an operator and its tensors.
Behaviour = Callable[[Operator, Tensors], Any]


def correct(operator: Operator, tensors: Tensors) -> np.ndarray:
    """The right answer."""
    return reference(operator, tensors).astype(operator.dtype)


class FakeBackend:
    """A backend that counts what is asked of it.

    Args:
        name: the backend's name.
        behaviour: computes the result of a call.
        devices: names of its devices.
        kind: kind of all of them.
        unavailable: why none of them is available; None when they are.
        unsupported: what ``supports`` answers.
        build_error: raised by ``compile``.
        device_arrays: whether it takes arrays that live on a device.
    """

    def __init__(
        self,
        name: str = "fake",
        behaviour: Behaviour = correct,
        *,
        devices: Sequence[str] = ("Fake One",),
        kind: Any = "gpu",
        unavailable: str | None = None,
        unsupported: str | None = None,
        build_error: Exception | None = None,
        device_arrays: bool = False,
    ) -> None:
        self.name = name
        self.behaviour = behaviour
        self.device_arrays = device_arrays
        self.unsupported, self.build_error = unsupported, build_error
        self.probes = self.compiles = self.calls = 0
        self.seen: list[dict[str, Any]] = []
        self.options: list[dict[str, Any]] = []
        self._devices = [
            Device(name, index, title, kind, unavailable is None, unavailable) for index, title in enumerate(devices)
        ]

    def probe(self) -> Sequence[Device]:
        """The devices it was made with."""
        self.probes += 1
        return self._devices

    def supports(self, operator: Operator, device: Device) -> str | None:
        """The answer it was made with."""
        return self.unsupported

    def compile(self, operator: Operator, device: Device, options: Mapping[str, Any]) -> FakeExecutable:
        """An executable that behaves as the backend was told to."""
        self.compiles += 1
        self.options.append(dict(options))
        if self.build_error is not None:
            raise self.build_error
        return FakeExecutable(self, operator)


class FakeExecutable:
    """Calls the backend's behaviour."""

    def __init__(self, backend: FakeBackend, operator: Operator) -> None:
        self.backend, self.operator = backend, operator
        self.launches = (PlannedLaunch("fake_launch", ("conv_transpose3d",), "fake"),)

    def __call__(self, tensors: Tensors, output: Any = None, timings: Timings | None = None) -> Any:
        self.backend.calls += 1
        self.backend.seen.append(dict(tensors))
        result = self.backend.behaviour(self.operator, tensors)
        if output is None:
            return result
        output[...] = result
        return output


def tensors_of(operator_or_shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors of the given shapes."""
    generator = np.random.default_rng(seed)
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in operator_or_shapes.items()}


def conv_tensors() -> dict[str, np.ndarray]:
    """Input and kernel of a small convolution: 2 samples, 4 channels to 6."""
    return tensors_of({"input": (2, 4, 3, 4, 5), "kernel": (4, 6, 3, 2, 2)})
