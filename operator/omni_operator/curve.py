"""CURVE key pairs of a pipeline: X25519 keys in Z85 text, as ZeroMQ reads them. No ZeroMQ needed."""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


def z85_encode(data: bytes) -> str:
    """ZeroMQ RFC 32: 4 bytes become 5 printable characters; len(data) must be a multiple of 4."""
    if len(data) % 4:
        raise ValueError(f"Z85 takes a multiple of 4 bytes, not {len(data)}")
    out: list[str] = []
    for start in range(0, len(data), 4):
        value = int.from_bytes(data[start : start + 4], "big")
        digits = []
        for _ in range(5):
            value, digit = divmod(value, 85)
            digits.append(_Z85[digit])
        out.extend(reversed(digits))
    return "".join(out)


def key_pair() -> tuple[str, str]:
    """(public, secret), 40 characters each."""
    secret = X25519PrivateKey.generate()
    return z85_encode(secret.public_key().public_bytes_raw()), z85_encode(secret.private_bytes_raw())


def key_files() -> dict[str, str]:
    """The files of the Secret: one pair for whoever binds, one for whoever dials."""
    server_public, server_secret = key_pair()
    client_public, client_secret = key_pair()
    return {
        "server.pub": server_public,
        "server.key": server_secret,
        "client.pub": client_public,
        "client.key": client_secret,
    }
