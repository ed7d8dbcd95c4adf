"""Tensors of PyTorch wherever arrays go: in kind, in place, and refused in its users' words."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from conftest import Install
from fakes import CONV, FakeBackend, conv_tensors

import dispatcher
from dispatcher.errors import DispatcherError, DtypeError, InputError
from dispatcher.interface import Device

torch = pytest.importorskip("torch")
pytest.importorskip("ml_dtypes")


def given(dtype: Any = None) -> dict[str, Any]:
    return {name: torch.from_numpy(array).to(dtype) for name, array in conv_tensors().items()}


def expected(tensors: dict[str, Any] | None = None) -> Any:
    tensors = given() if tensors is None else tensors
    return torch.nn.functional.conv_transpose3d(tensors["input"], tensors["kernel"])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_in_kind_on_every_device(backend_device: Device, dtype: str) -> None:
    kind = getattr(torch, dtype)
    tensors = given(kind)
    wanted = expected({name: tensor.double() for name, tensor in tensors.items()})
    result = dispatcher.run(CONV, device=backend_device, stride=torch.tensor(1), **tensors)
    assert type(result) is torch.Tensor and result.dtype == kind and result.is_contiguous()
    tolerance = 4 * torch.finfo(kind).eps
    torch.testing.assert_close(result.double(), wanted, rtol=tolerance, atol=4 * tolerance)
    output = torch.full_like(result, torch.nan)
    version = output._version
    assert dispatcher.run(CONV, device=backend_device, **tensors, output=output) is output
    assert torch.equal(output, result) and output._version > version
    strided = {name: tensor.to(memory_format=torch.channels_last_3d) for name, tensor in tensors.items()}
    assert torch.equal(dispatcher.run(CONV, device=backend_device, **strided), result)


def test_bfloat16_rounds_to_the_nearest_and_keeps_nan(backend_device: Device) -> None:
    numbers = [1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, -3.4e38, 1e-40, -0.0, np.nan, np.inf, 1 + 2**-8 + 2**-20]
    x = torch.tensor([[numbers]], dtype=torch.float32)
    unit = {"name": "by-one", "rank": 1, "pipeline": [{"op": "scale", "by": "by"}]}
    parameters = [
        {"name": "x", "type": "tensor", "const": True, "shape": ["n", "c", "w"]},
        {"name": "y", "type": "tensor", "const": False},
        *({"name": name, "type": "size_t"} for name in "ncw"),
        {"name": "by", "type": "double"},
    ]
    halved = x.bfloat16()
    result = dispatcher.run({**unit, "parameters": parameters}, device=backend_device, x=halved, by=1 + 2**-8)
    wanted = (halved.float() * (1 + 2**-8)).bfloat16()
    assert torch.equal(result.isnan(), wanted.isnan())
    assert torch.equal(result.nan_to_num(7.0), wanted.nan_to_num(7.0))


@pytest.mark.parametrize("bound", [False, True])
def test_a_warm_call_copies_no_byte(install_backends: Install, monkeypatch: pytest.MonkeyPatch, bound: bool) -> None:
    tensors = given()
    made = dispatcher.run(CONV, device="numpy", **conv_tensors())
    backend = FakeBackend("cuda", lambda operator, tensors: made)
    install_backends(backend)
    compiled = dispatcher.compile(CONV, device="cuda", **({"kernel": tensors.pop("kernel")} if bound else {}))
    compiled(**tensors)
    copied, array_of = 0, np.array

    def counting(*arguments: Any, **options: Any) -> np.ndarray:
        nonlocal copied
        result = array_of(*arguments, **options)
        copied += result.nbytes
        return result

    for name in ("array", "ascontiguousarray", "copy"):
        monkeypatch.setattr(np, name, counting)
    result = compiled(**tensors)
    monkeypatch.undo()
    assert copied == 0
    for name, tensor in tensors.items():
        assert backend.seen[-1][name].ctypes.data == tensor.data_ptr()
    assert result.data_ptr() == made.ctypes.data
    output = torch.empty_like(result)
    assert compiled(**tensors, output=output) is output and torch.equal(output, result)


def test_mixed_and_bound_tensors() -> None:
    tensors, arrays = given(), conv_tensors()
    run = dispatcher.compile(CONV, device="numpy", kernel=torch.nn.Parameter(tensors["kernel"]))
    assert isinstance(run(input=arrays["input"]), np.ndarray)
    assert isinstance(run(input=tensors["input"]), torch.Tensor)
    assert torch.equal(copy.deepcopy(run)(input=tensors["input"]), run(input=tensors["input"]))
    mixed = dispatcher.run(CONV, device="numpy", input=arrays["input"], kernel=tensors["kernel"])
    assert isinstance(mixed, torch.Tensor)
    assert isinstance(dispatcher.compile(CONV, device="numpy", **tensors)(), torch.Tensor)
    assert torch.equal(dispatcher.run(CONV, device="numpy", dtype=torch.float32, **tensors), mixed)


def test_parameters_and_views() -> None:
    tensors = given()
    wanted = dispatcher.run(CONV, device="numpy", **tensors)
    with torch.no_grad():
        result = dispatcher.run(
            CONV, device="numpy", input=tensors["input"], kernel=torch.nn.Parameter(tensors["kernel"])
        )
        assert torch.equal(result, wanted) and not result.requires_grad
    with torch.inference_mode():
        output = torch.empty_like(wanted)
        assert torch.equal(dispatcher.run(CONV, device="numpy", **tensors, output=output), wanted)
    negated = torch._neg_view(-tensors["input"])
    assert negated.is_neg()
    assert torch.equal(dispatcher.run(CONV, device="numpy", **{**tensors, "input": negated}), wanted)
    wide = tensors["input"].repeat_interleave(2, -1)[..., ::2]
    assert torch.equal(dispatcher.run(CONV, device="numpy", **{**tensors, "input": wide}), wanted)
    compiled = torch.compile(lambda x: dispatcher.run(CONV, device="numpy", input=x, kernel=tensors["kernel"]) * 2,
                             backend="eager")  # fmt: skip
    assert torch.equal(compiled(tensors["input"]), 2 * wanted)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda x: x.to("meta"), InputError, "is on device meta"),
        (lambda x: x.to_sparse(), InputError, r"layout torch.sparse_coo.*input.to_dense\(\)"),
        (lambda x: x.to(torch.complex64), DtypeError, "dtype torch.complex64; expected torch.float16, torch.bfloat16"),
        (lambda x: x.to(torch.float8_e4m3fn), DtypeError, "dtype torch.float8_e4m3fn"),
        (lambda x: x.double(), DtypeError, r"kernel.to\(torch.float64\)"),
        (lambda x: torch._subclasses.FakeTensorMode().from_tensor(x), InputError, "FakeTensor.*custom_op"),
        (lambda x: torch.nested.nested_tensor([x]), InputError, "torch.jagged"),
    ],
)
def test_what_is_refused(change: Any, error: type[Exception], message: str) -> None:
    tensors = given()
    with pytest.raises(error, match=message):
        dispatcher.run(CONV, device="numpy", **{**tensors, "input": change(tensors["input"])})


def test_quantised_tensors_and_transforms_are_refused() -> None:
    tensors = given()
    with pytest.warns(UserWarning) if hasattr(torch, "quantize_per_tensor") else pytest.raises(AttributeError):
        quantised = torch.quantize_per_tensor(tensors["input"], 0.1, 0, torch.qint8)
    with pytest.raises(DtypeError, match=r"dequantize\(\)"):
        dispatcher.run(CONV, device="numpy", **{**tensors, "input": quantised})
    for transform, given_x in ((torch.vmap, tensors["input"][None]), (torch.func.functionalize, tensors["input"])):
        with pytest.raises(InputError, match=r"transform of torch\.func"):
            transform(lambda x: dispatcher.run(CONV, device="numpy", **{**tensors, "input": x}))(given_x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda y, x: y.double(), "output has dtype torch.float64; expected a contiguous torch.float32 tensor"),
        (lambda y, x: y[:1], r"output has shape \(1, "),
        (lambda y, x: y.to(memory_format=torch.channels_last_3d), "output is not contiguous"),
        (lambda y, x: x, "output shares memory with tensor input"),
        (lambda y, x: y.requires_grad_(), "gradient is wanted.*no_grad"),
    ],
)
def test_outputs_that_will_not_do(make: Any, message: str) -> None:
    tensors = given()
    whole = torch.zeros(expected().numel() + tensors["input"].numel())
    y = whole[: expected().numel()].view(expected().shape)
    if "shares" in message:
        tensors["input"] = y.flatten()[: tensors["input"].numel()].view(tensors["input"].shape)
    with pytest.raises(DispatcherError, match=message):
        dispatcher.run(CONV, device="numpy", **tensors, output=make(y, y))


def test_tensors_as_numbers() -> None:
    tensors = given()
    wanted = dispatcher.run(CONV, device="numpy", **tensors, stride=2)
    for stride in (torch.tensor(2), torch.tensor([2, 2, 2]), [torch.tensor(2), 2, 2]):
        assert torch.equal(dispatcher.run(CONV, device="numpy", **tensors, stride=stride), wanted)
    for wrong in (torch.tensor(2.0), torch.tensor(True), torch.ones(2, 2), torch.tensor(2, device="meta")):
        with pytest.raises(InputError, match="stride"):
            dispatcher.run(CONV, device="numpy", **tensors, stride=wrong)
    with pytest.raises(InputError, match="stride is a tensor that requires gradients"):
        dispatcher.run(CONV, device="numpy", **tensors, stride=torch.tensor(2.0, requires_grad=True))


def test_new_weights_for_a_compiled_operator() -> None:
    tensors = given()
    weight = tensors["kernel"].clone()
    run = dispatcher.compile(CONV, device="numpy", kernel=weight)
    first = run(input=tensors["input"])
    weight *= 2
    assert torch.equal(run(input=tensors["input"]), first)
    run.update(kernel=weight)
    assert torch.equal(run(input=tensors["input"]), 2 * first)
    run.update(kernel=tensors["kernel"].numpy())
    assert torch.equal(run(input=tensors["input"]), first)
    for wrong, message in (
        ({"kernel": weight[:2]}, "tensor kernel has shape"),
        ({"kernel": weight.double()}, "tensor kernel has dtype float64; expected float32"),
        ({"input": tensors["input"]}, "'input' is not a bound tensor; expected one of those given to compile: kernel"),
    ):
        with pytest.raises(InputError, match=message):
            run.update(**wrong)
    assert torch.equal(run(input=tensors["input"]), first)


def test_kernels_in_c_have_no_bfloat16() -> None:
    with pytest.raises(DtypeError, match="dtype is bfloat16, which a kernel of your own cannot have"):
        dispatcher.verify_kernel(CONV, "kernel.cl", case="sample", dtype="bfloat16")
