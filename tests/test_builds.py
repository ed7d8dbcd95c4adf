"""Programs and kernels are made once, however many threads ask, and calls leave nothing behind; operators are copied as
recipes."""

from __future__ import annotations

import copy
import gc
import linecache
import pickle
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Install
from fakes import CONV, FakeBackend, conv_tensors

import dispatcher
from dispatcher import registry
from dispatcher.device.filecache import Turns
from dispatcher.device.selection import backend_devices
from dispatcher.errors import InputError
from dispatcher.interface import Device


def at_once(count: int, work: Callable[[], Any]) -> list[Any]:
    """What ``work`` gives, or raises, in several threads that begin together."""
    barrier, ends = threading.Barrier(count), []

    def one() -> None:
        barrier.wait()
        try:
            ends.append(work())
        except BaseException as error:
            ends.append(error)

    threads = [threading.Thread(target=one, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(ends) == count
    return ends


def of_driver(device: Device) -> Any:
    """The backend of a device with a compiler; the test is skipped where it has none."""
    if device.backend == "numpy":
        pytest.skip("it compiles nothing")
    return registry.backend(device.backend)


# ---- builds ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("failures", [0, 2])
def test_one_makes_it_and_the_others_wait(failures: int) -> None:
    turns, made, tries, inside = Turns(), {}, [], []

    def work() -> int:
        with turns("key"):
            if "key" not in made:
                assert not inside
                inside.append(None)
                tries.append(None)
                inside.clear()
                if len(tries) <= failures:
                    raise (KeyboardInterrupt, OSError)[len(tries) % 2]
                made["key"] = len(tries)
            return made["key"]

    ends = at_once(8, work)
    assert len(tries) == failures + 1
    assert [end for end in ends if not isinstance(end, BaseException)] == [failures + 1] * (8 - failures)
    gc.collect()
    assert not turns._locks  # nothing is kept of keys that nobody asks for


def test_a_kernel_is_built_once(backend_device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Eight threads run the same new operator, and the first build is interrupted. No module is lost outside of its
    context, which PyCUDA warns of."""
    if backend_device.backend == "cuda" and backend_device.index:
        pytest.skip("one simulated device is like the other")
    backend = of_driver(backend_device)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tensors = {"input": np.ones((1, 1, 2, 2, 2), "f4"), "kernel": np.ones((1, 1, 1, 1, 13), "f4")}
    builds: list[Any] = []
    if backend_device.backend == "opencl":
        runtime, name = backend._runtime(backend_device), "_build"
    else:
        from dispatcher.backends.cuda import toolkit as runtime

        name = "compile_kernel"
    build = getattr(runtime, name)

    def counted(*arguments: Any) -> Any:
        builds.append(arguments[0])
        if len(builds) == 1:
            raise KeyboardInterrupt
        return build(*arguments)

    monkeypatch.setattr(runtime, name, counted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ends = at_once(8, lambda: dispatcher.run(CONV, device=backend_device.id, **tensors, dilation=2))
    failed = [end for end in ends if isinstance(end, BaseException)]
    assert [type(error) for error in failed] == [KeyboardInterrupt], failed
    assert [what for what, times in Counter(builds).items() if times > 1] == builds[:1]
    results = [end for end in ends if not isinstance(end, BaseException)]
    for result in results:
        np.testing.assert_array_equal(result, results[0])


# ---- what calls leave --------------------------------------------------------------------------------------
def test_calls_leave_nothing_behind(backend_device: Device) -> None:
    """Objects, generated code and filters of warnings after some calls of ``run``, and after many more."""
    if backend_device.index:
        pytest.skip("tried on the first device of each backend")
    tensors = {"input": np.ones((1, 1, 2, 2, 2), "f4"), "kernel": np.ones((1, 1, 1, 1, 1), "f4")}
    tensors["input"].flags.writeable = False

    def calls(count: int) -> Counter[str]:
        for _ in range(count):
            dispatcher.run(CONV, device=backend_device.id, **tensors)
        gc.collect()
        return Counter(type(each).__qualname__ for each in gc.get_objects())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before, code, filters = calls(10), len(linecache.cache), list(warnings.filters)
        grown = calls(60) - before
        assert not {name: count for name, count in grown.items() if count >= 30}
        ends = at_once(4, lambda: calls(5))
        assert not [end for end in ends if isinstance(end, BaseException)]
        assert len(linecache.cache) == code
        assert warnings.filters == filters


def test_programs_of_ever_new_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The latest are kept, and the generated code of none."""
    pytest.importorskip("pyopencl")
    from dispatcher.backends.opencl import BACKEND, runtime

    device = next((each for each in backend_devices("opencl") if each.available), None)
    if device is None:
        pytest.skip("no OpenCL device")
    monkeypatch.setattr(runtime, "MOST_PROGRAMS", 2)
    opened = runtime.OpenClRuntime(*(getattr(BACKEND._found[device.index], name) for name in ("platform", "device")))
    texts = [f"__kernel void twice_{i}(__global float *x) {{ x[0] *= 2; }}" for i in range(3)]
    code = len(linecache.cache)
    kernels = [opened.kernel(text, f"twice_{i}") for i, text in enumerate(texts)]
    assert opened.kernel(texts[1], "twice_1") is kernels[1]
    assert opened.kernel(texts[0], "twice_0") is not kernels[0]
    assert list(opened._programs) == [texts[1], texts[0]]
    assert len(linecache.cache) == code


# ---- copies ------------------------------------------------------------------------------------------------
def called(compiled: dispatcher.CompiledOperator, x: np.ndarray) -> np.ndarray:
    """What an operator with a bound kernel makes; for another process."""
    return np.asarray(compiled(input=x))


@pytest.mark.parametrize("made", [copy.deepcopy, copy.copy, lambda compiled: pickle.loads(pickle.dumps(compiled))])
def test_a_copy_is_compiled_for_itself(install_backends: Install, made: Callable[[Any], Any]) -> None:
    fake = FakeBackend("fake")
    install_backends(fake)
    tensors = conv_tensors()
    compiled = dispatcher.compile(CONV, device="fake", stride=2, kernel=tensors["kernel"].astype(int).tolist())
    expected = compiled(input=tensors["input"])
    copied = made(compiled)
    assert fake.compiles == 1
    np.testing.assert_array_equal(copied(input=tensors["input"]), expected)
    assert (fake.compiles, copied.device) == (2, compiled.device)
    with pytest.raises(TypeError, match="copy or pickle the compiled operator"):
        made(compiled.prepare(input=tensors["input"]))


def test_a_copy_compiles_where_it_arrives(backend_device: Device) -> None:
    if backend_device.index or backend_device.backend == "cuda":
        pytest.skip("a process for each backend that needs no simulator")
    tensors = conv_tensors()
    compiled = dispatcher.compile(CONV, device=backend_device.id, kernel=tensors["kernel"])
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        result = pool.submit(called, compiled, tensors["input"]).result()
    np.testing.assert_array_equal(result, compiled(input=tensors["input"]))


def test_a_bound_array_on_a_device_comes_along_from_the_host(install_backends: Install) -> None:
    class OnDevice:
        """An array on a device, which NumPy may read or not."""

        def __init__(self, host: np.ndarray, readable: bool) -> None:
            self.host, self.readable = host, readable
            self.__cuda_array_interface__ = {"shape": host.shape, "typestr": "<f4", "data": (64, False), "version": 3}

        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            if not self.readable:
                raise TypeError("no implicit copies")
            return self.host

    install_backends(FakeBackend("fake", device_arrays=True))
    tensors = conv_tensors()
    expected = dispatcher.run(CONV, device="numpy", **tensors)
    readable, other = (dispatcher.compile(CONV, kernel=OnDevice(tensors["kernel"], yes)) for yes in (True, False))
    np.testing.assert_allclose(copy.deepcopy(readable)(input=tensors["input"]), expected, rtol=1e-5)
    with pytest.raises(InputError, match=r"tensor kernel lives on a CUDA device, and a copied or pickled operator"):
        pickle.dumps(other)
