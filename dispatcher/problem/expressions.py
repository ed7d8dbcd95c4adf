"""Integer expressions over size parameters, such as ``out_channels / groups``.

The grammar is small on purpose, so that nothing but arithmetic can be written:

    sum     = product (("+" | "-") product)*
    product = factor (("*" | "/" | "//") factor)*
    factor  = "-" factor | "(" sum ")" | ("ceil" | "floor") "(" sum ")" | NAME | DIGITS

``/`` and ``//`` are the same operator: a division that must come out even. A size is never rounded silently;
``ceil(a / b)`` rounds a division up, ``floor(a / b)`` down, and each holds nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from dispatcher.errors import InputError

MAX_LENGTH = 200  # characters of an expression
MAX_NESTING = 20  # parentheses and minus signs around a name
MAX_VALUE = 2**63 - 1  # the largest magnitude that any part may have: what fits a signed 64-bit index
_MAX_DIGITS = len(str(MAX_VALUE))

_ROUNDED = ("ceil", "floor")  # divisions that need not come out even
_TOKEN = re.compile(r"\s*(?:(?P<name>[A-Za-z_]\w*)|(?P<number>\d+)(?!\w)|(?P<sign>//|[-+*/()]))", re.ASCII)


@dataclass(frozen=True)
class _Binary:
    """``left sign right``; ``sign`` is one of ``+ - * /``, or ``ceil`` or ``floor`` for a division that rounds."""

    sign: str
    left: _Node
    right: _Node


_Node = int | str | _Binary


@dataclass(frozen=True)
class Expression:
    """A parsed integer expression: a hashable value without side effects.

    Two expressions are equal when they have the same structure, however they are spaced.

    Attributes:
        text: the expression as written.
    """

    text: str = field(compare=False)
    _root: _Node = field(repr=False)

    @classmethod
    def parse(cls, source: str | int) -> Expression:
        """Parse ``source``.

        Args:
            source: an expression, or an integer for a constant.

        Raises:
            InputError: the text does not follow the grammar, is longer or deeper than the limits allow, or has a part
                without names that has no value, such as ``5 / 2``.
        """
        if isinstance(source, int):
            value = _limited(source, "a constant")
            return cls(str(value), value)
        if len(source) > MAX_LENGTH:
            raise InputError(
                f"the expression {source[:30]!r}... has {len(source)} characters; expected {MAX_LENGTH} at most"
            )
        root = _Parser(source).parse()
        _check_constants(root)
        return cls(" ".join(source.split()), root)

    @property
    def names(self) -> frozenset[str]:
        """The names that occur in it."""
        return frozenset(_leaves(self._root))

    def evaluate(self, sizes: Mapping[str, int]) -> int:
        """The value for the given sizes.

        Raises:
            InputError: a name has no value, a division leaves a rest, or a value is out of range.
        """
        return _evaluate(self._root, sizes)

    def solve(self, known: Mapping[str, int], value: int) -> tuple[str, int] | None:
        """Find the one size that makes the expression equal to ``value``.

        Args:
            known: the sizes known so far.
            value: what the expression must be equal to.

        Returns:
            The name and value of the unknown; None when not exactly one name is unknown, when it occurs more
            than once, or when every value would do (as in ``0 * n``).

        Raises:
            InputError: no size (an integer that is 0 or more) makes the expression equal to ``value``.
        """
        unknown = [name for name in _leaves(self._root) if name not in known]
        if len(unknown) != 1:
            return None
        node, target = self._root, value
        try:
            while isinstance(node, _Binary):
                on_left = unknown[0] in _leaves(node.left)
                other = _evaluate(node.right if on_left else node.left, known)
                inverse = _invert(node.sign, on_left, other, target)
                if inverse is None:
                    return None
                node, target = (node.left if on_left else node.right), inverse
        except ArithmeticError:
            raise self._unsolvable(unknown[0], known, value) from None
        if not 0 <= target <= MAX_VALUE:
            raise self._unsolvable(unknown[0], known, value)
        return unknown[0], target

    def _unsolvable(self, name: str, known: Mapping[str, int], value: int) -> InputError:
        given = ", ".join(f"{other} = {known[other]}" for other in sorted(self.names) if other in known)
        return InputError(f"no size {name} makes {self} equal to {value}" + (f" with {given}" if given else ""))

    def __str__(self) -> str:
        return self.text


class _Parser:
    """Recursive descent over the tokens of one expression."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = list(self._tokenize())
        self.position = 0
        self.nesting = 0

    def _tokenize(self) -> Iterator[str]:
        end = 0
        stripped = self.text.rstrip()
        while end < len(stripped):
            match = _TOKEN.match(stripped, end)
            if match is None:
                raise self.fail(f"{stripped[end:].lstrip()[:10]!r} is not understood")
            end = match.end()
            token = match[match.lastgroup or 0]
            if match.lastgroup == "number" and (len(token) > _MAX_DIGITS or (token[0] == "0" and token != "0")):
                raise self.fail(f"{token[:_MAX_DIGITS]!r} is not a plain decimal integer below 2**63")
            yield token

    def fail(self, reason: str) -> InputError:
        return InputError(
            f"the expression {self.text!r} is not valid: {reason}; "
            "expected names, decimal integers, + - * / // and parentheses"
        )

    def peek(self) -> str:
        """The next token, or the empty string at the end."""
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def take(self) -> str:
        token = self.peek()
        self.position += 1
        return token

    def parse(self) -> _Node:
        node = self.sum()
        if self.peek():
            raise self.fail(f"{self.peek()!r} was not expected")
        return node

    def sum(self) -> _Node:
        node = self.product()
        while self.peek() in ("+", "-"):
            node = _Binary(self.take(), node, self.product())
        return node

    def product(self) -> _Node:
        node = self.factor()
        while self.peek() in ("*", "/", "//"):
            node = _Binary(self.take()[0], node, self.factor())
        return node

    def factor(self) -> _Node:
        token = self.take()
        if token in _ROUNDED and self.peek() == "(":
            divided = self.factor()
            if not isinstance(divided, _Binary) or divided.sign != "/":
                raise self.fail(f"{token} holds something else than a division; expected {token}(a / b)")
            return _Binary(token, divided.left, divided.right)
        if token in ("-", "("):
            self.nesting += 1
            if self.nesting > MAX_NESTING:
                raise self.fail(f"it is nested more than {MAX_NESTING} deep")
            node = _Binary("-", 0, self.factor()) if token == "-" else self.sum()
            if token == "(" and self.take() != ")":
                raise self.fail("a parenthesis is not closed")
            self.nesting -= 1
            return node
        if token.isdigit():
            return _limited(int(token), token)
        if token and (token[0].isalpha() or token[0] == "_"):
            return token
        raise self.fail(f"{token!r} was not expected" if token else "it ends too early")


