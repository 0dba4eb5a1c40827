"""The allocator's setting, seen through what it is for: fewer page faults."""

from __future__ import annotations

import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import numpy as np
from trt_backend.memory.cpu import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
def step():
    np.ones(1 << 20, dtype=np.uint8).sum()
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(200):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode: str) -> int:
    done = subprocess.run([sys.executable, "-c", FAULTS, mode], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="mallopt is glibc's")
def test_memory_that_is_kept_is_not_faulted_in_again() -> None:
    """200 blocks of 256 pages: by default glibc maps each anew, at least until it has raised its own threshold."""
    assert faults("kept") < 64 < faults("as it is")
