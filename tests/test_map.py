"""Batches larger than memory: arrays in files, in chunks, broken off and resumed; Dask arrays; workers."""

from __future__ import annotations

import importlib.util
import json
import mmap
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dispatcher
from dispatcher import cli
from dispatcher.call.compiled import CompiledOperator
from dispatcher.errors import InputError, KernelError
from dispatcher.problem.loader import load_problem
from dispatcher.scale import mapping
from dispatcher.scale.mapping import Mapped, map_files
from dispatcher.scale.storage import read_items
from tests import large_map

PROBLEM = load_problem("conv2d-relu-biasadd")
ITEMS = 11
TWICE_FILE: dict[str, Any] = {
    "name": "twice", "title": "t", "origin": "o", "rank": 1,
    "parameters": {"input": ["n", "c", "length"], "output": "output", "n, c, length": "size_t"},
    "pipeline": [{"op": "scale", "by": 2.0}],
}  # fmt: skip
TWICE = load_problem(TWICE_FILE)


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


X = drawn(ITEMS, 3, 6, 7)
GIVEN: dict[str, Any] = {"kernel": drawn(4, 3, 3, 3), "bias": drawn(4, 1, 1)}


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    result: np.ndarray = dispatcher.run(PROBLEM, input=X, device="numpy", **GIVEN)
    return result


@pytest.fixture
def source(tmp_path: Path) -> Path:
    np.save(tmp_path / "x.npy", X)
    return tmp_path / "x.npy"


def mapped(source: Path, target: Path, **more: Any) -> Mapped:
    return map_files(
        PROBLEM, source, target, {**GIVEN, **more.pop("given", {})}, device="numpy", **{"chunk": 2, **more}
    )


def stored_as_zarr(array: np.ndarray, path: Path, chunk: int) -> Path:
    zarr = pytest.importorskip("zarr")
    kept = zarr.open_array(str(path), mode="w", shape=array.shape, chunks=(chunk, *array.shape[1:]), dtype="f4")
    kept[:] = array
    return path


def content(path: Path) -> np.ndarray:
    if path.suffix == ".npy":
        return np.asarray(np.load(path))
    return np.asarray(pytest.importorskip("zarr").open_array(str(path), mode="r")[:])


@pytest.mark.parametrize("suffix", [".npy", ".zarr"])
def test_a_file_is_mapped_to_a_file(source: Path, tmp_path: Path, suffix: str, expected: np.ndarray) -> None:
    if suffix == ".zarr":
        source = stored_as_zarr(X, tmp_path / "x.zarr", 4)
    for _ in range(2):  # the second replaces the first
        outcome = mapped(source, tmp_path / f"y{suffix}")
        assert (outcome.items, outcome.kept, outcome.chunk) == (ITEMS, 0, 2)
        np.testing.assert_array_equal(content(tmp_path / f"y{suffix}"), expected)
    assert {path.name for path in tmp_path.iterdir()} == {"x.npy", source.name, f"y{suffix}"}


def test_all_chunks_are_of_one_length(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: np.ndarray
) -> None:
    """What is left over at the end would be another operator to compile."""
    compute, lengths = CompiledOperator.__call__, []
    monkeypatch.setattr(
        CompiledOperator,
        "__call__",
        lambda self, **given: lengths.append(len(given["input"])) or compute(self, **given),
    )
    for suffix in (".npy", ".zarr") if importlib.util.find_spec("zarr") else (".npy",):
        mapped(source, tmp_path / f"y{suffix}", chunk=3)
        np.testing.assert_array_equal(content(tmp_path / f"y{suffix}"), expected)
    assert set(lengths) == {3}
    monkeypatch.setattr(mapping, "CHUNK_BYTES", 10 * (X[0].nbytes + expected[0].nbytes))
    # With 10, the second would be nine items over again.
    assert mapped(source, tmp_path / "y.npy", chunk=None).chunk == 6
    np.testing.assert_array_equal(content(tmp_path / "y.npy"), expected)


