"""How objects look to people who type their name: a line in a console, a small table in a notebook; and as pictures."""

from __future__ import annotations

import html
import importlib
from collections.abc import Mapping
from pathlib import Path


class Shown:
    """An object with a short text of its own."""

    def _headline(self) -> str:
        """What it is, in a few words; follows the name of its class."""
        raise NotImplementedError

    def _facts(self) -> Mapping[str, object]:
        """What else there is to say, by name; the lines of a sequence stand below each other."""
        return {}

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._headline()}>"

    def _repr_html_(self) -> str:
        """A table for notebooks. Texts of problem files, drivers and compilers are in it, so all of it is escaped."""
        rows = []
        for name, fact in self._facts().items():
            lines = fact if isinstance(fact, list | tuple) else [fact]
            cell = "<br>".join(html.escape(str(line)) for line in lines if line not in (None, ""))
            if cell:
                style = "text-align: left; vertical-align: top"
                rows.append(f'<tr><th style="{style}">{html.escape(name)}</th><td style="{style}">{cell}</td></tr>')
        title = html.escape(f"{type(self).__name__} {self._headline()}")
        return f'<table><caption style="text-align: left">{title}</caption>{"".join(rows)}</table>'


class Drawn(Shown):
    """An object that there is a picture of."""

    def plot(self, path: str | Path) -> None:
        """Draw it.

        Args:
            path: the file to write, which ends in ``.svg``, ``.png`` or ``.pdf``.

        Raises:
            InputError: Matplotlib is not installed, or ``path`` is no such name or cannot be written.
        """
        # By name: the room of pictures comes after all others.
        importlib.import_module("dispatcher.report.pictures").draw([self], path)
