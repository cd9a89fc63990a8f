"""What a process has read of its libraries while it started, and hardly needs any more: out of its resident memory."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Final

# Start, end, resident and private kB of what is read-only and comes from a file, in /proc/self/smaps.
_MAPPING: Final = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) r-[x-]p .*/.+\n(?:.*\n)*?Rss: +(\d+) kB\n(?:.*\n)*?Anonymous: +(\d+) kB$", re.MULTILINE
)
_MADV_DONTNEED: Final = 4


def let_go() -> int:
    """Bytes that left. Mappings that cannot be written and have no page of their own (relocations) are as they are in the
    file, so whoever runs into them again finds them there, at the price of a fault; they stay in the page cache.
    """
    libc, left = ctypes.CDLL(None), 0
    for start, end, resident, private in _MAPPING.findall(Path("/proc/self/smaps").read_text()):
        if private == "0":
            place, length = int(start, 16), int(end, 16) - int(start, 16)
            if not libc.madvise(ctypes.c_void_p(place), ctypes.c_size_t(length), _MADV_DONTNEED):
                left += int(resident) << 10
    return left
