"""run, compile, explain, verify and benchmark as a Python user meets them."""

from __future__ import annotations

import json
import pickle
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
from conftest import Install
from fakes import CONV, LAYERNORM, MAXMAX, SOFTMAX, SUM, FakeBackend, conv_tensors, correct

import dispatcher
from dispatcher.backends.opencl import BACKEND as OPENCL
from dispatcher.call import compiled as compiled_module
from dispatcher.check.comparison import verify_result
from dispatcher.check.inputs import random_tensors
from dispatcher.check.once import input_tensors
from dispatcher.device.selection import FallbackWarning, backend_devices
from dispatcher.errors import (
    DeviceError,
    DeviceMemoryError,
    DtypeError,
    GeometryError,
    InputError,
    KernelError,
    VerificationError,
)
from dispatcher.interface import Device
from dispatcher.problem.operator import Operator


@pytest.fixture
def fake(install_backends: Install) -> FakeBackend:
    backend = FakeBackend()
    install_backends(backend)
    return backend


# ---- the public names --------------------------------------------------------------------------------------
def test_every_public_name_is_there() -> None:
    for name in dispatcher.__all__:
        assert getattr(dispatcher, name) is not None
    assert set(dispatcher.__all__) <= set(dir(dispatcher))
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        dispatcher.nope  # noqa: B018


def test_problems_and_load_problem() -> None:
    assert CONV in dispatcher.problems()
    loaded = dispatcher.load_problem(CONV)
    np.testing.assert_array_equal(
        dispatcher.run(loaded, device="numpy", **conv_tensors()),
        dispatcher.run(str(loaded.path), device="numpy", **conv_tensors()),
    )


# ---- the caller's own error state --------------------------------------------------------------------------
def strictly(function: Any) -> Any:
    """What ``function`` gives in a thread where every warning and NumPy's every signal is an exception."""

    def work() -> Any:
        result = function()
        assert set(np.geterr().values()) == {"raise"}
        return result

    with warnings.catch_warnings(), ThreadPoolExecutor(1, initializer=partial(np.seterr, all="raise")) as pool:
        warnings.simplefilter("error")
        return pool.submit(work).result()


def test_a_strict_error_state_changes_no_result(backend_device: Device) -> None:
    for dtype in ("float16", "float32"):
        hard = {"inputs": ("denormal", "large", "small", "one_inf"), "dtype": dtype}
        assert strictly(lambda: dispatcher.verify(SUM, device=backend_device, **hard))[0].passed  # noqa: B023
    tensors = {name: np.full_like(array, 3e38) for name, array in conv_tensors().items()}
    assert np.isinf(strictly(lambda: dispatcher.run(CONV, device=backend_device, **tensors))).any()


def test_a_strict_error_state_holds_for_none_of_our_threads(install_backends: Install) -> None:
    install_backends(FakeBackend(devices=("One", "Two")))
    tensors = {name: np.full_like(array, 3e38) for name, array in conv_tensors().items()}
    for where in ({"devices": ["fake:0", "fake:1"]}, {"device": "fake:0"}):
        assert np.isinf(strictly(partial(dispatcher.run, CONV, **where, **tensors))).any()  # type: ignore[arg-type]
    given = {"input": np.full((2, 4, 3, 4, 5), 1e300)}
    assert np.isinf(strictly(lambda: input_tensors(bound_conv(), given, 0))["input"]).all()


def bound_conv() -> Operator:
    return dispatcher.explain(CONV, device="numpy", **conv_tensors()).operator


# ---- on every device of this machine -----------------------------------------------------------------------
def test_a_compiled_problem_runs_on_every_device(backend_device: Device) -> None:
    compiled = dispatcher.compile(CONV, device=backend_device, case="sample")
    operator = compiled.explain().operator
    tensors = random_tensors(operator, 3)
    comparison = verify_result(operator, tensors, compiled(**tensors))
    assert comparison.passed, comparison.reason
    assert compiled.device == backend_device


