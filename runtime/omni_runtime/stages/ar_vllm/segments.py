"""Text that arrives token by token -> phrases that can be spoken. Pure.

A phrase ends at punctuation that is followed by white space, so that "3.14" and "e.g." inside a word stay whole. The
first phrase may be short (it decides TTFP); later ones are longer, because longer phrases sound better.
"""

from __future__ import annotations

import re

FIRST_MIN_CHARS = 12
CLAUSE_MIN_CHARS = 40  # for a comma, colon or semicolon after the first phrase
SENTENCE_MIN_CHARS = 12
MAX_CHARS = 280  # then the last space ends the phrase

_SENTENCE_END = re.compile(r"[.!?…]+[\"'”’)\]*_]*(?=\s)|\n+")
_CLAUSE_END = re.compile(r"[,;:—]+[\"'”’)\]*_]*(?=\s)")
_LIST_NUMBER = re.compile(r"(?:^|\n)\s*\d{1,3}\.$")
_ABBREVIATION = re.compile(r"\b(?:Mr|Mrs|Ms|Dr|Prof|St|vs|etc|e\.g|i\.e|No|[A-Z])\.$")

_FENCE = re.compile(r"^\s*(```|~~~).*$", re.MULTILINE)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_BARE_URL = re.compile(r"https?://\S+")
_HEADING = re.compile(r"^\s{0,3}#{1,6}\s+", re.MULTILINE)
_BULLET = re.compile(r"^\s*(?:[-*+•]|>)\s+", re.MULTILINE)
_NUMBERED = re.compile(r"^\s*(\d{1,3})[.)]\s+", re.MULTILINE)
_EMPHASIS = re.compile(r"\*\*|__|[*`~]|(?<!\w)_|_(?!\w)")
_RULE = re.compile(r"^\s*([-*_]\s*){3,}$", re.MULTILINE)
_TABLE = re.compile(r"\s*\|\s*")
_SPACES = re.compile(r"\s+")
_SPEAKABLE = re.compile(r"\w")


def speakable(text: str) -> str:
    """What a voice should say of a piece of Markdown; empty if there is nothing to say."""
    text = _FENCE.sub("", text)
    text = _RULE.sub("", text)
    text = _LINK.sub(r"\1", text)
    text = _BARE_URL.sub("", text)
    text = _HEADING.sub("", text)
    text = _BULLET.sub("", text)
    text = _NUMBERED.sub(r"\1, ", text)
    text = _EMPHASIS.sub("", text)
    text = _TABLE.sub(", ", text) if "|" in text else text
    text = _SPACES.sub(" ", text).strip(" ,")
    return text if _SPEAKABLE.search(text) else ""


class SpeechSegmenter:
    """Feed text deltas, get speakable phrases in order; `flush` gives the rest, so no last word is lost (R19, R23).

    clauses False: only whole sentences end a phrase, and lines.
    """

    def __init__(self, clauses: bool = True) -> None:
        self._clauses = clauses
        self._buffer = ""
        self._first = True

    def push(self, delta: str) -> list[str]:
        self._buffer += delta
        phrases: list[str] = []
        while (end := self._boundary()) is not None:
            self._take(end, phrases)
        return phrases

    def flush(self) -> list[str]:
        phrases: list[str] = []
        self._take(len(self._buffer), phrases)
        return phrases

    def _take(self, end: int, phrases: list[str]) -> None:
        piece, self._buffer = self._buffer[:end], self._buffer[end:]
        if phrase := speakable(piece):
            phrases.append(phrase)
            self._first = False

    def _boundary(self) -> int | None:
        text = self._buffer
        ends = [m.end() for m in _SENTENCE_END.finditer(text) if self._ends_sentence(text, m)]
        clause_min = FIRST_MIN_CHARS if self._first else CLAUSE_MIN_CHARS
        if self._clauses:
            ends += [m.end() for m in _CLAUSE_END.finditer(text) if len(text[: m.end()].strip()) >= clause_min]
        if ends:
            return min(ends)
        if len(text) > MAX_CHARS:
            space = text.rfind(" ", 0, MAX_CHARS)
            return space if space > 0 else MAX_CHARS
        return None

    def _ends_sentence(self, text: str, match: re.Match[str]) -> bool:
        before = text[: match.end()]
        if _LIST_NUMBER.search(before) or _ABBREVIATION.search(before):
            return False
        minimum = FIRST_MIN_CHARS if self._first else SENTENCE_MIN_CHARS
        return len(before.strip()) >= minimum
