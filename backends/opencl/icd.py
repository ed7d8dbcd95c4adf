"""Finding OpenCL runtimes that the loader would miss.

An OpenCL program talks to a small loader, and the loader reads `.icd` files: each names the shared library
of one runtime. The loader inside PyOpenCL's wheel looks in one folder, `/etc/OpenCL/vendors`, or in the one
that the environment variable `OCL_ICD_VENDORS` names. Intel's CPU runtime can be installed with pip
(`intel-opencl-rt`), but the `.icd` file in that wheel holds a placeholder path, and lies in a folder that the
loader does not read.

`prepare_icd_vendors` closes that gap. It makes a private folder with the `.icd` files of the system and of
the Python environment, plus one with the true path of Intel's library, and points `OCL_ICD_VENDORS` at it.
It does the same for the libraries that `OCL_ICD_FILENAMES` names, which that loader does not read, and for the
OpenCL library of a GPU driver that no `.icd` file names, as in containers that get their driver from the host.

A runtime that the loader finds in a way of its own (`pocl-binary-distribution`) is not affected.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import hashlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from dispatcher.device.filecache import cache_root
from dispatcher.errors import install

SYSTEM_VENDORS = Path("/etc/OpenCL/vendors")

# How a user tells the loader where to look. The second variable is older and is read by the same loader.
USER_VARIABLES = ("OCL_ICD_VENDORS", "OPENCL_VENDOR_PATH")

# Libraries of runtimes, with the system's path separator between them, for other loaders than PyOpenCL's.
LISTED_VARIABLE = "OCL_ICD_FILENAMES"

# What GPU drivers bring, which the linker finds where such a driver is installed.
DRIVER_LIBRARIES = ("libnvidia-opencl.so.1",)

# Holds the same path as OCL_ICD_VENDORS when this module set it, so that a child process, which inherits
# both, does not take our folder for the user's own choice.
OWN_VARIABLE = "DISPATCHER_ICD_VENDORS"

# The user's OCL_ICD_VENDORS while a folder of ours stands in for it.
CHOSEN_VARIABLE = "DISPATCHER_ICD_CHOSEN"

# Libraries that the loader must not load, with the system's path separator between them.
LEFT_OUT_VARIABLE = "DISPATCHER_ICD_LEFT_OUT"

INTEL_DISTRIBUTION = "intel-opencl-rt"
INTEL_LIBRARY = "libintelocl.so"
INTEL_ICD_NAME = "intel-opencl-rt.icd"

# How the names of variables begin that say which runtime is loaded, or what its compiler makes of a program.
SETTINGS = ("OCL_", "OPENCL_", "POCL_", "CL_", "IGC_", "AMD_", "GPU_", "CUDA_", "RUSTICL_", "LD_")

# Options of compilers that reorder sums, drop NaN, or lose bits.
_UNSAFE_OPTION = re.compile(
    r"-cl-(fast-relaxed-math|unsafe-math-optimizations|finite-math-only|no-signed-zeros|denorms-are-zero|mad-enable|"
    r"single-precision-constant)|-ffast-math"
)

# What libintelocl.so needs from other wheels, in an order in which each can be loaded. By itself it looks
# only in its own folder, which is not enough when the wheels are spread over two prefixes (for example a
# virtual environment that sees the system's packages).
INTEL_DEPENDENCIES = (
    ("intel-cmplr-lib-rt", "libintlc.so.5"),
    ("intel-cmplr-lib-rt", "libimf.so"),
    ("intel-cmplr-lib-rt", "libsvml.so"),
    ("intel-cmplr-lib-rt", "libirng.so"),
    ("tbb", "libtbb.so.12"),
)


@dataclass(frozen=True)
class IcdEntry:
    """One runtime that was considered.

    Attributes:
        icd_file: The `.icd` file; for a runtime found through its wheel, the name of the file that we write.
        library: The library it names: an absolute path, or a bare name that the system's linker looks up.
        used: Whether the loader is told about it.
        reason: Why it is used or not, in words.
    """

    icd_file: Path
    library: str
    used: bool
    reason: str


@dataclass(frozen=True)
class IcdReport:
    """What `prepare_icd_vendors` found and did.

    Attributes:
        vendors: The folder (or file) that the loader reads: the user's, ours, or the system's.
        changed: Whether `OCL_ICD_VENDORS` points at a folder of ours.
        reason: Why the environment was changed or left alone, in words.
        entries: Every runtime that was considered.
    """

    vendors: Path
    changed: bool
    reason: str
    entries: tuple[IcdEntry, ...]


def prepare_icd_vendors() -> IcdReport:
    """Let the OpenCL loader find the runtimes of this machine and of this Python environment.

    Call it before the first OpenCL platform query of the process: the loader reads its environment once. A
    value that the user gave to `OCL_ICD_VENDORS` is respected, and where there is nothing to add, the
    environment is left alone. Calling it again is harmless. It does not raise for a runtime that is missing
    or broken, or for a folder that cannot be written; the report says what is wrong.

    Returns:
        What was found, what was done, and why.
    """
    if not sys.platform.startswith("linux"):
        return IcdReport(SYSTEM_VENDORS, False, f"the loader is left alone on {sys.platform}", ())
    earlier = _withdraw_own_setting()
    deadly = set(filter(None, os.environ.get(LEFT_OUT_VARIABLE, "").split(os.pathsep)))
    for variable in USER_VARIABLES:
        value = os.environ.get(variable)
        if value:
            vendors, reason = Path(value), f"{variable} is set by the user"
            entries = [_left_out(entry) if entry.library in deadly else entry for entry in _user_entries(vendors)]
            if any(entry.library in deadly for entry in entries):
                return _replace_user_s(entries, vendors, reason, earlier)
            return IcdReport(vendors, False, reason, tuple(entries))

    entries = list(_entries_in((SYSTEM_VENDORS, Path(sys.prefix) / "etc" / "OpenCL" / "vendors")))
    intel = _intel_entry(entries)
    if intel is not None:
        entries.append(intel)
    entries += _listed_entries(entries)
    entries += _driver_entries(entries)
    entries = [_left_out(entry) if entry.library in deadly else entry for entry in entries]
    if not any(_is_addition(entry) or entry.library in deadly for entry in entries):
        reason = f"nothing to add to {SYSTEM_VENDORS}"
        if intel is not None:
            reason = f"{INTEL_DISTRIBUTION} was not added: {intel.reason}"
        return IcdReport(SYSTEM_VENDORS, False, reason, tuple(entries))
    try:
        vendors = _private_folder({e.icd_file.name: f"{e.library}\n" for e in entries if e.used}, earlier)
    except OSError as error:
        reason = f"no folder for .icd files can be written: {error}"
        entries = [replace(e, used=False, reason=reason) if _is_addition(e) else e for e in entries]
        return IcdReport(SYSTEM_VENDORS, False, reason, tuple(entries))
    os.environ["OCL_ICD_VENDORS"] = os.environ[OWN_VARIABLE] = str(vendors)
    added = ", ".join(entry.library for entry in entries if _is_addition(entry))
    reason = f"added to {SYSTEM_VENDORS}: {added}" if added else f"some of {SYSTEM_VENDORS} is left out"
    return IcdReport(vendors, True, reason, tuple(entries))


def leave_out_deadly(survives: Callable[[], bool]) -> bool:
    """Leave out the runtimes that kill or hang a process which lists their devices.

    The environment variable ``DISPATCHER_ICD_LEFT_OUT`` then names their libraries, for this process and those that
    it starts.

    Args:
        survives: lists the devices, in a process that inherits this one's environment, and says whether it lived.

    Returns:
        Whether listing what is left is safe; False when nothing is left, or nothing was gained.
    """
    libraries = [entry.library for entry in prepare_icd_vendors().entries if entry.used]
    if len(libraries) < 2:
        return False
    deadly = []
    for library in libraries:
        os.environ[LEFT_OUT_VARIABLE] = os.pathsep.join(other for other in libraries if other != library)
        if not survives():
            deadly.append(library)
    os.environ[LEFT_OUT_VARIABLE] = os.pathsep.join(deadly)
    if len(deadly) < len(libraries) and survives():
        return True
    del os.environ[LEFT_OUT_VARIABLE]
    return False


def footprint() -> str:
    """What the loader will load, as a text that changes when a runtime or a setting does."""
    report = prepare_icd_vendors()
    files = [Path(path) for entry in report.entries for path in (entry.icd_file, entry.library)]
    versions = []
    for file in files:
        with contextlib.suppress(OSError):  # a bare name, which the system's linker looks up
            status = file.stat()
            versions.append((str(file), status.st_size, status.st_mtime_ns))
    return repr((report.vendors, report.entries, versions, settings()))


def settings() -> list[tuple[str, str]]:
    """The environment variables that change which runtime is loaded, or what its compiler makes."""
    return sorted((name, value) for name, value in os.environ.items() if name.startswith(SETTINGS))


def unsafe_setting() -> str | None:
    """Which environment variable makes compilers break what is promised of results, or None."""
    for name, value in settings():
        if found := _UNSAFE_OPTION.search(value):
            return f"{name} is {value!r}, and with {found[0]} results are not what is promised; unset {name}"
    return None


def platforms_of(library: str) -> list[int]:
    """Addresses of a runtime's platforms, got without the loader, which may have looked for runtimes before.

    Args:
        library: An absolute path, or a name that the system's linker looks up.

    Returns:
        What the loader would have got; nothing where the library is no runtime, or has no platform.
    """
    try:
        find = ctypes.CDLL(library).clGetExtensionFunctionAddress
    except (OSError, AttributeError):
        return []
    find.restype, find.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    address = find(b"clIcdGetPlatformIDsKHR")
    if not address:
        return []
    ask = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p)(address)
    count = ctypes.c_uint32()
    if ask(0, None, ctypes.byref(count)):
        return []
    found = (ctypes.c_void_p * count.value)()
    return [] if ask(count, found, None) else list(filter(None, found))


def load_error(library: str) -> str | None:
    """Say why a runtime's library cannot be loaded.

    The library is loaded into this process, as the OpenCL loader would do.

    Args:
        library: An absolute path, or a name that the system's linker looks up.

    Returns:
        The linker's message, or None if the library was loaded.
    """
    try:
        ctypes.CDLL(library)
    except OSError as error:
        return str(error)
    return None


def _withdraw_own_setting() -> Path | None:
    """Undo what an earlier call, here or in a parent process, set; return the folder that it made."""
    own = os.environ.pop(OWN_VARIABLE, None)
    if own is None:
        return None
    chosen = os.environ.pop(CHOSEN_VARIABLE, "")
    if os.environ.get("OCL_ICD_VENDORS") == own:
        del os.environ["OCL_ICD_VENDORS"]
        if chosen:
            os.environ["OCL_ICD_VENDORS"] = chosen
    return Path(own)


def _left_out(entry: IcdEntry) -> IcdEntry:
    return replace(entry, used=False, reason=f"it kills a process that lists its devices ({LEFT_OUT_VARIABLE})")


def _replace_user_s(entries: list[IcdEntry], vendors: Path, reason: str, earlier: Path | None) -> IcdReport:
    """Let the loader read what the user chose, but for what is left out."""
    used = {entry.icd_file.name: f"{entry.library}\n" for entry in entries if entry.used}
    try:
        folder = _private_folder(used, earlier)
    except OSError as error:
        return IcdReport(vendors, False, f"no folder for .icd files can be written: {error}", tuple(entries))
    os.environ[CHOSEN_VARIABLE] = os.environ.get("OCL_ICD_VENDORS", "")
    os.environ["OCL_ICD_VENDORS"] = os.environ[OWN_VARIABLE] = str(folder)
    return IcdReport(folder, True, f"{reason}, and some of {vendors} is left out", tuple(entries))


def _is_addition(entry: IcdEntry) -> bool:
    """Whether a loader whose environment is left alone would miss this usable runtime."""
    return entry.used and entry.icd_file.parent != SYSTEM_VENDORS


def _user_entries(vendors: Path) -> Iterator[IcdEntry]:
    """Read what the user's setting names: a folder of .icd files, or one such file."""
    if vendors.suffix == ".icd" and vendors.is_file():
        yield _read_entry(vendors)
    else:
        yield from _entries_in([vendors])


