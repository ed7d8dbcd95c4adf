"""A module of PyTorch in somebody's Python file, which has to be run to import it: in a process of its own."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dispatcher.device.childprocess import run_child
from dispatcher.errors import InputError, first_line, install
from dispatcher.files import NotRegularError, TooLargeError, read_regular

_MAX_BYTES = 1 << 20


@dataclass(frozen=True)
class ModelFile:
    """What came of a file.

    Attributes:
        yaml: the text of a problem file.
        tensors: shape of each weight by parameter name.
    """

    yaml: str
    tensors: Mapping[str, list[int]]


def untrusted(path: Path) -> InputError:
    """What is said where nobody has said that the file may be run."""
    return InputError(
        f"{path}: to import it is to run its Python code with your rights: all that it says, then Model, "
        "get_init_inputs and get_inputs; look at it, and give --trust if you trust it"
    )


def check_file(path: Path) -> None:
    """Check, without running it, that a file defines what KernelBench's files do.

    Raises:
        InputError: it cannot be read, is no Python, or lacks ``Model`` or ``get_inputs``.
    """
    try:
        tree = ast.parse(read_regular(path, _MAX_BYTES), str(path))
    except (NotRegularError, TooLargeError, OSError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise InputError(f"{path}: {reason}; expected a Python file") from None
    except SyntaxError as error:
        raise InputError(f"{path}:{error.lineno}: {error.msg}; expected a Python file") from None
    except ValueError as error:  # null characters
        raise InputError(f"{path}: {first_line(error)}; expected a Python file") from None
    defined = {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    missing = [name for name in ("Model", "get_inputs") if name not in defined]
    if missing:
        raise InputError(f"{path}: it does not define {missing[0]}; expected class Model and def get_inputs()")


def import_file(
    path: Path,
    *,
    weights: Path | None = None,
    name: str | None = None,
    evaluate: bool = False,
    timeout_s: float = 300.0,
) -> ModelFile:
    """Import the module of a file in KernelBench's form, which is run in a process of its own.

    Args:
        path: of a Python file with ``class Model``, ``get_inputs()`` and perhaps ``get_init_inputs()``.
        weights: the .npz file that the module's weights are written to, if any.
        name: of the problem; the file's stem by default.
        evaluate: import what the module does in evaluation mode; else what it does as it is made.
        timeout_s: seconds that this may take.

    Raises:
        UnsupportedError: the module does what the vocabulary has no step for.
        InputError: something in the file fails, or takes too long.
    """
    check_file(path)
    if importlib.util.find_spec("torch") is None:
        raise InputError(f"to import a module needs PyTorch, which is not installed: {install('torch')}")
    arguments = [str(path.resolve()), "" if weights is None else str(weights), name or path.stem, "1" * evaluate]
    ended = run_child("dispatcher.torch.modelrun:import_here", arguments, timeout_s)
    if not ended.reports:
        if ended.code is None:
            raise InputError(f"{path}: it was not imported within {timeout_s:g} seconds; allow more with --timeout")
        how = f"by {ended.signal}" if ended.signal else f"with exit code {ended.code}"
        raise InputError(f"{path}: its process ended {how}{ended.last_line}")
    (told,) = ended.reports
    if "error" in told:
        raise InputError(told["error"])
    return ModelFile(told["yaml"], told["tensors"])
