"""PyTorch's tensors, without importing it: whoever passes one has done so. Messages are in its users' words."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import wraps
from typing import Any, NoReturn, ParamSpec, TypeVar

import numpy as np

from dispatcher.errors import DtypeError, InputError, first_line
from dispatcher.problem.operator import DTYPES, storage_dtype

P = ParamSpec("P")
R = TypeVar("R")

#: How PyTorch calls what a tensor may hold.
_WANTED = f"{', '.join(f'torch.{name}' for name in DTYPES)}, an integer type or torch.bool"
#: What a tensor that holds no strided elements can be turned into one with, by its layout's name.
_REMEDIES = {"torch.sparse": "to_dense()", "torch._mkldnn": "to_dense()", "torch.jagged": "to_padded_tensor(0)"}


def is_tensor(value: Any) -> bool:
    """Whether ``value`` is a tensor of PyTorch."""
    kind = getattr(sys.modules.get("torch"), "Tensor", None)
    return isinstance(kind, type) and isinstance(value, kind)


def number(name: str, tensor: Any) -> Any:
    """A tensor without axes as Python's number, one with one axis as a list of them; with more as it is.

    Raises:
        InputError: it has no value, or a gradient is wanted.
    """
    if tensor.ndim > 1:
        return tensor
    if needs_gradient([tensor]):
        raise InputError(
            f"{name} is a tensor that requires gradients, and a size or scalar gets none; expected a number: give "
            "its item(), or call inside torch.no_grad()"
        )
    try:
        return tensor.tolist()
    except Exception as error:  # on device meta, inside a transform, ...
        raise InputError(f"{name} is a tensor whose value cannot be read: {first_line(error)}") from error


def dtype_name(dtype: Any) -> Any:
    """``torch.float32`` as ``float32``; anything else as it is."""
    kind = getattr(sys.modules.get("torch"), "dtype", None)
    return str(dtype).removeprefix("torch.") if isinstance(kind, type) and isinstance(dtype, kind) else dtype


def needs_gradient(tensors: Iterable[Any]) -> bool:
    """Whether PyTorch records what is done, for one of these values that requires gradients."""
    torch = sys.modules.get("torch")
    if torch is None:
        return False
    return any(is_tensor(tensor) and tensor.requires_grad for tensor in tensors) and bool(torch.is_grad_enabled())


def outside_of_dynamo(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, which torch.compile does not look into: the compiled code ends before a call of it and goes on
    behind it."""
    disabled: list[Callable[P, R]] = []

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is None or not hasattr(dynamo, "disable"):  # nobody compiles
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(dynamo.disable(function))
        return disabled[0](*args, **kwargs)

    wrapper._torchdynamo_disable = True  # type: ignore[attr-defined]
    wrapper._torchdynamo_disable_msg = "call dispatcher.torch.custom_op(...) instead"  # type: ignore[attr-defined]
    return wrapper


# ---- to NumPy and back -------------------------------------------------------------------------------------
def host_view(name: str, tensor: Any) -> np.ndarray:
    """A tensor on the CPU as a NumPy array over the same memory.

    Raises:
        InputError: it has no elements in memory that NumPy could look at; see the message.
        DtypeError: they are neither real numbers nor bool.
    """
    torch: Any = sys.modules["torch"]
    if type(tensor) is torch.Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        with suppress(TypeError, RuntimeError):  # whatever NumPy cannot show as it is
            array: np.ndarray = tensor.numpy()
            if array.dtype.kind in "biuf":
                return array
    _refuse_without_data(name, tensor)
    kind = str(tensor.dtype).removeprefix("torch.")
    if tensor.dtype.is_complex or tensor.is_quantized or (tensor.dtype.is_floating_point and kind not in DTYPES):
        remedy = "; use its dequantize()" if tensor.is_quantized else ""
        raise DtypeError(f"tensor {name} has dtype {tensor.dtype}; expected {_WANTED}{remedy}")
    try:
        plain = tensor.detach().resolve_neg()
        whole = plain.view(torch.int16) if kind == "bfloat16" else plain
        array = whole.numpy()
        return array.view(storage_dtype(kind)) if kind == "bfloat16" else array
    except DtypeError:
        raise
    except Exception as error:  # a subclass may do as it likes
        raise InputError(f"tensor {name} cannot be read as a plain tensor: {first_line(error)}") from error


def _refuse_without_data(name: str, tensor: Any) -> None:
    """Refuse a tensor that is not what its type promises: elements, by strides, in a memory."""
    torch: Any = sys.modules["torch"]

    def refuse(what: str, remedy: str) -> NoReturn:
        raise InputError(f"tensor {name} {what}; {remedy}")

    if isinstance(tensor, torch._subclasses.FakeTensor):
        traced = "inside torch.compile and torch.export use dispatcher.torch.custom_op"
        refuse("is a FakeTensor, which has no data", traced)
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        refuse("belongs to a transform of torch.func (vmap, grad, ...), which cannot look inside", "call outside of it")
    if tensor.is_nested or tensor.layout != torch.strided:
        layout = "torch.jagged" if tensor.is_nested else str(tensor.layout)
        remedy = next((use for start, use in _REMEDIES.items() if layout.startswith(start)), "to_dense()")
        refuse(f"has layout {layout}", f"expected torch.strided: use {name}.{remedy}")
    if tensor.device.type == "meta":
        refuse("is on device meta, which has no data", "expected a tensor on cpu or cuda")
    if tensor.device.type not in ("cpu", "cuda"):
        refuse(f"is on device {tensor.device}", f"expected one on cpu or cuda: use {name}.cpu()")