def _entries_in(folders: Iterable[Path]) -> Iterator[IcdEntry]:
    """Read the .icd files of several folders; of two usable files with one name, the first is taken."""
    taken: dict[str, Path] = {}
    for folder in folders:
        for file in _icd_files(folder):
            entry = _read_entry(file)
            if entry.used and taken.setdefault(file.name, file) != file:
                entry = replace(entry, used=False, reason=f"{taken[file.name]} has the same name")
            yield entry


def _icd_files(folder: Path) -> list[Path]:
    try:
        return sorted(file for file in folder.iterdir() if file.suffix == ".icd")
    except OSError:
        return []


def _read_entry(file: Path) -> IcdEntry:
    try:
        lines = os.fsdecode(file.read_bytes()).splitlines()
    except OSError as error:
        return IcdEntry(file, "", False, f"it cannot be read: {error.strerror}")
    library = lines[0].strip() if lines else ""
    if not library:
        return IcdEntry(file, library, False, "it names no library")
    if os.path.isabs(library) and not os.path.exists(library):
        return IcdEntry(file, library, False, "the library that it names does not exist")
    return IcdEntry(file, library, True, f"found in {file.parent}")


def _intel_entry(found: Iterable[IcdEntry]) -> IcdEntry | None:
    """Find Intel's runtime among the installed wheels; None if it is not installed."""
    icd_file = Path(INTEL_ICD_NAME)
    try:
        path = _wheel_file(INTEL_DISTRIBUTION, INTEL_LIBRARY)
    except metadata.PackageNotFoundError:
        return None
    if path is None:
        reason = f"{INTEL_DISTRIBUTION} is installed, but its {INTEL_LIBRARY} is not where the wheel says"
        return IcdEntry(icd_file, INTEL_LIBRARY, False, reason)
    library = str(path)
    for entry in found:
        if entry.used and os.path.basename(entry.library) == INTEL_LIBRARY:
            return IcdEntry(icd_file, library, False, f"{entry.icd_file} already names Intel's runtime")
    _preload_intel_dependencies(path.parent)
    error = load_error(library)
    if error is not None:
        return IcdEntry(icd_file, library, False, f"it cannot be loaded: {error}; {_advice(error)}")
    return IcdEntry(icd_file, library, True, f"found in the wheel {INTEL_DISTRIBUTION}")


