"""Everything public comes back equal from pickle and copy, in this process and in others."""

from __future__ import annotations

import copy
import math
import multiprocessing
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fakes import CONV, conv_tensors

import dispatcher
from dispatcher.check.comparison import Comparison, refusal
from dispatcher.check.judging import Check
from dispatcher.device.selection import Choice
from dispatcher.device.splitting import join
from dispatcher.errors import BusyError
from dispatcher.files import NotRegularError, TooLargeError
from dispatcher.interface import Device, Finding, Roofline, Timings
from dispatcher.problem.arguments import IncompleteError
from dispatcher.problem.userkernel import UserKernel
from dispatcher.timing.results import Condition, Failure, PeerBenchmark, Race
from dispatcher.timing.sampling import Times
from dispatcher.timing.tuning import Candidate

DEVICE = Device("opencl", 1, "One", "cpu", facts={"bytes": 1 << 33})
MAPPING: dict[str, Any] = {
    "name": "made-up",
    "parameters": [
        {"name": "x", "type": "tensor", "const": True, "shape": ["n", 1, 1, 1, "2 * n"]},
        {"name": "y", "type": "tensor", "const": False},
        {"name": "n", "type": "size_t", "default": 3},
    ],
    "pipeline": [{"op": "scale", "by": 0.5}],
    "cases": {"small": {"n": 2}},
}
#: What compiles again where it arrives, and is equal to itself alone; test_api.py and others copy it.
ELSEWHERE = {"CompiledOperator"}


def loaded() -> dispatcher.Problem:
    return dispatcher.load_problem(MAPPING)


def benchmark() -> dispatcher.Benchmark:
    condition = Condition(Times((0.25, 0.5)), upload=Times((0.125,), noisy=True))
    measured: Any = (value_of("Operator"), "torch", None, 0.1, 0.2, condition, condition, "host", "", True)
    roofline = Roofline(10.0, 20.0, "float32", "guessed")
    return dispatcher.Benchmark(*measured, device=DEVICE, roofline=roofline, peers=(PeerBenchmark(*measured),))


def judgement() -> dispatcher.Judgement:
    kernel = UserKernel("k.cl", "text", "/", "solution", (("x", "input"),), "float32", (4,), None, ("-w",))
    check = Check("signed", "first", False, "wrong", refusal("another shape"))
    return dispatcher.Judgement(
        value_of("Operator"), kernel, None, 0, DEVICE, (("cuda", "why"),), "wrong", checks=(check,)
    )


def tuned() -> dispatcher.TuneResult:
    candidates = (Candidate({}, 0.1), Candidate({"box": "2x8"}, None, "slow"))
    return dispatcher.TuneResult("opencl:0", CONV, candidates, {"box": "2x8"}, 1.5, "host")


#: How a value of each public class is made.
MAKERS: dict[str, Callable[[], Any]] = {
    "Benchmark": benchmark,
    "Device": lambda: join("both", [DEVICE, Device("opencl", 2, "Two", "gpu", False, "it is broken")]),
    "Diagnosis": lambda: dispatcher.Diagnosis((Finding("host", "memory", "ok", "much"),), (DEVICE,), (DEVICE,)),
    "Explanation": lambda: dispatcher.explain(CONV, device="numpy", case="sample"),
    "Judgement": judgement,
    "Operator": lambda: dispatcher.explain(MAPPING, device="numpy").operator,
    "Problem": loaded,
    "TuneResult": tuned,
    "Verification": lambda: dispatcher.verify(MAPPING, device="numpy", case="small")[0],
}
#: What public objects hold, or functions give and raise, beside.
MORE: dict[str, Callable[[], Any]] = {
    "bundled": lambda: dispatcher.load_problem(CONV),
    "choice": lambda: dispatcher.compile(CONV, device="numpy").prepare(**conv_tensors()).choice,
    "comparison": lambda: Comparison(False, math.nan, math.inf, -math.nan, 0.1, (0, 1), math.nan),
    "race": lambda: Race((benchmark(),), (), (Failure("cuda", "why", dispatcher.DeviceError("why")),), 1, True, None),
    "timings": lambda: Timings(1.0, 2.0, launches=[("a", 0.5)], parts=[("", 0.0, Timings())]),
    **{each.__name__: lambda each=each: each("one\ntwo") for each in (BusyError, IncompleteError, NotRegularError)},
    "log": lambda: dispatcher.BuildError("refused", "a log\nof two lines"),
    "size": lambda: TooLargeError(12),
}


def public_classes() -> list[str]:
    return [name for name in dispatcher.__all__ if isinstance(getattr(dispatcher, name), type)]


def value_of(name: str) -> Any:
    if name in MORE:
        return MORE[name]()
    kind = getattr(dispatcher, name)
    return kind("a message\r\n\udcff") if issubclass(kind, BaseException) else MAKERS[name]()


def said(value: Any) -> Any:
    """What has to be the same of a copy: exceptions are equal to themselves alone."""
    if isinstance(value, BaseException):
        return type(value), str(value), value.args, vars(value)
    return value


@pytest.mark.parametrize("name", [*(name for name in public_classes() if name not in ELSEWHERE), *MORE])
def test_a_copy_is_equal(name: str) -> None:
    value = value_of(name)
    copies = [copy.copy(value), copy.deepcopy(value)]
    copies += [pickle.loads(pickle.dumps(value, protocol)) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    for other in copies:
        assert said(other) == said(value)
        assert repr(other) == repr(value) or isinstance(value, Choice)  # whose backend has no text of its own
        if hasattr(value, "as_dict"):
            assert repr(other.as_dict()) == repr(value.as_dict())  # NaN is not equal to itself


def at_work(problem: dispatcher.Problem) -> dispatcher.Verification:
    """What another process does with a problem that it was sent."""
    if problem.name == "made-up":
        return dispatcher.verify(problem, device="numpy", case=None)[0]
    raise dispatcher.BuildError(f"{problem.name} is refused", "the log")


def test_problems_results_and_errors_pass_between_processes() -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        result = pool.submit(at_work, loaded())
        refused = pool.submit(at_work, dispatcher.load_problem(CONV))
        assert result.result() == dispatcher.verify(loaded(), device="numpy", case=None)[0]
        with pytest.raises(dispatcher.BuildError, match=f"{CONV} is refused") as caught:
            refused.result()
    assert caught.value.log == "the log" and isinstance(dispatcher.load_problem(CONV).path, Path)
