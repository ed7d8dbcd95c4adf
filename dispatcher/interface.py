"""The backend interface, on one screen.

A backend is a module-level object with the three methods of :class:`Backend`; what it may offer besides are
:class:`Measurable`, :class:`Calibrated`, :class:`Tunable`, :class:`KernelHost` and :class:`Exporter`. Buffers, queues,
contexts and caches are its own business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from dispatcher.problem.messages import picked
from dispatcher.problem.model import Problem
from dispatcher.problem.operator import Operator
from dispatcher.problem.shown import Shown
from dispatcher.problem.userkernel import UserKernel

Tensors = Mapping[str, Any]


def bits_of(array: np.ndarray) -> np.ndarray:
    """``array``, or where it holds bfloat16, the same memory as 16-bit integers: drivers' bindings know no bfloat16."""
    return array.view(np.uint16) if array.dtype.kind == "V" else array  # its name takes NumPy far longer to say


@dataclass(frozen=True, repr=False)
class Device(Shown):
    """One device of one backend, usable or not.

    Attributes:
        backend: ``cuda``, ``opencl`` or ``numpy``.
        index: position among the backend's devices.
        name: the device's name, with what tells it from its twins (platform, version).
        kind: ``gpu``, ``cpu`` or ``reference``.
        available: True when it can be opened.
        reason: why it is not available; None when it is.
        facts: what is known of it (compute units, memory in bytes, versions, …), for people.
    """

    backend: str
    index: int
    name: str
    kind: Literal["gpu", "cpu", "reference", "unknown"]
    available: bool = True
    reason: str | None = None
    facts: Mapping[str, str | int | float] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """What a user writes to name it, such as ``opencl:1``."""
        return self.backend if self.kind == "reference" else f"{self.backend}:{self.index}"

    def _headline(self) -> str:
        return f"{self.id} ({self.name})" if self.available else f"{self.id}, not usable: {self.reason}"

    def _facts(self) -> Mapping[str, object]:
        return {"kind": self.kind, **self.facts}


def device_dict(device: Device) -> dict[str, Any]:
    """A device, ready for JSON."""
    return picked(device, "id", "backend", "index", "name", "kind", "available", "reason", "facts")


@dataclass
class Timings:
    """Where one call spent its time, in seconds.

    Attributes:
        upload_s: copying the inputs to the device; with ``shared_memory``, handing them over.
        kernel_s: from the start of the first launch to the end of the last one, on ``clock``; 0 where that is
            not known.
        download_s: copying the result back; with ``shared_memory``, making it visible to the host.
        launches: (kernel name, seconds) of each launch, on ``clock``.
        clock: ``device`` for events that the device records, ``host`` for ``time.perf_counter``; empty where
            nothing was measured.
        shared_memory: the device works in the host's memory, so that nothing is copied.
        parts: (device or empty, start on ``time.perf_counter``, timings) of a call that ran in parts; the
            dispatcher fills it in, backends leave it alone.
    """

    upload_s: float = 0.0
    kernel_s: float = 0.0
    download_s: float = 0.0
    launches: list[tuple[str, float]] = field(default_factory=list)
    clock: Literal["", "device", "host"] = ""
    shared_memory: bool = False
    parts: list[tuple[str, float, Timings]] = field(default_factory=list)


@dataclass(frozen=True)
class Finding:
    """One thing that ``dispatcher doctor`` looked at.

    Attributes:
        topic: what it belongs to, such as ``opencl``.
        subject: what was looked for.
        verdict: ``ok``; ``note`` for what may be meant so; ``problem`` for what keeps something from working.
        detail: what was found.
        remedy: the command or the step that would fix it; empty where there is nothing to fix.
    """

    topic: str
    subject: str
    verdict: Literal["ok", "note", "problem"]
    detail: str
    remedy: str = ""


@dataclass(frozen=True)
class PlannedLaunch:
    """One kernel launch of a plan, for people: what it computes, how, and why it ends where it ends.

    ``rejected`` holds other implementations that were considered, each with the reason why it was not taken.
    """

    name: str
    steps: tuple[str, ...]
    algorithm: str
    detail: Mapping[str, str | int | float] = field(default_factory=dict)
    note: str = ""
    rejected: tuple[tuple[str, str], ...] = ()


class Executable(Protocol):
    """A compiled operator on one device: reusable, thread-safe, holds packed weights and scratch."""

    @property
    def launches(self) -> Sequence[PlannedLaunch]:
        """The launches that one call makes, in order."""

    def __call__(self, tensors: Tensors, output: np.ndarray | None = None, timings: Timings | None = None) -> Any:
        """Run once and wait for the result, or leave it to a stream, where the caller or its arrays on the device name
        one.

        Args:
            tensors: every input tensor by parameter name, read-only C-contiguous NumPy arrays of the
                operator's dtype and shapes; a tensor that was bound at compile time is the same object in
                every call (a backend that sets ``device_arrays`` also gets arrays that live on its device).
                They are not modified and not kept.
            output: where to put the result (C-contiguous, right shape and dtype), or None for a new array.
            timings: filled in when given.

        An exception may break it off at any point (``KeyboardInterrupt``, ``MemoryError``). Nothing is in flight any
        more then, and the next call is right.

        Raises:
            KernelError: a kernel failed; the message names it.
        """


