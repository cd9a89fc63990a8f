"""Decoder layers of the talker and of its code predictor, with fused weights: one product where transformers has
several. Norms, rotary embedding and routing are computed in float32 whatever the weights are.

Built from a loaded transformers model, and equal to it up to the order of float additions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as functional

DENSE_EXPERTS = 8  # up to so many, computing all of them is cheaper than sorting rows by expert

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""query [tokens, heads, head_dim], key and value [tokens, kv_heads, head_dim] -> mixed [tokens, heads * head_dim]"""

Feedforward = Callable[[torch.Tensor], torch.Tensor]  # [tokens, hidden] -> [tokens, hidden]


class Norm:
    """RMSNorm in float32; the result has the input's type."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        self._weight = weight.detach().float()
        self._epsilon = epsilon

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        return self.wide(values).to(values.dtype)

    def wide(self, values: torch.Tensor) -> torch.Tensor:
        """The same, left in float32."""
        values = values.float()
        scale = torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + self._epsilon)
        return values * scale * self._weight


class Rotary:
    """Angles of linear positions. Three-dimensional positions of media prompts come from the model's own module."""

    def __init__(self, module: Any) -> None:
        self._frequencies = module.inv_freq.float()
        self._scaling = float(module.attention_scaling)

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """positions int64 [tokens] -> what `rotate` takes, float32 [tokens, 1, head_dim] each."""
        angles = positions.float()[:, None, None] * self._frequencies
        cos, sin = angles.cos() * self._scaling, angles.sin() * self._scaling
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def signed(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers' cos and sin [tokens, head_dim] -> what `rotate` takes."""
    half = sin.shape[-1] // 2
    return cos.float()[:, None], torch.cat([-sin[:, :half], sin[:, half:]], dim=-1).float()[:, None]


def rotate(values: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of float32 [tokens, heads, head_dim]; the sine of the first half is negated beforehand."""
    return torch.addcmul(values * cos, values.roll(values.shape[-1] // 2, dims=-1), signed_sin)


class DecoderLayer:
    """One transformer layer over flat tokens; where keys and values live is the caller's matter (`attend`)."""

    def __init__(self, layer: Any) -> None:
        attention = layer.self_attn
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        self.head_dim = int(attention.head_dim)
        self.heads, self.kv_heads, _ = (p.out_features // self.head_dim for p in parts)
        self.scaling = float(attention.scaling)
        self._qkv = torch.cat([p.weight.detach() for p in parts])
        self._qkv_bias = None if parts[0].bias is None else torch.cat([p.bias.detach() for p in parts])
        self._out, self._out_bias = attention.o_proj.weight.detach(), attention.o_proj.bias
        self._before = _norm(layer.input_layernorm)
        self._after = _norm(layer.post_attention_layernorm)
        query, key = attention.q_norm, attention.k_norm
        per_head = torch.cat([query.weight.expand(self.heads, -1), key.weight.expand(self.kv_heads, -1)])
        self._query_key = Norm(per_head, query.variance_epsilon)
        self._feedforward = _feedforward(layer.mlp)

    def __call__(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, attend: Attend) -> torch.Tensor:
        """hidden [tokens, hidden]; cos and sin as `rotate` takes them."""
        joint = functional.linear(self._before(hidden), self._qkv, self._qkv_bias)
        joint = joint.view(hidden.shape[0], -1, self.head_dim)
        rotated = self.heads + self.kv_heads
        query_key = rotate(self._query_key.wide(joint[:, :rotated]), cos, sin).to(hidden.dtype)
        mixed = attend(query_key[:, : self.heads], query_key[:, self.heads :], joint[:, rotated:])
        hidden = hidden + functional.linear(mixed, self._out, self._out_bias)
        return hidden + self._feedforward(self._after(hidden))


def final_norm(module: Any) -> Norm:
    return _norm(module)


def _norm(module: Any) -> Norm:
    return Norm(module.weight, module.variance_epsilon)


def _feedforward(module: Any) -> Feedforward:
    if not hasattr(module, "experts"):
        return _Gated(module)
    if module.experts.num_experts <= DENSE_EXPERTS:
        return _DenseExperts(module)
    return _SparseExperts(module)


class _Gated:
    def __init__(self, module: Any) -> None:
        self._up = torch.cat([module.gate_proj.weight.detach(), module.up_proj.weight.detach()])
        self._down = module.down_proj.weight.detach()
        self._activation = module.act_fn

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = functional.linear(hidden, self._up).chunk(2, dim=-1)
        return functional.linear(self._activation(gate) * up, self._down)


class _SparseExperts:
    """Many experts: transformers' own dispatch (engine arg `experts_implementation`)."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._module(hidden[None])[0]  # type: ignore[no-any-return]


class _DenseExperts:
    """Few experts: router, shared expert and all experts are two products; what was not routed has weight zero."""

    def __init__(self, module: Any) -> None:
        experts, shared, gate = module.experts, module.shared_expert, module.gate
        self._experts, self._top_k, self._normalise = gate.num_experts, gate.top_k, gate.norm_topk_prob
        self._activation = experts.act_fn
        gates, ups = experts.gate_up_proj.detach().chunk(2, dim=1)  # [experts, intermediate, hidden] each
        self._width = gates.shape[1]
        self._shared_width = shared.gate_proj.out_features
        scores = [gate.weight.detach(), module.shared_expert_gate.weight.detach()]
        inner = [
            gates.flatten(0, 1),
            shared.gate_proj.weight.detach(),
            ups.flatten(0, 1),
            shared.up_proj.weight.detach(),
        ]
        self._in = torch.cat([*inner, *scores])
        self._out = torch.cat([experts.down_proj.detach().permute(1, 0, 2).flatten(1), shared.down_proj.weight], dim=1)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        tokens, width = hidden.shape[0], self._experts * self._width + self._shared_width
        gate, up, router, shared = functional.linear(hidden, self._in).split([width, width, self._experts, 1], dim=-1)
        best, chosen = router.float().softmax(dim=-1).topk(self._top_k, dim=-1)
        if self._normalise:
            best = best / best.sum(dim=-1, keepdim=True)
        weights = torch.zeros((tokens, self._experts), dtype=hidden.dtype, device=hidden.device)
        weights.scatter_(1, chosen, best.to(hidden.dtype))
        inner = self._activation(gate) * up
        routed = inner[:, : width - self._shared_width].view(tokens, self._experts, self._width)
        routed *= weights[:, :, None]
        inner[:, width - self._shared_width :] *= shared.sigmoid()
        return functional.linear(inner, self._out)
