"""What MkDocs does besides: pages that are made of the command line and of files outside of docs/, figures, and checks.

Nothing that a page shows may be fetched from elsewhere, so that the site can be read without a network.
"""

from __future__ import annotations

import html
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from dispatcher import cli

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
#: Pages from files of the checkout, by their place in the site.
TAKEN = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md", "bench.md": "bench/README.md"}
LINK = re.compile(
    r"\[([^\]]*)\]\((?:\.\./)*((?:backends|bench|dispatcher|docs|examples|problems|tests)(?![a-z])[^)#]*|[A-Z]+\.md)(#[^)]*)?\)"
)
FIGURES = re.compile(r"<!-- figures: (\w+) -->")
ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):<code>~?")
#: What a browser fetches to show a page; links that readers follow may lead anywhere.
FETCHED = re.compile(r"<(?:script|img|iframe|source|link)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are not in docs/."""
    files.append(File.generated(config, "reference/cli.md", content=command_line()))
    for place, source in TAKEN.items():
        files.append(File.generated(config, place, content=(ROOT / source).read_text(encoding="utf-8")))
    for chart in RESULTS.glob("*.png"):
        files.append(File.generated(config, f"gallery/{chart.name}", abs_src_path=str(chart)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links to files of the checkout: to their page where they have one, else their path as text."""
    upwards = "../" * page.file.src_uri.count("/")

    def link(found: re.Match[str]) -> str:
        text, path, anchor = found.groups()
        page_of = {source: place for place, source in TAKEN.items()}.get(path)
        if page_of is None and path.startswith("docs/"):
            page_of = path.removeprefix("docs/")
        if path.endswith(".png"):
            page_of = f"gallery/{Path(path).name}"
        if page_of is not None:
            return f"[{text}]({upwards}{page_of}{anchor or ''})"
        return text if path in text else f"{text} (`{path}`)"

    return LINK.sub(link, FIGURES.sub(lambda found: figures(found[1]), markdown))


def on_page_content(content: str, page: Any, config: Any, files: Files) -> str:
    """Roles of docstrings (``:func:``) are for other tools."""
    return ROLE.sub("<code>", content)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Refuse what would be fetched from elsewhere."""
    found = FETCHED.search(output)
    if found is not None:
        raise PluginError(f"{page.file.src_uri} fetches something from elsewhere: {found[0]}")
    return output


def figures(program: str) -> str:
    """The figures of a program's newest results, as Markdown."""
    (*_, newest) = sorted(RESULTS.glob(f"{program}-*.json"))
    report = json.loads(newest.read_text(encoding="utf-8"))
    if program == "cpu_peers":
        sys.path.insert(0, str(ROOT))
        from bench import cpu_peers

        return cpu_peers.table(report)
    found = report["overview"]
    return (
        f"PyTorch's time over ours is {found['geometric_mean']:.2f} in the geometric mean of {found['count']} problems "
        f"and {found['min']:.2f} at worst; it is below 1 for {found['below_1']} "
        f"({report['device_name']}, {report['date']})."
    )


# ---- the command line --------------------------------------------------------------------------------------
def command_line() -> str:
    """Every command with its arguments and options, as the program itself knows them."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    program: Any = typer.main.get_command(cli.app)
    yield "# Command line\n"
    yield "What `dispatcher COMMAND --help` says; [the guide](../command-line.md) shows how commands go together.\n"
    with program.make_context("dispatcher", [], resilient_parsing=True) as parent:
        for name in program.list_commands(parent):
            command = program.get_command(parent, name)
            with command.make_context(name, [], parent=parent, resilient_parsing=True) as context:
                yield f"## dispatcher {name}\n"
                yield f"{command.help}\n"
                usage = " ".join(command.collect_usage_pieces(context))
                yield f"```text\ndispatcher {name} {usage}\n```\n"
                yield "| | |\n|---|---|"
                for parameter in command.get_params(context):
                    record = parameter.get_help_record(context)
                    if record is not None:
                        names, text = (html.escape(part, quote=False).replace("|", "&#124;") for part in record)
                        yield f"| <code>{names}</code> | {text} |"
                yield ""
