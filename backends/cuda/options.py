"""Options of the CUDA backend: what a user or the tuner may fix, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from dispatcher.errors import InputError, one_of
from dispatcher.problem.messages import brief

#: Values of the option ``algorithm``.
ALGORITHMS = ("auto", "halo", "fma")
PROLOGUES = ("auto", "fused", "separate")
_NAMES = ("algorithm", "prologue", "stream", "tile", "tuned")
#: Convolutions in the text of the option ``tile`` are separated so; one whose tile is left open is called so.
_NEXT, _OPEN = "/", "auto"


@dataclass(frozen=True)
class TileChoice:
    """A tile of ``conv_halo.cu`` that is asked for, whole or in part: among the tiles that match, the one with the
    lowest estimate is taken. All fields but the box may be None, which leaves them open; they mean what the
    fields of :class:`dispatcher.backends.cuda.tiles.HaloTile` do.

    Its text is short enough for a command line: ``4x4x16,warp_m=2,resident=2,slice_channels=32,paired=1``.
    """

    box: tuple[int, int, int]
    warp_m: int | None = None
    resident: int | None = None
    slice_channels: int | None = None
    paired: int | None = None
    fold_shared: int | None = None

    def __str__(self) -> str:
        named = ((field.name, getattr(self, field.name)) for field in fields(self)[1:])
        given = (f"{name}={value}" for name, value in named if value is not None)
        return ",".join(["x".join(map(str, self.box)), *given])

    @staticmethod
    def parse(text: str) -> TileChoice:
        """The tile that ``text`` names.

        Raises:
            InputError: it names none.
        """
        box, *given = text.split(",")
        extents = box.split("x")
        if len(extents) != 3 or not all(_is_count(extent) for extent in extents):
            raise _no_tile(text)
        known = [field.name for field in fields(TileChoice)[1:]]
        numbers: dict[str, int] = {}
        for part in given:
            name, _, value = part.partition("=")
            if name not in known or name in numbers:
                raise InputError(
                    f"tile is {brief(text)}; after the box expected {', '.join(known)}, each at most once, "
                    f"got {brief(part)}"
                )
            flag = name in ("paired", "fold_shared")
            if not (value in ("0", "1") if flag else _is_count(value)):
                wanted = "0 or 1" if flag else "a positive integer"
                raise InputError(f"tile is {brief(text)}; expected {name} to be {wanted}, got {brief(value)}")
            numbers[name] = int(value)
        z, y, x = map(int, extents)
        return TileChoice((z, y, x), **numbers)


@dataclass(frozen=True)
class Options:
    """What is fixed; the defaults leave a choice to the estimates, or to what was tuned on the device.

    Attributes:
        algorithm: ``auto``, ``halo`` or ``fma``.
        tile: tiles for the tensor-core kernel: one for all convolutions, or one for each of them in the pipeline's
            order, None where it is left open.
        prologue: ``auto``, ``fused`` or ``separate``: where steps before a convolution run.
        why: where ``tile`` comes from, for people.
    """

    algorithm: str = "auto"
    tile: tuple[TileChoice | None, ...] = (None,)
    prologue: str = "auto"
    why: str = "asked for"


@dataclass(frozen=True)
class Request:
    """All that the options of ``compile`` say.

    Attributes:
        options: for the lowering.
        tuned: may what was tuned on the device decide? Only where nothing is fixed.
        stream: the ``cudaStream_t`` that the work of each call goes in, or None.
    """

    options: Options
    tuned: bool
    stream: int | None


def parse(options: Mapping[str, Any]) -> Request:
    """Check a user's options.

    Raises:
        InputError: one is unknown or has a wrong value.
    """
    for name in options:
        if name not in _NAMES:
            raise InputError(f"option {brief(name)} is unknown to the cuda backend; {one_of(name, _NAMES)}")
    algorithm = options.get("algorithm", "auto")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise InputError(f"algorithm is {brief(algorithm)}; {one_of(algorithm, ALGORITHMS)}")
    prologue = options.get("prologue", "auto")
    if not isinstance(prologue, str) or prologue not in PROLOGUES:
        raise InputError(f"prologue is {brief(prologue)}; {one_of(prologue, PROLOGUES)}")
    tuned = options.get("tuned")
    if not (tuned is None or (isinstance(tuned, str) and tuned == "ignore")):
        raise InputError(f"tuned is {brief(tuned)}; expected ignore")
    stream = options.get("stream")
    if stream is not None:
        stream = _stream_handle(stream)
    chosen = Options(algorithm, _tiles(options.get("tile")), prologue)
    return Request(chosen, tuned is None and chosen == Options(), stream)


def _stream_handle(stream: Any) -> int:
    """The ``cudaStream_t`` of a stream of whatever library.

    Raises:
        InputError: it is none.
    """
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        _, handle = protocol() if callable(protocol) else protocol
    else:  # of PyTorch, PyCUDA, CuPy
        found = (getattr(stream, name, None) for name in ("cuda_stream", "handle", "ptr"))
        handle = next((value for value in found if value is not None), stream)
    if type(handle) is not int or handle < 0:
        raise InputError(
            f"stream is {brief(stream)}; expected a cudaStream_t as an integer, or a stream of PyTorch, PyCUDA, CuPy "
            "or another library with __cuda_stream__"
        )
    return handle


def tile_text(tiles: tuple[TileChoice | None, ...]) -> str:
    """The option ``tile`` that stands for ``tiles``, one for each convolution."""
    return _NEXT.join(_OPEN if tile is None else str(tile) for tile in tiles)


def _tiles(value: Any) -> tuple[TileChoice | None, ...]:
    if value is None:
        return (None,)
    if isinstance(value, str):
        return tuple(None if part == _OPEN else TileChoice.parse(part) for part in value.split(_NEXT))
    if isinstance(value, tuple | list) and len(value) == 3 and all(type(n) is int and n > 0 for n in value):
        return (TileChoice((value[0], value[1], value[2])),)
    raise _no_tile(value)


def _is_count(text: str) -> bool:
    """Is it a positive number of at most six digits?"""
    return text.isascii() and text.isdecimal() and len(text) <= 6 and int(text) > 0


def _no_tile(value: Any) -> InputError:
    return InputError(
        f"tile is {brief(value)}; expected three positive integers (z, y, x), or a text such as '2x4x16' or "
        "'2x4x16,warp_m=2,resident=2'"
    )
