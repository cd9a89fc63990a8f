"""Imports images into a node's containerd, in the namespace that kubelet reads."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from omni_cluster.errors import StepFailed
from omni_cluster.images import SOURCE_LABEL, Source, write_filtered


@dataclass(frozen=True, slots=True)
class StoredImage:
    """An image that a node has."""

    name: str
    digest: str
    source: str


def parse_images(listing: str) -> dict[str, StoredImage]:
    """Rows of `ctr images ls` by name: REF TYPE DIGEST SIZE UNIT PLATFORMS LABELS."""
    found = {}
    for line in listing.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 4:
            continue
        labels = dict(pair.partition("=")[::2] for pair in fields[-1].split(","))
        found[fields[0]] = StoredImage(fields[0], fields[2], labels.get(SOURCE_LABEL, ""))
    return found


@dataclass(frozen=True, slots=True)
class ImageStore:
    """containerd of one node."""

    ctr: Path
    socket: Path

    def images(self) -> dict[str, StoredImage]:
        return parse_images(self._run("images", "ls"))

    def has(self, name: str, identity: str) -> bool:
        """Whether the node has this name with this content."""
        stored = self.images().get(name)
        return stored is not None and identity in (stored.digest, stored.source)

    def load(self, source: Source, identity: str) -> int:
        """Import; returns the bytes that did not have to be sent. `identity` lets the next load be skipped."""
        present = set(self._run("content", "ls", "-q").split())
        argv = [*self._base(), "images", "import", "--digests=false", "-"]
        child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert child.stdin is not None
        assert child.stdout is not None
        left_out = 0
        try:
            left_out = write_filtered(source, present, child.stdin)
            child.stdin.close()
        except BrokenPipeError:
            pass  # ctr has given up; its message says why
        said = child.stdout.read().decode(errors="replace")
        if child.wait() != 0:
            raise StepFailed(f"import of {source.name} failed: {said.strip()[-600:]}")
        if source.stored_as and source.stored_as != source.name:
            self._run("images", "tag", "--force", source.stored_as, source.name)
        self._run("images", "label", source.name, f"{SOURCE_LABEL}={identity}")
        return left_out

    def _base(self) -> list[str]:
        return [str(self.ctr), "--address", str(self.socket), "--namespace", "k8s.io"]

    def _run(self, *argv: str) -> str:
        done = subprocess.run([*self._base(), *argv], capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            raise StepFailed(f"ctr {' '.join(argv)} failed: {done.stderr.strip()[-400:]}")
        return done.stdout
