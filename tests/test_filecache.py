"""A cache never fails its user: damaged, cut, unwritable and half-written entries are no entries."""

from __future__ import annotations

import os
import pwd
import stat
import time
from pathlib import Path

import pytest

from dispatcher.device import diagnosis, filecache
from dispatcher.device.filecache import FileCache, cache_root


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FileCache:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return FileCache("things")


def entries(cache: FileCache) -> list[Path]:
    return sorted(path for path in cache.folder.iterdir())


def test_an_entry_comes_back_and_is_private(cache: FileCache) -> None:
    assert cache.get("key") is None
    cache.put("key", b"data")
    assert cache.get("key") == b"data" and cache.get("other") is None
    for folder in (cache_root(), cache.folder):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_entry_is_none(cache: FileCache, damage: str) -> None:
    cache.put("key", b"some data")
    (path,) = entries(cache)
    stored = path.read_bytes()
    path.write_bytes({"cut": stored[:-1], "flipped": stored[:-1] + b"\xff", "empty": b""}[damage])
    assert cache.get("key") is None
    cache.put("key", b"some data")
    assert cache.get("key") == b"some data"


def test_a_folder_that_cannot_be_made_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    cache = FileCache("things")
    cache.put("key", b"data")
    assert cache.get("key") is None


@pytest.mark.parametrize(
    ("home", "words"),
    [(None, "HOME is not set"), ("", "HOME is ''"), ("some/where", "HOME is 'some/where'"), ("/dev/null", "Not a dir")],
)
def test_without_a_home_nothing_is_kept_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path, home: str | None, words: str
) -> None:
    def unknown(user: int) -> None:
        raise KeyError(user)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setattr(filecache, "_told", set())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", "" if home is None else "relative")
    monkeypatch.delenv("HOME") if home is None else monkeypatch.setenv("HOME", home)
    caches = FileCache("one"), FileCache("two")
    assert [cache.put("key", b"data") for cache in caches] == [False, False]
    assert [cache.get("key") for cache in caches] == [None, None]
    assert not list(caches[0].entries())
    caches[0].drop("key")
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert words in said and "compiled anew in every process; set XDG_CACHE_HOME" in said
    finding = next(finding for finding in diagnosis._host() if finding.subject == "cache folder")
    assert finding.verdict == "problem" and words in finding.detail
    assert not list(tmp_path.iterdir())


def test_what_killed_writers_left_is_swept(cache: FileCache) -> None:
    cache.put("first", b"1")
    old, young = cache.folder / "partial-old", cache.folder / "partial-young"
    for path in (old, young):
        path.write_bytes(b"half")
    past = time.time() - 2 * 3600
    os.utime(old, (past, past))
    cache.put("second", b"2")
    assert not old.exists() and young.exists()
