"""`trt-backend doctor`: what this machine has, what serving needs, and the fix for each gap."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from rich.console import Console
from rich.table import Table

from trt_backend.cli.layout import GIB, MIB, size
from trt_backend.config import ConfigError
from trt_backend.triton.launcher import ServerError, server_version
from trt_backend.triton.locate import ServerHome, find_server, shared_libpython
from trt_backend.triton.process import SHM_FOLDER, unmapped_regions

GLIBC_NEEDED = (2, 35)
"""What the tritonserver of the nvidia-pytriton wheel is linked against."""
SHM_NEEDED = 64 * MIB
"""Docker's default. The Python backend starts with 1 MiB and grows by as much as requests in flight are large."""
SHM_WANTED = GIB
REGION_PREFIXES = ("triton_python_backend_shm_region_", "dhs_")


class Status(StrEnum):
    """`fail`: serving won't work; `warn`: something will be missing; `info`: nothing to judge."""

    OK = "ok"
    INFO = "info"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One checked thing: what was found, and what to do if that is not good enough."""

    name: str
    status: Status
    found: str
    fix: str = ""


def run_doctor(tritonserver: Path | None, as_json: bool, console: Console) -> int:
    """Check everything and print it; returns the exit code: 1 if something that serving needs is missing."""
    findings = examine(tritonserver)
    failed = any(finding.status is Status.FAIL for finding in findings)
    if as_json:
        console.print_json(json.dumps({"ok": not failed, "checks": [asdict(finding) for finding in findings]}))
    else:
        _print_table(findings, console)
        console.print("[red]this machine can't serve yet[/red]" if failed else "[green]this machine can serve[/green]")
    return int(failed)


def examine(tritonserver: Path | None) -> list[Finding]:
    """All findings, in the order in which things are needed."""
    home: ServerHome | None = None
    missing = ""
    try:
        home = find_server(tritonserver)
    except ConfigError as error:
        missing = str(error)
    bundled = home is None or home.origin.startswith("nvidia-pytriton")
    checks: list[Callable[[], Finding]] = [
        check_python,
        lambda: check_libpython(bundled),
        check_extension,
        check_compiler,
        check_cmake,
        lambda: check_glibc(bundled),
        lambda: check_numpy(bundled),
        lambda: check_server(home, missing),
        check_client,
        check_shared_memory,
        check_regions,
        check_memlock,
        check_gpu,
    ]
    return [check() for check in checks]


def check_python() -> Finding:
    """The interpreter that runs us, and so the model."""
    return Finding("Python", Status.OK, f"{platform.python_version()}, {sys.executable}")


def check_libpython(bundled: bool) -> Finding:
    """The stub of the Python backend loads the interpreter as a shared library."""
    library = shared_libpython()
    if library is not None:
        return Finding("libpython", Status.OK, str(library))
    if not bundled:
        return Finding("libpython", Status.INFO, "this Python has no shared library; the installed server brings one")
    if sys.version_info >= (3, 13):
        return Finding("libpython", Status.INFO, "this Python has no shared library; the wheel brings one for 3.13")
    fix = (
        "install a Python built with --enable-shared (pyenv: PYTHON_CONFIGURE_OPTS=--enable-shared; Debian: libpython3)"
    )
    return Finding("libpython", Status.FAIL, "this Python has no shared library", fix)


def check_extension() -> Finding:
    """The kernels' host twin."""
    if importlib.util.find_spec("plugins._host") is not None:
        return Finding("host kernels", Status.OK, "built")
    return Finding("host kernels", Status.FAIL, "plugins._host is not built", "make setup (or pip install -e .)")


def check_compiler() -> Finding:
    """Needed to build the host twin, not to run it."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        path = shutil.which(name) if name else None
        if path is not None:
            return Finding("C++ compiler", Status.OK, f"{path}: {first_line([path, '--version'])}")
    return Finding("C++ compiler", Status.WARN, "none; needed to build from source", "apt-get install g++")


def check_cmake() -> Finding:
    """Needed to build; pip fetches one when there is none."""
    path = shutil.which("cmake") or shutil.which("cmake", path=str(Path(sys.executable).parent))
    if path is None:
        return Finding("CMake", Status.INFO, "none; a build from source fetches one with pip")
    return Finding("CMake", Status.OK, f"{path}: {first_line([path, '--version'])}")


def check_glibc(bundled: bool) -> Finding:
    """The wheel's server needs a recent one."""
    name, version = platform.libc_ver()
    needed = ".".join(map(str, GLIBC_NEEDED))
    if name != "glibc":
        found, recent = f"{name or 'unknown C library'} {version}", False
    else:
        found, recent = f"glibc {version}", tuple(map(int, version.split("."))) >= GLIBC_NEEDED
    if recent:
        return Finding("C library", Status.OK, found)
    status = Status.FAIL if bundled else Status.INFO
    return Finding("C library", status, f"{found}; the wheel's server needs {needed}", "use a newer distribution")