def test_zarr_arrays_of_any_make_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards, compression, chunks that do not divide one another; zeros keep their sign."""
    zarr = pytest.importorskip("zarr")
    if not hasattr(zarr, "create_array"):
        pytest.skip("this Zarr knows no shards")
    x = np.where(np.arange(13)[:, None, None] < 6, np.float32(-0.0), drawn(13, 2, 5))
    kept = zarr.create_array(str(tmp_path / "x.zarr"), shape=x.shape, chunks=(2, 1, 5), shards=(4, 2, 5), dtype="f4")
    kept[:] = x
    for number, chunk in enumerate((3, None, None)):
        # A chunk of one item alone would read each piece of two twice.
        monkeypatch.setattr(mapping, "CHUNK_BYTES", 80 if number == 2 else 32 << 20)
        outcome = map_files(TWICE, tmp_path / "x.zarr", tmp_path / "y.zarr", {}, device="numpy", chunk=chunk)
        assert outcome.chunk == (3, 13, 2)[number]
        np.testing.assert_array_equal(content(tmp_path / "y.zarr").view(np.int32), (2 * x).view(np.int32))


@pytest.mark.parametrize("dtype", ["f4", ">f4"])
def test_npy_files_of_any_layout_are_read(tmp_path: Path, dtype: str) -> None:
    x = drawn(5, 2, 3)
    np.save(tmp_path / "x.npy", np.asfortranarray(x) if dtype == "f4" else x.astype(dtype))
    map_files(TWICE, tmp_path / "x.npy", tmp_path / "y.npy", {}, device="numpy", chunk=2)
    np.testing.assert_array_equal(content(tmp_path / "y.npy"), 2 * x)


@pytest.mark.parametrize("chunks", [None, (4, 2, 3), (4, 1, 3)])
def test_items_are_read_where_they_lie(tmp_path: Path, chunks: tuple[int, ...] | None) -> None:
    """Nothing is copied of a file, and of a piece of a Zarr that is stored as it is."""
    x = drawn(10, 2, 3)
    if chunks is None:
        path = file = tmp_path / "x.npy"
        np.save(path, x)
    else:
        zarr, path = pytest.importorskip("zarr"), tmp_path / "x.zarr"
        if not hasattr(zarr, "create_array"):
            pytest.skip("this Zarr does not say where its pieces lie")
        zarr.create_array(str(path), shape=x.shape, chunks=chunks, dtype=x.dtype, compressors=None)[:] = x
        file = path / "c" / "1" / "0" / "0"
    whole, over = read_items(path, 5, 8), read_items(path, 2, 6)
    np.testing.assert_array_equal(whole, x[5:8])
    np.testing.assert_array_equal(over, x[2:6])
    in_place = chunks != (4, 1, 3)
    assert isinstance(whole.base, mmap.mmap) == in_place
    os.truncate(file, 20)
    if in_place:
        with pytest.raises((InputError, OSError), match="damaged" if chunks is None else "has become shorter"):
            read_items(path, 5, 8)


@pytest.mark.parametrize("how", [{"compressors": "auto"}, {"zarr_format": 2}, {"dtype": ">f4", "zarr_format": 2},
                                 {"serializer": {"name": "bytes", "configuration": {"endian": "big"}}},
                                 {"filters": [{"name": "transpose", "configuration": {"order": [0, 2, 1]}}]},
                                 {"order": "F", "zarr_format": 2}])  # fmt: skip
def test_pieces_of_a_zarr_that_are_coded(tmp_path: Path, how: dict[str, Any]) -> None:
    zarr = pytest.importorskip("zarr")
    if not hasattr(zarr, "create_array"):
        pytest.skip("this Zarr knows no codecs")
    x = np.where(np.arange(6)[:, None, None] < 2, np.float32(0), drawn(6, 2, 3))  # of the first piece there is no file
    kept = zarr.create_array(
        str(tmp_path / "x.zarr"), shape=x.shape, chunks=(2, 2, 3), **{"dtype": "f4", "compressors": None, **how}
    )
    kept[:] = x
    for first in (0, 2, 3, 4):
        np.testing.assert_array_equal(read_items(tmp_path / "x.zarr", first, first + 2), x[first : first + 2])


def test_a_disk_that_is_full(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error, not the end of the process, and what was done until then is kept."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(done: float) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, limits[1]))

    try:
        with pytest.raises(InputError, match=r"items \d+ to \d+: \[Errno 27\] File too large"):
            mapped(source, tmp_path / "y.npy", progress=fill)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert mapped(source, tmp_path / "y.npy", resume=True).kept >= 2
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: os.pread(-1, 1, 0))
    with pytest.raises(InputError, match="cannot be written: Bad file descriptor"):
        mapped(source, tmp_path / "y.npy")
    assert not (tmp_path / ".y.npy.partial").exists()


def test_what_was_broken_off_is_resumed(source: Path, tmp_path: Path, expected: np.ndarray) -> None:
    target = tmp_path / "y.npy"

    def stop(done: float) -> None:
        if done > 0.3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        mapped(source, target, progress=stop)
    assert not target.exists()
    with pytest.raises(InputError, match="made with other tensors; give the same arguments"):
        mapped(source, target, resume=True, given={"bias": drawn(4, 1, 1) + 1})
    outcome = mapped(source, target, resume=True)
    assert outcome.kept >= 4
    assert outcome.items + outcome.kept == ITEMS
    np.testing.assert_array_equal(content(target), expected)
    with pytest.raises(InputError, match="is there, whole: nothing is left to resume"):
        mapped(source, target, resume=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.npy", "y.npy"]
    with pytest.raises(KeyboardInterrupt):
        mapped(source, target, progress=stop)
    with pytest.warns(UserWarning, match="what an earlier call had done .* thrown away; --resume keeps it"):
        assert mapped(source, target).kept == 0


def test_one_call_at_a_time_is_at_work_on_an_output(source: Path, tmp_path: Path, expected: np.ndarray) -> None:
    refused = []

    def another(done: float) -> None:
        for resume in (False, True):
            with pytest.raises(InputError, match=r"another call is at work on .*y.npy'; wait for its end"):
                mapped(source, tmp_path / "y.npy", resume=resume)
            refused.append(resume)

    mapped(source, tmp_path / "y.npy", progress=another)
    assert refused
    np.testing.assert_array_equal(content(tmp_path / "y.npy"), expected)


def test_what_was_broken_off_at_its_end_is_done_again(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: np.ndarray
) -> None:
    target = tmp_path / "y.npy"
    with monkeypatch.context() as patched:
        patched.setattr(mapping, "_finish", lambda job, output: os.replace(job.folder / job.result, output))
        mapped(source, target)
    assert mapped(source, target, resume=True).kept == 0
    np.testing.assert_array_equal(content(target), expected)


@pytest.mark.parametrize("failures", [1, 2])
def test_a_chunk_that_fails_is_tried_again_and_named(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int, expected: np.ndarray
) -> None:
    compute, failed = CompiledOperator.__call__, []

    def sometimes(self: CompiledOperator, **tensors: Any) -> Any:
        if len(failed) < failures and np.array_equal(tensors["input"][0], X[4]):
            failed.append(None)
            raise KernelError("the driver lost it")
        return compute(self, **tensors)

    monkeypatch.setattr(CompiledOperator, "__call__", sometimes)
    if failures == 2:
        with pytest.raises(KernelError, match="items 4 to 5: the driver lost it"):
            mapped(source, tmp_path / "y.npy")
    else:
        mapped(source, tmp_path / "y.npy")
        np.testing.assert_array_equal(content(tmp_path / "y.npy"), expected)


def test_what_cannot_come_in_chunks_is_refused(source: Path, tmp_path: Path) -> None:
    norms = dict.fromkeys(["bn_weight", "bn_bias", "gn_weight", "gn_bias"], drawn(3))
    with pytest.raises(InputError, match="step batch_norm mixes batch items"):
        map_files(
            load_problem("conv-transpose2d-batchnorm-tanh-maxpool-groupnorm"), source, tmp_path / "y.npy",
            {**norms, "kernel": drawn(3, 3, 2, 2), "num_groups": 3},
        )  # fmt: skip
    with pytest.raises(InputError, match="tensor kernel is missing"):
        map_files(PROBLEM, source, tmp_path / "y.npy", {}, case="sample")
    (tmp_path / "link.npy").symlink_to(source)
    np.save(tmp_path / "kernel.npy", GIVEN["kernel"])
    kernel = np.load(tmp_path / "kernel.npy", mmap_mode="r")
    for taken in (source, tmp_path / "link.npy", tmp_path / "kernel.npy"):
        with pytest.raises(InputError, match="output a place of its own"):
            mapped(source, taken, given={"kernel": kernel})
    with pytest.raises(InputError, match=r"outer.zarr' would replace .*inner.zarr', which is read"):
        mapped(stored_as_zarr(X, tmp_path / "outer.zarr" / "inner.zarr", 2), tmp_path / "outer.zarr")
    with pytest.raises(InputError, match="does not exist; make it first"):
        mapped(source, tmp_path / "no" / "y.npy")


def test_the_command(capsys: pytest.CaptureFixture[str], source: Path, tmp_path: Path, expected: np.ndarray) -> None:
    for name, tensor in GIVEN.items():
        np.save(tmp_path / f"{name}.npy", tensor)
    command = ["map", PROBLEM.name, "--input", str(source), "--device", "numpy"]
    command += [f"--tensor={name}={tmp_path / name}.npy" for name in GIVEN]
    target = ["--output", str(tmp_path / "y.npy")]
    assert cli.main([*command, *target, "--chunk", "4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["items"], report["kept"], report["chunk"]) == (ITEMS, 0, 4)
    np.testing.assert_array_equal(content(tmp_path / "y.npy"), expected)
    assert cli.main([*command, *target]) == 0
    assert "11 in chunks of 11" in capsys.readouterr().out
    assert cli.main([*command, "--output", str(tmp_path / "y.txt")]) == 2
    assert "ends in .npy or .zarr" in capsys.readouterr().err
    for suffix in (".npy", ".zarr") if importlib.util.find_spec("zarr") else (".npy",):
        assert cli.main([*command, *target, "--input", f"nope{suffix}"]) == 2
        error = capsys.readouterr().err
        assert f"nope{suffix}' cannot be read: No such file or directory; expected" in error
        assert error.count("nope") == 1


def test_a_command_that_is_interrupted_and_killed(tmp_path: Path) -> None:
    """`make check-map` does the same with gigabytes."""
    pytest.importorskip("zarr")
    large_map.store(tmp_path / "x.zarr", 192, 4, (128, 1024))
    problem = tmp_path / "twice.json"
    problem.write_text(json.dumps(TWICE_FILE))
    command = [str(problem), "--input", str(tmp_path / "x.zarr"), "--device", "numpy", "--chunk", "3"]
    large_map.check(command, tmp_path / "y.zarr", 64, limit=170 * 1000**2)  # input and result have 201 MB
    x = content(tmp_path / "x.zarr")
    np.testing.assert_array_equal(content(tmp_path / "y.zarr"), 2 * x)


#: A process that may have 32 MB more than it has maps 80 MB.
LIMITED = """
import resource, sys, threading
threading.stack_size(1 << 20)  # stacks count as memory, used or not
import numpy as np
from pathlib import Path
from dispatcher.problem.loader import load_problem
from dispatcher.scale.mapping import map_files
import dispatcher.backends.numpy_ref
{imports}
used = 1024 * int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmData")))
resource.setrlimit(resource.RLIMIT_DATA, (used + (32 << 20),) * 2)
problem = load_problem({twice})
folder = Path(sys.argv[1])
map_files(problem, folder / "x{suffix}", folder / "y{suffix}", {{}}, device="numpy", chunk=4)
"""


@pytest.mark.parametrize("suffix", [".npy", ".zarr"])
def test_more_than_the_memory_that_a_process_may_have(tmp_path: Path, suffix: str) -> None:
    array = np.arange(80 << 18, dtype=np.float32).reshape(320, 256, 256)
    if suffix == ".npy":
        np.save(tmp_path / "x.npy", array)
    else:
        stored_as_zarr(array, tmp_path / "x.zarr", 4)
    code = LIMITED.format(twice=TWICE_FILE, suffix=suffix, imports="import zarr" if suffix == ".zarr" else "")
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result = np.load(tmp_path / "y.npy", mmap_mode="r") if suffix == ".npy" else content(tmp_path / "y.zarr")
    assert np.array_equal(result, 2 * array)


# ---- Dask ------------------------------------------------------------------------------------------------------------
def test_a_dask_array_is_mapped_when_it_is_computed(expected: np.ndarray) -> None:
    da = pytest.importorskip("dask.array")
    from dispatcher import dask as scaled

    lazy = scaled.map(PROBLEM, da.from_array(X, chunks=(4, 2, -1, -1)), device="numpy", **GIVEN)
    assert lazy.chunks == ((4, 4, 3), (4,), (4,), (5,))
    assert (lazy.dtype, type(lazy._meta)) == (np.float32, np.ndarray)
    for scheduler in ("threads", "processes"):
        np.testing.assert_array_equal(lazy.compute(scheduler=scheduler, num_workers=1), expected)
    with pytest.raises(InputError, match="given twice"):
        scaled.map(PROBLEM, X, input=X)


def test_workers_of_which_one_is_killed(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expected: np.ndarray
) -> None:
    distributed = pytest.importorskip("distributed")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    killed: list[int] = []
    blocked: list[bool] = []

    def kill(done: float) -> None:
        if not killed:
            client = distributed.default_client()
            masks = client.run(signal.pthread_sigmask, signal.SIG_BLOCK, [])
            blocked.extend(signal.SIGINT in mask for mask in masks.values())
            killed.append(next(iter(client.run(os.getpid).values())))
            os.kill(killed[0], signal.SIGKILL)

    mapped(source, tmp_path / "y.npy", workers=2, progress=kill)
    assert killed and blocked == [True, True]  # Ctrl-C is this process's to handle
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    np.testing.assert_array_equal(content(tmp_path / "y.npy"), expected)
