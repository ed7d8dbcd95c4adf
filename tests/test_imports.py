"""Who may import whom, and what an import may load."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import dispatcher

ROOT = Path(__file__).resolve().parent.parent
BACKENDS = sorted(path.name for path in (ROOT / "backends").iterdir() if (path / "__init__.py").is_file())

LIBRARY = [
    path
    for path in (ROOT / "dispatcher").rglob("*.py")
    if not path.is_symlink() and not path.is_relative_to(ROOT / "dispatcher" / "backends")
]

#: What a backend may know of the dispatcher.
INTERFACE = {
    "dispatcher.call.dlpack",
    "dispatcher.check.userkernel",
    "dispatcher.device.filecache",
    "dispatcher.errors",
    "dispatcher.interface",
    "dispatcher.ops.forms",
    "dispatcher.ops.geometry",
    "dispatcher.ops.steps",
    "dispatcher.plan.groups",
    "dispatcher.plan.planner",
    "dispatcher.problem.model",
    "dispatcher.problem.operator",
    "dispatcher.timing.winners",
}


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            yield node.module or ""


def loaded_by(code: str) -> set[str]:
    """The modules that a fresh interpreter has after running ``code``."""
    output = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint('\\n'.join(sys.modules))"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout
    return set(output.split())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_imports_the_interface_and_itself(backend: str) -> None:
    for path in sorted((ROOT / "backends" / backend).rglob("*.py")):
        for module in imported(path):
            if module.startswith("dispatcher.backends"):
                assert module.startswith(f"dispatcher.backends.{backend}"), (
                    f"{path}: backends never import each other"
                )
            elif module.split(".")[0] == "dispatcher":
                assert module in INTERFACE, f"{path} imports {module}"


def test_the_dispatcher_reaches_backends_lazily() -> None:
    for path in sorted(LIBRARY):
        modules = set(imported(path))
        assert not modules & {"dispatcher.cli", "typer"}, path
        for statement in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                text = ast.unparse(statement)
                assert "backends" not in text, f"{path}: {text}"


def test_importing_the_package_loads_no_gpu_library_and_little_else() -> None:
    loaded = loaded_by("import dispatcher")
    assert not {name.partition(".")[0] for name in loaded} & {
        "pyopencl",
        "pycuda",
        "yaml",
        "typer",
        "rich",
        "numpy",
    }
    assert not any(name.startswith("dispatcher.backends") for name in loaded)


def test_the_command_line_loads_only_what_it_needs() -> None:
    loaded = loaded_by("import dispatcher.cli")
    assert not {name.partition(".")[0] for name in loaded} & {"pyopencl", "pycuda", "yaml", "numpy"}


def test_numpy_alone_loads_no_gpu_library() -> None:
    loaded = loaded_by(
        "import dispatcher\n"
        "(result,) = dispatcher.verify('conv-transpose3d-max-max-sum', device='numpy')\n"
        "assert result.outcome == 'passed'"
    )
    assert not {name.partition(".")[0] for name in loaded} & {"pyopencl", "pycuda"}


def test_importing_the_package_is_quick() -> None:
    code = (
        "import time, numpy; start = time.process_time(); import dispatcher; dispatcher.run; "
        "print(time.process_time() - start)"
    )
    times = [
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, cwd=ROOT).stdout)
        for _ in range(3)
    ]
    assert min(times) < 0.2


def test_the_version_is_the_distribution_s() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r'^version = "(.+)"$', project, re.MULTILINE) == [dispatcher.__version__]
