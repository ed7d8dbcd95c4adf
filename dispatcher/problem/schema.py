"""What makes a mapping a valid problem: its keys, their values, and what these mean together."""

from __future__ import annotations

import keyword
import math
import numbers
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, cast, get_args

from dispatcher.errors import InputError, ProblemFileError, suggest
from dispatcher.ops.binding import Field
from dispatcher.ops.steps import RANKS, SPATIAL_NAMES, axis_names
from dispatcher.ops.vocabulary import VOCABULARY, near_operation
from dispatcher.problem.expressions import MAX_VALUE, Expression
from dispatcher.problem.messages import KeyPath, dotted, name_list, show, show_path
from dispatcher.problem.model import Frozen, Number, Parameter, Problem, StepSpec
from dispatcher.problem.operator import bind
from dispatcher.problem.values import NOT_NUMBERS, unwrapped
from dispatcher.problem.yamlfile import Locate, plain_value

#: Arguments of all public functions that take a problem's parameters too.
INTERFACE_NAMES = frozenset(
    (
        *("against", "build_options", "case", "check", "device", "devices", "dtype", "entry", "force", "global_size"),
        *("inputs", "keep", "local_size", "options", "precision", "problem", "problems", "progress", "repeats"),
        *("seed", "seeds", "self", "time_limit_s", "timeout_s", "trace", "warmup"),
    )
)

_MAX_TEXT = 500  # characters of a title or an origin
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")  # names of problems
_CASE = re.compile(
    r"(?=.{1,100}$)[A-Za-z0-9][\w.,=<>+-]*( [\w.,=<>+-]+)*", re.ASCII
)  # such as "N=16, K=3", "C64->128 K3"
#: A parameter in one line: its type, and the default where there is one.
_COMPACT = re.compile(r"(?P<unused>unused\s+)?(?P<type>size_t|double)(\s*=\s*(?P<default>[-+.\w]+))?")
_COMPACT_WANTED = (
    "'output', a list of extents, 'size_t', 'double', one of these with a default ('size_t = 1'), "
    "or 'unused size_t' for one that nothing reads"
)

ParameterType = Literal["tensor", "size_t", "double"]


