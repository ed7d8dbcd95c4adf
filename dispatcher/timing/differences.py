"""Two results of ``dispatcher bench --json`` side by side: which differences exceed the noise."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from dispatcher.device.machine import busy_reason
from dispatcher.errors import InputError
from dispatcher.files import NotRegularError, TooLargeError, read_regular
from dispatcher.timing.sampling import Times, bootstrap_ratio

#: Schema of the results that can be read.
SCHEMA = 1
#: Bytes that a result may have.
MAX_FILE_BYTES = 64 << 20
#: Seconds that a sample may have: from below what any clock tells to more than anybody waits.
LEAST_S, MOST_S = 1e-12, 1e9
#: Confidence of the bootstrap interval.
CONFIDENCE = 0.99
#: Samples that each side must have.
LEAST_SAMPLES = 5
TEST = (
    f"faster or slower: the {CONFIDENCE:.0%} bootstrap interval of the ratio of the medians leaves out 1, and the "
    f"quartiles do not overlap; from {LEAST_SAMPLES} samples on either side"
)

Verdict = Literal["faster", "slower", "within the noise", "too few samples"]


@dataclass(frozen=True)
class Difference:
    """One time in both results.

    Attributes:
        problem: the problem's name.
        where: the device or the peer.
        what: which time, such as ``warm wall``.
        old_s: the median in the first result.
        new_s: the median in the second one.
        low: lower end of the bootstrap interval of the ratio ``new_s / old_s``.
        high: upper end.
        verdict: what the test says of the second result.
    """

    problem: str
    where: str
    what: str
    old_s: float
    new_s: float
    low: float
    high: float
    verdict: Verdict

    @property
    def ratio(self) -> float:
        """The second median over the first one."""
        return self.new_s / self.old_s


@dataclass(frozen=True)
class BenchComparison:
    """What :func:`compare_results` found.

    Attributes:
        differences: every time that both results have.
        left_out: (problem and contender, reason) of what was not compared.
        changes: versions and settings that differ, in words.
    """

    differences: tuple[Difference, ...]
    left_out: tuple[tuple[str, str], ...]
    changes: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain lists, dicts, texts and numbers, ready for JSON."""
        return {
            "test": TEST,
            "differences": [{**asdict(each), "ratio": each.ratio} for each in self.differences],
            "left_out": [{"what": what, "reason": reason} for what, reason in self.left_out],
            "changes": list(self.changes),
        }


def compare_results(old: str | Path, new: str | Path) -> BenchComparison:
    """Compare two files that ``dispatcher bench --json`` wrote.

    What differs in case, sizes, dtype, precision, device or machine is left out, with the reason.

    Args:
        old: the file to start from.
        new: the file that is judged.

    Raises:
        InputError: a file is not such a result.
    """
    return _compare(_read(old), _read(new))


def _compare(*reports: Mapping[str, Any]) -> BenchComparison:
    machines = [(report["machine"]["cpu"], report["machine"]["cores"]) for report in reports]
    before, after = (_entries(report) for report in reports)
    differences: list[Difference] = []
    left_out: list[tuple[str, str]] = []
    drivers: list[str] = []
    for name in dict.fromkeys([*before, *after]):
        label = f"{name[0]} on {name[1]}"
        if name not in after:
            left_out.append((label, "it is in the first result only"))
        elif name not in before:
            left_out.append((label, "it is in the second result only"))
        else:
            reason = _mismatch(before[name], after[name])
            if not reason and machines[0] != machines[1]:
                reason = f"the machines differ: {_machine(reports[0])} and {_machine(reports[1])}"
            if reason:
                left_out.append((label, reason))
                continue
            drivers += _driver_change(name[1], before[name], after[name])
            differences += _differences(name, before[name], after[name])
    return BenchComparison(
        tuple(differences), tuple(left_out), (*dict.fromkeys(drivers), *_changes(*reports), *_loads(*reports))
    )