def test_an_empty_batch_gives_an_empty_array(backend_device: Device) -> None:
    result = dispatcher.run(
        CONV, device=backend_device, input=np.zeros((0, 2, 2, 2, 2), "f4"), kernel=np.zeros((2, 3, 2, 2, 2), "f4")
    )
    assert result.shape == (0, 3, 3, 3, 3)
    assert result.dtype == np.float32


# ---- calling -----------------------------------------------------------------------------------------------
def test_the_backend_gets_read_only_c_arrays_in_parameter_order(fake: FakeBackend) -> None:
    tensors = {"kernel": conv_tensors()["kernel"], "input": np.asfortranarray(conv_tensors()["input"])}
    dispatcher.run(CONV, **tensors)
    (seen,) = fake.seen
    assert list(seen) == ["input", "kernel"]
    for name, array in seen.items():
        assert array.flags.c_contiguous
        assert not array.flags.writeable
        np.testing.assert_array_equal(array, tensors[name])
    assert all(tensor.flags.writeable for tensor in tensors.values())


def test_a_missing_tensor_is_named_with_its_shape(fake: FakeBackend) -> None:
    with pytest.raises(InputError, match=r"tensor kernel is missing; expected an array of shape \(in_channels, "):
        dispatcher.run(CONV, input=conv_tensors()["input"])
    assert fake.probes == 0


def test_an_empty_batch_calls_no_backend(fake: FakeBackend) -> None:
    tensors = conv_tensors()
    tensors["input"] = tensors["input"][:0]
    output = np.empty((0, 6, 5, 5, 6), np.float32)
    assert dispatcher.run(CONV, **tensors, output=output) is output
    assert dispatcher.run(CONV, **tensors).shape == output.shape
    assert fake.compiles == fake.calls == 0
    assert dispatcher.explain(CONV, **tensors).launches == ()


def test_precision_and_options_reach_the_backend(fake: FakeBackend) -> None:
    compiled = dispatcher.compile(CONV, case="sample", precision="tf32", options={"algorithm": "direct"})
    assert fake.options == [{"algorithm": "direct"}]
    assert compiled.explain().operator.precision == "tf32"
    with pytest.raises(InputError, match="precision is 'fp8'"):
        dispatcher.compile(CONV, precision="fp8")


def test_the_result_parameter_may_have_another_name() -> None:
    problem = {
        "name": "renamed",
        "parameters": [
            {"name": "x", "type": "tensor", "const": True, "shape": ["n", "c", "d", "h", "w"]},
            {"name": "y", "type": "tensor", "const": False},
            *({"name": name, "type": "size_t"} for name in "ncdhw"),
        ],
        "pipeline": [{"op": "relu"}],
    }
    x = np.array([-1.0, 2.0], "f4").reshape(1, 2, 1, 1, 1)
    y = np.empty_like(x)
    assert dispatcher.run(problem, device="numpy", x=x, y=y) is y
    np.testing.assert_array_equal(y.ravel(), [0, 2])
    with pytest.raises(InputError, match="output and y both name the result"):
        dispatcher.run(problem, device="numpy", x=x, y=y, output=y)
    with pytest.raises(InputError, match="y shares memory with tensor x"):
        dispatcher.run(problem, device="numpy", x=x, y=x)


# ---- compile once, call often ------------------------------------------------------------------------------
def test_one_program_serves_all_calls_of_the_same_operator(fake: FakeBackend) -> None:
    compiled = dispatcher.compile(CONV)
    tensors = conv_tensors()
    for _ in range(3):
        compiled(**tensors)
        compiled(kernel=tensors["kernel"], input=np.asfortranarray(tensors["input"]))
        compiled(**tensors, batch_size=2)
    assert fake.compiles == 1
    compiled(input=tensors["input"][:1], kernel=tensors["kernel"])
    compiled(**tensors, stride=2)
    compiled(**{name: tensor.astype("f8") for name, tensor in tensors.items()})
    assert fake.compiles == 4
    assert fake.calls == 12