class _ProblemReader:
    """Validates one mapping, part by part; knows what has been declared and used so far."""

    def __init__(self, path: Path | None, locate: Locate | None) -> None:
        self.path, self.locate = path, locate
        self.parameters: dict[str, Parameter] = {}
        self.places: dict[str, KeyPath] = {}  # of the parameters that the file declares
        self.implied: dict[str, None] | None = None  # sizes that shapes name without a declaration, where they may
        self.rank = 3
        self.input_name = ""  # the tensor that the first step reads
        self.results: dict[str, int] = {}  # name of a step's result to the step's index
        self.used: set[str] = set()  # parameters that a shape or a step uses
        self.read_steps: set[int] = set()  # steps whose value a later step reads
        self.scalar_uses: dict[str, list[tuple[KeyPath, Field]]] = {}  # double parameter to where it is used

    # -- messages and basic kinds of values
    def fail(self, keys: KeyPath, message: str) -> ProblemFileError:
        if self.path is None:
            where = "problem mapping: "
        elif self.locate is None:
            where = f"{show_path(self.path)}: "
        else:
            where = f"{show_path(self.path)}:{self.locate(keys)}: "
        return ProblemFileError(where + (f"{dotted(keys)}: " if keys else "") + message)

    def unexpected(self, keys: KeyPath, value: Any, wanted: str) -> ProblemFileError:
        return self.fail(keys, f"got {show(value)}; expected {wanted}")

    def check_keys(
        self, keys: KeyPath, value: Mapping[Any, Any], allowed: Collection[str], required: Collection[str]
    ) -> None:
        for key in value:
            if not isinstance(key, str):
                raise self.fail(keys, f"a key is {show(key)}; expected a text")
            if key not in allowed:
                wanted = f"expected {name_list(allowed)}{suggest(key, allowed)}"
                raise self.fail((*keys, key), f"unknown key {show(key)}; {wanted}")
        for key in required:
            if key not in value:
                raise self.fail(keys, f"the key {key!r} is missing; add it")

    def entries(self, keys: KeyPath, value: Any, what: str) -> list[Any] | tuple[Any, ...]:
        if not isinstance(value, list | tuple) or not value:
            raise self.unexpected(keys, value, f"a list of {what}")
        return value

    def text(self, keys: KeyPath, value: Any) -> str:
        if not isinstance(value, str):
            raise self.unexpected(keys, value, "a text")
        stripped = value.strip()
        if not stripped.isprintable() or len(stripped) > _MAX_TEXT:
            raise self.unexpected(keys, value, f"one line of text, {_MAX_TEXT} characters at most")
        return stripped

    def label(self, keys: KeyPath, value: Any, allowed: re.Pattern[str] = _LABEL, others: str = "'-' and '_'") -> str:
        if not isinstance(value, str) or not allowed.fullmatch(value):
            raise self.unexpected(keys, value, f"a name of letters, digits, {others}, 100 at most")
        return value

    def identifier(self, keys: KeyPath, value: Any) -> str:
        if not isinstance(value, str) or not _IDENTIFIER.fullmatch(value) or keyword.iskeyword(value):
            wanted = "a Python identifier (letters, digits and '_', no keyword), 64 characters at most"
            raise self.unexpected(keys, value, wanted)
        return value

    def choice(self, keys: KeyPath, value: Any, choices: Collection[str]) -> str:
        if not isinstance(value, str) or value not in choices:
            near = (
                near_operation(value) if choices is VOCABULARY and isinstance(value, str) else suggest(value, choices)
            )
            raise self.fail(keys, f"got {show(value)}; expected one of {name_list(choices)}{near}")
        return value

    def integer(self, keys: KeyPath, value: Any, least: int = 0) -> int:
        value = unwrapped(value)
        if isinstance(value, NOT_NUMBERS) or not isinstance(value, numbers.Integral):
            hint = ""
            if isinstance(value, float) and value.is_integer():
                hint = f"; write {int(value)}" if abs(value) <= MAX_VALUE else ""
            raise self.fail(keys, f"got {self.kind(value)}; expected an integer{hint}")
        result = int(value)
        if not least <= result <= MAX_VALUE:
            raise self.unexpected(keys, result, f"an integer from {least} to 2**63 - 1")
        return result

    def number(self, keys: KeyPath, value: Any) -> float:
        value = unwrapped(value)
        if isinstance(value, NOT_NUMBERS) or not isinstance(value, numbers.Real):
            word = value.lower().lstrip("+-") if isinstance(value, str) else ""
            hint = "; write .inf for infinity" if word in ("inf", "infinity") else ""
            raise self.fail(keys, f"got {self.kind(value)}; expected a number{hint}")
        try:
            result = float(value)
        except OverflowError:
            raise self.unexpected(keys, value, "a number that a double can hold") from None
        if math.isnan(result):
            raise self.fail(keys, "got nan; expected a number")
        return result

    @staticmethod
    def kind(value: Any) -> str:
        """A value of the wrong kind, with its kind where the value alone could mislead."""
        if isinstance(value, str):
            return f"the text {show(value)}"
        return f"the truth value {value}" if isinstance(value, bool) else show(value)

    # -- parameters
    def named(self, kind: ParameterType) -> list[str]:
        return [p.name for p in self.parameters.values() if p.type == kind and (p.const or kind != "tensor")]

    def read_parameters(self, raw: Any) -> None:
        places: list[tuple[KeyPath, Any]]
        if isinstance(raw, Mapping):
            self.implied = {}
            places = [
                (("parameters", key), self.spelled_out(("parameters", key), name, raw[key]))
                for key in raw
                for name in (re.split(r"\s*,\s*", key) if isinstance(key, str) else [key])  # "height, width: size_t"
            ]
        else:
            entries = self.entries(("parameters",), raw, "parameters, or a mapping")
            places = [(("parameters", index), entry) for index, entry in enumerate(entries)]
        mappings = [entry for _, entry in places if isinstance(entry, Mapping) and entry.get("type") == "size_t"]
        sizes = [entry["name"] for entry in mappings if isinstance(entry.get("name"), str)]
        for keys, entry in places:
            parameter = self.parameter(keys, entry, sizes)
            if parameter.name in self.parameters:
                raise self.fail((*keys, "name"), f"{parameter.name!r} is declared twice; rename one")
            self.parameters[parameter.name], self.places[parameter.name] = parameter, keys
        for name in self.implied or ():
            if name in self.parameters:
                raise self.fail(self.places[name], f"{name} is an extent of a shape; expected 'size_t'")
            self.parameters[name] = Parameter(self.parameter_name(("parameters",), name), "size_t")
        self.implied = None
        outputs = [p.name for p in self.parameters.values() if p.type == "tensor" and not p.const]
        if len(outputs) != 1:
            got = name_list(outputs)
            raise self.fail(("parameters",), f"the output tensors (const: false) are {got}; expected exactly one")
        if not self.named("tensor"):
            raise self.fail(("parameters",), "there is no input tensor (const: true); expected at least one")

    def spelled_out(self, keys: KeyPath, name: Any, value: Any) -> dict[str, Any]:
        """The long form of a parameter that is written in one line."""
        if isinstance(value, list | tuple):
            return {"name": name, "type": "tensor", "const": True, "shape": value}
        if value == "output":
            return {"name": name, "type": "tensor", "const": False}
        match = _COMPACT.fullmatch(value.strip()) if isinstance(value, str) else None
        if match is None:
            raise self.unexpected(keys, value, _COMPACT_WANTED)
        entry: dict[str, Any] = {"name": name, "type": match["type"]}
        if match["default"] is not None:
            entry["default"] = plain_value(match["default"])
        return entry | ({"unused": True} if match["unused"] else {})

    def parameter(self, keys: KeyPath, entry: Any, sizes: Collection[str]) -> Parameter:
        if not isinstance(entry, Mapping):
            raise self.unexpected(keys, entry, "a mapping with name and type")
        self.check_keys(keys, entry, ("name", "type", "const", "shape", "default", "unused"), ("name", "type"))
        kind = cast(ParameterType, self.choice((*keys, "type"), entry["type"], get_args(ParameterType)))
        is_tensor = kind == "tensor"
        name = self.parameter_name(
            (*keys, "name"), entry["name"], is_tensor, is_tensor and entry.get("const") is not True
        )
        for key in ("default", "unused") if is_tensor else ("const", "shape"):
            if key in entry:
                raise self.fail((*keys, key), f"{name} is a {kind}, which takes no {key!r}; remove it")
        const = entry.get("const", False)
        if not isinstance(const, bool) or (is_tensor and "const" not in entry):
            got = f"got {self.kind(const)}; " if "const" in entry else ""
            raise self.fail((*keys, "const"), f"{got}expected true for an input tensor, false for the output tensor")
        shape = None
        if const:
            if "shape" not in entry:
                raise self.fail(keys, f"the key 'shape' is missing; add the extents of tensor {name}")
            shape = self.shape((*keys, "shape"), entry["shape"], sizes)
        elif "shape" in entry:
            raise self.fail((*keys, "shape"), f"the shape of the output {name} follows from the pipeline; remove it")
        default: Number | None = None
        if "default" in entry:
            read = self.integer if kind == "size_t" else self.number
            default = read((*keys, "default"), entry["default"])
        unused = self.flag((*keys, "unused"), entry.get("unused", False))
        return Parameter(name, kind, const, shape, default, unused)

    def parameter_name(self, keys: KeyPath, value: Any, is_tensor: bool = False, is_output: bool = False) -> str:
        """An identifier that is no argument of the functions which take parameters by name."""
        name = self.identifier(keys, value)
        # ``output`` is the result's alone, ``kernel`` a tensor's: functions that take a kernel's file take no tensors.
        if name in INTERFACE_NAMES or (name == "output" and not is_output) or (name == "kernel" and not is_tensor):
            raise self.fail(keys, f"{name!r} is an argument of the Python interface; expected another name")
        return name

    def shape(self, keys: KeyPath, value: Any, sizes: Collection[str]) -> tuple[Expression, ...]:
        extents = self.entries(keys, value, "extents")
        if len(extents) > 5:
            raise self.fail(keys, f"got {len(extents)} extents; expected 5 at most")
        return tuple(self.expression((*keys, i), extent, sizes, 1) for i, extent in enumerate(extents))

    def expression(self, keys: KeyPath, value: Any, sizes: Collection[str], least: int = 0) -> Expression:
        """An expression over size parameters; a constant must be ``least`` or more."""
        if not isinstance(value, str):
            return Expression.parse(self.integer(keys, value, least))
        try:
            expression = Expression.parse(value)
        except InputError as error:
            raise self.fail(keys, str(error)) from None
        if not expression.names:
            self.integer(keys, expression.evaluate({}), least)
        for name in sorted(expression.names):
            if name not in sizes and self.implied is not None:
                self.implied[name] = None
            elif name not in sizes:
                wanted = f"expected an expression over {name_list(sizes)}{suggest(name, sizes)}"
                raise self.fail(keys, f"{name!r} is not a size_t parameter; {wanted}")
        self.used |= expression.names
        return expression

    # -- pipeline
    def read_rank(self, mapping: Mapping[str, Any]) -> None:
        """The number of spatial axes: what the file says, else what the pipeline's input has besides two others."""
        pipeline = mapping["pipeline"]
        first = pipeline[0] if isinstance(pipeline, list | tuple) and pipeline else None
        place: KeyPath = ("pipeline", 0)
        name = self.named("tensor")[0]
        if isinstance(first, Mapping) and "from" in first:
            place = ("pipeline", 0, "from")
            name = self.choice(place, first["from"], self.named("tensor"))
        count = len(self.parameters[name].shape or ())
        got = f"the pipeline's input {name} has {count} axes"
        if "rank" in mapping:
            self.rank = self.integer(("rank",), mapping["rank"], 1)
            if self.rank not in RANKS:
                raise self.unexpected(("rank",), self.rank, "a number of spatial axes from 1 to 3")
            if count > self.rank + 2:
                raise self.fail(place, f"{got}; expected {self.rank + 2} at most")
            return
        if count - 2 not in RANKS:
            wanted = "expected batch, channel and 1 to 3 spatial axes, or the key 'rank' for fewer axes"
            raise self.fail(place, f"{got}; {wanted}")
        self.rank = count - 2

    def read_pipeline(self, raw: Any) -> tuple[StepSpec, ...]:
        entries = self.entries(("pipeline",), raw, "steps")
        steps = tuple(self.step(("pipeline", index), index, entry) for index, entry in enumerate(entries))
        for index, step in enumerate(steps[:-1]):
            if index not in self.read_steps:
                raise self.fail(
                    ("pipeline", index), f"no later step reads the result of {step.op}; remove it or use it"
                )
        for name, place in self.places.items():
            parameter = self.parameters[name]
            if parameter.unused and name in self.used:
                raise self.fail(place, f"{name} is declared as unused, but it is used; remove 'unused'")
            expected = parameter.type != "tensor" or parameter.const
            if expected and name not in self.used and not parameter.unused:
                unused = f"{name} is used by no step and no shape"
                wanted = "remove it, name it in the pipeline, or declare it as unused"
                undeclared = [other for other in self.parameters if other not in self.places]
                raise self.fail(place, f"{unused}; {wanted}{suggest(name, undeclared)}")
        return steps

    def step(self, keys: KeyPath, index: int, entry: Any) -> StepSpec:
        if isinstance(entry, str):
            op, entry = self.choice(keys, entry, VOCABULARY), {}
        elif isinstance(entry, Mapping) and "op" in entry:
            op = self.choice((*keys, "op"), entry["op"], VOCABULARY)
        else:
            got = "no key 'op'" if isinstance(entry, Mapping) else show(entry)
            raise self.fail(keys, f"got {got}; expected the name of a step, or a mapping with the key 'op'")
        if VOCABULARY[op].rank not in (None, self.rank):
            got = f"{op} needs {VOCABULARY[op].rank} spatial axes, but this problem has {self.rank}"
            raise self.fail(keys, f"{got}; write {op[:-2]}")
        known = {f.name: f for f in VOCABULARY[op].fields}
        required = [f.name for f in known.values() if f.required]
        self.check_keys(keys, entry, ("op", "from", "as", *known), required)
        source = self.source((*keys, "from"), index, entry)
        fields = {name: self.field((*keys, name), f, entry[name]) for name, f in known.items() if name in entry}
        result = self.result((*keys, "as"), index, entry["as"]) if "as" in entry else None
        return StepSpec(op, source, result, Frozen(fields))

    def source(self, keys: KeyPath, index: int, entry: Mapping[str, Any]) -> str | None:
        if index == 0:
            tensors = self.named("tensor")
            name = self.choice(keys, entry["from"], tensors) if "from" in entry else tensors[0]
            self.input_name = name
            self.used.add(name)
            return name if "from" in entry else None
        if "from" not in entry:
            self.read_steps.add(index - 1)
            return None
        name = self.choice(keys, entry["from"], [self.input_name, *self.results])
        if name in self.results:
            self.read_steps.add(self.results[name])
        return name

    def result(self, keys: KeyPath, index: int, value: Any) -> str:
        name = self.identifier(keys, value)
        if name in self.parameters or name in self.results:
            what = "a parameter" if name in self.parameters else "an earlier result"
            raise self.fail(keys, f"{name!r} is already the name of {what}; expected a new name")
        self.results[name] = index
        return name

    def field(self, keys: KeyPath, kind: Field, value: Any) -> Any:
        match kind.kind:
            case "padding" if value == "same" and kind.same:
                return value
            case "each" | "padding":
                listed = isinstance(value, list | tuple)
                parts = value if listed else (value,) * self.rank
                if len(parts) != self.rank:
                    names = ", ".join(SPATIAL_NAMES[self.rank])
                    raise self.unexpected(keys, value, f"one value, or a list of {self.rank} ({names})")
                pairs = kind.kind == "padding" and listed
                return tuple(
                    self.each((*keys, i) if listed else keys, part, pairs=pairs) for i, part in enumerate(parts)
                )
            case "flag":
                return self.flag(keys, value)
            case "size":
                return self.expression(keys, value, self.named("size_t"))
            case "axes":
                return self.axes(keys, value)
            case "tensor":
                name = self.choice(keys, value, self.named("tensor"))
                self.used.add(name)
                return name
            case _:
                return self.operand(keys, kind, value)

    def each(self, keys: KeyPath, value: Any, *, pairs: bool) -> Any:
        """The value for one spatial axis: an expression, or where ``pairs``, perhaps two of them: before and after."""
        if not pairs or not isinstance(value, list | tuple):
            return self.expression(keys, value, self.named("size_t"))
        if len(value) != 2:
            raise self.unexpected(keys, value, "one value, or a pair (before, after)")
        return tuple(self.expression((*keys, i), part, self.named("size_t")) for i, part in enumerate(value))

    def flag(self, keys: KeyPath, value: Any) -> bool:
        if not isinstance(value, bool):
            raise self.fail(keys, f"got {self.kind(value)}; expected true or false")
        return value

    def axes(self, keys: KeyPath, value: Any) -> tuple[int, ...] | str:
        """Axes by number; or the name of the size parameter that holds one."""
        names = axis_names(self.rank)
        if isinstance(value, str) and value not in names and value in self.named("size_t"):
            self.used.add(value)
            return value
        if isinstance(value, str):
            return names[self.choice(keys, value, names)]
        listed = self.entries(keys, value, "axes, or the name of one")
        chosen = [self.choice((*keys, i), name, names) for i, name in enumerate(listed)]
        return tuple(sorted({axis for name in chosen for axis in names[name]}))

    def operand(self, keys: KeyPath, kind: Field, value: Any) -> float | str:
        if not isinstance(value, str):
            return self.in_range(keys, self.number(keys, value), kind, "")
        doubles = self.named("double")
        names = doubles if kind.kind == "scalar" else [*doubles, *self.named("tensor"), *self.results]
        if value not in names:
            what = "a double parameter" if kind.kind == "scalar" else "a parameter or an earlier result"
            hint = self.hint(value)
            wanted = f"a number, or the name of {what} ({name_list(names)}){hint or suggest(value, names)}"
            raise self.unexpected(keys, value, wanted)
        if value in self.results:
            self.read_steps.add(self.results[value])
        else:
            self.used.add(value)
        if value in doubles:
            self.scalar_uses.setdefault(value, []).append((keys, kind))
        return value

    def hint(self, value: str) -> str:
        parameter = self.parameters.get(value)
        if parameter is not None:
            return f"; {value} is a {parameter.type} parameter"
        return "; write .inf for infinity" if value.lower().lstrip("+-") in ("inf", "infinity") else ""

    def in_range(self, keys: KeyPath, number: float, kind: Field, user: str) -> float:
        """``number``, if field ``kind`` may have that value; ``user`` tells where a parameter is used."""
        if math.isinf(number) and not kind.infinite:
            raise self.fail(keys, f"got {number}; expected a finite number{user}")
        if kind.least is not None and number < kind.least:
            raise self.fail(keys, f"got {number}; expected {kind.least:g} or more{user}")
        return number

    # -- values for parameters
    def scalar_value(self, keys: KeyPath, name: str, number: float) -> float:
        for where, kind in self.scalar_uses.get(name, ()):  # none, where nothing reads it
            self.in_range(keys, number, kind, f", because {dotted(where)} uses {name}")
        return number

    def check_defaults(self) -> None:
        for name, place in self.places.items():
            parameter = self.parameters[name]
            if parameter.type == "double" and parameter.default is not None:
                self.scalar_value((*place, "default"), name, parameter.default)

    def read_cases(self, raw: Any) -> dict[str, Mapping[str, Number]]:
        if not isinstance(raw, Mapping):
            raise self.unexpected(("cases",), raw, "a mapping from case names to values")
        signs = "- _ . , = < > + and single spaces between them"
        return {
            self.label(("cases",), name, _CASE, signs): Frozen(self.case(("cases", name), values))
            for name, values in raw.items()
        }

    def case(self, keys: KeyPath, raw: Any) -> dict[str, Number]:
        if not isinstance(raw, Mapping):
            raise self.unexpected(keys, raw, "a mapping from parameter names to values")
        settable = {name: p for name, p in self.parameters.items() if p.type != "tensor"}
        missing = [name for name, p in settable.items() if p.default is None and name not in raw]
        self.check_keys(keys, raw, settable, ())
        if missing:
            raise self.fail(keys, f"no value for {name_list(missing)}, which have no default; give them one")
        return {
            name: self.integer((*keys, name), value)
            if settable[name].type == "size_t"
            else self.scalar_value((*keys, name), name, self.number((*keys, name), value))
            for name, value in raw.items()
        }

    def check_case(self, problem: Problem, name: str) -> None:
        """A case must make a legal operator."""
        values = {p.name: p.default for p in self.parameters.values() if p.default is not None}
        values.update(problem.cases[name])
        try:
            sizes = {p.name: int(values[p.name]) for p in problem.sizes}
            bind(problem, sizes, {p.name: float(values[p.name]) for p in problem.scalars})
        except InputError as error:
            raise self.fail(("cases", name), str(error)) from None


