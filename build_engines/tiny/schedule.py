"""The training plan: which lengths, for how many steps, at which learning rates.

Three phases, because choosing the top-k passes no gradient to the indexer (the recipe of DeepSeek-V3.2, scaled down):
dense attention with lengths growing; the indexer alone; then the real sparse selection at long lengths.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Phase = Literal["dense", "indexer", "sparse"]

SEED = 20261130
PEAK_RATE = 4e-3
FINAL_SHARE = 0.06  # of the peak, at the end of the cosine
WARMUP_STEPS = 120
INDEXER_PEAK_RATE = 3e-3
INDEXER_SPARSE_RATE = 3e-4
INDEXER_WARMUP_STEPS = 10
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
CLIP_NORM = 1.0
BALANCE_RATE = 1e-3  # arXiv 2408.15664
SAMPLED_QUERIES = 128  # a sequence, in each indexer loss


@dataclass(frozen=True)
class Stage:
    """`steps` batches of `rows` sequences of `length` tokens."""

    phase: Phase
    length: int
    rows: int
    steps: int

    @property
    def tokens(self) -> int:
        """Tokens of one step."""
        return self.length * self.rows


@dataclass(frozen=True)
class Plan:
    """Stages in order."""

    stages: tuple[Stage, ...]
    warmup: int = WARMUP_STEPS

    @property
    def steps(self) -> int:
        """Steps in all."""
        return sum(stage.steps for stage in self.stages)

    @property
    def language_tokens(self) -> int:
        """Tokens the language-model loss sees (the indexer phase trains on none)."""
        return sum(s.tokens * s.steps for s in self.stages if s.phase != "indexer")

    def rate(self, step: int, seen: int) -> float:
        """Learning rate of the main weights: linear warm-up, then a cosine over language-model tokens `seen`."""
        if step < self.warmup:
            return PEAK_RATE * (step + 1) / self.warmup
        done = min(seen / self.language_tokens, 1.0)
        return PEAK_RATE * (FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * done)))

    def indexer_rate(self, stage: int, step: int) -> float:
        """Learning rate of the indexers at `step` of `stage`: a cosine over the indexer phase, then constant."""
        if self.stages[stage].phase == "sparse":
            return INDEXER_SPARSE_RATE
        total = sum(s.steps for s in self.stages if s.phase == "indexer")
        at = step + sum(s.steps for s in self.stages[:stage] if s.phase == "indexer")
        warm = min((at + 1) / INDEXER_WARMUP_STEPS, 1.0)
        floor = INDEXER_SPARSE_RATE / INDEXER_PEAK_RATE
        return INDEXER_PEAK_RATE * warm * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * at / total)))


FULL_PLAN = Plan(
    (
        Stage("dense", 256, 8, 1100),
        Stage("dense", 512, 4, 950),
        Stage("dense", 1024, 2, 350),
        Stage("dense", 2048, 2, 30),
        Stage("indexer", 1024, 2, 120),
        Stage("indexer", 4096, 2, 6),
        Stage("sparse", 2048, 2, 60),
        Stage("sparse", 4096, 2, 16),
        Stage("sparse", 8192, 2, 6),
        Stage("sparse", 4096, 2, 100),
        Stage("sparse", 8192, 2, 36),
    )
)
