"""Which device runs an operator.

A device request is ``auto``, a backend (``opencl``: its first available device), ``backend:index``,
``backend:fragment`` (part of the device's name, case-blind), or several of these with commas, in order of
preference. ``all-of:opencl`` is every usable device of a backend, used as one. Without a request the
environment variable ``DISPATCHER_DEVICE`` holds, and without that ``auto``: GPUs before CPUs before the
reference, among these in the order of :data:`dispatcher.registry.BACKENDS`, and the devices of one backend by
measured speed, in their order where these are the same within the spread of the readings.

Before this process opens a device, a child process tries it out (see :mod:`dispatcher.device.selftest`); one that
does not survive that counts as unavailable.

A device that is named alone never falls back. ``auto`` and comma lists move on when a device is missing,
cannot run the operator, or fails to build or run it. Every device passed over is recorded with its reason,
and a failure is a :class:`FallbackWarning` too. Backends are imported and probed only when a request reaches
them.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dispatcher import registry
from dispatcher.device import selftest
from dispatcher.device.splitting import JoinedDevice, backend_of, compile_within_memory, join
from dispatcher.errors import (
    BuildError,
    DeviceError,
    DeviceMemoryError,
    DispatcherError,
    InputError,
    KernelError,
    first_line,
    suggest,
)
from dispatcher.interface import Backend, Device, Executable
from dispatcher.problem.messages import brief
from dispatcher.problem.operator import Operator

ENVIRONMENT = "DISPATCHER_DEVICE"

#: Before the colon of a request for every device of a backend.
ALL_OF = "all-of"

#: The kinds of device in the order in which ``auto`` tries them.
AUTO_KINDS = ("gpu", "cpu", "unknown", "reference")

_log = logging.getLogger(__name__)
_lock = threading.RLock()
_probed: dict[tuple[str, str], tuple[Device, ...]] = {}
_tested: dict[tuple[str, int], Device] = {}
_forked_with: dict[str, str] = {}  # backends that a parent process had opened: no driver survives a fork


def _after_fork() -> None:
    """In a child that was made by fork: the parent's threads are gone, and with them what they were doing."""
    global _lock  # noqa: PLW0603 (a thread that is gone may hold it)
    _lock = threading.RLock()
    for (name, _), found in _probed.items():
        if any(device.available and device.kind != "reference" for device in found):
            _forked_with[name] = (
                f"this process was forked from one that had looked at {name} devices, which drivers do not "
                "survive; use the multiprocessing method 'spawn', or fork before the first use"
            )


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class FallbackWarning(RuntimeWarning):
    """A device failed to build or run an operator, and another one was tried instead."""


@dataclass(frozen=True)
class Request:
    """A parsed device request.

    Attributes:
        text: as written.
        origin: ``device``, or the name of the environment variable it comes from; for messages.
        terms: (backend, selector) pairs; the selector is an index, a name fragment or empty, and the backend
            may be ``auto``, or ``all-of`` with a backend as the selector.
        members: the devices to use as one, as such pairs; the only term is then a bare ``all-of``.
    """

    text: str
    origin: str
    terms: tuple[tuple[str, str], ...]
    members: tuple[tuple[str, str], ...] = ()

    @property
    def named(self) -> bool:
        """True for one device without alternatives."""
        return len(self.terms) == 1 and self.terms[0][0] != "auto"


#: A device that a request reaches, with its id; or the reason why a part of the request gives none, with that part.
Candidate = tuple[str, Device | str]


@dataclass(frozen=True)
class Choice:
    """The device that runs an operator, ready to run it.

    Attributes:
        device: the device.
        backend: its backend.
        executable: the compiled operator; None for an empty one, which nothing has to run, and in a copy.
        skipped: (device or backend, reason) of each one that was preferred and passed over.
    """

    device: Device
    backend: Backend
    executable: Executable | None = field(compare=False)
    skipped: tuple[tuple[str, str], ...]

    def __reduce__(self) -> tuple[Any, ...]:
        """What was chosen and why can be copied and sent away; what runs it stays with its device."""
        return _copied_choice, (self.device, self.skipped)


def _copied_choice(device: Device, skipped: tuple[tuple[str, str], ...]) -> Choice:
    return Choice(device, backend_of(device), None, skipped)


