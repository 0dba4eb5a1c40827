"""Compiles `kernels/entry.cu` for a GPU, with NVRTC: no CUDA toolkit and no GPU are needed.

cuda-python is imported when a compilation is asked for, so that machines without it can import this package.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

KERNELS = Path(__file__).parent / "kernels"
ENTRY_POINTS = ("dhs_resolve", "dhs_adopt", "dhs_locate", "dhs_topk", "dhs_fetch_rows", "dhs_copy_pages")


class CompilationError(RuntimeError):
    """NVRTC refused the sources or the architecture; the message holds its log."""


@dataclass(frozen=True, slots=True)
class KernelResources:
    """What ptxas reports of one kernel: registers a thread, bytes of spills a thread, static shared memory."""

    registers: int
    spilled_bytes: int
    shared_bytes: int


@dataclass(frozen=True, slots=True)
class Cubin:
    """Machine code for one architecture, such as `sm_90a`, and the resources of its entry points by name."""

    arch: str
    image: bytes
    resources: dict[str, KernelResources]


def compile_kernels(arch: str) -> Cubin:
    """Compile the kernels for an architecture: `sm_80`, `sm_90a`, `sm_120` and so on.

    Raises:
        ModuleNotFoundError: cuda-python is not installed.
        CompilationError: the sources do not compile, or NVRTC does not know the architecture.
    """
    program = _Program(KERNELS / "entry.cu", sorted(KERNELS.glob("*.cuh")))
    try:
        status = program.compile(f"--gpu-architecture={arch}", "--std=c++17", "--ptxas-options=-v")
        log = program.read("ProgramLog").decode().strip("\0 \n")
        if status != 0:
            raise CompilationError(f"the kernels do not compile for {arch} (NVRTC status {status})\n{log}".rstrip())
        return Cubin(arch, program.read("CUBIN"), _resources(log))
    finally:
        program.destroy()


class _Program:
    """A program of NVRTC. Its functions return the status first; any but 0 is an error unless said otherwise."""

    def __init__(self, source: Path, headers: list[Path]) -> None:
        try:
            self._nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError("compiling kernels needs cuda-python: install the extra `cuda`") from error
        names = [header.name.encode() for header in headers]
        contents = [header.read_bytes() for header in headers]
        self._program = self._call(
            "CreateProgram", source.read_bytes(), source.name.encode(), len(names), contents, names
        )

    def compile(self, *options: str) -> int:
        """NVRTC's status, 0 if all went well; the log says the rest."""
        (status,) = self._nvrtc.nvrtcCompileProgram(self._program, len(options), [o.encode() for o in options])
        return int(status)

    def read(self, what: str) -> bytes:
        """A result of the compilation: `ProgramLog` or `CUBIN`."""
        content = bytearray(int(self._call(f"Get{what}Size", self._program)))
        self._call(f"Get{what}", self._program, content)
        return bytes(content)

    def destroy(self) -> None:
        self._call("DestroyProgram", self._program)

    def _call(self, function: str, *arguments: object) -> Any:
        status, *results = getattr(self._nvrtc, f"nvrtc{function}")(*arguments)
        if int(status) != 0:
            raise CompilationError(f"nvrtc{function}: {status.name}")
        return results[0] if results else None


def _resources(log: str) -> dict[str, KernelResources]:
    """Read the lines that `--ptxas-options=-v` adds to the log, one paragraph a kernel."""
    resources = {}
    for paragraph in log.split("Compiling entry function '")[1:]:
        name = paragraph.partition("'")[0]
        registers = re.search(r"Used (\d+) registers", paragraph)
        spills = re.findall(r"(\d+) bytes spill", paragraph)
        shared = re.search(r"(\d+) bytes smem", paragraph)
        if registers is None or not spills:
            raise CompilationError(f"ptxas reports no resources of {name}:\n{log}")
        resources[name] = KernelResources(
            registers=int(registers[1]),
            spilled_bytes=sum(int(spilled) for spilled in spills),
            shared_bytes=int(shared[1]) if shared else 0,
        )
    return resources
