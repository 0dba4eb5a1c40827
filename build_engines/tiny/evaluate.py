"""Held-out loss in bits per byte, by position in the context, with the sparse selection and without it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from .network import TinyGlm

EVALUATION_FILE = "evaluation.json"
PROSE_FILE = "evaluation-prose.json"
# Doubling while the context is short, then a thousand at a time.
BUCKETS = (0, 64, 128, 256, 512, 1024, 2048, 3072, 4096, 5120, 6144, 7168, 8192)


@dataclass(frozen=True)
class Bucket:
    """Loss on the tokens predicted from contexts of `start` + 1 to `stop` tokens."""

    start: int
    stop: int
    bits_per_byte: float


@dataclass(frozen=True)
class Score:
    """Loss of one way of attending; `bits_per_byte` is over all positions."""

    bits_per_byte: float
    nats_per_token: float
    by_position: tuple[Bucket, ...]


@dataclass(frozen=True)
class Evaluation:
    """What was read, and how well it was predicted."""

    window: int
    windows: int
    tokens: int
    bytes: int
    sparse: Score
    dense: Score

    def write(self, file: Path) -> None:
        """Record as JSON."""
        file.write_text(json.dumps(asdict(self), indent=1) + "\n")


def read_evaluation(file: Path) -> Evaluation:
    """Read what `write` recorded."""
    raw = json.loads(file.read_text())
    for kind in ("sparse", "dense"):
        buckets = tuple(Bucket(**bucket) for bucket in raw[kind]["by_position"])
        raw[kind] = Score(raw[kind]["bits_per_byte"], raw[kind]["nats_per_token"], buckets)
    return Evaluation(**raw)


@torch.no_grad()
def losses_of(network: TinyGlm, window: NDArray[np.int64], *, sparse: bool) -> NDArray[np.float64]:
    """Nats of every token of `window` (`[T + 1]`) but the first, `[T]`."""
    tokens = torch.from_numpy(window)[None]
    hidden = network(tokens[:, :-1], sparse=sparse).hidden
    return network.token_losses(hidden, tokens[:, 1:])[0].double().numpy()


def evaluate(
    network: TinyGlm,
    text: NDArray[np.uint16],
    bytes_of: NDArray[np.int64],
    *,
    window: int,
    limit: int,
    workers: int,
    on_window: Callable[[], None] = lambda: None,
) -> Evaluation:
    """Score up to `limit` windows of `window` tokens, evenly spread over `text`; several held-out files share a window.

    Raises:
        ValueError: if `text` does not fill one window.
    """
    fitting = (len(text) - 1) // window
    if fitting == 0:
        raise ValueError(f"{len(text)} tokens do not fill a window of {window}")
    chosen = np.linspace(0, fitting - 1, min(limit, fitting)).round().astype(int)
    pieces = [text[i * window : (i + 1) * window + 1].astype(np.int64) for i in chosen]
    sizes = np.stack([bytes_of[piece[1:]] for piece in pieces])

    def one(job: tuple[NDArray[np.int64], bool]) -> NDArray[np.float64]:
        losses = losses_of(network, job[0], sparse=job[1])
        on_window()
        return losses

    with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        sparse = np.stack(list(pool.map(one, [(piece, True) for piece in pieces])))
        dense = np.stack(list(pool.map(one, [(piece, False) for piece in pieces])))
    return Evaluation(
        window=window,
        windows=len(pieces),
        tokens=sizes.size,
        bytes=int(sizes.sum()),
        sparse=_score(sparse, sizes),
        dense=_score(dense, sizes),
    )


def _score(losses: NDArray[np.float64], sizes: NDArray[np.int64]) -> Score:
    """Both `[windows, T]`: nats and bytes of each token."""
    edges = [edge for edge in BUCKETS if edge < losses.shape[1]] + [losses.shape[1]]
    buckets = tuple(Bucket(a, b, _bits(losses[:, a:b], sizes[:, a:b])) for a, b in pairwise(edges))
    return Score(_bits(losses, sizes), round(float(losses.mean()), 4), buckets)


def _bits(losses: NDArray[np.float64], sizes: NDArray[np.int64]) -> float:
    return round(float(losses.sum()) / math.log(2) / float(sizes.sum()), 4)
