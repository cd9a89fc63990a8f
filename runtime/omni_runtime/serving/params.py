"""What a request asks of its stages: the value behind `Submit.params`. Torch-free.

The entry validates a client's request once and builds one `StageParams`; every stage gets the same value as a plain
map (`as_map`) and reads the fields that concern it with `from_map`. A stage ignores fields that it does not know, so
that an entry and a stage of neighbouring versions can talk.

| field | read by | meaning |
|---|---|---|
| modalities | all | what the client wants: "text", "audio" |
| temperature, top_p, top_k | stages that sample (thinker; talker has its own defaults) | 0 = greedy; top_p 1.0 and top_k 0 = off |
| max_tokens | thinker | None: as many as the model's length allows |
| stop | thinker | strings that end the text; not part of the answer |
| seed | all that sample | None: not reproducible |
| ignore_eos | thinker, talker | go on to max_tokens (benchmarks, exactness tests) |
| voice | talker | None: the model's default; an unknown one is InvalidRequest, never a path (R58) |
| talker_max_tokens | talker | upper bound of codec frames |
| talker_temperature | talker | None: the model's default; 0 = greedy |
| speed | talker of smol_omni | 1.0 = as the stage is set; others refuse it at the entry |
| return_token_ids | thinker | fill `ClientText.token_ids` |

`Submit.inputs` is for the stage that takes the client's input, and is one of these:

{"messages": [...]}: OpenAI messages whose content is a string or a list of parts {"type": "text", "text": str} |
{"type": "audio", "data": bytes, "format": str} | {"type": "image" or "video", "data": bytes, "media_type": str}. Media are
decoded from base64 or fetched, and limited in size here, but not parsed: that is the thinker's work.
{"text": str, "finished": bool}: plain text, of which more may follow.
{"prompt": str or [token ids]}: text that the thinker goes on from, without a chat template.
{"tokenize": {"text", "add_special_tokens"} or {"messages"}}: answered with `ClientText.token_ids` alone.
{"detokenize": [token ids]}: answered with their text alone.
"""

from __future__ import annotations

from typing import Any

import msgspec

DEFAULT_TEMPERATURE = 0.0


class StageParams(msgspec.Struct, frozen=True, kw_only=True):
    modalities: tuple[str, ...] = ("text",)
    temperature: float = DEFAULT_TEMPERATURE
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False
    voice: str | None = None
    talker_max_tokens: int | None = None
    talker_temperature: float | None = None
    speed: float = 1.0
    return_token_ids: bool = False

    def as_map(self) -> dict[str, Any]:
        """Plain values for `Submit.params`."""
        return {name: getattr(self, name) for name in self.__struct_fields__}


def from_map(params: dict[str, Any]) -> StageParams:
    """Read `Submit.params`. Raises msgspec.ValidationError if a known field has the wrong type."""
    return msgspec.convert(params, StageParams)
