"""`trt-backend layout`: the memory table of a model."""

from __future__ import annotations

import json
import re
from typing import Any

from rich.console import Console
from rich.table import Table

from trt_backend.build import find_model
from trt_backend.config import ConfigError, RowFormat
from trt_backend.kv.layout import TAIL_PAGES, KvLayout
from trt_backend.models.registry import kv_layout, preset_names, read_config

KIB, MIB, GIB = 2**10, 2**20, 2**30


def print_layout(
    model: str,
    row_format: RowFormat,
    page_tokens: int,
    hot_tokens: int | None,
    contexts: str,
    as_json: bool,
    console: Console,
) -> None:
    """Print sizes in bytes (JSON) or in binary units (table).

    Raises:
        ConfigError: the model is unknown, or a size does not fit it.
    """
    config = read_config(model if model in preset_names() else find_model(model))
    try:
        bare = kv_layout(config, row_format, page_tokens, 0)
        hot = bare.pages_for(2 * bare.top_k) * page_tokens if hot_tokens is None else hot_tokens
        found = measure(model, kv_layout(config, row_format, page_tokens, hot), row_format, parse_contexts(contexts))
    except ValueError as error:
        raise ConfigError(f"command line: {error}") from error
    if as_json:
        console.print_json(json.dumps(found))
    else:
        _print_table(found, console)


def parse_contexts(text: str) -> list[int]:
    """ "32K,100000" → [32768, 100000].

    Raises:
        ValueError: an entry is not a positive number of tokens.
    """
    lengths = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([1-9]\d{0,8})\s*([Kk]?)\s*", part)
        if match is None:
            raise ValueError(f"contexts={text!r}: {part!r} is not legal; legal: positive numbers, K for 1024, commas")
        lengths.append(int(match[1]) * (KIB if match[2] else 1))
    return lengths


def measure(model: str, layout: KvLayout, row_format: RowFormat, contexts: list[int]) -> dict[str, Any]:
    """Every size, in bytes unless the key says otherwise."""
    rows = sorted({source.row_bytes for source in layout.sources})
    keys = sorted({group.key_bytes for group in layout.groups})
    required = layout.hot_bytes + TAIL_PAGES * layout.page_bytes
    return {
        "model": model,
        "row_format": row_format.value,
        "page_tokens": layout.page_tokens,
        "hot_tokens": layout.hot_tokens,
        "top_k": layout.top_k,
        "sources": len(layout.sources),
        "groups": [len(group.sources) for group in layout.groups],
        "row_bytes": rows,
        "index_key_bytes_of_group": keys,
        "bytes_per_token": layout.history_bytes(layout.page_tokens) / layout.page_tokens,
        "index_bytes_per_token": layout.index_key_bytes(layout.page_tokens) / layout.page_tokens,
        "page_bytes": layout.page_bytes,
        "hot_pages": layout.hot_pages,
        "hot_bytes": layout.hot_bytes,
        "tail_pages": TAIL_PAGES,
        "tail_bytes": TAIL_PAGES * layout.page_bytes,
        "contexts": [
            {
                "tokens": tokens,
                "index_key_bytes": layout.index_key_bytes(tokens),
                "history_bytes": layout.history_bytes(tokens),
                "history_pages": layout.pages_for(tokens),
                "resident_device_bytes": layout.index_key_bytes(tokens) + layout.history_bytes(tokens),
                "hisparse_device_bytes": layout.index_key_bytes(tokens) + required,
                "hisparse_host_bytes": layout.pages_for(tokens) * layout.page_bytes,
            }
            for tokens in contexts
        ],
    }


def size(count: float) -> str:
    """Bytes in the unit that reads best."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if count >= unit:
            digits = 0 if count >= 100 * unit else 2
            return f"{count / unit:.{digits}f} {name}"
    return f"{count:.0f} B"


def _print_table(found: dict[str, Any], console: Console) -> None:
    groups = found["groups"]
    console.print(
        f"[bold]{found['model']}[/bold], {found['row_format']} rows: {found['sources']} sources in {len(groups)} index "
        f"groups of {min(groups)} to {max(groups)}, top-k {found['top_k']}",
        soft_wrap=True,
    )
    table = Table("what one session holds", "size", "made of")
    table.columns[1].justify = "right"
    rows = " or ".join(map(str, found["row_bytes"]))
    keys = " or ".join(map(str, found["index_key_bytes_of_group"]))
    table.add_row("row", f"{rows} B", "one token in one source")
    table.add_row("token", size(found["bytes_per_token"]), f"{found['sources']} sources")
    table.add_row("page", size(found["page_bytes"]), f"{found['page_tokens']} tokens in all sources")
    table.add_row(
        "hot cache", size(found["hot_bytes"]), f"B = {found['hot_tokens']} tokens, {found['hot_pages']} pages"
    )
    table.add_row("tail", size(found["tail_bytes"]), f"{found['tail_pages']} pages")
    table.add_row("index keys a token", size(found["index_bytes_per_token"]), f"{len(groups)} groups × {keys} B")
    for context in found["contexts"]:
        tokens = context["tokens"]
        name = f"{tokens // KIB}K" if tokens % KIB == 0 else str(tokens)
        table.add_section()
        table.add_row(f"full history at {name}", size(context["history_bytes"]), f"{context['history_pages']} pages")
        table.add_row(f"index keys at {name}", size(context["index_key_bytes"]), "always on the device")
        table.add_row(f"resident at {name}: device", size(context["resident_device_bytes"]), "history, index keys")
        table.add_row(
            f"hisparse at {name}: device", size(context["hisparse_device_bytes"]), "hot cache, tail, index keys"
        )
        table.add_row(f"hisparse at {name}: host", size(context["hisparse_host_bytes"]), "history in whole pages")
    console.print(table)