class DeviceView:
    """A tensor on a CUDA device in the form that the CUDA backend reads, in whatever stream is current then."""

    def __init__(self, tensor: Any, dtype: np.dtype[Any]) -> None:
        self.tensor, self.dtype = tensor, dtype

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        torch: Any = sys.modules["torch"]
        stream, size = torch.cuda.current_stream(self.tensor.device), self.tensor.element_size()
        self.tensor.record_stream(stream)  # its memory may be of another one, and is kept until this one has passed
        return {
            "shape": tuple(self.tensor.shape),
            "strides": tuple(size * step for step in self.tensor.stride()),
            "typestr": self.dtype.str if self.dtype.kind == "f" else self.dtype.name,
            "data": (self.tensor.data_ptr(), False),
            "version": 3,
            # The interface calls the default stream 1, PyTorch 0.
            "stream": stream.cuda_stream or 1,
        }

    def memory_in_stream(self, size: int) -> tuple[Any, int]:
        """PyTorch's memory for work in the current stream, ``size`` bytes as long as the first of the two lives, and
        its address. In a capture it belongs to the graph."""
        torch: Any = sys.modules["torch"]
        taken = torch.empty(max(1, size), dtype=torch.uint8, device=self.tensor.device)
        return taken, taken.data_ptr()

    def copy(self) -> DeviceView:
        """A copy of the tensor, on its device, complete for every stream."""
        torch: Any = sys.modules["torch"]
        copy = DeviceView(self.tensor.clone(), self.dtype)
        torch.cuda.current_stream(self.tensor.device).synchronize()
        return copy


def device_view(name: str, tensor: Any) -> DeviceView:
    """A tensor on a CUDA device, to be used in place.

    Raises:
        InputError: it has no elements there by strides.
        DtypeError: they are no floating-point numbers.
    """
    _refuse_without_data(name, tensor)
    kind = str(tensor.dtype).removeprefix("torch.")
    if kind not in DTYPES:
        wanted = ", ".join(f"torch.{each}" for each in DTYPES)
        raise DtypeError(f"tensor {name} has dtype {tensor.dtype} on {tensor.device}; expected {wanted}")
    return DeviceView(tensor.detach().resolve_neg(), storage_dtype(kind))


def new_output(view: DeviceView, shape: tuple[int, ...], dtype: str) -> Any:
    """A new tensor beside another one on a CUDA device, for a result."""
    return view.tensor.new_empty(shape, dtype=getattr(sys.modules["torch"], dtype))


def tensor_of(array: Any) -> Any:
    """A tensor over the memory of ``array``, which is NumPy's or offers DLPack."""
    torch: Any = sys.modules["torch"]
    if not isinstance(array, np.ndarray):
        return torch.from_dlpack(array)
    if array.dtype.kind == "V":  # bfloat16
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def check_output(name: str, output: Any, shape: tuple[int, ...], dtype: str, inputs: Mapping[str, Any]) -> np.ndarray:
    """The memory of a tensor on the CPU that a result may be written to.

    Args:
        name: what the caller calls it.
        output: the tensor.
        shape: what the operator makes, as ``dtype``.
        inputs: the caller's tensors by name, as NumPy arrays where they are in host memory.

    Raises:
        InputError: it has another shape, dtype or layout, overlaps an input, or a gradient is wanted.
    """
    wanted = f"expected a contiguous torch.{dtype} tensor of shape {shape}"
    if needs_gradient([output, *inputs.values()]):
        raise InputError(
            f"{name} cannot be given where a gradient is wanted; leave it out, or call inside torch.no_grad()"
        )
    array = host_view(name, output)
    if array.shape != shape:
        raise InputError(f"{name} has shape {array.shape}; {wanted}")
    if str(output.dtype) != f"torch.{dtype}":
        raise DtypeError(f"{name} has dtype {output.dtype}; {wanted}")
    if not output.is_contiguous():
        raise InputError(f"{name} is not contiguous; {wanted}")
    for tensor, other in inputs.items():
        if isinstance(other, np.ndarray) and np.may_share_memory(array, other):
            raise InputError(f"{name} shares memory with tensor {tensor}; {wanted} of its own")
    return array


def written(output: Any) -> None:
    """Let autograd know that ``output`` was written to, as PyTorch's own functions do."""
    torch: Any = sys.modules["torch"]
    if not output.is_inference():
        torch.autograd.graph.increment_version(output)
