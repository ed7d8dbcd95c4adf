"""Registers, shared memory, spills and occupancy of every default CUDA kernel, from nvcc; no GPU is needed.

    python bench/cuda_resources.py [--arch 80 90 ...] [--output bench/results/cuda-resources.md] [--cuobjdump PATH]

For each architecture the five problems are planned at their `kernelbench` size as on a device of that
architecture, float32 and tf32, and their kernels are compiled with ``nvcc -Xptxas -v``; the other element
types are compiled for the `sample` size. Occupancy is theoretical: warps that registers, shared memory and
threads allow, of those that a multiprocessor can hold.

The machine code is looked at where `cuobjdump` is there (it comes with the toolkit, and as the packages
nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm): instructions on tensor cores; the main loop's instructions for each
product, and what it spills; reads and asynchronous copies of 16 bytes; stores of 8 bytes and more.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.common import FIVE, markdown, plain_parser
from dispatcher import load_problem
from dispatcher.backends.cuda import toolkit
from dispatcher.backends.cuda.lowering import lower
from dispatcher.backends.cuda.options import Options
from dispatcher.backends.cuda.program import Launch
from dispatcher.backends.cuda.tasks import Target
from dispatcher.problem.arguments import bind_numbers


@dataclass(frozen=True)
class Architecture:
    """Limits of a multiprocessor, from the CUDA programming guide's table of compute capabilities.

    Attributes:
        warps: that can be resident.
        blocks: that can be resident.
        shared_bytes: shared memory of a multiprocessor.
        block_shared_bytes: most that one block may have.
        processors: of a typical device.
    """

    warps: int
    blocks: int
    shared_bytes: int
    block_shared_bytes: int
    processors: int


ARCHITECTURES = {
    75: Architecture(32, 16, 64 << 10, 64 << 10, 40),
    80: Architecture(64, 32, 164 << 10, 163 << 10, 108),
    86: Architecture(48, 16, 100 << 10, 99 << 10, 84),
    89: Architecture(48, 24, 100 << 10, 99 << 10, 128),
    90: Architecture(64, 32, 228 << 10, 227 << 10, 132),
    100: Architecture(64, 32, 228 << 10, 227 << 10, 148),
    120: Architecture(48, 32, 100 << 10, 99 << 10, 170),
}
REGISTERS = 65536
RESERVED_SHARED_BYTES = 1024  # of each block, since sm_80
_PRODUCTS = 8  # that a main loop has at least


@dataclass(frozen=True)
class Variant:
    """A kernel to compile."""

    architecture: int
    label: str
    launch: Launch


@dataclass(frozen=True)
class Code:
    """Instructions of a kernel.

    Attributes:
        tensor: on tensor cores.
        loop: of the main loop, the one with the largest share of products: all instructions, products, and accesses to
            spilled registers.
        wide_reads: of 16 bytes a lane from global memory.
        wide_copies: of 16 bytes from global to shared memory.
        wide_stores: of 8 or 16 bytes to global memory.
    """

    tensor: int
    loop: tuple[int, int, int]
    wide_reads: int
    wide_copies: int
    wide_stores: int


@dataclass(frozen=True)
class Resources:
    """What ptxas says of a kernel, and what follows."""

    registers: int
    static_shared_bytes: int
    spill_bytes: int
    code: Code | None


def variants(architecture: int) -> list[Variant]:
    """Kernels of the five problems, each once."""
    limits = ARCHITECTURES[architecture]
    target = Target(architecture, limits.block_shared_bytes, limits.processors)
    runs = [("kernelbench", "float32", "fp32"), ("kernelbench", "float32", "tf32")]
    runs += [("sample", "float16", "fp32"), ("sample", "float64", "fp32")]
    found: dict[toolkit.Kernel, Variant] = {}
    for case, dtype, precision in runs:
        for name in FIVE:
            problem = load_problem(name)
            operator = bind_numbers(problem, {}, "compile", case=case, dtype=dtype, precision=precision)
            program = lower(operator, target, Options())
            for launch in [*program.launches, *(packed.launch for packed in program.packed)]:
                label = f"{launch.name}, {name}" if launch.name.startswith("conv") else launch.name
                label += f", {dtype if dtype != 'float32' else precision}"
                found.setdefault(launch.kernel, Variant(architecture, label, launch))
    return list(found.values())


def disassemble(cubin: Path, name: str, cuobjdump: str) -> Code:
    """Count instructions of function ``name``."""
    folders = os.pathsep.join([str(Path(cuobjdump).parent), os.environ.get("PATH", "")])  # it calls nvdisasm
    command = [cuobjdump, "--dump-sass", "--function", name, str(cubin)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "PATH": folders})
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?);", done.stdout)
    code = [(int(address, 16), text) for address, text in found]

    def count(pattern: str, part: list[str]) -> int:
        return sum(re.search(pattern, text) is not None for text in part)

    everything = [text for _, text in code]
    product = "HMMA" if count("HMMA", everything) else r"\b[FD]FMA"
    loops = []
    for address, text in code:
        back = re.search(r"\bBRA\b.* 0x([0-9a-f]+)", text)
        if back and int(back[1], 16) <= address:
            body = [inside for at, inside in code if int(back[1], 16) <= at <= address]
            loops.append((len(body), count(product, body), count(r"\b(STL|LDL)", body)))
    return Code(
        count("HMMA", everything),
        max((loop for loop in loops if loop[1] >= _PRODUCTS), key=lambda x: x[1] / x[0], default=(0, 0, 0)),
        count(r"\bLDG\S*\.128", everything),
        count(r"\bLDGSTS\S*\.128", everything),
        count(r"\bSTG\S*\.(64|128)", everything),
    )


def measure(variant: Variant, compiler: toolkit.Toolkit, cuobjdump: str | None) -> Resources:
    """Compile a kernel, read ptxas's report, and look at the code."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "kernel.cubin"
        command = toolkit.command_line(variant.launch.kernel, variant.architecture, compiler, output)
        done = subprocess.run([*command, "-Xptxas", "-v"], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"nvcc refused {variant.label} for sm_{variant.architecture}:\n{done.stderr}")
        code = disassemble(output, variant.launch.name, cuobjdump) if cuobjdump else None
    report = done.stderr.split(f"Compiling entry function '{variant.launch.name}'")[-1]

    def number(pattern: str) -> int:
        match = re.search(pattern, report)
        return int(match[1]) if match else 0

    spills = number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads")
    return Resources(number(r"Used (\d+) registers"), number(r"(\d+) bytes smem"), spills, code)


