"""Reading problem files: a strict subset of YAML, and everything that makes a mapping a valid problem.

The YAML is read from parser events, so that no object is ever made from a tag, and an alias is counted before
it is followed. Plain scalars are decimal numbers, ``true`` or ``false``, ``null`` or text: ``1e-5`` is a
number, ``no`` and ``off`` are texts, and spellings that readers of YAML disagree about (``010``, ``0x10``,
``1_0``, ``1:30``) are errors.
"""

from __future__ import annotations

import difflib
import keyword
import math
import numbers
import os
import re
import stat
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, cast, get_args

import yaml

from dispatcher.errors import InputError, ProblemFileError
from dispatcher.ops.steps import AXES, resolve_axes
from dispatcher.ops.vocabulary import VOCABULARY, Field
from dispatcher.problem.expressions import MAX_VALUE, Expression
from dispatcher.problem.model import Number, Parameter, Problem, StepSpec
from dispatcher.problem.operator import bind

MAX_FILE_BYTES = 256 * 1024
MAX_DEPTH = 16  # lists and mappings inside each other
MAX_NODES = 10_000  # keys, scalars, lists and mappings; an alias counts as much as what it stands for

#: Arguments of ``run``, ``compile``, ``explain``, ``verify`` and ``benchmark`` beside a problem's parameters.
INTERFACE_NAMES = frozenset(
    (
        "against",
        "case",
        "check",
        "device",
        "devices",
        "dtype",
        "force",
        "inputs",
        "options",
        "precision",
        "problem",
        "problems",
        "progress",
        "repeats",
        "seed",
        "seeds",
        "self",
        "time_limit_s",
        "trace",
        "warmup",
    )
)
#: Short-hands for three sizes.
SHORTHAND_NAMES = frozenset(("dilation", "kernel_size", "output_padding", "padding", "stride"))
#: Names that no parameter may have. ``output`` is the result's alone.
RESERVED_NAMES = INTERFACE_NAMES | SHORTHAND_NAMES

KeyPath = tuple[str | int, ...]
#: Gives the line of a key path, such as ``("parameters", 2, "type")``, or of the nearest thing around it.
Locate = Callable[[KeyPath], int]

_PROBLEM_FOLDER = Path(__file__).resolve().parent.parent / "problems"
_MAX_TEXT = 500  # characters of a title or an origin
_TOP_LEVEL = "the keys of a problem (name, parameters, pipeline, ...)"


# ---- texts for messages ------------------------------------------------------------------------------------
def _show(value: object) -> str:
    """``value`` on one short line, whatever it is; containers are not walked."""
    if value is None:
        return "nothing"
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else value[:37] + "...")
    if isinstance(value, bool | float):
        return str(value)
    if isinstance(value, int):
        return str(value) if abs(value) <= 2**70 else f"an integer of {value.bit_length()} bits"
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    return f"a value of type {type(value).__name__}"


def _choices(names: Collection[str]) -> str:
    """A list of names, cut short when it is long."""
    listed = list(names)
    return ", ".join(listed[:30]) + (f" and {len(listed) - 30} more" if len(listed) > 30 else "") or "none"


def _suggest(name: object, names: Collection[str]) -> str:
    """``; did you mean ...?`` when one of ``names`` is close to ``name``, else nothing."""
    if not isinstance(name, str) or len(name) > 100:
        return ""
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _dotted(keys: KeyPath) -> str:
    """``parameters[2].type``."""
    text = ""
    for key in keys:
        if isinstance(key, int):
            text += f"[{key}]"
        else:
            text += ("." if text else "") + (key if key.isprintable() and len(key) <= 100 else _show(key))
    return text


def _show_path(path: Path) -> str:
    text = str(path)
    if len(text) > 300:
        text = "..." + text[-297:]
    return text if text.isprintable() else repr(text)


