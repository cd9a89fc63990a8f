"""The code predictor: the residual codes of one frame, for all rows at once.

A frame is a sequence of its own: the talker's hidden state, code 0, then one code after another, each with its own
embedding and head. Keys and values of that short sequence are kept, so that a code costs one position.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional

from omni_runtime.stages.qwen3_omni.network import Attend, DecoderLayer, Rotary, final_norm
from omni_runtime.stages.qwen3_omni.sampling import sample

TOP_K = 50
TOP_P = 0.8


class CodePredictor:
    """rows: the most that are ever completed at once. Takes the layers out of `predictor`: they live here, fused."""

    def __init__(self, predictor: Any, *, rows: int, device: torch.device) -> None:
        model = predictor.model
        self._layers = [DecoderLayer(layer) for layer in model.layers]
        del model.layers
        self._norm = final_norm(model.norm)
        self._heads = [head.weight.detach() for head in predictor.lm_head]
        self._embeddings = [embedding.weight.detach() for embedding in predictor.get_input_embeddings()]
        self.residuals = len(self._heads)
        positions = self.residuals + 1
        first = self._layers[0]
        shape = (len(self._layers), 2, rows, first.kv_heads, positions, first.head_dim)
        self._cache = torch.zeros(shape, dtype=self._embeddings[0].dtype, device=device)
        self._cos, self._sin = Rotary(model.rotary_emb)(torch.arange(positions, device=device))

    def __call__(
        self,
        hidden: torch.Tensor,
        first: torch.Tensor,
        uniform: torch.Tensor,
        temperature: torch.Tensor,
        *,
        greedy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [rows, hidden] of the step that gave code 0; first [rows, hidden], its embedding; uniform float32
        [rows, residuals]; temperature float32 [rows]: above 0 residuals are drawn at temperature 1, as the model asks.

        Returns codes int64 [rows, residuals], and the sum of their embeddings [rows, hidden].
        """
        rows = hidden.shape[0]
        sampled = (temperature > 0).float()
        tokens = torch.stack([hidden, first], dim=1).flatten(0, 1)  # a row's two tokens side by side
        total: torch.Tensor | None = None
        codes = []
        start = 0
        for group in range(self.residuals):
            steps = tokens.shape[0] // rows
            last = self._forward(tokens, rows, start, steps)
            scores = functional.linear(last, self._heads[group]).float()
            code = sample(scores, uniform[:, group], sampled, top_k=TOP_K, top_p=TOP_P, greedy=greedy)
            codes.append(code)
            tokens = functional.embedding(code, self._embeddings[group])
            total = tokens if total is None else total + tokens
            start += steps
        assert total is not None
        return torch.stack(codes, dim=1), total

    def _forward(self, tokens: torch.Tensor, rows: int, start: int, steps: int) -> torch.Tensor:
        """tokens [rows * steps, hidden] at positions start..; the hidden state of each row's last one [rows, hidden]."""
        end = start + steps
        cos, sin = self._cos[start:end].repeat(rows, 1, 1), self._sin[start:end].repeat(rows, 1, 1)
        for index, layer in enumerate(self._layers):
            tokens = layer(tokens, cos, sin, self._attend(layer, self._cache[index, :, :rows], start, end))
        return self._norm(tokens.view(rows, steps, -1)[:, -1])

    @staticmethod
    def _attend(layer: DecoderLayer, cache: torch.Tensor, start: int, end: int) -> Attend:
        rows, steps = cache.shape[1], end - start

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            split = (rows, steps, -1, layer.head_dim)
            cache[0, :, :, start:end] = key.view(split).transpose(1, 2)
            cache[1, :, :, start:end] = value.view(split).transpose(1, 2)
            mixed = functional.scaled_dot_product_attention(
                query.view(split).transpose(1, 2),
                cache[0, :, :, :end],
                cache[1, :, :, :end],
                is_causal=steps > 1,  # the first two positions; later ones see all that is there
                enable_gqa=True,
                scale=layer.scaling,
            )
            return mixed.transpose(1, 2).reshape(rows * steps, -1)

        return attend
