"""A problem on an array in a file, to an array in a file: chunks of the batch, of which it is known which are done."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np

from dispatcher.errors import DispatcherError, InputError, KernelError, install
from dispatcher.files import check_apart
from dispatcher.problem.messages import brief, picked
from dispatcher.problem.model import Problem
from dispatcher.problem.operator import operator_dict, storage_dtype
from dispatcher.scale.storage import batch_chunk, make_array, open_array, read_items, write_items
from dispatcher.scale.work import BatchPlan, Work, plan_batch, stand_in

#: Bytes of inputs and results of a chunk, at most, where nobody says how long chunks are. A third of it costs light
#: problems a tenth of their rate: a few batch items alone keep two processors less busy.
CHUNK_BYTES = 96 << 20
#: How many times as long a chunk may be, for the sake of a whole piece of a Zarr.
LONGER = 2
#: Chunks under way in one process: one is read or written while the other is computed.
TOGETHER = 2
PLAN, DONE, LOCK = "plan.json", "done", "lock"
#: What a result depends on, by its name in the plan, as messages call it where it is another one.
CHANGED = {
    "input": "another input", "problem": "another problem", "tensors": "other tensors", "chunk": "another chunk length",
    "output": "another kind of output",
}  # fmt: skip


@dataclass(frozen=True)
class Mapped:
    """What came of it.

    Attributes:
        plan: what was computed.
        chunk: batch items of a chunk.
        items: computed now.
        kept: that were there already.
        time_s: seconds for ``items``.
    """

    plan: BatchPlan
    chunk: int
    items: int
    kept: int
    time_s: float

    def as_dict(self) -> dict[str, Any]:
        """Plain dicts, texts and numbers."""
        return {**operator_dict(self.plan.operator), **picked(self, "chunk", "items", "kept", "time_s")}


@dataclass(frozen=True)
class Job:
    """What a worker has to know of the files.

    Attributes:
        source: the array that is read.
        name: the tensor that it is.
        folder: where the result grows, with the record of what is done.
        result: the name of the result in it.
        chunk: batch items of a chunk.
        items: of the batch.
    """

    source: Path
    name: str
    folder: Path
    result: str
    chunk: int
    items: int

    def run(self, work: Work, first: int) -> int:
        """Compute and keep the chunk that begins at item ``first``; tries again once. Returns its items.

        Raises:
            DispatcherError: it failed twice; the message names the items.
        """
        last = min(first + self.chunk, self.items)
        start = max(0, last - self.chunk)  # the last chunk is as long as the others, so that nothing is compiled for it
        result = work(**{self.name: read_items(self.source, start, last)})
        write_items(self.folder / self.result, first, result[first - start :])
        (self.folder / DONE / str(first)).touch()
        return last - first

    def named(self, work: Work, first: int) -> int:
        """:meth:`run`, whose errors name the chunk."""
        try:
            return self.run(work, first)
        except (DispatcherError, OSError, MemoryError, ValueError) as error:
            what = f"items {first} to {min(first + self.chunk, self.items) - 1}: {error or type(error).__name__}"
            kinds = {DispatcherError: type(error), OSError: InputError, Exception: KernelError}
            raise next(to for kind, to in kinds.items() if isinstance(error, kind))(what) from error


def map_files(
    problem: Problem,
    source: Path,
    output: Path,
    arguments: Mapping[str, Any],
    *,
    case: str | None = None,
    dtype: str | None = None,
    precision: str = "fp32",
    device: str | None = None,
    chunk: int | None = None,
    workers: int | None = None,
    scheduler: str | None = None,
    resume: bool = False,
    progress: Callable[[float], None] = lambda done: None,
) -> Mapped:
    """Apply a problem to an array in a file, and put the result into another.

    The result grows in a folder beside its place, and is moved there when it is whole. What is done is recorded: a
    call that was broken off can be resumed.

    Args:
        problem: what to compute.
        source: a .npy file or a Zarr folder: the tensor that the pipeline begins with.
        output: likewise, for the result.
        arguments: other tensors, and numbers.
        case: a named case whose numbers hold where nothing else gives one.
        dtype: of every tensor; that of the tensors if None.
        precision: ``fp32`` or ``tf32``.
        device: a device request for each worker.
        chunk: batch items of a chunk; as many as come to about 100 MB if None.
        workers: processes of this machine; None to work in this one.
        scheduler: address of a Dask scheduler instead, whose workers see the same files.
        resume: do what is missing of a call that was broken off.
        progress: told the fraction done.

    Raises:
        InputError: an argument is wrong, or what is there was made by another call.
        DispatcherError: a chunk failed twice; the message names its items.
    """
    array, name = open_array(source), problem.source
    mapped = [tensor.filename for tensor in arguments.values() if isinstance(tensor, np.memmap)]
    check_apart("--output", output, [path for path in (source, problem.path, *mapped) if path is not None])
    if not output.parent.is_dir():
        raise InputError(f"the folder {str(output.parent)!r} does not exist; make it first")
    whole = stand_in(tuple(array.shape), array.dtype)
    plan = plan_batch(problem, {name: whole, **arguments}, case=case, dtype=dtype, precision=precision)
    others = sorted(plan.batched - {name})
    if others:
        raise InputError(
            f"tensor {others[0]} has a batch too, and the input alone can come in chunks; use dispatcher.dask"
        )
    operator = plan.operator
    items, piece = operator.batch, batch_chunk(array)
    length = chunk or max(1, CHUNK_BYTES // max(1, _item_bytes(plan, name)))
    if chunk is None:  # whole pieces, since each is read as often as it is needed; one alone is read where it lies
        if piece > 1:
            length = length // (3 * piece) * piece or min(piece, LONGER * length)
        if length % piece == 0:  # as short as so few can be, since the last one is as long as the others
            length = piece * -(-items // (max(1, -(-items // length)) * piece))
    length = max(1, min(length, items))
    job = Job(source, name, output.with_name(f".{output.name}.partial"), f"result{output.suffix}", length, items)
    with _alone(job.folder, output):
        _begin(job, plan, output, resume)
        done = {int(each.name) for each in (job.folder / DONE).iterdir()}
        waiting = [first for first in range(0, items, length) if first not in done]
        kept = items - sum(min(length, items - first) for first in waiting)
        start, counted = time.perf_counter(), 0
        if waiting:
            with _engine(workers, scheduler) as run:
                for count in run(job, plan.work(device), waiting):
                    counted += count
                    progress((kept + counted) / items)
        _finish(job, output)
    return Mapped(plan, length, counted, kept, time.perf_counter() - start)


def _item_bytes(plan: BatchPlan, name: str) -> int:
    """Bytes of a batch item, and of its result."""
    operator = plan.operator
    shapes = (operator.tensor_shapes[name], operator.output_shape)
    return sum(int(np.prod(shape[1:])) for shape in shapes) * storage_dtype(operator.dtype).itemsize


# ---- what is there already ---------------------------------------------------------------------------------
@contextmanager
def _alone(folder: Path, output: Path) -> Iterator[None]:
    """Keep other calls out of the folder where the result grows, which is made. The end of the process lets them in.

    Raises:
        InputError: another call is at work there, or the folder cannot be made.
    """
    while True:
        try:
            folder.mkdir(exist_ok=True)
            lock = (folder / LOCK).open("a")
        except OSError as error:
            if isinstance(error, FileNotFoundError) and output.parent.is_dir():  # a call here has just finished
                continue
            raise _unwritable(output, error) from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InputError(
                    f"another call is at work on {str(output)!r}; wait for its end, or give another output"
                ) from None
            except OSError as error:
                raise _unwritable(output, error) from error
            if not ((folder / LOCK).exists() and os.path.samestat(os.fstat(lock.fileno()), os.stat(folder / LOCK))):
                continue  # likewise
            yield
        with suppress(OSError):  # on NFS it could not go while the lock's file was open
            folder.rmdir()
        return


def _unwritable(output: Path, error: OSError) -> InputError:
    return InputError(f"--output {str(output)!r} cannot be written: {error.strerror or error}")


def _begin(job: Job, plan: BatchPlan, output: Path, resume: bool) -> None:
    """Prepare the folder, or find it as an earlier call left it.

    Raises:
        InputError: it cannot be prepared, is another call's, or has nothing that could be resumed.
    """
    wanted = _fingerprint(job, plan)
    try:
        known = json.loads((job.folder / PLAN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        known = None
    if resume and known == wanted and (job.folder / job.result).exists():
        return
    changed = next((name for name in wanted if known is not None and known.get(name) != wanted[name]), None)
    if resume and changed is not None:
        raise InputError(
            f"{str(job.folder)!r} was made with {CHANGED[changed]}; give the same arguments, or leave --resume out"
        )
    if resume and known is None and output.exists():
        shutil.rmtree(job.folder)
        raise InputError(
            f"{str(output)!r} is there, whole: nothing is left to resume; leave --resume out to replace it"
        )
    if known is not None and not resume and any((job.folder / DONE).glob("*")):
        what = f"what an earlier call had done for {str(output)!r} is thrown away"
        warnings.warn(f"{what}; --resume keeps it, where the arguments are the same", stacklevel=3)
    try:
        for each in job.folder.iterdir():
            if each.name != LOCK:
                shutil.rmtree(each) if each.is_dir() else each.unlink()
        (job.folder / DONE).mkdir()
        make_array(job.folder / job.result, plan.operator.output_shape, plan.operator.dtype, job.chunk)
        (job.folder / PLAN).write_text(json.dumps(wanted), encoding="utf-8")
    except OSError as error:
        shutil.rmtree(job.folder, ignore_errors=True)
        raise _unwritable(output, error) from error


def _fingerprint(job: Job, plan: BatchPlan) -> dict[str, Any]:
    """What a result depends on."""
    stamp = job.source if job.source.is_file() else next(iter(sorted(job.source.glob("*.json"))), job.source)
    weights = hashlib.sha256()
    for name in sorted(plan.operator.tensor_shapes):
        if name in plan.given:
            weights.update(np.ascontiguousarray(plan.given[name]).tobytes())
    return {
        "input": [str(job.source), stamp.stat().st_mtime_ns],
        "problem": hashlib.sha256(repr(plan.operator.key).encode()).hexdigest(),
        "tensors": weights.hexdigest(),
        "chunk": job.chunk,
        "output": job.result,
    }


def _finish(job: Job, output: Path) -> None:
    """Move the result to its place."""
    if output.is_dir() and not output.is_symlink():  # a folder cannot be replaced in one step
        os.replace(output, job.folder / "replaced")
    os.replace(job.folder / job.result, output)
    shutil.rmtree(job.folder, ignore_errors=True)  # the lock's file is open


# ---- who computes ------------------------------------------------------------------------------------------
Run = Callable[[Job, Work, Sequence[int]], Iterator[int]]


@contextmanager
def _engine(workers: int | None, scheduler: str | None) -> Iterator[Run]:
    """What runs chunks, and yields the items of each when it is done."""
    if workers is None and scheduler is None:
        yield _threads
        return
    try:
        from distributed import Client, LocalCluster
    except ImportError as error:
        raise InputError(f"workers need the extra scale: {install('scale')}") from error
    if scheduler is not None:
        try:
            client = Client(scheduler, timeout=10)
        except (OSError, ValueError) as error:
            raise InputError(f"--scheduler {brief(scheduler)} does not answer: {error}") from error
        with client:
            yield lambda *given: _distributed(client, *given)
        return
    with ExitStack() as stack:
        # Ctrl-C goes to workers too, which would show where it met them: this process ends them. Its thread that starts
        # them, the first time and again, has SIGINT blocked from here on, and so have they.
        resource_tracker.ensure_running()  # by which multiprocessing would let SIGINT through
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            cluster = LocalCluster(
                n_workers=workers, threads_per_worker=1, dashboard_address=None, memory_limit=0, silence_logs=50
            )
            stack.enter_context(cluster)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        client = stack.enter_context(Client(cluster))
        for number, address in enumerate(sorted(client.scheduler_info(n_workers=-1)["workers"])):
            client.run(take_share, number, workers, workers=[address])
        yield lambda *given: _distributed(client, *given)


def take_share(number: int, count: int) -> None:
    """Have this process, one of ``count``, use its share of the machine: processors, and one of its GPUs."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[number % len(cores) :: count] or cores)
    gpus = len([path for path in Path("/dev").glob("nvidia[0-9]*")])
    if gpus and "CUDA_VISIBLE_DEVICES" not in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(number % gpus)


def _threads(job: Job, work: Work, waiting: Sequence[int]) -> Iterator[int]:
    from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

    def twice(first: int) -> int:
        try:
            return job.named(work, first)
        except DispatcherError:
            return job.named(work, first)

    with ThreadPoolExecutor(TOGETHER) as pool:
        under_way = set()
        try:
            for first in waiting:
                under_way.add(pool.submit(twice, first))
                if len(under_way) < TOGETHER:
                    continue
                done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
            yield from (future.result() for future in under_way)
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _distributed(client: Any, job: Job, work: Work, waiting: Sequence[int]) -> Iterator[int]:
    from distributed import as_completed

    carried = client.scatter(work, broadcast=True, hash=False)
    futures = client.map(
        lambda first, carried: job.named(carried, first), waiting, carried=carried, retries=1, pure=False
    )
    for future in as_completed(futures):
        yield future.result()