# ---- YAML --------------------------------------------------------------------------------------------------
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_AMBIGUOUS = re.compile(
    r"[-+]?(0[xX][0-9a-fA-F_]+|0[oObB][0-9_]+|0[0-9_]+(\.[0-9_]*)?|[0-9][0-9_]*(:[0-9_]+)+(\.[0-9_]*)?"
    r"|[0-9][0-9_]*_[0-9_]*(\.[0-9_]*)?|[0-9]+\.[0-9]*_[0-9_]*)([eE][-+]?[0-9_]+)?"
)
_WORDS: dict[str, bool | float | None] = {
    spelling: value
    for word, value in (
        ("", None),
        ("~", None),
        ("null", None),
        ("true", True),
        ("false", False),
        (".inf", math.inf),
        ("+.inf", math.inf),
        ("-.inf", -math.inf),
        (".nan", math.nan),
    )
    for spelling in (word, word.title(), word.upper())
}

#: What PyYAML says it was reading when something was not closed: the fault is shown where that began.
_OPENED = (
    "while parsing a flow sequence",
    "while parsing a flow mapping",
    "while scanning a quoted scalar",
)


@dataclass
class _Node:
    """A value with the lines it was written on."""

    line: int
    value: Any
    count: int = 1
    height: int = 0
    children: dict[str | int, _Node] = field(default_factory=dict)
    key_lines: dict[str | int, int] = field(default_factory=dict)

    def add(self, key: str | int, line: int, child: _Node) -> None:
        self.children[key] = child
        self.key_lines[key] = line
        self.count += child.count
        self.height = max(self.height, child.height + 1)

    def locate(self, keys: KeyPath) -> int:
        node, line = self, self.line
        for key in keys:
            line = node.key_lines.get(key, line)
            if key not in node.children:
                break
            node = node.children[key]
        return line