def check_numpy(bundled: bool) -> Finding:
    """The stub of tritonserver 2.51 crashes on text inputs with numpy 2 (seen)."""
    version = importlib.metadata.version("numpy")
    if int(version.split(".")[0]) < 2:
        return Finding("numpy", Status.OK, version)
    status = Status.FAIL if bundled else Status.WARN
    found = f"{version}; the Python backend of tritonserver 2.51 crashes with it on text inputs"
    return Finding("numpy", status, found, "pip install 'numpy<2'")


def check_server(home: ServerHome | None, missing: str) -> Finding:
    """Start it with nothing to serve: that also proves that all its libraries are there."""
    if home is None:
        return Finding("tritonserver", Status.FAIL, missing, "pip install --no-deps nvidia-pytriton")
    with tempfile.TemporaryDirectory(prefix="dhs-doctor-") as folder:
        try:
            version = server_version(home, Path(folder) / "run")
        except (ServerError, ConfigError) as error:
            return Finding("tritonserver", Status.FAIL, f"{home.binary} does not start: {error}", "see what it printed")
    return Finding("tritonserver", Status.OK, f"{version} ({home.origin}), {home.binary}")


def check_client() -> Finding:
    """Only the demo and the load tests need it."""
    try:
        return Finding("tritonclient", Status.OK, importlib.metadata.version("tritonclient"))
    except importlib.metadata.PackageNotFoundError:
        fix = "pip install 'tritonclient[grpc]'"
        return Finding("tritonclient", Status.WARN, "none; the demo and the load tests need it", fix)


def check_shared_memory() -> Finding:
    """Requests and responses go between the server and the model's process through /dev/shm."""
    if not SHM_FOLDER.is_dir():
        return Finding("shared memory", Status.FAIL, f"{SHM_FOLDER} does not exist", "mount a tmpfs there")
    usage = shutil.disk_usage(SHM_FOLDER)
    found = f"{size(usage.free)} free of {size(usage.total)} in {SHM_FOLDER}"
    fix = "docker run --shm-size=1g, or mount -o remount,size=1G /dev/shm"
    if usage.free < SHM_NEEDED:
        return Finding("shared memory", Status.FAIL, found, fix)
    return Finding("shared memory", Status.OK if usage.free >= SHM_WANTED else Status.WARN, found, fix)


def check_regions() -> Finding:
    """What crashed servers left in /dev/shm."""
    stale = [region for prefix in REGION_PREFIXES for region in unmapped_regions(prefix)]
    if not stale:
        return Finding("stale shared memory", Status.OK, "none")
    held = sum(region.stat().st_size for region in stale)
    fix = "if no container shares this /dev/shm: rm " + " ".join(map(str, stale))
    return Finding("stale shared memory", Status.WARN, f"{len(stale)} regions of dead servers, {size(held)}", fix)


def check_memlock() -> Finding:
    """Pinned host memory for GPUs counts against this limit on some systems; the CPU engine pins nothing."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Finding("memlock limit", Status.OK, "unlimited")
    fix = "ulimit -l unlimited (docker run --ulimit memlock=-1)"
    return Finding("memlock limit", Status.INFO, f"{size(soft)}; only a GPU's pinned host pool could need more", fix)


def check_gpu() -> Finding:
    """Name, driver and memory, if the driver's tool is there."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Finding("GPU", Status.INFO, "no NVIDIA driver; the torch engine runs on the CPU")
    found = first_line([tool, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"])
    return Finding("GPU", Status.INFO, found or "nvidia-smi names no GPU")


def first_line(command: list[str]) -> str:
    """The first line that a command prints, or why there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"can't be run: {error}"
    return (done.stdout.strip() or done.stderr.strip()).split("\n")[0]


def _print_table(findings: list[Finding], console: Console) -> None:
    colours = {Status.OK: "green", Status.INFO: "cyan", Status.WARN: "yellow", Status.FAIL: "red"}
    table = Table("check", "status")
    table.add_column("found", overflow="fold")
    for finding in findings:
        colour = colours[finding.status]
        text = finding.found
        if finding.fix and finding.status is not Status.OK:
            text += f"\nfix: {finding.fix}"
        table.add_row(finding.name, f"[{colour}]{finding.status.value}[/{colour}]", text)
    console.print(table)
