"""Command line: `python -m build_engines.tiny COMMAND`."""

from __future__ import annotations

import os
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from . import corpus as corpora
from .checkpoint import read_checkpoint, write_checkpoint
from .config import CHECKPOINT_DIR, WORK_DIR, TinyConfig
from .evaluate import EVALUATION_FILE, PROSE_FILE, evaluate, read_evaluation
from .network import TinyGlm
from .plots import plot_positions, plot_training
from .sample import continue_text
from .schedule import FULL_PLAN
from .tokenizer import load_tokenizer, save_tokenizer, token_bytes, train_tokenizer
from .train import StepReport, Trainer, run

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
STATE = WORK_DIR / "state.pt"
LOG = CHECKPOINT_DIR / "training.csv"
PROSE_WINDOWS = 4
Threads = Annotated[int, typer.Option(help="cores to use")]
COLUMNS = (
    TextColumn("{task.description}"),
    BarColumn(),
    TextColumn("{task.completed}/{task.total}"),
    TimeElapsedColumn(),
    TimeRemainingColumn(),
)
# glibc gives large blocks back to the kernel and faults them in again at the next step; keeping them is worth a
# quarter of the time. OpenMP's spinning threads lose most of it when another process shares the cores.
ALLOCATOR = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "8000000000",
    "MALLOC_TOP_PAD_": "67108864",
    "OMP_WAIT_POLICY": "passive",
}


def _settle() -> None:
    """Start this process again with the settings above, which are read only at the start."""
    if any(key not in os.environ for key in ALLOCATOR):
        arguments = [sys.executable, "-m", "build_engines.tiny", *sys.argv[1:]]
        os.execve(sys.executable, arguments, {**ALLOCATOR, **os.environ})


def _corpus(folder: Path) -> corpora.Corpus:
    return corpora.encode_corpus(
        corpora.stdlib_root(), corpora.read_manifest(), load_tokenizer(folder), WORK_DIR / "tokens.npz"
    )


@app.command()
def prepare() -> None:
    """List the standard library and learn the tokeniser."""
    config, root = TinyConfig(), corpora.stdlib_root()
    files = corpora.scan(root)
    corpora.write_manifest(files)
    texts = (corpora.read_text(root, f)[0] for f in files if f.role == "train")
    save_tokenizer(train_tokenizer(texts, config.vocab_size), CHECKPOINT_DIR, config.max_position_embeddings)
    (WORK_DIR / "tokens.npz").unlink(missing_ok=True)
    typer.echo(
        f"{len(files)} files, {sum(f.size for f in files)} bytes, {sum(f.role == 'held_out' for f in files)} held out"
    )


@app.command()
def train(
    threads: Threads = 2,
    save_every: Annotated[float, typer.Option(help="seconds between checkpoints")] = 120.0,
) -> None:
    """Train to the end of the plan, or go on from where an earlier call stopped (SIGTERM saves and stops)."""
    _settle()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    torch.set_num_threads(threads)
    text = _corpus(CHECKPOINT_DIR)
    trainer = Trainer(TinyConfig(), FULL_PLAN, text.train, token_bytes(load_tokenizer(CHECKPOINT_DIR)), threads)
    with Progress(*COLUMNS, refresh_per_second=1) as progress:
        task = progress.add_task("train", total=FULL_PLAN.steps)

        def show(report: StepReport) -> None:
            loss = "" if report.loss is None else f" {report.loss:.3f} nats {report.bits_per_byte:.3f} bits/byte"
            divergence = "" if report.divergence is None else f" KL {report.divergence:.3f}"
            text = f"{report.phase} {report.length}{loss}{divergence} {report.tokens_per_second:.0f} tokens/s"
            progress.update(task, completed=report.step, description=text)

        run(trainer, STATE, LOG, save_every=save_every, on_step=show, stopping=stop.is_set)
    write_checkpoint(trainer.network, CHECKPOINT_DIR)


@app.command()
def export() -> None:
    """Write the checkpoint folder from the state of the training so far."""
    network = TinyGlm(TinyConfig())
    state = torch.load(STATE, weights_only=True)
    network.load_state_dict(state["network"])
    size = write_checkpoint(network, CHECKPOINT_DIR)
    typer.echo(f"{size} bytes of tensors after {state['place'][2]} steps, {state['place'][3]} tokens")


@app.command("eval")
def evaluate_checkpoint(
    window: Annotated[int, typer.Option(help="tokens of a context")] = 8192,
    limit: Annotated[int, typer.Option(help="contexts to read at most")] = 1000,
    threads: Threads = 2,
) -> None:
    """Score the checkpoint on the held-out files, and on the prose file by itself; write both as JSON."""
    _settle()
    network, text = read_checkpoint(CHECKPOINT_DIR), _corpus(CHECKPOINT_DIR)
    bytes_of = token_bytes(load_tokenizer(CHECKPOINT_DIR))
    for file, tokens, most in ((EVALUATION_FILE, text.held_out, limit), (PROSE_FILE, text.prose, PROSE_WINDOWS)):
        with Progress(*COLUMNS, refresh_per_second=1) as progress:
            task = progress.add_task(file, total=2 * min(most, (len(tokens) - 1) // window))
            result = evaluate(
                network,
                tokens,
                bytes_of,
                window=window,
                limit=most,
                workers=threads,
                on_window=partial(progress.advance, task),
            )
        result.write(CHECKPOINT_DIR / file)
        typer.echo(f"{file}: {result.tokens} tokens, {result.bytes} bytes")
        for name, score in (("sparse", result.sparse), ("dense", result.dense)):
            typer.echo(f"  {name}: {score.bits_per_byte} bits/byte, {score.nats_per_token} nats/token")
            for bucket in score.by_position:
                typer.echo(f"    {bucket.start:5d}-{bucket.stop:<5d} {bucket.bits_per_byte}")


@app.command()
def sample(
    prompt: Annotated[str, typer.Argument(help="text to continue")] = "def binary_search(",
    tokens: Annotated[int, typer.Option(help="how many to add at most")] = 160,
    temperature: Annotated[float, typer.Option(help="0 for the likeliest")] = 0.7,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Continue a prompt."""
    torch.set_num_threads(1)
    network, tokenizer = read_checkpoint(CHECKPOINT_DIR), load_tokenizer(CHECKPOINT_DIR)
    typer.echo(continue_text(network, tokenizer, prompt, tokens=tokens, temperature=temperature, seed=seed))


@app.command()
def plot(folder: Annotated[Path, typer.Option(help="where the pictures go")] = Path("docs/images")) -> None:
    """Draw the training loss and the bits per byte by position."""
    folder.mkdir(parents=True, exist_ok=True)
    plot_training(LOG, folder / "glm53-tiny-training.png")
    plot_positions(read_evaluation(CHECKPOINT_DIR / EVALUATION_FILE), folder / "glm53-tiny-positions.png")
    typer.echo(f"wrote 2 pictures to {folder}")


if __name__ == "__main__":
    app()