class _YamlReader:
    """Builds the nodes of one YAML document from parser events, within limits."""

    def __init__(self, text: str, path: Path) -> None:
        self.text, self.path = text, path
        self.events = yaml.parse(text, Loader=yaml.SafeLoader)
        self.anchors: dict[str, _Node | None] = {}  # None: begun but not complete
        self.count = 0

    def fail(self, line: int, keys: KeyPath, message: str) -> ProblemFileError:
        where = f"{_show_path(self.path)}:{line}: "
        return ProblemFileError(where + (f"{_dotted(keys)}: " if keys else "") + message)

    def read(self) -> _Node:
        """The document's root.

        Raises:
            ProblemFileError: the text is not one YAML document in the subset that is accepted.
        """
        self.next(())  # the start of the stream
        event = self.next(())
        if isinstance(event, yaml.StreamEndEvent):
            raise self.fail(1, (), f"the file is empty; expected {_TOP_LEVEL}")
        root = self.build(self.next(()), (), 0)
        self.next(())  # the end of the document
        event = self.next(())
        if not isinstance(event, yaml.StreamEndEvent):
            line = event.start_mark.line + 1
            raise self.fail(line, (), "a second document starts here; expected one problem a file")
        return root

    def next(self, keys: KeyPath) -> Any:
        try:
            return next(self.events)
        except yaml.MarkedYAMLError as error:
            raise self.syntax_error(error, keys) from None
        except yaml.reader.ReaderError as error:
            line = self.text.count("\n", 0, error.position) + 1
            code = error.character if isinstance(error.character, int) else ord(error.character[:1])
            raise self.fail(
                line, (), f"the character with code {code} is not allowed; expected a text file"
            ) from None
        except (ValueError, OverflowError):  # a \U escape beyond Unicode, a version number without end
            raise self.fail(1, keys, "an escape here or a directive is out of range; correct it") from None

    def syntax_error(self, error: yaml.MarkedYAMLError, keys: KeyPath) -> ProblemFileError:
        mark, opened = error.problem_mark, error.context_mark
        place = opened if error.context in _OPENED or mark is None else mark
        lines = self.text.rstrip().splitlines() or [""]
        line = min(place.line if place is not None else 0, len(lines) - 1)
        if error.problem and "'\\t'" in error.problem:
            reason = "a tab is not allowed here; indent with spaces"
        else:
            reason = f"not valid YAML: {error.context + ', ' if error.context else ''}{error.problem}"
        return self.fail(line + 1, keys, f"{reason}; the line reads {_show(lines[line].strip())}")

    def build(self, event: Any, keys: KeyPath, depth: int) -> _Node:
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            return self.alias(event.anchor, line, keys, depth)
        if event.tag is not None:
            raise self.fail(line, keys, f"the tag {_show(event.tag)} is not allowed; expected a plain value")
        if event.anchor is not None:
            if event.anchor in self.anchors:
                raise self.fail(line, keys, f"the anchor &{event.anchor} is defined twice; keep one")
            self.anchors[event.anchor] = None
        self.spend(1, depth, line, keys)
        if isinstance(event, yaml.ScalarEvent):
            node = _Node(line, self.scalar(event, line, keys))
        elif isinstance(event, yaml.SequenceStartEvent):
            node = self.sequence(line, keys, depth)
        else:
            node = self.mapping(line, keys, depth)
        if event.anchor is not None:
            self.anchors[event.anchor] = node
        return node

    def spend(self, count: int, depth: int, line: int, keys: KeyPath) -> None:
        self.count += count
        if self.count > MAX_NODES:
            raise self.fail(line, keys, f"more than {MAX_NODES} values, aliases followed; expected fewer")
        if depth > MAX_DEPTH:
            raise self.fail(line, keys, f"nested more than {MAX_DEPTH} deep; expected less")

    def alias(self, name: str | None, line: int, keys: KeyPath, depth: int) -> _Node:
        if name is None or name not in self.anchors:
            raise self.fail(line, keys, f"the alias *{name} has no anchor; expected &{name} before it")
        node = self.anchors[name]
        if node is None:
            raise self.fail(
                line, keys, f"the alias *{name} stands inside what it refers to; expected an earlier value"
            )
        self.spend(node.count, depth + node.height, line, keys)
        return node

    def sequence(self, line: int, keys: KeyPath, depth: int) -> _Node:
        node = _Node(line, [])
        while not isinstance(event := self.next(keys), yaml.SequenceEndEvent):
            index = len(node.value)
            child = self.build(event, (*keys, index), depth + 1)
            node.add(index, event.start_mark.line + 1, child)
            node.value.append(child.value)
        return node

    def mapping(self, line: int, keys: KeyPath, depth: int) -> _Node:
        node = _Node(line, {})
        while not isinstance(event := self.next(keys), yaml.MappingEndEvent):
            key_line = event.start_mark.line + 1
            key = self.build(event, keys, depth + 1).value if isinstance(event, yaml.ScalarEvent) else event
            if not isinstance(key, str):
                shown = _show(key) if isinstance(event, yaml.ScalarEvent) else "a list, a mapping or an alias"
                raise self.fail(key_line, keys, f"a key is {shown}; expected a text")
            if key == "<<" and event.style is None:
                raise self.fail(key_line, keys, "merge keys (<<) are not supported; write the keys out")
            if key in node.value:
                raise self.fail(
                    key_line,
                    (*keys, key),
                    f"duplicate key, first given on line {node.key_lines[key]}; keep one",
                )
            child = self.build(self.next((*keys, key)), (*keys, key), depth + 1)
            node.add(key, key_line, child)
            node.value[key] = child.value
        return node

    def scalar(self, event: yaml.ScalarEvent, line: int, keys: KeyPath) -> str | int | float | bool | None:
        text = event.value
        if event.style is not None:  # quoted, or a block of text
            return text
        if text in _WORDS:
            return _WORDS[text]
        if _INTEGER.fullmatch(text) and len(text) <= 20:
            return int(text)
        if _FLOAT.fullmatch(text):
            value = float(text)
            if _INTEGER.fullmatch(text) or math.isinf(value):
                raise self.fail(line, keys, f"got {_show(text)}; expected a smaller number")
            return value
        if _AMBIGUOUS.fullmatch(text):
            raise self.fail(
                line,
                keys,
                f"got {_show(text)}, which YAML readers take for different numbers; "
                "expected a plain decimal number, or quotes around a text",
            )
        return text


