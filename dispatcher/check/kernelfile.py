"""Reading a user's kernel from its file, with how to call it and over how many work items."""

from __future__ import annotations

import math
import numbers
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dispatcher import registry
from dispatcher.errors import InputError
from dispatcher.files import NotRegularError, TooLargeError, read_regular
from dispatcher.ops.steps import axis_names
from dispatcher.problem.expressions import Expression
from dispatcher.problem.messages import brief
from dispatcher.problem.model import Parameter, Problem
from dispatcher.problem.operator import Operator
from dispatcher.problem.userkernel import Kind, UserKernel, spelled
from dispatcher.problem.values import NOT_NUMBERS, unwrapped

#: Bytes of the largest kernel file: far more than anybody writes.
LARGEST_FILE = 1 << 24
#: The words before a function, and how its language writes parameters of float32 tensors and numbers.
_LANGUAGES: dict[str, tuple[str, dict[Kind, str]]] = {
    "c": ("", {"input": "const float*", "output": "float*", "size": "size_t", "double": "double"}),
    "cu": ("__global__ ", {"input": "const float*", "output": "float*", "size": "size_t", "double": "double"}),
    "cl": (
        "__kernel ",
        {"input": "__global const float*", "output": "__global float*", "size": "ulong", "double": "double"},
    ),
}

#: A size as an expression, a number, or several of these: for x, y and z.
Sizes = str | int | Sequence[str | int]

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def as_texts(name: str, values: Any) -> tuple[str, ...]:
    """Several texts as a tuple.

    Raises:
        InputError: it is something else, such as one text.
    """
    found = tuple(values) if isinstance(values, Iterable) and not isinstance(values, str | bytes) else None
    if found is None or not all(isinstance(value, str) for value in found):
        raise InputError(f"{name} is {brief(values)}; expected a list of texts")
    return found


