"""CUDA's headers and nvcc from PyPI, kept in the simulator's cache: no CUDA installation is needed.

python -m tests.cudasim.toolkit include    # prints the folder with cuda.h
python -m tests.cudasim.toolkit nvcc       # prints the path of nvcc
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.cudasim.cache import cached_folder, content_hash

# One version for all: the driver interface that PyCUDA is built for follows from cuda.h.
HEADERS = ("nvidia-cuda-runtime==13.0.96", "nvidia-cuda-profiler-api==13.0.85")
# A later one refuses more than an earlier one.
NVCC = (
    *(f"nvidia-{part}==13.5.37" for part in ("cuda-nvcc", "cuda-crt", "cuda-runtime", "nvvm")),
    "nvidia-cuda-cccl==13.3.5.0.6",
)


def _install(requirements: tuple[str, ...]) -> Path:
    def fill(folder: Path) -> None:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*command, *requirements], check=True, stdout=sys.stderr)

    return cached_folder("toolkit", content_hash([], *requirements), fill) / "nvidia" / "cu13"


def include_folder() -> Path:
    """The folder with cuda.h and cudaProfiler.h (2.5 MB to download, once)."""
    return _install(HEADERS) / "include"


def nvcc() -> Path:
    """The real nvcc (about 90 MB to download, once); it needs a host C++ compiler, and no GPU."""
    return _install(NVCC) / "bin" / "nvcc"


if __name__ == "__main__":
    print({"include": include_folder, "nvcc": nvcc}[sys.argv[1]]())
