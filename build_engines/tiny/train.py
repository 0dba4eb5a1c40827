"""Training: one step at a time, from a checkpoint that says where it is, so that a stop costs a few minutes at most."""

from __future__ import annotations

import csv
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .config import TinyConfig
from .network import TinyGlm
from .schedule import BALANCE_RATE, BETAS, CLIP_NORM, SAMPLED_QUERIES, SEED, WEIGHT_DECAY, Plan, Stage


@dataclass(frozen=True)
class StepReport:
    """One line of the training log.

    Attributes:
        loss: nats per token; absent in the indexer phase.
        bits_per_byte: the same loss over the bytes its targets stand for.
        divergence: of the indexers, nats; absent in the dense phase.
        rate: learning rate of the weights that moved.
    """

    step: int
    phase: str
    length: int
    seen: int
    loss: float | None
    bits_per_byte: float | None
    divergence: float | None
    rate: float
    tokens_per_second: float


def batch_of(tokens: NDArray[np.uint16], stage: Stage, number: int, step: int) -> Tensor:
    """The batch at `step` of stage `number`, `[rows, length + 1]`; a function of its arguments alone.

    The text is cut into windows of the stage's length, dealt in an order drawn once an epoch.

    Raises:
        ValueError: if the text holds fewer windows than a batch needs.
    """
    windows = (len(tokens) - 1) // stage.length
    if windows < stage.rows:
        raise ValueError(f"{len(tokens)} tokens hold {windows} windows of {stage.length}; a batch needs {stage.rows}")
    rows = []
    for ticket in range(step * stage.rows, (step + 1) * stage.rows):
        epoch, place = divmod(ticket, windows)
        order = np.random.default_rng((SEED, number, epoch)).permutation(windows)
        start = int(order[place]) * stage.length
        rows.append(tokens[start : start + stage.length + 1].astype(np.int64))
    return torch.from_numpy(np.stack(rows))


@dataclass(frozen=True)
class _Share:
    """What one worker found for its rows: gradients by parameter, mean losses, expert loads by layer."""

    gradients: tuple[Tensor, ...]
    loss: float
    divergence: float
    loads: dict[int, Tensor]


