"""Who is at the other end of a TCP connection between sidecars, and the keys of that connection. Sans-io.

The pipeline's CURVE keys are X25519 keys. A triple Diffie-Hellman (ephemeral-ephemeral, ephemeral-static each way, as in
X3DH) proves both key pairs and gives forward secrecy; each side confirms with a tag over the transcript before anything
else is read. Three messages of fixed length, so a stranger can make us read 80 bytes and no more.

ZeroMQ's CURVE does the same for the control channels; here it would keep the bytes in buffers of its own, while an
AES-GCM pass of ours is also the copy out of one arena and into the other.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from zmq.utils import z85

from omni_runtime.protocol.channels import CurveKeys

LINK: Final = b"omni-edge-link-1"  # from sidecar to sidecar
LINE: Final = b"omni-edge-line-1"  # made by two sidecars for an engine at either end (`far_lines`)
KEY_BYTES: Final = 32
TAG_BYTES: Final = 16
HELLO_BYTES: Final = len(LINK) + 2 * KEY_BYTES
ANSWER_BYTES: Final = KEY_BYTES + TAG_BYTES
CONFIRM_BYTES: Final = TAG_BYTES
REFUSAL: Final = b"\x00" * ANSWER_BYTES  # "not your key": a hint for the reason, no secret depends on it


class HandshakeRefused(Exception):
    """The other side does not hold the pipeline's keys, or says that we do not."""


@dataclass(frozen=True, slots=True)
class Secrets:
    """AES-256-GCM keys of one connection; the counter of each direction goes on at 1."""

    send_key: bytes = field(repr=False)
    receive_key: bytes = field(repr=False)
    send: AESGCM = field(init=False, repr=False)
    receive: AESGCM = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "send", AESGCM(self.send_key))
        object.__setattr__(self, "receive", AESGCM(self.receive_key))


def nonce(counter: int) -> bytes:
    return counter.to_bytes(12, "little")


def _raw(key: bytes) -> bytes:
    return bytes(z85.decode(key))


def _keys(purpose: bytes, transcript: bytes, *shared: bytes) -> tuple[bytes, bytes]:
    """(of the dialler, of the listener)."""
    salt = hashlib.sha256(transcript).digest()
    material = HKDF(SHA256(), 2 * KEY_BYTES, salt, purpose).derive(b"".join(shared))
    return material[:KEY_BYTES], material[KEY_BYTES:]


def _check(secrets: Secrets, tag: bytes, transcript: bytes, who: str) -> None:
    try:
        secrets.receive.decrypt(nonce(0), tag, transcript)
    except InvalidTag:
        raise HandshakeRefused(f"{who} does not hold the pipeline's CURVE keys") from None


def _public(key: X25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def _exchange(private: X25519PrivateKey, public: bytes) -> bytes:
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:  # a point of small order
        raise HandshakeRefused("the other side sent a key that is none") from error


class Dialler:
    """hello -> (answer) -> confirm."""

    def __init__(self, keys: CurveKeys, purpose: bytes = LINK) -> None:
        self._purpose = purpose
        self._server = _raw(keys.server_public)
        self._static = X25519PrivateKey.from_private_bytes(_raw(keys.client_secret))
        self._ephemeral = X25519PrivateKey.generate()
        self.hello = purpose + _public(self._ephemeral) + _raw(keys.client_public)

    def confirm(self, answer: bytes) -> tuple[bytes, Secrets]:
        """(what to send, the keys). Raises HandshakeRefused."""
        if answer == REFUSAL:
            raise HandshakeRefused("the producer's sidecar refused our CURVE key")
        theirs, tag = answer[:KEY_BYTES], answer[KEY_BYTES:]
        transcript = self.hello + theirs
        mine, other = _keys(
            self._purpose,
            transcript,
            _exchange(self._ephemeral, theirs),
            _exchange(self._ephemeral, self._server),
            _exchange(self._static, theirs),
        )
        secrets = Secrets(mine, other)
        _check(secrets, tag, transcript, "the producer's sidecar")
        return secrets.send.encrypt(nonce(0), b"", transcript), secrets


class Listener:
    """(hello) -> answer -> (confirm)."""

    def __init__(self, keys: CurveKeys) -> None:
        self._client = _raw(keys.client_public)
        self._static = X25519PrivateKey.from_private_bytes(_raw(keys.server_secret))
        self.purpose = b""  # of the connection, once the hello has been read
        self._transcript = b""
        self._secrets: Secrets | None = None

    def answer(self, hello: bytes) -> bytes:
        """Raises HandshakeRefused for any other client key than the pipeline's; send REFUSAL then."""
        purpose, theirs, static = hello[: len(LINK)], hello[len(LINK) : -KEY_BYTES], hello[-KEY_BYTES:]
        if purpose not in (LINK, LINE) or not hmac.compare_digest(static, self._client):
            raise HandshakeRefused("the dialler does not hold the pipeline's CURVE keys")
        ephemeral = X25519PrivateKey.generate()
        public = _public(ephemeral)
        self.purpose = purpose
        self._transcript = hello + public
        other, mine = _keys(
            purpose,
            self._transcript,
            _exchange(ephemeral, theirs),
            _exchange(self._static, theirs),
            _exchange(ephemeral, static),
        )
        self._secrets = Secrets(mine, other)
        return public + self._secrets.send.encrypt(nonce(0), b"", self._transcript)

    def accept(self, confirm: bytes) -> Secrets:
        """Raises HandshakeRefused if the dialler has shown the public key without holding the secret one."""
        assert self._secrets is not None
        _check(self._secrets, confirm, self._transcript, "the dialler")
        return self._secrets