def occupancy(variant: Variant, resources: Resources) -> float:
    """Share of a multiprocessor's warps that can be resident."""
    limits = ARCHITECTURES[variant.architecture]
    warps = -(-variant.launch.threads // 32)
    registers = -(-resources.registers * 32 // 256) * 256 * warps
    reserved = RESERVED_SHARED_BYTES if variant.architecture >= 80 else 0
    shared = variant.launch.shared_bytes + resources.static_shared_bytes + reserved
    fitting = limits.shared_bytes // shared if shared else limits.blocks
    blocks = min(limits.blocks, limits.warps // warps, REGISTERS // max(registers, 1), fitting)
    return blocks * warps / limits.warps


def columns(code: Code | None) -> list[str]:
    """The last columns of a row."""
    if code is None:
        return ["?"] * 4
    loop = (f"{code.loop[0] / code.loop[1]:.1f}", str(code.loop[2])) if code.loop[1] else ("", "")
    return [str(code.tensor or ""), *loop, f"{code.wide_reads}, {code.wide_copies}, {code.wide_stores}"]


def main() -> int:
    """Write the table."""
    parser = plain_parser(__doc__)
    parser.add_argument("--arch", type=int, nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    parser.add_argument("--output", type=Path, default=ROOT / "bench" / "results" / "cuda-resources.md")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--cuobjdump", help="its path; looked for on PATH if left out")
    given = parser.parse_args()
    cuobjdump = shutil.which(given.cuobjdump or "cuobjdump")
    compiler = toolkit.find()
    if isinstance(compiler, str):
        print(f"skipped: {compiler}", file=sys.stderr)
        return 0
    work = [variant for architecture in given.arch for variant in variants(architecture)]
    with ThreadPoolExecutor(given.jobs) as pool:
        measured = list(pool.map(lambda variant: measure(variant, compiler, cuobjdump), work))
    release = "unknown" if compiler.release is None else "{}.{}".format(*compiler.release)
    lines = [
        "# Resources of the CUDA kernels",
        "",
        f"Made by `python bench/cuda_resources.py` with nvcc {release}. Kernels of the five problems at "
        "their `kernelbench` size (float16 and float64: `sample`), each once. Spills are bytes a thread, "
        "stores plus loads; "
        "occupancy is theoretical.",
        "",
        "HMMA: instructions on tensor cores. Loop: all instructions of the main loop for each of its products (HMMA, "
        "else FFMA or DFMA). In it: its accesses to spilled registers. Wide: reads of 16 bytes from global memory, "
        "copies of 16 bytes to shared memory, stores of 8 bytes and more.",
        "",
    ]
    rows = []
    for variant, resources in zip(work, measured, strict=True):
        shared = f"{(variant.launch.shared_bytes + resources.static_shared_bytes) / 1024:.1f}"
        counts = (resources.registers, shared, resources.spill_bytes, f"{occupancy(variant, resources):.0%}")
        known = (variant.architecture, variant.label, variant.launch.threads, *counts)
        rows.append([*map(str, known), *columns(resources.code)])
    titles = ("sm", "kernel", "threads", "registers", "shared KB", "spills", "occupancy")
    lines += markdown((*titles, "HMMA", "loop", "in it", "wide"), rows)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{len(work)} kernels -> {given.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