def read_yaml(path: str | os.PathLike[str]) -> tuple[Mapping[str, Any], Locate]:
    """Read a YAML file whose top level is a mapping.

    Accepted is one document of at most ``MAX_FILE_BYTES`` in UTF-8, with at most ``MAX_NODES`` values nested
    at most ``MAX_DEPTH`` deep. Tags, merge keys, duplicate keys and keys that are not text are errors.

    Returns:
        The mapping, and a function that gives the line of a key path in it.

    Raises:
        ProblemFileError: the file cannot be read, or does not hold such a document.
    """
    path = Path(path)
    shown = _show_path(path)
    try:
        info = path.stat()
        regular = stat.S_ISREG(info.st_mode)
        data = None
        if regular and info.st_size <= MAX_FILE_BYTES:
            with path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ProblemFileError(f"{shown}: no such file; expected the path of a problem file") from None
    except OSError as error:
        raise ProblemFileError(f"{shown}: {error.strerror}; expected a readable problem file") from None
    except ValueError:  # a null character in the path
        raise ProblemFileError(f"{shown}: not a path; expected the path of a problem file") from None
    if not regular:
        kind = "a directory" if stat.S_ISDIR(info.st_mode) else "not a regular file"
        raise ProblemFileError(f"{shown}: this is {kind}; expected a problem file (.yaml)")
    if data is None or len(data) > MAX_FILE_BYTES:
        size = max(info.st_size, MAX_FILE_BYTES + 1)
        raise ProblemFileError(f"{shown}: the file has {size} bytes; expected {MAX_FILE_BYTES} at most")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ProblemFileError(
            f"{shown}:{line}: byte {error.start} is not UTF-8; expected a text file in UTF-8"
        ) from None
    root = _YamlReader(text, path).read()
    if not isinstance(root.value, dict):
        what = "the file is empty" if root.value is None else f"the top level is {_show(root.value)}"
        raise ProblemFileError(f"{shown}:{root.line}: {what}; expected {_TOP_LEVEL}")
    return root.value, root.locate


# ---- from a mapping to a problem ---------------------------------------------------------------------------
_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")  # names of problems and cases

ParameterType = Literal["tensor", "size_t", "double"]


