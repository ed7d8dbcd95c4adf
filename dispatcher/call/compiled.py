"""Compiling an operator once and calling it many times."""

from __future__ import annotations

import importlib
import itertools
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dispatcher.call import tracing
from dispatcher.call.explanation import Explanation, explain_choice
from dispatcher.call.handover import (
    Target,
    backend_inputs,
    bare,
    check_place,
    checked_result,
    dtype_name,
    in_kind_of,
    new_output,
    to_host,
)
from dispatcher.device.machine import check_host_memory
from dispatcher.device.selection import (
    Choice,
    Request,
    as_kernel_error,
    choose,
    first_usable,
    parse_request,
    warn_of_fallback,
)
from dispatcher.device.splitting import compile_within_memory, part_count
from dispatcher.errors import DeviceMemoryError, DispatcherError, DtypeError, InputError
from dispatcher.files import check_apart
from dispatcher.interface import Device, Timings
from dispatcher.problem import torchtensors
from dispatcher.problem.arguments import IncompleteError, bind_arguments, check_options, describe_shape, sort_arguments
from dispatcher.problem.arrays import (
    TensorArgument,
    host_tensor,
    mapped_file,
    snapshot,
    tensor_argument,
    with_own_error_state,
)
from dispatcher.problem.loader import ProblemLike, load_problem
from dispatcher.problem.messages import brief
from dispatcher.problem.model import Problem
from dispatcher.problem.operator import Operator, check_precision, storage_dtype
from dispatcher.problem.shown import Shown
from dispatcher.problem.torchtensors import outside_of_dynamo
from dispatcher.problem.values import unwrapped

MAX_PROGRAMS = 64  # compiled operators that one CompiledOperator keeps
MAX_SIGNATURES = 1024  # ways of calling that it remembers the analysis of

#: What a parent process had compiled, kept in its forked children.
_left_behind: list[Any] = []

#: Integers up to this magnitude can be printed.
_PRINTABLE = 2**64


@dataclass(frozen=True)
class Settings:
    """What a caller chooses besides a problem's own parameters: the arguments of :func:`compile` of these names."""

    device: str | Device | None = None
    devices: Sequence[str | Device] | None = None
    precision: str = "fp32"
    case: str | None = None
    dtype: str | None = None
    options: Mapping[str, Any] | None = None


