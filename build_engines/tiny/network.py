"""The whole network: `glm53-tiny` in dense or sparse form, and the indexer's training signal."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attention import Indexer, LatentAttention, Rotation, Selection, rotation, score_all, score_selected
from .config import TinyConfig
from .experts import GatedMlp, MixtureOfExperts


class Layer(nn.Module):
    """Attention, then an MLP or experts, each behind a norm and beside a residual."""

    def __init__(self, config: TinyConfig, index: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = LatentAttention(config, index)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp: GatedMlp | MixtureOfExperts = (
            GatedMlp(config.hidden_size, config.intermediate_size)
            if config.is_dense_mlp(index)
            else MixtureOfExperts(config)
        )


@dataclass
class IndexerCase:
    """What one indexer saw in a forward pass, and the attention it should have predicted.

    Attributes:
        x: its layer's normalised input `[B, T, hidden]`, detached.
        query_latent: `[B, T, q_lora]`, detached.
        selection: the positions it chose, in a sparse pass.
        mass: attention of the sampled queries summed over the heads and layers of its IndexShare group: `[B, Q, K]`
            over the selection in a sparse pass, `[B, Q, T]` in a dense one.
    """

    x: Tensor
    query_latent: Tensor
    selection: Selection | None = None
    mass: Tensor | None = None

    def add(self, mass: Tensor) -> None:
        """Count one layer's attention in."""
        self.mass = mass if self.mass is None else self.mass + mass


@dataclass
class Pass:
    """Result of a forward pass.

    Attributes:
        hidden: final hidden states `[B, T, hidden]`.
        cases: what the indexers saw, by layer.
        loads: tokens each expert took, `[E]`, by layer.
    """

    hidden: Tensor
    rotation: Rotation
    queries: Tensor | None
    cases: dict[int, IndexerCase] = field(default_factory=dict)
    loads: dict[int, Tensor] = field(default_factory=dict)


class TinyGlm(nn.Module):
    """`GlmMoeDsaForCausalLM` at four million parameters, in fp32."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        """Normal weights; what feeds the residual stream is scaled by `(2 * layers) ** -0.5` (GPT-2)."""
        std = self.config.initializer_range
        residual = std * (2 * self.config.num_hidden_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                shrunk = "o_proj" in name or "down" in name
                nn.init.normal_(parameter, std=residual if shrunk else std)

    def forward(self, tokens: Tensor, *, sparse: bool, queries: Tensor | None = None) -> Pass:
        """Run the layers.

        Args:
            tokens: `[B, T]` ids.
            sparse: read the indexers' selection; otherwise every earlier position.
            queries: `[Q]` positions whose attention is recorded for `indexer_loss`.
        """
        by = rotation(self.config, torch.arange(tokens.shape[1]))
        result = Pass(self.embed_tokens(tokens), by, queries)
        h = result.hidden
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            attention = layer.self_attn
            x = layer.input_layernorm(h)
            latents = attention.project(x, by)
            if attention.indexer is not None and (sparse or queries is not None):
                case = IndexerCase(x.detach(), latents.query_latent.detach())
                if sparse:
                    case.selection = attention.indexer.select(case.x, case.query_latent, by)
                result.cases[i] = case
            if sparse:
                case = result.cases[self.config.leader(i)]
                assert case.selection is not None
                out, mass = attention.sparse(latents, case.selection)
                if queries is not None:
                    case.add(mass[:, queries])
            else:
                out = attention.dense(latents)
                if queries is not None:
                    result.cases[self.config.leader(i)].add(attention.probabilities(latents, queries))
            h = h + out
            x = layer.post_attention_layernorm(h)
            if isinstance(layer.mlp, MixtureOfExperts):
                mixed, result.loads[i] = layer.mlp(x)
                h = h + mixed
            else:
                h = h + layer.mlp(x)
        result.hidden = self.norm(h)
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        """`[..., hidden]` to `[..., vocab]`."""
        out: Tensor = self.lm_head(hidden)
        return out

    def token_losses(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihood of `targets` (`[B, T]`) in nats, `[B, T]`."""
        flat = F.cross_entropy(self.logits(hidden.flatten(0, 1)), targets.flatten(), reduction="none")
        return flat.view_as(targets)

    def indexer_loss(self, result: Pass) -> Tensor:
        """Mean Kullback-Leibler divergence, in nats, from the group's attention to the softmax of indexer scores.

        The two-stage recipe of DeepSeek-V3.2: over all positions after a dense pass, over the selected ones after a
        sparse pass; the target is the L1-normalised sum over heads (here also over the layers of the group).
        """
        losses = []
        queries = result.queries
        if queries is None:
            raise ValueError("the pass recorded no attention: give it query positions")
        for i, case in result.cases.items():
            indexer = self.indexer(i)
            q, k, w = indexer.project(case.x, case.query_latent, result.rotation)
            assert case.mass is not None
            target = case.mass / case.mass.sum(dim=-1, keepdim=True)
            if case.selection is not None:
                scores = score_selected(q[:, queries], k, w[:, queries], case.selection.of(queries))
            else:
                scores = score_all(q[:, queries], k, w[:, queries])
                scores = scores.masked_fill(torch.arange(k.shape[1]) > queries[:, None], float("-inf"))
            log_chance = F.log_softmax(scores, dim=-1).masked_fill(scores == float("-inf"), 0.0)
            entropy = torch.xlogy(target, target).sum(dim=-1)
            losses.append((entropy - (target * log_chance).sum(dim=-1)).mean())
        return torch.stack(losses).mean()

    def indexer(self, layer: int) -> Indexer:
        """The indexer of a full layer.

        Raises:
            ValueError: on a shared layer.
        """
        block = self.layers[layer]
        assert isinstance(block, Layer)
        if block.self_attn.indexer is None:
            raise ValueError(f"layer {layer} shares the selection of layer {self.config.leader(layer)}")
        return block.self_attn.indexer

    def balance(self, loads: dict[int, Tensor], rate: float) -> None:
        """Move every router's bias by `rate` towards even load."""
        for i, load in loads.items():
            block = self.layers[i]
            assert isinstance(block, Layer)
            assert isinstance(block.mlp, MixtureOfExperts)
            block.mlp.balance(load, rate)
