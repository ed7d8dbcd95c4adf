"""What the cost model expects of every bundled problem on CUDA, and which kernels its samples run. No GPU is needed.

    python bench/cuda_family.py > bench/results/cuda-family.md

Each problem at its largest published case, whole batch, planned as for an H200: the launches, their estimated time
(multiply-adds and tensor cores by the model, other launches by the bytes that they move; never less than what the ideal
bytes take), and the least time that bytes and products allow. Nothing
of this is a measurement: the model was fitted to five problems (docs/cuda.md).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import dispatcher
from bench.common import bind_case, markdown, plain_parser
from bench.cuda_model import HOPPER
from bench.family import kind, published_cases
from dispatcher.backends.cuda.groups import grouped
from dispatcher.backends.cuda.options import Options
from dispatcher.backends.cuda.tasks import ConvTask, GatheredTask, PoolTask, Setting, Task
from dispatcher.problem.operator import Operator

#: Of an H200 (docs/cuda.md): the clock at which the model fits its times best, bytes that a copy moved in 1e9 a second,
#: and the rate of its TF32 matrix product in 1e12 operations a second.
CLOCK_GHZ, COPY_GBYTES, MATMUL_TFLOPS = 1.86, 4200.0, 409.0


def largest(name: str, precision: str) -> Operator:
    """A problem at its largest published case."""
    cases = (bind_case(name, case=case, precision=precision) for case in published_cases(name))
    return max(cases, key=lambda each: each.flops)


def variant(name: str, task: Task) -> str:
    """A kernel, with those of its parts that are compiled in: what it takes in before, and what it makes after."""
    parts = []
    if isinstance(task, ConvTask):
        around = task.epilogue
        parts = ["prologue"] if task.convolution > task.first else []
        parts += ["strided"] if task.step.geometry.skips else []
        parts += ["grouped"] if task.step.geometry.groups > 1 else []
        after = ("first", "fold", "softmax", "second", "pool", "channels", "last")
        parts += [part for part in after if getattr(around, part)]
        parts += [] if task.gather is None else [f"gathers {task.gather.kind.lower()}"]
    elif isinstance(task, GatheredTask):
        parts = [task.gather.kind.lower(), "alone" if task.gather.alone else "with values"]
    elif isinstance(task, PoolTask):
        step = task.setting.operator.steps[task.pool]
        parts = ["side by side" if getattr(step, "plain", False) else "overlapping"]
    else:
        parts = [] if task.core < task.first else [type(task.steps[task.core - task.first]).__name__.lower()]
    return f"{name} ({', '.join(parts)})" if parts else name


def variants(operator: Operator) -> Iterator[tuple[str, float]]:
    """The launches of an operator, and the time that each is expected to take, in ms."""
    for group in grouped(Setting(operator, HOPPER, Options())):
        cycles = group.implementation.estimate(group.task)
        yield variant(group.implementation.name, group.task), float(cycles) / (CLOCK_GHZ * 1e6)


def floor_ms(operator: Operator) -> float:
    """The least time that copies and matrix products allow."""
    products = 3 if operator.precision == "fp32" else 1
    return max(operator.ideal_bytes / (COPY_GBYTES * 1e6), products * operator.flops / (MATMUL_TFLOPS * 1e9))


def main() -> int:
    """Print the tables."""
    plain_parser(__doc__).parse_args()
    rows, used, sampled = [], {}, set()
    for name in dispatcher.problems():
        sampled |= {text for text, _ in variants(bind_case(name, case="sample"))}
        operators = [largest(name, precision) for precision in ("fp32", "tf32")]
        found = [list(variants(operator)) for operator in operators]
        for text, _ in found[0] + found[1]:
            used.setdefault(text, name)
        cells = []
        for operator, launches in zip(operators, found, strict=True):
            floor = floor_ms(operator)
            total = max(sum(ms for _, ms in launches), operator.ideal_bytes / (COPY_GBYTES * 1e6))
            cells += [f"{total:.2f}", f"{floor:.2f}", f"{total / floor:.1f}"]
        rows.append((sum(ms for _, ms in found[0]) / floor_ms(operators[0]), [
            f"`{name}`", kind(operators[0]), str(operators[0].steps[0].input_shape[0]),
            " + ".join(text.split(" (")[0] for text, _ in found[0]), *cells,
        ]))  # fmt: skip
    titles = ("problem", "convolution", "batch", "launches", "fp32, ms", "floor", "ratio", "tf32, ms", "floor", "ratio")
    print("# Expected times on an H200, by the cost model")
    print(
        "\nMade by `python bench/cuda_family.py`: estimates at the largest published case, not measurements. *Floor* "
        "is the larger of\nideal bytes at 4.2 TB/s and FLOPs at 409 TFLOP/s (fp32: three times the FLOPs). Furthest "
        "from it first.\n"
    )
    print("\n".join(markdown(titles, [row for _, row in sorted(rows, key=lambda row: -row[0])])))
    missing = {text: name for text, name in used.items() if text not in sampled}
    print(
        f"\n## Kernels\n\nThe launches above are {len(used)} variants of the kernels. `make test` runs the samples, in "
        f"float32, on a simulated\ndevice; they have all of these variants but {len(missing)}, which other tests run:\n"
    )
    print("\n".join(f"- {text}: `{name}`" for text, name in sorted(missing.items())))
    print("\nAll of them: " + "; ".join(sorted(used)) + ".")
    return 0


if __name__ == "__main__":
    sys.exit(main())
