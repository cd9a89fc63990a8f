"""The talker's network over a slot KV cache: prefill of one slot, then one step at a time for all slots together.

Weights are transformers'; the cache, the batching and the order of the work are ours. A slot belongs to one request
and has room for its worst case, so nothing is ever preempted (recomputing from token ids would be silently wrong here,
because the inputs are sums of codec embeddings and text rows).

Everything that a step reads and writes lies in buffers with one row a slot, at fixed places: a step can be captured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as functional

from omni_runtime.errors import EngineError
from omni_runtime.stages.qwen3_omni.conditioning import Prefill
from omni_runtime.stages.qwen3_omni.graphs import Bucket, BucketedSteps, EagerSteps, GraphedSteps, StepRunner
from omni_runtime.stages.qwen3_omni.network import DecoderLayer, Rotary, final_norm, signed
from omni_runtime.stages.qwen3_omni.predictor import CodePredictor
from omni_runtime.stages.qwen3_omni.sampling import penalise, sample

TOP_K, TOP_P, REPETITION_PENALTY = 50, 1.0, 1.05  # the model's own defaults for code 0
SUPPRESSED_TAIL = 1024  # special ids at the vocabulary's end; of them only the end of speech may be drawn
RANDOM_FRAMES = 32  # frames whose random numbers are drawn at once


class TalkerDecoder:
    """slots: requests in flight; length: positions of one slot. Takes the layers out of `talker`."""

    def __init__(self, talker: Any, *, slots: int, length: int, device: torch.device) -> None:
        model = talker.model
        self._layers = [DecoderLayer(layer) for layer in model.layers]
        self._media_rotary, self._rotary = model.rotary_emb, Rotary(model.rotary_emb)
        self._norm = final_norm(model.norm)
        self._head = talker.codec_head.weight.detach()
        self._embedding = talker.get_input_embeddings().weight.detach()
        del model.layers
        self._predictor = CodePredictor(talker.code_predictor, rows=slots, device=device)
        self._device, self.slots, self.length = device, slots, length
        self.groups = self._predictor.residuals + 1
        self.end = int(talker.config.codec_eos_token_id)
        self.vocabulary = int(talker.config.text_config.vocab_size)
        self._allocate(talker.dtype)
        self._runner: StepRunner = EagerSteps(self.step)

    def _allocate(self, dtype: torch.dtype) -> None:
        slots, device = self.slots, self._device
        layer, width = self._layers[0], self._embedding.shape[1]

        def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        try:
            # The position behind the last one takes what a slot writes that has no turn.
            rows = slots * 2 * layer.kv_heads
            self._cache = zeros(len(self._layers), rows, self.length + 1, layer.head_dim, dtype=dtype)
        except torch.OutOfMemoryError as error:
            raise EngineError(
                f"the cache of {slots} slots with {self.length} positions does not fit into the device's part of this "
                f"stage ({error}); lower maxConcurrency, engineArgs.max_frames or engineArgs.max_prefill_rows"
            ) from error
        self._hidden = zeros(slots, width, dtype=dtype)
        self._pending = zeros(slots, width, dtype=dtype)  # the last frame's embeddings, waiting for their text row
        self._text = zeros(slots, width, dtype=dtype)
        self._place = zeros(slots, dtype=torch.long)  # next free position
        self._delta = zeros(slots, dtype=torch.long)  # rotary position minus place
        self._decoding = zeros(slots, dtype=torch.bool)  # has its text row: goes through the network in this step
        self._active = zeros(slots, dtype=torch.bool)  # draws a frame in this step
        self._drawn = zeros(slots, dtype=torch.long)
        self._temperature = zeros(slots, dtype=torch.float32)
        self._uniform = zeros(slots, RANDOM_FRAMES, self.groups, dtype=torch.float32)
        self._seen = zeros(slots, self.vocabulary, dtype=torch.bool)
        self._bias = zeros(slots, self.vocabulary, dtype=torch.float32)  # -inf for what a slot may not draw
        self._suppressed = zeros(self.vocabulary, dtype=torch.float32)
        self._suppressed[self.vocabulary - SUPPRESSED_TAIL :] = float("-inf")
        self._suppressed[self.end] = 0.0
        self._rows = torch.arange(slots, device=device)
        self._cache_rows = torch.arange(rows, device=device)
        self._turn: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # of the step before: decoding, fresh
        self._text_rows = self._rows[:0]

    @property
    def cache_bytes(self) -> int:
        return self._cache.numel() * self._cache.element_size()

    def use(self, runner: StepRunner) -> None:
        """Replace the way in which steps are run (graphs, buckets)."""
        self._runner = runner

    def bucketed(self, *, fixed: bool) -> BucketedSteps:
        return BucketedSteps(self.step, rows=self.slots, length=self.length, fixed=fixed)

    def graphed(self, *, fixed: bool) -> GraphedSteps:
        return GraphedSteps(self.step, rows=self.slots, length=self.length, fixed=fixed, idle=self.while_idle)

    # --- one slot

    def prefill(self, slot: int, prefill: Prefill, *, temperature: float, may_end: bool) -> None:
        """Fill a slot from position 0; it draws its first frame in the next step that it is named in."""
        rows = prefill.embeds.shape[0]
        cos, sin = self._media_rotary(prefill.embeds[None], prefill.positions[:, None])
        cos, sin = signed(cos[0], sin[0])
        hidden = prefill.embeds
        for index, layer in enumerate(self._layers):
            cache = self._by_slot(index, layer)[slot]

            def attend(
                query: torch.Tensor,
                key: torch.Tensor,
                value: torch.Tensor,
                layer: DecoderLayer = layer,
                cache: torch.Tensor = cache,
            ) -> torch.Tensor:
                query, key, value = (t.transpose(0, 1) for t in (query, key, value))
                cache[0, :, :rows], cache[1, :, :rows] = key, value
                mixed = functional.scaled_dot_product_attention(
                    query[None], key[None], value[None], is_causal=True, enable_gqa=True, scale=layer.scaling
                )
                return mixed[0].transpose(0, 1).reshape(rows, -1)

            hidden = layer(hidden, cos, sin, attend)
        self._hidden[slot] = self._norm(hidden[-1:])[0]
        self._place[slot], self._delta[slot] = rows, prefill.delta
        self._drawn[slot], self._temperature[slot] = 0, temperature
        self._seen[slot] = False
        self._bias[slot] = self._suppressed
        if not may_end:
            self._bias[slot, self.end] = float("-inf")

    def set_random(self, slot: int, uniform: torch.Tensor) -> None:
        """Random numbers of the next RANDOM_FRAMES frames, float32 [RANDOM_FRAMES, groups]."""
        self._uniform[slot] = uniform

    # --- all slots

    def advance(
        self, decoding: Sequence[int], texts: Sequence[torch.Tensor], fresh: Sequence[int], *, length: int, greedy: bool
    ) -> list[list[int]]:
        """One frame for each named slot; others are left as they are.

        decoding: slots with a text row [hidden] each in `texts`; fresh: slots whose prefill just ran; length: positions
        of the longest one, this step's included. Returns the codes of slots 0.. up to the highest that is named; the
        rows in between mean nothing. A code 0 that ends the speech makes the rest of its row meaningless, too.
        """
        turn = (tuple(decoding), tuple(fresh))
        if turn != self._turn:
            self._set_turn(*turn)
        if decoding:
            self._text.index_copy_(0, self._text_rows, torch.stack(list(texts)))
        rows = max((*decoding, *fresh)) + 1
        bucket = self._runner.bucket(rows, length, greedy=greedy)
        return self._runner.run(bucket)[:rows].tolist()  # type: ignore[no-any-return]

    def while_idle(self, action: Callable[[], None]) -> None:
        """Run `action`, in which steps change nothing that belongs to a request."""
        decoding, active = self._decoding.clone(), self._active.clone()
        self._decoding.zero_()
        self._active.zero_()
        try:
            action()
        finally:
            self._decoding.copy_(decoding)
            self._active.copy_(active)

    def _set_turn(self, decoding: tuple[int, ...], fresh: tuple[int, ...]) -> None:
        self._decoding.zero_()
        self._text_rows = torch.tensor(decoding, dtype=torch.long, device=self._device)
        self._decoding[self._text_rows] = True
        self._active.copy_(self._decoding)
        self._active[torch.tensor(fresh, dtype=torch.long, device=self._device)] = True
        self._turn = (decoding, fresh)

    def step(self, bucket: Bucket) -> torch.Tensor:
        """Codes int64 [rows, groups]. Reads and writes the buffers of slots 0..rows-1 and nothing else."""
        rows = bucket.rows
        decoding, active = self._decoding[:rows], self._active[:rows]
        hidden = self._hidden[:rows]
        decoded = self._network(self._pending[:rows] + self._text[:rows], decoding, bucket)
        hidden.copy_(torch.where(decoding[:, None], decoded, hidden))
        uniform = self._uniform[self._rows[:rows], self._drawn[:rows] % RANDOM_FRAMES]
        temperature = self._temperature[:rows]
        first = self._draw(hidden, uniform[:, 0], temperature, active, greedy=bucket.greedy)
        embedded = functional.embedding(first, self._embedding)
        residuals, total = self._predictor(hidden, embedded, uniform[:, 1:], temperature, greedy=bucket.greedy)
        pending = self._pending[:rows]
        pending.copy_(torch.where(active[:, None], embedded + total, pending))
        self._place[:rows] += decoding
        self._drawn[:rows] += active
        return torch.cat([first[:, None], residuals], dim=1)

    def _draw(
        self,
        hidden: torch.Tensor,
        uniform: torch.Tensor,
        temperature: torch.Tensor,
        active: torch.Tensor,
        *,
        greedy: bool,
    ) -> torch.Tensor:
        """Code 0 of each row, int64 [rows]."""
        rows = hidden.shape[0]
        seen = self._seen[:rows]
        logits = penalise(functional.linear(hidden, self._head).float(), seen, REPETITION_PENALTY)
        logits += self._bias[:rows]
        drawn = sample(logits, uniform, temperature, top_k=TOP_K, top_p=TOP_P, greedy=greedy)
        index = drawn[:, None]
        seen.scatter_(1, index, seen.gather(1, index) | active[:, None])
        return drawn

    def _network(self, hidden: torch.Tensor, decoding: torch.Tensor, bucket: Bucket) -> torch.Tensor:
        """One position of each row [rows, hidden] -> hidden states [rows, hidden]."""
        rows, length = bucket.rows, bucket.length
        place = torch.where(decoding, self._place[:rows], self.length)
        cos, sin = self._rotary(place + self._delta[:rows])
        layer = self._layers[0]
        per_row = 2 * layer.kv_heads
        cache_rows, cache_places = self._cache_rows[: rows * per_row], place.repeat_interleave(per_row)
        mask = (torch.arange(length, device=self._device) <= place[:, None])[:, None, None]
        for index, layer in enumerate(self._layers):
            cache = self._cache[index]
            by_slot = self._by_slot(index, layer)[:rows, :, :, :length]

            def attend(
                query: torch.Tensor,
                key: torch.Tensor,
                value: torch.Tensor,
                layer: DecoderLayer = layer,
                cache: torch.Tensor = cache,
                by_slot: torch.Tensor = by_slot,
            ) -> torch.Tensor:
                cache[cache_rows, cache_places] = torch.cat([key, value], dim=1).flatten(0, 1)
                # One position a row: the heads that share keys stand in for its query positions.
                grouped = query.view(rows, layer.kv_heads, -1, layer.head_dim)
                mixed = functional.scaled_dot_product_attention(
                    grouped, by_slot[:, 0], by_slot[:, 1], attn_mask=mask, scale=layer.scaling
                )
                return mixed.reshape(rows, -1)

            hidden = layer(hidden, cos, sin, attend)
        return self._norm(hidden)

    def _by_slot(self, index: int, layer: DecoderLayer) -> torch.Tensor:
        """A layer's cache as [slots, 2, kv_heads, positions, head_dim]."""
        return self._cache[index].view(self.slots, 2, layer.kv_heads, self.length + 1, layer.head_dim)