def _leaves(node: _Node) -> Iterator[str]:
    """Every occurrence of a name, from left to right."""
    if isinstance(node, _Binary):
        yield from _leaves(node.left)
        yield from _leaves(node.right)
    elif isinstance(node, str):
        yield node


def _check_constants(node: _Node) -> None:
    """Evaluate each part that has no names, to see that it has a value."""
    if next(_leaves(node), None) is None:
        _evaluate(node, {})
    elif isinstance(node, _Binary):
        _check_constants(node.left)
        _check_constants(node.right)


def _render(node: _Node, nested: bool = False) -> str:
    """A node as text, for messages."""
    if not isinstance(node, _Binary):
        return str(node)
    if node.sign in _ROUNDED:
        return f"{node.sign}({_render(node.left, True)} / {_render(node.right, True)})"
    text = f"{_render(node.left, True)} {node.sign} {_render(node.right, True)}"
    return f"({text})" if nested else text


def _limited(value: int, what: str) -> int:
    if abs(value) > MAX_VALUE:
        raise InputError(f"{what} is out of range; expected a magnitude below 2**63")
    return value


def _evaluate(node: _Node, sizes: Mapping[str, int]) -> int:
    if isinstance(node, int):
        return node
    if isinstance(node, str):
        if node not in sizes:
            raise InputError(f"the size {node} has no value; give {node} a value")
        return _limited(sizes[node], node)
    left, right = _evaluate(node.left, sizes), _evaluate(node.right, sizes)
    match node.sign:
        case "+":
            value = left + right
        case "-":
            value = left - right
        case "*":
            value = left * right
        case _:
            if right == 0:
                raise InputError(f"{_render(node)}: {left} cannot be divided by 0; change the divisor")
            if left % right and node.sign not in _ROUNDED:
                raise InputError(f"{_render(node)}: {left} is not divisible by {right}; change one of them")
            value = left // right if node.sign == "floor" else -(-left // right)
    return _limited(value, _render(node))


def _invert(sign: str, on_left: bool, other: int, target: int) -> int | None:
    """The unknown side of ``left sign right == target``, where ``other`` is the known side.

    Returns:
        The value, or None when more than one value fits.

    Raises:
        ArithmeticError: no integer fits.
    """
    match sign:
        case "+":
            return target - other
        case "ceil" | "floor":
            return None
        case "-":
            return target + other if on_left else other - target
        case "*":
            numerator, denominator = target, other
        case _ if on_left:
            if other == 0:
                raise ArithmeticError
            return target * other
        case _:
            numerator, denominator = other, target
    if numerator == 0 and denominator == 0:
        return None
    if denominator == 0 or numerator % denominator or (sign == "/" and numerator == 0):
        raise ArithmeticError
    return numerator // denominator
