"""Worker threads of CPU runtimes have processors of their own while a call lasts, and then those they had before."""

from __future__ import annotations

import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

import dispatcher
from dispatcher.interface import Device
from tests.fakes import conv_tensors

pytest.importorskip("pyopencl")

from dispatcher.backends.opencl import executable, workers

CONV = "conv-transpose-3d-asym-input-sq-kernel"


class System:
    """Threads 1, 2, ... are workers that may run on some processors, and 0 is the caller, who runs on ``here``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, masks: list[set[int]], here: int = 0) -> None:
        self.masks, self.here, self.calls = dict(enumerate(masks)), here, 0
        system = {"sched_getaffinity": self.allowed, "sched_setaffinity": self.restrict}
        for name, function in system.items():
            monkeypatch.setattr(workers.os, name, function, raising=False)
        monkeypatch.setattr(workers, "_libc", lambda: SimpleNamespace(sched_getcpu=lambda: self.here))
        monkeypatch.setattr(workers, "AWAKE_S", -1.0)
        listed = iter([{0, 99}, {0, 99, *range(1, len(masks)), threading.get_native_id()}])
        monkeypatch.setattr(workers, "_threads", lambda: next(listed))
        self.workers = workers.Workers()
        with self.workers.starting():
            pass

    def allowed(self, thread: int) -> set[int]:
        if thread not in self.masks:
            raise ProcessLookupError
        return self.masks[thread]

    def restrict(self, thread: int, mask: set[int]) -> None:
        self.calls += 1
        assert self.allowed(thread)
        self.masks[thread] = set(mask)

    def during(self) -> list[set[int]]:
        """What the workers may run on while a call lasts; checks that it is as before afterwards."""
        before = dict(self.masks)
        with pytest.raises(KeyError), self.workers.apart():
            found = [self.masks[thread] for thread in sorted(self.masks) if thread]
            raise KeyError
        assert self.masks == before
        return found


@pytest.mark.parametrize(
    ("masks", "here", "expected"),
    [
        ([{0, 1}, {0, 1}], 0, [{1}]),  # Intel's runtime: the caller computes too
        ([{0, 1}, {0, 1}], 1, [{0}]),
        ([{0, 1}, {1}], 1, [{0}]),  # its worker has a processor, which is the caller's
        ([{0}, {0, 1}], 0, [{1}]),
        ([{0, 1}, {0, 1}, {0, 1}], 0, [{1}, {0}]),  # PoCL: the caller sleeps
        ([{0, 1, 2}, {0, 1, 2}, {0, 1, 2}], 1, [{0}, {2}]),
        ([{1}, {1}], 1, [{1}]),  # a process with one processor
        ([{0, 1, 2, 3}, {0, 1, 2, 3}], 0, [{0, 1, 2, 3}]),  # more processors than the runtime uses
        ([set(range(9))] * 9, 0, [set(range(9))] * 8),  # a large machine
    ],
)
def test_each_has_a_processor_of_its_own(
    masks: list[set[int]], here: int, expected: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert System(monkeypatch, masks, here).during() == expected


def test_nothing_is_done_while_they_are_awake_or_kept_apart_or_when_one_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    system = System(monkeypatch, [{0, 1}, {0, 1}])
    with system.workers.apart():
        assert system.calls == 1
        assert system.during() == [{1}]  # a call of another thread
        assert system.calls == 1
    monkeypatch.setattr(workers, "AWAKE_S", 1000.0)
    assert system.during() == [{0, 1}]
    monkeypatch.setattr(workers, "AWAKE_S", -1.0)
    assert system.during() == [{1}]
    system.masks = {0: {0, 1}}
    assert system.during() == []


def test_calls_of_some_milliseconds_keep_them_apart(opencl: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    from dispatcher.backends.opencl import BACKEND

    seen: list[str] = []
    x, w = conv_tensors().values()
    monkeypatch.setattr(BACKEND._runtime(opencl).workers, "apart", lambda: seen.append("apart") or threading.Lock())
    dispatcher.compile(CONV, device=opencl.id, kernel=w)(input=x)
    assert not seen
    monkeypatch.setattr(executable, "KEPT_APART", range(1 << 33))
    dispatcher.compile(CONV, device=opencl.id, kernel=w)(input=x)
    assert seen == (["apart"] if BACKEND._runtime(opencl).facts.cpu else [])


FIND = """
from dispatcher.backends.opencl.runtime import OpenClRuntime, find_devices
for each in find_devices():
    if each.kind == "cpu" and "oclgrind" not in each.platform.name.lower():
        runtime = OpenClRuntime(each.platform, each.device)
        print(runtime.facts.compute_units - len(runtime.workers._threads))
"""


def test_workers_are_found(opencl: Device) -> None:
    found = subprocess.run([sys.executable, "-c", FIND], capture_output=True, text=True, check=True)
    assert {int(each) for each in found.stdout.split()} <= {0, 1}  # PoCL's and Intel's
