"""The shape of `glm53-tiny`, and its `config.json` with the keys of the published GLM-5.3 configuration."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

CHECKPOINT_DIR = Path(__file__).parent / "glm53-tiny"
WORK_DIR = Path(__file__).parent / ".work"

# q_a_layernorm and kv_a_layernorm keep the class default of the reference implementation, and so does the indexer's
# k_norm; every other norm takes rms_norm_eps (transformers, modeling_glm_moe_dsa.py).
LATENT_NORM_EPS = 1e-6
INDEX_NORM_EPS = 1e-6


@dataclass(frozen=True)
class TinyConfig:
    """Sizes of the model; names are those of the Hugging Face configuration.

    Raises:
        ValueError: if the sizes do not fit together.
    """

    vocab_size: int = 2048
    hidden_size: int = 192
    intermediate_size: int = 384
    moe_intermediate_size: int = 48
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    q_lora_rank: int = 96
    kv_lora_rank: int = 128
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 48
    n_routed_experts: int = 8
    num_experts_per_tok: int = 2
    n_shared_experts: int = 1
    first_k_dense_replace: int = 1
    routed_scaling_factor: float = 2.5
    index_n_heads: int = 4
    index_head_dim: int = 32
    index_topk: int = 64
    index_topk_freq: int = 4
    index_skip_topk_offset: int = 3
    max_position_embeddings: int = 8192
    rope_theta: float = 8_000_000.0
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.04
    bos_token_id: int = 0
    eos_token_id: int = 0
    pad_token_id: int = 1

    def __post_init__(self) -> None:
        if self.kv_lora_rank % 128:
            raise ValueError(
                f"kv_lora_rank={self.kv_lora_rank} is not a multiple of 128, the tile of the fp8 cache row"
            )
        if self.qk_head_dim != self.v_head_dim:
            raise ValueError(
                f"qk_head_dim={self.qk_head_dim} differs from v_head_dim={self.v_head_dim}; fused attention needs one"
            )
        if self.num_experts_per_tok > self.n_routed_experts:
            raise ValueError(f"top-{self.num_experts_per_tok} of {self.n_routed_experts} experts")
        if self.qk_rope_head_dim > self.index_head_dim:
            raise ValueError(
                f"qk_rope_head_dim={self.qk_rope_head_dim} does not fit index_head_dim={self.index_head_dim}"
            )

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head: the unrotated channels, then the rotated ones."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def is_full(self, layer: int) -> bool:
        """Whether `layer` runs its own indexer (IndexShare, arXiv 2603.12201)."""
        return max(layer - self.index_skip_topk_offset + 1, 0) % self.index_topk_freq == 0

    def leader(self, layer: int) -> int:
        """The full layer whose selection `layer` reads."""
        return next(i for i in range(layer, -1, -1) if self.is_full(i))

    def is_dense_mlp(self, layer: int) -> bool:
        """Whether `layer` has a plain feed-forward block and no experts."""
        return layer < self.first_k_dense_replace

    def to_hf(self) -> dict[str, Any]:
        """The content of `config.json`."""
        own = asdict(self)
        theta = own.pop("rope_theta")
        return {
            "architectures": ["GlmMoeDsaForCausalLM"],
            "model_type": "glm_moe_dsa",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "dtype": "bfloat16",
            "hidden_act": "silu",
            "indexer_rope_interleave": True,
            "indexer_types": ["full" if self.is_full(i) else "shared" for i in range(self.num_hidden_layers)],
            "moe_layer_freq": 1,
            "moe_router_dtype": "float32",
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "num_key_value_heads": self.num_attention_heads,
            "num_nextn_predict_layers": 0,
            "qk_head_dim": self.qk_head_dim,
            "rope_interleave": True,
            "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
            "scoring_func": "sigmoid",
            "tie_word_embeddings": False,
            "topk_method": "noaux_tc",
            "use_cache": True,
            **own,
        }

    @classmethod
    def from_hf(cls, path: Path) -> TinyConfig:
        """Read the sizes back from a `config.json`."""
        raw: dict[str, Any] = json.loads(path.read_text())
        names = {f.name for f in fields(cls)}
        own = {key: value for key, value in raw.items() if key in names}
        return cls(rope_theta=float(raw["rope_parameters"]["rope_theta"]), **own)
