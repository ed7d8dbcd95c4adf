"""The nvcc stand-in: compiles a .cu file to a host shared object that the stand-in driver loads as a "cubin".

The source is preprocessed first, so macros and included files have been dealt with when the tokens that plain
C++ lacks (__global__, __shared__, extern __shared__) are rewritten. Line markers stay, so messages name the
user's file.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from tests.cudasim.build import BuildError, compiler_version, headers, run_compiler, runtime_object
from tests.cudasim.cache import SOURCES, cache_folder, cached_folder, content_hash

ARCHITECTURES = (75, 80, 86, 87, 89, 90, 100, 120)
KEEP_UNUSED_S = 14 * 24 * 3600

_ATTRIBUTES = r"(?:__attribute__\s*\(\((?:[^()]|\([^()]*\))*\)\)\s*)*"
_LINE_MARKERS = r"(?:#[^\n]*\n\s*)*"
_KERNEL = re.compile(
    rf"(template\s*<[^;{{}}]*>\s*)?\b__global__\s+{_LINE_MARKERS}(?:static\s+)?void\s+{_ATTRIBUTES}(\w+)\s*\("
)
_NESTED = r"\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)"
_BOUNDS = re.compile(rf"__launch_bounds__\s*\(((?:[^(),]|{_NESTED})*)(?:,(?:[^()]|{_NESTED})*)?\)")
_BOUNDED = re.compile(rf"{_BOUNDS.pattern}\s*{_LINE_MARKERS}(?:void\s+)?{_ATTRIBUTES}(\w+)\s*\(")
_DYNAMIC_SHARED = re.compile(rf"\bextern\s+__shared__\s+{_ATTRIBUTES}([\w:\s]*?\w)\s+(\w+)\s*\[\s*\]\s*;")
_LAUNCHED = re.compile(r"(?<![\w:])([\w:]+)\s*<<<(.*?)>>>\s*\(", re.DOTALL)
_SCOPE = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)\'|\bnamespace\s+(\w+)\s*\{|[{}]')
_LINE_MARKER = re.compile(r'^# \d+ "[^\n]*$', re.MULTILINE)

# Products and sums contract to fused multiply-adds, as with nvcc. NaN and Inf keep their meaning.
_OPTIMISATION = [
    "-O2",
    "-march=native",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-strict-aliasing",
]
_CHECKS = ["-fsanitize=bounds,alignment", "-fno-sanitize-recover=bounds,alignment"]
# What makes two loaded copies of one module independent of each other, and lets module.ld sort its variables.
_MODULE_LAYOUT = [
    "-fPIC",
    "-fno-semantic-interposition",
    "-fno-gnu-unique",
    "-fdata-sections",
    "-fno-threadsafe-statics",
]


def rewrite(preprocessed: str) -> tuple[str, list[str]]:
    """Turns preprocessed CUDA C++ into C++.

    Args:
        preprocessed: The text, in which __global__ and __shared__ still stand as they are.

    Returns:
        The C++ text, and the names of the kernels: all non-template functions marked __global__.
    """
    preprocessed = _BOUNDS.sub("", preprocessed)
    found = (match for match in _KERNEL.finditer(preprocessed) if not match.group(1))
    kernels = list(_qualified(preprocessed, found))

    text = _DYNAMIC_SHARED.sub(r"\1 *\2 = reinterpret_cast<\1 *>(cusim::dynamic_shared);", preprocessed)
    text = re.sub(r"\b__shared__\b", "static", text)
    text = re.sub(r"\b__global__\b", "", text)
    text = _LAUNCHED.sub(r"cusim_runtime::configured(\1, \2)(", text)
    return text, list(dict.fromkeys(kernels))


def _qualified(text: str, kernels: Iterable[re.Match[str]]) -> Iterator[str]:
    """The names of kernels of a preprocessed text, in its order, with the namespaces that are open at each."""
    scopes: list[str] = []
    end = 0
    for kernel in kernels:
        for token in _SCOPE.finditer(text, end, kernel.start()):
            if token[0] == "}":
                scopes.pop()
            elif token[0][-1] == "{":
                scopes.append(token[1] or "")
        end = kernel.start()
        yield "::".join([*filter(None, scopes), kernel[2]])


def module_table(kernels: Sequence[str], architecture: str, bounds: Mapping[str, str] = MappingProxyType({})) -> str:
    """The C++ text that names a module's kernels to the driver.

    Args:
        kernels: Names of extern "C" functions, or of others that are not overloaded.
        architecture: As in sm_80 or sm_90a, without the sm_.
        bounds: For kernels that say so, how many threads a block may have, as C++ text.
    """
    most, constants = dict.fromkeys(kernels, "cusim_abi::MAX_THREADS"), ""
    for name in kernels:
        scope, _, own = name.rpartition("::")
        if own in bounds:  # whose text may name constants of the kernel's namespace
            constant = f"constexpr unsigned cusim_most_{own} = {bounds[own]};"
            constants += f"namespace {scope} {{ {constant} }}\n" if scope else f"{constant}\n"
            most[name] = f"{scope}::cusim_most_{own}"
    entries = "".join(f'cusim::entry<&{name}>("{name}", {most[name]}), ' for name in kernels)
    named = "".join(f'if (kernel == reinterpret_cast<const void *>(&{name})) return "{name}"; ' for name in kernels)
    number = architecture.rstrip("af")
    specific = "false" if number == architecture else "true"
    return f"""