class _ProblemReader:
    """Validates one mapping, part by part; knows what has been declared and used so far."""

    def __init__(self, path: Path | None, locate: Locate | None) -> None:
        self.path, self.locate = path, locate
        self.parameters: dict[str, Parameter] = {}
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
            where = f"{_show_path(self.path)}: "
        else:
            where = f"{_show_path(self.path)}:{self.locate(keys)}: "
        return ProblemFileError(where + (f"{_dotted(keys)}: " if keys else "") + message)

    def check_keys(
        self, keys: KeyPath, value: Mapping[Any, Any], allowed: Collection[str], required: Collection[str]
    ) -> None:
        for key in value:
            if not isinstance(key, str):
                raise self.fail(keys, f"a key is {_show(key)}; expected a text")
            if key not in allowed:
                raise self.fail(
                    (*keys, key),
                    f"unknown key {_show(key)}; expected {_choices(allowed)}{_suggest(key, allowed)}",
                )
        for key in required:
            if key not in value:
                raise self.fail(keys, f"the key {key!r} is missing; add it")

    def entries(self, keys: KeyPath, value: Any, what: str) -> list[Any] | tuple[Any, ...]:
        if not isinstance(value, list | tuple) or not value:
            raise self.fail(keys, f"got {_show(value)}; expected a list of {what}")
        return value

    def text(self, keys: KeyPath, value: Any) -> str:
        if not isinstance(value, str):
            raise self.fail(keys, f"got {_show(value)}; expected a text")
        stripped = value.strip()
        if not stripped.isprintable() or len(stripped) > _MAX_TEXT:
            raise self.fail(
                keys, f"got {_show(value)}; expected one line of text, {_MAX_TEXT} characters at most"
            )
        return stripped

    def label(self, keys: KeyPath, value: Any) -> str:
        if not isinstance(value, str) or not _LABEL.fullmatch(value):
            raise self.fail(
                keys, f"got {_show(value)}; expected a name of letters, digits, '-' and '_', 100 at most"
            )
        return value

    def identifier(self, keys: KeyPath, value: Any) -> str:
        if not isinstance(value, str) or not _IDENTIFIER.fullmatch(value) or keyword.iskeyword(value):
            raise self.fail(
                keys,
                f"got {_show(value)}; expected a Python identifier (letters, digits and '_', no keyword), "
                "64 characters at most",
            )
        return value

    def choice(self, keys: KeyPath, value: Any, choices: Collection[str]) -> str:
        if not isinstance(value, str) or value not in choices:
            raise self.fail(
                keys, f"got {_show(value)}; expected one of {_choices(choices)}{_suggest(value, choices)}"
            )
        return value

    def integer(self, keys: KeyPath, value: Any, least: int = 0) -> int:
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            hint = ""
            if isinstance(value, float) and value.is_integer():
                hint = f"; write {int(value)}" if abs(value) <= MAX_VALUE else ""
            raise self.fail(keys, f"got {self.kind(value)}; expected an integer{hint}")
        result = int(value)
        if not least <= result <= MAX_VALUE:
            raise self.fail(keys, f"got {_show(result)}; expected an integer from {least} to 2**63 - 1")
        return result

    def number(self, keys: KeyPath, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            word = value.lower().lstrip("+-") if isinstance(value, str) else ""
            hint = "; write .inf for infinity" if word in ("inf", "infinity") else ""
            raise self.fail(keys, f"got {self.kind(value)}; expected a number{hint}")
        try:
            result = float(value)
        except OverflowError:
            raise self.fail(keys, f"got {_show(value)}; expected a number that a double can hold") from None
        if math.isnan(result):
            raise self.fail(keys, "got nan; expected a number")
        return result

    @staticmethod
    def kind(value: Any) -> str:
        """A value of the wrong kind, with its kind where the value alone could mislead."""
        if isinstance(value, str):
            return f"the text {_show(value)}"
        return f"the truth value {value}" if isinstance(value, bool) else _show(value)

    # -- parameters
    def named(self, kind: ParameterType) -> list[str]:
        return [p.name for p in self.parameters.values() if p.type == kind and (p.const or kind != "tensor")]

    def read_parameters(self, raw: Any) -> None:
        entries = self.entries(("parameters",), raw, "parameters")
        sizes = [
            entry["name"]
            for entry in entries
            if isinstance(entry, Mapping)
            and entry.get("type") == "size_t"
            and isinstance(entry.get("name"), str)
        ]
        for index, entry in enumerate(entries):
            parameter = self.parameter(("parameters", index), entry, sizes)
            if parameter.name in self.parameters:
                raise self.fail(
                    ("parameters", index, "name"), f"{parameter.name!r} is declared twice; rename one"
                )
            self.parameters[parameter.name] = parameter
        outputs = [p.name for p in self.parameters.values() if p.type == "tensor" and not p.const]
        if len(outputs) != 1:
            got = _choices(outputs)
            raise self.fail(
                ("parameters",), f"the output tensors (const: false) are {got}; expected exactly one"
            )
        if not self.named("tensor"):
            raise self.fail(("parameters",), "there is no input tensor (const: true); expected at least one")

    def parameter(self, keys: KeyPath, entry: Any, sizes: Collection[str]) -> Parameter:
        if not isinstance(entry, Mapping):
            raise self.fail(keys, f"got {_show(entry)}; expected a mapping with name and type")
        self.check_keys(keys, entry, ("name", "type", "const", "shape", "default"), ("name", "type"))
        name = self.identifier((*keys, "name"), entry["name"])
        kind = cast(ParameterType, self.choice((*keys, "type"), entry["type"], get_args(ParameterType)))
        is_tensor = kind == "tensor"
        for key in ("const", "shape") if not is_tensor else ("default",):
            if key in entry:
                raise self.fail((*keys, key), f"{name} is a {kind}, which takes no {key!r}; remove it")
        const = entry.get("const", False)
        if not isinstance(const, bool) or (is_tensor and "const" not in entry):
            got = f"got {self.kind(const)}; " if "const" in entry else ""
            raise self.fail(
                (*keys, "const"), f"{got}expected true for an input tensor, false for the output tensor"
            )
        is_output = is_tensor and not const
        if name in RESERVED_NAMES or (name == "output" and not is_output):
            raise self.fail(
                (*keys, "name"), f"{name!r} is an argument of the Python interface; expected another name"
            )
        shape = None
        if const:
            if "shape" not in entry:
                raise self.fail(keys, f"the key 'shape' is missing; add the extents of tensor {name}")
            shape = self.shape((*keys, "shape"), entry["shape"], sizes)
        elif "shape" in entry:
            raise self.fail(
                (*keys, "shape"), f"the shape of the output {name} follows from the pipeline; remove it"
            )
        default: Number | None = None
        if "default" in entry:
            read = self.integer if kind == "size_t" else self.number
            default = read((*keys, "default"), entry["default"])
        return Parameter(name, kind, const, shape, default)

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
        for name in sorted(expression.names):
            if name not in sizes:
                raise self.fail(
                    keys,
                    f"{name!r} is not a size_t parameter; expected an expression over {_choices(sizes)}"
                    f"{_suggest(name, sizes)}",
                )
        self.used |= expression.names
        return expression

    # -- pipeline
    def read_pipeline(self, raw: Any) -> tuple[StepSpec, ...]:
        entries = self.entries(("pipeline",), raw, "steps")
        steps = tuple(self.step(("pipeline", index), index, entry) for index, entry in enumerate(entries))
        for index, step in enumerate(steps[:-1]):
            if index not in self.read_steps:
                raise self.fail(
                    ("pipeline", index), f"no later step reads the result of {step.op}; remove it or use it"
                )
        for name, parameter in self.parameters.items():
            if name not in self.used and (parameter.type != "tensor" or parameter.const):
                position = list(self.parameters).index(name)
                raise self.fail(
                    ("parameters", position),
                    f"{name} is used by no step and no shape; remove it or name it in the pipeline",
                )
        return steps

    def step(self, keys: KeyPath, index: int, entry: Any) -> StepSpec:
        if isinstance(entry, str):
            op, entry = self.choice(keys, entry, VOCABULARY), {}
        elif isinstance(entry, Mapping) and "op" in entry:
            op = self.choice((*keys, "op"), entry["op"], VOCABULARY)
        else:
            got = "no key 'op'" if isinstance(entry, Mapping) else _show(entry)
            raise self.fail(keys, f"got {got}; expected the name of a step, or a mapping with the key 'op'")
        known = {f.name: f for f in VOCABULARY[op].fields}
        required = [f.name for f in known.values() if f.required]
        self.check_keys(keys, entry, ("op", "from", "as", *known), required)
        source = self.source((*keys, "from"), index, entry)
        fields = {
            name: self.field((*keys, name), f, entry[name]) for name, f in known.items() if name in entry
        }
        result = self.result((*keys, "as"), index, entry["as"]) if "as" in entry else None
        return StepSpec(op, source, result, MappingProxyType(fields))

    def source(self, keys: KeyPath, index: int, entry: Mapping[str, Any]) -> str | None:
        if index == 0:
            tensors = self.named("tensor")
            name = self.choice(keys, entry["from"], tensors) if "from" in entry else tensors[0]
            shape = self.parameters[name].shape
            if shape is None or len(shape) != 5:
                raise self.fail(
                    keys if "from" in entry else keys[:-1],
                    f"the pipeline's input {name} has {len(shape or ())} axes; expected 5 "
                    "(batch, channel, depth, height, width)",
                )
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
            case "triple":
                parts = value if isinstance(value, list | tuple) else (value,) * 3
                if len(parts) != 3:
                    raise self.fail(
                        keys, f"got {_show(value)}; expected one value, or a list of 3 (depth, height, width)"
                    )
                listed = isinstance(value, list | tuple)
                return tuple(
                    self.expression((*keys, i) if listed else keys, part, self.named("size_t"))
                    for i, part in enumerate(parts)
                )
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

    def axes(self, keys: KeyPath, value: Any) -> tuple[int, ...]:
        if isinstance(value, str):
            return resolve_axes(self.choice(keys, value, AXES))
        names = self.entries(keys, value, "axes, or the name of one")
        return resolve_axes([self.choice((*keys, i), name, AXES) for i, name in enumerate(names)])

    def operand(self, keys: KeyPath, kind: Field, value: Any) -> float | str:
        if not isinstance(value, str):
            return self.in_range(keys, self.number(keys, value), kind, "")
        doubles = self.named("double")
        names = doubles if kind.kind == "scalar" else [*doubles, *self.named("tensor"), *self.results]
        if value not in names:
            what = "a double parameter" if kind.kind == "scalar" else "a parameter or an earlier result"
            hint = self.hint(value)
            raise self.fail(
                keys,
                f"got {_show(value)}; expected a number, or the name of {what} ({_choices(names)})"
                f"{hint or _suggest(value, names)}",
            )
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
        for where, kind in self.scalar_uses[name]:
            self.in_range(keys, number, kind, f", because {_dotted(where)} uses {name}")
        return number

    def check_defaults(self) -> None:
        for index, parameter in enumerate(self.parameters.values()):
            if parameter.type == "double" and parameter.default is not None:
                self.scalar_value(("parameters", index, "default"), parameter.name, parameter.default)

    def read_cases(self, raw: Any) -> dict[str, Mapping[str, Number]]:
        if not isinstance(raw, Mapping):
            raise self.fail(("cases",), f"got {_show(raw)}; expected a mapping from case names to values")
        return {
            self.label(("cases",), name): MappingProxyType(self.case(("cases", name), values))
            for name, values in raw.items()
        }

    def case(self, keys: KeyPath, raw: Any) -> dict[str, Number]:
        if not isinstance(raw, Mapping):
            raise self.fail(keys, f"got {_show(raw)}; expected a mapping from parameter names to values")
        settable = {name: p for name, p in self.parameters.items() if p.type != "tensor"}
        missing = [name for name, p in settable.items() if p.default is None and name not in raw]
        self.check_keys(keys, raw, settable, ())
        if missing:
            raise self.fail(keys, f"no value for {_choices(missing)}, which have no default; give them one")
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
            bind(
                problem,
                {p.name: int(values[p.name]) for p in problem.sizes},
                {p.name: float(values[p.name]) for p in problem.scalars},
            )
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
        raise reader.fail((), f"got {_show(mapping)}; expected a mapping")
    required = ("name", "parameters", "pipeline")
    reader.check_keys(
        (), mapping, ("name", "title", "origin", "parameters", "pipeline", "cases", "tolerance"), required
    )
    name = reader.label(("name",), mapping["name"])
    title = reader.text(("title",), mapping.get("title", name))
    origin = reader.text(("origin",), mapping.get("origin", ""))
    reader.read_parameters(mapping["parameters"])
    pipeline = reader.read_pipeline(mapping["pipeline"])
    reader.check_defaults()
    cases = reader.read_cases(mapping.get("cases", {}))
    tolerance = reader.number(("tolerance",), mapping.get("tolerance", 1.0))
    if not 0 < tolerance < math.inf:
        raise reader.fail(("tolerance",), f"got {tolerance}; expected a finite number above 0")
    problem = Problem(
        name,
        title,
        origin,
        tuple(reader.parameters.values()),
        pipeline,
        MappingProxyType(cases),
        tolerance,
        path,
    )
    for case in cases:
        reader.check_case(problem, case)
    return problem


# ---- finding problems --------------------------------------------------------------------------------------
def problem_names() -> tuple[str, ...]:
    """Names of the problems that come with the package, sorted."""
    return tuple(sorted(path.stem for path in _PROBLEM_FOLDER.glob("*.yaml")))


@cache
def _bundled(name: str) -> Problem:
    return _read_problem(_PROBLEM_FOLDER / f"{name}.yaml")


def _read_problem(path: Path) -> Problem:
    mapping, locate = read_yaml(path)
    return problem_from_mapping(mapping, path=path, locate=locate)


def load_problem(problem: str | os.PathLike[str] | Mapping[str, Any] | Problem) -> Problem:
    """The problem that ``problem`` stands for.

    Args:
        problem: a problem (returned as it is), a mapping with the keys of a problem file, the name of a
            problem that comes with the package, or the path of a problem file: a text that has a path
            separator, ends in ``.yaml`` or ``.yml``, or is the name of an existing file.

    Raises:
        ProblemFileError: the file or the mapping does not follow the format.
        InputError: there is no problem of that name.
    """
    if isinstance(problem, Problem):
        return problem
    if isinstance(problem, Mapping):
        return problem_from_mapping(problem)
    if not isinstance(problem, str | os.PathLike):
        raise InputError(
            f"the problem is {_show(problem)}; expected a name, the path of a file, a mapping or a Problem"
        )
    text = os.fspath(problem)
    names = problem_names()
    if isinstance(problem, str) and problem in names:
        return _bundled(problem)
    looks_like_path = "/" in text or "\\" in text or text.lower().endswith((".yaml", ".yml"))
    if looks_like_path or isinstance(problem, os.PathLike) or os.path.isfile(text):
        return _read_problem(Path(text))
    raise InputError(
        f"there is no problem {_show(text)}{_suggest(text, names)}; expected one of {_choices(names)}, "
        "or the path of a problem file (.yaml)"
    )
