"""Configuration of the `glm_moe_dsa` family (GLM-5, GLM-5.2, GLM-5.3), read from a Hugging Face config.json.

Imports no torch, so that a layout can be worked out in an instant.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trt_backend.config import ConfigError, RowFormat, describe_faults
from trt_backend.kv.layout import IndexGroup, KvLayout, KvSource

MODEL_TYPE = "glm_moe_dsa"

FP8_TILE = 128
"""Latent channels that share one fp32 scale in an fp8 row (the 656-byte row of DeepSeek-V3.2's sparse MLA)."""

# What the reference class assumes when a key is absent (transformers, configuration_glm_moe_dsa.py). GLM-5.3 itself
# has freq 4 and offset 3.
DEFAULT_INDEX_TOPK_FREQ = 1
DEFAULT_INDEX_SKIP_TOPK_OFFSET = 2
DEFAULT_FIRST_K_DENSE = 3

# Keys that would change the computation, with the only value that is implemented. An absent key has that value.
_ONLY: dict[str, object] = {
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "moe_layer_freq": 1,
    "rope_interleave": True,
    "indexer_rope_interleave": True,
}

Positive = Annotated[int, Field(ge=1)]
Width = Annotated[int, Field(ge=2)]
"""A dimension of a matrix. One is refused: products with a single output are not batch-invariant (see `blocks`)."""


class GlmMoeDsaConfig(BaseModel):
    """The sizes that the model uses, under their Hugging Face names.

    Two per-layer lists are spelled out, whichever way the file gives them: `indexer_types` (a *full* layer runs the
    indexer, a *shared* layer takes the selection of the last full one) and `mlp_layer_types`. The file's `head_dim`
    is not read: GLM-5.3's says 192, which is no width of this attention.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    model_type: Literal["glm_moe_dsa"] = "glm_moe_dsa"
    vocab_size: Width
    hidden_size: Width
    intermediate_size: Width
    moe_intermediate_size: Width
    num_hidden_layers: Positive
    num_attention_heads: Positive
    q_lora_rank: Width
    kv_lora_rank: Width
    qk_nope_head_dim: Width
    qk_rope_head_dim: Annotated[int, Field(ge=2, multiple_of=2)]
    v_head_dim: Width
    n_routed_experts: Width
    num_experts_per_tok: Positive
    n_shared_experts: Positive = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    index_n_heads: Positive
    index_head_dim: Width
    index_topk: Positive
    max_position_embeddings: Positive
    rope_theta: Annotated[float, Field(gt=1, allow_inf_nan=False)]
    rms_norm_eps: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    tie_word_embeddings: bool = False
    end_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    indexer_types: tuple[Literal["full", "shared"], ...]
    mlp_layer_types: tuple[Literal["dense", "sparse"], ...]

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head: channels without position, then rotated ones."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def row_channels(self) -> int:
        """Numbers in a KV row: the latent, then the rotated key that all heads share."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Layers that run the indexer, in order."""
        return tuple(layer for layer, kind in enumerate(self.indexer_types) if kind == "full")

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Layers of each index group, its full layer first."""
        bounds = (*self.full_layers, self.num_hidden_layers)
        return tuple(tuple(range(first, end)) for first, end in pairwise(bounds))


def parse_glm_config(raw: object, origin: str) -> GlmMoeDsaConfig:
    """Read a Hugging Face configuration.

    Args:
        raw: the content of config.json.
        origin: where it came from, for messages.

    Raises:
        ConfigError: naming origin, key, value and what is legal.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{origin}: a configuration is a JSON object, not {type(raw).__name__}")
    if raw.get("model_type") != MODEL_TYPE:
        raise ConfigError(f"{origin}: model_type={raw.get('model_type')!r}; legal value: {MODEL_TYPE!r}")
    for key, only in _ONLY.items():
        if (value := raw.get(key, only)) != only:
            raise ConfigError(f"{origin}: {key}={value!r} is not supported; legal value: {only!r}")
    fields = dict(raw)
    fields["rope_theta"] = _rope_theta(raw, origin)
    fields["end_ids"] = _end_ids(raw, origin)
    layers = raw.get("num_hidden_layers")
    if isinstance(layers, int) and not isinstance(layers, bool) and layers >= 1:
        fields["indexer_types"] = _indexer_types(raw, layers, origin)
        fields["mlp_layer_types"] = _mlp_layer_types(raw, layers, origin)
    else:
        fields["indexer_types"] = fields["mlp_layer_types"] = ()  # pydantic reports num_hidden_layers itself
    try:
        config = GlmMoeDsaConfig.model_validate(fields)
    except ValidationError as error:
        raise ConfigError(describe_faults(error, origin)) from error
    _check_sizes(config, raw, origin)
    return config


def _rope_theta(raw: Mapping[str, Any], origin: str) -> object:
    """The base of the rotation, from `rope_parameters` or from the top level."""
    for key in ("rope_parameters", "rope_scaling"):
        table = raw.get(key)
        if table is None:
            continue
        if not isinstance(table, Mapping):
            raise ConfigError(f"{origin}: {key}={table!r} must be a JSON object")
        kind = table.get("rope_type", table.get("type", "default"))
        if kind != "default":
            raise ConfigError(f"{origin}: {key}.rope_type={kind!r} is not supported; legal value: 'default'")
        if "rope_theta" in table:
            return table["rope_theta"]
    if "rope_theta" not in raw:
        raise ConfigError(f"{origin}: rope_theta is missing, both at the top level and in rope_parameters")
    return raw["rope_theta"]


def _end_ids(raw: Mapping[str, Any], origin: str) -> tuple[int, ...]:
    """`eos_token_id` as a tuple: files give a number, a list or null."""
    ends = raw.get("eos_token_id")
    if ends is None:
        return ()
    ids = ends if isinstance(ends, list) else [ends]
    if any(not isinstance(end, int) or isinstance(end, bool) or end < 0 for end in ids):
        raise ConfigError(f"{origin}: eos_token_id={ends!r} must be a token id or a list of them")
    return tuple(ids)


def _indexer_types(raw: Mapping[str, Any], layers: int, origin: str) -> tuple[str, ...]:
    """Which layers run the indexer: a list, a pattern, or a schedule (IndexShare, arXiv 2603.12201)."""
    key = "indexer_types" if raw.get("indexer_types") is not None else "index_topk_pattern"
    given = raw.get(key)
    if given is not None:
        letters = {"F": "full", "S": "shared"}
        types = tuple(letters.get(kind, kind) for kind in given) if isinstance(given, (list, str)) else (given,)
        _check_layer_list(types, ("full", "shared"), layers, f"{origin}: {key}={given!r}")
    else:
        freq = raw.get("index_topk_freq", DEFAULT_INDEX_TOPK_FREQ)
        offset = raw.get("index_skip_topk_offset", DEFAULT_INDEX_SKIP_TOPK_OFFSET)
        if not isinstance(freq, int) or freq < 1:
            raise ConfigError(f"{origin}: index_topk_freq={freq!r} must be a whole number, 1 or more")
        if not isinstance(offset, int) or offset < 0:
            raise ConfigError(f"{origin}: index_skip_topk_offset={offset!r} must be a whole number, 0 or more")
        key = "index_skip_topk_offset"
        types = tuple("full" if max(layer - offset + 1, 0) % freq == 0 else "shared" for layer in range(layers))
    if types[0] != "full":
        raise ConfigError(f"{origin}: {key} makes layer 0 'shared', but there is no selection before it to share")
    return types


def _mlp_layer_types(raw: Mapping[str, Any], layers: int, origin: str) -> tuple[str, ...]:
    """Which layers have experts: a list, or the number of leading layers that have none."""
    given = raw.get("mlp_layer_types")
    if given is not None:
        types = tuple(given) if isinstance(given, list) else (given,)
        _check_layer_list(types, ("dense", "sparse"), layers, f"{origin}: mlp_layer_types={given!r}")
        return types
    dense = raw.get("first_k_dense_replace", DEFAULT_FIRST_K_DENSE)
    if not isinstance(dense, int) or dense < 0:
        raise ConfigError(f"{origin}: first_k_dense_replace={dense!r} must be a whole number, 0 or more")
    return tuple("dense" if layer < dense else "sparse" for layer in range(layers))


def _check_layer_list(types: tuple[object, ...], legal: tuple[str, str], layers: int, what: str) -> None:
    if len(types) != layers or any(kind not in legal for kind in types):
        raise ConfigError(f"{what} must have num_hidden_layers={layers} entries, each {legal[0]!r} or {legal[1]!r}")


def _check_sizes(config: GlmMoeDsaConfig, raw: Mapping[str, Any], origin: str) -> None:
    """Sizes that are legal alone but do not fit together."""
    if config.num_experts_per_tok > config.n_routed_experts:
        raise ConfigError(
            f"{origin}: num_experts_per_tok={config.num_experts_per_tok} must not exceed "
            f"n_routed_experts={config.n_routed_experts}"
        )
    if config.qk_rope_head_dim > config.index_head_dim:
        raise ConfigError(
            f"{origin}: qk_rope_head_dim={config.qk_rope_head_dim} must not exceed "
            f"index_head_dim={config.index_head_dim}: the indexer rotates that many of its channels"
        )
    if raw.get("num_key_value_heads", config.num_attention_heads) != config.num_attention_heads:
        raise ConfigError(
            f"{origin}: num_key_value_heads={raw['num_key_value_heads']!r} must equal "
            f"num_attention_heads={config.num_attention_heads}: every head has its own projection of the latent"
        )
    if raw.get("qk_head_dim", config.qk_head_dim) != config.qk_head_dim:
        raise ConfigError(
            f"{origin}: qk_head_dim={raw['qk_head_dim']!r} must be qk_nope_head_dim + qk_rope_head_dim = "
            f"{config.qk_head_dim}"
        )


def row_bytes(config: GlmMoeDsaConfig, row_format: RowFormat) -> int:
    """Bytes of one KV row: 656 for GLM-5.3 in fp8.

    Raises:
        ConfigError: fp8 with a latent that is not a whole number of tiles.
    """
    rank, rope = config.kv_lora_rank, config.qk_rope_head_dim
    if row_format is RowFormat.FP32:
        return 4 * (rank + rope)
    if row_format is RowFormat.BF16:
        return 2 * (rank + rope)
    if rank % FP8_TILE:
        raise ConfigError(
            f"row_format='fp8' needs kv_lora_rank to be a multiple of {FP8_TILE}; this model has {rank} "
            f"(legal row formats: 'fp32', 'bf16')"
        )
    return rank + 4 * (rank // FP8_TILE) + 2 * rope


def key_bytes(config: GlmMoeDsaConfig, row_format: RowFormat) -> int:
    """Bytes of one index key: 132 for GLM-5.3 in fp8 (128 channels and one fp32 scale)."""
    return {
        RowFormat.FP32: 4 * config.index_head_dim,
        RowFormat.BF16: 2 * config.index_head_dim,
        RowFormat.FP8: config.index_head_dim + 4,
    }[row_format]


def kv_layout(config: GlmMoeDsaConfig, row_format: RowFormat, page_tokens: int, hot_tokens: int) -> KvLayout:
    """One source a layer, one index group a full layer.

    Raises:
        ConfigError: the row format does not fit the model.
        ValueError: `page_tokens` or `hot_tokens` is not legal (see `KvLayout`).
    """
    row = row_bytes(config, row_format)
    key = key_bytes(config, row_format)
    return KvLayout(
        sources=tuple(KvSource(name=f"layer.{layer}", row_bytes=row) for layer in range(config.num_hidden_layers)),
        groups=tuple(IndexGroup(sources=layers, top_k=config.index_topk, key_bytes=key) for layers in config.groups),
        page_tokens=page_tokens,
        hot_tokens=hot_tokens,
    )
