"""From what a caller passes to sizes, scalars and tensors.

A call goes through three steps. :func:`sort_arguments` gives each keyword its role and checks it alone.
:func:`bind_arguments` infers the sizes that tensors show, fills in the rest from a case and from defaults,
and binds the operator. :func:`dispatcher.problem.arrays.host_tensor` then turns one tensor into what a backend takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dispatcher.errors import DtypeError, GeometryError, InputError, one_of, suggest
from dispatcher.ops.steps import SPATIAL_NAMES
from dispatcher.problem.arrays import TensorArgument, float_name, tensor_argument
from dispatcher.problem.expressions import MAX_VALUE
from dispatcher.problem.messages import brief
from dispatcher.problem.model import Parameter, Problem
from dispatcher.problem.operator import DTYPES, Operator, bind, storage_dtype
from dispatcher.problem.values import real_value, size_value, unwrapped


class IncompleteError(InputError):
    """Sizes or scalars that nothing gives a value to."""


@dataclass(frozen=True)
class Arguments:
    """Keywords sorted by role, each checked alone.

    Attributes:
        sizes: ``size_t`` parameters by name, shorthands expanded.
        scalars: ``double`` parameters by name.
        tensors: input tensors by name.
        output: the caller's result array, or None.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    scalars: Mapping[str, float] = field(default_factory=dict)
    tensors: Mapping[str, TensorArgument] = field(default_factory=dict)
    output: Any = None

    def updated(self, newer: Arguments) -> Arguments:
        """These arguments with those of ``newer`` in front."""
        return Arguments(
            {**self.sizes, **newer.sizes},
            {**self.scalars, **newer.scalars},
            {**self.tensors, **newer.tensors},
            self.output if newer.output is None else newer.output,
        )


# ---- step 1: roles -----------------------------------------------------------------------------------------
def shorthands(problem: Problem) -> dict[str, tuple[str, ...]]:
    """Names that stand for a size of each spatial axis: ``stride`` for ``stride_d``, ``stride_h`` and ``stride_w``.

    A shorthand never hides a parameter: where a parameter has that name already (and always for the kernel),
    the shorthand ends in ``_size``.
    """
    sizes = {parameter.name for parameter in problem.sizes}
    taken = {parameter.name for parameter in problem.parameters}
    ends = [f"_{name[0]}" for name in SPATIAL_NAMES[problem.rank]]
    result = {}
    for parameter in problem.sizes:
        stem = parameter.name.removesuffix(ends[0])
        each = tuple(stem + end for end in ends)
        if stem == parameter.name or not sizes.issuperset(each):
            continue
        name = f"{stem}_size" if stem == "kernel" or stem in taken else stem
        if name not in taken:
            result[name] = each
    return result


def sort_arguments(problem: Problem, arguments: Mapping[str, Any]) -> Arguments:
    """Give each argument its role.

    Args:
        problem: whose parameters and shorthands the names are.
        arguments: name to value. Values of None are left out.

    Raises:
        InputError: a name is unknown, a value is not a size, number or array, or two names contradict.
        DtypeError: a tensor's dtype is not one that operators take.
    """
    triples = shorthands(problem)
    sizes: dict[str, int] = {}
    source: dict[str, str] = {}  # size name to the argument that set it
    scalars: dict[str, float] = {}
    tensors: dict[str, TensorArgument] = {}
    output: Any = None

    def set_size(name: str, argument: str, value: int) -> None:
        if sizes.setdefault(name, value) != value:
            both = f"{name} would be {sizes[name]} and {value}"
            raise InputError(f"{source[name]} and {argument} contradict each other: {both}; give one of them")
        source.setdefault(name, argument)

    for name, value in arguments.items():
        if value is None:
            continue
        parameter = problem.parameter(name)
        if parameter is None and name in triples:
            for long_name, part in zip(triples[name], axis_values(name, value, triples[name]), strict=True):
                set_size(long_name, name, part)
        elif parameter is None:
            error = _unknown_argument(problem, triples, name)
            if isinstance(value, str):  # no parameter takes one
                raise InputError(f"{error}; an option of a backend goes into options={brief({name: value})}")
            raise error
        elif parameter.type == "size_t":
            set_size(name, name, size_value(name, value))
        elif parameter.type == "double":
            scalars[name] = real_value(name, value)
        elif parameter.const:
            tensors[name] = tensor_argument(name, value)
        else:
            output = value
    return Arguments(sizes, scalars, tensors, output)


