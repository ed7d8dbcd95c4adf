"""The programs in the guides run as they stand."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from cuda_support import SIMULATED
from fakes import MAXMAX

import dispatcher
from dispatcher import cli, registry
from dispatcher.backends.numpy_ref import steps as reference_steps
from dispatcher.device.selection import backend_devices
from dispatcher.interface import Device
from dispatcher.ops import vocabulary
from tests import cudasim

ROOT = Path(__file__).resolve().parent.parent
QUICK_STARTS = ROOT / "docs" / "quickstart"


def blocks(name: str, kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", (ROOT / name).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


PAGES = ("README.md", "docs/python.md", *sorted(f"docs/quickstart/{path.name}" for path in QUICK_STARTS.iterdir()))
#: A block, with what it needs and the file that it is to be saved as, where the page says so.
BLOCK = re.compile(r'^(?:<!-- needs: (\w+) -->\n)?```(\w+)(?: title="(.*?)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)


def provided(need: str) -> bool:
    if need in registry.BACKENDS:
        return any(device.available for device in backend_devices(need))
    return not need or importlib.util.find_spec(need) is not None


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DISPATCHER_DEVICE", "numpy")
    for name, value in (cudasim.activate().child_environment() if SIMULATED else {}).items():
        monkeypatch.setenv(name, value)
    # Checking every device takes too long here; what matters is that the call is right.
    verify = dispatcher.verify
    monkeypatch.setattr(dispatcher, "verify", lambda *problems, **more: verify(*problems, device="numpy", **more))
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {}
    left_out = set()
    found = BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    assert found
    for need, kind, title, text in found:
        if not provided(need):
            left_out.add(need)
        elif title:
            Path(title).write_text(text, encoding="utf-8")
        elif kind == "python":
            exec(compile(text, page, "exec"), namespace)
        else:
            assert kind == "console", "another kind of block: say here how it runs"
            for line in text.splitlines():
                prompt, program, *words = shlex.split(line)
                assert (prompt, program) == ("$", "dispatcher") and cli.main(words) == 0, line
                assert "no problem fits" not in capsys.readouterr().err, line
    if left_out:
        pytest.skip(f"the rest ran; some blocks need {', '.join(left_out)}")


def test_the_guides_count_the_problems_and_the_readme_names_every_command() -> None:
    readme, page = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/problems.md"))
    found = [dispatcher.load_problem(name).group for name in dispatcher.problems()]
    assert f"{len(found)} such problems" in readme and f"{len(found)} problems" in page
    for group in set(found):
        assert f"| `{group}` | {found.count(group)} |" in page
    for command in typer.main.get_command(cli.app).commands:  # type: ignore[attr-defined]
        assert f"dispatcher {command} " in readme


def test_the_reference_has_every_public_name() -> None:
    page = (ROOT / "docs/reference/python.md").read_text(encoding="utf-8")
    for name in dispatcher.__all__:
        value = getattr(dispatcher, name)
        assert name == "__version__" or (
            f"::: {value.__module__}" in page
            and (f".{value.__name__}\n" in page or value.__module__ == "dispatcher.errors")
        ), name


def test_the_manual_s_pages_are_in_its_table_of_contents_and_link_to_files_that_exist() -> None:
    contents = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = sorted((ROOT / "docs").rglob("*.md"))
    for page in pages:
        assert f": {page.relative_to(ROOT / 'docs')}\n" in contents
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "bench/README.md", *pages):
        for target in re.findall(r"\]\(((?!https?:)[^)#\s]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page}: {target}"


def test_targets_and_files_that_the_contributing_guide_names_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {"run", "quick", "test", "check"} <= set(re.findall(r"`make ([a-z]+)`", text)) | {"run"} <= set(targets)
    files = re.findall(r"\]\(([^)#:]+)\)", text) + re.findall(r"\b((?:tests|bench)/\w+\.py)\b", text)
    assert len(files) > 8
    for file in files:
        assert (ROOT / file).is_file(), file


@pytest.fixture(scope="module")
def taps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the backend of docs/adding-a-backend.md is installed, from the two files of the page."""
    (program,), (project,) = (blocks("docs/adding-a-backend.md", kind) for kind in ("python", "toml"))
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("target")
    (source / "taps_backend.py").write_text(program, encoding="utf-8")
    (source / "pyproject.toml").write_text(project, encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--target", str(target), str(source)], check=True, cwd=source)
    return target


def test_the_guide_s_backend_works_as_its_page_says(
    taps: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (commands,) = (block for block in blocks("docs/adding-a-backend.md", "") if "dispatcher verify" in block)
    install, *others = commands.splitlines()
    assert install == "pip install ."  # what the fixture did
    paths = os.pathsep.join([str(taps), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": paths, "XDG_CACHE_HOME": str(tmp_path)}
    printed = []
    for command in others:
        program, *words = shlex.split(command)
        assert program == "dispatcher"
        child = [sys.executable, "-m", "dispatcher.cli", *words]
        subprocess.run(child, check=True, env=environment, cwd=tmp_path)
        printed.append(capfd.readouterr().out)
    devices, verified, explained = printed
    assert re.search(r"^taps:0 .*NumPy, tap by tap", devices, re.MULTILINE)
    assert re.search(r"taps:0 .*pass", verified)
    assert "conv_transpose3d" in explained


def test_the_guide_s_backend_runs_what_it_supports_and_says_what_not(
    taps: Path, install_distributions: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    install_distributions(taps)
    conv = "conv-transpose-3d-asym-input-sq-kernel"
    for case in ("gaps", "dilated", "pointwise"):
        assert cli.main(["run", conv, "--device", "taps:tap by tap", "--case", case]) == 0
    capsys.readouterr()
    assert cli.main(["run", conv, "--device", "taps", "--case", "odd"]) == 3
    assert "only convolutions without bias and groups" in capsys.readouterr().err
    assert cli.main(["run", conv, "--device", "taps", "--case", "gaps", "--algorithm", "fma"]) == 2
    assert "unknown to taps" in capsys.readouterr().err
    assert cli.main(["run", MAXMAX, "--device", "taps,numpy"]) == 0
    assert "skipped   taps:0" in capsys.readouterr().out


def test_the_guide_s_steps_run_everywhere(backend_device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that stand in the table and in the reference, and nowhere else."""
    for table in (vocabulary.VOCABULARY, reference_steps.POINTWISE, reference_steps.REDUCTIONS):
        for name in ("softshrink", "mean_square", "tanhshrink"):
            monkeypatch.setitem(table, name, None)  # gone again when the test ends
    program = "\n".join(blocks("docs/adding-a-step.md", "python"))
    call = 'dispatcher.verify(problem, case="sample")'
    assert call in program
    namespace: dict[str, Any] = {}
    exec(program.replace(call, f"{call[:-1]}, device={backend_device.id!r})"), namespace)
    (result,) = namespace["results"]
    assert result.device.id == backend_device.id
    alone = {**namespace["problem"], "pipeline": ["softshrink", {"op": "mean_square", "axis": "spatial"}]}
    alone["parameters"] = [p for p in alone["parameters"] if p["name"] not in ("w", "outs")]
    alone["cases"] = {"sample": {"batch": 2, "ins": 4}}
    (result,) = dispatcher.verify(alone, case="sample", device=backend_device.id)
    assert result.outcome == "passed", result.reason
