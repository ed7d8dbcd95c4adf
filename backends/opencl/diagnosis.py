"""What ``dispatcher doctor`` says of OpenCL: runtimes, their libraries, the loader's settings, caches."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import metadata

from dispatcher.backends.opencl import caches
from dispatcher.backends.opencl.icd import IcdEntry, load_error, prepare_icd_vendors
from dispatcher.device.childprocess import Report, no_python, run_child
from dispatcher.errors import install
from dispatcher.interface import Finding

INSTALL = f"{install('cpu')}; or install your system's OpenCL driver (pocl-opencl-icd)"

#: Environment variables that change what is found, and what to know of them.
VARIABLES = {
    "OCL_ICD_VENDORS": "the loader reads .icd files from there only",
    "OPENCL_VENDOR_PATH": "the loader reads .icd files from there only",
    "OCL_ICD_FILENAMES": "the libraries that it names are added to what the loader reads",
    "POCL_CACHE_DIR": "PoCL keeps compiled kernels there",
    "POCL_DEVICES": "PoCL lists these devices only",
    "LD_LIBRARY_PATH": "libraries in there are loaded in place of others of the same name",
    "PYOPENCL_BUILD_OPTIONS": "it is left out of account here",
    "PYOPENCL_CTX": "it is not used here; name a device with --device or DISPATCHER_DEVICE",
}

#: In an entry that is not used, but that nobody has to fix. The last is in the .icd files of Intel's wheel, whose
#: runtime is found without them.
_HARMLESS = ("has the same name", "already names", "anaconda1anaconda2")
_LOAD_LIMIT_S = 20.0


def diagnose() -> Iterator[Finding]:
    """Look at everything that OpenCL needs; never raises."""
    settings = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    try:
        yield Finding("opencl", "PyOpenCL", "ok", metadata.version("pyopencl"))
    except metadata.PackageNotFoundError:
        yield Finding("opencl", "PyOpenCL", "problem", "it is not installed", "pip install pyopencl")
    report = prepare_icd_vendors()
    yield Finding("opencl", "loader", "ok", f"reads {report.vendors}: {report.reason}")
    for name, value in settings.items():
        if value != str(report.vendors) or not report.changed:
            yield Finding("opencl", name, "note", f"is {value!r}: {VARIABLES[name]}", f"unset {name}")
    if not report.entries:
        yield Finding("opencl", "runtimes", "problem", f"there is no .icd file in {report.vendors}", INSTALL)
    for entry in report.entries:
        yield _runtime(entry)
    if any("pocl" in entry.library.lower() for entry in report.entries if entry.used):
        folder = caches.cache_folder()
        reason = caches.unusable(folder)
        if reason is None:
            yield Finding("opencl", "PoCL's cache", "ok", str(folder))
        else:
            remedy = f"set {caches.VARIABLE} to a folder that can be written to"
            yield Finding("opencl", "PoCL's cache", "problem", f"{reason}, so PoCL lists no device", remedy)


def _runtime(entry: IcdEntry) -> Finding:
    """One runtime: is its library there, and does it load?"""
    subject = str(entry.icd_file)
    named = entry.library or "no library"
    if not entry.used:
        harmless = any(words in entry.library + entry.reason for words in _HARMLESS)
        remedy = "" if harmless else f"correct or remove {subject}; {INSTALL}"
        verdict = "note" if harmless else "problem"
        return Finding("opencl", subject, verdict, f"{named}: {entry.reason}", remedy)  # type: ignore[arg-type]
    error = _load_error(entry.library)
    if error:
        return Finding("opencl", subject, "problem", f"{named} cannot be loaded: {error}", INSTALL)
    return Finding("opencl", subject, "ok", f"{named}, {entry.reason}")


def _load_error(library: str) -> str:
    """Why a library does not load, or nothing; found out in a process of its own, which it may kill."""
    try:
        ended = run_child(f"{__name__}:report_load_error", [library], _LOAD_LIMIT_S)
    except OSError as error:
        return "" if no_python() else f"no process to try it in: {error}"
    if ended.code is None:
        return f"it hung for {_LOAD_LIMIT_S:g} s"
    if ended.code != 0 or not ended.reports:
        return f"it ended the process with {ended.code}"
    return str(ended.reports[0] or "")


def report_load_error(report: Report, library: str) -> None:
    """What the child process does."""
    prepare_icd_vendors()
    report(load_error(library))