def _unknown_argument(problem: Problem, triples: Iterable[str], name: str) -> InputError:
    known = [parameter.name for parameter in problem.parameters] + list(triples)
    wanted = suggest(name, known) or f"; expected one of {', '.join(known)}"
    return InputError(f"{problem.name} has no parameter {brief(name)}{wanted}")


def axis_values(name: str, value: Any, long_names: Sequence[str]) -> tuple[int, ...]:
    """A size for each spatial axis, from one whole number or from a sequence.

    Raises:
        InputError: another count, or a value that is not a size.
    """
    value = unwrapped(value, name)
    if not isinstance(value, list | tuple):
        return (size_value(name, value),) * len(long_names)
    if len(value) != len(long_names):
        count = ("one", "two", "three")[len(long_names) - 1]
        wanted = f"expected one value, or {count} for {', '.join(long_names)}"
        raise InputError(f"{name} has {len(value)} values, {brief(value)}; {wanted}")
    return tuple(size_value(long_name, part) for long_name, part in zip(long_names, value, strict=True))


# ---- step 2: the operator ----------------------------------------------------------------------------------
def bind_arguments(
    problem: Problem,
    arguments: Arguments,
    *,
    case: str | None = None,
    dtype: str | None = None,
    precision: str = "fp32",
) -> Operator:
    """Bind ``problem`` to what the arguments say.

    Args:
        problem: what to compute.
        arguments: sizes, scalars and tensors; tensors may be missing.
        case: a named case whose numbers hold where the arguments say nothing.
        dtype: of every tensor; None to take the tensors' own, or float32 without tensors.
        precision: ``fp32`` or ``tf32``.

    Raises:
        IncompleteError: a size or scalar has no value.
        InputError: arguments contradict each other or are out of range.
        GeometryError: the sizes do not make a legal operator.
    """
    base = case_values(problem, case)
    chosen = common_dtype(arguments.tensors, dtype)
    shapes = {name: tensor.shape for name, tensor in arguments.tensors.items()}
    sizes = infer_sizes(problem, arguments.sizes, shapes, base)
    scalars: dict[str, float] = {}
    for parameter in problem.scalars:
        value = arguments.scalars.get(parameter.name, base.get(parameter.name))
        if value is None:
            raise _incomplete(problem, [parameter.name])
        scalars[parameter.name] = float(value)
    operator = bind(problem, sizes, scalars, dtype=chosen, precision=precision)
    for name, shape in {**operator.tensor_shapes, problem.output.name: operator.output_shape}.items():
        size = math.prod(shape) * storage_dtype(chosen).itemsize
        if size > MAX_VALUE:
            raise GeometryError(f"tensor {name} of shape {shape} has {size} bytes; no memory holds 2**63 of them")
    return operator


def bind_numbers(
    problem: Problem,
    arguments: Mapping[str, Any],
    task: str,
    *,
    case: str | None = None,
    dtype: str | None = None,
    precision: str = "fp32",
) -> Operator:
    """Bind ``problem`` for a function that makes its tensors itself.

    Args:
        problem: what to compute.
        arguments: sizes, scalars and shorthands by name.
        task: what the function does, as a verb, for messages.
        case: see :func:`bind_arguments`, as for ``dtype`` and ``precision``.

    Raises:
        InputError: an argument is a tensor or otherwise wrong, or the batch is empty.
    """
    for parameter in problem.parameters:
        if parameter.type == "tensor" and arguments.get(parameter.name) is not None:
            raise InputError(
                f"tensor {parameter.name} cannot be given here: the tensors to {task} with are made from the seed; "
                "give sizes and scalars, and tensors of your own to dispatcher.run (run --tensor on the command line)"
            )
    operator = bind_arguments(problem, sort_arguments(problem, arguments), case=case, dtype=dtype, precision=precision)
    if operator.batch == 0:
        raise InputError(
            f"{problem.name}: the batch is empty, so there is nothing to {task}; expected one item or more"
        )
    return operator


def case_values(problem: Problem, case: str | None) -> dict[str, int | float]:
    """The numbers that hold where a caller says nothing: a case's, then the parameters' defaults.

    Raises:
        InputError: the problem has no such case.
    """
    values = {p.name: p.default for p in problem.parameters if p.default is not None}
    if case is not None:
        if not isinstance(case, str) or case not in problem.cases:
            wanted = one_of(case, problem.cases or ["(it has none)"])
            raise InputError(f"{problem.name} has no case {brief(case)}; {wanted}")
        values.update(problem.cases[case])
    return values