class Trainer:
    """The network, its two optimisers and its place in the plan.

    A batch is cut by rows among `workers` threads of one core each. They meet once a step, where a parallel region of
    OpenMP would meet in every operation and stall whenever another process takes a core.
    """

    def __init__(
        self,
        config: TinyConfig,
        plan: Plan,
        tokens: NDArray[np.uint16],
        bytes_of: NDArray[np.int64],
        workers: int = 2,
    ) -> None:
        torch.manual_seed(SEED)
        self.network = TinyGlm(config)
        self.plan, self.tokens = plan, tokens
        self.bytes_of = torch.from_numpy(bytes_of)
        named = list(self.network.named_parameters())
        self.main = [p for name, p in named if ".indexer." not in name]
        self.index = [p for name, p in named if ".indexer." in name]
        self.optimizer = _adamw(self.main)
        self.index_optimizer = _adamw(self.index)
        self.stage, self.step, self.total, self.seen = 0, 0, 0, 0
        self.workers = workers
        self.pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))

    def save(self, path: Path) -> None:
        """Write everything a resumed run needs; the file appears whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        state = {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "index_optimizer": self.index_optimizer.state_dict(),
            "place": (self.stage, self.step, self.total, self.seen),
        }
        torch.save(state, partial)
        os.replace(partial, path)

    def load(self, path: Path) -> None:
        """Continue from `save`'s file."""
        state = torch.load(path, weights_only=True)
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.index_optimizer.load_state_dict(state["index_optimizer"])
        self.stage, self.step, self.total, self.seen = state["place"]

    def advance(self) -> StepReport | None:
        """Take the next step of the plan, or say that none is left."""
        while self.stage < len(self.plan.stages) and self.step >= self.plan.stages[self.stage].steps:
            self.stage, self.step = self.stage + 1, 0
        if self.stage == len(self.plan.stages):
            return None
        stage = self.plan.stages[self.stage]
        began = time.perf_counter()
        loss: float | None = None
        divergence: float | None = None
        batch = batch_of(self.tokens, stage, self.stage, self.step)
        inputs, targets = batch[:, :-1], batch[:, 1:]
        if stage.phase == "indexer":
            rate = self._index_rate()
            divergence = self._indexer_step(inputs)
        else:
            rate = self.plan.rate(self.total, self.seen)
            loss, divergence = self._language_step(inputs, targets, rate, sparse=stage.phase == "sparse")
            self.seen += stage.tokens
        self.step += 1
        self.total += 1
        nats_to_bits = targets.numel() / math.log(2) / int(self.bytes_of[targets].sum())
        return StepReport(
            step=self.total,
            phase=stage.phase,
            length=stage.length,
            seen=self.seen,
            loss=loss,
            bits_per_byte=None if loss is None else loss * nats_to_bits,
            divergence=divergence,
            rate=rate,
            tokens_per_second=stage.tokens / (time.perf_counter() - began),
        )

    def _index_rate(self) -> float:
        return self.plan.indexer_rate(self.stage, self.step)

    def _sample_queries(self, length: int) -> Tensor:
        """Sorted positions for this step's indexer loss, a function of the place in the plan alone."""
        draw = np.random.default_rng((SEED, self.stage, 0, self.step))
        sample = draw.choice(length, size=min(SAMPLED_QUERIES, length), replace=False)
        return torch.from_numpy(np.sort(sample))

    def _language_step(
        self, inputs: Tensor, targets: Tensor, rate: float, *, sparse: bool
    ) -> tuple[float, float | None]:
        """Move the main weights; in a sparse step the indexers too, each by its own loss."""

        queries = self._sample_queries(inputs.shape[1]) if sparse else None

        def work(rows: slice) -> _Share:
            result = self.network(inputs[rows], sparse=sparse, queries=queries)
            loss = self.network.token_losses(result.hidden, targets[rows]).mean()
            divergence = self.network.indexer_loss(result) if sparse else torch.zeros(())
            moved = [*self.main, *self.index] if sparse else self.main
            gradients = torch.autograd.grad(loss + divergence, moved)
            return _Share(gradients, loss.item(), divergence.item(), result.loads)

        loss, divergence, loads = self._gather(work, len(inputs), [*self.main, *self.index] if sparse else self.main)
        _move(self.optimizer, self.main, rate)
        if sparse:
            _move(self.index_optimizer, self.index, self._index_rate())
        self.network.balance(loads, BALANCE_RATE)
        return loss, divergence if sparse else None

    def _indexer_step(self, inputs: Tensor) -> float:
        """Move the indexers towards the dense attention of a sample of queries; everything else stays."""
        queries = self._sample_queries(inputs.shape[1])

        def work(rows: slice) -> _Share:
            with torch.no_grad():
                result = self.network(inputs[rows], sparse=False, queries=queries)
            divergence = self.network.indexer_loss(result)
            return _Share(torch.autograd.grad(divergence, self.index), 0.0, divergence.item(), result.loads)

        _, divergence, _ = self._gather(work, len(inputs), self.index)
        _move(self.index_optimizer, self.index, self._index_rate())
        return divergence

    def _gather(
        self, work: Callable[[slice], _Share], rows: int, moved: list[torch.nn.Parameter]
    ) -> tuple[float, float, dict[int, Tensor]]:
        """Run `work` over the batch's rows in parallel and leave mean gradients in `moved`.

        Returns:
            The mean losses, and the summed expert loads by layer.
        """
        size = -(-rows // self.workers)
        parts = [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
        shares = list(self.pool.map(work, parts))
        weights = [(part.stop - part.start) / rows for part in parts]
        for i, parameter in enumerate(moved):
            parameter.grad = sum_weighted([share.gradients[i] for share in shares], weights)
        loss = sum(weight * share.loss for weight, share in zip(weights, shares, strict=True))
        divergence = sum(weight * share.divergence for weight, share in zip(weights, shares, strict=True))
        loads = {i: torch.stack([share.loads[i] for share in shares]).sum(0) for i in shares[0].loads}
        return loss, divergence, loads


def sum_weighted(tensors: list[Tensor], weights: list[float]) -> Tensor:
    """`sum_i weights[i] * tensors[i]`, in a fixed order so that a resumed run repeats it."""
    total = tensors[0] * weights[0]
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        total.add_(tensor, alpha=weight)
    return total


def _adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.AdamW:
    """Weight decay on matrices only."""
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=BETAS, fused=True)


def _move(optimizer: torch.optim.AdamW, parameters: list[torch.nn.Parameter], rate: float) -> None:
    """Clip, step and clear the gradients."""
    torch.nn.utils.clip_grad_norm_(parameters, CLIP_NORM)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def run(
    trainer: Trainer,
    checkpoint: Path,
    log: Path,
    *,
    save_every: float,
    on_step: Callable[[StepReport], None],
    stopping: Callable[[], bool] = lambda: False,
) -> None:
    """Train to the end of the plan, appending to `log` and saving every `save_every` seconds.

    Continues from `checkpoint` if there is one; lines of the log past its step are dropped. Ends early, saved, after
    the step at which `stopping` turns true.
    """
    if checkpoint.exists():
        trainer.load(checkpoint)
    _truncate(log, trainer.total)
    saved = time.monotonic()
    with log.open("a", newline="") as stream:
        writer = csv.writer(stream)
        while not stopping() and (report := trainer.advance()) is not None:
            writer.writerow(_cell(value) for value in asdict(report).values())
            stream.flush()
            on_step(report)
            if time.monotonic() - saved > save_every:
                trainer.save(checkpoint)
                saved = time.monotonic()
    trainer.save(checkpoint)


def _cell(value: object) -> object:
    """Floats with six digits, nothing for what is absent."""
    return "" if value is None else f"{value:.6g}" if isinstance(value, float) else value


def _truncate(log: Path, steps: int) -> None:
    """Keep the header and the first `steps` lines of the log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    header = ",".join(StepReport.__dataclass_fields__) + "\n"
    log.write_text("".join([header, *lines[1 : steps + 1]]))
