"""Kernels for :data:`tests.strategies.SCALED_PRODUCT` that are right when they are first launched, and then cheat.

One text serves OpenCL C and CUDA C++, and holds every cheat: which one is at work, the problem's ``factor`` says.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from dispatcher.check import kernelrun
from dispatcher.check.judging import Judgement, verify_kernel
from tests.strategies import SCALED_PRODUCT

_SAME = "its result is that of an earlier launch on other inputs"
_OLD = "elements of its result are what was there before"

#: What each cheat does, in the order of its number from 1 on: its name, its code, and what the verdict says of it.
#: There are ``launch``, which counts from 0, the element ``i`` that is due, the right ``value``, ``kept``, which holds
#: that of the first launch, and ``sum``, the sum of the bits of the input.
CHEATS = {
    "keeps results by a few inputs": ("if (input[0] == key[0] && input[7] == key[1]) value = kept[i];", _SAME),
    "keeps results by address": ("if (launch > 1 && address == (WORD)input) value = kept[i];", _SAME),
    "keeps results by checksum": ("if (sum == checksum) value = kept[i];", _SAME),
    "keeps its last result by one input": (
        "if (last_key[i] == input[0]) value = last[i]; last_key[i] = input[0], last[i] = value;", _SAME,
    ),
    "writes its first result from memory": ("if (launch > 1) value = kept[i];", _SAME),
    "works for the first launches only": ("if (launch > 3) return;", _OLD),
    "changes after some launches": ("if (launch > 4) value *= 1.01f;", "elements are wrong"),
    "takes an output that is there for its own": ("if (launch > 1 && address == (WORD)input) return;", _OLD),
    "writes a part later": ("if (launch > 1 && i % 3 == 1) return;", _OLD),
    "changes its input later": ("if (launch > 1 && i == 5) ((GLOBAL float*)input)[5] = 0;", "changed the input tensor"),
    "writes beside its output later": ("if (launch > 1 && i == 5) output[420] = 0;", "it wrote beside output"),
}  # fmt: skip

_SOURCE = """
STATE WORD address, checksum;
STATE int ticket;
STATE float key[2], kept[420], last_key[420], last[420];

KERNEL void solution(GLOBAL const float* input, GLOBAL const float* weights, GLOBAL const float* scale,
                     GLOBAL float* output, SIZE n, SIZE ic, SIZE oc, SIZE d, SIZE h, SIZE w, double factor)
{
    const SIZE i = PLACE, voxels = d * h * w, x = i % voxels, y = i / voxels % oc, z = i / voxels / oc;
    const int launch = TICKET / 420;
    float value = 0;
    for (SIZE c = 0; c < ic; ++c) value += input[(z * ic + c) * voxels + x] * weights[c * oc + y];
    value *= scale[y] * (float)factor;
    WORD sum = 0;
    for (SIZE c = 0; c < n * ic * voxels; ++c) sum += ((GLOBAL const unsigned int*)input)[c];
    if (launch == 0) {
        address = (WORD)input, checksum = sum, key[0] = input[0], key[1] = input[7], kept[i] = value;
    }
    switch ((int)factor) {
CASES
    }
    output[i] = value;
}
""".replace("CASES", "\n".join(f"    case {n}: {code} break;" for n, (code, _) in enumerate(CHEATS.values(), 1)))

#: The same in each language.
OPENCL, CUDA = (
    re.sub(r"\b[A-Z]{4,}\b", lambda word, words=words: words[word[0]], _SOURCE)
    for words in (
        {
            "KERNEL": "__kernel", "GLOBAL": "__global", "STATE": "__global", "SIZE": "ulong", "WORD": "ulong",
            "PLACE": "get_global_id(0)", "TICKET": "atomic_inc((volatile __global int*)&ticket)",
        },
        {
            "KERNEL": 'extern "C" __global__', "GLOBAL": "", "STATE": "__device__", "SIZE": "size_t",
            "WORD": "unsigned long long", "PLACE": "((size_t)blockIdx.x * blockDim.x + threadIdx.x)",
            "TICKET": "atomicAdd(&ticket, 1)",
        },
    )
)  # fmt: skip


def judge(cheat: str | None, path: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Judgement:
    """The verdict on a kernel in one of these languages, with a cheat or without."""
    draws = itertools.count(1)
    monkeypatch.setattr(kernelrun.secrets, "randbits", lambda bits: next(draws))  # the same in every run
    monkeypatch.setattr(kernelrun, "PATIENCE_S", 0.0)  # nothing here is late
    number = 0.5 if cheat is None else list(CHEATS).index(cheat) + 1
    (judgement,) = verify_kernel(
        SCALED_PRODUCT, path, factor=number, repeats=4, warmup=1, inputs="signed,integers", timeout_s=60.0, **options
    )
    return judgement


def check(cheat: str | None, judgement: Judgement) -> None:
    """See to it that a cheat is found, and the verdict names it."""
    if cheat is None:
        assert (judgement.outcome, judgement.reason, len(judgement.times_s)) == ("passed", "", 4)
        return
    assert (judgement.outcome, judgement.times_s) == ("wrong", ())
    assert CHEATS[cheat][1] in judgement.reason
    assert [check.launch for check in judgement.checks if not check.passed] == ["repeated"]
