"""Finding OpenCL runtimes: which .icd files the loader is told about, and when it is left alone.

The tests work on folders of their own; they need no OpenCL runtime, except the last one, which uses
Intel's if it is installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

from dispatcher import registry
from dispatcher.backends.opencl import icd
from dispatcher.device.selection import backend_devices

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the loader is left alone here")

REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass
class Machine:
    """A pretended machine: the folders that the module reads, and the wheels it believes to be installed."""

    system: Path
    prefix_vendors: Path
    cache: Path
    wheels: dict[str, Path]

    def system_icd(self, name: str, library: str) -> Path:
        file = self.system / name
        file.write_text(library)
        return file

    def install(self, distribution: str, folder: Path, *names: str) -> None:
        """Pretend that a wheel is installed whose libraries lie in the folder."""
        folder.mkdir(exist_ok=True)
        for name in names:
            (folder / name).touch()
        self.wheels[distribution] = folder


class FakeDistribution:
    def __init__(self, folder: Path) -> None:
        self.files = [FakeFile(folder / name) for name in sorted(os.listdir(folder))]


class FakeFile:
    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.path = path

    def locate(self) -> Path:
        return self.path


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The libraries that were loaded; nothing is loaded in truth."""
    names: list[str] = []
    monkeypatch.setattr(icd, "load_error", names.append)
    return names


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loaded: list[str]) -> Machine:
    prefix = tmp_path / "prefix"
    result = Machine(tmp_path / "system", prefix / "etc" / "OpenCL" / "vendors", tmp_path / "cache", {})
    result.system.mkdir()
    result.prefix_vendors.mkdir(parents=True)
    monkeypatch.setattr(icd, "DRIVER_LIBRARIES", ())
    for variable in (*icd.USER_VARIABLES, icd.OWN_VARIABLE, icd.LISTED_VARIABLE, icd.LEFT_OUT_VARIABLE):
        monkeypatch.setenv(variable, "")  # so that the value before the test is restored after it
        monkeypatch.delenv(variable)
    monkeypatch.setenv("XDG_CACHE_HOME", str(result.cache))
    monkeypatch.setattr(icd, "SYSTEM_VENDORS", result.system)
    monkeypatch.setattr(sys, "prefix", str(prefix))

    def distribution(name: str) -> FakeDistribution:
        if name not in result.wheels:
            raise metadata.PackageNotFoundError(name)
        return FakeDistribution(result.wheels[name])

    monkeypatch.setattr(metadata, "distribution", distribution)
    return result


@pytest.fixture
def intel(machine: Machine, tmp_path: Path) -> str:
    """Intel's runtime is installed; this is the path of its library."""
    names = ("libintelocl.so", "libintlc.so.5", "libimf.so", "libsvml.so", "libirng.so", "libtbb.so.12")
    machine.install("intel-opencl-rt", tmp_path / "lib", *names)
    return str(tmp_path / "lib" / "libintelocl.so")


def content(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.iterdir()}


def entry_of(report: icd.IcdReport, name: str) -> icd.IcdEntry:
    (entry,) = (entry for entry in report.entries if entry.icd_file.name == name)
    return entry


def test_nothing_to_add_leaves_the_environment_alone(machine: Machine) -> None:
    machine.system_icd("pocl.icd", "libpocl.so.2\n")
    before = dict(os.environ)
    report = icd.prepare_icd_vendors()
    assert not report.changed
    assert report.vendors == machine.system
    assert [(entry.library, entry.used) for entry in report.entries] == [("libpocl.so.2", True)]
    assert dict(os.environ) == before
    assert not machine.cache.exists()


def test_intel_joins_the_systems_runtimes(machine: Machine, intel: str) -> None:
    machine.system_icd("pocl.icd", "libpocl.so.2")
    report = icd.prepare_icd_vendors()
    assert report.changed
    assert intel in report.reason
    assert os.environ["OCL_ICD_VENDORS"] == str(report.vendors)
    assert content(report.vendors) == {"pocl.icd": "libpocl.so.2\n", "intel-opencl-rt.icd": f"{intel}\n"}
    assert report.vendors.is_relative_to(machine.cache)
    assert report.vendors.stat().st_mode & 0o777 == 0o700


def test_a_missing_system_folder_is_no_obstacle(machine: Machine, intel: str) -> None:
    machine.system.rmdir()
    assert content(icd.prepare_icd_vendors().vendors) == {"intel-opencl-rt.icd": f"{intel}\n"}


@pytest.mark.parametrize("variable", icd.USER_VARIABLES)
def test_a_users_setting_is_respected(
    variable: str, machine: Machine, intel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "/nonexistent")
    before = dict(os.environ)
    report = icd.prepare_icd_vendors()
    assert not report.changed
    assert report.vendors == Path("/nonexistent")
    assert report.reason == f"{variable} is set by the user"
    assert report.entries == ()
    assert dict(os.environ) == before


