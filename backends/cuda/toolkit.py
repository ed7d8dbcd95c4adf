"""nvcc: finding it, asking it what it can do, and compiling kernels through a cache of cubins.

The command is ``nvcc`` unless the environment variable ``DISPATCHER_NVCC`` names another one: on PATH, of a toolkit in
its usual place, or from PyPI, in this order.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from dispatcher.device.filecache import FileCache, Turns
from dispatcher.errors import BuildError

KERNELS = Path(__file__).parent / "kernels"
CUBINS = FileCache("cuda")
_turns = Turns()
ENVIRONMENT_VARIABLE = "DISPATCHER_NVCC"
#: Installs nvcc and PyCUDA where there is a driver alone.
INSTALL = "python -m dispatcher.backends.cuda.install"
REMEDY = (
    f"run {INSTALL} (from PyPI, for drivers from release 580 on), or install the CUDA toolkit, "
    f"or set {ENVIRONMENT_VARIABLE} to the path of nvcc"
)
_PROBE_TIMEOUT_S = 30.0
_COMPILE_TIMEOUT_S = 300.0
#: What nvcc reads beside its command line.
_VARIABLES = (
    *("NVCC_PREPEND_FLAGS", "NVCC_APPEND_FLAGS", "NVCC_CCBIN"),
    *("CPATH", "C_INCLUDE_PATH", "CPLUS_INCLUDE_PATH"),
)
#: Options that lose bits, or NaN.
_UNSAFE_OPTION = re.compile(r"-use_fast_math|-ftz[= ]?t(?:rue)?\b|-prec-(?:div|sqrt)[= ]?f(?:alse)?\b")


@dataclass(frozen=True)
class Toolkit:
    """A compiler that answered.

    Attributes:
        command: how it is called.
        version: all that it says of its version.
        release: ``(major, minor)`` of the toolkit, or None when the text does not say.
    """

    command: tuple[str, ...]
    version: str
    release: tuple[int, int] | None


def find() -> Toolkit | str:
    """The compiler, or why there is none."""
    named = os.environ.get(ENVIRONMENT_VARIABLE)
    for name, value in {ENVIRONMENT_VARIABLE: named, **_settings()}.items():
        if option := _UNSAFE_OPTION.search(value or ""):
            return f"{name} is {value!r}, and with -{option[0]} results are not what is promised; leave that out"
    if named:
        words = shlex.split(named)
        if not words or shutil.which(words[0]) is None:
            return f"{ENVIRONMENT_VARIABLE} is {named!r}, which is not a program; set it to the path of nvcc"
        return _ask(tuple(words))
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    places = ("nvcc", os.path.join(home, "bin", "nvcc"), *map(str, from_pypi()))
    path = next(filter(None, map(shutil.which, places)), None)
    if path is None:
        return f"nvcc is not on PATH; {REMEDY}"
    # One from PyPI looks for the toolkit's libraries in lib64.
    libraries = Path(path).resolve().parents[1] / "lib"
    return _ask((path, f"-L{libraries}") if (libraries / "libcudart_static.a").exists() else (path,))


def from_pypi() -> list[Path]:
    """The compilers that pip installed for this Python, the newest first."""
    spec = importlib.util.find_spec("nvidia")
    folders = (spec and spec.submodule_search_locations) or ()
    return sorted((path for folder in folders for path in Path(folder).glob("cu*/bin/nvcc")), reverse=True)


def _settings() -> dict[str, str]:
    return {name: os.environ[name] for name in _VARIABLES if os.environ.get(name)}


def _ask(command: tuple[str, ...]) -> Toolkit | str:
    try:
        return _answer(command)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{shlex.join(command)} --version did not work: {error}"


@lru_cache(maxsize=8)
def _answer(command: tuple[str, ...]) -> Toolkit:
    answer = subprocess.run(
        [*command, "--version"], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
    )
    version = answer.stdout.strip()
    release = re.search(r"release (\d+)\.(\d+)", version)
    return Toolkit(command, version, None if release is None else (int(release[1]), int(release[2])))


@lru_cache(maxsize=8)
def architectures(toolkit: Toolkit) -> frozenset[int]:
    """Architectures that the compiler makes code for, such as 90; empty when it does not say."""
    try:
        answer = subprocess.run(
            [*toolkit.command, "--list-gpu-code"],
            capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return frozenset()
    return frozenset(int(number) for number in re.findall(r"\bsm_(\d+)\b", answer.stdout))


@dataclass(frozen=True)
class Kernel:
    """A kernel file with its defines: what is compiled.

    Attributes:
        file: name of a file in the kernels folder.
        defines: macro name and value, sorted.
        operations: text of the header ``operations.cuh``, for files that include it.
    """

    file: str
    defines: tuple[tuple[str, str], ...]
    operations: str = ""

    @staticmethod
    def of(file: str, defines: Mapping[str, int | str], operations: str = "") -> Kernel:
        """A kernel from a mapping of defines."""
        return Kernel(file, tuple(sorted((name, str(value)) for name, value in defines.items())), operations)

    def arguments(self) -> list[str]:
        """The compiler's options for the defines."""
        return [f"-D{name}={value}" for name, value in self.defines]


