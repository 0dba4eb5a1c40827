"""Putting a server's parts together: from a validated deployment to a scheduler that is ready to start."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trt_backend.config import ConfigError, DeploymentConfig, Residency
from trt_backend.kv.hierarchy import Hierarchy, PoolSizes
from trt_backend.kv.layout import KvLayout
from trt_backend.kv.residency import POLICIES, Need, ResidencyPolicy, ResidencyTuning, need_of
from trt_backend.kv.tables import SlotTables
from trt_backend.models.registry import kv_layout, read_config
from trt_backend.models.state import ModelConfig
from trt_backend.scheduler import Scheduler, SchedulerLimits

SHIPPED_MODELS = Path(__file__).parent.parent / "build_engines" / "tiny"
"""Where the checkpoints that come with the project lie, one folder a model."""

UNBOUNDED = 1 << 40
"""More pages than any prompt needs: so that nothing is imported through a window."""


@dataclass(frozen=True, slots=True)
class Deployment:
    """A deployment with every default worked out: what will be allocated, before anything is.

    Raises:
        ConfigError: from `of`, when a setting can't be used with this model.
    """

    config: DeploymentConfig
    folder: Path
    model: ModelConfig
    layout: KvLayout
    policy: ResidencyPolicy
    sizes: PoolSizes
    tuning: ResidencyTuning
    max_model_len: int

    @classmethod
    def of(cls, config: DeploymentConfig) -> Deployment:
        """Work out the sizes of a deployment from its settings and its model's configuration."""
        folder = find_model(config.model)
        model = read_config(folder)
        max_model_len = _within(
            "max_model_len", config.max_model_len or model.max_position_embeddings, 2, model.max_position_embeddings
        )
        layout = _layout(config, model)
        policy = POLICIES[config.residency]
        sizes = _sizes(config, layout, policy, max_model_len)
        tuning = _tuning(config, layout, policy, sizes)
        return cls(config, folder, model, layout, policy, sizes, tuning, max_model_len)


@dataclass(frozen=True, slots=True)
class Runtime:
    """A scheduler over a loaded model, not started yet. `close` comes after the scheduler's stop."""

    deployment: Deployment
    hierarchy: Hierarchy
    scheduler: Scheduler
    close: Callable[[], None]


def find_model(name: str) -> Path:
    """The checkpoint folder of a shipped model's name, or of a path.

    Raises:
        ConfigError: there is no such folder.
    """
    for folder in (Path(name), SHIPPED_MODELS / name):
        if folder.is_dir():
            return folder
    shipped = sorted(path.parent.name for path in SHIPPED_MODELS.glob("*/config.json"))
    raise ConfigError(f"model={name!r} is neither a folder nor a shipped model; shipped: {', '.join(shipped)}")


def build_runtime(config: DeploymentConfig, progress: Callable[[str], None] = lambda _: None) -> Runtime:
    """Load the model and allocate everything. `progress` is told what is being done, in a few words.

    Raises:
        ConfigError: a setting, or the checkpoint, can't be used.
    """
    deployment = Deployment.of(config)
    progress("importing torch")
    # These import torch, which takes seconds; everything above is checked without it.
    from plugins.host import HotState
    from trt_backend.engines.torch_engine import DeviceMemory, TorchEngine
    from trt_backend.memory.arena import IndexKeyStore, RowStore
    from trt_backend.memory.cpu import CpuTransfers, keep_freed_memory
    from trt_backend.models.registry import load_model

    keep_freed_memory()
    progress(f"loading {deployment.folder.name}")
    model = load_model(deployment.folder, config.row_format)
    layout, sizes = deployment.layout, deployment.sizes
    progress(f"allocating {sizes.device_pages} device pages and {sizes.host_pages} host pages")
    tables = SlotTables.empty(layout, sizes.slots, deployment.max_model_len)
    arenas = RowStore(layout, sizes.device_pages)
    pool = RowStore(layout, sizes.host_pages)
    transfers = CpuTransfers(arenas, pool)
    hierarchy = Hierarchy(layout, deployment.policy, tables, transfers, sizes, deployment.tuning)
    hot = HotState.empty(len(layout.groups), sizes.slots, layout.hot_tokens)
    memory = DeviceMemory(arenas, pool, IndexKeyStore(layout, sizes.index_pages), hot)
    threads = config.threads or len(os.sched_getaffinity(0))
    engine = TorchEngine(model, layout, config.row_format, tables, memory, threads)
    limits = SchedulerLimits(
        config.queue_limit, config.prefill_chunk_tokens, deployment.max_model_len, config.transfer_timeout_seconds
    )
    return Runtime(deployment, hierarchy, Scheduler(hierarchy, engine, limits), transfers.close)


