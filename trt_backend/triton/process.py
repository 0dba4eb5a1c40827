"""Small facts about processes and shared memory, read from /proc."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from pathlib import Path

SHM_FOLDER = Path("/dev/shm")
PR_SET_PDEATHSIG = 1
"""prctl(2) option: the signal that a process gets when the thread that made it ends."""


def die_with_parent(death_signal: signal.Signals = signal.SIGTERM) -> Callable[[], None]:
    """A `preexec_fn` after which the child gets `death_signal` when its parent ends, however that ends."""
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def arm() -> None:
        libc.prctl(PR_SET_PDEATHSIG, int(death_signal), 0, 0, 0)
        if os.getppid() != parent:  # it ended before prctl could be told
            os._exit(1)

    return arm


def children_of(pid: int) -> list[int]:
    """Process ids of the direct children."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found.extend(int(child) for child in file.read_text().split())
        except OSError:
            continue  # the thread ended while we looked
    return found


def command_of(pid: int) -> str:
    """The command line, or nothing if the process has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def unmapped_regions(prefix: str) -> list[Path]:
    """Shared-memory files of ours whose name begins with `prefix` and that no process maps."""
    regions = [file for file in SHM_FOLDER.glob(f"{prefix}*") if file.stat().st_uid == os.getuid()]
    if not regions:
        return []
    mapped: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            content = maps.read_text()
        except OSError:
            continue
        mapped.update(str(region) for region in regions if str(region) in content)
    return [region for region in regions if str(region) not in mapped]


def sweep_regions(prefix: str) -> list[Path]:
    """Remove the shared-memory files that a server with this prefix left behind when it crashed."""
    swept = unmapped_regions(prefix)
    for region in swept:
        region.unlink(missing_ok=True)
    return swept
