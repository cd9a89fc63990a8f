"""Certificates of the webhook server: `keys` (cryptography), `state` (pure: what a rotation does next), `rotation` (I/O)."""
