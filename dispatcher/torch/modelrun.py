"""The child process that runs somebody's Python file, and imports the module in it."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dispatcher.device.childprocess import Report
from dispatcher.errors import DispatcherError, first_line
from dispatcher.torch.importing import Imported, import_module

_SEED = 42  # that KernelBench makes a model's weights with


def import_here(report: Report, path: str, weights: str, name: str, evaluate: str) -> None:
    """Run the file and report what came of it; what the child process does."""
    try:
        imported = _imported(path, name, bool(evaluate))
        if weights:
            _save(Path(weights), imported.tensors)
    except DispatcherError as error:
        report({"error": f"{path}: {first_line(error)}"})
        return
    except (Exception, SystemExit) as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
        line = f":{frames[-1].lineno}" if frames else ""
        report({"error": f"{path}{line}: {type(error).__name__}: {first_line(error)}"})
        return
    tensors = {name: list(data.shape) for name, data in imported.tensors.items()}
    report({"yaml": imported.yaml(), "tensors": tensors})


def _imported(path: str, name: str, evaluate: bool) -> Imported:
    sys.path.append(os.path.dirname(path))
    spec = importlib.util.spec_from_file_location("model_file", path)
    assert spec is not None
    assert spec.loader is not None
    file = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = file
    spec.loader.exec_module(file)
    torch.manual_seed(_SEED)
    given: Any = file.get_init_inputs() if hasattr(file, "get_init_inputs") else ()
    named = len(given) == 2 and isinstance(given[0], list | tuple) and isinstance(given[1], dict)
    module = file.Model(*given[0], **given[1]) if named else file.Model(*given)
    return import_module(module.eval() if evaluate else module, _inputs(file.get_inputs), name)


def _inputs(get_inputs: Any) -> list[Any]:
    """The example inputs, without values where possible: these do not matter, and published ones fill memory."""
    with contextlib.suppress(Exception), FakeTensorMode():  # what does not work so is tried as it is
        return list(get_inputs())
    return list(get_inputs())


def _save(path: Path, tensors: Mapping[str, Any]) -> None:
    """Write an .npz file that is there complete or not at all."""
    import numpy as np

    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(partial, "xb") as file:
            np.savez(file, **{name: data.cpu().numpy() for name, data in tensors.items()})
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