# 1 "module table"
{constants}namespace cusim {{ const int architecture = {number}; }}
namespace cusim_runtime {{ const char *kernel_name(const void *kernel) {{ {named}return ""; }} }}
__attribute__((section("cusim_kernel_table")))
const cusim_abi::Kernel cusim_kernels[] = {{{entries}{{nullptr, nullptr, 0, 0}}}};
extern "C" __attribute__((section("cusim_kernel_table"), visibility("default")))
const cusim_abi::Module cusim_module = {{
    cusim_abi::VERSION, {number}, {specific}, cusim_kernels, {len(kernels)},
    cusim_shared_begin, cusim_shared_end, cusim_globals_begin, cusim_globals_end, cusim::describe_thread}};
"""


def compile_file(
    source: Path,
    *,
    architecture: str,
    standard: str = "c++17",
    options: Sequence[str] = (),
    host_options: Sequence[str] = (),
) -> bytes:
    """Compiles a .cu file, or takes the result of an earlier compilation of the same text from the cache.

    Args:
        source: The .cu file.
        architecture: As in sm_80, without the sm_.
        standard: The C++ standard.
        options: -I and -D options.
        host_options: Of the host compiler.

    Returns:
        The shared object.

    Raises:
        BuildError: With the host compiler's messages, which name the user's files and lines.
    """
    device = SOURCES / "device"
    version = compiler_version()
    digits = re.sub(r"\D", "", architecture)
    flags = (f"-std={standard}", *_OPTIMISATION, *host_options, *_CHECKS, *_MODULE_LAYOUT)
    preamble = ["-fpch-preprocess", f"-D__CUDA_ARCH__={digits}0", "-include", str(headers(version, flags))]
    preprocessed = run_compiler([*flags, "-E", "-x", "c++", *preamble, *options, str(source)])
    text, kernels = rewrite(preprocessed)
    text += module_table(kernels, architecture, {name: most for most, name in _BOUNDED.findall(preprocessed)})
    runtime = runtime_object(version)

    def fill(folder: Path) -> None:
        program, kernel = folder / "kernel.ii", folder / "kernel.o"
        program.write_text(text)
        run_compiler([*flags, "-w", "-c", str(program), "-o", str(kernel)])
        link_options = ["-shared", "-Wl,-Bsymbolic", f"-Wl,-T,{device / 'module.ld'}"]
        run_compiler([*link_options, str(kernel), str(runtime), "-o", str(folder / "module.so")])
        program.unlink()
        kernel.unlink()

    code = _LINE_MARKER.sub("", text)  # the same source hits the cache wherever it lies
    name = content_hash([device / "module.ld"], code, str(runtime), version, " ".join(flags))
    folder = cached_folder("modules", name, fill)
    os.utime(folder)
    _forget_unused()
    return (folder / "module.so").read_bytes()


def compile_library(
    source: Path, output: Path, *, architecture: str, standard: str, options: Sequence[str], host_options: Sequence[str]
) -> None:
    """Compiles a .cu file with functions of the host to a shared library. They may use device pointers as they are, the
    stand-in's device memory being the host's, or launch kernels of the same file.

    Raises:
        BuildError: With the host compiler's messages.
    """
    if "__global__" in source.read_text(encoding="utf-8"):
        wanted = [f"-I{SOURCES / 'runtime'}", *options]
        output.write_bytes(
            compile_file(
                source, architecture=architecture, standard=standard, options=wanted, host_options=host_options
            )
        )
        return
    flags = [f"-std={standard}", "-O2", *host_options, "-shared", "-fPIC"]
    run_compiler([*flags, "-x", "c++", *options, str(source), "-o", str(output)])


def _forget_unused() -> None:
    """Once a day, removes modules and headers that nobody has asked for lately."""
    stamp = cache_folder() / "last-cleaned"
    now = time.time()
    if stamp.exists() and now - stamp.stat().st_mtime < KEEP_UNUSED_S / 14:
        return
    stamp.touch()
    for kind in ("modules", "headers"):
        for folder in (cache_folder() / kind).iterdir():
            if now - folder.stat().st_mtime > KEEP_UNUSED_S:
                shutil.rmtree(folder, ignore_errors=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nvcc", description=__doc__, allow_abbrev=False)
    parser.add_argument("source", type=Path)
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("-cubin", "--cubin", action="store_true")
    kind.add_argument("-shared", "--shared", action="store_true")
    parser.add_argument("-arch", "--gpu-architecture", required=True)
    parser.add_argument("-std", default="c++17")
    parser.add_argument("-o", dest="output", type=Path, required=True)
    parser.add_argument("-I", dest="includes", action="append", default=[])
    parser.add_argument("-D", dest="defines", action="append", default=[])
    parser.add_argument("-Xcompiler", dest="host_options", action="append", default=[])
    parser.add_argument("-Xptxas", action="append", help="ignored")
    parser.add_argument("-lineinfo", "-O3", action="store_true", help="ignored")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Runs one compilation as nvcc would: `nvcc -cubin -arch=sm_80 -I DIR -DNAME=VALUE -o OUT.cubin IN.cu`, or
    `nvcc -shared ...` for a library with functions of the host.

    Returns:
        The exit status.
    """
    if "--version" in arguments or "-V" in arguments:
        # Who keeps cubins tells compilers apart by this text; so it changes with everything that goes into one.
        folders = [SOURCES / "device", SOURCES / "runtime"]
        inputs = [*(path for folder in folders for path in folder.iterdir()), SOURCES / "abi.h", Path(__file__)]
        print("nvcc: the stand-in of the CUDA simulator\nCuda compilation tools, release 13.0, V13.0.0")
        print(f"Build {content_hash(inputs, compiler_version())}")
        return 0
    if "--list-gpu-code" in arguments:
        print("\n".join(f"sm_{capability}" for capability in ARCHITECTURES))
        return 0
    # argparse takes -DNAME as -D NAME, and -Xptxas -v only if they are one word.
    joined = re.sub(r"\0(-Xptxas|-Xcompiler)\0", r"\0\1=", "\0".join(["", *arguments])).split("\0")[1:]
    given = _parser().parse_args(joined)
    match = re.fullmatch(r"sm_(\d+[af]?)", given.gpu_architecture)
    if match is None:
        print(f"nvcc: -arch must be sm_NN, not {given.gpu_architecture}", file=sys.stderr)
        return 1
    options = [*(f"-I{folder}" for folder in given.includes), *(f"-D{define}" for define in given.defines)]
    try:
        if given.shared:
            compile_library(
                given.source, given.output, architecture=match.group(1), standard=given.std, options=options,
                host_options=given.host_options,
            )  # fmt: skip
            return 0
        module = compile_file(given.source, architecture=match.group(1), standard=given.std, options=options)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    given.output.write_bytes(module)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