def test_known_sizes_compile_at_once_and_unknown_ones_at_the_first_call(fake: FakeBackend) -> None:
    dispatcher.compile(CONV, case="sample")
    assert fake.compiles == 1
    compiled = dispatcher.compile(CONV, stride=2)
    assert (fake.compiles, compiled.device.id) == (1, "fake:0")
    compiled(**conv_tensors())
    assert fake.compiles == 2
    with pytest.raises(DeviceError, match="no device 9"):
        dispatcher.compile(CONV, device="fake:9")
    with pytest.raises(InputError, match="stride"):
        dispatcher.compile(CONV, case="sample", stride=0)


def test_bound_weights_are_a_copy_and_the_same_object_in_every_call(fake: FakeBackend) -> None:
    tensors = conv_tensors()
    kernel = tensors["kernel"].copy()
    compiled = dispatcher.compile(CONV, kernel=kernel, stride=2)
    expected = dispatcher.run(CONV, **tensors, stride=2)
    kernel[...] = 0
    for _ in range(2):
        np.testing.assert_array_equal(compiled(input=tensors["input"]), expected)
    assert fake.seen[-1]["kernel"] is fake.seen[-2]["kernel"]


def test_a_call_may_replace_what_was_bound(fake: FakeBackend) -> None:
    tensors = conv_tensors()
    compiled = dispatcher.compile(CONV, kernel=tensors["kernel"], stride=3)
    result = compiled(input=tensors["input"], kernel=2 * tensors["kernel"], stride=1)
    np.testing.assert_array_equal(result, 2 * dispatcher.run(CONV, **tensors))


def test_a_call_that_contradicts_bound_sizes_is_refused(fake: FakeBackend) -> None:
    compiled = dispatcher.compile(CONV, kernel=conv_tensors()["kernel"], in_channels=4)
    with pytest.raises(InputError, match=r"extent 3 on axis 1, but in_channels is 4 \(given\)"):
        compiled(input=np.zeros((1, 3, 2, 2, 2), "f4"))


def test_the_result_is_for_the_call(fake: FakeBackend) -> None:
    with pytest.raises(InputError, match="output is the result; give it to the call"):
        dispatcher.compile(CONV, output=np.zeros(3, "f4"))


def test_numbers_that_compare_equal_are_told_apart(fake: FakeBackend) -> None:
    compiled = dispatcher.compile(LAYERNORM, case="sample")
    tensors = random_tensors(compiled.explain().operator, 0)
    plus, minus = compiled(**tensors, scaling_factor=0.0), compiled(**tensors, scaling_factor=-0.0)
    assert not np.array_equal(np.signbit(plus), np.signbit(minus))
    compiled(**tensors, stride=2)
    with pytest.raises(InputError, match="scaling_factor is True"):
        compiled(**tensors, scaling_factor=True)
    compiled(**tensors, scaling_factor=np.float32(0.1))
    assert compiled.explain().operator.scalars["scaling_factor"] == float(np.float32(0.1))
    compiled(**tensors, scaling_factor=0.1)
    assert compiled.explain().operator.scalars["scaling_factor"] == 0.1


def test_programs_that_are_not_used_are_dropped(fake: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_module, "MAX_PROGRAMS", 2)
    compiled = dispatcher.compile(CONV)
    tensors = conv_tensors()
    for stride in (1, 2, 1, 3, 1):  # 3 takes the place of 2
        compiled(**tensors, stride=stride)
    assert fake.compiles == 3
    compiled(**tensors, stride=2)
    assert fake.compiles == 4


def test_signatures_are_forgotten_when_there_are_many(fake: FakeBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_module, "MAX_SIGNATURES", 3)
    compiled = dispatcher.compile(CONV)
    for batch in range(1, 9):
        tensors = conv_tensors()
        tensors["input"] = np.resize(tensors["input"], (batch, 4, 3, 4, 5))
        assert compiled(**tensors).shape[0] == batch


def test_threads_share_one_program(fake: FakeBackend) -> None:
    compiled = dispatcher.compile(CONV)
    shapes = [conv_tensors(), {**conv_tensors(), "input": conv_tensors()["input"][:1]}]
    expected = [dispatcher.run(CONV, **tensors) for tensors in shapes]
    fake.compiles = 0
    barrier = threading.Barrier(8)

    def work(number: int) -> bool:
        barrier.wait()
        return all(np.array_equal(compiled(**shapes[i % 2]), expected[i % 2]) for i in range(number, number + 20))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    assert fake.compiles == 2


