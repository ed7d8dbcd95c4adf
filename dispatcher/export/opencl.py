"""An export for programs that use OpenCL: sources, data, and a JSON file that says what to do with them."""

from __future__ import annotations

import json
from pathlib import Path

from dispatcher.export.cuda import exported, head
from dispatcher.interface import ExportRequest


def write(request: ExportRequest, target: Path) -> dict[Path, str | bytes]:
    """The JSON file, and beside it a source for each launch and the data."""
    document, sources, data = exported(request, "opencl")
    names = [target.with_name(f"{target.stem}_{number}.cl") for number in range(len(sources))]
    data_file = target.with_suffix(".bin")
    how = f"clBuildProgram with {document['build_options']}; {target.name} says how it is launched"
    top = head(request, how, usual="cpu")
    document |= {"sources": [path.name for path in names], "data": data_file.name}
    files: dict[Path, str | bytes] = {target: json.dumps(document, indent=1) + "\n", data_file: data}
    return files | {path: top + text for path, text in zip(names, sources, strict=True)}
