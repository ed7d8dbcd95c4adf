"""A Zarr larger than the memory that `dispatcher map` may take: broken off by Ctrl-C, killed, and resumed to the end.

    python -m tests.large_map [--megabytes 3000] [--limit 1000] [--device opencl] [--folder DIR]

The limit is on the memory that is resident at the peak, libraries included. The result has to be that of one call on
the whole array in memory, byte for byte; this process needs about twice the array's size for it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import dispatcher
from bench.common import at_least, plain_parser, say
from dispatcher.scale.storage import make_array, read_items, write_items
from tests.children import heeding

PROBLEM = "conv2d-subtract-hardswish-maxpool-mish"
ITEM, CHUNK, KERNEL = (64, 128, 128), 8, (128, 64, 3, 3)


def drawn(number: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(number).standard_normal(shape, np.float32)


def store(path: Path, items: int, chunk: int, item: Sequence[int]) -> None:
    """An array that is never in memory as a whole."""
    make_array(path, (items, *item), "float32", chunk)
    for first in range(0, items, chunk):
        write_items(path, first, drawn(first, min(chunk, items - first), *item))


def run_until(
    command: Sequence[str], done: Path, count: int | None, sent: signal.Signals | None
) -> tuple[int, str, int]:
    """Run a command, and send it a signal as soon as ``count`` chunks are done.

    Returns:
        Exit status, what it wrote to stdout, and the bytes that were resident at the peak.
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        peak = 0
        while process.poll() is None:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
            peak = max([peak, *(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))])
            if sent is not None and done.is_dir() and len(os.listdir(done)) >= (count or 0):
                process.send_signal(sent)
                sent = None
            time.sleep(0.002)
        assert process.stdout is not None
        return process.returncode, process.stdout.read(), peak


def check(command: Sequence[str], target: Path, chunks: int, limit: int) -> int:
    """Break a ``dispatcher map`` off twice, and let it end then; returns the bytes that were resident at the peak."""
    whole = heeding(signal.SIGINT, ["-m", "dispatcher", "map", *command, "--output", str(target), "--json"])
    done = target.with_name(f".{target.name}.partial") / "done"
    peaks = []
    plan = ((1, signal.SIGINT, 130), (chunks // 3, signal.SIGKILL, -9), (None, None, 0))
    for count, sent, wanted in plan:
        status, answer, peak = run_until([*whole, *(["--resume"] if peaks else [])], done, count, sent)
        assert status == wanted, f"it ended with {status} instead of {wanted}"
        assert target.exists() == (sent is None)
        peaks.append(peak)
        say(f"{status}: {peak / 1e6:.0f} MB at the peak")
    assert json.loads(answer)["kept"] > 0, "nothing was kept"
    assert max(peaks) < limit, f"{max(peaks) / 1e6:.0f} MB were resident, and the limit is {limit / 1e6:.0f} MB"
    return max(peaks)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do it at full size."""
    parser = plain_parser(__doc__, "tests.large_map")
    parser.add_argument("--megabytes", type=at_least(1), default=3000, help="of the input (default: %(default)s)")
    parser.add_argument("--limit", type=at_least(1), default=1000, help="in MB (default: %(default)s)")
    parser.add_argument("--device", default="opencl", help="where (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where the arrays lie meanwhile")
    given = parser.parse_args(arguments)
    items = max(CHUNK, given.megabytes * 1000**2 // (4 * int(np.prod(ITEM))))
    with tempfile.TemporaryDirectory(dir=given.folder) as name:
        folder = Path(name)
        store(folder / "x.zarr", items, CHUNK, ITEM)
        kernel = drawn(items, *KERNEL)
        np.save(folder / "w.npy", kernel)
        command = [PROBLEM, "--input", str(folder / "x.zarr"), "--tensor", f"kernel={folder / 'w.npy'}"]
        command += ["--device", given.device, "--chunk", str(CHUNK - 1)]  # one that does not divide the Zarr's
        start = time.perf_counter()
        peak = check(command, folder / "y.zarr", -(-items // (CHUNK - 1)), given.limit * 1000**2)
        taken = time.perf_counter() - start
        x = read_items(folder / "x.zarr", 0, items)
        expected = dispatcher.run(PROBLEM, device=given.device, input=x, kernel=kernel)
        equal = np.array_equal(read_items(folder / "y.zarr", 0, items).view(np.int32), expected.view(np.int32))
    print(
        f"{items} items of {x.nbytes / 1e9:.2f} GB in {taken:.0f} s, {peak / 1e6:.0f} MB resident at the peak;", end=" "
    )
    print("equal to one call" if equal else "NOT equal to one call")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