def compile(
    problem: ProblemLike,
    *,
    device: str | Device | None = None,
    devices: Sequence[str | Device] | None = None,
    precision: str = "fp32",
    case: str | None = None,
    dtype: str | None = None,
    options: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> CompiledOperator:
    """Prepare a problem for calling it many times.

    Args:
        problem: a bundled problem's name, the path of a problem file, a mapping that stands for one, or a
            loaded problem.
        device: a device request such as ``auto``, ``opencl``, ``cuda:0`` or ``opencl:0,numpy``; without one,
            the environment variable ``DISPATCHER_DEVICE`` holds, and without that ``auto``.
        devices: several devices, such as ``["opencl:0", "opencl:1"]``, instead of ``device``: each works on a
            share of the batch that goes with its measured speed.
        precision: ``fp32``, or ``tf32`` to allow 10-bit mantissas in matrix products.
        case: a named case of the problem, whose numbers hold where nothing else gives one.
        dtype: ``float16``, ``bfloat16``, ``float32`` or ``float64``; without it, that of the tensors.
        options: tuning choices for the backend.
        **arguments: sizes, scalars, shorthands (``stride=2``) and tensors that are the same for every call.
            Tensors are copied: what happens to the caller's array later makes no difference, unless it lies on a
            CUDA device and has no method ``copy``.
            :meth:`CompiledOperator.update` takes new ones.

    Returns:
        The operator. It is compiled at once when every size is known, otherwise at the first call.

    Raises:
        InputError: an argument is wrong; see the message.
        DeviceError: the device does not exist or cannot run the problem.
        KernelError: a kernel did not build on the device that was named.
    """
    settings = Settings(device, devices, precision, case, dtype, options)
    return CompiledOperator(load_problem(problem), settings, arguments)


@outside_of_dynamo
def run(
    problem: ProblemLike,
    *,
    device: str | Device | None = None,
    devices: Sequence[str | Device] | None = None,
    precision: str = "fp32",
    output: Any = None,
    case: str | None = None,
    dtype: str | None = None,
    options: Mapping[str, Any] | None = None,
    trace: str | Path | None = None,
    **arguments: Any,
) -> Any:
    """Run a problem once.

    Args:
        problem: see :func:`compile`, as for every argument that is not listed here.
        output: where to put the result: a writeable C-contiguous array of the right shape and dtype that
            overlaps no input, or such a tensor of PyTorch or array of PyOpenCL. Without it, a new array is made.
        trace: a file to write what the call did to, in the format of Chrome's tracing.
        **arguments: every tensor by parameter name, in any memory layout; sizes that the tensors do not show;
            scalars. Sizes and scalars may come from their defaults or from ``case``.

    Returns:
        The result: ``output``, or a new C-contiguous array that shares no memory with the inputs. It is a tensor of
        PyTorch where one is among the arguments, on the same device; where PyTorch records what is done for one that
        requires gradients, they pass through (:func:`dispatcher.torch.custom_op`).

    Raises:
        InputError: an argument is wrong; see the message.
        DeviceError: the device does not exist or cannot run the problem.
        KernelError: a kernel did not build or run on the device that was named.
    """
    if trace is not None and not isinstance(trace, str | os.PathLike):
        raise InputError(f"trace is {brief(trace)}; expected the path of a file to write")
    loaded = load_problem(problem)
    if trace is not None:
        check_apart("trace", trace, filter(None, [loaded.path, *map(mapped_file, arguments.values())]))
    settings = Settings(device, devices, precision, case, dtype, options)
    compiled = CompiledOperator(loaded, settings, eager=False)
    with tracing.recording(trace):
        return compiled(output=output, **arguments)


def explain(
    problem: ProblemLike,
    *,
    device: str | Device | None = None,
    devices: Sequence[str | Device] | None = None,
    precision: str = "fp32",
    case: str | None = None,
    dtype: str | None = None,
    options: Mapping[str, Any] | None = None,
    **arguments: Any,
) -> Explanation:
    """Say what a call would do. The operator is compiled, but not run.

    The arguments are those of :func:`compile`. Sizes may be given instead of tensors.

    Raises:
        InputError: an argument is wrong, or a size has no value.
        DeviceError: the device does not exist or cannot run the problem.
        KernelError: a kernel did not build on the device that was named.
    """
    settings = Settings(device, devices, precision, case, dtype, options)
    return CompiledOperator(load_problem(problem), settings, eager=False).explain(**arguments)


class _Program:
    """One operator, the device that runs it, and the bound tensors as the device's backend takes them."""

    def __init__(self, operator: Operator, choice: Choice, bound: Mapping[str, TensorArgument]) -> None:
        self.operator = operator
        self.choice = choice
        self.dtype = storage_dtype(operator.dtype)
        self.failed: dict[str, DispatcherError] = {}
        self.used = 0  # when it was last asked for, by the owner's clock
        self.constants: Mapping[str, np.ndarray | None] = {}
        self.bind(bound)

    def bind(self, bound: Mapping[str, TensorArgument]) -> None:
        """Use these bound tensors in the calls that begin from now on."""
        on_host = {name: host_tensor(each.array, self.dtype) for name, each in bound.items() if not each.on_device}
        self.constants = {each.name: on_host.get(each.name) for each in self.operator.problem.tensors}


@dataclass(frozen=True)
class PreparedCall:
    """A call whose arguments have been checked: run it as often as you like.

    Attributes:
        operator: what it computes.
    """

    operator: Operator
    _compiled: CompiledOperator
    _program: _Program
    _tensors: Mapping[str, Any]
    _output: Any

    @property
    def choice(self) -> Choice:
        """The device that runs it, and those passed over."""
        return self._program.choice

    def __reduce__(self) -> Any:
        raise TypeError("a prepared call stays where it was prepared; copy or pickle the compiled operator instead")

    def __call__(self, output: Any = None, timings: Timings | None = None) -> Any:
        """Run it and wait for the result.

        Args:
            output: where to put the result; see :func:`run`.
            timings: filled in by the backend when given.

        Raises:
            InputError: ``output`` is not as it should be.
            KernelError: the device failed, and no other one may take its place.
        """
        output = self._output if output is None else output
        return self._compiled._execute(self._program, self._tensors, output, timings)

    def on(self, arrays: Mapping[str, np.ndarray]) -> Any:
        """Run it on other tensors in host memory, of the same shapes and dtypes, at which nobody looks any more."""
        return self._compiled._run(self._program, arrays, None, None)


class CompiledOperator(Shown):
    """A problem, ready to be called: ``compiled(input=x, kernel=w)``. Made by :func:`compile`.

    It may be called from several threads, and with tensors of different shapes: each operator that results is
    compiled once and kept, the least recently used ones being dropped when there are many.

    It keeps copies of the tensors that were bound: a weight that an optimizer changes later stays what it was here.
    :meth:`update` takes the new one; or leave the tensor unbound, and give it to every call.

    A copy, also one that is made by pickle, has the same problem, settings and bound tensors, and compiles for itself
    where it is first called.
    """

    def __init__(
        self, problem: Problem, settings: Settings, arguments: Mapping[str, Any] | None = None, *, eager: bool = True
    ) -> None:
        """See :func:`compile`. Without ``eager`` no device is looked at before the first call."""
        check_precision(settings.precision)
        self._problem = problem
        self._recipe = settings
        self._request: Request = parse_request(settings.device, settings.devices)
        self._settings: dict[str, Any] = {"case": settings.case, "precision": settings.precision}
        self._settings["dtype"] = dtype_name(settings.dtype)
        self._options = check_options(settings.options)
        given = sort_arguments(problem, arguments or {})
        if given.output is not None:
            raise InputError(f"{problem.output.name} is the result; give it to the call, not to compile")
        kept = {name: snapshot(name, tensor) for name, tensor in given.tensors.items()}
        self._bound = replace(given, tensors=kept)
        self._tensor_names = {tensor.name: None for tensor in problem.tensors}
        self._output_name = problem.output.name
        self._lock = threading.RLock()
        self._clock = itertools.count()
        self._programs: dict[tuple[Any, ...], _Program] = {}
        self._signatures: dict[tuple[Any, ...], _Program] = {}
        self._last: _Program | None = None
        self._first: tuple[Device, tuple[tuple[str, str], ...]] | None = None
        self._process = os.getpid()
        if eager:
            try:
                operator = bind_arguments(problem, self._bound, **self._settings)
            except IncompleteError:
                if self._request.named:
                    self._next_in_line()
            else:
                self._last = self._program(operator)

    # ---- what it is ----------------------------------------------------------------------------------------
    @property
    def problem(self) -> Problem:
        """What it computes."""
        return self._problem

    @property
    def device(self) -> Device:
        """The device of the latest call; before the first one, the device that is next in line.

        Raises:
            DeviceError: no device of the request is usable.
        """
        return self._next_in_line()[0] if self._last is None else self._last.choice.device

    @property
    def skipped(self) -> tuple[tuple[str, str], ...]:
        """(device or backend, reason) of each one that was preferred to :attr:`device` and passed over."""
        return self._next_in_line()[1] if self._last is None else self._last.choice.skipped

    def _next_in_line(self) -> tuple[Device, tuple[tuple[str, str], ...]]:
        if self._first is None:
            self._first = first_usable(self._request)
        return self._first

    def __reduce__(self) -> Any:
        bound: dict[str, Any] = {**self._bound.sizes, **self._bound.scalars}
        for name, tensor in self._bound.tensors.items():
            array = to_host(name, tensor.array, "a copied or pickled operator")
            bound[name] = replace(tensor, array=array, on_device=False)
        return _made_again, (self._problem, self._recipe, bound)

    def _headline(self) -> str:
        where = self._request.text if self._last is None else self._last.choice.device.id
        return f"{self._problem.name} on {where}"

    def _facts(self) -> Mapping[str, object]:
        last, bound = self._last, {**self._bound.sizes, **self._bound.scalars}
        latest = None if last is None else f"{last.operator.tensor_shapes} -> {last.operator.output_shape}"
        return {
            "bound numbers": ", ".join(f"{name}={value}" for name, value in bound.items()),
            "bound tensors": [f"{name} {tensor.shape}" for name, tensor in self._bound.tensors.items()],
            "latest call": latest,
        }

    def explain(self, **arguments: Any) -> Explanation:
        """What a call with these arguments does, and why; without arguments, what the latest call did.

        Raises:
            IncompleteError: a size has no value yet.
        """
        program = self._last
        if arguments or program is None:
            merged = self._bound.updated(sort_arguments(self._problem, arguments))
            program = self._program(bind_arguments(self._problem, merged, **self._settings))
        return explain_choice(program.operator, program.choice)

    def update(self, **tensors: Any) -> None:
        """Bind copies of new tensors in place of those that were bound, of the same shapes and dtypes.

        Calls that have begun finish with the old ones; nothing is compiled again.

        Raises:
            InputError: a name is not that of a bound tensor, or the new one has another shape.
            DtypeError: it has another dtype.
        """
        kept = dict(self._bound.tensors)
        for name, value in tensors.items():
            if name not in kept:
                bound = ", ".join(kept) or "none is"
                raise InputError(
                    f"{brief(name)} is not a bound tensor; expected one of those given to compile: {bound}"
                )
            new, old = snapshot(name, tensor_argument(name, value)), kept[name]
            if new.shape != old.shape:
                raise InputError(f"tensor {name} has shape {new.shape}; expected {old.shape}, that of the bound one")
            if new.dtype is not None and old.dtype is not None and new.dtype != old.dtype:
                raise DtypeError(f"tensor {name} has dtype {new.dtype}; expected {old.dtype}, that of the bound one")
            kept[name] = replace(new, dtype=old.dtype)
        with self._lock:
            self._bound = replace(self._bound, tensors=kept)
            for program in self._programs.values():
                program.bind(kept)

    # ---- calling it ----------------------------------------------------------------------------------------
    @outside_of_dynamo
    def __call__(self, *, output: Any = None, **arguments: Any) -> Any:
        """Run the operator; the arguments are those of :func:`run`, by name."""
        if torchtensors.needs_gradient(arguments.values()):
            return self._differentiable(output, arguments)
        program, tensors, output = self._analyse(output, arguments)
        return self._execute(program, tensors, output, None)

    def _differentiable(self, output: Any, arguments: Mapping[str, Any]) -> Any:
        """A call whose result is to have gradients. It goes through an operator of PyTorch."""
        if output is not None or arguments.get(self._output_name) is not None:
            name = "output" if output is not None else self._output_name
            raise InputError(
                f"{name} cannot be given where a gradient is wanted; leave it out, or call inside torch.no_grad()"
            )
        # By name: the room of PyTorch comes after this one.
        operators = importlib.import_module("dispatcher.torch.operators")
        return operators.differentiable(self._problem, self._recipe, self._bound, arguments)

    def prepare(self, *, output: Any = None, **arguments: Any) -> PreparedCall:
        """Check the arguments, choose the device and compile, but do not run yet. For measuring."""
        program, tensors, output = self._analyse(output, arguments)
        return PreparedCall(program.operator, self, program, tensors, output)

    def prepare_bound(self, operator: Operator, tensors: Mapping[str, np.ndarray]) -> PreparedCall:
        """As :meth:`prepare`, for an operator of this problem that is bound already, and all tensors that it takes.

        Nothing is analysed again: the tensors have the operator's shapes.
        """
        self._mind_forks()
        self._last = program = self._program(operator)
        return PreparedCall(operator, self, program, tensors, None)

    def _analyse(self, output: Any, arguments: Mapping[str, Any]) -> tuple[_Program, dict[str, Any], Any]:
        """The program for these arguments, the tensors that are not bound yet, and the output.

        The analysis is remembered by shapes, dtypes and numbers, so that a repeated call only looks it up.
        """
        self._mind_forks()
        names = self._tensor_names
        tensors: dict[str, Any] = {}
        others: dict[str, Any] = {}
        signature: list[Any] = []
        plain = True
        for name, value in arguments.items():
            if name in names:
                if type(value) is np.ndarray:
                    tensors[name] = value
                    signature.append((name, value.shape, value.dtype))
                elif value is not None:
                    tensors[name] = tensor = tensor_argument(name, value)
                    signature.append((name, tensor.shape, tensor.dtype, tensor.on_device))
            elif name == self._output_name:
                if output is not None and value is not None:
                    raise InputError(f"output and {name} both name the result; give one of them")
                output = value if output is None else output
            else:
                others[name] = number = unwrapped(value, name)
                plain = plain and _is_plain(number)
                signature.append((name, repr(number) if plain else ""))  # repr tells 0.0 from -0.0
        key = tuple(signature) if plain else None
        program = None if key is None else self._signatures.get(key)
        if program is None:
            program = self._learn(key, {**tensors, **others})
        program.used = next(self._clock)
        self._last = program
        return program, tensors, output

    def _mind_forks(self) -> None:
        """Start anew in a child process that was made by fork.

        A lock may be held by a thread that is gone, and no device works on. What the parent had compiled
        stays in memory: releasing it could hang.
        """
        if self._process == os.getpid():
            return
        self._lock = threading.RLock()
        _left_behind.append((self._programs, self._last))
        self._programs, self._signatures, self._last, self._first = {}, {}, None, None
        self._process = os.getpid()  # last: an interruption may have left it half done

    def _learn(self, key: tuple[Any, ...] | None, arguments: Mapping[str, Any]) -> _Program:
        """Analyse a call and remember the result under ``key``.

        Raises:
            InputError: a tensor is missing, or an argument is wrong.
        """
        merged = self._bound.updated(sort_arguments(self._problem, arguments))
        for tensor in self._problem.tensors:
            if tensor.name not in merged.tensors:
                raise InputError(
                    f"tensor {tensor.name} is missing; expected an array of shape {describe_shape(tensor)}"
                )
        program = self._program(bind_arguments(self._problem, merged, **self._settings))
        if key is not None:
            with self._lock:
                if len(self._signatures) >= MAX_SIGNATURES:
                    self._signatures.clear()
                self._signatures[key] = program
        return program

    def _program(self, operator: Operator) -> _Program:
        """The compiled form of ``operator``, made when there is none."""
        key = (*operator.key, *(repr(value) for value in operator.scalars.values()))
        with self._lock:
            program = self._programs.get(key)
            if program is None:
                with tracing.span("compile", problem=operator.problem.name):
                    choice = choose(operator, self._request, self._options)
                program = _Program(operator, choice, self._bound.tensors)
                if len(self._programs) >= MAX_PROGRAMS:
                    oldest = min(self._programs, key=lambda k: self._programs[k].used)
                    dropped = self._programs[oldest]
                    self._signatures = {k: p for k, p in self._signatures.items() if p is not dropped}
                    del self._programs[oldest]
                self._programs[key] = program
            program.used = next(self._clock)
            return program

    @with_own_error_state
    def _execute(self, program: _Program, tensors: Mapping[str, Any], output: Any, timings: Timings | None) -> Any:
        """:meth:`_run` between arrays of other libraries: theirs come in, and theirs goes out."""
        bound = self._bound.tensors
        if output is None:
            output = new_output(bound, tensors, program.choice, program.operator)
        if output is None:
            result = self._run(program, tensors, None, timings)
            return in_kind_of(bound, tensors, program.choice, result)
        sources = {name: bare(tensor) for name, tensor in {**bound, **tensors}.items()}
        target = Target(self._output_name, output, program.operator, sources)
        return target.hand_over(self._run(program, tensors, target.array, timings))

    def _run(self, program: _Program, tensors: Mapping[str, Any], output: Any, timings: Timings | None) -> Any:
        """Run ``program``, moving on to the next device where the request allows that.

        Args:
            program: what to run.
            tensors: the caller's tensors that are not bound, unconverted.
            output: the caller's result array, or None.
            timings: for the backend to fill in.
        """
        operator = program.operator
        if self._process != os.getpid():
            self._mind_forks()
            program = self._program(operator)
        while True:
            choice = program.choice
            check_place(self._output_name, output, choice)
            if choice.executable is None:
                return np.empty(operator.output_shape, program.dtype) if output is None else output
            inputs = backend_inputs(program.constants, tensors, self._bound.tensors, choice, program.dtype)
            fresh = output is None and not getattr(choice.executable, "result_ready", False)
            fresh = fresh and all(isinstance(array, np.ndarray) for array in inputs.values())  # so will be the result
            check_host_memory(operator, choice.device, fresh)
            trace = tracing.current()
            if trace is not None and timings is None:
                timings = Timings()
            start = time.perf_counter()
            try:
                result = choice.executable(inputs, output, timings)
                if trace is not None and timings is not None:
                    trace.add_call(choice.device.id, start, timings)
                    trace.add("call", start, time.perf_counter() - start, detail={"device": choice.device.id})
                return checked_result(operator, choice, {name: inputs[name] for name in tensors}, output, result)
            except InputError:
                raise
            except Exception as error:
                arrays = [array for array in (*inputs.values(), output) if array is not None]
                splittable = all(isinstance(array, np.ndarray) for array in arrays)
                if not (splittable and isinstance(error, DeviceMemoryError) and self._split(program, choice)):
                    self._move_on(program, choice, error)

    def _split(self, program: _Program, choice: Choice) -> bool:
        """After an out-of-memory, let ``program`` work on smaller parts of the batch; False if it cannot."""
        if choice.executable is None:
            return False
        operator, device = program.operator, choice.device
        with self._lock:
            if program.choice is choice:  # else another thread has done it already
                parts = 2 * part_count(choice.executable)
                try:
                    finer = compile_within_memory(choice.backend, operator, device, self._options, parts)
                except DeviceMemoryError:
                    return False
                program.choice = replace(choice, executable=finer)
        return True

    def _move_on(self, program: _Program, choice: Choice, error: Exception) -> None:
        """Give ``program`` the next device after a failed run.

        Raises:
            KernelError: the device was named, or no other one is left.
        """
        operator, device = program.operator, choice.device
        failure = as_kernel_error(error, operator, device, "run")
        if self._request.named:
            raise failure
        with self._lock:
            if program.choice is choice:  # else another thread has done it already
                program.failed[device.id] = failure
                program.choice = choose(operator, self._request, self._options, program.failed)
                warn_of_fallback(operator, device, failure)


def _made_again(problem: Problem, settings: Settings, arguments: Mapping[str, Any]) -> CompiledOperator:
    """An operator from its recipe. What it raises on the way to a device is its first call's to raise."""
    return CompiledOperator(problem, settings, arguments, eager=False)


def _is_plain(value: Any) -> bool:
    """Does the text of a size or scalar, or of a list of them, say all there is to know of it?"""
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) is float or (type(value) is int and abs(value) <= _PRINTABLE)