def _listed_entries(found: Sequence[IcdEntry]) -> list[IcdEntry]:
    """The libraries of ``OCL_ICD_FILENAMES`` that no `.icd` file names."""
    entries: list[IcdEntry] = []
    for library in filter(None, os.environ.get(LISTED_VARIABLE, "").split(os.pathsep)):
        if _names(library, [*found, *entries]):
            continue
        there = not os.path.isabs(library) or os.path.exists(library)
        reason = f"{LISTED_VARIABLE} names it" + ("" if there else ", but it does not exist")
        entries.append(IcdEntry(Path(f"{os.path.basename(library)}.icd"), library, there, reason))
    return entries


def _driver_entries(found: Sequence[IcdEntry]) -> list[IcdEntry]:
    """The OpenCL libraries of GPU drivers that are installed and that no `.icd` file names."""
    return [
        IcdEntry(Path(f"{library}.icd"), library, True, "a GPU driver brings it, and no .icd file names it")
        for library in DRIVER_LIBRARIES
        if not _names(library, found) and load_error(library) is None
    ]


def _names(library: str, found: Iterable[IcdEntry]) -> bool:
    """Whether the loader hears of a library anyway, be it under another path or version."""
    stem = os.path.basename(library).split(".so")[0]
    return any(entry.used and os.path.basename(entry.library).split(".so")[0] == stem for entry in found)


