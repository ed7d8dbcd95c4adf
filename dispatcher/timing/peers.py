"""Other libraries that run the same operators: PyTorch, ONNX Runtime and OpenVINO, for comparison.

A library is imported when one of its peers is made; importing this module loads none of them. Each peer takes the
input as a NumPy array in host memory and gives the result back as one; weights are known beforehand and packed,
optimised or compiled as the library likes it.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from dispatcher.errors import InputError, UnsupportedError, install, one_of
from dispatcher.interface import Tensors, Timings
from dispatcher.ops.steps import (
    Convolution,
    Normalize,
    Operand,
    Pointwise,
    Pool,
    Reduce,
    ScalarOperand,
    Softmax,
    ValueOperand,
)
from dispatcher.ops.vocabulary import MAXIMUM
from dispatcher.problem.messages import brief
from dispatcher.problem.operator import Operator

#: Our error bound grants sums of float32 products a small multiple of sqrt(K) roundings. A peer may be worse
#: by this factor before it counts as wrong; how far each one was is part of the results.
PEER_SLACK = 4.0


#: A peer cannot run this operator here.
Unsupported = UnsupportedError


#: A prepared peer: runs once, from the input's array to the result's, and waits for it. Fills its argument in where it
#: runs on a device with a clock of its own; else leaves it alone.
PeerCall = Callable[[Timings | None], np.ndarray]
#: Prepares a peer from an operator, every input tensor by name in the operator's dtype, the number of threads on the
#: CPU, and the number of the CUDA device to run on (None: on the CPU). It raises ImportError when the library is not
#: installed, Unsupported when it cannot run the operator there, and whatever the library raises.
MakePeer = Callable[[Operator, Tensors, int, int | None], PeerCall]


@dataclass(frozen=True)
class Peer:
    """A library in one way of using it.

    Attributes:
        label: what tables call it.
        modules: what it imports; all of them have to be installed.
        make: prepares it.
        after: backends whose drivers have to be loaded before these modules.
        gpu: it runs on CUDA devices alone.
    """

    label: str
    modules: tuple[str, ...]
    make: MakePeer
    after: tuple[str, ...] = ()
    gpu: bool = False


def scalar(operand: Operand) -> float:
    """The value of a scalar operand."""
    if not isinstance(operand, ScalarOperand):
        raise Unsupported(f"expected a number, got {operand}")
    return operand.value


# ---- what is global ----------------------------------------------------------------------------------------
_undo: ContextVar[ExitStack] = ContextVar("_undo")


@contextmanager
def settings_kept() -> Iterator[None]:
    """Put back in the end what peers set for the whole process, since their libraries have it there only."""
    with ExitStack() as undo:
        undo.callback(sys.setrecursionlimit, sys.getrecursionlimit())  # torch.compile raises it
        token = _undo.set(undo)
        try:
            yield
        finally:
            _undo.reset(token)


def _keep(read: Callable[[], Any], write: Callable[[Any], Any]) -> None:
    """Have a setting put back when :func:`settings_kept` ends, if it has changed by then."""
    before = read()

    def put_back() -> None:
        if read() != before:
            write(before)

    undo = _undo.get(None)
    if undo is not None:
        undo.callback(put_back)


@contextmanager
def environment_kept() -> Iterator[None]:
    """Put back in the end what a library changes among the variables of the environment."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


# ---- PyTorch -----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class TorchWay:
    """A way of using PyTorch.

    Attributes:
        label: what tables call it.
        last: the convolution's tensors are in the memory format channels_last_3d, or channels_last.
        mode: of torch.compile; None for eager.
        search: cuDNN times its algorithms, which is not PyTorch's default: ``torch.backends.cudnn.benchmark``.
    """

    label: str
    last: bool = False
    mode: str | None = None
    search: bool = False


