"""The bundled problems at published sizes on OpenCL, every element compared with the float64 reference.

    python -m tests.large                 all problems; those that passed before are left out, so it can be broken off
    python -m tests.large --only conv-1d conv2d-mish-mish --again
    python -m tests.large --device opencl:1 --seconds 600

Of each problem the case that ``bench/family.py`` measures: its largest published one, with a batch of 1 or 2, since the
reference takes a hundred times as long as the device; of ``conv-1d``, ``conv-2d`` and ``conv-square-3d`` a smaller one.
So it shows whether large extents and channel counts are right, and says nothing of large batches. Inputs are the sets
that tell most (``signed``, ``positive``), or all where that is quick. Each problem is a line of the file --lines, with
its seconds, as soon as it is checked.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dispatcher
from bench.common import plain_parser, positive, say
from bench.family import add_line, lacking_memory, published, read_lines
from dispatcher.check.verifying import verify_operators

LINES = Path("build/large.jsonl")


def checked(name: str, device: str) -> dict[str, Any]:
    """The line of a problem."""
    operator, case = published(name)
    start = time.perf_counter()
    facts: dict[str, Any] = {
        "problem": name,
        "case": case,
        "batch": operator.steps[0].input_shape[0],
        "flops": operator.flops,
    }
    lacking = lacking_memory(operator)
    if lacking is not None:
        return {**facts, "outcome": "skipped", "reason": lacking}
    (found,) = verify_operators([(operator, case)], device, None, [0], None, None)
    error = None if found.comparison is None else found.comparison.max_error_over_bound
    facts |= {"device": found.device.id, "inputs": [check.inputs for check in found.checks], "error_over_bound": error}
    return {**facts, "outcome": found.outcome, "reason": found.reason, "seconds": time.perf_counter() - start}


def main(arguments: Sequence[str] | None = None) -> int:
    """Check what has not passed yet; exit code 1 when anything is wrong."""
    parser, names = plain_parser(__doc__, "tests.large"), list(dispatcher.problems())
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=names, default=names, help="problems to check")
    parser.add_argument("--again", action="store_true", help="check those that have passed as well")
    parser.add_argument("--device", default="opencl", help="where (default: %(default)s)")
    parser.add_argument("--seconds", type=positive, help="begin no further problem after that time")
    parser.add_argument("--lines", type=Path, default=LINES, help="default: %(default)s")
    given = parser.parse_args(arguments)
    known, start = read_lines(given.lines), time.perf_counter()
    names = [name for name in given.only if given.again or known.get(name, {}).get("outcome") != "passed"]
    for number, name in enumerate(names, 1):
        if given.seconds is not None and time.perf_counter() - start > given.seconds:
            say(f"{len(names) - number + 1} problems are left for the next run")
            break
        line = checked(name, given.device)
        add_line(given.lines, line)
        took = f" in {line['seconds']:.1f} s" if "seconds" in line else ""
        what = f"{name}, {line['case']}, batch {line['batch']}"
        say(f"{number} of {len(names)}, {what}: {line['outcome']}{took} {line['reason']}".rstrip())
    lines = list(read_lines(given.lines).values())
    counts = {outcome: sum(line["outcome"] == outcome for line in lines) for outcome in {x["outcome"] for x in lines}}
    print(json.dumps({"problems": len(lines), **counts, "seconds": sum(line.get("seconds", 0.0) for line in lines)}))
    return 0 if counts.keys() <= {"passed", "skipped"} else 1


if __name__ == "__main__":
    sys.exit(main())
