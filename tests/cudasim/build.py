"""Builds the stand-in libcuda.so.1 and the runtime object that is linked into every kernel module."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.cudasim.cache import SOURCES, cached_folder, content_hash


class BuildError(RuntimeError):
    """A part of the simulator did not compile, or this machine can't have it."""


def cxx() -> str:
    """The host C++ compiler: `$CXX`, or g++."""
    return os.environ.get("CXX") or "g++"


def compiler_version() -> str:
    """The compiler's own description, for content hashes.

    Raises:
        BuildError: There is no such compiler, or this is not x86-64 Linux.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise BuildError(f"the CUDA simulator needs Linux on x86-64, not {sys.platform} on {platform.machine()}")
    if shutil.which(cxx()) is None:
        raise BuildError(f"the CUDA simulator needs a C++17 compiler: {cxx()!r} is not on PATH; install g++ or set CXX")
    return run_compiler(["--version"]) + _cpu_features()


def _cpu_features() -> str:
    """What -march=native depends on: a cache shared between machines must not mix their modules."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith("flags")), "")


def run_compiler(arguments: list[str]) -> str:
    """Runs the host compiler.

    Returns:
        What it wrote to stdout.

    Raises:
        BuildError: With the compiler's messages.
    """
    done = subprocess.run([cxx(), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(done.stderr or f"{cxx()} failed with status {done.returncode}")
    return done.stdout


def driver_library() -> Path:
    """The path of the stand-in libcuda.so.1, built on first use; beside it lies the link name libcuda.so."""
    sources = sorted((SOURCES / "driver").glob("*.cpp"))
    inputs = [*sources, SOURCES / "driver" / "driver.h", SOURCES / "abi.h"]

    def fill(folder: Path) -> None:
        from tests.cudasim.toolkit import include_folder

        options = ["-std=c++17", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-U_FORTIFY_SOURCE"]
        link_options = ["-Wl,-soname,libcuda.so.1", "-pthread", "-ldl"]
        library = str(folder / "libcuda.so.1")
        files = [f"-I{include_folder()}", *map(str, sources), "-o", library]
        run_compiler([*options, *files, *link_options])
        (folder / "libcuda.so").symlink_to("libcuda.so.1")

    return cached_folder("driver", content_hash(inputs, compiler_version()), fill) / "libcuda.so.1"


def runtime_object(version: str) -> Path:
    """The compiled scheduler, and what the CUDA runtime has, built on first use.

    Args:
        version: What `compiler_version()` returned.
    """
    folders = (SOURCES / "device", SOURCES / "runtime")
    inputs = [*(path for folder in folders for path in folder.iterdir()), SOURCES / "abi.h"]

    def fill(folder: Path) -> None:
        options = ["-std=c++17", "-O3", "-march=native", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique"]
        sources = (str(path) for path in sorted(inputs) if path.suffix == ".cpp")
        run_compiler([*options, "-r", "-nostdlib", *sources, "-o", str(folder / "runtime.o")])

    return cached_folder("runtime", content_hash(inputs, version), fill) / "runtime.o"


def headers(version: str, flags: Sequence[str]) -> Path:
    """A header that includes device/cusim.h, precompiled on first use: most kernels are shorter than what it reads.

    Args:
        version: What `compiler_version()` returned.
        flags: What kernels are compiled with; the compiler takes it with the same ones alone.
    """
    device = SOURCES / "device"

    def fill(folder: Path) -> None:
        header = folder / "cusim.h"
        header.write_text(f'#include "{device / "cusim.h"}"\n')
        run_compiler([*flags, "-w", "-x", "c++-header", str(header), "-o", f"{header}.gch"])

    inputs = [*device.glob("*.h"), SOURCES / "abi.h"]
    folder = cached_folder("headers", content_hash(inputs, version, str(device), *flags), fill)
    os.utime(folder)
    return folder / "cusim.h"
