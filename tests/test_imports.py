"""Who may import whom, and what an import may load."""

from __future__ import annotations

import ast
import graphlib
import importlib
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

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in LIBRARY
    if path.name not in ("__init__.py", "__main__.py")
}

#: The rooms of the library: each may import itself and those before it.
ROOMS = (
    "errors",
    "files",
    "ops",
    "problem",
    "interface",
    "registry",
    "plan",
    "device",
    "call",
    "torch",
    "check",
    "timing",
    "export",
    "scale",
    "dask",
    "report",
)

#: What a backend may know of the dispatcher.
INTERFACE = {
    "dispatcher.problem.dlpack",
    "dispatcher.problem.messages",
    "dispatcher.device.childprocess",
    "dispatcher.device.filecache",
    "dispatcher.device.machine",
    "dispatcher.errors",
    "dispatcher.interface",
    "dispatcher.ops.forms",
    "dispatcher.ops.geometry",
    "dispatcher.ops.steps",
    "dispatcher.ops.symbols",
    "dispatcher.ops.vocabulary",
    "dispatcher.plan.groups",
    "dispatcher.problem.model",
    "dispatcher.problem.operator",
    "dispatcher.problem.userkernel",
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


def modules_imported(path: Path) -> Iterator[str]:
    """The library's modules that a file of it imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("dispatcher."))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "dispatcher":
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                is_module = name in MODULES or (ROOT / name.replace(".", "/")).is_dir()
                if is_module or node.module != "dispatcher":  # else a constant of the package, such as its version
                    yield name if is_module else str(node.module)


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
                assert module.startswith(f"dispatcher.backends.{backend}"), f"{path}: backends never import each other"
            elif module.split(".")[0] == "dispatcher":
                assert module in INTERFACE, f"{path} imports {module}"


def test_the_dispatcher_reaches_backends_lazily() -> None:
    for path in sorted(LIBRARY):
        if path.name == "__main__.py":  # the command line itself
            continue
        modules = set(imported(path))
        # The report is the command line's own room, which nobody else imports.
        ours = {"dispatcher.cli"} if path.parent.name == "report" else {"dispatcher.cli", "typer"}
        assert not modules & ours, path
        for statement in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                text = ast.unparse(statement)
                assert "backends" not in text, f"{path}: {text}"


@pytest.mark.parametrize("name", sorted(MODULES))
def test_a_room_imports_itself_and_earlier_ones(name: str) -> None:
    room = ROOMS.index(name.split(".")[1])
    for module in modules_imported(MODULES[name]):
        assert module.split(".")[1] in ROOMS[: room + 1], f"{name} imports {module}"


def test_the_layout_guide_has_the_rooms_and_their_modules() -> None:
    guide = (ROOT / "docs" / "layout.md").read_text(encoding="utf-8")
    assert ", ".join(f"`{room}`" for room in ROOMS) in guide
    for room in (room for room in ROOMS if (ROOT / "dispatcher" / room).is_dir()):
        (section,) = re.findall(rf"^`dispatcher/{room}/`.*?\n\n(.*?)\n\n", guide, re.MULTILINE | re.DOTALL)
        listed = re.findall(r"^\| `(\w+)\.py`", section, re.MULTILINE)
        assert sorted(listed) == sorted(name.split(".")[2] for name in MODULES if name.split(".")[1] == room)


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = {name: set(modules_imported(path)) for name, path in MODULES.items()}
    order = list(graphlib.TopologicalSorter(graph).static_order())  # raises where there is a circle
    assert set(graph) <= set(order)
    assert order.index("dispatcher.errors") < order.index("dispatcher.check.verifying")


@pytest.mark.parametrize("name", sorted(MODULES))
def test_no_module_is_called_like_something_it_defines(name: str) -> None:
    body = ast.parse(MODULES[name].read_text(encoding="utf-8")).body
    defined = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert name.rsplit(".", maxsplit=1)[-1] not in defined


def test_only_the_command_line_imports_the_report() -> None:
    for path in sorted(LIBRARY):
        if path.parent.name != "report":
            assert not any(module.startswith("dispatcher.report") for module in imported(path)), path


def test_importing_the_package_loads_no_gpu_library_and_little_else() -> None:
    loaded = loaded_by("import dispatcher")
    assert not {name.partition(".")[0] for name in loaded} & {
        "pyopencl",
        "pycuda",
        "yaml",
        "typer",
        "rich",
        "numpy",
        "torch",
    }
    assert not any(name.startswith("dispatcher.backends") for name in loaded)


def test_who_lacks_pytorch_is_told_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "dispatcher.torch", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"PyTorch is not installed; pip install .*\[torch\]"):
        importlib.import_module("dispatcher.torch")


def test_the_command_line_loads_only_what_it_needs() -> None:
    loaded = loaded_by("import dispatcher.cli")
    assert not {name.partition(".")[0] for name in loaded} & {"pyopencl", "pycuda", "yaml", "numpy", "rich"}


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
    times: list[float] = []
    while len(times) < 9 and min(times, default=1.0) >= 0.2:  # others on the machine slow some of them down
        times.append(
            float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, cwd=ROOT).stdout)
        )
    assert min(times) < 0.2, times


def test_the_version_is_the_distribution_s() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.findall(r'^version = "(.+)"$', project, re.MULTILINE) == [dispatcher.__version__]
