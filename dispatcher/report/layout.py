"""Text for people, laid out: tables, lists that break between their items, numbers with their units.

Nothing breaks inside a word, so that a name or a path stays whole. In a terminal everything fits its width; where
stdout is a pipe or a file, a table is as wide as it is, and nothing is cut, folded or coloured.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence

_FREE_TEXT = 40  # characters; a column with longer cells may be folded between words
_FREE_TEXT_AT_LEAST = 20
_PIPE = 100  # columns of a list of items where there is no terminal
_GLUE = "\0"  # stands for a space where no line may break


def columns() -> int | None:
    """The width of the terminal; None where stdout is none."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


# ---- tables ------------------------------------------------------------------------------------------------
def table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, above: int = 0, stacked: bool = False) -> str:
    """A table as text.

    Where the terminal is too narrow, the cells of one column, which are names, stand above their rows; where that does
    not help, each row becomes a list of ``header value``.

    Args:
        headers: of the columns.
        rows: cells, a text for each header.
        above: the column that stands above.
        stacked: it does so in any case.
    """
    available = columns()
    widths = None if stacked else _widths(headers, rows, available)
    if widths is not None:
        return "\n".join(_rendered(headers, rows, widths))
    others = _without(headers, above)
    widths = _widths(others, [_without(row, above) for row in rows], available and available - 2)
    lines = [headers[above], *(f"  {line}" for line in _rendered(others, [], widths or []))]
    for name, group in itertools.groupby(rows, key=lambda row: row[above]):
        cells = [_without(row, above) for row in group]
        lines.append(name)
        if widths is not None:
            lines += [f"  {line}" for line in _rendered(others, cells, widths)[1:]]
        for row in cells if widths is None else ():
            pairs = [f"{header.lower()} {cell}" for header, cell in zip(others, row, strict=True) if cell]
            lines.append(listing("  ", pairs, " "))
    return "\n".join(lines)


def _without(row: Sequence[str], at: int) -> list[str]:
    return [*row[:at], *row[at + 1 :]]


def _widths(headers: Sequence[str], rows: Sequence[Sequence[str]], available: int | None) -> list[int] | None:
    """The widths of columns: those of the cells, or less for long texts; None where not even that fits."""
    from rich.cells import cell_len

    cells = list(zip(headers, *rows, strict=True))
    natural = [max(map(cell_len, column)) for column in cells]
    if available is None:
        return natural
    spare = available - 2 * (len(headers) - 1)
    least = [
        width
        if width <= _FREE_TEXT
        else min(width, max(_FREE_TEXT_AT_LEAST, *(cell_len(word) for cell in column for word in cell.split())))
        for width, column in zip(natural, cells, strict=True)
    ]
    spare -= sum(least)
    if spare < 0:
        return None
    for at, width in enumerate(natural):
        more = min(width - least[at], spare)
        least[at] += more
        spare -= more
    return least


def _rendered(headers: Sequence[str], rows: Sequence[Sequence[str]], widths: Sequence[int]) -> list[str]:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    if not widths:
        return []
    grid = Table(box=None, pad_edge=False, show_edge=False, header_style="bold")
    for header, width in zip(headers, widths, strict=True):
        grid.add_column(header, width=width, overflow="fold")
    for row in rows:
        grid.add_row(*map(Text, row))
    rendered = io.StringIO()
    styled = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    Console(file=rendered, force_terminal=styled, width=sum(widths) + 2 * len(widths)).print(grid)
    return [line.rstrip() for line in rendered.getvalue().splitlines()]


# ---- lists -------------------------------------------------------------------------------------------------
def listing(first: str, items: Sequence[str], separator: str = ",") -> str:
    """``first`` and then ``items``, on lines that break between items.

    In a terminal an item that is longer than a line breaks between its words, and where ``first`` leaves too little
    room for one, they begin on a line of their own.
    """
    available = columns()
    width = available or _PIPE
    room = width - len(first)
    own = " " * (len(first) - len(first.lstrip()) + 2)
    words = [word for item in items for word in item.split()]
    if available is not None and len(own) < len(first) and max(map(len, words), default=0) >= room:
        head = textwrap.fill(first.rstrip(), width, subsequent_indent=own, break_long_words=False)
        return f"{head}\n{listing(own, items, separator)}"
    whole = [item.replace(" ", _GLUE) if available is None or len(item) < room else item for item in items]
    return textwrap.fill(
        f"{separator} ".join(whole),
        width,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    ).replace(_GLUE, " ")


def first_sentence(reason: str) -> str:
    """Why a device was passed over, in one sentence where it is long."""
    first = re.split(r"; |\. ", reason, maxsplit=1)[0]
    return reason if len(reason) <= _PIPE or first == reason else f"{first}; `dispatcher doctor` or --json says more"


def entry(label: str, *items: str) -> str:
    """A line of a report that begins with a label."""
    return listing(f"{label:<9} ", items)


# ---- numbers -----------------------------------------------------------------------------------------------
def share(value: float | None) -> str:
    """A share as per cent; empty where it is not known."""
    return "" if value is None else f"{100 * value:.3g} %"


def seconds(value: float) -> str:
    """A time with its unit."""
    for limit, unit, factor in ((1e-3, "us", 1e6), (1.0, "ms", 1e3)):
        if value < limit:
            return f"{value * factor:.3g} {unit}"
    return f"{value:.3g} s" if value < 1000 else f"{value:.0f} s"


def duration(value: float) -> str:
    """A time that people have to wait, roughly."""
    return f"{value:.0f} s" if value < 100 else f"{value / 60:.0f} min" if value < 6000 else f"{value / 3600:.1f} h"


def count(value: float) -> str:
    """A number with a decimal prefix, to be followed by its unit: ``58.1 G``."""
    for limit, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= limit:
            return f"{value / limit:.3g} {prefix}"
    return f"{value:g} "


def optional(value: float | None) -> str:
    """A number; empty where it is not known."""
    return "" if value is None else format(value, ".3g")


def assignments(values: Mapping[str, object]) -> list[str]:
    """The entries of a mapping as ``NAME=VALUE``."""
    return [f"{name}={value}" for name, value in values.items()]


def options_text(options: Mapping[str, object]) -> str:
    """Tuning options on one line."""
    return " ".join(assignments(options)) if options and options.get("tuned") != "ignore" else "the default"