def test_a_warm_call_costs_little(fake: FakeBackend) -> None:
    results: dict[tuple[int, ...], np.ndarray] = {}
    fake.behaviour = lambda operator, tensors: results.setdefault(
        operator.output_shape, np.zeros(operator.output_shape, operator.dtype)
    )
    compiled = dispatcher.compile(CONV)
    tensors = conv_tensors()
    compiled(**tensors, stride=2)
    fastest = min(_duration(lambda: compiled(**tensors, stride=2)) for _ in range(300))
    assert fastest < 50e-6


def _duration(function: Any) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


# ---- arrays on a device ------------------------------------------------------------------------------------
class DeviceArray:
    """What CuPy's arrays look like from outside; NumPy cannot read it."""

    def __init__(self, host: np.ndarray) -> None:
        self.host = host
        self.__cuda_array_interface__ = {
            "shape": host.shape, "typestr": host.dtype.str, "data": (host.ctypes.data, False), "version": 3,
        }  # fmt: skip

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise TypeError("Implicit conversion to a NumPy array is not allowed")


def device_arrays() -> dict[str, Any]:
    return {name: DeviceArray(tensor) for name, tensor in conv_tensors().items()}


def on_device(operator: Any, tensors: Any) -> Any:
    host = {name: getattr(tensor, "host", tensor) for name, tensor in tensors.items()}
    return DeviceArray(correct(operator, host))


def test_device_arrays_are_passed_through(install_backends: Install) -> None:
    backend = FakeBackend("cuda", on_device, device_arrays=True)
    install_backends(backend)
    tensors = device_arrays()
    compiled = dispatcher.compile(CONV)
    for _ in range(2):
        result = compiled(**tensors)
        np.testing.assert_array_equal(result.host, dispatcher.run(CONV, device="numpy", **conv_tensors()))
    assert all(backend.seen[-1][name] is tensor for name, tensor in tensors.items())
    bound = dispatcher.compile(CONV, kernel=tensors["kernel"])
    assert bound(input=conv_tensors()["input"]).host.shape == result.host.shape
    assert backend.seen[-1]["kernel"] is tensors["kernel"]


def test_device_arrays_on_a_host_backend_say_what_to_do(fake: FakeBackend) -> None:
    with pytest.raises(InputError, match=r"tensor input lives on a CUDA device, and fake:0 takes arrays in host"):
        dispatcher.run(CONV, **device_arrays())
    with pytest.raises(InputError, match="output lives on a CUDA device"):
        dispatcher.run(CONV, **conv_tensors(), output=DeviceArray(np.zeros((2, 6, 5, 5, 6), "f4")))
    integers = {**device_arrays(), "kernel": DeviceArray(np.zeros((4, 6, 3, 2, 2), "i4"))}
    with pytest.raises(InputError, match="tensor kernel has dtype int32 on its device"):
        dispatcher.run(CONV, **integers)


