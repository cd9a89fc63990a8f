"""Kubeconfig files: ours are self-contained (certificates inside), so that they can be copied anywhere."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from omni_cluster.pki import KeyPair
from omni_cluster.processes import write_atomically


def render_kubeconfig(name: str, server: str, ca: Path, client: KeyPair) -> str:
    """A kubeconfig with one context. JSON is YAML, and needs no quoting rules."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": {"server": server, "certificate-authority-data": _data(ca)}}],
        "users": [
            {
                "name": name,
                "user": {"client-certificate-data": _data(client.cert), "client-key-data": _data(client.key)},
            }
        ],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        "current-context": name,
    }
    return json.dumps(config, indent=2) + "\n"


def write_kubeconfig(path: Path, name: str, server: str, ca: Path, client: KeyPair) -> str:
    """Write it when it differs; returns the content, which is an input of the process that reads it."""
    text = render_kubeconfig(name, server, ca, client)
    if not path.exists() or path.read_text() != text:
        write_atomically(path, text)
    return text


def _data(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
