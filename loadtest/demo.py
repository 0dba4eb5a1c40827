"""`make demo`: four prompts at once to a real Triton server, whose KV rows lie partly on the "device", partly on the
"host". Shows the text as it arrives, then how fast it was and where the selected rows came from.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import sysconfig
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tritonclient.grpc as grpcclient
import typer
from rich.columns import Columns
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from loadtest.server import LOOPBACK, ServeCommand

MODEL = "glm53-tiny"
MODULES = ("sched.py", "copyreg.py", "email/contentmanager.py", "xml/sax/xmlreader.py")
"""Files of the standard library that the model was not trained on."""
PROMPT_BYTES = 6500
"""About 1700 tokens each: well past the model's top-k of 64 and the hot cache of 128 tokens."""
HOT_TOKENS = 128
DEVICE_PAGES = 64
"""Fewer than the four histories need together (about 110), so that they can't all stay on the device."""
PAGE_TOKENS = 64
SOURCES = ("direct", "hot", "host")
PANEL_LINES = 12
TEMPERATURE = 0.7
SEED = 7
"""Small models repeat themselves when they are greedy. The seed is fixed: the text is the same every time."""
STREAM_SECONDS = 120.0


@dataclass(eq=False)
class Stream:
    """One prompt on a gRPC stream of its own, and what has come back so far. Times from `time.perf_counter`."""

    name: str
    prompt: str
    sent: float = 0.0
    ended: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    text: str = ""
    error: str | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def start(self, grpc_port: int, max_tokens: int) -> None:
        """Send the prompt; responses are taken on tritonclient's thread."""
        self._client = grpcclient.InferenceServerClient(f"{LOOPBACK}:{grpc_port}")
        self._client.start_stream(self._receive)
        inputs = [
            _tensor("text_input", "BYTES", np.array([[self.prompt.encode()]], dtype=np.object_)),
            _tensor("max_tokens", "INT32", np.array([[max_tokens]], dtype=np.int32)),
            _tensor("temperature", "FP32", np.array([[TEMPERATURE]], dtype=np.float32)),
            _tensor("seed", "UINT64", np.array([[SEED]], dtype=np.uint64)),
            _tensor("stream", "BOOL", np.array([[True]])),
        ]
        self.sent = time.perf_counter()
        self._client.async_stream_infer(MODEL, inputs, request_id=self.name, enable_empty_final_response=True)

    def _receive(self, result: Any, error: Any) -> None:
        if self.done.is_set():
            return  # closing a stream is reported as an error, too
        if error is not None:
            self.error = str(error)
            self.done.set()
            return
        text = result.as_numpy("text_output").reshape(-1)[0].decode()
        if text:
            self.arrivals.append(time.perf_counter())
            self.text += text
        if result.get_response().parameters["triton_final_response"].bool_param:
            self.ended = time.perf_counter()
            self.done.set()

    def close(self) -> None:
        """Leave the stream; a request that still runs is cancelled.

        One that has ended is not: tritonserver 2.51 then loses count of it, and waits for it when it is to stop.
        """
        self._client.stop_stream(cancel_requests=not self.done.is_set())
        self._client.close()


def _tensor(name: str, dtype: str, value: Any) -> Any:
    tensor = grpcclient.InferInput(name, list(value.shape), dtype)
    tensor.set_data_from_numpy(value)
    return tensor


def read_prompts() -> list[Stream]:
    """The beginnings of four modules, each cut before the body of a function."""
    folder = Path(sysconfig.get_path("stdlib"))
    streams = []
    for module in MODULES:
        source = (folder / module).read_text(encoding="utf-8")
        heads = [match.end() for match in re.finditer(r"^ *def .*:\n", source, re.MULTILINE)]
        cut = max((end for end in heads if end <= PROMPT_BYTES), default=PROMPT_BYTES)
        streams.append(Stream(module, source[:cut]))
    return streams


