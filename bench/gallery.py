"""The pictures of docs/gallery.md that a device makes: explanations, a faulty kernel's errors, a search for options.

    DISPATCHER_CUDA_SIM=1 python bench/gallery.py        all of them, CUDA on the simulator
    python bench/gallery.py explain-cuda tune            some

Needs an OpenCL device and Matplotlib. Times in the picture of the search are an illustration: they are of one item,
and not refused on a busy machine. The page's other figures are those of result files.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

if os.environ.get("DISPATCHER_CUDA_SIM") == "1":
    importlib.import_module("tests.cudasim").activate()

import dispatcher
from dispatcher.problem.shown import Drawn

PICTURES = ROOT / "docs" / "gallery"
SOFTMAX = "conv-transpose3d-avgpool-clamp-softmax-multiply"
CONV = "conv-transpose-3d-asym-input-sq-kernel"
#: A fault in the kernel of docs/your-kernel.md: the last column of a result is that of the one before.
RIGHT, WRONG = "const long sw = x + (long)padding_w", "const long sw = (x < OW - 1 ? x : x - 1) + (long)padding_w"


def explained(problem: str, device: str) -> Drawn:
    """What a call of a problem at its published sizes does on a device."""
    return dispatcher.explain(problem, device=device, case="kernelbench")


def faulty() -> Drawn:
    """The verdict on a kernel that is wrong in one column."""
    page = (ROOT / "docs" / "your-kernel.md").read_text(encoding="utf-8")
    source = page.partition("```c\n")[2].partition("```")[0]
    assert RIGHT in source
    with tempfile.TemporaryDirectory() as folder:
        kernel = Path(folder, "conv.cl")
        kernel.write_text(source.replace(RIGHT, WRONG), encoding="utf-8")
        return dispatcher.verify_kernel(
            CONV, kernel, global_size="output_elements", device="opencl", case="odd", inputs="signed"
        )[0]


def searched() -> Drawn:
    """A search for options, of which nothing is kept."""
    return dispatcher.tune_problem(SOFTMAX, device="opencl", case="kernelbench", batch_size=1, keep=False)


MAKERS: dict[str, Callable[[], Drawn]] = {
    "explain-opencl": lambda: explained(SOFTMAX, "opencl"),
    "explain-cuda": lambda: explained("conv-transpose3d-swish-groupnorm-hardswish", "cuda"),
    "verify": faulty,
    "tune": searched,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw what the command line names, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(MAKERS)}; all if left out")
    names = parser.parse_args(arguments).names or list(MAKERS)
    PICTURES.mkdir(exist_ok=True)
    for name in names:
        MAKERS[name]().plot(PICTURES / f"{name}.svg")


if __name__ == "__main__":
    main()
