"""Dispatcher for users of PyTorch. Importing this package imports PyTorch; ``import dispatcher`` never does.

``custom_op`` makes an operator of PyTorch out of a problem, ``compile`` runs a module here as far as it can, ``report``
says what went where and why, and ``import_module`` makes a problem out of a module.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dispatcher.errors import install as _install

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as _error:
    if _error.name != "torch":
        raise
    raise ModuleNotFoundError(f"PyTorch is not installed; {_install('torch')}", name="torch") from _error

if TYPE_CHECKING:  # an alias of the same name exports it
    from dispatcher.errors import UnsupportedError as UnsupportedError
    from dispatcher.torch.compiler import compile as compile
    from dispatcher.torch.groups import report as report
    from dispatcher.torch.importing import Imported as Imported
    from dispatcher.torch.importing import import_module as import_module
    from dispatcher.torch.operators import custom_op as custom_op

_HOMES = {
    "compiler": ("compile",),
    "groups": ("report",),
    "importing": ("Imported", "UnsupportedError", "import_module"),
    "operators": ("custom_op",),
}
_LAZY = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [*_LAZY]  # noqa: PLE0604 (texts, all of them)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