def torch_function(operator: Operator, way: TorchWay, tensor: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """All steps as one function from a contiguous tensor of PyTorch to another, in the given way.

    Args:
        tensor: gives the tensor of an operand, on the device that computes.

    Raises:
        Unsupported: there is no such way of computing it.
    """
    import torch

    rank, axes = operator.problem.rank, operator.problem.rank + 2
    memory_format = torch.contiguous_format
    if way.last and rank == 1:
        raise Unsupported("PyTorch has no such memory format for one spatial axis")
    if way.last:
        memory_format = torch.channels_last_3d if rank == 3 else torch.channels_last

    def constant(operand: Any) -> Any:
        found = tensor(operand)
        return found.to(memory_format=memory_format) if found.ndim == axes else found

    function = torch_pipeline(operator, constant)
    if way.mode is not None:
        # All pipelines share one code object. Each has its own sizes, and none may quietly run uncompiled.
        config = torch._dynamo.config
        _keep(lambda: config.recompile_limit, partial(setattr, config, "recompile_limit"))
        config.recompile_limit = 64
        function = torch.compile(function, dynamic=False, fullgraph=True, mode=way.mode)
    return lambda x: function(x.to(memory_format=memory_format)).contiguous()


def torch_peer(
    operator: Operator, tensors: Tensors, threads: int, gpu: int | None = None, *, way: TorchWay
) -> PeerCall:
    """PyTorch, in one way of using it, on the CPU or a CUDA device."""
    import torch

    if gpu is None and operator.precision != "fp32":
        raise Unsupported(f"precision {operator.precision} exists on GPUs only")
    if gpu is None and way.search:
        raise Unsupported("there is cuDNN on NVIDIA's GPUs only")
    if gpu is not None and not torch.cuda.is_available():
        raise Unsupported("this PyTorch sees no CUDA device; install one that is built for CUDA")
    _keep(torch.get_num_threads, torch.set_num_threads)
    torch.set_num_threads(threads)  # PyTorch has this for the whole process only
    device = torch.device("cpu" if gpu is None else f"cuda:{gpu}")
    function = torch_function(operator, way, lambda operand: torch.from_numpy(tensors[operand.name]).to(device))
    shape, rank = operator.steps[0].input_shape, operator.problem.rank
    source = torch.from_numpy(tensors[operator.source]).reshape(*shape[:2], *shape[5 - rank :])
    if gpu is not None:
        # Switching TF32 on or off changes the first one too, which has more values: it is put back last.
        _keep(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision)
        matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
        for owner, name in ((matmul, "allow_tf32"), (cudnn, "allow_tf32"), (cudnn, "benchmark")):
            _keep(partial(getattr, owner, name), partial(setattr, owner, name))
        return _on_gpu(torch, function, source, device, way.search, operator.precision == "tf32")

    def call(timings: Timings | None = None) -> np.ndarray:
        with torch.no_grad():
            result: np.ndarray = function(source).numpy()
        return result

    return call


def set_torch(torch: Any, *, tf32: bool, search: bool) -> None:
    """Set what PyTorch has for the whole process, and another way may have changed."""
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = search


def _on_gpu(torch: Any, function: Any, source: Any, device: Any, search: bool, tf32: bool) -> PeerCall:
    """A call that uploads, computes and downloads, with an event between each of them."""

    def call(timings: Timings | None = None) -> np.ndarray:
        set_torch(torch, tf32=tf32, search=search)
        with torch.no_grad(), torch.cuda.device(device):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
            events[0].record()
            x = source.to(device)
            events[1].record()
            y = function(x)
            events[2].record()
            result: np.ndarray = y.cpu().numpy()
            events[3].record()
            torch.cuda.synchronize()
            if timings is not None:
                spans = [1e-3 * a.elapsed_time(b) for a, b in itertools.pairwise(events)]
                timings.upload_s, timings.kernel_s, timings.download_s = spans
                timings.clock = "device"
        return result

    return call


def torch_pipeline(operator: Operator, constant: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """All steps as one PyTorch function; see :func:`dispatcher.torch.composition.torch_pipeline`."""
    from dispatcher.torch import composition

    return composition.torch_pipeline(operator, constant)


# ---- ONNX --------------------------------------------------------------------------------------------------
def onnx_model(operator: Operator, tensors: Tensors) -> bytes:
    """The operator as an ONNX model of one input and one output, weights included."""
    if operator.problem.rank < 3 or len(operator.axes) < 5:
        raise Unsupported("values of fewer than five axes have no ONNX form here")
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    nodes: list[Any] = []
    constants: list[Any] = []

    def constant(value: Any, dtype: Any = np.float32) -> str:
        name = f"constant_{len(constants)}"
        constants.append(numpy_helper.from_array(np.ascontiguousarray(value, dtype), name))
        return name

    def node(op: str, *inputs: str, **attributes: Any) -> str:
        name = f"value_{len(nodes)}"
        nodes.append(helper.make_node(op, list(inputs), [name], **attributes))
        return name

    def argument(operand: Operand) -> str:
        if isinstance(operand, ValueOperand):
            return values[operand.value]
        return constant(operand.value if isinstance(operand, ScalarOperand) else tensors[operand.name])

    def affine(value: str, step: Normalize) -> str:
        for op, operand in (("Mul", step.weight), ("Add", step.bias)):
            if operand is not None:
                value = node(op, value, constant(tensors[operand.name].reshape(operand.shape)))
        return value

    values = ["input"]
    for step in operator.steps:
        value = values[step.source]
        match step:
            case Convolution(geometry=geometry, transposed=transposed):
                attributes = {
                    "kernel_shape": [axis.kernel for axis in geometry.axes],
                    "dilations": [axis.dilation for axis in geometry.axes],
                    "group": geometry.groups,
                }
                if transposed:
                    attributes["strides"] = [axis.stride for axis in geometry.axes]
                    attributes["output_padding"] = [axis.output_padding for axis in geometry.axes]
                    pads = [axis.padding for axis in geometry.axes] * 2
                else:
                    attributes["strides"] = [axis.step for axis in geometry.axes]
                    pads = [axis.ordinary_padding[end] for end in (0, 1) for axis in geometry.axes]
                inputs = [value, constant(tensors[step.weight.name])]
                if step.bias is not None:
                    inputs.append(constant(tensors[step.bias.name].ravel()))
                op = "ConvTranspose" if transposed else "Conv"
                value = node(op, *inputs, pads=pads, **attributes)
            case Pointwise(form=form, arguments=arguments) if form.onnx:
                if form.onnx_attributes:
                    named = zip(form.onnx_attributes, map(scalar, arguments), strict=True)
                    value = node(form.onnx, value, **dict(named))
                else:
                    value = node(form.onnx, value, *map(argument, arguments))
            case Normalize(groups=1):
                # In primitives: both libraries fuse them, and are slower with the LayerNormalization
                # operator between two transpositions, OpenVINO several times.
                axes = constant(step.axes, np.int64)
                centred = node("Sub", value, node("ReduceMean", value, axes, keepdims=1))
                variance = node("ReduceMean", node("Mul", centred, centred), axes, keepdims=1)
                deviation = node("Sqrt", node("Add", variance, constant(step.eps)))
                value = affine(node("Div", centred, deviation), step)
            case Softmax(axes=(2, 3, 4)):
                flat = node("Reshape", value, constant([*step.shape[:2], -1], np.int64))
                value = node("Softmax", flat, axis=2)
                value = node("Reshape", value, constant(step.shape, np.int64))
            case Softmax(axes=(axis,)):
                value = node("Softmax", value, axis=axis)
            case Pool(window=window) if step.plain:
                op = "MaxPool" if step.form is MAXIMUM else "AveragePool"
                value = node(op, value, kernel_shape=list(window), strides=list(window))
            case Reduce(form=form) if form.onnx:
                value = node(form.onnx, value, constant(step.axes, np.int64), keepdims=1)
            case _:
                raise Unsupported(f"step {step.op} has no ONNX form here")
        values.append(value)
    nodes[-1].output[0] = "output"

    def info(name: str, shape: Sequence[int]) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape))

    shape = operator.tensor_shapes[operator.source]
    graph = helper.make_graph(
        nodes, "problem", [info("input", shape)], [info("output", operator.output_shape)], constants
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(model)
    serialised: bytes = model.SerializeToString()
    return serialised


def _cpu_float32(operator: Operator, gpu: int | None) -> None:
    """Check that a peer which computes in float32 on the CPU is asked for nothing else.

    Raises:
        Unsupported: it is.
    """
    if gpu is not None:
        raise Unsupported("it runs on the CPU here, and the device is a GPU")
    if operator.dtype != "float32" or operator.precision != "fp32":
        raise Unsupported(f"it computes in float32 here, not in {operator.dtype} ({operator.precision})")


def onnxruntime_peer(operator: Operator, tensors: Tensors, threads: int, gpu: int | None) -> PeerCall:
    """ONNX Runtime's CPU provider, writing into an array that is allocated beforehand."""
    _cpu_float32(operator, gpu)
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(onnx_model(operator, tensors), options, providers=["CPUExecutionProvider"])
    x, y = tensors[operator.source], np.empty(operator.output_shape, np.float32)

    def call(timings: Timings | None = None) -> np.ndarray:
        binding = session.io_binding()
        binding.bind_input("input", "cpu", 0, np.float32, x.shape, x.ctypes.data)
        binding.bind_output("output", "cpu", 0, np.float32, y.shape, y.ctypes.data)
        session.run_with_iobinding(binding)
        return y

    return call


def openvino_peer(operator: Operator, tensors: Tensors, threads: int, gpu: int | None) -> PeerCall:
    """OpenVINO's CPU plugin in float32. The result is a view of its own output, which saves it a copy."""
    _cpu_float32(operator, gpu)
    os.environ.setdefault("OPENVINO_TELEMETRY_DISABLED", "1")
    import openvino

    core = openvino.Core()
    model = core.read_model(onnx_model(operator, tensors))
    settings = {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads}
    compiled = core.compile_model(model, "CPU", settings)
    x = tensors[operator.source]

    def call(timings: Timings | None = None) -> np.ndarray:
        result: np.ndarray = compiled(x, share_inputs=True, share_outputs=True)[0]
        return result

    return call


# ---- the table ---------------------------------------------------------------------------------------------
#: PyTorch's, by the names of the peers; ``torch`` is as it is without any setting.
TORCH_WAYS: dict[str, TorchWay] = {
    "torch": TorchWay("torch"),
    "torch-channels-last": TorchWay("torch, channels last", last=True),
    "torch-compile": TorchWay("torch.compile", mode="default"),
    "torch-compile-channels-last": TorchWay("torch.compile, channels last", last=True, mode="default"),
    "torch-cudnn": TorchWay("torch, cudnn.benchmark", search=True),
    "torch-cudnn-channels-last": TorchWay("torch, cudnn.benchmark, channels last", last=True, search=True),
    "torch-max-autotune": TorchWay("torch.compile max-autotune, cudnn.benchmark", mode="max-autotune", search=True),
    "torch-max-autotune-channels-last": TorchWay(
        "torch.compile max-autotune, cudnn.benchmark, channels last", last=True, mode="max-autotune", search=True
    ),
}
#: What can be compared with, by the name that users write.
PEERS: dict[str, Peer] = {
    **{
        name: Peer(way.label, ("torch",), partial(torch_peer, way=way), gpu=way.search)
        for name, way in TORCH_WAYS.items()
    },
    "onnxruntime": Peer("ONNX Runtime", ("onnx", "onnxruntime"), onnxruntime_peer),
    # It brings an older copy of a library along that an OpenCL driver needs.
    "openvino": Peer("OpenVINO", ("onnx", "openvino"), openvino_peer, after=("opencl",)),
}
#: Distributions whose versions say what was compared with.
DISTRIBUTIONS = ("torch", "onnx", "onnxruntime", "openvino")


def parse_peers(names: str | Sequence[str]) -> tuple[str, ...]:
    """The peers that a list of names means, each once.

    Args:
        names: names out of :data:`PEERS`, as a list or as one text with commas.

    Raises:
        InputError: a name is unknown, or a library is not installed.
    """
    if not isinstance(names, str | Sequence):
        raise InputError(f"against is {brief(names)}; expected one of {', '.join(PEERS)}, or a list of them")
    given = names.split(",") if isinstance(names, str) else list(names)
    for name in given:
        if not isinstance(name, str) or name.strip() not in PEERS:
            raise InputError(f"against is {brief(name)}; {one_of(name, PEERS)}, or several with commas")
    found = tuple(dict.fromkeys(name.strip() for name in given))
    for name in found:
        missing = [module for module in PEERS[name].modules if importlib.util.find_spec(module) is None]
        if missing:
            raise InputError(
                f"against {name} needs {' and '.join(missing)}, which is not installed; "
                f"{install('bench')}; or leave it out"
            )
    return found
