"""Batched sampling with one random stream per request: neighbours in the batch change nothing (R27)."""

from __future__ import annotations

import torch


def penalise(logits: torch.Tensor, seen: torch.Tensor, penalty: float) -> torch.Tensor:
    """Repetition penalty over `seen` [rows, vocabulary], as transformers applies it to float32 logits."""
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def sample(
    logits: torch.Tensor, uniform: torch.Tensor, temperature: torch.Tensor, *, top_k: int, top_p: float, greedy: bool
) -> torch.Tensor:
    """One id per row. logits float32 [rows, vocabulary]; uniform, temperature float32 [rows]; temperature 0 = greedy.

    Filters in transformers' order: temperature, top-k, top-p. The draw is the inverse of the cumulative distribution
    at `uniform`, so that it depends on the row alone. `greedy` says that every row is: nothing is drawn then, and
    nothing is read back from the device to find out.
    """
    best = logits.argmax(dim=-1)
    if greedy:
        return best
    scaled = logits / temperature.clamp_min(1e-6)[:, None]
    count = min(top_k, logits.shape[-1]) if top_k > 0 else logits.shape[-1]
    values, ids = scaled.topk(count, dim=-1)
    probabilities = values.softmax(dim=-1)
    if top_p < 1.0:
        before = probabilities.cumsum(dim=-1) - probabilities
        probabilities = probabilities.masked_fill(before > top_p, 0.0)
    cumulative = probabilities.cumsum(dim=-1)
    target = uniform[:, None] * cumulative[:, -1:]
    index = (cumulative <= target).sum(dim=-1, keepdim=True).clamp_max(count - 1)
    drawn = ids.gather(-1, index).squeeze(-1)
    return torch.where(temperature > 0, drawn, best)
