"""What is installed: one package, complete, that works beside modules with the names of the checkout's folders."""

from __future__ import annotations

import importlib.util
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

import dispatcher
from dispatcher.device.selection import backend_devices

ROOT = Path(__file__).resolve().parent.parent
CONV = "conv-transpose-3d-asym-input-sq-kernel"
INFORMATION = f"kernel_dispatcher-{dispatcher.__version__}.dist-info"
REQUIRED = os.environ.get("DISPATCHER_TEST_REQUIRE", "").lower().split(",")

#: What the package is built from, and folders that must not get into it.
COPIED = (
    "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "cli.py", "backends", "dispatcher", "problems",
    "bench", "tests",
)  # fmt: skip

#: What a user's own files may be called; the checkout has such names at its top.
HOSTILE = ("backends", "cli", "problems", "bench", "tests")

OFFLINE = {**os.environ, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def run(folder: Path, *words: str) -> None:
    """Run a module of this Python in ``folder``."""
    child = subprocess.run(
        [sys.executable, "-m", *words], cwd=folder, env=OFFLINE, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stdout + child.stderr


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this checkout, since building leaves files."""
    folder = tmp_path_factory.mktemp("checkout") / "tree"
    folder.mkdir()
    for name in COPIED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy2(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def wheel(checkout: Path) -> Path:
    """The wheel, built from the source distribution, as for a release; both are in one folder."""
    run(checkout, "build", "--no-isolation", "--outdir", str(checkout.parent / "dist"), ".")
    (file,) = (checkout.parent / "dist").glob("*.whl")
    return file


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """A folder that holds nothing but the wheel's content."""
    target = wheel.parent.parent / "target"
    run(wheel.parent, "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel))
    return target


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files of a user that must not be imported."""
    folder = tmp_path_factory.mktemp("hostile")
    for name in HOSTILE:
        (folder / f"{name}.py").write_text(f"raise AssertionError('the user\\'s {name} was imported')")
    return folder


def contents(wheel: Path) -> dict[str, bytes]:
    """Every file of a wheel that is not about the wheel itself."""
    with zipfile.ZipFile(wheel) as archive:
        assert not any(stat.S_ISLNK(each.external_attr >> 16) for each in archive.infolist())
        return {name: archive.read(name) for name in archive.namelist() if not name.startswith(INFORMATION)}


def beside(hostile: Path, words: Sequence[str], *path: Path) -> subprocess.CompletedProcess[str]:
    """Run Python in the user's folder, where nothing leads to the checkout: what is installed in ``path``, and the
    libraries of this Python without its site (which knows of an editable installation)."""
    specs = [importlib.util.find_spec(name) for name in ("numpy", "pyopencl", "typer", "yaml")]
    libraries = {Path(spec.origin).parents[1] for spec in specs if spec is not None and spec.origin is not None}
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("DISPATCHER_", "PYTHON"))}
    return subprocess.run(
        [sys.executable, "-S", *words],
        capture_output=True,
        text=True,
        cwd=hostile,
        env={
            **kept,
            "PYTHONPATH": os.pathsep.join(map(str, [hostile, *path, *sorted(libraries)])),
            "XDG_CACHE_HOME": str(hostile.parent / "cache"),
        },
        check=False,
    )


def test_the_wheel_holds_the_package_and_nothing_else(checkout: Path, wheel: Path) -> None:
    package = checkout / "dispatcher"
    files = [Path(folder, name) for folder, _, names in os.walk(package, followlinks=True) for name in names]
    expected = {file.relative_to(checkout).as_posix(): file.read_bytes() for file in files}
    for kind in (".py", ".cl", ".cu", ".cuh", ".json", ".yaml"):
        assert any(name.endswith(kind) for name in expected)
    assert {"dispatcher/py.typed", "dispatcher/cli.py", "dispatcher/backends/__init__.py"} <= set(expected)
    assert contents(wheel) == expected
    with zipfile.ZipFile(wheel) as archive:
        assert {name.split("/")[0] for name in archive.namelist()} == {"dispatcher", INFORMATION}
        assert archive.read(f"{INFORMATION}/top_level.txt") == b"dispatcher\n"


def test_a_wheel_built_from_the_checkout_is_the_same(checkout: Path, wheel: Path) -> None:
    run(checkout, "build", "--no-isolation", "--wheel", "--outdir", str(checkout.parent / "direct"), ".")
    (direct,) = (checkout.parent / "direct").glob("*.whl")
    assert contents(direct) == contents(wheel)


def test_the_source_distribution_holds_each_file_once(wheel: Path) -> None:
    (file,) = wheel.parent.glob("*.tar.gz")
    with tarfile.open(file) as archive:
        members = [member for member in archive.getmembers() if not member.isdir()]
    assert all(member.isreg() for member in members)
    names = [member.name.split("/", 1)[1] for member in members]
    assert {name.split("/")[0] for name in names} == {
        "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "dispatcher", "kernel_dispatcher.egg-info", "pyproject.toml",
        "setup.cfg",
    }  # fmt: skip
    assert len(names) == len(set(names))


def test_the_installed_package_works_beside_a_user_s_files(installed: Path, hostile: Path) -> None:
    assert {path.name for path in installed.iterdir()} == {"dispatcher", INFORMATION, "bin"}
    imports = (
        "import sys, dispatcher.cli, dispatcher.backends.opencl, dispatcher.backends.cuda, dispatcher.timing.racing\n"
        "print(*sorted({module.__file__ for name, module in sys.modules.items() if name.startswith('dispatcher')}))"
    )
    child = beside(hostile, ["-c", imports], installed)
    assert child.returncode == 0, child.stderr
    assert all(Path(file).is_relative_to(installed / "dispatcher") for file in child.stdout.split())
    child = beside(hostile, ["-m", "dispatcher", "problems"], installed)
    assert child.returncode == 0, child.stderr
    assert CONV in child.stdout
    # They were in the way indeed.
    assert "the user's cli was imported" in beside(hostile, ["-c", "import cli"], installed).stderr


@pytest.mark.parametrize("backend", ["numpy", "opencl"])
def test_the_installed_command_runs_a_problem_beside_a_user_s_files(
    installed: Path, hostile: Path, backend: str
) -> None:
    found = backend_devices(backend)
    if not any(device.available for device in found):
        (pytest.fail if backend in REQUIRED else pytest.skip)(f"{backend}: {found[0].reason}")
    command = [str(installed / "bin" / "dispatcher"), "run", CONV, "--device", backend]
    child = beside(hostile, command, installed)
    assert child.returncode == 0, child.stderr
    assert f"device    {backend}" in child.stdout
    assert child.stderr == ""


def test_an_editable_installation_works_beside_a_user_s_files(checkout: Path, hostile: Path, tmp_path: Path) -> None:
    pip = ("pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--ignore-installed")
    run(checkout, *pip, "--prefix", str(tmp_path), "--editable", ".")
    (site,) = tmp_path.glob("lib/python*/site-packages")
    start = (
        "import runpy, site, sys; site.addsitedir(sys.argv.pop(1)); "
        "runpy.run_module('dispatcher', run_name='__main__', alter_sys=True)"
    )
    # Its finder is a module, which another editable installation beside the libraries must not hide.
    child = beside(hostile, ["-c", start, str(site), "run", CONV, "--device", "numpy"], site)
    assert child.returncode == 0, child.stderr
    assert "device    numpy" in child.stdout
    where = "import site, sys; site.addsitedir(sys.argv[1]); import dispatcher.cli; print(dispatcher.cli.__file__)"
    child = beside(hostile, ["-c", where, str(site)], site)
    assert child.stdout == f"{checkout / 'dispatcher' / 'cli.py'}\n"
