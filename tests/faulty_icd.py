"""OpenCL runtimes with a fault, for processes that a test starts; see ``faulty_icd.c``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dispatcher.backends.opencl.icd import load_error, prepare_icd_vendors

ROOT = Path(__file__).resolve().parent.parent
SOURCE = Path(__file__).with_suffix(".c")


@dataclass
class FaultyRuntime:
    """A folder with an .icd file for the faulty runtime, a cache folder of its own, and a count of contexts.

    What PoCL compiles is kept in a folder that all of them share.
    """

    folder: Path
    real: str
    mode: str
    builds: Path

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    @property
    def contexts(self) -> int:
        """Contexts that were created so far, by whatever process."""
        count = self.folder / "count"
        return count.stat().st_size if count.exists() else 0

    def environment(self, **more: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("DISPATCHER_")}
        return {
            **kept,
            "OCL_ICD_VENDORS": str(self.folder),
            "XDG_CACHE_HOME": str(self.cache),
            "POCL_CACHE_DIR": str(self.builds),
            "FAULTY_REAL": self.real,
            "FAULTY_MODE": self.mode,
            "FAULTY_COUNT": str(self.folder / "count"),
            **more,
        }

    def dispatcher(self, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        """Run the command line on a machine whose only OpenCL runtime is this one."""
        command = [sys.executable, "-m", "dispatcher.cli", *arguments]
        return subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, env=self.environment(**more), check=False
        )

    def devices(self, *arguments: str, **more: str) -> list[dict[str, Any]]:
        """The OpenCL devices that ``dispatcher devices`` lists."""
        ended = self.dispatcher("devices", "--json", *arguments, **more)
        assert ended.returncode == 0, ended.stderr
        return [device for device in json.loads(ended.stdout)["devices"] if device["backend"] == "opencl"]


class FaultyRuntimes:
    """Makes faulty runtimes out of a real one."""

    def __init__(self, library: Path, real: str, folder: Path) -> None:
        self._library, self._real, self._folder = library, real, folder

    def __call__(self, mode: str) -> FaultyRuntime:
        folder = self._folder / mode
        folder.mkdir()
        (folder / "faulty.icd").write_text(f"{self._library}\n")
        return FaultyRuntime(folder, self._real, mode, self._library.parent / "pocl")


def build(folder: Path) -> tuple[Path, str]:
    """Compile the faulty runtime's library; skips where there is no C compiler or no real runtime to spoil.

    Returns:
        The library, and the real runtime's library.
    """
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("there is no C compiler to make a faulty OpenCL runtime with")
    real = [entry.library for entry in prepare_icd_vendors().entries if entry.used]
    real = [library for library in real if load_error(library) is None]
    if not real:
        pytest.skip("there is no OpenCL runtime to make a faulty one from")
    library = folder / "libfaulty.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"], check=True)
    return library, real[0]
