"""Rows and token ids arrive on two ways; the payloads that leave are gapless and end at the right row (R6, R18)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_runtime.errors import EngineError
from omni_runtime.protocol.payload import Payload
from omni_runtime.stages.ar_vllm.rows import (
    RowAssembler,
    RowsHeader,
    decode_header,
    encode_header,
    external_request_id,
    vllm_request_id,
)

WIDTH = 3


def push(assembler: RowAssembler, start: int, rows: int) -> None:
    values = np.arange(start, start + rows, dtype=np.float32).repeat(WIDTH)
    assembler.add_rows(RowsHeader("r", start, rows, WIDTH, "float32"), values.tobytes(), (-values).tobytes())


@given(
    prompt=st.integers(1, 9),
    outputs=st.integers(1, 9),
    extra=st.integers(0, 2),
    order=st.randoms(use_true_random=False),
)
def test_every_row_leaves_once_whatever_comes_first(prompt: int, outputs: int, extra: int, order: object) -> None:
    """`extra`: steps that vLLM ran beyond the end of the answer."""
    assembler = RowAssembler(first_meta={"image_grid_thw": [1, 2, 2]})
    rows = [("rows", 0, prompt)] + [("rows", prompt + i, 1) for i in range(outputs - 1 + extra)]
    tokens = [("tokens", i, 0) for i in range(outputs)] + [("end", 0, 0)]
    sent: list[Payload] = []
    while rows or tokens:
        source = rows if not tokens or (rows and order.random() < 0.5) else tokens  # type: ignore[attr-defined]
        kind, first, count = source.pop(0)
        if kind == "rows":
            push(assembler, first, count)
        elif kind == "tokens":
            assembler.add_tokens(list(range(100, 100 + prompt)), [200 + first])
        else:
            assembler.finish()
        if payload := assembler.take():
            sent.append(payload.joined())
    assert [p.start for p in sent] == [sum(q.rows for q in sent[:i]) for i in range(len(sent))]
    assert sum(p.rows for p in sent) == prompt + outputs - 1
    assert [p.finished for p in sent] == [False] * (len(sent) - 1) + [True]
    full = [p for p in sent if p.rows]
    assert np.array_equal(np.concatenate([p.tensors["embed"][:, 0] for p in full]), np.arange(prompt + outputs - 1))
    ids = [*range(100, 100 + prompt), *range(200, 200 + outputs)][:-1]
    assert np.concatenate([p.tensors["token_ids"] for p in full]).tolist() == ids
    assert full[0].meta["prompt_tokens"] == prompt
    assert full[0].meta["image_grid_thw"] == [1, 2, 2]
    assert sent[-1].meta["output_tokens"] == outputs


def test_a_gap_is_an_error() -> None:
    assembler = RowAssembler()
    push(assembler, 0, 4)
    with pytest.raises(EngineError, match="rows 4 to 5 are missing"):
        push(assembler, 5, 1)


def test_rows_that_were_never_computed_are_an_error() -> None:
    with pytest.raises(EngineError, match="prefix caching"):
        RowAssembler().add_rows(RowsHeader("r", 16, 0, 0, "float32", "is prefix caching on?"), b"", b"")


def test_bfloat16_travels_as_bits() -> None:
    assembler = RowAssembler()
    bits = np.array([[16256, 16384]], np.uint16).tobytes()
    assembler.add_rows(RowsHeader("r", 0, 1, 2, "bfloat16"), bits, bits)
    assembler.add_tokens([7], [8])
    assembler.finish()
    payload = assembler.take()
    assert payload is not None
    assert payload.dtypes == {"embed": "bfloat16", "hidden": "bfloat16"}
    assert payload.tensors["embed"].tolist() == [[16256, 16384]]


def test_request_ids_on_the_way_through_vllm() -> None:
    request = "0f" * 16
    assert external_request_id(vllm_request_id(request, tapped=True) + "-12ab34cd") == request
    assert external_request_id(vllm_request_id(request, tapped=False) + "-12ab34cd") is None


def test_the_header_is_a_value() -> None:
    header = RowsHeader("r", 1, 2, 3, "float32")
    assert decode_header(encode_header(header)) == header
