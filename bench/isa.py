"""Ours and its peers limited to the vectors of older processors, and whether each keeps to them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence

from dispatcher.interface import Device
from dispatcher.timing.peers import PEERS

#: For each set of instructions what limits Intel's OpenCL compiler, PyTorch, what torch.compile builds, and oneDNN. All
#: of them look when they are loaded, or first used.
SETTINGS = {
    "avx2": {
        "CL_CONFIG_CPU_TARGET_ARCH": "core-avx2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "TORCHINDUCTOR_CPP_MARCH": "x86-64-v3",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    }
}
#: Multiply-adds of vectors wider than those of AVX2, which compilers to AVX2 halve.
WIDE = "kernel void wide(global float16 *x) { x[0] = fma(x[1], x[2], x[3]); }\n"
# Such an instruction's bytes, for 512-bit vectors (EVEX) and for 256-bit vectors (VEX): its map, registers, which form.
_REGISTERS, _FORM = rb"[\x05\x0d\x15\x1d\x25\x2d\x35\x3d\x45\x4d\x55\x5d\x65\x6d\x75\x7d]", rb"[\x98\xa8\xb8]"
_MAP = rb"[\x02\x12\x22\x32\x42\x52\x62\x72\x82\x92\xa2\xb2\xc2\xd2\xe2\xf2]"
_EVEX = re.compile(rb"\x62" + _MAP + _REGISTERS + rb"." + _FORM, re.DOTALL)
_VEX = re.compile(rb"\xc4" + _MAP + _REGISTERS + _FORM)
#: Runs a peer once, where oneDNN says what it found; PyTorch is asked.
_PEER = """
import sys
from bench.common import bind_case
from dispatcher.check.inputs import random_tensors
from dispatcher.device.selection import backend_devices
from dispatcher.timing.peers import PEERS
operator, peer = bind_case("conv-transpose3d-max-max-sum", 1, case="sample"), PEERS[sys.argv[1]]
any(map(backend_devices, peer.after))
peer.make(operator, random_tensors(operator, 0), 1, None)(None)
if "torch" in sys.modules:
    print("isa:", sys.modules["torch"].backends.cpu.get_cpu_capability())
"""


def limit(isa: str | None) -> None:
    """Have all that is loaded from now on keep to ``isa``, in this process and its children."""
    os.environ.update(SETTINGS.get(isa or "", {}))


def devices_left_out(devices: Sequence[Device]) -> dict[str, str]:
    """The OpenCL devices that do not keep to AVX2, by the code that their compilers make."""
    from dispatcher.backends.opencl.runtime import OpenClRuntime, find_devices

    reasons = {}
    for device in devices:
        found = find_devices()[device.index]
        runtime = OpenClRuntime(found.platform, found.device)
        (binary,) = runtime.kernel(WIDE, "wide").raw.program.binaries
        if not _VEX.search(binary) or _EVEX.search(binary):
            reasons[device.id] = "its compiler does not keep to avx2"
    return reasons


def peers_left_out(peers: Sequence[str]) -> dict[str, str]:
    """The peers that do not keep to AVX2, by what they say of themselves in a process of their own.

    One way of using a library is asked for all of them.
    """
    asked = {PEERS[name].modules: name for name in reversed(peers)}
    reasons = {modules: _reason(name) for modules, name in asked.items()}
    return {name: why for name in peers if (why := reasons[PEERS[name].modules]) is not None}


def _reason(name: str) -> str | None:
    environment = {**os.environ, "ONEDNN_VERBOSE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", _PEER, name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return f"it cannot be asked whether it keeps to avx2: {done.stderr.strip().splitlines()[-1]}"
    said = set(re.findall(r"\bisa: ?(.*)", done.stdout))
    return (
        None if said and said <= {"AVX2", "Intel AVX2"} else f"it takes {', '.join(said) or 'what it likes'}, not avx2"
    )
