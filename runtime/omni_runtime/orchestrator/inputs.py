"""The text of a client that sends it in pieces: numbered for the stage that reads it, and kept whole. Pure.

Kept, because a request that is still queued has no stage yet, and one that starts anew on another replica needs all of
it again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from omni_runtime.errors import InvalidRequest
from omni_runtime.orchestrator.values import RequestId
from omni_runtime.protocol import control

MAX_TEXT_CHARACTERS = 1_000_000


@dataclass(slots=True)
class TextInput:
    """What came so far. `sent`: pieces that the stage has, the one inside Submit not counted."""

    text: str
    finished: bool
    sent: int = 0

    def append(self, request: RequestId, text: str, finished: bool) -> control.Append:
        """Take one more piece; the message is for the stage, if it has the request already.

        Raises InvalidRequest after the end, or if the text becomes too long.
        """
        if self.finished:
            raise InvalidRequest("input: more text after its end; start another request for it")
        if len(self.text) + len(text) > MAX_TEXT_CHARACTERS:
            raise InvalidRequest(
                f"input: {len(self.text) + len(text)} characters are too many for one request; "
                f"send at most {MAX_TEXT_CHARACTERS}"
            )
        self.text += text
        self.finished = finished
        self.sent += 1
        return control.Append(request, self.sent, text, finished)

    def as_inputs(self) -> dict[str, Any]:
        """`Submit.inputs`: all that came so far. The next piece is number 1 again."""
        self.sent = 0
        return {"text": self.text, "finished": self.finished}


def text_input_of(inputs: dict[str, Any]) -> TextInput | None:
    """None: the call has its whole input (messages). Raises InvalidRequest for text of the wrong kind."""
    if "text" not in inputs:
        return None
    text, finished = inputs["text"], inputs.get("finished", True)
    if not isinstance(text, str) or not isinstance(finished, bool):
        raise InvalidRequest(f"input: {type(text).__name__} is not text; send a string")
    if len(text) > MAX_TEXT_CHARACTERS:
        raise InvalidRequest(
            f"input: {len(text)} characters are too many for one request; send at most {MAX_TEXT_CHARACTERS}"
        )
    return TextInput(text, finished)