def test_a_users_folder_or_file_is_reported(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    file = machine.system_icd("one.icd", "libone.so")
    for setting in (machine.system, file):
        monkeypatch.setenv("OCL_ICD_VENDORS", str(setting))
        assert [entry.library for entry in icd.prepare_icd_vendors().entries] == ["libone.so"]


def test_an_empty_setting_counts_as_none(machine: Machine, intel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCL_ICD_VENDORS", "")
    assert icd.prepare_icd_vendors().changed


def test_a_second_call_and_a_child_process_keep_the_folder(machine: Machine, intel: str) -> None:
    first = icd.prepare_icd_vendors()
    assert icd.prepare_icd_vendors() == first  # the environment is what a child process inherits
    assert len(list(first.vendors.parent.iterdir())) == 1


def test_a_setting_of_ours_is_withdrawn_when_the_runtime_is_gone(machine: Machine, intel: str) -> None:
    assert icd.prepare_icd_vendors().changed
    machine.wheels.clear()
    assert not icd.prepare_icd_vendors().changed
    assert "OCL_ICD_VENDORS" not in os.environ


def test_unusable_files_are_named_with_the_reason(machine: Machine, intel: str) -> None:
    machine.system_icd("gone.icd", "/no/such/lib.so\n")
    machine.system_icd("empty.icd", "\n")
    (machine.system / "folder.icd").mkdir()
    (machine.system / "readme.txt").write_text("not an .icd file")
    (machine.prefix_vendors / "intel-cpu.icd").write_text("/placeholder/libintelocl.so")
    report = icd.prepare_icd_vendors()
    assert list(content(report.vendors)) == ["intel-opencl-rt.icd"]
    assert "does not exist" in entry_of(report, "gone.icd").reason
    assert "does not exist" in entry_of(report, "intel-cpu.icd").reason
    assert "names no library" in entry_of(report, "empty.icd").reason
    assert "cannot be read" in entry_of(report, "folder.icd").reason
    assert len(report.entries) == 5


def test_a_runtime_of_the_python_environment_is_added(machine: Machine) -> None:
    machine.system_icd("same.icd", "libsystem.so")
    (machine.prefix_vendors / "same.icd").write_text("libother.so")
    (machine.prefix_vendors / "new.icd").write_text("libnew.so")
    report = icd.prepare_icd_vendors()
    assert content(report.vendors) == {"same.icd": "libsystem.so\n", "new.icd": "libnew.so\n"}
    assert [entry.reason for entry in report.entries if not entry.used] == [
        f"{machine.system / 'same.icd'} has the same name"
    ]


def test_libraries_that_another_loaders_variable_names_are_added(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.system_icd("pocl.icd", "libpocl.so.2.12.0\n")
    missing = tmp_path / "libmissing.so"
    monkeypatch.setenv(icd.LISTED_VARIABLE, f"libpocl.so.2:libgpu-opencl.so.1:{missing}")
    report = icd.prepare_icd_vendors()
    assert content(report.vendors) == {
        "pocl.icd": "libpocl.so.2.12.0\n",
        "libgpu-opencl.so.1.icd": "libgpu-opencl.so.1\n",
    }
    assert "does not exist" in entry_of(report, "libmissing.so.icd").reason
    assert icd.prepare_icd_vendors() == report


def test_a_drivers_library_is_added_where_it_is_installed(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(icd, "DRIVER_LIBRARIES", ("libgpu-opencl.so.1", "libother-opencl.so.1", "libnamed.so.1"))
    machine.system_icd("named.icd", "/nowhere/libnamed.so.1\n")
    machine.system_icd("again.icd", "libnamed.so\n")
    errors = {"libother-opencl.so.1": "no such file"}
    monkeypatch.setattr(icd, "load_error", errors.get)
    report = icd.prepare_icd_vendors()
    assert content(report.vendors) == {"again.icd": "libnamed.so\n", "libgpu-opencl.so.1.icd": "libgpu-opencl.so.1\n"}
    assert "driver" in entry_of(report, "libgpu-opencl.so.1.icd").reason


def test_intel_is_not_added_twice(machine: Machine, intel: str, tmp_path: Path) -> None:
    library = tmp_path / "opt" / "libintelocl.so"
    library.parent.mkdir()
    library.touch()
    machine.system_icd("intel64.icd", str(library))
    report = icd.prepare_icd_vendors()
    assert not report.changed
    assert "already names Intel's runtime" in entry_of(report, "intel-opencl-rt.icd").reason


def test_a_lost_library_is_reported(machine: Machine, intel: str) -> None:
    Path(intel).unlink()
    report = icd.prepare_icd_vendors()
    assert not report.changed
    assert "not where the wheel says" in entry_of(report, "intel-opencl-rt.icd").reason


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        ("libimf.so: cannot open shared object file", "pip install intel-cmplr-lib-rt"),
        ("libintelocl.so: undefined symbol: _ZN3tbb6detail2r1", "an older copy of a library"),
    ],
)
def test_a_library_that_does_not_load_is_reported(
    error: str, advice: str, machine: Machine, intel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(icd, "load_error", lambda library: error)
    report = icd.prepare_icd_vendors()
    assert not report.changed
    reason = entry_of(report, "intel-opencl-rt.icd").reason
    assert error in reason
    assert advice in reason
    assert reason in report.reason


def test_dependencies_beside_the_library_are_left_to_the_linker(intel: str, loaded: list[str]) -> None:
    icd.prepare_icd_vendors()
    assert loaded == [intel]


def test_dependencies_in_another_prefix_are_loaded_first(machine: Machine, tmp_path: Path, loaded: list[str]) -> None:
    machine.install("intel-opencl-rt", tmp_path / "a", "libintelocl.so", "libirng.so")
    machine.install("intel-cmplr-lib-rt", tmp_path / "b", "libintlc.so.5", "libimf.so", "libsvml.so")
    machine.install("tbb", tmp_path / "c", "libtbb.so.12")
    icd.prepare_icd_vendors()
    expected = ["b/libintlc.so.5", "b/libimf.so", "b/libsvml.so", "c/libtbb.so.12", "a/libintelocl.so"]
    assert [str(Path(library).relative_to(tmp_path)) for library in loaded] == expected


def test_load_error_gives_the_linkers_words() -> None:
    assert icd.load_error("libc.so.6") is None
    assert "libno-such-thing.so" in (icd.load_error("libno-such-thing.so") or "")


def test_an_unwritable_cache_falls_back_to_a_temporary_folder(machine: Machine, intel: str) -> None:
    machine.cache.write_text("a file where the folder should be")
    report = icd.prepare_icd_vendors()
    assert report.changed
    assert not report.vendors.is_relative_to(machine.cache)
    assert content(report.vendors) == {"intel-opencl-rt.icd": f"{intel}\n"}
    assert icd.prepare_icd_vendors() == report
    icd._remove_in_process(report.vendors, os.getpid() + 1)
    assert report.vendors.exists()
    icd._remove_in_process(report.vendors, os.getpid())
    assert not report.vendors.exists()


def test_nowhere_to_write_is_reported(machine: Machine, intel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> str:
        raise PermissionError("read-only file system")

    machine.system_icd("pocl.icd", "libpocl.so.2")
    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    report = icd.prepare_icd_vendors()
    assert not report.changed
    assert "read-only file system" in report.reason
    assert [entry.used for entry in report.entries] == [True, False]
    assert "OCL_ICD_VENDORS" not in os.environ


def test_the_cache_is_closed_to_others(machine: Machine, intel: str) -> None:
    root = machine.cache / "kernel-dispatcher" / "icd"
    root.mkdir(parents=True)
    root.chmod(0o777)
    report = icd.prepare_icd_vendors()
    assert report.vendors.parent == root
    assert root.stat().st_mode & 0o777 == 0o700


def test_a_damaged_folder_is_not_trusted(machine: Machine, intel: str) -> None:
    vendors = icd.prepare_icd_vendors().vendors
    (vendors / "intel-opencl-rt.icd").write_text("/elsewhere/lib.so\n")
    report = icd.prepare_icd_vendors()
    assert report.vendors != vendors
    assert content(report.vendors) == {"intel-opencl-rt.icd": f"{intel}\n"}


def test_without_a_cache_variable_the_home_folder_is_used(
    machine: Machine, intel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/paths/do/not/count")
    vendors = icd.prepare_icd_vendors().vendors
    assert vendors.is_relative_to(tmp_path / "home" / ".cache" / "kernel-dispatcher")


def test_other_platforms_are_left_alone(machine: Machine, intel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    before = dict(os.environ)
    assert not icd.prepare_icd_vendors().changed
    assert dict(os.environ) == before


def test_processes_that_start_together_agree(tmp_path: Path) -> None:
    """Eight processes make the same folder in an empty cache; all get it, and nothing is left beside it."""
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from dispatcher.backends.opencl import icd\n"
        "sys.stdin.read()\n"
        "print(icd._private_folder({'a.icd': 'liba.so\\n', 'b.icd': 'libb.so\\n'}, None))\n"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    children = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(8)
    ]
    for child in children:
        assert child.stdin is not None
        child.stdin.close()  # the starting gun
    folders = set()
    for child in children:
        assert child.stdout is not None
        with child.stdout as output:
            folders.add(output.read().strip())
        assert child.wait(60) == 0
    (folder,) = folders
    assert content(Path(folder)) == {"a.icd": "liba.so\n", "b.icd": "libb.so\n"}
    assert list((tmp_path / "kernel-dispatcher" / "icd").iterdir()) == [Path(folder)]


def test_the_loader_finds_intels_runtime(tmp_path: Path) -> None:
    """With Intel's wheel and no help from the environment, the platform is listed in a fresh process."""
    try:
        metadata.distribution("intel-opencl-rt")
    except metadata.PackageNotFoundError:
        pytest.skip("intel-opencl-rt is not installed; pip install 'kernel-dispatcher[cpu]' brings it")
    program = (
        "from dispatcher.backends.opencl.icd import prepare_icd_vendors\n"
        "report = prepare_icd_vendors()\n"
        "import pyopencl\n"
        "print([platform.name for platform in pyopencl.get_platforms()], report)\n"
    )
    dropped = (*icd.USER_VARIABLES, icd.OWN_VARIABLE, "LD_LIBRARY_PATH")
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    environment["XDG_CACHE_HOME"] = str(tmp_path)
    child = subprocess.run(
        [sys.executable, "-c", program], check=False, cwd=REPOSITORY, env=environment, capture_output=True, text=True
    )
    assert "Intel(R) OpenCL" in child.stdout, child.stdout + child.stderr


SOMEBODY_ASKED_BEFORE = """
import pyopencl
try:
    pyopencl.get_platforms()
except pyopencl.Error:
    pass
import numpy, dispatcher
x = numpy.ones((1, 1, 2, 2, 2), "f4")
print(dispatcher.run("conv-transpose-3d-asym-input-sq-kernel", device="opencl:intel", input=x, kernel=x).sum())
"""


def test_intels_runtime_is_found_beside_other_users_and_libraries(tmp_path: Path) -> None:
    """The loader was asked before, and the linker would find another libtbb.so.12 first."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    try:
        metadata.distribution("intel-opencl-rt")
    except metadata.PackageNotFoundError:
        pytest.skip("intel-opencl-rt is not installed; pip install 'kernel-dispatcher[cpu]' brings it")
    if compiler is None:
        pytest.skip("there is no C compiler to make another libtbb.so.12 with")
    command = [compiler, "-shared", "-Wl,-soname,libtbb.so.12", "-o", str(tmp_path / "libtbb.so.12"), "-x", "c", "-"]
    subprocess.run(command, check=True, input=b"int nothing;")
    dropped = (*icd.USER_VARIABLES, icd.OWN_VARIABLE, icd.LEFT_OUT_VARIABLE)
    environment = {name: value for name, value in os.environ.items() if name not in dropped}
    environment.update(XDG_CACHE_HOME=str(tmp_path), LD_LIBRARY_PATH=str(tmp_path), DISPATCHER_SELF_TEST="off")
    child = subprocess.run(
        [sys.executable, "-c", SOMEBODY_ASKED_BEFORE],
        check=False, cwd=REPOSITORY, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert (child.stdout, child.stderr) == ("64.0\n", "")


def test_a_library_in_the_way_is_named(machine: Machine, intel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(icd, "load_error", lambda library: "libtbb.so.12: undefined symbol: _ZN3tbb")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/other/lib")
    assert "LD_LIBRARY_PATH is '/opt/other/lib'" in icd.prepare_icd_vendors().reason


def test_settings_of_compilers_cannot_change_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    device = next((found for found in backend_devices("opencl") if found.available), None)
    if device is None:
        pytest.skip("there is no usable OpenCL device")
    import pyopencl as cl

    backend = registry.backend("opencl")
    runtime = backend._runtime(device)  # type: ignore[attr-defined]
    monkeypatch.setenv("PYOPENCL_BUILD_OPTIONS", "-cl-fast-relaxed-math -cl-opt-disable")
    program = runtime._build("__kernel void nothing() {}")
    given = program.get_build_info(runtime.device, cl.program_build_info.OPTIONS)
    assert "-cl-std" in given and "fast" not in given and "opt-disable" not in given
    keys = set()
    for value in ("", "1"):
        monkeypatch.setenv("IGC_SomeSetting", value)
        keys.add(type(runtime)(runtime.platform, runtime.device)._key("text"))
    assert len(keys) == 2
    monkeypatch.setenv("POCL_EXTRA_BUILD_FLAGS", "-g -cl-fast-relaxed-math")
    (refused,) = backend.probe()
    assert not refused.available
    assert "POCL_EXTRA_BUILD_FLAGS is '-g -cl-fast-relaxed-math'" in (refused.reason or "")
