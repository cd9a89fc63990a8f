"""Payloads that cross an edge: named arrays with absolute positions. Torch-free.

Tensors per contract (rows = first axis; positions are absolute from the request's start):

| contract | tensors | a row is |
|---|---|---|
| thinker_hidden | token_ids int64 [R]; embed float [R, H]; hidden float [R, H]; position_ids int64 [3, R] in meta-less tensor "mrope" | one thinker position (prompt first, then generated tokens; the last sampled token has no hidden row) |
| codec_frames | codes int32 [R, Q] | one codec frame |
| text_segments | utf8 uint8 [R] | one byte of UTF-8; a chunk is a whole phrase |
| acoustic_frames | engine-defined float32 [R, C] tensors | one acoustic frame |
| kv_cache | kv [layers, 2, R, heads, head_dim] of a group of layers, in the cache's own dtype (`kv.layout`) | one token's keys and values |
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

ArrayMap = Mapping[str, np.ndarray]


class Payload(msgspec.Struct, frozen=True, eq=False):  # made for every chunk: a seventh of what a dataclass takes
    """One chunk of an edge stream.

    start: absolute position of the first row; rows: number of rows (0 is legal for a bare `finished`).
    meta: small values (int, float, str, bool, list of int) that the contract of the edge defines.
    bfloat16 arrays travel as uint16 views, with `dtypes[name] = "bfloat16"`.
    parts: tensors that are still in pieces along the first axis. An engine leaves them so, and whoever sends the payload
    joins them where it is sent from; a payload that arrives has none.
    """

    start: int
    rows: int
    finished: bool
    tensors: ArrayMap = {}
    meta: Mapping[str, object] = {}
    dtypes: Mapping[str, str] = {}
    parts: Mapping[str, tuple[np.ndarray, ...]] = {}

    def shapes(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """(shape, dtype as it travels) of every tensor, whole."""
        whole = {name: (array.shape, array.dtype) for name, array in self.tensors.items()}
        for name, pieces in self.parts.items():
            whole[name] = ((sum(len(piece) for piece in pieces), *pieces[0].shape[1:]), pieces[0].dtype)
        return {name: (shape, self.dtypes.get(name, dtype.name)) for name, (shape, dtype) in whole.items()}

    def joined(self, places: ArrayMap | None = None) -> Payload:
        """The same without parts. `places`: arrays that are to hold the tensors, all of them."""
        if not self.parts:
            return self
        if places is None:
            tensors = {**self.tensors, **{name: np.concatenate(pieces) for name, pieces in self.parts.items()}}
            return msgspec.structs.replace(self, tensors=tensors, parts={})
        for name, array in self.tensors.items():
            np.copyto(places[name], array)
        for name, pieces in self.parts.items():
            np.concatenate(pieces, out=places[name])
        return msgspec.structs.replace(self, tensors=places, parts={})
