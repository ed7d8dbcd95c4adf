"""Problems as operators of PyTorch: what PyTorch itself checks, gradients, compilation, export and threads."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fakes import CONV, LAYERNORM, MAXMAX, SOFTMAX, SUM

import dispatcher
from dispatcher.errors import DispatcherError, InputError
from dispatcher.problem.arguments import bind_numbers
from dispatcher.problem.operator import Operator

torch = pytest.importorskip("torch")

from dispatcher.torch import custom_op  # noqa: E402
from dispatcher.torch.composition import torch_pipeline  # noqa: E402

FIVE = (CONV, LAYERNORM, MAXMAX, SOFTMAX, SUM)


def numbers_of(operator: Operator) -> dict[str, Any]:
    """The numbers that the tensors do not show."""
    shown = {str(extent) for tensor in operator.problem.tensors for extent in tensor.shape or ()}
    sizes = {name: size for name, size in operator.sizes.items() if name not in shown}
    return {**sizes, **operator.scalars}


def sample(name: str, dtype: Any = torch.float32, batch: int = 1) -> tuple[dict[str, Any], dict[str, Any]]:
    """A small case: its numbers, and tensors that require gradients."""
    operator = bind_numbers(dispatcher.load_problem(name), {"batch_size": batch}, "test", case="sample")
    generator = torch.Generator().manual_seed(1)
    tensors = {
        each: torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()
        for each, shape in operator.tensor_shapes.items()
    }
    return numbers_of(operator), tensors


@pytest.mark.parametrize("name", FIVE)
def test_opcheck_and_gradcheck(name: str) -> None:
    numbers, tensors = sample(name)
    operator = custom_op(name, device="numpy", **numbers)
    assert operator is custom_op(name, device="numpy", **numbers)
    found = torch.library.opcheck(operator, tuple(tensors.values()))
    assert len(found) == 4 and set(found.values()) == {"SUCCESS"}
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors.values()]
    assert torch.autograd.gradcheck(operator, exact, fast_mode=True)


@pytest.mark.parametrize("name", FIVE)
def test_gradients_pass_through_run_and_compiled_code(name: str) -> None:
    numbers, tensors = sample(name)
    problem = dispatcher.load_problem(name)
    operator = bind_numbers(problem, {"batch_size": 1}, "test", case="sample")
    wanted = torch_pipeline(operator, lambda operand: tensors[operand.name])(tensors[operator.source])
    gradients = torch.autograd.grad((wanted * wanted).sum(), tuple(tensors.values()))
    op = custom_op(problem, device="numpy", **numbers)
    whole = torch.compile(lambda **each: op(**each) * 1.0, backend="aot_eager", fullgraph=True)
    bound = dispatcher.compile(problem, device="numpy", **numbers)
    for call in (lambda **each: dispatcher.run(problem, device="numpy", **each, **numbers), bound, whole):
        result = call(**tensors)
        torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-5)
        found = torch.autograd.grad((result * result).sum(), tuple(tensors.values()))
        torch.testing.assert_close(found, gradients, rtol=1e-3, atol=1e-4)


def test_second_derivatives() -> None:
    numbers, tensors = sample(CONV, torch.float64)
    op = custom_op(CONV, device="numpy", **numbers)
    small = [tensor.detach()[..., :3, :3, :3].clone().requires_grad_() for tensor in tensors.values()]
    assert torch.autograd.gradgradcheck(op, small, fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits(dtype: Any) -> None:
    pytest.importorskip("ml_dtypes")
    numbers, tensors = sample(LAYERNORM)
    halves = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in tensors.items()}
    op = custom_op(LAYERNORM, device="numpy", **numbers)
    op(*halves.values()).sum().backward()
    assert all(tensor.grad.dtype == dtype for tensor in halves.values())


def test_a_dynamic_batch_compiles_once() -> None:
    numbers, _ = sample(LAYERNORM)
    op = custom_op(LAYERNORM, device="numpy", **numbers)
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x, w: op(x, w) + 1, backend=backend, dynamic=True, fullgraph=True)
    for batch in (2, 3, 5):
        tensors = sample(LAYERNORM, batch=batch)[1]
        x, w = (tensor.detach() for tensor in tensors.values())
        torch.testing.assert_close(compiled(x, w), op(x, w) + 1)
    assert len(graphs) == 1


def test_export() -> None:
    numbers, tensors = sample(MAXMAX)
    x, *weights = (tensor.detach() for tensor in tensors.values())
    op = custom_op(MAXMAX, device="numpy", **numbers)

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.ParameterList(weights)

        def forward(self, x: Any) -> Any:
            return op(x, *self.weights).relu()

    module = Block()
    program = torch.export.export(module, (x,))
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert any(target.startswith("dispatcher.") for target in targets)
    torch.testing.assert_close(program.module()(x), module(x))


def test_fixed_tensors_and_any_layout() -> None:
    numbers, tensors = sample(MAXMAX)
    x, w, b = (tensor.detach() for tensor in tensors.values())
    whole = custom_op(MAXMAX, device="numpy", **numbers)(x, w, b)
    op = custom_op(MAXMAX, device="numpy", kernel=w, **numbers)
    assert op is not custom_op(MAXMAX, device="numpy", kernel=2 * w, **numbers)
    padded = torch.empty(*x.shape[:-1], x.shape[-1] + 3)[..., : x.shape[-1]].copy_(x)
    assert not padded.is_contiguous()
    result = op(padded.requires_grad_(), b)
    assert torch.equal(result, whole) and result.is_contiguous()
    result.sum().backward()
    assert padded.grad is not None and padded.grad.abs().sum() > 0


def test_threads_get_the_same_gradients() -> None:
    numbers, tensors = sample(LAYERNORM)
    op = custom_op(LAYERNORM, device="numpy", **numbers)

    def train(_: int) -> Any:
        own = [tensor.detach().clone().requires_grad_() for tensor in tensors.values()]
        op(*own).square().sum().backward()
        return [tensor.grad for tensor in own]

    with ThreadPoolExecutor(4) as pool:
        first, *others = pool.map(train, range(8))
    for other in others:
        torch.testing.assert_close(other, first)


def test_what_is_refused() -> None:
    numbers, tensors = sample(CONV)
    op = custom_op(CONV, device="numpy", **numbers)
    x, w = (tensor.detach() for tensor in tensors.values())
    with pytest.raises(DispatcherError, match=r"torch.vmap over dispatcher::.* is not supported"):
        torch.vmap(op, in_dims=(0, None))(x[None], w)
    with pytest.raises(InputError, match="an operator returns a new one"):
        custom_op(CONV, output=x)
    with pytest.raises(InputError, match="every tensor is fixed"):
        custom_op(CONV, input=x, kernel=w)
    with pytest.raises(InputError, match="tensor kernel is missing"):
        dispatcher.run(CONV, device="numpy", input=tensors["input"])
    with pytest.raises(InputError, match="output cannot be given where a gradient is wanted"):
        dispatcher.run(CONV, device="numpy", **tensors, output=x)
    with pytest.raises(InputError, match="no parameter 'strid'"):
        custom_op(CONV, strid=2)


def test_the_guide_s_programs_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DISPATCHER_DEVICE", "numpy")
    guide = (Path(__file__).resolve().parent.parent / "docs" / "pytorch.md").read_text(encoding="utf-8")
    chapters = guide[guide.index("## Tensors") :]  # test_torch_import.py runs the one before
    programs = re.findall(r"^```python\n(.*?)^```$", chapters, re.DOTALL | re.MULTILINE)
    assert len(programs) == 4
    for program in programs:
        exec(program, {})
