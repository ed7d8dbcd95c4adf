"""Exports in CUDA C++: a function for Tensara, and a header and a file with a C API."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from dispatcher import __version__, registry
from dispatcher.check.kernelfile import parameter_list
from dispatcher.interface import Exporter, ExportRequest
from dispatcher.problem.userkernel import spelled


def tensara(request: ExportRequest, target: Path) -> dict[Path, str]:
    """One file with ``extern "C" void solution(...)``, whose tensors are on the device."""
    text, architecture = body(request)
    how = f"nvcc -std=c++20 -O2 -arch=sm_{architecture} -shared -Xcompiler -fPIC -o solution.so {target.name}"
    return {target: head(request, how) + text + "\n" + _filled(_SOLUTION, request)}


def c_api(request: ExportRequest, target: Path) -> dict[Path, str]:
    """A file, and a header with two C functions: how much memory a call needs, and the call."""
    header = target.with_suffix(".h")
    text, architecture = body(request)
    how = f"nvcc -std=c++17 -O2 -arch=sm_{architecture} -c {target.name}; include {header.name} where it is called"
    top = head(request, how)
    return {header: top + _filled(_HEADER, request), target: top + text + "\n" + _filled(_API, request)}


def body(request: ExportRequest) -> tuple[str, int]:
    """All but the functions that others call, and the architecture that it is made for."""
    text, architecture = exported(request, "cuda")
    return text, architecture


def exported(request: ExportRequest, name: str) -> Any:
    """What the backend of that name makes of it."""
    backend = registry.backend(name)
    assert isinstance(backend, Exporter), f"backend {name} exports nothing"
    return backend.export(request)


def head(request: ExportRequest, how: str, mark: str = "//", usual: str = "h100") -> str:
    """What the file is, in comments.

    Args:
        how: to build it.
        mark: before each line.
        usual: the device class where none is named.
    """
    problem, first = request.problem, next(iter(request.cases.values()))
    sizes = [
        f"{name}: " + ", ".join(f"{key} {value}" for key, value in {**operator.sizes, **operator.scalars}.items())
        for name, operator in request.cases.items()
    ]
    beside = "; a general kernel a step for all other sizes" if request.general else ""
    lines = [
        f"{problem.name}: {problem.title}",
        *filter(None, [problem.origin, problem.note]),
        f"Made by kernel-dispatcher {__version__}; {first.dtype}, precision {first.precision}.",
        f"Kernels chosen for device class {request.device_class or usual}{beside}:",
        *(f"  {line}" for line in sizes),
        f"Build: {how}",
    ]
    # A backslash at the end would make the next line part of the comment.
    return "".join(f"{mark} {line}{' .' if line.endswith(chr(92)) else ''}\n" for line in lines) + "\n"


def identifier(name: str) -> str:
    """A problem's name as one in C."""
    return re.sub(r"\W", "_", name, flags=re.ASCII)


def _filled(template: str, request: ExportRequest) -> str:
    problem, dtype = request.problem, next(iter(request.cases.values())).dtype
    sizes = [parameter for parameter in problem.parameters if parameter.type != "tensor"]
    tensors = [spelled(parameter.name, "cu") for parameter in problem.parameters if parameter.type == "tensor"]
    element = {"float16": "__half", "float32": "float", "float64": "double"}[dtype]
    values = {
        "NAME": identifier(problem.name),
        "PARAMETERS": ", ".join(parameter_list(problem.parameters, "cu", element)),
        "SIZES": ", ".join(parameter_list(sizes, "cu", element)),
        "ARGUMENTS": ", ".join(
            _cast(parameter.type, spelled(parameter.name, "cu")) for parameter in problem.parameters
        ),
        "ONLY_SIZES": ", ".join(
            "nullptr" if parameter.type == "tensor" else _cast(parameter.type, spelled(parameter.name, "cu"))
            for parameter in problem.parameters
        ),
        "INCLUDE": "#include <cuda_fp16.h>\n" if dtype == "float16" else "",
        "TENSORS": ", ".join(tensors),
    }
    return re.sub(r"@(\w+)@", lambda found: values[found[1]], template)


def _cast(kind: str, name: str) -> str:
    return f"static_cast<long long>({name})" if kind == "size_t" else name


_SOLUTION = """\
namespace kernel_dispatcher {
// Work and memory for what lies between its steps go into the default stream, and nothing waits. The memory stays with
// the process, since getting it from the system would take longer than most calls. What the runtime refuses, the caller
// finds as its last error.
static void solve(const Arguments &a) {
  int device = 0;
  cudaMemPool_t pool;
  unsigned long long all = ~0ull;
  if (cudaGetDevice(&device) != cudaSuccess || cudaDeviceGetDefaultMemPool(&pool, device) != cudaSuccess
      || cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &all) != cudaSuccess)
    return;
  void *memory = nullptr;
  if (cudaMallocAsync(&memory, memory_bytes(a), 0) != cudaSuccess) return;
  enqueue(a, memory, 0);
  cudaFreeAsync(memory, 0);
}
}  // namespace kernel_dispatcher

extern "C" void solution(@PARAMETERS@) {
  kernel_dispatcher::solve({@ARGUMENTS@});
}
"""

_HEADER = """\
#pragma once
@INCLUDE@#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Bytes of device memory that a call with these sizes needs beside its tensors. */
size_t @NAME@_memory_bytes(@SIZES@);

/* Put a call's work into a stream and return at once.
   Tensors are contiguous, at multiples of 16 bytes in device memory; `work_memory` points to memory_bytes of it, which
   stay until the work is done; `cuda_stream` is a cudaStream_t. Returns a cudaError_t: 0, or why a launch failed. */
int @NAME@(@PARAMETERS@, void *work_memory, void *cuda_stream);

#ifdef __cplusplus
}
#endif
"""

_API = """\
extern "C" size_t @NAME@_memory_bytes(@SIZES@) {
  return static_cast<size_t>(kernel_dispatcher::memory_bytes({@ONLY_SIZES@}));
}

extern "C" int @NAME@(@PARAMETERS@, void *work_memory, void *cuda_stream) {
  const void *all_tensors[] = {@TENSORS@};
  for (const void *each_tensor : all_tensors)
    if (!kernel_dispatcher::aligned(each_tensor)) return cudaErrorMisalignedAddress;
  return kernel_dispatcher::enqueue({@ARGUMENTS@}, work_memory, static_cast<cudaStream_t>(cuda_stream));
}
"""
