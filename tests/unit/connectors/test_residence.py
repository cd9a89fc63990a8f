"""Pages that leave a sidecar's memory are read again where they are needed: nothing is lost with them."""

from __future__ import annotations

import subprocess
import sys

# In a process of its own: libraries in use, threads that run through them, and relocated data.
PROGRAM = """
import hashlib, json, threading
from pathlib import Path
from omni_runtime.connectors.residence import let_go
import numpy, zmq
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

def resident():
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssFile"].split()[0]) << 10

def work():
    key = AESGCM(bytes(32))
    sealed = key.encrypt(bytes(12), b"x" * 1000, None)
    return hashlib.sha256(sealed + numpy.arange(1000).tobytes() + json.dumps(zmq.zmq_version()).encode()).hexdigest()

expected, over, wrong = work(), threading.Event(), []
threads = [threading.Thread(target=lambda: [wrong.append(1) for _ in iter(over.is_set, True) if work() != expected]) for _ in range(3)]
for thread in threads:
    thread.start()
before = resident()
left = [let_go() for _ in range(50)]
over.set()
for thread in threads:
    thread.join()
assert not wrong and work() == expected
assert left[0] > 1 << 20, left
let_go()
assert resident() < before - (1 << 20), (before, resident())
"""


def test_what_was_read_at_the_start_leaves_and_comes_back() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