# ---- when a device fails while it runs ---------------------------------------------------------------------
def test_arrays_of_pyopencl(backend_device: Device) -> None:
    owner = next((each for each in backend_devices("opencl") if each.available), None)
    if owner is None:
        pytest.skip("there is no usable OpenCL device")
    import pyopencl as cl
    from pyopencl import array as cl_array

    context = cl.Context([OPENCL._runtime(owner).device])  # which Intel's queues do not keep alive
    queue = cl.CommandQueue(context)
    tensors = conv_tensors()
    expected = dispatcher.run(CONV, device=backend_device, **tensors)
    wide = cl_array.to_device(queue, np.repeat(tensors["input"], 2, axis=-1))
    weights = cl_array.to_device(queue, tensors["kernel"])
    for source in (cl_array.to_device(queue, tensors["input"]), wide[..., ::2], wide[..., ::2].with_queue(None)):
        result = dispatcher.run(CONV, device=backend_device, input=source, kernel=weights)
        assert isinstance(result, cl_array.Array if backend_device == owner else np.ndarray)
        np.testing.assert_array_equal(result if isinstance(result, np.ndarray) else result.get(), expected)
        output = cl_array.zeros(queue, expected.shape, np.float32)
        assert dispatcher.run(CONV, device=backend_device, input=source, kernel=weights, output=output) is output
        np.testing.assert_array_equal(output.get(), expected)
    bound = dispatcher.compile(CONV, device=backend_device, kernel=weights)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(bound))(input=tensors["input"]), expected)
    twice = cl_array.to_device(queue, np.repeat(tensors["kernel"], 2, axis=-1))
    for whole, kernel in ((weights, weights), (twice, twice[..., ::2].with_queue(None))):
        copied = dispatcher.compile(CONV, device=backend_device, kernel=kernel)
        bound.update(kernel=kernel)
        whole.fill(0.0)
        queue.finish()
        for each in (copied, bound):
            result = each(input=tensors["input"])
            np.testing.assert_array_equal(result if isinstance(result, np.ndarray) else result.get(), expected)
    own = cl_array.to_device(queue, np.zeros(expected.size + tensors["input"].size, np.float32))
    output = own[: expected.size].reshape(expected.shape)
    taken = own[expected.size :].reshape(tensors["input"].shape)
    with pytest.raises(InputError, match="output shares memory with tensor input"):
        dispatcher.run(CONV, device=backend_device, input=taken, kernel=weights, output=output)
    with pytest.raises(DtypeError, match="output has dtype float64"):
        wrong = cl_array.zeros(queue, expected.shape, np.float64)
        dispatcher.run(CONV, device=backend_device, **tensors, output=wrong)


def test_arrays_of_pyopencl_on_cpus_are_read_and_written_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    owners = [each for each in backend_devices("opencl") if each.available and each.kind == "cpu"]
    if not owners:
        pytest.skip("there is no OpenCL CPU device")
    import pyopencl as cl
    from pyopencl import array as cl_array

    for owner in owners:
        context = cl.Context([OPENCL._runtime(owner).device])
        queue = cl.CommandQueue(context)
        tensors = conv_tensors()
        expected = dispatcher.run(CONV, device=owner, **tensors)
        given = {name: cl_array.to_device(queue, tensor) for name, tensor in tensors.items()}
        output = cl_array.zeros(queue, (2, *expected.shape), np.float32)[1]
        with monkeypatch.context() as patch:
            for place, name in ((cl_array, "to_device"), (cl_array.Array, "get"), (cl_array.Array, "set")):
                patch.setattr(place, name, lambda *given, **options: pytest.fail("it copies"))
            results = [dispatcher.run(CONV, device=owner, **given)]
            results += [dispatcher.run(CONV, device=owner, **given, output=output), results[0].copy()]
        for result in results:
            np.testing.assert_array_equal(result.get(), expected)


def failing(error: Exception) -> Any:
    def behave(operator: Any, tensors: Any) -> Any:
        raise error

    return behave


@pytest.mark.parametrize("error", [KernelError("launch failed"), MemoryError("5 GB"), RuntimeError("CL -36")])
def test_auto_moves_on_when_a_run_fails(install_backends: Install, error: Exception) -> None:
    backend = FakeBackend("cuda", failing(error))
    install_backends(backend)
    compiled = dispatcher.compile(CONV)
    with pytest.warns(FallbackWarning) as caught:
        first = compiled(**conv_tensors())
    assert len(caught) == 1
    np.testing.assert_array_equal(first, compiled(**conv_tensors()))
    assert backend.calls == 1
    assert compiled.device.id == "numpy"
    ((label, reason),) = compiled.skipped
    assert label == "cuda:0"
    assert str(error) in reason


def test_a_named_device_raises_when_a_run_fails(install_backends: Install) -> None:
    backend = FakeBackend("cuda", failing(MemoryError("5 GB")))
    install_backends(backend)
    with pytest.raises(DeviceMemoryError, match=r"failed to run on cuda:0 \(Fake One\): MemoryError: 5 GB"):
        dispatcher.run(CONV, device="cuda", **conv_tensors())
    backend.behaviour = correct
    dispatcher.run(CONV, device="cuda", **conv_tensors())


