"""The device grammar, what auto prefers, and that nothing is probed without need."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pytest
from conftest import Install
from fakes import CONV, FakeBackend, conv_tensors

import dispatcher
from dispatcher import registry
from dispatcher.device.selection import FallbackWarning, backend_devices, devices, parse_request
from dispatcher.errors import BuildError, DeviceError, InputError, KernelError


def compiled(device: Any = None, **arguments: Any) -> dispatcher.CompiledOperator:
    return dispatcher.compile(CONV, device=device, case="sample", **arguments)


@pytest.fixture
def fakes(install_backends: Install) -> dict[str, FakeBackend]:
    """cuda and opencl without a driver in sight, and NumPy."""
    backends = {
        "cuda": FakeBackend("cuda", devices=["GeForce One"]),
        "opencl": FakeBackend("opencl", devices=["PoCL one", "Iris", "PoCL two"], kind="cpu"),
    }
    install_backends(*backends.values())
    return backends


# ---- grammar -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ("auto", "cuda:0"),
        ("AUTO", "cuda:0"),
        ("cuda", "cuda:0"),
        ("Cuda", "cuda:0"),
        ("numpy", "numpy"),
        ("numpy:0", "numpy"),
        ("opencl", "opencl:0"),
        ("opencl:1", "opencl:1"),
        (" OpenCL : 2 ", "opencl:2"),
        ("opencl:iris", "opencl:1"),
        ("opencl:POCL TWO", "opencl:2"),
        ("numpy,cuda", "numpy"),
        ("opencl:7,opencl:iris,cuda", "opencl:1"),
        ("opencl:7,auto", "cuda:0"),
    ],
)
def test_a_request_means_one_device(fakes: dict[str, FakeBackend], request_: str, expected: str) -> None:
    assert compiled(request_).device.id == expected


def test_a_device_out_of_the_list_is_a_request(fakes: dict[str, FakeBackend]) -> None:
    for device in devices():
        assert compiled(device).device is device


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ("", "a name is missing"),
        ("99", "there is no backend '99'; expected auto or one of cuda, opencl, numpy"),
        ("vulkan", "there is no backend 'vulkan'"),
        ("cuda:", "nothing follows cuda:"),
        ("auto:1", "auto takes no index"),
        ("cuda,", "a name is missing"),
        (":1", "a name is missing"),
        ("cuda:1", r"no device 1; cuda has 1 device: cuda:0 \(GeForce One\)"),
        ("opencl:7", "no device 7; opencl has 3 devices"),
        ("opencl:pocl", r"'pocl' is in the name of 2 devices: opencl:0 \(PoCL one\), opencl:2"),
        ("opencl:radeon", r"no opencl device has 'radeon' in its name; expected one of opencl:0"),
    ],
)
def test_what_means_no_device_is_an_error(fakes: dict[str, FakeBackend], request_: str, words: str) -> None:
    with pytest.raises(DeviceError, match=words) as caught:
        compiled(request_)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 3


def test_a_request_is_a_text() -> None:
    with pytest.raises(InputError, match="device is 3; expected a text"):
        parse_request(3)  # type: ignore[arg-type]


# ---- precedence --------------------------------------------------------------------------------------------
def test_argument_then_environment_then_auto(fakes: dict[str, FakeBackend], monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled().device.id == "cuda:0"
    monkeypatch.setenv("DISPATCHER_DEVICE", "opencl:iris")
    assert compiled().device.id == "opencl:1"
    assert compiled("numpy").device.id == "numpy"
    assert compiled("auto").device.id == "cuda:0"
    monkeypatch.setenv("DISPATCHER_DEVICE", " ")
    assert compiled().device.id == "cuda:0"
    monkeypatch.setenv("DISPATCHER_DEVICE", "nope")
    with pytest.raises(DeviceError, match=r"^DISPATCHER_DEVICE is 'nope'"):
        compiled()
    monkeypatch.setenv("DISPATCHER_DEVICE", "opencl:7")
    with pytest.raises(DeviceError, match=r"^DISPATCHER_DEVICE opencl:7: there is no device 7"):
        compiled()


def test_auto_takes_gpus_before_cpus_before_the_reference(install_backends: Install) -> None:
    missing = FakeBackend("cuda", unavailable="no driver")
    cpu = FakeBackend("opencl", kind="cpu")
    install_backends(missing, cpu)
    assert compiled("auto").device.id == "opencl:0"
    assert compiled("auto").skipped == (("cuda", "no driver"),)
    install_backends(cpu, FakeBackend("other", kind="gpu"))
    assert compiled("auto").device.id == "other:0"
    install_backends(missing)
    assert compiled("auto").device.id == "numpy"


def test_only_what_is_needed_is_probed(fakes: dict[str, FakeBackend]) -> None:
    compiled("numpy")
    assert [fake.probes for fake in fakes.values()] == [0, 0]
    compiled("opencl:1")
    assert [fake.probes for fake in fakes.values()] == [0, 1]
    for _ in range(3):
        compiled("auto")
    assert [fake.probes for fake in fakes.values()] == [1, 1]


def test_wrong_arguments_are_found_before_any_device_is_opened(fakes: dict[str, FakeBackend]) -> None:
    with pytest.raises(InputError, match="stride"):
        dispatcher.run(CONV, **conv_tensors(), stride=0)
    assert [fake.probes for fake in fakes.values()] == [0, 0]


# ---- backends that are not there ---------------------------------------------------------------------------
def test_a_backend_that_cannot_be_imported_is_an_unavailable_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    (tmp_path / "broken_backend.py").write_text("raise OSError('libcuda.so.1: no such file\\nmore')")
    monkeypatch.syspath_prepend(tmp_path)
    table = {"cuda": "broken_backend", "gone": "no_such_module", "numpy": "dispatcher.backends.numpy_ref"}
    monkeypatch.setattr(registry, "BACKENDS", table)
    cuda, gone, numpy = devices()
    assert not cuda.available
    assert cuda.reason == "the cuda backend cannot be imported: OSError: libcuda.so.1: no such file"
    assert gone.reason is not None
    assert "No module named 'no_such_module'" in gone.reason
    assert numpy.available
    assert [label for label, _ in compiled("auto").skipped] == ["cuda", "gone"]
    with pytest.raises(DeviceError, match=r"device cuda: .*libcuda\.so\.1"):
        compiled("cuda")
    with pytest.raises(DeviceError, match=r"libcuda\.so\.1"):
        compiled("cuda:7")


def test_a_probe_that_raises_or_finds_nothing_is_a_reason(install_backends: Install) -> None:
    raising, empty = FakeBackend("raising"), FakeBackend("empty", devices=[])

    def probe() -> Any:
        raise RuntimeError("clGetPlatformIDs failed: PLATFORM_NOT_FOUND_KHR")

    raising.probe = probe  # type: ignore[method-assign]
    install_backends(raising, empty)
    assert backend_devices("raising")[0].reason == (
        "looking for raising devices failed: RuntimeError: clGetPlatformIDs failed: PLATFORM_NOT_FOUND_KHR"
    )
    assert backend_devices("empty")[0].reason == "empty found no device"


def test_pyopencl_that_cannot_be_imported_leaves_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("pyopencl", "dispatcher.backends.opencl"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyopencl", None)
    from dispatcher.device import selection

    monkeypatch.setattr(selection, "_probed", {})
    (device,) = backend_devices("opencl")
    assert not device.available
    assert device.reason is not None
    assert "pyopencl" in device.reason.lower()


# ---- falling back ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("request_", ["auto", "cuda,numpy"])
def test_a_failed_build_moves_on_with_one_warning(install_backends: Install, request_: str) -> None:
    error = BuildError("nvcc fatal: Unsupported gpu architecture 'compute_99'", log="the whole log")
    install_backends(FakeBackend("cuda", build_error=error))
    with pytest.warns(FallbackWarning, match="Unsupported gpu architecture") as caught:
        operator = compiled(request_)
    assert len(caught) == 1
    assert operator.device.id == "numpy"
    assert operator.skipped == (("cuda:0", "nvcc fatal: Unsupported gpu architecture 'compute_99'"),)


@pytest.mark.parametrize("error", [RuntimeError("clBuildProgram failed"), MemoryError(), TypeError("a bug")])
def test_any_error_of_a_build_becomes_a_kernel_error(install_backends: Install, error: Exception) -> None:
    install_backends(FakeBackend("cuda", build_error=error))
    with pytest.raises(KernelError, match=rf"failed to build on cuda:0 \(Fake One\): {type(error).__name__}") as it:
        compiled("cuda")
    assert it.value.__cause__ is error
    with pytest.warns(FallbackWarning):
        assert compiled("auto").device.id == "numpy"


def test_a_named_device_never_falls_back(install_backends: Install) -> None:
    install_backends(FakeBackend("cuda", build_error=BuildError("no kernel image")))
    for request_ in ("cuda", "cuda:0", "cuda:fake"):
        with pytest.raises(BuildError, match="no kernel image"):
            compiled(request_)
    install_backends(FakeBackend("cuda", unsupported="needs fp64"))
    with pytest.raises(DeviceError, match=r"cuda:0 \(Fake One\) cannot run .*: needs fp64"):
        compiled("cuda")


def test_an_unsupported_operator_moves_on_without_a_warning(install_backends: Install) -> None:
    install_backends(FakeBackend("cuda", unsupported="needs fp64"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        operator = compiled("auto")
    assert operator.device.id == "numpy"
    assert operator.skipped == (("cuda:0", "needs fp64"),)


def test_when_nothing_is_left_every_reason_is_told(install_backends: Install) -> None:
    broken = FakeBackend("cuda", build_error=BuildError("no kernel image"))
    refusing = FakeBackend("opencl", unsupported="needs fp64")
    install_backends(broken, refusing, keep=())
    with pytest.warns(FallbackWarning), pytest.raises(KernelError, match=r"no kernel image; opencl:0: needs fp64"):
        compiled("auto")
    with pytest.raises(DeviceError, match="needs fp64"):
        compiled("opencl,opencl:0")
    install_backends(FakeBackend("cuda", unavailable="no driver"), keep=())
    with pytest.raises(DeviceError, match=r"no device .* cuda: no driver"):
        compiled("auto")


def test_a_wrong_option_is_not_a_reason_to_fall_back(install_backends: Install) -> None:
    install_backends(FakeBackend("cuda", build_error=InputError("option algorithm is 'x'")))
    with pytest.raises(InputError, match="option algorithm"):
        compiled("auto", options={"algorithm": "x"})


# ---- this machine ------------------------------------------------------------------------------------------
def test_the_listing_always_works() -> None:
    found = devices()
    assert [device.backend for device in found] == sorted(
        (device.backend for device in found), key=list(registry.BACKENDS).index
    )
    assert found[-1].id == "numpy"
    assert all(device.available or device.reason for device in found)
    assert len({device.id for device in found}) == len(found)
