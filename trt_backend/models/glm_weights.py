"""From the tensors of a `glm_moe_dsa` checkpoint, under their Hugging Face names, to the weights of our layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trt_backend.config import RowFormat
from trt_backend.models.blocks import Mlp, halves_first
from trt_backend.models.checkpoint import Checkpoint
from trt_backend.models.experts import MoE, Router
from trt_backend.models.glm_config import GlmMoeDsaConfig
from trt_backend.models.glm_layers import Attention, Indexer, Layer
from trt_backend.models.rows import KeyCodec, RowCodec


@dataclass(frozen=True, slots=True)
class GlmWeights:
    """Reads the weights of one checkpoint. Every tensor is checked against the shape that `config` gives it.

    Matrices come out input first, as `blocks.linear` takes them.
    """

    checkpoint: Checkpoint
    config: GlmMoeDsaConfig
    row_format: RowFormat

    def embedding(self) -> torch.Tensor:
        """float32 [vocabulary, hidden]."""
        return self._table("model.embed_tokens", self.config.vocab_size, self.config.hidden_size)

    def final_norm(self) -> torch.Tensor:
        """float32 [hidden]."""
        return self._vector("model.norm", self.config.hidden_size)

    def head(self, embedding: torch.Tensor) -> torch.Tensor:
        """float32 [hidden, vocabulary]: a matrix of its own, or the embedding where they are tied."""
        if self.config.tie_word_embeddings:
            return embedding.t()
        return self._matrix("lm_head", self.config.vocab_size, self.config.hidden_size)

    def layer(self, number: int) -> Layer:
        """All weights of one layer."""
        config, name = self.config, f"model.layers.{number}"
        return Layer(
            eps=config.rms_norm_eps,
            attention_norm=self._vector(f"{name}.input_layernorm", config.hidden_size),
            attention=self._attention(f"{name}.self_attn", number),
            mlp_norm=self._vector(f"{name}.post_attention_layernorm", config.hidden_size),
            mlp=self._moe(f"{name}.mlp")
            if config.mlp_layer_types[number] == "sparse"
            else self._mlp(f"{name}.mlp", config.intermediate_size),
        )

    def _attention(self, name: str, layer: int) -> Attention:
        config = self.config
        heads, hidden, rank, rope = (
            config.num_attention_heads,
            config.hidden_size,
            config.kv_lora_rank,
            config.qk_rope_head_dim,
        )
        query = (
            self._table(f"{name}.q_b_proj", heads * config.qk_head_dim, config.q_lora_rank) * config.qk_head_dim**-0.5
        )
        inputs = [
            self._table(f"{name}.q_a_proj", config.q_lora_rank, hidden),
            halves_first(self._table(f"{name}.kv_a_proj_with_mqa", rank + rope, hidden), rope),
        ]
        queries = [halves_first(query.view(heads, -1, config.q_lora_rank), rope).flatten(0, 1)]
        indexer = None
        if config.indexer_types[layer] == "full":
            dim, index_heads = config.index_head_dim, config.index_n_heads
            index_query = self._table(f"{name}.indexer.wq_b", index_heads * dim, config.q_lora_rank)
            inputs.append(_rotated_last(self._table(f"{name}.indexer.wk", dim, hidden), rope))
            weigh = self._table(f"{name}.indexer.weights_proj", index_heads, hidden)
            inputs.append(weigh * (index_heads * dim) ** -0.5)
            queries.append(_rotated_last(index_query.view(index_heads, dim, -1), rope).flatten(0, 1))
            norm_bias = self.checkpoint.tensor(f"{name}.indexer.k_norm.bias", (dim,))
            indexer = Indexer(
                group=config.full_layers.index(layer),
                heads=index_heads,
                norm_weight=_rotated_last(self._vector(f"{name}.indexer.k_norm", dim).unsqueeze(1), rope).squeeze(1),
                norm_bias=_rotated_last(norm_bias.unsqueeze(1), rope).squeeze(1),
                codec=KeyCodec(self.row_format, dim),
            )
        expand = self._table(f"{name}.kv_b_proj", heads * (config.qk_nope_head_dim + config.v_head_dim), rank)
        keys, values = expand.view(heads, -1, rank).tensor_split([config.qk_nope_head_dim], dim=1)
        return Attention(
            source=layer,
            heads=heads,
            nope=config.qk_nope_head_dim,
            codec=RowCodec(self.row_format, rank, rope),
            q_norm=self._vector(f"{name}.q_a_layernorm", config.q_lora_rank),
            kv_norm=self._vector(f"{name}.kv_a_layernorm", rank),
            input_proj=torch.cat(inputs).t().contiguous(),
            query_proj=torch.cat(queries).t().contiguous(),
            to_latent=keys.contiguous(),
            from_latent=values.transpose(1, 2).contiguous(),
            output_proj=self._matrix(f"{name}.o_proj", hidden, heads * config.v_head_dim),
            indexer=indexer,
        )

    def _mlp(self, name: str, width: int) -> Mlp:
        hidden = self.config.hidden_size
        gate_up = [self._matrix(f"{name}.gate_proj", width, hidden), self._matrix(f"{name}.up_proj", width, hidden)]
        return Mlp(torch.cat(gate_up, dim=1), self._matrix(f"{name}.down_proj", hidden, width))

    def _moe(self, name: str) -> MoE:
        config = self.config
        width = config.moe_intermediate_size
        router = Router(
            weight=self._matrix(f"{name}.gate", config.n_routed_experts, config.hidden_size),
            bias=self.checkpoint.tensor(f"{name}.gate.e_score_correction_bias", (config.n_routed_experts,)),
            top_k=config.num_experts_per_tok,
            normalise=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
        )
        return MoE.of(
            router=router,
            experts=[self._mlp(f"{name}.experts.{expert}", width) for expert in range(config.n_routed_experts)],
            shared=self._mlp(f"{name}.shared_experts", width * config.n_shared_experts),
        )

    def _table(self, name: str, rows: int, columns: int) -> torch.Tensor:
        return self.checkpoint.tensor(f"{name}.weight", (rows, columns))

    def _matrix(self, name: str, outputs: int, inputs: int) -> torch.Tensor:
        return self._table(name, outputs, inputs).t().contiguous()

    def _vector(self, name: str, size: int) -> torch.Tensor:
        return self.checkpoint.tensor(f"{name}.weight", (size,))


def _rotated_last(weight: torch.Tensor, channels: int) -> torch.Tensor:
    """Move the first `channels` rows of [..., rows, columns], in pairs, to the end, in halves."""
    return halves_first(torch.cat([weight[..., channels:, :], weight[..., :channels, :]], dim=-2), channels)
