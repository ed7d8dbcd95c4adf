"""Calls in the streams of other libraries, and in CUDA graphs, on a simulator that puts off all work and runs it in any
order that streams and events allow. A stand-in takes PyTorch's place (:mod:`tests.cuda_torch`)."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import dispatcher
from dispatcher.backends.cuda import driver
from dispatcher.backends.cuda.driver import Context, DeviceArray
from dispatcher.errors import InputError
from dispatcher.interface import Timings
from dispatcher.problem.torchtensors import DeviceView
from tests import cuda_torch as torch
from tests.cuda_support import Foreign, OnDevice, compiled, device, machine, simulator_only
from tests.cudasim import emulate
from tests.strategies import tensors_of
from tests.test_cuda_device import SMALL, close, reference

pytestmark = simulator_only
#: Ways to run what streams hold: as late as possible, and in some random orders.
ORDERS = ("late", 1, 2)
GIVEN = tensors_of(SMALL)
OTHER = {name: -2 * array for name, array in tensors_of(SMALL).items()}


def settle() -> None:
    """Let go of all tensors and wait for all work, whatever came of it."""
    gc.collect()
    context = driver.context(0)
    with context.active(), suppress(context.driver.Error):
        context.driver.Context.synchronize()
    torch.forget()


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    device()
    torch.install(monkeypatch)
    yield
    settle()


def on_device(arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(array) for name, array in arrays.items()}


def operator() -> dispatcher.CompiledOperator:
    return dispatcher.compile(SMALL.problem, device="cuda")


def reuse_free_memory() -> None:
    """What other calls may do at any time: write to all memory that is free, in the order of those who have it."""
    context = driver.context(0)
    with context.active(), context.stream() as own:
        places = [(own, context._free), *((lane.stream, lane.free) for lane in context._lanes.values())]
        for where, free in places:
            for size, blocks in free.items():
                for block in blocks:
                    context.driver.memset_d8_async(int(block), 255, size, where)


# ---- scenarios with tensors of PyTorch ---------------------------------------------------------------------
def between_other_work() -> None:
    with torch.stream(torch.Stream()):
        result = operator()(**on_device(GIVEN))  # behind the copies that make the tensors, which are dropped at once
        reuse_free_memory()
        taken = result.clone()
        del result
        close(taken.numpy(), reference(SMALL, GIVEN))


def tensors_of_another_stream() -> None:
    mine, other = torch.Stream(), torch.Stream()
    with torch.stream(other):
        tensors = on_device(GIVEN)
    with torch.stream(mine):
        mine.wait_stream(other)
        result = operator()(**tensors)
    tensors.clear()
    gc.collect()
    other.synchronize()
    with torch.stream(mine):
        close(result.numpy(), reference(SMALL, GIVEN))


def two_streams() -> None:
    block, streams, results = operator(), (torch.Stream(), torch.Stream()), []
    for _ in range(2):
        for where, arrays in zip(streams, (GIVEN, OTHER), strict=True):
            with torch.stream(where):
                results.append((where, block(**on_device(arrays)), reference(SMALL, arrays)))
    for where, result, wanted in reversed(results):
        with torch.stream(where):
            close(result.numpy(), wanted)


def another_stream_by_the_option() -> None:
    block = dispatcher.compile(SMALL.problem, device="cuda", options={"stream": torch.Stream()})
    with torch.stream(torch.Stream()):
        result = block(**on_device(GIVEN))
        close(result.clone().numpy(), reference(SMALL, GIVEN))


def bound_tensors() -> None:
    with torch.stream(torch.Stream()):
        block = dispatcher.compile(SMALL.problem, device="cuda", w=torch.tensor(GIVEN["w"]))
    mine = torch.Stream()
    with torch.stream(mine):
        first = block(**{name: tensor for name, tensor in on_device(GIVEN).items() if name != "w"})
    with torch.stream(torch.Stream()):
        block.update(w=torch.tensor(OTHER["w"]))  # drops the old one
        torch.current_stream().synchronize()
    with torch.stream(mine):
        close(first.numpy(), reference(SMALL, GIVEN))


def a_graph() -> None:
    block, where, graph = operator(), torch.Stream(), torch.CUDAGraph()
    with torch.stream(where):
        tensors = on_device(GIVEN)
        block(**tensors)
    with graph.capture(where):
        result = block(**tensors)
        again = block(**{**tensors, "x": tensors["x"].clone()})
    del block
    for arrays in (OTHER, GIVEN):
        with torch.stream(where):
            for name, array in arrays.items():
                tensors[name].copy_(array)
            dispatcher.run(SMALL.problem, device="cuda", **on_device(OTHER))
            reuse_free_memory()
            graph.replay()
            close(result.numpy(), reference(SMALL, arrays))
            close(again.numpy(), reference(SMALL, arrays))


# ---- scenarios with other arrays ---------------------------------------------------------------------------
class Own(OnDevice):
    """An array of another library, filled in ``stream``, which it names where ``named``; it gives its memory back as
    soon as nobody refers to it."""

    def __init__(self, array: np.ndarray, stream: Any, named: bool = True) -> None:
        Foreign.__init__(self, 0, array.shape, array.dtype, None, array.nbytes)  # of NaN
        self.stream, self.named = stream, named
        with self.context.active():
            self.context.driver.memcpy_htod_async(self.address, np.ascontiguousarray(array), stream)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**super().__cuda_array_interface__, "stream": self.stream.handle if self.named else None}

    def get(self) -> np.ndarray:
        """A copy on the host, behind what its stream holds."""
        result = np.empty(self.shape, self.dtype)
        with self.context.active():
            self.context.driver.memcpy_dtoh_async(result, self.address, self.stream)
            self.stream.synchronize()
        return result

    def __del__(self) -> None:
        self.free()


def new_stream() -> Any:
    with driver.context(0).active():
        return driver.context(0).driver.Stream(1)


def the_stream_of_an_output() -> None:
    run, there = compiled(SMALL), []
    for arrays in (GIVEN, OTHER, GIVEN):
        where = new_stream()
        output = Own(np.zeros(SMALL.output_shape, np.float32), where)
        run({name: Own(array, where) for name, array in arrays.items()}, output)
        there.append((output, reference(SMALL, arrays)))
    del run
    gc.collect()
    reuse_free_memory()
    for output, wanted in reversed(there):
        close(output.get(), wanted)


def the_stream_of_an_option() -> None:
    where, other = new_stream(), new_stream()
    run = compiled(SMALL, stream=where)
    # The weights' library says nothing of streams: they are ready, or filled in the stream of the option.
    first = run({name: Own(array, where, named=name != "w") for name, array in GIVEN.items()})
    assert isinstance(first, DeviceArray)
    made = [run({name: Own(array, other if name == "x" else where) for name, array in OTHER.items()}) for _ in range(2)]
    second = Own(np.zeros(SMALL.output_shape, np.float32), other)
    with second.context.active():
        first.__dlpack__(stream=other.handle)
        driver.context(0).driver.memcpy_dtod_async(second.address, first._pointer, first.nbytes, other)
    close(second.get(), reference(SMALL, GIVEN))
    del first
    for result in made:
        close(result.get(), reference(SMALL, OTHER))
    close(run(GIVEN), reference(SMALL, GIVEN))


def a_graph_of_other_arrays() -> None:
    where = new_stream()
    run, graph = compiled(SMALL, stream=where), torch.CUDAGraph()
    x = Own(GIVEN["x"], where)
    given = {**GIVEN, "x": x, "b": Own(GIVEN["b"], where)}
    w = Own(2 * GIVEN["w"], where)  # packed in the graph
    close(run(given).get(), reference(SMALL, GIVEN))  # packs the weights, which lie in host memory
    with graph.capture(torch.Stream(where.handle)):
        result, twice = run(given), run({**given, "w": w})
    other = {**given, "w": OTHER["w"]}
    run(other)  # packs other ones
    for array in (GIVEN["x"], OTHER["x"]):
        with x.context.active():
            x.context.driver.memcpy_htod_async(x.address, array, where)
            reuse_free_memory()
            x.context.trim()
        with torch.stream(torch.Stream(where.handle)):
            graph.replay()
        with x.context.active():
            where.synchronize()
        close(result.get(), reference(SMALL, {**GIVEN, "x": array}))
        close(twice.get(), reference(SMALL, {**GIVEN, "x": array, "w": 2 * GIVEN["w"]}))
        close(run(other).get(), reference(SMALL, {**GIVEN, "x": array, "w": OTHER["w"]}))


SCENARIOS = (
    between_other_work, tensors_of_another_stream, two_streams, another_stream_by_the_option, bound_tensors, a_graph,
    the_stream_of_an_output, the_stream_of_an_option, a_graph_of_other_arrays,
)  # fmt: skip


def run_late(scenario: Callable[[], None]) -> None:
    """Run a scenario in every order."""
    for order in ORDERS:
        with emulate(streams=order):
            scenario()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_whatever_the_order(scenario: Callable[[], None]) -> None:
    run_late(scenario)


# ---- the scenarios find faults -----------------------------------------------------------------------------
def _lanes() -> set[int]:
    context = driver.context(0)
    return {lane.stream.handle for lane in (*context._lanes.values(), *context._captured.values())}


def _order_unless(wrong: Callable[[int, int], bool]) -> Callable[..., None]:
    order = Context.order
    return lambda self, first, then: None if wrong(first, then) else order(self, first, then)


ALLOCATE = Context.allocate
FAULTS: dict[str, tuple[Any, str, Any, tuple[Callable[[], None], ...]]] = {
    "nothing waits for what comes before": (
        Context, "order", _order_unless(lambda first, then: then in _lanes()),
        (between_other_work, a_graph, the_stream_of_an_output, the_stream_of_an_option),
    ),
    "nothing waits for the call": (
        Context, "order", _order_unless(lambda first, then: first in _lanes()),
        (between_other_work, another_stream_by_the_option, a_graph, the_stream_of_an_output, the_stream_of_an_option),
    ),
    "streams share memory": (
        Context, "allocate", lambda self, sizes, free=None: ALLOCATE(self, sizes),
        (the_stream_of_an_output, a_graph_of_other_arrays),
    ),
    "nothing is kept": (
        Context, "keep", lambda self, lane, *objects: None,
        (between_other_work, a_graph, the_stream_of_an_output, the_stream_of_an_option, a_graph_of_other_arrays),
    ),
    "PyTorch does not know of the stream": (
        torch.Tensor, "record_stream", lambda self, other: None, (tensors_of_another_stream, bound_tensors),
    ),
    "bound tensors may be on their way": (
        DeviceView, "copy", lambda self: DeviceView(self.tensor.clone(), self.dtype), (bound_tensors,),
    ),
    "a capture goes unnoticed": (
        Context, "capture", lambda self, handle: 0, (a_graph, a_graph_of_other_arrays),
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_shows(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name, wrong, scenarios = FAULTS[fault]
    monkeypatch.setattr(owner, name, wrong)
    for scenario in scenarios:
        with machine():
            passed = False
            with suppress(Exception):  # some calls fail, some results are wrong
                run_late(scenario)
                passed = True
            settle()
        assert not passed, scenario.__name__


def test_a_call_returns_before_its_work_is_done() -> None:
    where = new_stream()
    with emulate(streams="late"), torch.stream(torch.Stream(where.handle)):
        result = operator()(**on_device(GIVEN))
        with driver.context(0).active():
            assert not where.is_done()
        close(result.numpy(), reference(SMALL, GIVEN))
        del result  # before its stream


# ---- captures ----------------------------------------------------------------------------------------------
def test_what_cannot_be_captured_says_why() -> None:
    where = new_stream()
    run, graph = compiled(SMALL, stream=where), torch.CUDAGraph()
    there = {name: Own(array, where) for name, array in GIVEN.items()}
    elsewhere = compiled(SMALL)
    for call, reason in (
        (lambda: run({**there, "b": GIVEN["b"]}), "graph: b lies in host memory; give it on the device"),
        (lambda: run(GIVEN), "graph: x lies in host memory"),
        (lambda: run(there, None, Timings()), "graph: its times are wanted"),
        (lambda: run({**there, "w": GIVEN["w"]}), "graph: weight w in host memory is packed at the first call"),
        (lambda: elsewhere(there), "is being captured, but the call is not in that capture"),
    ):
        with graph.capture(torch.Stream(where.handle)):
            with pytest.raises(InputError, match=reason):
                call()
            result = run(there)
        graph.replay()
        with driver.context(0).active():
            driver.context(0).driver.Context.synchronize()
        close(result.get(), reference(SMALL, GIVEN))


def test_others_go_on_while_one_captures() -> None:
    """A capture forbids many calls to all threads, but not what they need here."""
    block, where, graph = operator(), torch.Stream(), torch.CUDAGraph()
    with torch.stream(where):
        tensors = on_device(GIVEN)
    results: list[np.ndarray] = []

    def work() -> None:
        with torch.stream(torch.Stream()):
            results.append(block(**on_device(OTHER)).numpy())
        results.append(block(**OTHER))

    with graph.capture(where):
        result = block(**tensors)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    with torch.stream(where):
        graph.replay()
        close(result.numpy(), reference(SMALL, GIVEN))
    assert len(results) == 2
    for each in results:
        close(each, reference(SMALL, OTHER))


def test_threads_with_streams_of_their_own() -> None:
    block, wrong = operator(), []

    def work(arrays: dict[str, np.ndarray]) -> None:
        with torch.stream(torch.Stream()):
            for _ in range(4):
                if not np.allclose(block(**on_device(arrays)).numpy(), reference(SMALL, arrays), 1e-4, 1e-4):
                    wrong.append(arrays)

    with emulate(streams=5):
        threads = [threading.Thread(target=work, args=(arrays,)) for arrays in (GIVEN, OTHER, GIVEN)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


def test_many_streams_share_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_LANES", 2)
    with machine():
        run_late(the_stream_of_an_output)
        assert len(driver.context(0)._lanes) == 2
        for _ in range(3):
            a_graph()
        assert (
            len({lane.stream.handle for lane in (*driver.context(0)._captured.values(), *driver.context(0)._graphs)})
            == 1
        )
        settle()


@pytest.mark.parametrize("form", ["method", "attribute", "cuda_stream", "handle", "ptr", "int"])
def test_streams_of_other_libraries(form: str) -> None:
    handle = torch.Stream().cuda_stream
    names = {"method": "__cuda_stream__", "attribute": "__cuda_stream__"}
    values = {"method": lambda self: (0, handle), "attribute": (0, handle)}
    stream = handle if form == "int" else type("Stream", (), {names.get(form, form): values.get(form, handle)})()
    with emulate(streams="late"):
        close(compiled(SMALL, stream=stream)(GIVEN), reference(SMALL, GIVEN))
    assert handle in driver.context(0)._lanes


# ---- the simulator itself ----------------------------------------------------------------------------------
def _value(address: Any, stream: Any) -> int:
    result = np.zeros(1, np.uint8)
    driver.context(0).driver.memcpy_dtoh_async(result, address, stream)
    stream.synchronize()
    return int(result[0])


def test_the_simulator_puts_work_off() -> None:
    cuda = driver.context(0).driver
    with emulate(streams="late"), driver.context(0).active():
        memory, event = cuda.mem_alloc(1), cuda.Event()
        free, other, blocking = cuda.Stream(1), cuda.Stream(1), cuda.Stream()
        cuda.memset_d8_async(memory, 7, 1, free)
        event.record(free)
        assert _value(memory, other) == 255 and not event.query()  # nobody has waited yet
        other.wait_for_event(event)
        assert _value(memory, other) == 7 and event.query()
        cuda.memset_d8_async(memory, 8, 1, free)
        cuda.memset_d8_async(memory, 9, 1, blocking)
        result = np.zeros(1, np.uint8)
        cuda.memcpy_dtoh(result, memory)  # by the default stream, for which blocking streams count
        assert result[0] == 9 and _value(memory, free) == 8
        cuda.memset_d8_async(memory, 1, 1, free)
        memory.free()
        with pytest.raises(cuda.Error, match="given back before its turn"):
            free.synchronize()


def test_the_simulator_refuses_what_captures_forbid(capfd: pytest.CaptureFixture[str]) -> None:
    context, where, mine, other = driver.context(0), torch.Stream(), new_stream(), new_stream()
    with context.active():
        waiting = context.driver.Event()
    for action, refused, end in (
        (lambda: context.driver.mem_alloc(1), "an allocation while a stream is captured", 901),
        (mine.synchronize, "cuStreamSynchronize while a stream is captured", 901),
        (where.synchronize, "waiting for a stream that is captured", 901),
        (lambda: context.order(other.handle, where.cuda_stream), "an event that is not captured", 901),
        (lambda: context.order(where.cuda_stream, mine.handle), "a stream of the capture was not joined", 904),
        (lambda: waiting.record(other), "", 0),
    ):
        context._context.push()  # as others do, who ask for no more freedom than threads have at first
        with suppress(RuntimeError, context.driver.Error, InputError), torch.CUDAGraph().capture(where):
            action()
        context.driver.Context.pop()
        assert refused in capfd.readouterr().err
        assert torch.CUDAGraph.status == end
