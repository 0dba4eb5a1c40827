"""The kernels compile for every GPU generation we serve, on a machine that has none."""

from __future__ import annotations

import struct

import pytest

from plugins.nvrtc import ENTRY_POINTS, CompilationError, Cubin, compile_kernels

REGISTERS_PER_BLOCK = 65536
THREADS = {
    "dhs_resolve": 1024,
    "dhs_adopt": 1024,
    "dhs_locate": 1024,
    "dhs_topk": 1024,
    "dhs_fetch_rows": 256,
    "dhs_copy_pages": 256,
}


def function_symbols(image: bytes) -> set[str]:
    """Names of the functions in the symbol tables of a 64-bit ELF file (System V ABI, chapter 4)."""
    assert image[:5] == b"\x7fELF\x02"
    (sections_at,) = struct.unpack_from("<Q", image, 0x28)
    size, count = struct.unpack_from("<HH", image, 0x3A)
    # Each section header: name, type, flags, address, offset, size, link, info, alignment, entry size.
    sections = [struct.unpack_from("<IIQQQQIIQQ", image, sections_at + i * size) for i in range(count)]
    names = set()
    for _, kind, _, _, offset, length, link, _, _, entry in sections:
        if kind != 2:  # SHT_SYMTAB
            continue
        strings = sections[link][4]
        for at in range(offset, offset + length, entry):
            name, info = struct.unpack_from("<IB", image, at)
            if info & 0xF == 2:  # STT_FUNC
                names.add(image[strings + name : image.index(b"\0", strings + name)].decode())
    return names


@pytest.fixture(scope="module", params=["sm_80", "sm_90a", "sm_120"])
def cubin(request: pytest.FixtureRequest) -> Cubin:
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-python is not installed")
    return compile_kernels(request.param)


def test_every_entry_point_is_a_function_of_the_cubin(cubin: Cubin) -> None:
    assert set(ENTRY_POINTS) <= function_symbols(cubin.image)


def test_full_blocks_fit_the_register_file_without_spills(cubin: Cubin) -> None:
    assert set(cubin.resources) == set(ENTRY_POINTS)
    for name, used in cubin.resources.items():
        assert used.spilled_bytes == 0, f"{name}: {used}"
        # Registers are allocated by 8 a thread.
        assert -(-used.registers // 8) * 8 * THREADS[name] <= REGISTERS_PER_BLOCK, f"{name}: {used}"


def test_an_unknown_architecture_is_refused_by_name() -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-python is not installed")
    with pytest.raises(CompilationError, match="do not compile for sm_1"):
        compile_kernels("sm_1")
