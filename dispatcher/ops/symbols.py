"""Numbers that know how they come from a problem's parameters: each number of an operator that is bound to such sizes
says, as C text, what it is for any sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Symbol(int):
    """An integer, and C text for it; arithmetic makes symbols again.

    What is decided by comparing numbers holds for these numbers alone, so that binding decides by :func:`smaller` and
    :func:`larger` what depends on sizes.
    """

    text: str

    def __new__(cls, value: int, text: str) -> Symbol:
        made = super().__new__(cls, value)
        made.text = text
        return made


class ScalarSymbol(float):
    """A ``double`` parameter's value, and C text for it."""

    text: str

    def __new__(cls, value: float, text: str) -> ScalarSymbol:
        made = super().__new__(cls, value)
        made.text = text
        return made


def c_text(number: float) -> str:
    """A number, or a symbol, as C text."""
    if isinstance(number, Symbol | ScalarSymbol):
        return number.text
    if isinstance(number, int):
        return str(int(number))
    special = {float("inf"): "INFINITY", float("-inf"): "-INFINITY"}
    return special.get(float(number), repr(float(number)))


def smaller(a: int, b: int) -> int:
    """``min(a, b)``, of symbols too."""
    return _made(min(a, b), f"smaller({c_text(a)}, {c_text(b)})", a, b)


def larger(a: int, b: int) -> int:
    """``max(a, b)``, of symbols too."""
    return _made(max(a, b), f"larger({c_text(a)}, {c_text(b)})", a, b)


def _made(value: int, text: str, *sources: int) -> int:
    return Symbol(value, text) if any(isinstance(source, Symbol) for source in sources) else value


#: Operation to its text, and the plain numbers on its left and right that leave the other side as it is.
_OPERATIONS: dict[str, tuple[str, int | None, int | None]] = {
    "add": ("({} + {})", 0, 0),
    "sub": ("({} - {})", None, 0),
    "mul": ("({} * {})", 1, 1),
    "floordiv": ("floor_div({}, {})", None, 1),
}


def _operation(name: str, reflected: bool) -> Callable[[Symbol, int], Any]:
    form, on_left, on_right = _OPERATIONS[name]
    compute = getattr(int, f"__{'r' if reflected else ''}{name}__")

    def operate(self: Symbol, other: int) -> Any:
        if not isinstance(other, int):
            return NotImplemented
        if not isinstance(other, Symbol) and other == (on_left if reflected else on_right):
            return self
        sides = (other, self) if reflected else (self, other)
        return Symbol(compute(self, other), form.format(*map(c_text, sides)))

    return operate


for _name in _OPERATIONS:
    setattr(Symbol, f"__{_name}__", _operation(_name, reflected=False))
    setattr(Symbol, f"__r{_name}__", _operation(_name, reflected=True))
setattr(Symbol, "__neg__", lambda self: 0 - self)  # noqa: B010 (as the others)
