"""Random modules compute here what they compute in PyTorch in float64; ``make fuzz-torch`` tries many."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import dispatcher.torch as dispatcher_torch  # noqa: E402
from dispatcher.errors import UnsupportedError  # noqa: E402
from dispatcher.torch.compiler import backend  # noqa: E402
from tests.random_modules import written  # noqa: E402

COUNT = int(5 * float(os.environ.get("DISPATCHER_TEST_EXAMPLES", "1")))


def both(seed: int) -> tuple[Any, Any, Any, Any]:
    """A module, an input, and its results in float32 and in float64."""
    text, module = written(seed)
    space: dict[str, Any] = {}
    exec(text, space)
    (x,) = space["get_inputs"]()
    double = copy.deepcopy(module).double()
    for each in vars(double):
        if isinstance(getattr(double, each), torch.Tensor):  # which is neither a parameter nor a buffer
            setattr(double, each, getattr(double, each).double())
    with torch.no_grad():
        return module, x, copy.deepcopy(module)(x.clone()), double(x.double())


def close(found: Any, single: Any, double: Any) -> None:
    """Not much worse than float32 in PyTorch."""
    assert found.shape == double.shape
    scale = max(float(double.abs().max()), 1e-3)
    allowed = max(20 * float((single - double).abs().max()), 2e-5 * scale)
    assert float((found.double() - double).abs().max()) <= allowed


@pytest.mark.parametrize("seed", range(COUNT))
def test_a_random_module_is_imported_or_refused(seed: int) -> None:
    module, x, single, double = both(seed)
    try:
        found = dispatcher_torch.import_module(module, (x,))
    except UnsupportedError as error:
        assert all("no step for it" in each.reason or "part of a tensor" in each.reason for each in error.nodes)  # type: ignore[attr-defined]
        return
    close(found.run(x, device="numpy"), single, double)


@pytest.mark.parametrize("seed", range(COUNT))
def test_a_random_module_is_compiled(seed: int) -> None:
    module, x, single, double = both(seed)
    if x.ndim > 3 and seed % 2:
        x = x.to(memory_format=torch.channels_last if x.ndim == 4 else torch.channels_last_3d)
        with torch.no_grad():
            single = copy.deepcopy(module)(x)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend=lambda graph, inputs: backend(graph, inputs, "numpy"), fullgraph=True)
    with torch.no_grad():
        found = compiled(x)
    close(found, single, double)
    strides = [[step for step, size in zip(y.stride(), y.shape, strict=True) if size > 1] for y in (found, single)]
    assert strides[0] == strides[1]