def skipped_list(skipped: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    """Devices passed over, ready for JSON."""
    return [{"device": label, "reason": reason} for label, reason in skipped]


# ---- what there is -----------------------------------------------------------------------------------------
def devices(*, retest: bool = False) -> list[Device]:
    """Every device of every backend, usable or not, in the order of the backends.

    Args:
        retest: look for them and try them out again, whatever is known from earlier.
    """
    if retest:
        with _lock:
            _probed.clear()
            _tested.clear()
            for name in registry.BACKENDS:
                for device in _listed(name, retest):
                    tested(device, retest)
    return [device for name in registry.BACKENDS for device in backend_devices(name)]


def usable_devices() -> list[Device]:
    """The usable ones among :func:`devices`; with a warning where a fork took some from this process."""
    found = devices()
    for device in found:
        _passed_over(device.id, device.reason or "")
    return [device for device in found if device.available]


def backend_devices(name: str) -> tuple[Device, ...]:
    """The devices of one backend, looked for and tried out once in a process.

    A backend that cannot be imported or probed is one unavailable device that holds the reason.
    """
    return tuple(tested(device) for device in _listed(name))


def _listed(name: str, retest: bool = False) -> tuple[Device, ...]:
    """The devices of one backend, not tried out yet."""
    key = (name, registry.BACKENDS[name])
    with _lock:
        if name in _forked_with:
            return _unavailable(name, _forked_with[name])
        if key not in _probed:
            _probed[key] = _probe(name, retest)
        return _probed[key]


def tested(device: Device, retest: bool = False) -> Device:
    """``device`` with what its self-test found; unavailable when it does not survive one."""
    if not device.available or device.kind == "reference":
        return device
    module = registry.BACKENDS[device.backend]
    with _lock:
        known = _tested.get((module, device.index))
        if known is None:
            known = selftest.apply(device, selftest.try_device(device, module, again=retest))
            _tested[module, device.index] = known
        return known


def _probe(name: str, retest: bool) -> tuple[Device, ...]:
    module, origin = registry.BACKENDS[name], registry.origin(name)

    def killed(footprint: str) -> str:
        """What became of a child process that looked for devices; empty where it survived that."""
        listing = selftest.try_listing(module, footprint, again=retest)
        return listing.reason if listing is not None and listing.outcome in ("crashed", "hung") else ""

    # What others have written may end a process by being imported.
    reason = "" if origin is None else killed(origin)
    try:
        backend: Any = None if reason else registry.backend(name)
        if hasattr(backend, "footprint"):
            reason = killed(backend.footprint())
            if reason and hasattr(backend, "leave_out_deadly"):
                safe = backend.leave_out_deadly(lambda: not killed(backend.footprint()))
                reason = "" if safe else reason
    except (Exception, SystemExit) as error:  # a broken driver library may raise anything when it is imported
        if isinstance(error, InputError) and origin is None:  # a setting of self-tests
            raise
        return _unavailable(name, f"the {name} backend cannot be imported: {describe(error)}")
    if reason:
        advice = "`dispatcher doctor` shows what is installed, `dispatcher devices --retest` tries again"
        return _unavailable(name, f"looking for {name} devices {reason} in a child process; {advice}")
    try:
        found = tuple(backend.probe())
        strangers = [device.backend for device in found if device.backend != name]
    except (Exception, SystemExit) as error:
        return _unavailable(name, f"looking for {name} devices failed: {describe(error)}")
    if strangers:
        return _unavailable(name, f"{name} lists a device of the backend {strangers[0]!r}; expected {name!r}")
    return found or _unavailable(name, f"{name} found no device")


def _unavailable(name: str, reason: str) -> tuple[Device]:
    _log.info("%s", reason)
    return (Device(name, 0, name, "unknown", available=False, reason=reason),)


def describe(error: BaseException) -> str:
    """An error of any origin in one line."""
    line, kind = first_line(error), type(error).__name__
    return line if isinstance(error, DispatcherError) or line == kind else f"{kind}: {line}"


# ---- what is asked for -------------------------------------------------------------------------------------
def parse_request(device: str | Device | None, together: Sequence[str | Device] | None = None) -> Request:
    """Parse a device request; looks at no device.

    Args:
        device: a request, a device out of :func:`devices`, or None for the environment's or ``auto``.
        together: several devices to use as one, instead of ``device``.

    Raises:
        InputError: it is not a text, or both are given.
        DeviceError: it does not follow the grammar or names a backend that does not exist.
    """
    if isinstance(device, JoinedDevice) and together is None:
        return _parse_together(device.members)
    if together is not None:
        if device is not None:
            raise InputError(f"device is {brief(device)} and devices {brief(together)}; give one of them")
        return _parse_together(together)
    origin = "device"
    if isinstance(device, Device):
        device = device.id
    if device is None:
        device = os.environ.get(ENVIRONMENT, "").strip()
        origin = ENVIRONMENT if device else origin
        device = device or "auto"
    if not isinstance(device, str):
        raise InputError(f"device is {brief(device)}; expected a text such as 'auto', 'opencl' or 'cuda:0'")
    return Request(device, origin, tuple(_parse_term(device, origin, term) for term in device.split(",")))


def _parse_together(together: Sequence[str | Device]) -> Request:
    """The request for several devices used as one."""
    if isinstance(together, str) or not isinstance(together, Sequence) or not together:
        raise InputError(f"devices is {brief(together)}; expected a list such as ['opencl:0', 'opencl:1']")
    texts = [each.id if isinstance(each, Device) else each for each in together]
    for text in texts:
        if not isinstance(text, str):
            raise InputError(f"devices holds {brief(text)}; expected texts such as 'opencl:0'")
    members = tuple(_parse_term(text, "devices", text) for text in texts)
    if any(name in ("auto", ALL_OF) for name, _ in members):
        raise DeviceError(f"devices is {brief(texts)}; expected names of single devices, such as 'opencl:0'")
    return Request("+".join(texts), "devices", ((ALL_OF, ""),), members)


def _parse_term(text: str, origin: str, term: str) -> tuple[str, str]:
    name, colon, selector = (part.strip() for part in term.partition(":"))
    name = name.lower()
    if name == ALL_OF and selector.lower() in registry.BACKENDS:
        return name, selector.lower()
    if (name == "auto" and not colon) or (name in registry.BACKENDS and bool(colon) == bool(selector)):
        return name, selector
    if name in registry.BACKENDS:
        wrong = f"nothing follows {name}:"
    elif name == "auto":
        wrong = "auto takes no index or name"
    elif name == ALL_OF:
        got = f", and {brief(selector)} is none" if selector else ""
        wrong = f"{ALL_OF}: wants the name of a backend{got}"
    else:
        wrong = f"there is no backend {brief(name)}" if name else "a name is missing"
    backends, meant = ", ".join(registry.BACKENDS), suggest(name, ("auto", *registry.BACKENDS))
    raise DeviceError(
        f"{origin} is {brief(text)}: {wrong}; expected auto or one of {backends}, which may be followed by "
        f":index or :part-of-a-name, all-of:backend, or several of these with commas{meant}"
    )


def candidates(request: Request) -> Iterator[Candidate]:
    """The devices that a request reaches, best first, and the reasons where it reaches none.

    Raises:
        DeviceError: a device was named alone and is not there or not usable.
    """
    for backend, selector in request.terms:
        if backend == "auto":
            yield from _auto_candidates()
            continue
        label = f"{backend}:{selector}" if selector else backend
        try:
            if backend == ALL_OF:
                device, missing = _find_together(request, selector)
                yield from missing
            else:
                device = _find(backend, selector)
        except DeviceError as error:
            if request.named:
                raise DeviceError(f"{request.origin} {request.text}: {error}") from None
            yield _passed_over(label, str(error))
        else:
            yield device.id, device


def _passed_over(label: str, reason: str) -> Candidate:
    """A part of a request that gives no device; a warning too, where a fork took it from this process."""
    if any(text in reason for text in _forked_with.values()):
        warnings.warn(f"{label} is passed over: {reason}", FallbackWarning, stacklevel=2)
    return label, reason


def _auto_candidates() -> Iterator[Candidate]:
    reported: set[str] = set()
    for kind in AUTO_KINDS:
        for name in registry.BACKENDS:
            found = _listed(name)
            tried = [tested(device) if device.kind == kind else device for device in found]
            for device in tried:
                label = name if len(found) == 1 else device.id
                if not device.available and label not in reported:
                    reported.add(label)
                    yield _passed_over(label, device.reason or "it is not available")
            usable = [device for device in tried if device.available and device.kind == kind]
            for device in selftest.fastest_first(usable):
                yield device.id, device


def _find_together(request: Request, backend: str) -> tuple[Device, list[Candidate]]:
    """The devices of a request as one device, and those of a backend that are not usable.

    Raises:
        DeviceError: a device that was named is not there or not usable, or a backend has none.
    """
    if request.members:
        return join(request.text, [_find(name, selector) for name, selector in request.members]), []
    found = backend_devices(backend)
    _find(backend, "")
    missing: list[Candidate] = [(each.id, each.reason or "") for each in found if not each.available]
    return join(f"{ALL_OF}:{backend}", [device for device in found if device.available]), missing


def _find(backend: str, selector: str) -> Device:
    """The one device of ``backend`` that ``selector`` means.

    Raises:
        DeviceError: there is none, it is not usable, or there are several.
    """
    found = _listed(backend)
    listed = [device for device in found if device.available]
    if not selector or not listed:
        for device in listed:
            if tested(device).available:
                return tested(device)
        reasons = [tested(device).reason or "it is not available" for device in found]
        raise DeviceError("; ".join(dict.fromkeys(reasons)))
    if selector.isdecimal():
        matches = [device for device in found if device.index == int(selector)]
        if not matches:
            count = "1 device" if len(found) == 1 else f"{len(found)} devices"
            raise DeviceError(f"there is no device {selector}; {backend} has {count}: {_names(found)}")
    else:
        matches = [device for device in found if selector.lower() in device.name.lower()]
        if not matches:
            raise DeviceError(f"no {backend} device has {brief(selector)} in its name; expected one of {_names(found)}")
        matches = [device for device in matches if device.available] or matches
        if len(matches) > 1:
            raise DeviceError(
                f"{brief(selector)} is in the name of {len(matches)} devices: {_names(matches)}; name one"
            )
    match = tested(matches[0])
    if not match.available:
        raise DeviceError(f"{match.id} ({match.name}) is not usable: {match.reason}")
    return match


def _names(found: Sequence[Device]) -> str:
    return ", ".join(f"{device.id} ({device.name})" for device in found)


# ---- the choice --------------------------------------------------------------------------------------------
def first_usable(request: Request) -> tuple[Device, tuple[tuple[str, str], ...]]:
    """The device that a request reaches first, before an operator is known, and those passed over.

    Raises:
        DeviceError: it reaches none.
    """
    skipped: list[tuple[str, str]] = []
    for label, found in candidates(request):
        if isinstance(found, Device):
            return found, tuple(skipped)
        skipped.append((label, found))
    raise DeviceError(f"{request.origin} {request.text}: no device is usable: {_reasons(skipped)}")


def choose(
    operator: Operator,
    request: Request,
    options: Mapping[str, Any],
    failed: Mapping[str, DispatcherError] | None = None,
) -> Choice:
    """Compile ``operator`` for the best device that the request reaches.

    Args:
        operator: what to run.
        request: the devices to try.
        options: for the backend's ``compile``.
        failed: devices, by id, that failed to run this operator already.

    Raises:
        DeviceError: no device of the request can run the operator.
        KernelError: the device named failed to build it, or each one of several did.
        InputError: a backend refused an option.
    """
    failed = failed or {}
    skipped: list[tuple[str, str]] = []
    failure: DispatcherError | None = None
    for label, device in candidates(request):
        if isinstance(device, str):
            skipped.append((label, device))
            continue
        if device.id in failed:
            failure = failed[device.id]
            skipped.append((device.id, describe(failure)))
            continue
        if any(other == device.id for other, _ in skipped):  # a comma list may reach a device twice
            continue
        backend = backend_of(device)
        try:
            reason = backend.supports(operator, device)
            if reason is None:
                if operator.batch == 0 and not operator.empty:
                    # No kernel has work then; what the reductions give, such as 0 or NaN, the reference says.
                    backend, options = registry.backend("numpy"), {}
                executable = None if operator.empty else compile_within_memory(backend, operator, device, options)
                _log.info("%s runs on %s (%s)", operator.problem.name, device.id, device.name)
                return Choice(device, backend, executable, tuple(skipped))
        except InputError:
            raise
        except Exception as error:
            failure = as_kernel_error(error, operator, device, "build")
            reason = describe(failure)
            if not request.named:
                warn_of_fallback(operator, device, failure)
        if request.named:
            raise failure or DeviceError(
                f"{device.id} ({device.name}) cannot run {operator.problem.name}: {reason}; "
                "choose another device, or auto"
            )
        skipped.append((device.id, reason))
    text = f"{request.origin} {request.text}: no device can run {operator.problem.name}: {_reasons(skipped)}"
    raise (KernelError if isinstance(failure, KernelError) else DeviceError)(text) from failure


def as_kernel_error(error: Exception, operator: Operator, device: Device, action: str) -> DispatcherError:
    """``error`` itself where the backend raised one of ours, else one of ours that says what it was."""
    if isinstance(error, DispatcherError):
        return error
    kind = DeviceMemoryError if isinstance(error, MemoryError) else KernelError
    made = kind(f"{operator.problem.name} failed to {action} on {device.id} ({device.name}): {describe(error)}")
    made.__cause__ = error
    return made


def warn_of_fallback(operator: Operator, device: Device, failure: DispatcherError) -> None:
    """Tell the caller that ``device`` failed and that the next one is tried."""
    log = failure.log.strip() if isinstance(failure, BuildError) else ""
    if log:
        _log.info("the compiler of %s said:\n%s", device.id, log)
    text = f"{device.id} ({device.name}) is passed over for {operator.problem.name}: {describe(failure)}"
    warnings.warn(text, FallbackWarning, stacklevel=2)


def _reasons(skipped: Sequence[tuple[str, str]]) -> str:
    return "; ".join(f"{label}: {reason}" for label, reason in skipped) or "there is none"