@lru_cache(maxsize=4)
def _sources(folder: Path) -> bytes:
    return b"\0".join(path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix in (".cu", ".cuh"))


def sources_digest() -> str:
    """A text that changes whenever a kernel does."""
    return hashlib.sha256(_sources(KERNELS)).hexdigest()


def _key(kernel: Kernel, architecture: int, toolkit: Toolkit) -> str:
    parts = (sources_digest(), kernel, architecture, toolkit.command, toolkit.version, _settings())
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def cubin(kernel: Kernel, architecture: int, toolkit: Toolkit, device: str, *, fresh: bool = False) -> bytes:
    """Machine code of ``kernel``, from the cache where it is there.

    Args:
        architecture: compute capability as one number, such as 90.
        device: the device's name, for messages.
        fresh: compile even if the cache has it.

    Raises:
        BuildError: the compiler refused it, or did not run.
    """
    key = _key(kernel, architecture, toolkit)
    with _turns(key):  # two devices of one kind may ask at the same time
        image = None if fresh else CUBINS.get(key)
        if not image:
            image = compile_kernel(kernel, architecture, toolkit, device)
            CUBINS.put(key, image)
    return image


def command_line(kernel: Kernel, architecture: int, toolkit: Toolkit, output: Path) -> list[str]:
    """How the compiler is called; the kernel's own header is written into the folder of ``output``."""
    (output.parent / "operations.cuh").write_text(kernel.operations, encoding="utf-8")
    return [
        *toolkit.command, "-cubin", f"-arch=sm_{architecture}", "-std=c++17", "-I", str(KERNELS),
        "-I", str(output.parent),
        *kernel.arguments(), "-o", str(output), str(KERNELS / kernel.file),
    ]  # fmt: skip


def compile_kernel(kernel: Kernel, architecture: int, toolkit: Toolkit, device: str) -> bytes:
    """Run the compiler; arguments and errors as for :func:`cubin`."""
    where = f"{kernel.file} for {device} (compute capability {architecture // 10}.{architecture % 10})"
    with tempfile.TemporaryDirectory(prefix="kernel-dispatcher-") as folder:
        output = Path(folder) / "kernel.cubin"
        return run(command_line(kernel, architecture, toolkit, output), output, where)


def run(command: Sequence[str], output: Path, where: str) -> bytes:
    """Run a command of the compiler; returns what it wrote to ``output``.

    Args:
        where: what it compiles, for messages.

    Raises:
        BuildError: it refused that, or did not run; with its log.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, cwd=output.parent, check=False
        )
        image = output.read_bytes() if done.returncode == 0 and output.exists() else b""
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"cannot compile {where}: {error}", shlex.join(command)) from error
    log = f"{done.stdout}{done.stderr}".strip()
    if not image:
        raise BuildError(f"nvcc refused {where}: {_first_error(log, done.returncode)}", f"{shlex.join(command)}\n{log}")
    return image


def _first_error(log: str, code: int) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    wrong = [line for line in lines if re.search(r"error|fatal|unsupported", line, re.IGNORECASE)]
    return (wrong or lines or [f"exit status {code} without a message"])[0]
