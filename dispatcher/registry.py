"""The backends, in order of preference; the reference is last. They are imported only when asked for.

Those of other distributions are found by their entry points in the group ``dispatcher.backends``: each is the name
of a backend and where it is, such as ``mine = my_package.my_module:BACKEND``. They come after our own ones and before
the reference, in the order of their names.
"""

from __future__ import annotations

import functools
import pkgutil
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dispatcher.interface import Backend

_OURS = {"cuda": "dispatcher.backends.cuda", "opencl": "dispatcher.backends.opencl"}
_REFERENCE = {"numpy": "dispatcher.backends.numpy_ref"}

#: The entry point group of other distributions' backends.
GROUP = "dispatcher.backends"

#: What the device grammar can take for a backend; ``auto`` and ``all-of`` mean something else in it.
_NAME = re.compile(r"(?!(?:auto|all-of)$)[a-z][a-z0-9_-]*")


@dataclass(frozen=True)
class Registered:
    """A backend that another distribution registers.

    Attributes:
        name: the name of its entry point.
        target: where it is, ``module:object``.
        distribution: name and version of the distribution.
        refusal: why the name cannot be used; empty when it can.
    """

    name: str
    target: str
    distribution: str
    refusal: str = ""


@functools.cache
def registered() -> tuple[Registered, ...]:
    """What other distributions register, ordered by name; nothing of it is imported."""
    taken = {**_OURS, **_REFERENCE}
    found = []
    for name, distribution, target in sorted(set(_entry_points())):
        refusal = f"there is a backend {name!r} already, {taken[name]}" if name in taken else ""
        if not _NAME.fullmatch(name):
            refusal = "a name has lower-case letters, digits, _ and -, begins with a letter, and is not auto or all-of"
        found.append(Registered(name, target, distribution, refusal))
        if not refusal:
            taken[name] = f"{target} of {distribution}"
    return tuple(found)


def _entry_points() -> Iterator[tuple[str, str, str]]:
    """(name, distribution, target) of every entry point of the group."""
    from importlib import metadata  # takes its time

    seen = set()
    for distribution in metadata.distributions():
        try:
            if GROUP not in (distribution.read_text("entry_points.txt") or ""):
                continue
            name, version = distribution.metadata["Name"], distribution.version
            if name not in seen:  # else an older one, further down the path
                seen.add(name)
                for entry in distribution.entry_points.select(group=GROUP):
                    yield entry.name, f"{name} {version}", re.sub(r"\s|\[.*", "", entry.value)  # no extras
        except Exception as error:  # somebody's broken installation
            place = distribution.locate_file("")
            warnings.warn(f"entry points of a distribution in {place} are left out: {error!r}", RuntimeWarning, 2)


class Table(Mapping[str, str]):
    """Our own backends and those of others, which are looked up when it is first read."""

    @functools.cached_property
    def _targets(self) -> dict[str, str]:
        targets = dict(_OURS)
        for each in registered():
            if each.refusal:
                text = f"backend {each.name!r} of {each.distribution} is left out: {each.refusal}"
                warnings.warn(text, RuntimeWarning, stacklevel=2)
            else:
                targets[each.name] = each.target
        return targets | _REFERENCE

    def __getitem__(self, name: str) -> str:
        return self._targets[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)


#: Backend name to where it is: a module that holds it as ``BACKEND``, or ``module:object``.
BACKENDS: Mapping[str, str] = Table()


@dataclass(frozen=True)
class KernelFiles:
    """How files of one suffix, with a user's own kernel, are run.

    Attributes:
        backend: the backend that runs them.
        host_functions: they may hold a function of the host, which launches kernels itself.
        groups_needed: a launch has to say how many work items (threads) are in a group (block).
    """

    backend: str
    host_functions: bool
    groups_needed: bool


#: Suffix of a file with a user's own kernel to how it is run.
KERNEL_FILES: dict[str, KernelFiles] = {
    ".cl": KernelFiles("opencl", host_functions=False, groups_needed=False),
    ".cu": KernelFiles("cuda", host_functions=True, groups_needed=True),
}


def origin(name: str) -> str | None:
    """The distribution that registers the backend called ``name``, with its version; None for our own ones."""
    target = BACKENDS[name]
    return next((each.distribution for each in registered() if (each.name, each.target) == (name, target)), None)


def backend(name: str) -> Backend:
    """Import and return the backend called ``name``, a key of :data:`BACKENDS`.

    Raises:
        ValueError: it calls itself something else.
    """
    loaded = load(BACKENDS[name])
    if loaded.name != name:
        raise ValueError(f"{BACKENDS[name]} calls itself {loaded.name!r}; expected {name!r}")
    return loaded


def load(target: str) -> Backend:
    """Import and return a backend, wherever it is: a value of :data:`BACKENDS`."""
    loaded: Backend = pkgutil.resolve_name(target if ":" in target else f"{target}:BACKEND")
    return loaded


def error_bounds() -> Any:
    """The module whose ``bounded_parts`` computes the reference with error bounds, whatever backends there are."""
    return pkgutil.resolve_name("dispatcher.backends.numpy_ref.bounds")
