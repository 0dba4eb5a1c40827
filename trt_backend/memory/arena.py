"""Row storage: one array a source. A page id means the same page in every one of them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trt_backend.kv.layout import KvLayout

Bytes = npt.NDArray[np.uint8]


class RowStore:
    """`pages` pages of rows in CPU memory: the arenas of a CPU "device", or a host pool.

    `sources[s]` is uint8 [pages * page_rows(s), row_bytes(s)], zero at first; the operating system commits its
    memory only as rows are written.
    """

    def __init__(self, layout: KvLayout, pages: int) -> None:
        self.layout = layout
        self.pages = pages
        self.sources: list[Bytes] = [
            np.zeros((pages * layout.page_rows(s), source.row_bytes), dtype=np.uint8)
            for s, source in enumerate(layout.sources)
        ]


class IndexKeyStore:
    """Index keys of all groups: `groups[g]` is uint8 [pages * page_tokens / ratio, key_bytes]. Always on the device."""

    def __init__(self, layout: KvLayout, pages: int) -> None:
        self.groups: list[Bytes] = [
            np.zeros((pages * (layout.page_tokens // group.ratio), group.key_bytes), dtype=np.uint8)
            for group in layout.groups
        ]