def _layout(config: DeploymentConfig, model: ModelConfig) -> KvLayout:
    """B is twice the model's K unless it is given; a resident deployment has no hot cache."""
    if config.residency is Residency.RESIDENT:
        return kv_layout(model, config.row_format, config.page_tokens, 0)
    hot_tokens = config.hot_tokens
    if hot_tokens is None:
        bare = kv_layout(model, config.row_format, config.page_tokens, 0)
        hot_tokens = bare.pages_for(2 * bare.top_k) * bare.page_tokens
    try:
        return kv_layout(model, config.row_format, config.page_tokens, hot_tokens)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _sizes(config: DeploymentConfig, layout: KvLayout, policy: ResidencyPolicy, max_model_len: int) -> PoolSizes:
    """Pools for `max_sessions` sessions: their longest need, the imports of a non-resident deployment one by one."""
    chunk = config.prefill_chunk_tokens

    def need(prompt_tokens: int, max_length: int) -> Need:
        return need_of(layout, policy, prompt_tokens, max_length, UNBOUNDED, chunk)

    longest = need(max_model_len - 1, max_model_len)
    slots = config.max_sessions
    if policy.uses_host:
        device_pages = slots * (layout.hot_pages + need(1, max_model_len).tail) + longest.history
    else:
        device_pages = slots * longest.device
    sizes = PoolSizes(
        slots=slots,
        device_pages=config.device_pages or device_pages,
        host_pages=(config.host_pages or slots * longest.host) if policy.uses_host else 0,
        index_pages=slots * layout.pages_for(max_model_len),
        chunk_tokens=chunk,
    )
    smallest = need(1, 2)
    _within("device_pages", sizes.device_pages, smallest.device, None)
    _within("host_pages", sizes.host_pages, smallest.host, None)
    return sizes


def _tuning(config: DeploymentConfig, layout: KvLayout, policy: ResidencyPolicy, sizes: PoolSizes) -> ResidencyTuning:
    """The reserve is what a session of one page takes, at most a tenth of the pool; the hysteresis a fiftieth of it."""
    pages = sizes.device_pages
    smallest = need_of(layout, policy, layout.page_tokens, 2 * layout.page_tokens, UNBOUNDED, sizes.chunk_tokens)
    reserve = min(smallest.device, pages // 10) if config.reserve_pages is None else config.reserve_pages
    hysteresis = pages // 50 if config.refill_hysteresis_pages is None else config.refill_hysteresis_pages
    return ResidencyTuning(
        reclaim_order=config.reclaim_order,
        reserve_pages=_within("reserve_pages", reserve, 0, pages),
        hysteresis_pages=_within("refill_hysteresis_pages", hysteresis, 0, pages),
        refill_pages_per_tick=config.refill_pages_per_tick,
        backup_pages_per_tick=config.backup_pages_per_tick,
        promote_decode_pages=config.promote_decode_pages,
    )


def _within(key: str, value: int, low: int, high: int | None) -> int:
    if value < low or (high is not None and value > high):
        legal = f"{low} and up" if high is None else f"{low} to {high}"
        raise ConfigError(f"{key}={value} is not legal for this model and residency; legal range: {legal}")
    return value
