"""What is remembered between commands, and who may change it at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from omni_cluster import hostsettings
from omni_cluster.errors import ClusterError, InvalidArgument, NoSuchCluster
from omni_cluster.providers.local import fail_node
from omni_cluster.state import ClusterState, ProviderName, all_states, exclusive, find_state, load_state, save_state

STATE = ClusterState("omni", ProviderName.LOCAL, "/k", "why", 3, 2, False, ("nvidia.com/gpu=1",))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OMNI_CACHE", str(tmp_path))
    return tmp_path


def test_round_trip():
    save_state(STATE)
    assert load_state("omni") == STATE
    assert all_states() == (STATE,)


def test_none_is_told_from_unreadable(cache: Path):
    assert find_state("omni") is None
    with pytest.raises(NoSuchCluster, match="omni cluster up --name omni"):
        load_state("omni")
    save_state(STATE)
    (cache / "clusters" / "omni" / "cluster.json").write_text("{")
    with pytest.raises(ClusterError, match="omni cluster down --name omni"):
        find_state("omni")
    assert all_states() == ()


def test_fields_of_a_later_version_are_ignored(cache: Path):
    save_state(STATE)
    path = cache / "clusters" / "omni" / "cluster.json"
    path.write_text(path.read_text().replace('"name"', '"later": 1, "name"'))
    assert load_state("omni") == STATE


def test_a_lock_dies_with_its_holder():
    """`kill -9` of a command must not lock the next one out."""
    code = "import os,signal; from omni_cluster.state import exclusive\nwith exclusive('omni'): os.kill(os.getpid(), signal.SIGKILL)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == -9
    with exclusive("omni"):
        pass


@pytest.mark.parametrize(
    ("state", "node", "how", "message"),
    [
        (STATE, "n3", "stop", "use one of n1, n2"),
        (STATE, "n1", "melt", "use stop or cut"),
        (ClusterState("omni", ProviderName.KIND, "/k"), "n1", "stop", "the cluster is not local"),
    ],
)
def test_only_nodes_of_our_own_fail_on_purpose(state: ClusterState, node: str, how: str, message: str):
    with pytest.raises(InvalidArgument, match=message):
        fail_node(state, node, how)


def test_made_folders_are_listed_parents_first(tmp_path: Path):
    """Removed in reverse order, each is empty when its turn comes."""
    wanted = (str(tmp_path / "a" / "b"), str(tmp_path / "a" / "c"), str(tmp_path))
    assert hostsettings.missing_folders(wanted) == [str(tmp_path / p) for p in ("a", "a/b", "a/c")]
