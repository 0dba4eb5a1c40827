"""`trt-backend config`, and the beginning of `serve`: every setting, its value and where it was written."""

from __future__ import annotations

import json

from rich.console import Console

from trt_backend.settings import Settings


def print_settings(settings: Settings, as_json: bool, console: Console) -> None:
    """One line a setting, or one JSON object by key; secrets masked."""
    rows = settings.table()
    if as_json:
        console.print_json(json.dumps({key: {"value": value, "source": source} for key, value, source in rows}))
        return
    lines = [(key, _text(value), source) for key, value, source in rows]
    widths = [max(len(line[column]) for line in lines) for column in (0, 1)]
    for key, value, source in lines:
        console.print(f"  {key:<{widths[0]}}  {value:<{widths[1]}}  {source}", markup=False, soft_wrap=True)


def _text(value: object) -> str:
    """As a file would have it, on one line."""
    if isinstance(value, list):
        return "[" + ", ".join(map(str, value)) + "]"
    return value if isinstance(value, str) else json.dumps(value)
