"""doctor says what is missing or broken, and what would mend it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import Install
from fakes import FakeBackend

import dispatcher
from dispatcher import cli
from dispatcher.device import selftest
from dispatcher.device.selftest import SelfTest
from dispatcher.interface import Device

ROOT = Path(__file__).resolve().parent.parent

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="uses Linux' OpenCL loader")


def examine(tmp_path: Path, **environment: str) -> tuple[int, dict[str, dict[str, Any]], Any]:
    """Run ``dispatcher doctor --json`` in a process of its own.

    Returns:
        The exit code, the findings by subject, and the whole report.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DISPATCHER_")}
    ended = subprocess.run(
        [sys.executable, "-m", "dispatcher.cli", "doctor", "--json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**kept, "XDG_CACHE_HOME": str(tmp_path / "cache"), **environment},
        check=False,
    )
    assert ended.stderr == ""
    report = json.loads(ended.stdout)
    return ended.returncode, {finding["subject"]: finding for finding in report["findings"]}, report


@linux
def test_runtimes_that_do_not_load_are_named_with_a_remedy(tmp_path: Path) -> None:
    vendors = tmp_path / "vendors"
    vendors.mkdir()
    (vendors / "a.icd").write_text("/nowhere/libgone.so\n")
    (vendors / "b.icd").write_text("\n")
    (vendors / "c.icd").write_text("libno_such_runtime.so.7\n")
    broken = tmp_path / "libbroken.so"
    broken.write_bytes(b"no library at all")
    (vendors / "d.icd").write_text(f"{broken}\n")
    code, findings, report = examine(tmp_path, OCL_ICD_VENDORS=str(vendors), PYOPENCL_CTX="0:1")
    assert code == 3
    assert report["working"] == []
    for name, words in (
        ("a.icd", "/nowhere/libgone.so: the library that it names does not exist"),
        ("b.icd", "it names no library"),
        ("c.icd", "libno_such_runtime.so.7 cannot be loaded: libno_such_runtime.so.7: cannot open"),
        ("d.icd", "cannot be loaded"),
    ):
        finding = findings[str(vendors / name)]
        assert finding["verdict"] == "problem"
        assert words in finding["detail"]
        assert "pip install 'kernel-dispatcher[cpu]'" in finding["remedy"]
    assert findings["OCL_ICD_VENDORS"]["remedy"] == "unset OCL_ICD_VENDORS"
    assert "it is not used here" in findings["PYOPENCL_CTX"]["detail"]
    assert findings["acceleration"]["verdict"] == "problem"
    assert {device["id"] for device in report["devices"]} >= {"numpy"}


@linux
def test_a_library_that_kills_its_loader_is_a_finding(tmp_path: Path) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no C compiler")
    source, library = tmp_path / "deadly.c", tmp_path / "libdeadly.so"
    source.write_text("#include <stdlib.h>\n__attribute__((constructor)) static void kill(void) { abort(); }\n")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    vendors = tmp_path / "vendors"
    vendors.mkdir()
    (vendors / "deadly.icd").write_text(f"{library}\n")
    code, findings, report = examine(tmp_path, OCL_ICD_VENDORS=str(vendors))
    assert code == 3
    assert "it ended the process with -6" in findings[str(vendors / "deadly.icd")]["detail"]
    (device,) = [device for device in report["devices"] if device["backend"] == "opencl"]
    assert "crashed with SIGABRT in a child process" in device["reason"]


@linux
def test_folders_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "a file in the way"
    blocked.touch()
    code, findings, _ = examine(
        tmp_path, XDG_CACHE_HOME=str(blocked), POCL_CACHE_DIR=str(blocked / "pocl"), DISPATCHER_SELF_TEST="off"
    )
    cache = findings["cache folder"]
    assert (cache["verdict"], cache["remedy"]) == ("problem", "set XDG_CACHE_HOME to a folder that can be written to")
    assert "Not a directory" in cache["detail"]
    assert findings["self-tests"]["remedy"] == "unset DISPATCHER_SELF_TEST"
    if "PoCL's cache" in findings:
        assert findings["PoCL's cache"]["verdict"] == "problem"
        assert "POCL_CACHE_DIR" in findings["PoCL's cache"]["remedy"]
    assert code in (0, 3)


def test_the_cuda_compiler_is_looked_for(tmp_path: Path) -> None:
    nvcc = tmp_path / "nvcc"
    nvcc.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 12.4, V12.4.1'\n")
    nvcc.chmod(0o755)
    settings = {"OCL_ICD_VENDORS": "/nonexistent", "CUDA_VISIBLE_DEVICES": "", "DISPATCHER_SELF_TEST": "off"}
    _, findings, _ = examine(tmp_path, DISPATCHER_NVCC=str(nvcc), **settings)
    assert findings["nvcc"]["detail"] == f"{nvcc}, 12.4"
    assert "is ''" in findings["CUDA_VISIBLE_DEVICES"]["detail"]
    code, findings, _ = examine(tmp_path, DISPATCHER_NVCC="/nowhere/nvcc", **settings)
    assert findings["nvcc"]["verdict"] in ("note", "problem")
    assert "set DISPATCHER_NVCC to the path of nvcc" in findings["nvcc"]["remedy"]
    assert code in (0, 3)
    assert "there is no .icd file in /nonexistent" in findings["runtimes"]["detail"]


def test_a_cuda_compiler_from_pypi_is_found_and_offered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from dispatcher.backends.cuda import diagnosis

    monkeypatch.delenv("DISPATCHER_NVCC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    sys.path_importer_cache.pop(str(tmp_path), None)
    (missing,) = [finding for finding in diagnosis.diagnose() if finding.subject == "nvcc"]
    assert missing.detail == "nvcc is not on PATH"
    assert missing.remedy.startswith("run python -m dispatcher.backends.cuda.install (from PyPI, for drivers")
    home = tmp_path / "nvidia" / "cu13"
    for folder in ("bin", "lib"):
        (home / folder).mkdir(parents=True)
    (home / "lib" / "libcudart_static.a").touch()  # nvcc looks for it in lib64
    (home / "bin" / "nvcc").write_text("#!/bin/sh\necho 'release 13.1, V13.1.80'\n")
    (home / "bin" / "nvcc").chmod(0o755)
    (there,) = [finding for finding in diagnosis.diagnose() if finding.subject == "nvcc"]
    assert there.detail == f"{home / 'bin' / 'nvcc'} -L{home / 'lib'}, 13.1"


@linux
def test_pycuda_is_built_against_what_pypi_has(monkeypatch: pytest.MonkeyPatch) -> None:
    from dispatcher.backends.cuda import install
    from dispatcher.errors import DeviceError, KernelError

    said: list[str] = []

    def pip(*arguments: str) -> None:
        said.append(" ".join(arguments[:2]))
        place = Path(arguments[arguments.index("--dest") + 1]) if "--dest" in arguments else None
        if place is not None:
            (place / "pycuda-1").mkdir()
            shutil.make_archive(str(place / "pycuda-1"), "gztar", place, "pycuda-1")
        elif arguments[0] == "wheel":
            said.append((Path(arguments[-1]) / "siteconf.py").read_text())
            (Path(arguments[-2]) / "pycuda-1-any.whl").touch()

    monkeypatch.setattr(install, "pip", pip)
    monkeypatch.setattr(install.toolkit, "from_pypi", lambda: [Path("/env/nvidia/cu13/bin/nvcc")])
    monkeypatch.setattr(install, "DRIVER", "libno_such_driver.so.1")
    with pytest.raises(DeviceError, match="install the NVIDIA driver first"):
        install.install()
    monkeypatch.setattr(install, "DRIVER", "libcuda.so.1")
    monkeypatch.setattr(install, "driver", lambda: Path("/driver/libcuda.so.580"))
    install.install()
    assert [line.partition("==")[0] for line in said if "CUDA_INC_DIR" not in line] == [
        "install cuda-toolkit[nvcc,nvvm,crt,cudart,cccl,profiler]", "download --quiet", "wheel --quiet",
        f"install {said[-1].split()[1]}",
    ]  # fmt: skip
    for line in (
        "CUDA_INC_DIR = ['/env/nvidia/cu13/include']", "CUDADRV_LIBNAME = [':libcuda.so.1']",
        "CUDADRV_LIB_DIR = ['/driver']", "CUDA_ENABLE_CURAND = False",
    ):  # fmt: skip
        assert line in said[-2]
    failure = subprocess.CalledProcessError(1, ["python", "-m", "pip", "install"])
    monkeypatch.setattr(install, "pip", lambda *arguments: (_ for _ in ()).throw(failure))
    with pytest.raises(KernelError, match="-m pip install failed with exit status 1"):
        install.install()


def test_the_exit_code_tells_whether_anything_accelerates(
    install_backends: Install, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install_backends(FakeBackend("cuda", unavailable="no driver"))
    assert cli.main(["doctor"]) == 3
    assert "accelerated devices that work: none" in capsys.readouterr().out
    install_backends(FakeBackend("cuda"))
    assert cli.main(["doctor"]) == 0
    captured = capsys.readouterr()
    assert "accelerated devices that work: cuda:0" in captured.out
    assert captured.err == ""
    for found, code in ((SelfTest("failed", "failed: no image"), 3), (SelfTest("ok", "", 5.0), 0)):  # type: ignore[arg-type]
        monkeypatch.setattr(selftest, "try_device", lambda device, module, again=False, found=found: found)
        install_backends(FakeBackend("cuda"))
        assert cli.main(["doctor", "--json"]) == code
        report = json.loads(capsys.readouterr().out)
        assert report["command"] == "doctor"
        assert set(report) == {"schema", "command", "working", "findings", "devices"}
        assert report["working"] == ([] if code else ["cuda:0"])


def test_doctor_works_on_this_machine(backend_device: Device) -> None:
    diagnosis = dispatcher.doctor()
    assert backend_device.id in [device.id for device in diagnosis.devices]
    assert (backend_device in diagnosis.working) == (backend_device.kind != "reference")
    subjects = [finding.subject for finding in diagnosis.findings]
    assert {"kernel-dispatcher", "Python", "NumPy", "cache folder", "memory"} <= set(subjects)
    for finding in diagnosis.findings:
        assert "\n" not in finding.detail + finding.remedy
        assert finding.verdict in ("ok", "note", "problem")
        assert finding.remedy or finding.verdict != "problem" or finding.topic == "devices"


def test_a_backend_that_cannot_be_examined_is_a_finding(
    install_backends: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from dispatcher import registry

    package = tmp_path / "fragile_backend"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "diagnosis.py").write_text("raise OSError('driver is upside down')")
    monkeypatch.syspath_prepend(tmp_path)
    table = {"fragile": "fragile_backend", "numpy": "dispatcher.backends.numpy_ref"}
    monkeypatch.setattr(registry, "BACKENDS", table)
    findings = {finding.subject: finding for finding in dispatcher.doctor().findings}
    assert findings["fragile_backend"].detail == "it cannot be examined: OSError: driver is upside down"
