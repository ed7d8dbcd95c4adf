"""Reading a YAML file as plain data: a strict subset of YAML, within limits.

The YAML is read from parser events, so that no object is ever made from a tag, and an alias is counted before
it is followed. Plain scalars are decimal numbers, ``true`` or ``false``, ``null`` or text: ``1e-5`` is a
number, ``no`` and ``off`` are texts, and spellings that readers of YAML disagree about (``010``, ``0x10``,
``1_0``, ``1:30``) are errors.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dispatcher.errors import ProblemFileError
from dispatcher.files import NotRegularError, TooLargeError, read_regular
from dispatcher.problem.messages import KeyPath, dotted, show, show_path

MAX_FILE_BYTES = 256 * 1024
MAX_DEPTH = 16  # lists and mappings inside each other
MAX_NODES = 10_000  # keys, scalars, lists and mappings; an alias counts as much as what it stands for

#: Gives the line of a key path, such as ``("parameters", 2, "type")``, or of the nearest thing around it.
Locate = Callable[[KeyPath], int]

_TOP_LEVEL = "the keys of a problem (name, parameters, pipeline, ...)"

_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_AMBIGUOUS = re.compile(
    r"[-+]?(0[xX][0-9a-fA-F_]+|0[oObB][0-9_]+|0[0-9_]+(\.[0-9_]*)?|[0-9][0-9_]*(:[0-9_]+)+(\.[0-9_]*)?"
    r"|[0-9][0-9_]*_[0-9_]*(\.[0-9_]*)?|[0-9]+\.[0-9]*_[0-9_]*)([eE][-+]?[0-9_]+)?"
)
_WORDS: dict[str, bool | float | None] = {
    spelling: value
    for words, value in (
        (("", "~", "null"), None), (("true",), True), (("false",), False),
        ((".inf", "+.inf"), math.inf), (("-.inf",), -math.inf), ((".nan",), math.nan),
    )
    for word in words
    for spelling in (word, word.title(), word.upper())
}  # fmt: skip

#: What PyYAML says it was reading when something was not closed: the fault is shown where that began.
_OPENED = ("while parsing a flow sequence", "while parsing a flow mapping", "while scanning a quoted scalar")


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
        where = f"{show_path(self.path)}:{line}: "
        return ProblemFileError(where + (f"{dotted(keys)}: " if keys else "") + message)

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
            raise self.fail(line, (), f"the character with code {code} is not allowed; expected a text file") from None
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
        return self.fail(line + 1, keys, f"{reason}; the line reads {show(lines[line].strip())}")

    def build(self, event: Any, keys: KeyPath, depth: int) -> _Node:
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            return self.alias(event.anchor, line, keys, depth)
        if event.tag is not None:
            raise self.fail(line, keys, f"the tag {show(event.tag)} is not allowed; expected a plain value")
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
            raise self.fail(line, keys, f"the alias *{name} stands inside what it refers to; expected an earlier value")
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
                shown = show(key) if isinstance(event, yaml.ScalarEvent) else "a list, a mapping or an alias"
                raise self.fail(key_line, keys, f"a key is {shown}; expected a text")
            if key == "<<" and event.style is None:
                raise self.fail(key_line, keys, "merge keys (<<) are not supported; write the keys out")
            if key in node.value:
                before = f"duplicate key, first given on line {node.key_lines[key]}"
                raise self.fail(key_line, (*keys, key), f"{before}; keep one")
            child = self.build(self.next((*keys, key)), (*keys, key), depth + 1)
            node.add(key, key_line, child)
            node.value[key] = child.value
        return node

    def scalar(self, event: yaml.ScalarEvent, line: int, keys: KeyPath) -> str | int | float | bool | None:
        text = event.value
        if event.style is not None:  # quoted, or a block of text
            return text
        value = plain_value(text)
        if isinstance(value, float) and text not in _WORDS and (_INTEGER.fullmatch(text) or math.isinf(value)):
            raise self.fail(line, keys, f"got {show(text)}; expected a smaller number")
        if _AMBIGUOUS.fullmatch(text):
            wanted = "expected a plain decimal number, or quotes around a text"
            got = f"got {show(text)}, which YAML readers take for different numbers"
            raise self.fail(line, keys, f"{got}; {wanted}")
        return value


def plain_value(text: str) -> str | int | float | bool | None:
    """What a scalar without quotes stands for; itself where it is neither a number nor one of YAML's words."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text) and len(text) <= 20:
        return int(text)
    return float(text) if _FLOAT.fullmatch(text) else text


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
    shown = show_path(path)
    try:
        data = read_regular(path, MAX_FILE_BYTES)
    except NotRegularError as error:
        raise ProblemFileError(f"{shown}: this is {error}; expected a problem file (.yaml)") from None
    except TooLargeError as error:
        raise ProblemFileError(f"{shown}: the file has {error.size} bytes; expected {MAX_FILE_BYTES} at most") from None
    except FileNotFoundError:
        raise ProblemFileError(f"{shown}: no such file; expected the path of a problem file") from None
    except OSError as error:
        raise ProblemFileError(f"{shown}: {error.strerror}; expected a readable problem file") from None
    except ValueError:  # a null character in the path
        raise ProblemFileError(f"{shown}: not a path; expected the path of a problem file") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ProblemFileError(
            f"{shown}:{line}: byte {error.start} is not UTF-8; expected a text file in UTF-8"
        ) from None
    root = _YamlReader(text, path).read()
    if not isinstance(root.value, dict):
        what = "the file is empty" if root.value is None else f"the top level is {show(root.value)}"
        raise ProblemFileError(f"{shown}:{root.line}: {what}; expected {_TOP_LEVEL}")
    return root.value, root.locate
