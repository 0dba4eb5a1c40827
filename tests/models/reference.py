"""The reference implementation of `glm_moe_dsa` (transformers) with random weights, and how we compare with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GlmMoeDsaConfig as ReferenceConfig
from transformers import GlmMoeDsaForCausalLM as Reference

from tests.models.dense_state import DenseState
from trt_backend.config import RowFormat
from trt_backend.models.glm_moe_dsa import GlmMoeDsa
from trt_backend.models.registry import kv_layout, load_model
from trt_backend.models.rows import KeyCodec

# 16 index heads: with fewer, many keys have no positive head at all and tie at a score of exactly zero.
SMALL: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "q_lora_rank": 48,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "index_topk": 32,
    "index_head_dim": 16,
    "index_n_heads": 16,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "rms_norm_eps": 1e-5,
}


def random_reference(folder: Path, seed: int = 0, **changes: Any) -> Reference:
    """A reference model whose weights spread scores widely, saved in `folder` as a checkpoint."""
    torch.manual_seed(seed)
    reference = Reference(ReferenceConfig(**(SMALL | changes), attn_implementation="eager")).eval()
    with torch.no_grad():
        for name, weight in reference.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, weight.shape[-1] ** -0.5)
            elif name.endswith("bias"):
                weight.normal_(0, 0.1)
            else:
                weight.add_(torch.randn_like(weight) * 0.1)
        for name, buffer in reference.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0, 0.1)
    reference.save_pretrained(folder)
    return reference


def random_tokens(count: int, vocabulary: int = 256, seed: int = 1) -> torch.Tensor:
    """int64 [count]."""
    return torch.randint(0, vocabulary, (count,), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def reference_run(
    reference: Reference, tokens: torch.Tensor, positions: torch.Tensor | None = None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits float32 [T, vocabulary] of one full forward, and for each full layer what it chose, bool [T, T]."""
    chosen: list[torch.Tensor] = []
    visible = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()

    def keep(_module: object, _inputs: object, output: torch.Tensor) -> None:
        chosen.append(torch.zeros_like(visible).scatter_(1, output[0].long(), True) & visible)

    hooks = [
        layer.self_attn.indexer.register_forward_hook(keep)
        for layer in reference.model.layers
        if layer.self_attn.indexer is not None
    ]
    logits = reference(tokens[None], position_ids=None if positions is None else positions[None]).logits[0]
    for hook in hooks:
        hook.remove()
    return logits, chosen


def load(folder: Path, row_format: RowFormat = RowFormat.FP32) -> GlmMoeDsa:
    """The same checkpoint in our implementation."""
    model = load_model(folder, row_format)
    assert isinstance(model, GlmMoeDsa)
    return model


@dataclass(frozen=True, slots=True)
class Run:
    """What one run of a whole session left behind. `logits` is float32 [T, vocabulary]."""

    logits: torch.Tensor
    state: DenseState


def run(
    model: GlmMoeDsa,
    tokens: torch.Tensor,
    *,
    chunk: int | None = None,
    row_format: RowFormat = RowFormat.FP32,
    forced: list[torch.Tensor] | None = None,
    first_position: int = 0,
) -> Run:
    """Run a session in chunks, with logits of every token. `forced` are selections as `reference_run` gives them."""
    layout = kv_layout(model.config, row_format, page_tokens=64, hot_tokens=0)
    codec = KeyCodec(row_format, model.config.index_head_dim)
    state = DenseState(layout, codec, len(tokens), None if forced is None else dict(enumerate(forced)))
    logits = []
    for part in torch.split(tokens, chunk or len(tokens)):
        positions = state.begin(len(part)) + first_position
        logits.append(model.forward(part, positions, state, torch.arange(len(part))))
    return Run(torch.cat(logits), state)
