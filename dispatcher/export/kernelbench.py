"""An export for KernelBench: one Python file with a class ``ModelNew``, whose kernels are built where it is imported.

The evaluator seeds, makes its model and ours, and expects that both draw the same parameters: there are the same layers
here in the same order, one for each step that has weights, and ``torch.randn`` for tensors that are no layer's.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from dispatcher.export.cuda import body, head, identifier
from dispatcher.interface import ExportRequest
from dispatcher.ops.steps import Convolution
from dispatcher.ops.symbols import c_text
from dispatcher.problem.model import Parameter, Problem
from dispatcher.problem.operator import Operator
from dispatcher.problem.userkernel import spelled

#: Words that the evaluator takes for Python statements, in the comments and names of the kernels, and others for them.
_WORDS = {"pass": "sweep", "try": "attempt", "except": "but"}
_TORCH_TYPES = {"float16": "Half", "float32": "Float", "float64": "Double"}
_ELEMENTS = {"float16": "at::Half", "float32": "float", "float64": "double"}


def write(request: ExportRequest, target: Path) -> dict[Path, str]:
    """The file."""
    operator = next(iter(request.cases.values()))
    program = body(request)[0] + "\n" + _binding(request, operator)
    text = re.sub(rf"\b({'|'.join(_WORDS)})\b", lambda found: _WORDS[found[1]], program)
    name = identifier(request.problem.name)
    source = (
        head(request, "imported by KernelBench, which calls ModelNew", mark="#")
        + _IMPORTS
        + f'cuda_source = r"""\n{text}"""\n\n'
        + _BUILT.format(name=name, parameters=_arguments(request.problem))
        + _model(operator)
    )
    return {target: source}


def layers(operator: Operator) -> dict[str, tuple[str, dict[str, str]]]:
    """Attribute of the model to the expression that makes it, and which tensors of the problem it holds, by their names
    in it."""
    problem = operator.problem
    made: dict[str, tuple[str, dict[str, str]]] = {}
    convolutions = iter(operator.convolutions)
    rank = problem.rank
    held: set[str] = set()
    for spec in problem.pipeline:
        own = {name: value for name in ("weight", "bias") if isinstance(value := spec.fields.get(name), str)}
        kind = re.sub(r"[123]d$", "", spec.op)
        if kind in ("conv", "conv_transpose"):
            expression = _convolution(next(convolutions), rank)
        elif kind in _NORMS and own.keys() == {"weight", "bias"}:
            expression = _NORMS[kind].format(rank=rank, **_norm_numbers(operator, spec.fields, own["weight"]))
        else:
            continue
        held |= set(own.values())
        made[f"{kind}_{len(made) + 1}"] = (expression, own)
    for tensor in parameters(problem):
        if tensor.name not in held:
            shape = ", ".join(map(str, operator.tensor_shapes[tensor.name]))
            made[tensor.name] = (f"nn.Parameter(torch.randn({shape}))", {"": tensor.name})
    return made


_NORMS = {
    "group_norm": "nn.GroupNorm({groups}, {channels}, eps={eps})",
    "batch_norm": "nn.BatchNorm{rank}d({channels}, eps={eps})",
    "instance_norm": "nn.InstanceNorm{rank}d({channels}, eps={eps}, affine=True)",
}


def _norm_numbers(operator: Operator, fields: Any, weight: str) -> dict[str, Any]:
    groups = fields["groups"].evaluate(operator.sizes) if "groups" in fields else 1
    eps = fields.get("eps", 1e-5)
    eps = operator.scalars[eps] if isinstance(eps, str) else eps
    return {"groups": groups, "eps": eps, "channels": max(operator.tensor_shapes[weight])}


def _convolution(step: Convolution, rank: int) -> str:
    geometry = step.geometry
    axes = geometry.axes[3 - rank :]

    def each(name: str) -> str:
        return repr(tuple(int(getattr(axis, name)) for axis in axes))

    # Only what the parameters depend on matters; the rest is there for readers.
    stride = each("stride") if step.transposed else each("step")
    more = f"stride={stride}, dilation={each('dilation')}, groups={geometry.groups}, bias={step.bias is not None}"
    kind = "ConvTranspose" if step.transposed else "Conv"
    return f"nn.{kind}{rank}d({geometry.in_channels}, {geometry.out_channels}, {each('kernel')}, {more})"


def inputs(problem: Problem) -> list[Parameter]:
    """Tensors that a call of the model brings: the pipeline's input, and others with as many batch items."""
    source = problem.source
    first = next(tensor for tensor in problem.tensors if tensor.name == source)
    batch = (first.shape or [None])[0]
    weights = {spec.fields.get("weight") for spec in problem.pipeline}
    return [
        tensor
        for tensor in problem.tensors
        if tensor is first or (tensor.name not in weights and len(tensor.shape or ()) > 1 and tensor.shape[0] == batch)  # type: ignore[index]
    ]