class Backend(Protocol):
    """What the dispatcher knows of a backend."""

    name: str

    def probe(self) -> Sequence[Device]:
        """Every device, or one unavailable device that holds the reason. Opens them; never raises."""

    def supports(self, operator: Operator, device: Device) -> str | None:
        """None when ``device`` can run ``operator``, else the reason why not."""

    def compile(self, operator: Operator, device: Device, options: Mapping[str, Any]) -> Executable:
        """Build what is needed to run ``operator`` on ``device``.

        Args:
            options: tuning choices such as ``algorithm``; a backend refuses keys it does not know.

        Raises:
            InputError: an option is unknown or has a wrong value.
            BuildError: the device's compiler refused a kernel.
        """


@dataclass(frozen=True)
class Roofline:
    """What microbenchmarks measured that a device can do at best.

    Attributes:
        gflops: fused multiply-adds that depend on nothing else, two operations each, in 1e9 a second.
        gbytes_per_s: bytes read plus bytes written when copying an array that no cache holds, in 1e9 a second.
        dtype: of the multiply-adds.
        method: how that was measured, for people.
    """

    gflops: float
    gbytes_per_s: float
    dtype: str
    method: str


#: The fact of a device that says, for people, what :meth:`Calibrated.calibrate` found.
CALIBRATION = "calibration"


@runtime_checkable
class Calibrated(Protocol):
    """What a backend offers that chooses kernels by what its devices were measured to do."""

    def calibrate(self, device: Device) -> Mapping[str, str | int | float]:
        """Measure what kernels are chosen by, in a second or two.

        Called in a child process, after the device's self-test.

        Returns:
            Facts that ``device`` has from then on, :data:`CALIBRATION` among them; none where nothing is measured.
        """


@runtime_checkable
class Measurable(Protocol):
    """What a backend may offer to benchmarks on top of :class:`Backend`."""

    def roofline(self, device: Device, dtype: str) -> Roofline:
        """Measure what ``device`` can do at best; takes about a second.

        Args:
            dtype: of the tensors; the multiply-adds are in the type that such operators are computed in.

        Raises:
            DispatcherError: it cannot be measured.
        """

    def flush_caches(self, device: Device) -> None:
        """Empty the caches of a device that has memory of its own; nothing to do where it shares the host's."""


@runtime_checkable
class Tunable(Protocol):
    """What a backend offers whose options can be tuned."""

    def candidates(self, operator: Operator, device: Device) -> Sequence[Mapping[str, Any]]:
        """Options worth measuring; the first stand for the default without any tuning."""

    def remember(self, operator: Operator, device: Device, options: Mapping[str, Any], gain: float) -> bool | None:
        """Use ``options``, one of the candidates, for such operators on ``device`` from now on.

        Returns:
            False where that cannot be kept.
        """


@dataclass(frozen=True)
class ExportRequest:
    """What a program that runs without us has to do.

    Attributes:
        problem: what it computes.
        cases: operators that get the kernels that we would run, by name.
        general: for all other sizes, operators that are bound to symbols (:mod:`dispatcher.ops.symbols`), each with the
            values that some sizes must have; empty where the cases are all.
        device_class: what the cases are tuned for; empty for the backend's usual one.
    """

    problem: Problem
    cases: Mapping[str, Operator]
    general: Sequence[tuple[Mapping[str, int], Operator]]
    device_class: str = ""


#: Bytes before and after each tensor on the device.
MARGIN_BYTES = 4096
#: The value of each of them at first. A float of any width that is made of such bytes is NaN, so that what a kernel
#: reads there shows in its result.
MARGIN = 0xFF


class LoadedKernel(Protocol):
    """A kernel that is built and ready to run, with its tensors in the device's memory."""

    def place(self, name: str, array: np.ndarray, margin: int = MARGIN) -> None:
        """Put ``array`` into memory of its own as parameter ``name``, with :data:`MARGIN_BYTES` on both sides.

        Args:
            margin: value of these bytes.

        Raises:
            DeviceMemoryError: the device has no room for it.
        """

    def poison(self, name: str) -> None:
        """Fill the tensor of parameter ``name`` with NaN, and leave the margins as they are."""

    def fetch(self, name: str, array: np.ndarray) -> tuple[bytes, bytes]:
        """Copy the tensor of parameter ``name`` into ``array``; returns what is in the margins."""

    def launch(self, numbers: Mapping[str, int | float]) -> float | None:
        """Run once with these sizes and doubles, and wait for the end.

        Returns:
            Seconds on the device's clock; None where it does not tell.

        Raises:
            KernelError: it failed.
        """


@runtime_checkable
class Exporter(Protocol):
    """What a backend offers whose programs run without us too."""

    def export(self, request: ExportRequest) -> Any:
        """The programs, as the backend's language has them; :mod:`dispatcher.export` knows what comes of each backend.

        Raises:
            InputError: it cannot export that, or knows no such device class.
        """


@runtime_checkable
class KernelHost(Protocol):
    """What a backend offers that runs kernels of its users."""

    def load_kernel(self, kernel: UserKernel, device: Device, scratch: Path) -> LoadedKernel:
        """Build ``kernel`` for ``device``. Called in a process of its own, since such a kernel may crash or hang.

        Args:
            scratch: a folder for files, which goes away afterwards.

        Raises:
            InputError: it has no such function, or one with other parameters, or sizes that the device refuses.
            DeviceError: the device cannot run such kernels.
            BuildError: the compiler refused it.
        """

    def check_kernel(self, kernel: UserKernel, device: Device, scratch: Path) -> str:
        """Build ``kernel`` where no device is usable, ``device`` for instance, as far as anything here can.

        Arguments and errors are those of :meth:`load_kernel`; with nothing to build it with, a DeviceError.

        Returns:
            What it was built for, such as ``for compute capability 9.0``.
        """