def test_a_failed_run_writes_the_fallback_into_the_same_output(install_backends: Install) -> None:
    install_backends(FakeBackend("cuda", failing(KernelError("launch failed"))))
    output = np.full((2, 6, 5, 5, 6), np.nan, np.float32)
    with pytest.warns(FallbackWarning):
        assert dispatcher.run(CONV, **conv_tensors(), output=output) is output
    assert np.isfinite(output).all()


# ---- explain, verify, benchmark ----------------------------------------------------------------------------
def test_explain_tells_the_plan(fake: FakeBackend) -> None:
    explanation = dispatcher.explain(CONV, case="sample")
    assert fake.calls == 0
    plain = explanation.as_dict()
    json.dumps(plain, allow_nan=False)
    assert plain["device"]["id"] == "fake:0"
    assert plain["launches"][0]["name"] == "fake_launch"
    (convolution,) = plain["convolutions"]
    groups = convolution["phase_groups"]
    assert sum(group["phases"] for group in groups) == 8
    flops = sum(2 * g["phases"] * g["gemm_m"] * g["gemm_n"] * g["gemm_k"] for g in groups) * 2  # two groups
    assert flops >= plain["flops"] > 0
    outputs = sum(g["phases"] * g["gemm_m"] * g["gemm_n"] for g in groups) * convolution["groups"]
    assert outputs == np.prod(plain["output_shape"])


def test_explain_with_a_huge_stride_ends(fake: FakeBackend) -> None:
    arguments = {"batch_size": 1, "in_channels": 1, "out_channels": 1, "depth": 2, "height": 2, "width": 2}
    explanation = dispatcher.explain(CONV, **arguments, kernel_size=1, stride=1099)
    assert len(explanation.convolutions[0].phase_groups) <= 8
    explanation = dispatcher.explain(CONV, **arguments, kernel_size=1, stride=(1, 1, 2**16))
    assert explanation.convolutions[0].phase_groups == ()
    with pytest.raises(GeometryError, match="stride on axis width is 1000000000; it must be 65536 or less"):
        dispatcher.explain(CONV, **arguments, kernel_size=1, stride=(1, 1, 10**9))


def test_verify_is_a_table_of_problems_and_devices() -> None:
    results = dispatcher.verify(device="numpy", inputs="signed")
    assert [result.problem for result in results] == list(dispatcher.problems())
    assert all(result.outcome == "passed" and result.comparison for result in results)
    json.dumps([result.as_dict() for result in results], allow_nan=False)
    (one,) = dispatcher.verify(MAXMAX, device="numpy", case="odd", seed=5, dtype="float64")
    assert (one.case, one.seed, one.operator.dtype) == ("odd", 5, "float64")


def test_verify_on_all_devices_reports_every_outcome(install_backends: Install) -> None:
    install_backends(
        FakeBackend("wrong", lambda operator, tensors: correct(operator, tensors) * np.float32(1.01)),
        FakeBackend("broken", failing(KernelError("launch failed"))),
        FakeBackend("refusing", unsupported="needs fp64"),
        FakeBackend("gone", unavailable="no driver"),
    )
    results = {result.device.backend: result for result in dispatcher.verify(CONV)}
    assert {name: result.outcome for name, result in results.items()} == {
        "wrong": "failed", "broken": "error", "refusing": "unsupported", "numpy": "passed",
    }  # fmt: skip
    assert "elements are wrong" in results["wrong"].reason
    assert "launch failed" in results["broken"].reason
    assert "needs fp64" in results["refusing"].reason


def test_verify_with_a_device_that_is_not_there(fake: FakeBackend) -> None:
    with pytest.raises(DeviceError, match="no device 5"):
        dispatcher.verify(CONV, device="fake:5")
    with pytest.raises(InputError, match="seed is -1"):
        dispatcher.verify(CONV, seed=-1)