def _advice(error: str) -> str:
    if "undefined symbol" in error and not os.environ.get("LD_LIBRARY_PATH"):
        # Two libraries of one name cannot be loaded: OpenVINO's wheel, for one, brings an older libtbb.so.12.
        return "an older copy of a library was loaded first; list the OpenCL devices before importing it"
    return remedy("try: pip install intel-cmplr-lib-rt tbb")


def remedy(usual: str = install("cpu"), variables: tuple[str, ...] = ("LD_LIBRARY_PATH",)) -> str:
    """What to do where a library does not load: the usual, unless one of ``variables``, set by the user, may have put
    others in its place."""
    for name in variables:
        path = os.environ.get(name)
        if path and path != os.environ.get(OWN_VARIABLE):
            return f"{name} is {path!r}: what lies there may stand in its way; try without"
    return usual


def _wheel_file(distribution: str, name: str) -> Path | None:
    """Locate a file of an installed wheel.

    Returns:
        Its absolute path, or None if the wheel does not list it or the file is gone.

    Raises:
        importlib.metadata.PackageNotFoundError: If the wheel is not installed.
    """
    for file in metadata.distribution(distribution).files or []:
        if file.name == name:
            path = Path(os.path.abspath(str(file.locate())))
            return path if path.is_file() else None
    return None