def problem_from_mapping(
    mapping: Mapping[str, Any], *, path: Path | None = None, locate: Locate | None = None
) -> Problem:
    """Validate a mapping that has the form of a problem file, described in docs/adding-a-problem.md.

    Args:
        mapping: keys ``name``, ``parameters`` and ``pipeline``; optionally ``title``, ``origin``, ``cases``
            and ``tolerance``.
        path: the file it was read from; messages name it.
        locate: gives the line of a key path; without it messages name the key path alone.

    Raises:
        ProblemFileError: the mapping does not follow the format. The message is one line.
    """
    reader = _ProblemReader(path, locate)
    if not isinstance(mapping, Mapping):
        raise reader.fail((), f"got {show(mapping)}; expected a mapping")
    required = ("name", "parameters", "pipeline")
    optional = ("title", "origin", "note", "rank", "cases", "tolerance")
    reader.check_keys((), mapping, (*required, *optional), required)
    name = reader.label(("name",), mapping["name"])
    title = reader.text(("title",), mapping.get("title", name))
    origin = reader.text(("origin",), mapping.get("origin", ""))
    note = reader.text(("note",), mapping.get("note", ""))
    reader.read_parameters(mapping["parameters"])
    reader.read_rank(mapping)
    pipeline = reader.read_pipeline(mapping["pipeline"])
    reader.check_defaults()
    cases = reader.read_cases(mapping.get("cases", {}))
    tolerance = reader.number(("tolerance",), mapping.get("tolerance", 1.0))
    if not 0 < tolerance < math.inf:
        raise reader.fail(("tolerance",), f"got {tolerance}; expected a finite number above 0")
    parameters, known_cases = tuple(reader.parameters.values()), Frozen(cases)
    problem = Problem(name, title, origin, parameters, pipeline, known_cases, tolerance, path, reader.rank, note)
    for case in cases:
        reader.check_case(problem, case)
    return problem
