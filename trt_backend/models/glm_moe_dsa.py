"""GLM-5, GLM-5.2 and GLM-5.3 (`glm_moe_dsa`) on the CPU, in float32.

Not here: the multi-token-prediction layer of the published checkpoints, whose weights are left unread.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trt_backend.config import RowFormat
from trt_backend.models.blocks import Rotary, linear, pad_rows, rms_norm
from trt_backend.models.checkpoint import Checkpoint
from trt_backend.models.glm_config import GlmMoeDsaConfig
from trt_backend.models.glm_layers import Layer, Step
from trt_backend.models.glm_weights import GlmWeights
from trt_backend.models.state import KvState


@dataclass(frozen=True, slots=True)
class GlmMoeDsa:
    """A loaded model (`state.Model`). It keeps no rows: what it knows of a session is what `KvState` shows it."""

    config: GlmMoeDsaConfig
    embedding: torch.Tensor
    layers: tuple[Layer, ...]
    final_norm: torch.Tensor
    head: torch.Tensor
    rotary: Rotary

    @classmethod
    def load(cls, checkpoint: Checkpoint, config: GlmMoeDsaConfig, row_format: RowFormat) -> GlmMoeDsa:
        """Read all weights, widened to float32.

        Raises:
            ConfigError: a tensor is missing, damaged, of another shape, quantised, or holds NaN or infinity.
        """
        weights = GlmWeights(checkpoint, config, row_format)
        embedding = weights.embedding()
        return cls(
            config=config,
            embedding=embedding,
            layers=tuple(weights.layer(number) for number in range(config.num_hidden_layers)),
            final_norm=weights.final_norm(),
            head=weights.head(embedding),
            rotary=Rotary.of(config.rope_theta, config.qk_rope_head_dim),
        )

    @torch.inference_mode()
    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, state: KvState, logits_of: torch.Tensor
    ) -> torch.Tensor:
        """Run one step, as `state.Model.forward` says: int64 [T], [T] and [wanted] to float32 [wanted, vocabulary]."""
        x = self.embedding[pad_rows(tokens)]
        cos, sin = self.rotary.tables(pad_rows(positions))
        step = Step(tokens=len(tokens), cos=cos, sin=sin, state=state)
        for layer in self.layers:
            x = layer(x, step)
        if len(logits_of) == 0:
            return x.new_empty(0, self.config.vocab_size)
        wanted = rms_norm(pad_rows(x[logits_of]), self.final_norm, self.config.rms_norm_eps)
        return linear(wanted, self.head)[: len(logits_of)]