def _preload_intel_dependencies(folder: Path) -> None:
    """Load what libintelocl.so needs where the linker would not take it from beside it.

    A library that is missing altogether is named by the linker when Intel's own library is loaded.
    """
    for distribution, name in INTEL_DEPENDENCIES:
        path: Path | None = folder / name
        if not (folder / name).exists():
            try:
                path = _wheel_file(distribution, name)
            except metadata.PackageNotFoundError:
                continue
        elif not os.environ.get("LD_LIBRARY_PATH"):  # where the linker would look first
            continue
        if path is not None:
            load_error(str(path))


def _private_folder(files: Mapping[str, str], earlier: Path | None) -> Path:
    """Return a folder that holds exactly these files and that no one else can write to.

    Args:
        files: The content of each file by its name.
        earlier: The folder that an earlier call made, to be used again if it still serves.

    Raises:
        OSError: If neither the cache folder nor the temporary folder can be written.
    """
    if earlier is not None and _holds(earlier, files):
        return earlier
    try:
        return _cached_folder(cache_root() / "icd", files)
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="kernel-dispatcher-icd-"))
        atexit.register(_remove_in_process, folder, os.getpid())
        _write_files(folder, files)
        return folder


def _cached_folder(root: Path, files: Mapping[str, str]) -> Path:
    """Make the folder in the cache, or reuse it.

    Its name follows from its content, and it appears under that name complete or not at all, so any number of
    processes may do this at once.
    """
    root.parent.parent.mkdir(parents=True, exist_ok=True)
    _claim(root.parent)
    _claim(root)
    digest = hashlib.sha256(repr(sorted(files.items())).encode("utf-8", "surrogateescape")).hexdigest()
    final = root / digest[:16]
    if _holds(final, files):
        return final
    fresh = Path(tempfile.mkdtemp(dir=root, prefix="new-"))
    try:
        _write_files(fresh, files)
        fresh.rename(final)
    except OSError:
        shutil.rmtree(fresh, ignore_errors=True)
        if not _holds(final, files):  # if it does, another process was faster
            raise
    return final


def _claim(folder: Path) -> None:
    """Make a folder, and see to it that no one else can write to it.

    Raises:
        OSError: If it cannot be made or belongs to someone else.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    if not _is_private(folder):
        folder.chmod(0o700)


def _write_files(folder: Path, files: Mapping[str, str]) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(os.fsencode(content))


def _holds(folder: Path, files: Mapping[str, str]) -> bool:
    try:
        if not _is_private(folder):
            return False
        present = {file.name: os.fsdecode(file.read_bytes()) for file in folder.iterdir()}
    except OSError:
        return False
    return present == dict(files)


def _is_private(folder: Path) -> bool:
    """Whether the folder is this user's and no one else can write to it."""
    status = folder.stat()
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _remove_in_process(folder: Path, process: int) -> None:
    """Remove the temporary folder when the process that made it ends, but not when a fork of it does."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