def common_dtype(tensors: Mapping[str, TensorArgument], requested: str | None) -> str:
    """The dtype of a call.

    Args:
        tensors: the tensors at hand.
        requested: what the caller asked for, or None.

    Raises:
        DtypeError: two tensors differ, or one differs from what was asked for.
    """
    if requested is not None and (not isinstance(requested, str) or requested not in DTYPES):
        raise DtypeError(f"dtype is {brief(requested)}; {one_of(requested, DTYPES)}")
    chosen, because = requested, f"dtype {requested} was asked for"
    for name, tensor in tensors.items():
        if tensor.dtype is None:
            continue
        own = float_name(tensor.dtype)
        said = f"tensor {name} has dtype {tensor.dtype.newbyteorder('=').name}"
        if own is None:
            own = requested or "float32"
            said += f" (read as {own})"
        if chosen is None:
            chosen, because = own, said
        elif own != chosen:
            convert = f"to(torch.{chosen})" if tensor.of_torch else f"astype({chosen!r})"
            raise DtypeError(f"{said}, but {because}; all must agree: convert with {name}.{convert}")
    return chosen or "float32"


def infer_sizes(
    problem: Problem, given: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]], base: Mapping[str, int | float]
) -> dict[str, int]:
    """Every size parameter's value.

    A size that the caller gave stands; next come the tensors, whose shape expressions are solved until
    nothing new follows; then ``base``. A parameter with a default that no tensor shows directly (``groups``
    in ``out_channels / groups``) comes from ``base``: a wrong shape is an error, not another operator.

    Args:
        problem: whose sizes are wanted.
        given: sizes from the caller.
        shapes: shapes of the tensors at hand.
        base: values for sizes that neither gives.

    Raises:
        IncompleteError: a size has no value.
        InputError: a tensor's shape contradicts a size or another tensor.
    """
    sizes = dict(given)
    origin = dict.fromkeys(given, "given")
    tensors = [parameter for parameter in problem.tensors if parameter.name in shapes]
    for tensor in tensors:
        axes, wanted = len(shapes[tensor.name]), len(tensor.shape or ())
        if axes != wanted:
            got = f"tensor {tensor.name} has shape {shapes[tensor.name]}, {axes} axes"
            raise InputError(f"{got}; expected {wanted}: {describe_shape(tensor)}")
    direct = {str(extent) for tensor in tensors for extent in tensor.shape or ()}
    for parameter in problem.sizes:
        name = parameter.name
        if name not in sizes and name not in direct and parameter.default is not None:
            sizes[name], origin[name] = int(base[name]), "by case or default"
    waiting = [p for p in problem.sizes if p.name not in sizes]
    while True:
        _solve(tensors, shapes, sizes, origin)
        waiting = [p for p in waiting if p.name not in sizes]
        known = next((p.name for p in waiting if p.name in base), None)
        if known is None:
            break
        sizes[known], origin[known] = int(base[known]), "by case or default"
    if waiting:
        raise _incomplete(problem, [p.name for p in waiting])
    for tensor in tensors:
        _check_shape(tensor, shapes[tensor.name], sizes, origin)
    return {parameter.name: sizes[parameter.name] for parameter in problem.sizes}


def _solve(
    tensors: Sequence[Parameter], shapes: Mapping[str, tuple[int, ...]], sizes: dict[str, int], origin: dict[str, str]
) -> None:
    """Add to ``sizes`` what the tensors' shapes show, the simplest ones first, until nothing new follows."""
    extents = [
        (tensor.name, axis, expression) for tensor in tensors for axis, expression in enumerate(tensor.shape or ())
    ]
    extents.sort(key=lambda extent: len(extent[2].names))
    found = True
    while found:
        found = False
        for name, axis, expression in extents:
            shape = shapes[name]
            try:
                solution = expression.solve(sizes, shape[axis])
            except InputError as error:
                raise InputError(f"tensor {name} of shape {shape} does not fit on axis {axis}: {error}") from None
            if solution is not None:
                sizes[solution[0]] = solution[1]
                origin[solution[0]] = f"from axis {axis} of tensor {name}"
                found = True


