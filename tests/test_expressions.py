"""Integer expressions: parsing, exact evaluation, inversion, limits."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dispatcher.errors import DispatcherError, InputError
from dispatcher.problem.expressions import MAX_LENGTH, MAX_NESTING, MAX_VALUE, Expression

SIZES = {"a": 12, "b": 4, "c": 5, "zero": 0}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7", 7),
        ("a", 12),
        ("a + b * c", 32),
        ("(a + b) * c", 80),
        ("a - b - c", 3),
        ("a - (b - c)", 13),
        ("a / b / 3", 1),
        ("a // b", 3),
        ("a / (b / 2)", 6),
        ("a * b / 6", 8),
        ("-a + 20", 8),
        ("- - a", 12),
        ("2 * -c", -10),
        ("\ta+\n b ", 16),
        ("0 / a", 0),
        ("ceil(c / b)", 2),
        ("ceil(a // b) * c", 15),
        ("ceil((a + 1) / (b - 1))", 5),
        ("ceil(-c / b)", -1),
        ("a + ceil (zero / c)", 12),
    ],
)
def test_values(text: str, value: int) -> None:
    assert Expression.parse(text).evaluate(SIZES) == value


def test_ceil_rounds_a_division_up_and_nothing_else() -> None:
    for text in ("ceil(a)", "ceil(a + b / c)", "ceil(a / b * c)", "ceil()", "ceil(a / b", "ceil(ceil(a / b))"):
        with pytest.raises(InputError, match=r"is not valid: "):
            Expression.parse(text)
    with pytest.raises(InputError, match=r"ceil\(a / zero\): 12 cannot be divided by 0"):
        Expression.parse("ceil(a / zero)").evaluate(SIZES)
    assert Expression.parse("ceil(a / b)") != Expression.parse("a / b")
    assert Expression.parse("ceil(n / 2)").solve({}, 3) is None  # 5 and 6 both do
    assert Expression.parse("ceil + 1").evaluate({"ceil": 4}) == 5  # a size may have that name


@pytest.mark.parametrize("text", ["5 / 2", "n + (5 / 2)", "n * (1 / 0)", "ceil(n / (3 // 2))"])
def test_a_part_without_names_has_a_value(text: str) -> None:
    with pytest.raises(InputError, match=r"[531] (is not divisible|cannot be divided) by [20]"):
        Expression.parse(text)
    assert Expression.parse("n + ceil(5 / 2) - floor(5 / 2)").evaluate({"n": 1}) == 2


def test_an_integer_is_a_constant() -> None:
    expression = Expression.parse(3)
    assert (expression.evaluate({}), expression.names, str(expression)) == (3, frozenset(), "3")


def test_names_and_text() -> None:
    expression = Expression.parse("out_channels  /groups")
    assert expression.names == {"out_channels", "groups"}
    assert str(expression) == "out_channels /groups"


def test_equality_and_hash_follow_the_structure() -> None:
    assert Expression.parse("a/b") == Expression.parse("a // b")
    assert hash(Expression.parse("a/b")) == hash(Expression.parse("(a) / (b)"))
    assert Expression.parse("a - b") != Expression.parse("b - a")
    with pytest.raises(AttributeError):
        Expression.parse("a").text = "b"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("c / b", ("c / b", "5 is not divisible by 4")),
        ("a + c // 2", ("c / 2", "5 is not divisible by 2")),
        ("(a + 1) / b", ("(a + 1) / b", "13 is not divisible by 4")),
        ("a / zero", ("a / zero", "12 cannot be divided by 0")),
        ("a * unknown", ("unknown", "has no value")),
        (f"{MAX_VALUE} + a", ("out of range", "2**63")),
        (f"{MAX_VALUE} * {MAX_VALUE} * {MAX_VALUE}", ("out of range",)),
    ],
)
def test_evaluation_errors_name_the_parts(text: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as caught:
        Expression.parse(text).evaluate(SIZES)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "a b",
        "a +",
        "+ a",
        "* a",
        "a ** b",
        "a % b",
        "a @ b",
        "a & b",
        "~a",
        "a < b",
        "a and b",
        "not a",
        "a if b else c",
        "lambda: 1",
        "f(a)",
        "a.b",
        "a[0]",
        "()",
        "(a",
        "a)",
        "(a, b)",
        "[a]",
        "{a}",
        "'a'",
        '"a"',
        "1.5",
        "1e3",
        "1_0",
        "0x10",
        "0b1",
        "010",
        "2a",
        "é",
        "a；b",
        "１",
        "a#b",
        "a\\b",
        "a\0b",
        "__import__('os').system('true')",
        "9" * 20,
        "(" * (MAX_NESTING + 1) + "a" + ")" * (MAX_NESTING + 1),
        "-" * 100 + "a",
        "a" * (MAX_LENGTH + 1),
        "a+" * 10**6 + "a",
    ],
)
def test_what_is_not_arithmetic_is_refused(text: str) -> None:
    with pytest.raises(InputError) as caught:
        Expression.parse(text)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500
    assert "expected" in message


def test_a_constant_out_of_range_is_refused() -> None:
    for value in (MAX_VALUE + 1, -MAX_VALUE - 1, 10**5000):
        with pytest.raises(InputError, match="out of range"):
            Expression.parse(value)


def test_the_longest_and_deepest_expressions_work() -> None:
    assert Expression.parse("+".join(["a"] * 100)).evaluate({"a": 2}) == 200
    assert Expression.parse("(" * MAX_NESTING + "a" + ")" * MAX_NESTING).evaluate({"a": 2}) == 2


@pytest.mark.parametrize(
    ("text", "known", "value", "found"),
    [
        ("n", {}, 7, ("n", 7)),
        ("n", {}, 0, ("n", 0)),
        ("n + 3", {}, 7, ("n", 4)),
        ("3 + n", {}, 7, ("n", 4)),
        ("n - 3", {}, 7, ("n", 10)),
        ("3 - n", {}, 1, ("n", 2)),
        ("n * g", {"g": 3}, 12, ("n", 4)),
        ("g * n", {"g": 3}, 0, ("n", 0)),
        ("out / groups", {"groups": 2}, 3, ("out", 6)),
        ("out / groups", {"out": 6}, 3, ("groups", 2)),
        ("(n + 1) * 2 - g", {"g": 4}, 6, ("n", 4)),
        ("12 / (n - 1)", {}, 4, ("n", 4)),
        ("-n + 9", {}, 4, ("n", 5)),
        ("a + b", {}, 3, None),
        ("a + b", {"a": 1, "b": 2}, 3, None),
        ("n * n", {}, 9, None),
        ("n * g", {"g": 0}, 0, None),
        ("0 / n", {}, 0, None),
        ("5", {}, 5, None),
    ],
)
def test_solve(text: str, known: dict[str, int], value: int, found: tuple[str, int] | None) -> None:
    assert Expression.parse(text).solve(known, value) == found


@pytest.mark.parametrize(
    ("text", "known", "value"),
    [
        ("n * 2", {}, 7),
        ("n * g", {"g": 0}, 7),
        ("n / g", {"g": 0}, 7),
        ("7 / n", {}, 2),
        ("7 / n", {}, 0),
        ("0 / n", {}, 3),
        ("n + 3", {}, 2),
        ("12 / (n - 1)", {}, -3),
        (f"n / {MAX_VALUE}", {}, 2),
    ],
)
def test_solve_refuses_what_no_size_can_meet(text: str, known: dict[str, int], value: int) -> None:
    with pytest.raises(InputError) as caught:
        Expression.parse(text).solve(known, value)
    assert f"no size n makes {text} equal to {value}" in str(caught.value)


def test_the_message_of_solve_names_the_known_sizes() -> None:
    with pytest.raises(InputError, match=r"with g = 4, h = 2$"):
        Expression.parse("n * g * h").solve({"g": 4, "h": 2, "other": 1}, 7)


@given(st.integers(0, 999), st.integers(1, 99), st.integers(0, 99))
def test_solve_inverts_evaluate(n: int, g: int, p: int) -> None:
    for text in ("n + p", "p + n * g", "(n - p) * g", "(n * g) / g", "p - n"):
        expression = Expression.parse(text)
        known = {"g": g, "p": p}
        assert expression.solve(known, expression.evaluate({**known, "n": n})) == ("n", n)


def _source(draw_depth: int) -> st.SearchStrategy[str]:
    leaf = st.sampled_from(["a", "b", "c", "1", "2", "7"])
    return st.recursive(
        leaf,
        lambda part: st.tuples(part, st.sampled_from(["+", "-", "*"]), part).map(lambda t: f"({t[0]} {t[1]} {t[2]})"),
        max_leaves=draw_depth,
    )


@given(_source(8))
def test_values_agree_with_python(source: str) -> None:
    # The sources are made above, of names, small numbers and three signs: nothing else can be evaluated here.
    assert Expression.parse(source).evaluate(SIZES) == eval(source, {"__builtins__": {}}, dict(SIZES))


@given(st.text(alphabet="abz019_+-*/() .\n%[]'", max_size=40))
def test_garbage_only_raises_input_errors(text: str) -> None:
    try:
        Expression.parse(text).evaluate(SIZES)
    except DispatcherError as error:
        assert "\n" not in str(error)


def test_nothing_is_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "system", lambda *_: pytest.fail("executed"))
    for text in ("os.system('true')", "__import__('os').system('true')", "(os.system)('true')"):
        with pytest.raises(InputError):
            Expression.parse(text)
