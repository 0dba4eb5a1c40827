"""`trt-backend top`: what a running server does, from its metrics port, again and again."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from trt_backend.cli.readings import SOURCES, USES, Frame, Latency, Reading, fetch, frame_of
from trt_backend.config import ConfigError

LATENCY_SECONDS = 60.0
"""Latencies are those of the requests that have ended lately: in one interval there may be none."""
BAR_WIDTH = 64
Style = tuple[str, str]
"""A character, so that bars can be read without colours, and a colour."""
USE_STYLES: dict[str, Style] = {
    "required": ("█", "blue"),
    "optional": ("▓", "green"),
    "in_transit": ("▒", "yellow"),
    "free": ("·", "bright_black"),
}
SOURCE_STYLES: dict[str, Style] = {"direct": ("█", "green"), "hot": ("▓", "yellow"), "host": ("▒", "red")}
HOST_STYLES: dict[str, Style] = {"used": ("█", "magenta"), "free": ("·", "bright_black")}
RESERVE_MARK = "┃"


def run_top(url: str, interval: float, once: bool, as_json: bool, console: Console) -> None:
    """Show frames until Ctrl-C; one with `once`, one as JSON with `as_json`. Each needs two readings `interval` apart.

    Raises:
        ConfigError: the port can't be reached at first, or for a single frame.
    """
    readings = deque([fetch(url)])
    if once or as_json:
        time.sleep(interval)
        readings.append(fetch(url))
        frame = frame_of(readings)
        if as_json:
            print(json.dumps({"metrics_url": url} | asdict(frame), indent=2))
        else:
            console.print(render(frame, url))
        return
    try:
        with Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                live.update(_next(readings, url), refresh=True)
    except KeyboardInterrupt:
        return


def _next(readings: deque[Reading], url: str) -> Group:
    """One more frame. A server that is being restarted does not answer for a while: the last frame stays, and why."""
    trouble = None
    try:
        readings.append(fetch(url))
    except ConfigError as error:
        trouble = str(error)
    while readings[-1].seconds - readings[0].seconds > LATENCY_SECONDS and len(readings) > 2:
        readings.popleft()
    shown = render(frame_of(readings), url) if len(readings) > 1 else Group()
    return Group(shown, Text(trouble, style="red")) if trouble else shown


def render(frame: Frame, url: str) -> Group:
    """Three boxes: memory, work, requests."""
    return Group(
        Panel(_memory(frame), title=f"memory — {url}", title_align="left"),
        Panel(_work(frame), title=f"work in the last {frame.seconds:.1f} s", title_align="left"),
        Panel(_requests(frame), title="requests", title_align="left"),
    )


def _grid() -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column()
    return grid


def _memory(frame: Frame) -> Table:
    pages = {use: frame.pages.get(use, 0) for use in USES}
    total, reserve = sum(pages.values()), frame.reserve_pages
    strip = bar(pages, USE_STYLES, mark=total - reserve if reserve else None)
    legend = _legend(pages, USE_STYLES)
    legend.append(f"   {RESERVE_MARK} reserve {reserve}")
    grid = _grid()
    grid.add_row("device pages", Text.assemble(strip, f" {total}"))
    grid.add_row("", legend)
    host = {state: frame.host_pages.get(state, 0) for state in HOST_STYLES}
    grid.add_row("host pages", Text.assemble(bar(host, HOST_STYLES), f" {sum(host.values())}"))
    grid.add_row("", _legend(host, HOST_STYLES))
    return grid


def _work(frame: Frame) -> Table:
    grid = _grid()
    rows = {source: frame.rows.get(source, 0) for source in SOURCES}
    if frame.row_shares is None:
        grid.add_row("selected rows", Text("none", style="bright_black"))
    else:
        shares = "   ".join(f"{SOURCE_STYLES[source][0]} {source} {frame.row_shares[source]:.1%}" for source in SOURCES)
        grid.add_row("selected rows", bar(rows, SOURCE_STYLES))
        grid.add_row("", shares)
    if frame.rows.get("masked"):
        grid.add_row("", Text(f"{frame.rows['masked']} masked: the server has a fault", style="bold red"))
    step = "" if frame.step_ms is None else f", {frame.step_ms:.1f} ms each"
    grid.add_row(
        "speed",
        f"{frame.generated_tokens_per_second:.1f} tokens/s   {frame.prompt_tokens_per_second:.1f} prompt tokens/s   "
        f"{frame.steps_per_second:.1f} steps/s{step}",
    )
    rates = "   ".join(f"{kind.replace('_', ' ')} {rate:.1f}" for kind, rate in frame.pages_per_second.items())
    grid.add_row("pages/s", rates)
    failed = Text(f"{frame.failed_copies} failed", style="red" if frame.failed_copies else "")
    grid.add_row("copies", Text.assemble(f"{frame.copying_pages} pages under way   ", failed))
    return grid


def _requests(frame: Frame) -> Group:
    grid = _grid()
    states = "   ".join(f"{state} {count}" for state, count in frame.sessions.items())
    grid.add_row("now", f"{states}   (at most {frame.max_sessions} sessions)")
    outcomes = "   ".join(f"{outcome} {count}" for outcome, count in sorted(frame.outcomes.items()))
    grid.add_row("ended", outcomes or Text("none", style="bright_black"))
    table = Table("ms", "requests", "mean", "p50", "p99", box=None, padding=(0, 2, 0, 0))
    for column in table.columns[1:]:
        column.justify = "right"
    for kind, latency in frame.latencies.items():
        table.add_row(kind if kind == "queue" else kind.upper(), *_latency_cells(latency))
    return Group(
        grid, Text(f"those that ended in the last {frame.latency_seconds:.0f} s:", style="bright_black"), table
    )


def _latency_cells(latency: Latency | None) -> Sequence[str]:
    if latency is None:
        return ("0", "-", "-", "-")
    return (str(latency.requests), *(f"{ms:.1f}" for ms in (latency.mean_ms, latency.p50_ms, latency.p99_ms)))


def _legend(parts: Mapping[str, int], styles: Mapping[str, Style]) -> Text:
    pieces: list[str | tuple[str, str]] = []
    for name, (character, color) in styles.items():
        pieces += [(f"{character} ", color), f"{name.replace('_', ' ')} {parts[name]}   "]
    legend = Text.assemble(*pieces)
    legend.rstrip()
    return legend


def bar(parts: Mapping[str, int], styles: Mapping[str, Style], mark: int | None = None, width: int = BAR_WIDTH) -> Text:
    """Parts of a whole side by side, `width` characters in all; `mark` is a place on the same scale.

    What is there at all has a character: the largest part gives it.
    """
    total = sum(parts.values())
    if not total:
        return Text(" " * width)
    cells = {name: max(round(width * count / total), count > 0) for name, count in parts.items()}
    cells[max(parts, key=lambda name: parts[name])] += width - sum(cells.values())
    strip = Text()
    for name, count in cells.items():
        character, color = styles[name]
        strip.append(character * count, style=color)
    if mark is None:
        return strip
    place = min(width - 1, round(width * mark / total))
    return Text.assemble(strip[:place], (RESERVE_MARK, "bold"), strip[place + 1 :])