def _check_shape(
    tensor: Parameter, shape: tuple[int, ...], sizes: Mapping[str, int], origin: Mapping[str, str]
) -> None:
    for axis, (expression, extent) in enumerate(zip(tensor.shape or (), shape, strict=True)):
        try:
            wanted = expression.evaluate(sizes)
        except InputError as error:
            raise InputError(f"tensor {tensor.name} of shape {shape} does not fit on axis {axis}: {error}") from None
        if wanted != extent:
            parts = sorted(expression.names)
            if str(expression) in parts:
                because = origin[parts[0]]
            else:
                because = ", ".join(f"{name} = {sizes[name]} {origin[name]}" for name in parts) or "fixed"
            raise InputError(
                f"tensor {tensor.name} of shape {shape} has extent {extent} on axis {axis}, "
                f"but {expression} is {wanted} ({because}); they must agree"
            )


def describe_shape(tensor: Parameter) -> str:
    """A tensor parameter's shape as written, for messages: ``(in_channels, out_channels / groups, …)``."""
    extents = ", ".join(str(extent) for extent in tensor.shape or ())
    return f"({extents},)" if len(tensor.shape or ()) == 1 else f"({extents})"


def _incomplete(problem: Problem, missing: Sequence[str]) -> IncompleteError:
    names = list(missing)
    for shorthand, long_names in shorthands(problem).items():
        if set(long_names) <= set(names):
            names[names.index(long_names[0])] = f"{shorthand} ({', '.join(long_names)})"
            names = [name for name in names if name not in long_names]
    verb = "has" if len(missing) == 1 else "have"
    tensors = ", ".join(
        tensor.name
        for tensor in problem.tensors
        if any(name in extent.names for extent in tensor.shape or () for name in missing)
    )
    ways = [f"give {'it' if len(missing) == 1 else 'them'} by name (--set {missing[0]}=... on the command line)"]
    if tensors:
        ways.append(f"pass tensors that show them ({tensors})")
    if problem.cases:
        ways.append(f"name a case ({', '.join(problem.cases)})")
    return IncompleteError(f"{', '.join(names)} {verb} no value; {', or '.join(ways)}")


def check_options(options: Any) -> dict[str, Any]:
    """Tuning choices, a mapping of names to values or None; which ones there are, a backend knows.

    Raises:
        InputError: they are something else.
    """
    if options is None:
        return {}
    if isinstance(options, Mapping) and all(isinstance(name, str) for name in options):
        return {name: unwrapped(value) for name, value in options.items()}
    wanted = "expected a mapping of names to values, such as {'algorithm': 'direct'}"
    raise InputError(f"options is {brief(options)}; {wanted}")


# ---- text to numbers, for the command line -----------------------------------------------------------------
def parse_assignments(problem: Problem, assignments: Iterable[str], option: str) -> dict[str, Any]:
    """``NAME=VALUE`` texts as arguments: sizes, scalars and shorthands (``stride=2``, ``stride=2,2,2``).

    Args:
        problem: whose parameters the names are.
        assignments: the texts.
        option: what the user calls the option, for messages.

    Raises:
        InputError: a text has no ``=``, a name is unknown, repeated or a tensor, or a value is not a number.
    """
    triples = shorthands(problem)
    result: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = (part.strip() for part in assignment.partition("="))
        if not equals or not name:
            raise InputError(f"{option} {brief(assignment)} is not understood; expected NAME=VALUE")
        if name in result:
            raise InputError(f"{option} {name} is given twice; give it once")
        parameter = problem.parameter(name)
        if parameter is None and name not in triples:
            raise _unknown_argument(problem, triples, name)
        if parameter is not None and parameter.type == "tensor":
            raise InputError(f"{option} {name}: {name} is a tensor; expected a size, a scalar or a shorthand")
        if parameter is not None and parameter.type == "double":
            result[name] = real_value(f"{option} {name}", _number(option, name, text, float))
        elif parameter is not None:
            result[name] = size_value(f"{option} {name}", _number(option, name, text, int))
        else:
            values = [_number(option, name, part, int) for part in text.split(",")]
            value = values[0] if len(values) == 1 else tuple(values)
            axis_values(f"{option} {name}", value, triples[name])
            result[name] = value
    return result


def _number(option: str, name: str, text: str, kind: Callable[[str], Any]) -> Any:
    try:
        if "_" in text:
            raise ValueError
        return kind(text.strip())
    except ValueError:
        wanted = "a whole number" if kind is int else "a number"
        raise InputError(f"{option} {name} is {brief(text)}; expected {wanted}") from None
