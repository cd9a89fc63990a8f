"""The talker's network over a slot KV cache: prefill of one slot, batched decode, batched residual codes.

Weights and layers are transformers'; the cache and the batching are ours. A slot belongs to one request and has room
for its worst case, so nothing is ever preempted (recomputing from token ids would be silently wrong here, because the
inputs are sums of codec embeddings and text rows).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import apply_rotary_pos_emb

from omni_runtime.stages.qwen3_omni.conditioning import Prefill
from omni_runtime.stages.qwen3_omni.sampling import sample

RESIDUAL_TOP_K = 50
RESIDUAL_TOP_P = 0.8


class TalkerDecoder:
    """slots: requests in flight; length: positions of one slot."""

    def __init__(self, talker: Any, *, slots: int, length: int, device: torch.device) -> None:
        text = talker.config.text_config
        self._talker = talker
        self._head_dim = text.head_dim
        self._device = device
        self.length = length
        shape = (text.num_hidden_layers, slots, text.num_key_value_heads, length, text.head_dim)
        self._keys = torch.zeros(shape, dtype=talker.dtype, device=device)
        self._values = torch.zeros_like(self._keys)
        self.groups: int = talker.config.num_code_groups
        self.vocabulary: int = text.vocab_size

    @property
    def cache_bytes(self) -> int:
        return 2 * self._keys.numel() * self._keys.element_size()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [rows, vocabulary]"""
        return self._talker.codec_head(hidden).float()  # type: ignore[no-any-return]

    def prefill(self, slot: int, prefill: Prefill) -> torch.Tensor:
        """Fill a slot from position 0; returns the last position's hidden state [1, hidden]."""
        rows = prefill.embeds.shape[0]
        places = torch.arange(rows, device=self._device)[None]
        slots = torch.tensor([slot], device=self._device)
        return self._forward(prefill.embeds[None], slots, places, prefill.positions[:, None])

    def decode(self, embeds: torch.Tensor, slots: list[int], places: list[int], deltas: list[int]) -> torch.Tensor:
        """One position in each of several slots; embeds [rows, hidden] -> hidden states [rows, hidden]."""
        place = torch.tensor(places, device=self._device)[:, None]
        position = place + torch.tensor(deltas, device=self._device)[:, None]
        slot = torch.tensor(slots, device=self._device)
        return self._forward(embeds[:, None], slot, place, position.expand(3, -1, -1))

    def _forward(
        self, hidden: torch.Tensor, slots: torch.Tensor, places: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """hidden [rows, steps, hidden]; places int64 [rows, steps] in the cache; positions [3, rows, steps] for RoPE."""
        model = self._talker.model
        rows, steps, _ = hidden.shape
        cos, sin = model.rotary_emb(hidden, positions)
        end = int(places.max()) + 1
        mask = (torch.arange(end, device=self._device) <= places[:, :, None])[:, None]
        owners = slots[:, None].expand(rows, steps)
        for index, layer in enumerate(model.layers):
            attention = layer.self_attn
            normed = layer.input_layernorm(hidden)
            heads = (rows, steps, -1, self._head_dim)
            query = attention.q_norm(attention.q_proj(normed).view(heads)).transpose(1, 2)
            key = attention.k_norm(attention.k_proj(normed).view(heads)).transpose(1, 2)
            value = attention.v_proj(normed).view(heads).transpose(1, 2)
            query, key = apply_rotary_pos_emb(query, key, cos, sin)
            self._keys[index].permute(0, 2, 1, 3)[owners, places] = key.transpose(1, 2)
            self._values[index].permute(0, 2, 1, 3)[owners, places] = value.transpose(1, 2)
            mixed = functional.scaled_dot_product_attention(
                query,
                self._keys[index, slots, :, :end],
                self._values[index, slots, :, :end],
                attn_mask=mask,
                enable_gqa=True,
                scale=attention.scaling,
            )
            hidden = hidden + attention.o_proj(mixed.transpose(1, 2).reshape(rows, steps, -1))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return model.norm(hidden)[:, -1]  # type: ignore[no-any-return]

    def residual_codes(
        self, hidden: torch.Tensor, first: torch.Tensor, uniform: torch.Tensor, temperature: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Complete one frame per row.

        hidden [rows, hidden] of the step that gave code 0 (`first` int64 [rows]); uniform float32 [rows, groups - 1];
        temperature [rows] 0 = greedy. Returns codes int64 [rows, groups] and the sum of their embeddings
        [rows, hidden]. The sequence of at most `groups` + 1 positions is run again per group: short enough that a
        cache would cost more than it saves.
        """
        predictor = self._talker.code_predictor
        embed = self._talker.get_input_embeddings()
        sequence = torch.stack([hidden, embed(first)], dim=1)
        codes = [first]
        sampling = (temperature > 0).to(torch.float32)  # residuals are drawn at temperature 1, or greedily
        for group in range(self.groups - 1):
            last = predictor.model(inputs_embeds=sequence, use_cache=False).last_hidden_state[:, -1]
            scores = predictor.lm_head[group](last).float()
            code = sample(scores, uniform[:, group], sampling, top_k=RESIDUAL_TOP_K, top_p=RESIDUAL_TOP_P)
            codes.append(code)
            sequence = torch.cat([sequence, predictor.get_input_embeddings()[group](code)[:, None]], dim=1)
        return torch.stack(codes, dim=1), sequence[:, 1:].sum(dim=1)
