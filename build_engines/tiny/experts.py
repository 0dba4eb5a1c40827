"""Feed-forward blocks: the gated MLP, and the mixture of experts with sigmoid routing and bias-only balancing."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import TinyConfig


class GatedMlp(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., hidden]` to the same shape."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _GroupedExperts(torch.autograd.Function):
    """Every token through its K experts, one matrix product an expert over the tokens sorted by expert.

    The backward pass is written out because autograd's scatter of a gathered row costs more on a CPU than the
    products: a permutation is undone by its inverse here, so nothing is accumulated.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, choice: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        tokens, top_k = choice.shape
        experts, double_inner, _ = gate_up.shape
        flat = choice.flatten()
        order = torch.argsort(flat, stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel())
        ends = torch.bincount(flat, minlength=experts).cumsum(0).tolist()
        spans = list(zip([0, *ends[:-1]], ends, strict=True))
        source = order // top_k

        rows = x.index_select(0, source)
        gated = rows.new_empty(rows.shape[0], double_inner)
        for e, (a, b) in enumerate(spans):
            torch.mm(rows[a:b], gate_up[e].t(), out=gated[a:b])
        gate, up = gated.chunk(2, dim=-1)
        inner = F.silu(gate) * up
        out = torch.empty_like(rows)
        for e, (a, b) in enumerate(spans):
            torch.mm(inner[a:b], down[e].t(), out=out[a:b])
        by_token = out.index_select(0, inverse).view(tokens, top_k, -1)
        ctx.save_for_backward(rows, gated, inner, by_token, weight, order, inverse, source, gate_up, down)
        ctx.spans = spans
        return torch.bmm(weight.unsqueeze(1), by_token).squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor, Tensor, Tensor]:
        rows, gated, inner, by_token, weight, order, inverse, source, gate_up, down = ctx.saved_tensors
        tokens, top_k = weight.shape
        d_weight = torch.bmm(by_token, grad.unsqueeze(2)).squeeze(2)
        d_out = grad.index_select(0, source) * weight.flatten()[order].unsqueeze(1)
        d_inner = torch.empty_like(inner)
        d_down = torch.empty_like(down)
        for e, (a, b) in enumerate(ctx.spans):
            torch.mm(d_out[a:b], down[e], out=d_inner[a:b])
            torch.mm(d_out[a:b].t(), inner[a:b], out=d_down[e])
        gate, up = gated.chunk(2, dim=-1)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        d_gated = torch.cat((d_inner * up * (sigmoid + silu * (1 - sigmoid)), d_inner * silu), dim=-1)
        d_rows = torch.empty_like(rows)
        d_gate_up = torch.empty_like(gate_up)
        for e, (a, b) in enumerate(ctx.spans):
            torch.mm(d_gated[a:b], gate_up[e], out=d_rows[a:b])
            torch.mm(d_gated[a:b].t(), rows[a:b], out=d_gate_up[e])
        d_x = d_rows.index_select(0, inverse).view(tokens, top_k, -1).sum(1)
        return d_x, None, d_weight, d_gate_up, d_down


class MixtureOfExperts(nn.Module):
    """One shared expert and K of E routed ones (`noaux_tc`: the bias moves the choice, never the weight)."""

    e_score_correction_bias: Tensor

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        experts, hidden, inner = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.top_k = config.num_experts_per_tok
        self.scale = config.routed_scaling_factor
        self.gate_weight = nn.Parameter(torch.empty(experts, hidden))
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * inner, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, inner))
        self.shared_experts = GatedMlp(hidden, inner * config.n_shared_experts)
        self.register_buffer("e_score_correction_bias", torch.zeros(experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`[B, T, hidden]` to the same shape, and the tokens each expert took, `[E]`."""
        flat = x.reshape(-1, x.shape[-1])
        scores = torch.sigmoid(F.linear(flat, self.gate_weight))
        choice = torch.topk(scores.detach() + self.e_score_correction_bias, self.top_k, dim=-1).indices
        load = torch.bincount(choice.flatten(), minlength=scores.shape[-1]).float()
        weight = scores.gather(1, choice)
        weight = weight / (weight.sum(-1, keepdim=True) + 1e-20) * self.scale
        routed: Tensor = _GroupedExperts.apply(flat, choice, weight, self.gate_up, self.down)  # type: ignore[no-untyped-call]
        return routed.view_as(x) + self.shared_experts(x), load

    @torch.no_grad()
    def balance(self, load: Tensor, rate: float) -> None:
        """Raise the bias of experts below the mean `load` (`[E]`) and lower the others' (arXiv 2408.15664)."""
        self.e_score_correction_bias += rate * torch.sign(load.mean() - load)
