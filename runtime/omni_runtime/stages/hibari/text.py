"""Text as hibari's pronunciation rules can read it: they raise for some places of digits that `int` does not take, such
as that of 10⁻⁴, and for numbers beyond decillions."""

from __future__ import annotations

import re
import unicodedata

LONGEST_NUMBER = 24  # digits; longer ones nobody would follow as a number anyway
_NUMBER = re.compile(r"\d[\d,]*")


def speakable(text: str) -> str:
    """Every digit a decimal one, and long numbers digit by digit."""
    return _NUMBER.sub(_short_enough, "".join(map(_decimal, text)))


def _decimal(character: str) -> str:
    if not character.isdigit() or character.isdecimal():
        return character
    return str(unicodedata.digit(character))


def _short_enough(match: re.Match[str]) -> str:
    digits = match[0].replace(",", "")
    return match[0] if len(digits) <= LONGEST_NUMBER else " ".join(digits)