def parameters(problem: Problem) -> list[Parameter]:
    """The other tensors, which the model holds."""
    given = [tensor.name for tensor in inputs(problem)]
    return [tensor for tensor in problem.tensors if tensor.name not in given]


def _arguments(problem: Problem) -> str:
    return ", ".join(f"torch::Tensor {_local(tensor.name)}" for tensor in problem.tensors)


def _local(name: str) -> str:
    """The name of a tensor in C++, which no other variable there has."""
    return f"{name}_tensor"


def _binding(request: ExportRequest, operator: Operator) -> str:
    """The function that Python calls."""
    problem = request.problem
    # Where axes are numbers, the operator of this case's axes.
    symbolic = next(
        bound for fixed, bound in request.general if all(operator.sizes[name] == value for name, value in fixed.items())
    )
    seen: dict[str, str] = {}
    for tensor in problem.tensors:
        for axis, extent in enumerate(tensor.shape or ()):
            seen.setdefault(str(extent), f"{_local(tensor.name)}.size({axis})")
    element, kind = _ELEMENTS[operator.dtype], _TORCH_TYPES[operator.dtype]
    lines = []
    for tensor in problem.tensors:
        name = _local(tensor.name)
        axes = len(tensor.shape or ())
        lines += [
            f"TORCH_CHECK({name}.is_cuda() && {name}.scalar_type() == torch::k{kind} && {name}.dim() == {axes},",
            f'            "{name}: expected {axes} axes of {operator.dtype} on a CUDA device");',
            f"{name} = {name}.contiguous();",
            f"kernel_dispatcher::point(a.{spelled(tensor.name, 'cu')}, {name}.data_ptr<{element}>());",
        ]
    numbers = {**operator.sizes, **operator.scalars}
    lines += [f"a.{spelled(name, 'cu')} = {seen.get(name, c_text(value))};" for name, value in numbers.items()]
    shape = ", ".join(c_text(extent) for extent in symbolic.output_shape)
    source = _local(operator.source)
    output = spelled(problem.output.name, "cu")
    filled = "".join(f"  {line}\n" for line in lines)
    names = {"parameters": _arguments(problem), "source": source, "output": output, "element": element}
    return _FORWARD.format(**names, body=filled, shape=shape)


def _model(operator: Operator) -> str:
    problem, made = operator.problem, layers(operator)
    places = {
        tensor: f"self.{attribute}{'.' if inner else ''}{inner}"
        for attribute, (_, held) in made.items()
        for inner, tensor in held.items()
    }
    given = [tensor.name for tensor in inputs(problem)]
    for step in operator.convolutions:  # of problems without a channel axis
        shape = operator.tensor_shapes[step.weight.name]
        if len(shape) < problem.rank + 2:
            places[step.weight.name] += f".view({', '.join(map(str, shape))})"
    arguments = ", ".join(places.get(tensor.name, spelled(tensor.name)) for tensor in problem.tensors)
    layers_text = "".join(f"        self.{name} = {expression}\n" for name, (expression, _) in made.items())
    return _CLASS.format(layers=layers_text, inputs=", ".join(map(spelled, given)), arguments=arguments)


_IMPORTS = """\
import torch
from torch import nn
from torch.utils.cpp_extension import load_inline

"""

_FORWARD = """\
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/extension.h>

torch::Tensor forward({parameters}) {{
  using namespace kernel_dispatcher;
  kernel_dispatcher::Arguments a = {{}};
  const c10::cuda::CUDAGuard guard({source}.device());
{body}  torch::Tensor result = torch::empty({{{shape}}}, {source}.options());
  kernel_dispatcher::point(a.{output}, result.data_ptr<{element}>());
  const int64_t bytes = kernel_dispatcher::memory_bytes(a);
  torch::Tensor memory = torch::empty({{bytes}}, {source}.options().dtype(torch::kUInt8));
  const cudaError_t error = kernel_dispatcher::enqueue(a, memory.data_ptr(), c10::cuda::getCurrentCUDAStream());
  TORCH_CHECK(error == cudaSuccess, "the kernels were not launched: ", cudaGetErrorString(error));
  return result;
}}
"""

_BUILT = """\
extension = load_inline(
    name="{name}",
    cpp_sources="torch::Tensor forward({parameters});",
    cuda_sources=cuda_source,
    functions=["forward"],
    extra_cuda_cflags=["-O2", "-U__CUDA_NO_HALF_CONVERSIONS__", "-U__CUDA_NO_HALF_OPERATORS__"],
)


"""

_CLASS = '''\
class ModelNew(nn.Module):
    """The layers hold the parameters; the kernels compute all that they and the rest of the model compute."""

    def __init__(self, *init_inputs):
        super().__init__()
{layers}
    def forward(self, {inputs}):
        return extension.forward({arguments})
'''