# ---- reading -----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Kind:
    """What a single value has to be: in words, and as a function."""

    words: str
    holds: Callable[[Any], bool]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not any(unicodedata.category(sign) in ("Cc", "Cs") for sign in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


_TEXT = _Kind("a text without control characters", _is_text)
_TEXT_OR_NULL = _Kind(f"{_TEXT.words}, or null", lambda value: value is None or _is_text(value))
_WHOLE = _Kind("a whole number from 0 to 2**63 - 1", _is_whole)
_SCALAR = _Kind(
    "a number, 'inf' or '-inf'", lambda value: value in ("inf", "-inf") or (_is_number(value) and abs(value) < 1e300)
)
_LOAD = _Kind(
    "a number from 0 to 1e6, or null", lambda value: value is None or (_is_number(value) and 0 <= value <= 1e6)
)
_SECONDS = _Kind(
    f"a number of seconds from {LEAST_S:g} to {MOST_S:g}",
    lambda value: _is_number(value) and LEAST_S <= value <= MOST_S,
)

#: What is read of a result. A mapping has these fields, and may lack those that end in a question mark; one with the
#: only field ``*`` has any fields of one form. A list has elements of one form; with an ellipsis, one at least. In a
#: tuple, None allows null.
_CONDITION = {"wall": {"seconds": [_SECONDS, ...]}, "kernel": (None, {"seconds": [_SECONDS, ...]})}
_MEASURED = {
    **dict.fromkeys(("problem", "dtype", "precision"), _TEXT),
    **dict.fromkeys(("case", "kernel_clock"), _TEXT_OR_NULL),
    "sizes": {"*": _WHOLE},
    "scalars": {"*": _SCALAR},
    "warm": _CONDITION,
    "cold": _CONDITION,
}
_FACTS = {"driver?": _TEXT_OR_NULL, "driver_cuda?": _TEXT_OR_NULL, "nvcc?": _TEXT_OR_NULL}
_REPORT = {
    "machine": {"cpu": _TEXT, "cores": _WHOLE},
    "versions": {"*": _TEXT},
    "results": [{**_MEASURED, "name": _TEXT, "device": {"name": _TEXT, "facts": _FACTS}}],
    "peers": [{**_MEASURED, "peer": _TEXT, "place": _TEXT}],
    "races": [{"foreign_cores": _LOAD}],
}


def _read(path: str | Path) -> dict[str, Any]:
    """A result, with everything in it that is read later as it should be.

    Raises:
        InputError: it is not.
    """
    name = f"--compare {str(path)!r}"
    content = _content(path, name)
    try:
        report = json.loads(content.decode("utf-8-sig"))
        found = (report.get("command"), report.get("schema")) if isinstance(report, dict) else (None, None)
        if found == ("bench", SCHEMA) and "machine" in report:
            _check(report, _REPORT, "")
            return dict(report)
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not a text in UTF-8; {_AGAIN}") from error
    except json.JSONDecodeError as error:
        raise InputError(f"{name} is not JSON: {error}; {_AGAIN}") from error
    except RecursionError:
        raise InputError(f"{name} is nested too deeply; {_AGAIN}") from None
    except ValueError as error:
        raise InputError(f"{name}: {error}; {_AGAIN}") from None
    raise InputError(
        f"{name} is not a result of `dispatcher bench --json` of schema {SCHEMA}, with samples; make it again "
        "with this version"
    )


_AGAIN = "make it again with `dispatcher bench --json`"


def _content(path: str | Path, name: str) -> bytes:
    """The bytes of a regular file that is not too large.

    Raises:
        InputError: it is another one, or cannot be read.
    """
    advice = "save the result of `dispatcher bench --json` in one"
    try:
        return read_regular(path, MAX_FILE_BYTES)
    except NotRegularError:
        raise InputError(f"{name} is not a regular file; {advice}") from None
    except TooLargeError:
        raise InputError(f"{name} has more than {MAX_FILE_BYTES >> 20} MiB; {_AGAIN}") from None
    except (OSError, ValueError) as error:  # a ValueError: a name with a NUL in it
        raise InputError(f"{name} cannot be read: {getattr(error, 'strerror', None) or error}; {advice}") from error


def _check(value: Any, form: Any, where: str) -> None:
    """Check that ``value`` has a form; see :data:`_REPORT`.

    Raises:
        ValueError: it has not.
    """
    match form:
        case _Kind():
            if not form.holds(value):
                raise ValueError(f"{where} is {_brief(value)}; expected {form.words}")
        case (None, other):
            if value is not None:
                _check(value, other, where)
        case [each, *least]:
            if not isinstance(value, list) or len(value) < len(least):
                wanted = f"expected a list{' of one or more' if least else ''}"
                raise ValueError(f"{where} is {_brief(value)}; {wanted}")
            for number, element in enumerate(value):
                _check(element, each, f"{where}[{number}]")
        case _:
            if not isinstance(value, dict):
                raise ValueError(f"{where} is {_brief(value)}; expected a mapping")
            fields = dict.fromkeys(value, form["*"]) if "*" in form else form
            for field, its_form in fields.items():
                key = field.removesuffix("?")
                at = f"{where}.{key}" if where else key
                if not _is_text(key):
                    raise ValueError(f"{where} has the field {_brief(key)}; expected a name")
                if key in value:
                    _check(value[key], its_form, at)
                elif key == field:
                    raise ValueError(f"{at} is missing")


def _brief(value: Any) -> str:
    """A value in a message: short, on one line, of printable characters."""
    text = ascii(value) if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


# ---- comparing ---------------------------------------------------------------------------------------------
def _entries(report: Mapping[str, Any]) -> dict[tuple[str, str], Mapping[str, Any]]:
    """The entries of a result by what identifies them.

    Raises:
        InputError: two have the same name.
    """
    found: dict[tuple[str, str], Mapping[str, Any]] = {}
    for entry in [*report["results"], *report["peers"]]:
        name = _name(entry)
        if name in found:
            raise InputError(f"--compare: {name[0]} on {name[1]} is in one result twice; measure it once")
        found[name] = entry
    return found


def _name(entry: Mapping[str, Any]) -> tuple[str, str]:
    """What identifies an entry: the problem, and who ran it."""
    where = f"{entry['peer']} ({entry['place']})" if "peer" in entry else entry["name"]
    return entry["problem"], where


def _machine(report: Mapping[str, Any]) -> str:
    return f"{report['machine']['cpu']} with {report['machine']['cores']} cores"


def _device_name(entry: Mapping[str, Any]) -> str:
    """The device's name without the version of its driver, which is a change worth measuring."""
    device = entry.get("device")
    if device is None:
        return ""
    return str(device["name"]).replace(str(device["facts"].get("driver", "")) or "\0", "…")


def _mismatch(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Why two entries of one name are not the same thing; empty when they are."""
    changed = [
        *_changed(old, new, ("case", "dtype", "precision")),
        *_changed(old["sizes"], new["sizes"]),
        *_changed(old["scalars"], new["scalars"]),
    ]
    if changed:
        return "{} is {} and {}".format(*changed[0])
    if old.get("name") != "numpy" and _device_name(old) != _device_name(new):
        return f"the devices differ: {old['device']['name']} and {new['device']['name']}"
    return ""


def _driver_change(where: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    if "device" not in old:
        return []
    changed = _changed(old["device"]["facts"], new["device"]["facts"], ("driver", "driver_cuda", "nvcc"))
    return [f"{name} of {where}: {before} and {after}" for name, before, after in changed]


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    changed = _changed(old["versions"], new["versions"], missing="none")
    return [f"version of {name}: {before} and {after}" for name, before, after in changed]


def _changed(
    old: Mapping[str, Any], new: Mapping[str, Any], names: Iterable[str] = (), missing: Any = None
) -> list[tuple[str, Any, Any]]:
    """Which of ``names``, or of all, have another value in ``new`` than in ``old``, with both values."""
    names = names or dict.fromkeys([*old, *new])
    both = ((name, old.get(name, missing), new.get(name, missing)) for name in names)
    return [each for each in both if each[1] != each[2]]


def _loads(*reports: Mapping[str, Any]) -> list[str]:
    """Which of the results was spoilt by other programs."""
    found = []
    for which, report in zip(("first", "second"), reports, strict=True):
        loads = [race["foreign_cores"] for race in report["races"] if race["foreign_cores"] is not None]
        load = max(loads, default=None)
        if busy_reason(load) is not None:
            found.append(f"other programs kept {load:.2g} cores busy while the {which} result was measured")
    return found


def _differences(name: tuple[str, str], old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Difference]:
    found = []
    for state in ("warm", "cold"):
        for part in ("wall", "kernel"):
            sides = [entry[state][part] for entry in (old, new)]
            if None in sides or (part == "kernel" and old["kernel_clock"] != new["kernel_clock"]):
                continue
            before, after = (Times(tuple(map(float, side["seconds"]))) for side in sides)
            found.append(judge(name, f"{state} {part}", before, after))
    return found


def judge(name: tuple[str, str], what: str, old: Times, new: Times) -> Difference:
    """What the samples of one thing say of the second result, by :data:`TEST`; ``name`` is problem and place."""
    low, high = bootstrap_ratio(new, old, CONFIDENCE)
    (old_low, old_high), (new_low, new_high) = old.quartiles_s, new.quartiles_s
    verdict: Verdict = "within the noise"
    if min(len(old.seconds), len(new.seconds)) < LEAST_SAMPLES:
        verdict = "too few samples"
    elif high < 1.0 and new_high < old_low:
        verdict = "faster"
    elif low > 1.0 and new_low > old_high:
        verdict = "slower"
    return Difference(*name, what, old.median_s, new.median_s, low, high, verdict)