def test_benchmark_waits_and_reports_no_nonsense(fake: FakeBackend) -> None:
    def slow(operator: Any, tensors: Any) -> np.ndarray:
        time.sleep(0.02)
        return correct(operator, tensors)

    fake.behaviour = slow
    result = dispatcher.benchmark(CONV, repeats=3, warmup=1)
    assert len(result.times_s) == 3
    assert min(result.times_s) >= 0.02
    low, high = result.quartiles_s
    assert 0 < low <= result.median_s <= high < 5
    assert result.comparison is not None
    assert result.comparison.passed
    assert 0 < result.gflops < 1e6
    json.dumps(result.as_dict(), allow_nan=False)
    in_a_round = 2 + 2 * 2  # two cold calls, and two warm ones with another one before each
    assert fake.calls == 1 + 1 + 3 * in_a_round


def test_benchmark_of_a_wrong_result_raises(fake: FakeBackend) -> None:
    fake.behaviour = lambda operator, tensors: np.zeros(operator.output_shape, operator.dtype)
    with pytest.raises(VerificationError, match="wrong result on fake:0"):
        dispatcher.benchmark(CONV)
    assert dispatcher.benchmark(CONV, check=False, repeats=1).comparison is None


def test_benchmark_checks_what_it_timed(fake: FakeBackend) -> None:
    def wears_out(operator: Any, tensors: Any) -> np.ndarray:
        return correct(operator, tensors) * np.float32(1 if fake.calls < 5 else 1.01)

    fake.behaviour = wears_out
    with pytest.raises(VerificationError):
        dispatcher.benchmark(CONV, repeats=4)


@pytest.mark.parametrize("wrong", [{"repeats": 0}, {"repeats": 1.5}, {"warmup": -1}, {"batch_size": 0}])
def test_benchmark_refuses_what_cannot_be_timed(fake: FakeBackend, wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        dispatcher.benchmark(CONV, **wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"options": 5}, {"options": [1]}, {"options": ""}, {"options": {1: 2}}, {"case": ["sample"]},
        {"precision": np.zeros(2)}, {"dtype": [1]}, {"device": 5},
    ],
)  # fmt: skip
def test_arguments_of_a_wrong_type(fake: FakeBackend, wrong: dict[str, Any]) -> None:
    (name,) = wrong
    for function in (
        dispatcher.compile,
        partial(dispatcher.run, **conv_tensors()),
        dispatcher.explain,
        dispatcher.verify,
        dispatcher.benchmark,
    ):
        with pytest.raises(InputError, match=f"{name} "):
            function(CONV, **wrong)
    assert fake.probes == 0


def test_arguments_of_a_wrong_type_for_one_function(fake: FakeBackend) -> None:
    for against in (5, [1], {"torch"}):
        with pytest.raises(InputError, match="against is"):
            dispatcher.benchmark(CONV, against=against)
    for inputs in (5, {"signed"}, np.zeros(2)):
        with pytest.raises(InputError, match="inputs is"):
            dispatcher.verify(CONV, inputs=inputs)
    with pytest.raises(InputError, match="trace is 5; expected the path of a file"):
        dispatcher.run(CONV, **conv_tensors(), trace=5)
    with pytest.raises(InputError, match="time_limit_s is True"):
        dispatcher.benchmark(CONV, time_limit_s=True)
    assert fake.probes == 0


def test_tensors_are_refused_where_they_would_be_replaced(fake: FakeBackend) -> None:
    x = conv_tensors()["input"]
    for function in (dispatcher.verify, dispatcher.benchmark, dispatcher.tune_problem):
        with pytest.raises(InputError, match=r"tensor input cannot be given here.*dispatcher\.run \(run --tensor"):
            function(CONV, input=x)
    with pytest.raises(InputError, match="tensor input cannot be given here"):
        dispatcher.verify_kernel(CONV, "mine.cl", global_size=1, input=x)
    with pytest.raises(InputError, match="tensor output cannot be given here"):
        dispatcher.verify(CONV, output=np.zeros((2, 6, 5, 5, 6), "f4"))
    assert fake.probes == 0


def test_nothing_is_printed(fake: FakeBackend, capfd: pytest.CaptureFixture[str]) -> None:
    dispatcher.run(SOFTMAX, **random_tensors(dispatcher.explain(SOFTMAX, case="sample").operator, 0), case="sample")
    dispatcher.verify(CONV)
    dispatcher.benchmark(CONV, repeats=1)
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""
