"""An engine that costs nothing: the same logits for every token, over the real hierarchy with its real copies."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from trt_backend.build import Deployment, Runtime
from trt_backend.config import DeploymentConfig
from trt_backend.engines.base import StepBatch, StepResult
from trt_backend.kv.hierarchy import Hierarchy
from trt_backend.kv.layout import KvLayout
from trt_backend.kv.tables import SlotTables
from trt_backend.memory.arena import RowStore
from trt_backend.memory.cpu import CpuTransfers
from trt_backend.scheduler import Scheduler, SchedulerLimits
from trt_backend.triton.text import Tokenizer

TEXT = "a"
"""What every step of every request says."""


class ConstantEngine:
    """Answers every step with the same token; touches no row."""

    def __init__(self, layout: KvLayout, tables: SlotTables, vocab_size: int, token: int) -> None:
        self.layout = layout
        self.tables = tables
        self.vocab_size = vocab_size
        slots = len(tables.tail_first)
        self._logits = np.zeros((slots, vocab_size), dtype=np.float32)
        self._logits[:, token] = 1
        self._counts = np.zeros((slots, 5), dtype=np.int64)
        for array in (self._logits, self._counts):
            array.setflags(write=False)

    def open_slot(self, slot: int) -> None:
        """Nothing is kept between steps."""

    def step(self, batch: StepBatch) -> StepResult:
        """Logits for whatever is wanted."""
        return StepResult(self._logits[: len(batch.logits_of)], self._counts[: batch.decodes])


def build_constant_runtime(config: DeploymentConfig, progress: Callable[[str], None] = lambda _: None) -> Runtime:
    """As `trt_backend.build.build_runtime`, with this engine in the place of the model's."""
    progress("allocating pages for an engine without a model")
    deployment = Deployment.of(config)
    layout, sizes, model = deployment.layout, deployment.sizes, deployment.model
    tables = SlotTables.empty(layout, sizes.slots, deployment.max_model_len)
    transfers = CpuTransfers(RowStore(layout, sizes.device_pages), RowStore(layout, sizes.host_pages))
    hierarchy = Hierarchy(layout, deployment.policy, tables, transfers, sizes)
    (token,) = Tokenizer.load(deployment.folder, model.vocab_size).encode(TEXT).tolist()
    engine = ConstantEngine(layout, tables, model.vocab_size, token)
    limits = SchedulerLimits(config.queue_limit, config.prefill_chunk_tokens, deployment.max_model_len)
    return Runtime(deployment, hierarchy, Scheduler(hierarchy, engine, limits), transfers.close)
