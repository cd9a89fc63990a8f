"""A folder of the node through which pods of one node reach each other's sidecars (`neighbours`).

Pods of all pipelines of a profile share it. It cannot be listed (mode 1733), and the name of a sidecar's own folder in it
follows from the pipeline's key, so that only those who hold the key find it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from omni_runtime.protocol.channels import CurveKeys


@dataclass(frozen=True, slots=True)
class NodeFolder:
    """The folder of the node, and the key from which names in it follow."""

    path: Path
    keys: CurveKeys

    def of(self, domain: str) -> Path:
        """Where the sidecar of this pod has its socket."""
        secret = hashlib.blake2b(self.keys.server_secret, person=b"omni-node").digest()
        return self.path / hashlib.blake2b(domain.encode(), key=secret, digest_size=16).hexdigest()
