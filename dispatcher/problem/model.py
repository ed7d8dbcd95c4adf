"""A problem: the parameters of a fused operator, its pipeline, and named cases. Pure data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from dispatcher.problem.expressions import Expression
from dispatcher.problem.messages import counted
from dispatcher.problem.shown import Shown

Number = int | float
Value = TypeVar("Value")


class Frozen(Mapping[str, Value]):
    """A copy of a mapping that nobody changes; unlike a ``types.MappingProxyType`` it can be pickled and copied."""

    def __init__(self, items: Mapping[str, Value]) -> None:
        self._items = dict(items)

    def __getitem__(self, name: str) -> Value:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return repr(self._items)


@dataclass(frozen=True)
class Parameter:
    """One parameter of the operator, in the order of its C signature.

    Attributes:
        name: identifier, unique in the problem.
        type: ``tensor`` (a pointer to elements of the chosen dtype), ``size_t`` or ``double``.
        const: True for a tensor that is only read; False for the output and for plain numbers.
        shape: a tensor's extents as expressions over the size parameters; None for the output tensor,
            whose shape follows from the pipeline, and for numbers.
        default: a number's value where a user gives none; None when it must be given or inferred.
        unused: True for a number that is a part of the signature and read by nothing.
    """

    name: str
    type: Literal["tensor", "size_t", "double"]
    const: bool = False
    shape: tuple[Expression, ...] | None = None
    default: Number | None = None
    unused: bool = False


@dataclass(frozen=True)
class StepSpec:
    """One step of the pipeline as the file has it: not yet bound to sizes.

    Attributes:
        op: name in :data:`dispatcher.ops.vocabulary.VOCABULARY`.
        source: name of the value it reads: None for the previous step's result (for the first step: the
            problem's first tensor), else a tensor parameter's name or an earlier step's ``result``.
        result: the name it gives to its value, or None.
        fields: key to value: ``each`` a tuple of Expressions, one a spatial axis, ``padding`` the same, or pairs of
            them, or ``same``, ``size`` an Expression, ``flag`` a bool, ``scalar`` a float or a parameter's name,
            ``tensor`` a parameter's name, ``operand`` a float or a name, ``axes`` a tuple of axis numbers or a size
            parameter's name. Only the keys that the file gives.
    """

    op: str
    source: str | None
    result: str | None
    fields: Mapping[str, Any]


@dataclass(frozen=True, repr=False)
class Problem(Shown):
    """A fused operator, described once.

    Attributes:
        name: unique name, also the file's stem.
        title: one line for people.
        origin: where the problem comes from.
        parameters: in the order of the C signature.
        pipeline: steps in order of execution; the last one's value is the output.
        cases: case name to values of size and double parameters.
        tolerance: factor on the error bound that verification computes; 1.0 unless the file says otherwise.
        path: the file it was read from, or None; no part of what it is.
        rank: spatial axes of its values.
        note: a line on what to know about it, for people.
    """

    name: str
    title: str
    origin: str
    parameters: tuple[Parameter, ...]
    pipeline: tuple[StepSpec, ...]
    cases: Mapping[str, Mapping[str, Number]] = field(default_factory=dict)
    tolerance: float = 1.0
    path: Path | None = field(default=None, compare=False)
    rank: int = 3
    note: str = ""

    @property
    def group(self) -> str:
        """The folder of its file, which for a bundled problem says what kind of problem it is; empty without a file."""
        return "" if self.path is None else self.path.parent.name

    def parameter(self, name: str) -> Parameter | None:
        """The parameter of that name, or None."""
        return next((p for p in self.parameters if p.name == name), None)

    @property
    def tensors(self) -> tuple[Parameter, ...]:
        """Input tensors, in order."""
        return tuple(p for p in self.parameters if p.type == "tensor" and p.const)

    @property
    def source(self) -> str:
        """Name of the tensor that the pipeline begins with: the first one, unless the first step names another."""
        return self.pipeline[0].source or self.tensors[0].name

    @property
    def output(self) -> Parameter:
        """The output tensor."""
        return next(p for p in self.parameters if p.type == "tensor" and not p.const)

    @property
    def sizes(self) -> tuple[Parameter, ...]:
        """``size_t`` parameters, in order."""
        return tuple(p for p in self.parameters if p.type == "size_t")

    @property
    def scalars(self) -> tuple[Parameter, ...]:
        """``double`` parameters, in order."""
        return tuple(p for p in self.parameters if p.type == "double")

    def _headline(self) -> str:
        return f"{self.name}: {counted(len(self.parameters), 'parameter')}, {counted(len(self.pipeline), 'step')}"

    def _facts(self) -> Mapping[str, object]:
        return {
            **{"title": self.title, "origin": self.origin, "note": self.note},
            "tensors": [f"{each.name} ({', '.join(map(str, each.shape or ()))})" for each in self.tensors],
            "numbers": ", ".join(each.name for each in (*self.sizes, *self.scalars)),
            "pipeline": [step.op for step in self.pipeline],
            "cases": ", ".join(self.cases),
        }
