"""Backends of other distributions: found by their entry points, and never able to break ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Install
from fakes import CONV, FakeBackend

import dispatcher
from dispatcher import cli, registry
from dispatcher.device.selection import backend_devices

ROOT = Path(__file__).resolve().parent.parent

#: A right backend: the reference under the name {name}.
WORKING = """
from dispatcher.backends.numpy_ref import reference
from dispatcher.interface import Device

class Executable:
    launches = ()

    def __init__(self, operator):
        self.operator = operator

    def __call__(self, tensors, output=None, timings=None):
        result = reference(self.operator, tensors).astype(self.operator.dtype)
        if output is None:
            return result
        output[...] = result
        return output

class Backend:
    name = "{name}"

    def probe(self):
        return [Device("{name}", 0, "The reference", "cpu")]

    def supports(self, operator, device):
        return None

    def compile(self, operator, device, options):
        return Executable(operator)

BACKEND = Backend()
"""

Discover = Callable[[Path], None]


@pytest.fixture(autouse=True)
def _caches_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def distribution(folder: Path, name: str, *entries: str, **modules: str) -> Path:
    """Write an installed distribution with entry points and modules of its own."""
    folder.mkdir(exist_ok=True)
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text)
    information = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("\n".join([f"[{registry.GROUP}]", *entries, ""]))
    return folder


def test_those_of_others_come_before_the_reference_in_the_order_of_names_and_are_not_imported(
    tmp_path: Path, install_distributions: Discover
) -> None:
    distribution(
        tmp_path / "site",
        "two",
        "zeta = registry_never:BACKEND",
        "alpha = registry_never.deep : BACKEND [extra]",
        registry_never="raise AssertionError('imported')",
    )
    install_distributions(tmp_path / "site")
    assert list(registry.BACKENDS) == ["cuda", "opencl", "alpha", "zeta", "numpy"]
    assert registry.BACKENDS["alpha"] == "registry_never.deep:BACKEND"
    assert "registry_never" not in sys.modules
    assert [registry.origin(name) for name in ("opencl", "zeta", "numpy")] == [None, "two 1.0", None]


def test_one_runs_and_child_processes_reach_it(
    tmp_path: Path, install_distributions: Discover, capsys: pytest.CaptureFixture[str]
) -> None:
    site = distribution(
        tmp_path / "site", "right", "right = registry_right:BACKEND", registry_right=WORKING.format(name="right")
    )
    install_distributions(site)
    (device,) = backend_devices("right")
    assert device.available
    assert device.facts["self_test"] == "ok"  # by a child process
    assert device.facts["self_test_gflops"] > 0
    assert cli.main(["verify", CONV, "--device", "right"]) == 0
    assert cli.main(["run", CONV, "--device", "all-of:right"]) == 0
    assert "right:0" in capsys.readouterr().out


BROKEN = {
    "raises": ("raise OSError('libmine.so is missing')", "cannot be imported: OSError: libmine.so is missing"),
    "exits": ("raise SystemExit('no licence')", "cannot be imported: SystemExit: no licence"),
    "aborts": ("import os; os.abort()", "looking for broken devices crashed with SIGABRT"),
    "misses": ("", "cannot be imported: AttributeError"),
    "misnames": (WORKING.format(name="other"), "calls itself 'other'; expected 'broken'"),
    "strays": (
        WORKING.format(name="broken").replace('Device("broken"', 'Device("numpy"'),
        "lists a device of the backend 'numpy'; expected 'broken'",
    ),
    "lists nonsense": (
        WORKING.format(name="broken").replace("[Device", "['nonsense', Device"),
        "looking for broken devices failed: AttributeError",
    ),
    "exits later": (
        WORKING.format(name="broken").replace("return [Device", "raise SystemExit(3); [Device"),
        "looking for broken devices failed: SystemExit: 3",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_one_is_an_unavailable_device(tmp_path: Path, install_distributions: Discover, fault: str) -> None:
    text, reason = BROKEN[fault]
    module = f"registry_{fault.replace(' ', '_')}"
    install_distributions(distribution(tmp_path / "site", "broken", f"broken = {module}:BACKEND", **{module: text}))
    found = {device.backend: device for device in dispatcher.devices()}
    assert not found["broken"].available
    assert reason in (found["broken"].reason or "")
    assert found["numpy"].available
    assert cli.main(["run", CONV, "--device", "broken,numpy"]) == 0
    assert cli.main(["run", CONV, "--device", "broken"]) == 3
    findings = [each for each in dispatcher.doctor().findings if "broken" in each.subject + each.topic]
    assert {each.subject for each in findings} == {"broken 1.0", "broken:0 broken"}


@pytest.mark.parametrize("target", ["registry_no_such_module:BACKEND", "not a target!", "os.path:BACKEND", ":", ""])
def test_a_target_that_is_not_there_is_an_unavailable_device(
    tmp_path: Path, install_distributions: Discover, target: str
) -> None:
    install_distributions(distribution(tmp_path / "site", "broken", f"broken = {target}"))
    (device,) = backend_devices("broken")
    assert not device.available
    assert (device.reason or "").startswith("the broken backend cannot be imported: ")


@pytest.mark.parametrize("name", ["cuda", "numpy", "auto", "all-of", "Mine", "my backend", "a:b"])
def test_a_name_that_cannot_be_used_is_refused_in_one_line(
    tmp_path: Path, install_distributions: Discover, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    site = distribution(
        tmp_path / "site", "rogue", f"{name} = registry_rogue:BACKEND", registry_rogue="raise AssertionError"
    )
    install_distributions(site)
    assert cli.main(["devices", "--json", "--no-self-test"]) == 0
    captured = capsys.readouterr()
    assert [each["id"] for each in json.loads(captured.out)["devices"]][-1] == "numpy"
    assert captured.err.startswith(f"warning: backend {name!r} of rogue 1.0 is left out: ")
    assert captured.err.count("\n") == 1
    (finding,) = (each for each in dispatcher.doctor().findings if each.subject == "rogue 1.0")
    assert (finding.verdict, finding.remedy) == ("problem", "python -m pip uninstall rogue")


def test_of_two_with_one_name_the_first_distribution_has_it(tmp_path: Path, install_distributions: Discover) -> None:
    site = distribution(tmp_path / "site", "second", "mine = registry_second:BACKEND")
    distribution(site, "first", "mine = registry_first:BACKEND")
    install_distributions(site)
    with pytest.warns(RuntimeWarning, match=r"'mine' of second 1\.0 is left out: .* registry_first:BACKEND of first"):
        assert registry.BACKENDS["mine"] == "registry_first:BACKEND"


def test_a_distribution_that_is_installed_twice_counts_once(tmp_path: Path, install_distributions: Discover) -> None:
    install_distributions(distribution(tmp_path / "old", "mine", "mine = registry_old:BACKEND"))
    install_distributions(distribution(tmp_path / "new", "mine", "mine = registry_new:BACKEND"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert registry.BACKENDS["mine"] == "registry_new:BACKEND"


def test_metadata_that_cannot_be_read_is_a_warning(tmp_path: Path, install_distributions: Discover) -> None:
    site = distribution(tmp_path / "site", "mine", "mine = registry_mine:BACKEND")
    distribution(site, "damaged")
    (site / "damaged-1.0.dist-info" / "entry_points.txt").write_bytes(b"[dispatcher.backends]\nx = \xff\xfe")
    install_distributions(site)
    with pytest.warns(RuntimeWarning, match="entry points of a distribution in .*site are left out"):
        assert list(registry.BACKENDS) == ["cuda", "opencl", "mine", "numpy"]


def test_nothing_is_looked_up_before_devices_are_asked_for() -> None:
    code = (
        "import dispatcher; dispatcher.problems(); dispatcher.run; dispatcher.devices\n"
        "from dispatcher import registry; print(registry.registered.cache_info().currsize)\n"
        "list(registry.BACKENDS); print(registry.registered.cache_info().currsize)"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, env=dict(os.environ)
    )
    assert child.stdout.split() == ["0", "1"]


def test_a_table_that_a_test_installs_is_used_as_it_is(install_backends: Install) -> None:
    install_backends(FakeBackend("mine"))
    assert registry.origin("mine") is None
    assert backend_devices("mine")[0].available