def read_kernel(
    operator: Operator,
    path: str | Path,
    entry: str,
    global_size: Sizes | None,
    local_size: Sizes | None,
    build_options: Sequence[str],
) -> tuple[UserKernel, str]:
    """The kernel, and the backend that its file is for.

    Raises:
        InputError: an argument is wrong, or the file cannot be read.
    """
    files = _how_run(path)
    file = Path(path)
    text = _read_text(file)
    if not isinstance(entry, str) or not _IDENTIFIER.fullmatch(entry):
        raise InputError(f"entry is {brief(entry)}; expected the name of a function in {_printable(file)}")
    options = as_texts("build_options", build_options)
    for option in options:
        if "\0" in option or not _encodes(option):
            found = "a NUL, or bytes that are no text here"
            raise InputError(f"build option {brief(option)} has {found}; expected text in UTF-8")
    names = size_names(operator)
    local = None if local_size is None else _evaluate("local_size", local_size, names)
    whole = None if global_size is None else _evaluate("global_size", global_size, names)
    if whole is None and not files.host_functions:
        wanted = "expected up to three sizes, such as output_elements"
        raise InputError(f"global_size is missing, which {file.suffix} files need; {wanted}")
    if local is None and whole is not None and files.groups_needed:
        raise InputError(f"global_size is given without local_size, which {file.suffix} files need; give both")
    if local is not None and whole is None:
        raise InputError("local_size is given without global_size; give both")
    if local is not None and whole is not None:
        if len(local) != len(whole):
            given = f"local_size is {brief(local_size)} and global_size {brief(global_size)}"
            raise InputError(f"{given}; expected as many sizes in both")
        whole = tuple(-(-size // step) * step for size, step in zip(whole, local, strict=True))
    parameters = _kinds(operator.problem.parameters)
    kernel = UserKernel(
        _printable(file), text, str(file.resolve().parent), entry, parameters, operator.dtype, whole, local, options,
    )  # fmt: skip
    return kernel, files.backend


def _read_text(file: Path) -> str:
    """What is in a kernel file, without a byte order mark.

    Raises:
        InputError: it cannot be read, or is no text that compilers take.
    """
    name = f"kernel {_printable(file)!r}"
    try:
        content = read_regular(file, LARGEST_FILE)
    except NotRegularError:
        raise InputError(f"{name} is not a regular file; expected one with the source of a kernel") from None
    except TooLargeError:
        raise InputError(f"{name} has more than {LARGEST_FILE} bytes; expected the source of a kernel") from None
    except OSError as error:
        raise InputError(f"{name} cannot be read: {error.strerror}; expected the source of a kernel") from error
    except ValueError as error:  # a NUL in the path, or letters that the file system's encoding lacks
        raise InputError(f"{name} cannot be read: no file can have this name: {error}") from error
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{name} cannot be read: it is not a text in UTF-8") from error
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        raise InputError(f"{name} has a NUL in line {line}, where compilers would stop reading; take it out")
    return text


def _encodes(text: str) -> bool:
    """Whether a text is one: what the system gave us as bytes may be none."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _printable(file: Path) -> str:
    """A path as text, in which bytes that are none, and what moves a terminal's cursor, are escaped."""
    path = str(file)
    text = path if _encodes(path) else os.fsencode(path).decode("ascii", "backslashreplace")
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def signature(problem: Problem, language: str) -> str:
    """The head of a function that computes a problem, a parameter a line.

    Args:
        problem: whose parameters it has.
        language: ``c``, ``cu`` or ``cl``.

    Raises:
        InputError: it is another language.
    """
    if language not in _LANGUAGES:
        raise InputError(f"the language is {brief(language)}; expected one of {', '.join(_LANGUAGES)}")
    lines = ",\n    ".join(parameter_list(problem.parameters, language))
    return f"{_LANGUAGES[language][0]}void solution(\n    {lines})"


def parameter_list(parameters: Iterable[Parameter], language: str, element: str = "float") -> list[str]:
    """Type and name of each of a problem's parameters, as a language writes them.

    Args:
        parameters: some of a problem's.
        language: ``c``, ``cu`` or ``cl``.
        element: the type of the tensors' elements.
    """
    types = _LANGUAGES[language][1]
    return [f"{types[kind].replace('float', element)} {spelled(name, language)}" for name, kind in _kinds(parameters)]


def _kinds(parameters: Iterable[Parameter]) -> tuple[tuple[str, Kind], ...]:
    """Name and kind of each of a problem's parameters."""
    kinds: dict[str, Kind] = {"size_t": "size", "double": "double"}
    return tuple(
        (parameter.name, kinds.get(parameter.type, "input" if parameter.const else "output"))
        for parameter in parameters
    )


def size_names(operator: Operator) -> dict[str, int]:
    """What size expressions may use: the extents of the result, 1 where it drops an axis, and the problem's sizes."""
    shape = operator.steps[-1].shape
    axes = {name: axes[0] for name, axes in axis_names(operator.problem.rank).items() if name != "spatial"}
    extents = {f"output_{name}{'s' if name == 'channel' else ''}": shape[axis] for name, axis in axes.items()}
    return {**extents, "output_elements": math.prod(shape), **operator.sizes}


def _evaluate(argument: str, sizes: Sizes, names: Mapping[str, int]) -> tuple[int, ...]:
    """One to three sizes.

    Raises:
        InputError: they are not that, or one is below 1.
    """
    parts: Sequence[Any]
    if isinstance(sizes, str):
        parts = sizes.split(",")
    else:
        given = unwrapped(sizes)
        parts = given if isinstance(given, list | tuple) else [given]
    if not 1 <= len(parts) <= 3:
        raise InputError(f"{argument} is {brief(sizes)}; expected one to three sizes")
    values = []
    for part in parts:
        if isinstance(part, NOT_NUMBERS) or not isinstance(part, numbers.Integral | str):
            raise InputError(f"{argument} is {brief(sizes)}; expected numbers or expressions")
        try:
            expression = Expression.parse(part if isinstance(part, str) else int(part))
            unknown = sorted(expression.names - set(names))
            if unknown:
                raise InputError(f"there is no size {unknown[0]!r}; there are {', '.join(names)}")
            value = expression.evaluate(names)
        except InputError as error:
            raise InputError(f"{argument} {brief(part)}: {error}") from error
        if value < 1:
            raise InputError(f"{argument} {brief(part)} is {value}; expected 1 or more")
        values.append(value)
    return tuple(values)


def _how_run(kernel: str | Path) -> registry.KernelFiles:
    """How files such as this one are run.

    Raises:
        InputError: it is not the path of a kernel file.
    """
    if not isinstance(kernel, str | Path):
        raise InputError(f"kernel is {brief(kernel)}; expected the path of a {' or '.join(registry.KERNEL_FILES)} file")
    files = registry.KERNEL_FILES.get(Path(kernel).suffix.lower())
    if files is None:
        suffixes = " or ".join(registry.KERNEL_FILES)
        raise InputError(f"kernel is {brief(str(kernel))}; expected a file that ends in {suffixes}")
    return files
