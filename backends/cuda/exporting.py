"""A problem as one text in CUDA C++: the kernels that lowering chooses for cases, and general ones besides."""

from __future__ import annotations

import re

from dispatcher.backends.cuda.exportany import AnyText
from dispatcher.backends.cuda.exportcase import CaseText
from dispatcher.backends.cuda.exporttext import Sections, common_text, field
from dispatcher.backends.cuda.lowering import lower
from dispatcher.backends.cuda.options import Options
from dispatcher.backends.cuda.program import C_TYPES, Program
from dispatcher.backends.cuda.tasks import Target
from dispatcher.errors import InputError, one_of
from dispatcher.interface import ExportRequest
from dispatcher.problem.messages import brief
from dispatcher.problem.model import Problem
from dispatcher.problem.userkernel import spelled

#: What cases are tuned for: compute capability, bytes of shared memory of a block, multiprocessors.
DEVICE_CLASSES = {
    "h100": Target(90, 232448, 132),
    "h200": Target(90, 232448, 132),
    "a100": Target(80, 166912, 108),
    "l40s": Target(89, 101376, 142),
    "rtx3090": Target(86, 101376, 82),
    "rtx4090": Target(89, 101376, 128),
    "b200": Target(100, 232448, 148),
    "rtx5090": Target(120, 101376, 170),
    "t4": Target(75, 65536, 40),
}


def export(request: ExportRequest) -> tuple[str, int]:
    """The text, and the architecture of the device class, such as 90. The text defines ``Arguments``, ``memory_bytes``
    and ``enqueue`` in the namespace ``kernel_dispatcher``.

    Raises:
        InputError: there is no such device class.
    """
    wanted = request.device_class or "h100"
    if wanted not in DEVICE_CLASSES:
        raise InputError(f"the device class is {brief(wanted)}; {one_of(wanted, DEVICE_CLASSES)}")
    target, sections = DEVICE_CLASSES[wanted], Sections()
    functions, choices = [], []
    for case, operator in request.cases.items():
        name = f"case_{re.sub(r'[^A-Za-z0-9]+', '_', case).strip('_').lower()}"
        while f"is_{name}(a)" in choices:
            name += "_"
        functions.append(CaseText(name, lower(operator, target, Options()), sections).text())
        choices.append(f"is_{name}(a)")
    calls = [choice.replace("is_", "", 1).replace("(a)", "(a, call)") for choice in choices]
    for number, (fixed, operator) in enumerate(request.general, start=1):
        name = "any_sizes" + (f"_{number}" if len(request.general) > 1 else "")
        functions.append(AnyText(name, operator, Program(operator).compute, sections).text())
        choices.append(" && ".join(f"{field(size)} == {value}" for size, value in fixed.items()) or "true")
        calls.append(f"{name}(a, call)")
    tensor_cores = any("mma_tf32" in text for text in sections.texts)
    chosen = "".join(f"  if ({choice}) return {call};\n" for choice, call in zip(choices, calls, strict=True))
    parts = [
        _GUARD if tensor_cores else "",
        "namespace kernel_dispatcher {\n" + common_text("device.cuh"),
        *sections.texts,
        common_text("host.cuh"),
        arguments(request.problem, next(iter(request.general))[1].dtype),
        *functions,
        f"inline void run(const Arguments &a, Call &call) {{\n{chosen}  call.error = cudaErrorInvalidValue;\n}}\n",
        _ENDS,
        "}  // namespace kernel_dispatcher\n",
    ]
    includes = "#include <cuda_fp16.h>\n#include <cuda_runtime.h>\n\n"
    return includes + "\n".join(part for part in parts if part), target.architecture


_GUARD = """\
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
#error "the kernels for tensor cores need compute capability 8.0: give nvcc the option -arch"
#endif
"""

_ENDS = """\
// Bytes that a call needs beside its arguments.
inline index_t memory_bytes(const Arguments &a) {
  Call call{nullptr, nullptr};
  run(a, call);
  return larger(call.used, 256);
}

// Put a call's work into a stream; nothing waits for it.
inline cudaError_t enqueue(const Arguments &a, void *memory, cudaStream_t stream) {
  Call call{static_cast<char *>(memory), stream};
  run(a, call);
  return call.error;
}
"""


def arguments(problem: Problem, dtype: str) -> str:
    """The structure of a call's arguments."""
    kinds = {"size_t": "index_t", "double": "double"}
    lines = [
        f"  {_declared(parameter.const, dtype) if parameter.type == 'tensor' else kinds[parameter.type] + ' '}"
        f"{spelled(parameter.name, 'cu')};\n"
        for parameter in problem.parameters
    ]
    return f"struct Arguments {{\n{''.join(lines)}}};\n"


def _declared(const: bool, dtype: str) -> str:
    return f"{'const ' if const else ''}{C_TYPES[dtype]} *"
