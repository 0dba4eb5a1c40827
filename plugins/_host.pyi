import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
UInt8 = npt.NDArray[np.uint8]

def resolve(
    ready_map: Int32,
    host_map: Int32,
    tail_first: Int32,
    tail_pages: Int32,
    hot_pages: Int32,
    page_rows: int,
    hot_positions: Int32,
    lru: Int32,
    group: int,
    selected: Int32,
    slots: Int32,
    locations: Int32,
    fetch_counts: Int32,
    fetch_host_rows: Int32,
    fetch_device_rows: Int32,
    counts: Int32,
    threads: int,
    seed: int,
) -> None: ...
def adopt(
    hot_pages: Int32,
    page_rows: int,
    hot_positions: Int32,
    lru: Int32,
    group: int,
    latest: Int32,
    slots: Int32,
    index: Int32,
    pages: Int32,
    counts: Int32,
    source_rows: Int32,
    target_rows: Int32,
    threads: int,
    seed: int,
) -> None: ...
def locate(
    ready_map: Int32,
    tail_first: Int32,
    tail_pages: Int32,
    page_rows: int,
    selected: Int32,
    slots: Int32,
    locations: Int32,
    threads: int,
    seed: int,
) -> int: ...
def topk(scores: Float32, visible: Int32, k: int, selected: Int32, threads: int, seed: int) -> None: ...
def fetch_rows(
    host: UInt8,
    device: UInt8,
    fetch_counts: Int32,
    fetch_host_rows: Int32,
    fetch_device_rows: Int32,
    sessions: int,
) -> None: ...
def copy_rows(arena: UInt8, counts: Int32, source_rows: Int32, target_rows: Int32) -> None: ...
def copy_pages(source: UInt8, target: UInt8, source_pages: Int32, target_pages: Int32, page_rows: int) -> None: ...
