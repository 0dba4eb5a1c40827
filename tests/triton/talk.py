"""Talking to a server of the shipped model, and looking at what it holds."""

from __future__ import annotations

import os
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.server import ServeCommand
from tests.triton.clients import Answer, Stream, make_inputs
from tests.triton.conftest import MODEL
from trt_backend.triton.locate import STUB
from trt_backend.triton.process import children_of, command_of

PROMPT = b"import os\n\n\ndef main(argv):\n"
LONG_PROMPT = Path(textwrap.__file__).read_bytes()[:3000]
"""The beginning of a module, with more history than a selection has rows."""


def ask(server: ServeCommand, text: bytes = PROMPT, request_id: str = "", **fields: Any) -> Answer:
    """One request on a stream of its own, and all that comes back."""
    return Stream(server.grpc_port, MODEL, make_inputs(text, **fields), request_id).rest()


def counted(server: ServeCommand, outcome: str) -> float:
    """Requests that have ended so."""
    return server.metrics().get(f'dhs_requests_total{{outcome="{outcome}"}}', 0.0)


def is_idle(server: ServeCommand) -> bool:
    """No session, every page free."""
    now = server.metrics()
    sessions = sum(value for name, value in now.items() if name.startswith("dhs_sessions"))
    held = sum(now[f'dhs_pages{{state="{state}"}}'] for state in ("required", "optional", "in_transit"))
    return sessions == 0 and held == 0 and now['dhs_host_pages{state="used"}'] == 0


@dataclass(frozen=True)
class Holdings:
    """What the model's process holds of the machine."""

    threads: int
    regions: int


def stub_of(server: ServeCommand) -> int:
    """Process id of the model's process."""
    (triton,) = [child for child in children_of(server.process.pid) if "tritonserver" in command_of(child)]
    (stub,) = [child for child in children_of(triton) if STUB in command_of(child)]
    return stub


def holdings(server: ServeCommand) -> Holdings:
    """Threads of the model's process, and shared-memory files that it maps."""
    stub = stub_of(server)
    maps = Path(f"/proc/{stub}/maps").read_text().splitlines()
    regions = {line.split()[-1] for line in maps if "/dev/shm/" in line}
    return Holdings(len(os.listdir(f"/proc/{stub}/task")), len(regions))


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