def watch_panels(streams: list[Stream], console: Console) -> None:
    """Show the last lines of each stream until all have ended."""

    def panel(stream: Stream) -> Panel:
        prompt_end = "\n".join(stream.prompt.splitlines()[-3:]) + "\n"
        lines = Text.assemble((prompt_end, "dim"), stream.text).split("\n")[-PANEL_LINES:]
        title = stream.name + (" ✓" if stream.done.is_set() else "")
        return Panel(Text("\n").join(lines), title=title, width=max(40, console.width // 2 - 1), height=PANEL_LINES + 2)

    with Live(console=console, refresh_per_second=12) as live:
        while True:
            over = all(stream.done.is_set() for stream in streams)
            live.update(Columns([panel(stream) for stream in streams], padding=0))
            if over:
                return
            time.sleep(0.05)


def watch_lines(streams: list[Stream], console: Console) -> None:
    """Print each line of a stream when it is complete, with the stream's name."""
    shown = dict.fromkeys(streams, 0)
    over = False
    while not over:
        over = all(stream.done.wait(0.05) for stream in streams)
        for stream in streams:
            text = stream.text
            end = len(text) if stream.done.is_set() else text.rfind("\n") + 1
            for line in text[shown[stream] : end].splitlines():
                console.print(f"{stream.name:>24} | {line}", markup=False, soft_wrap=True)
            shown[stream] = max(end, shown[stream])


def run(server: ServeCommand, streams: list[Stream], max_tokens: int, console: Console, quiet: bool) -> dict[str, Any]:
    """Send all prompts at once, show them, measure them.

    Raises:
        RuntimeError: a stream failed, or took too long.
    """
    before = changes(server, {}, 1)  # the inference that proved the server ready must not count
    try:
        for stream in streams:
            stream.start(server.grpc_port, max_tokens)
        if not quiet:
            (watch_panels if console.is_terminal else watch_lines)(streams, console)
        deadline = time.monotonic() + STREAM_SECONDS
        for stream in streams:
            if not stream.done.wait(max(0.0, deadline - time.monotonic())):
                raise RuntimeError(f"{stream.name}: no end after {STREAM_SECONDS:g} s")
    finally:
        for stream in streams:
            stream.close()
    failed = [f"{stream.name}: {stream.error}" for stream in streams if stream.error]
    if failed:
        raise RuntimeError("\n".join(failed))
    return measure(streams, max_tokens, changes(server, before, len(streams)))


def changes(server: ServeCommand, before: dict[str, float], requests: int) -> dict[str, float]:
    """How the counters have grown; waits until they include the end of `requests` requests."""
    deadline = time.monotonic() + 5.0
    while True:
        grown = {name: value - before.get(name, 0.0) for name, value in server.metrics().items()}
        ended = sum(value for name, value in grown.items() if name.startswith("dhs_requests_total"))
        if ended >= requests or time.monotonic() > deadline:
            return grown
        time.sleep(0.05)


def measure(streams: list[Stream], max_tokens: int, grown: dict[str, float]) -> dict[str, Any]:
    """TTFT, TPOT and rates of each stream, and where the rows came from."""
    generated = int(grown["dhs_generated_tokens_total"])
    full = generated == max_tokens * len(streams)
    prompts = []
    for stream in streams:
        # A client sees pieces of text, not tokens. When all streams ran to their limit the tokens are known; a stream
        # that ended earlier had about one piece a token, and its end token.
        tokens = max_tokens if full else min(max_tokens, len(stream.arrivals) + 1)
        arrivals = stream.arrivals or [stream.ended]
        first, last = arrivals[0] - stream.sent, arrivals[-1] - stream.sent
        prompts.append(
            {
                "name": stream.name,
                "ttft_ms": 1e3 * first,
                "tpot_ms": 1e3 * (last - first) / max(1, tokens - 1),
                "tokens": tokens,
                "tokens_are_exact": full,
                "tokens_per_second": tokens / last,
                "text": stream.text,
            }
        )
    rows = {source: int(grown[f'dhs_resolver_rows_total{{source="{source}"}}']) for source in (*SOURCES, "masked")}
    found = sum(rows[source] for source in SOURCES)
    prompt_tokens = int(grown["dhs_prompt_tokens_total"])
    return {
        "prompts": prompts,
        "generated_tokens": generated,
        "prompt_tokens": prompt_tokens,
        "history_pages": -(-prompt_tokens // PAGE_TOKENS),
        "device_pages": DEVICE_PAGES,
        "tokens_per_second": generated / (max(s.ended for s in streams) - min(s.sent for s in streams)),
        "rows": rows,
        "row_shares": {source: rows[source] / found if found else 0.0 for source in SOURCES},
    }


def print_report(report: dict[str, Any], console: Console) -> None:
    """The table at the end."""
    table = Table("prompt", title=f"four streams at once, {MODEL}")
    for heading in ("TTFT ms", "TPOT ms", "tokens", "tokens/s"):
        table.add_column(heading, justify="right")
    for prompt in report["prompts"]:
        table.add_row(
            prompt["name"],
            f"{prompt['ttft_ms']:.0f}",
            f"{prompt['tpot_ms']:.1f}",
            str(prompt["tokens"]) if prompt["tokens_are_exact"] else f"≈ {prompt['tokens']}",
            f"{prompt['tokens_per_second']:.1f}",
        )
    console.print(table)
    console.print(
        f"together: {report['tokens_per_second']:.1f} tokens/s; {report['prompt_tokens']} prompt tokens are "
        f"{report['history_pages']} pages of history, the device pool has {report['device_pages']}",
        soft_wrap=True,
    )
    shares = ", ".join(f"{source} {report['row_shares'][source]:.1%}" for source in SOURCES)
    console.print(f"selected rows came from: {shares} (masked: {report['rows']['masked']})", soft_wrap=True)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    max_tokens: Annotated[int, typer.Option(min=2, max=1000, help="Tokens to generate for each prompt.")] = 96,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Start a server, send it four prompts at once, show what comes back, stop the server."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the server is stopped then, too
    console = Console(stderr=as_json, highlight=False)
    started = time.perf_counter()
    options = [f"--model={MODEL}", "--residency=hisparse", f"--hot-tokens={HOT_TOKENS}"]
    options += [f"--device-pages={DEVICE_PAGES}", f"--page-tokens={PAGE_TOKENS}", "--max-sessions=4"]
    options += ["--canary-seconds=3600"]  # its rows and tokens would be counted with those of the prompts
    streams = read_prompts()
    try:
        with tempfile.TemporaryDirectory(prefix="dhs-demo-") as folder, ServeCommand(Path(folder), *options) as server:
            with console.status("starting the server") as status:
                server.wait_ready(progress=status.update)
            ready = time.perf_counter()
            console.print(f"a Triton server was ready after {ready - started:.1f} s: {MODEL}, hisparse")
            report = run(server, streams, max_tokens, console, quiet=as_json)
    except (RuntimeError, OSError) as error:
        Console(stderr=True).print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1) from None
    report |= {"server_start_seconds": ready - started, "total_seconds": time.perf_counter() - started}
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        print_report(report, console)
        console.print(f"{report['total_seconds']:.1f} s in all, the server has stopped")


if __name__ == "__main__":
    app()
