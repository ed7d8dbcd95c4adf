"""Problems as operators of PyTorch, with gradients: for autograd, torch.compile and torch.export."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np
import torch

from dispatcher.call.compiled import CompiledOperator, Settings
from dispatcher.device.splitting import batch_parameter, batched_tensors
from dispatcher.errors import InputError, UnsupportedError
from dispatcher.interface import bits_of
from dispatcher.problem import torchtensors
from dispatcher.problem.arguments import Arguments, bind_arguments, describe_shape, sort_arguments
from dispatcher.problem.arrays import TensorArgument, tensor_argument
from dispatcher.problem.loader import ProblemLike, load_problem
from dispatcher.problem.model import Problem
from dispatcher.problem.operator import Operator, storage_dtype
from dispatcher.torch.composition import torch_pipeline

_lock = threading.Lock()
_made: dict[str, Any] = {}  # operators by name; PyTorch keeps them for good, too
#: A number of batch items that stands for one that is not known while PyTorch traces.
_SOME_BATCH = 2


def custom_op(
    problem: ProblemLike,
    *,
    device: Any = None,
    devices: Any = None,
    precision: str = "fp32",
    case: str | None = None,
    dtype: Any = None,
    options: Mapping[str, Any] | None = None,
    **fixed: Any,
) -> Any:
    """A problem as an operator of PyTorch (``torch.library.custom_op``).

    It takes the tensors that are not fixed, in the order of the problem's parameters or by their names, and returns a
    new contiguous tensor. Gradients are those of the same steps in PyTorch, which are run once more for them. It works
    in threads, under ``torch.compile(fullgraph=True)`` and in ``torch.export``; its batch may be dynamic. Calling this
    function twice with the same arguments gives the same operator.

    Args:
        problem: see :func:`dispatcher.compile`, as for every argument that is not listed here.
        **fixed: sizes that tensors do not show, scalars, shorthands, and tensors that are the same for every call;
            these get no gradients.

    Returns:
        The operator: a ``torch.library.CustomOpDef``.

    Raises:
        InputError: an argument is wrong; see the message.
    """
    settings = Settings(device, devices, precision, case, dtype, options)
    loaded = load_problem(problem)
    return _operator(loaded, settings, sort_arguments(loaded, fixed))


def differentiable(problem: Problem, settings: Settings, bound: Arguments, arguments: Mapping[str, Any]) -> Any:
    """Call an operator of PyTorch as :class:`CompiledOperator` is called: with what was bound, and by name."""
    names = [tensor.name for tensor in problem.tensors]
    numbers = {name: value for name, value in arguments.items() if name not in names}
    fixed = replace(bound.updated(sort_arguments(problem, numbers)), tensors={})
    tensors = []
    for parameter in problem.tensors:
        value = arguments.get(parameter.name)
        if value is None and parameter.name not in bound.tensors:
            wanted = describe_shape(parameter)
            raise InputError(f"tensor {parameter.name} is missing; expected a tensor of shape {wanted}")
        tensors.append(_as_tensor(parameter.name, bound.tensors[parameter.name] if value is None else value))
    return _operator(problem, settings, fixed)(*tensors)


def _as_tensor(name: str, value: Any) -> Any:
    if torchtensors.is_tensor(value):
        return value
    array = tensor_argument(name, value).array
    return torchtensors.tensor_of(array if array.flags.writeable else array.copy())


def _operator(problem: Problem, settings: Settings, fixed: Arguments) -> Any:
    """The operator for these numbers and fixed tensors, registered when it is first asked for."""
    if fixed.output is not None:
        raise InputError(f"{problem.output.name} is the result, and an operator returns a new one; leave it out")
    # The name says what is computed, so that an exported program finds it again in another process.
    facts = ({**vars(problem), "path": None}, settings, sorted(fixed.sizes.items()), sorted(fixed.scalars.items()))
    digest = hashlib.sha256(repr(facts).encode())
    for name, tensor in sorted(fixed.tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        digest.update(bits_of(np.ascontiguousarray(tensor.array)).data)
    name = f"dispatcher::{re.sub('[^A-Za-z0-9]', '_', problem.name)}_{digest.hexdigest()[:12]}"
    with _lock:
        if name not in _made:
            _made[name] = _Definition(name, problem, settings, fixed).register()
        return _made[name]


class _Definition:
    """What PyTorch has to know of an operator: its schema, what it computes, its shapes, and its gradients."""

    def __init__(self, name: str, problem: Problem, settings: Settings, fixed: Arguments) -> None:
        self.name, self.problem, self.fixed = name, problem, fixed
        self.names = [tensor.name for tensor in problem.tensors if tensor.name not in fixed.tensors]
        if not self.names:
            raise InputError("every tensor is fixed, so that nothing is left to call the operator with; leave one out")
        self.compiled = CompiledOperator(
            problem, settings, {**fixed.sizes, **fixed.scalars, **fixed.tensors}, eager=False
        )
        kind = torchtensors.dtype_name(settings.dtype)
        self.settings = {"case": settings.case, "precision": settings.precision, "dtype": kind}

    def register(self) -> Any:
        """Define the operator and that of its gradients."""
        tensors = ", ".join(f"Tensor {name}" for name in self.names)
        custom_op = torch.library.custom_op
        operator = custom_op(self.name, self.compute, mutates_args=(), schema=f"({tensors}) -> Tensor")
        operator.register_fake(self.fake)
        schema = f"(Tensor gradient, {tensors}, bool[] wanted) -> Tensor[]"
        gradients = custom_op(f"{self.name}_backward", self.gradients, mutates_args=(), schema=schema)
        gradients.register_fake(self.fake_gradients)

        def setup_context(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
            ctx.save_for_backward(*inputs)

        def backward(ctx: Any, gradient: Any) -> tuple[Any, ...]:
            # Where second derivatives are wanted, PyTorch has to see what happens.
            function: Callable[..., Any] = self.recomputed if torch.is_grad_enabled() else gradients
            wanted = list(ctx.needs_input_grad)
            found = iter(function(gradient, *ctx.saved_tensors, wanted))
            return tuple(next(found) if each else None for each in wanted)

        operator.register_autograd(backward, setup_context=setup_context)
        for each in (operator, gradients):
            each.register_vmap(self.refuse_vmap)
        return operator

    def refuse_vmap(self, info: Any, in_dims: Any, *arguments: Any) -> NoReturn:
        """Problems have a batch axis of their own."""
        raise UnsupportedError(
            f"torch.vmap over {self.name} is not supported; give the items along the batch axis of one call, or call "
            "it in a loop"
        )

    def compute(self, *tensors: Any) -> Any:
        """The result: new memory."""
        with torch.no_grad():
            return self.compiled(**dict(zip(self.names, tensors, strict=True)))

    def bound(self, tensors: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Operator:
        """The operator for tensors of these shapes; nothing is run."""
        looked_at = dict(self.fixed.tensors)
        for name, tensor in tensors.items():
            name_of = torchtensors.dtype_name(tensor.dtype)
            kind = storage_dtype(name_of) if tensor.dtype.is_floating_point else np.dtype(np.int64)
            looked_at[name] = TensorArgument(None, shapes[name], kind, of_torch=True)
        return bind_arguments(self.problem, replace(self.fixed, tensors=looked_at), **self.settings)

    def fake(self, *tensors: Any) -> Any:
        """An empty tensor like the result; a batch whose size PyTorch does not know yet stays unknown."""
        named = dict(zip(self.names, tensors, strict=True))
        operator, batch = self._with_some_batch(named)
        if batch is None:
            operator = self.bound(named, {name: tuple(map(int, tensor.shape)) for name, tensor in named.items()})
            shape: tuple[Any, ...] = operator.output_shape
        else:
            shape = (batch, *operator.output_shape[1:])
        return tensors[0].new_empty(shape, dtype=getattr(torch, operator.dtype))

    def _with_some_batch(self, named: Mapping[str, Any]) -> tuple[Any, Any]:
        """The operator for another batch and the batch itself, where that is a symbol and nothing but the batch."""
        source = self.problem.source
        if source not in named or isinstance(named[source].shape[0], int):
            return None, None
        first = {tensor.name: str((tensor.shape or ("",))[0]) for tensor in self.problem.tensors}
        shapes = {}
        for name, tensor in named.items():
            batched = first[name] == first[source]
            rest = tuple(map(int, tensor.shape[1:] if batched else tensor.shape))
            shapes[name] = (_SOME_BATCH, *rest) if batched else rest
        operator = self.bound(named, shapes)
        parameter, _ = batch_parameter(operator)
        if not parameter or parameter in self.fixed.sizes:
            return None, None
        batch = named[source].shape[0]
        for name in batched_tensors(operator, parameter) & named.keys():
            torch._check(named[name].shape[0] == batch)
        return operator, batch

    # ---- gradients -----------------------------------------------------------------------------------------
    def recomputed(self, gradient: Any, *arguments: Any) -> list[Any]:
        """The gradients of the tensors that are wanted: the steps in PyTorch, differentiated.

        Args:
            gradient: of the result.
            *arguments: the tensors, and for each whether its gradient is wanted.
        """
        *tensors, wanted = arguments
        named = dict(zip(self.names, tensors, strict=True))
        operator = self.bound(named, {name: tuple(tensor.shape) for name, tensor in named.items()})
        kind = torch.float64 if operator.dtype == "float64" else torch.float32  # of all computation
        for name, tensor in self.fixed.tensors.items():
            named[name] = _as_tensor(name, tensor).to(gradient.device)
        create = torch.is_grad_enabled()
        with torch.enable_grad():
            converted = {name: tensor.to(kind) for name, tensor in named.items()}
            pipeline = torch_pipeline(operator, lambda operand: converted[operand.name])
            result = pipeline(converted[operator.source]).to(gradient.dtype)
            sources = [tensor for tensor, want in zip(tensors, wanted, strict=True) if want]
            # A tensor that the steps do not read has a gradient of zeros.
            found = torch.autograd.grad(
                result, sources, gradient, create_graph=create, allow_unused=True, materialize_grads=True
            )
        return list(found)

    def gradients(self, gradient: Any, *arguments: Any) -> list[Any]:
        """:meth:`recomputed` as an operator of PyTorch: its results share memory with nothing."""
        *tensors, wanted = arguments
        leaves = [
            tensor.detach().requires_grad_(want) if tensor.dtype.is_floating_point else tensor
            for tensor, want in zip(tensors, wanted, strict=True)
        ]
        # PyTorch has switched off autograd below its own operators, for which there is no public switch.
        with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False), torch.no_grad():
            found = self.recomputed(gradient, *leaves, wanted)
        taken = {gradient.untyped_storage().data_ptr(), *(tensor.untyped_storage().data_ptr() for tensor in tensors)}
        results = []
        for each in found:
            own = each.contiguous()
            if own.untyped_storage().data_ptr() in taken:
                own = own.clone()
            taken.add(own.untyped_storage().data_ptr())
            results.append(own)
        return results

    def fake_gradients(self, gradient: Any, *arguments: Any) -> list[Any]:
        """Empty tensors like the gradients."""
        *tensors, wanted = arguments
        return [
            torch.empty_like(tensor, memory_format=torch.contiguous_format)
            for tensor, want in zip(tensors, wanted, strict=True)
            if want
        ]
