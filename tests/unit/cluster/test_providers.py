"""Which provider a cluster comes from, and what `up` makes of flags and an earlier state."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_cluster.errors import InvalidArgument, MissingPrerequisite
from omni_cluster.providers import choose
from omni_cluster.providers.base import Availability, UpRequest
from omni_cluster.providers.existing import first_line, kubeconfig_path, minify
from omni_cluster.providers.local import plan_state, refuse_mounts
from omni_cluster.state import ClusterState, ProviderName

EXISTING, KIND, LOCAL = ProviderName.EXISTING, ProviderName.KIND, ProviderName.LOCAL


def only(*usable: ProviderName):
    return lambda name: Availability(name in usable, f"{name} because")


def a_cluster(**changes: object) -> ClusterState:
    values: dict[str, object] = {"name": "omni", "provider": LOCAL, "kubeconfig": "/k", "reason": "once", "nodes": 2}
    return ClusterState(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("usable", "expected"),
    [
        pytest.param((EXISTING, KIND, LOCAL), EXISTING, id="a kubeconfig that answers wins"),
        pytest.param((KIND, LOCAL), KIND, id="then a Docker engine that answers"),
        pytest.param((LOCAL,), LOCAL, id="then our own node"),
    ],
)
def test_auto_takes_the_first_usable_and_says_why_not_the_others(usable, expected):
    name, reason = choose("auto", UpRequest("omni"), None, only(*usable))
    assert name is expected
    assert reason.startswith(f"{expected} because")
    before = list(ProviderName)[: list(ProviderName).index(expected)]
    assert all(f"{other} not used" in reason for other in before)


def test_nothing_usable_names_every_reason():
    with pytest.raises(MissingPrerequisite, match=r"existing because[\s\S]*kind because[\s\S]*local because"):
        choose("auto", UpRequest("omni"), None, only())


def test_a_cluster_keeps_its_provider():
    """A second `up` must not take our own kubeconfig for somebody's existing cluster."""
    assert choose("auto", UpRequest("omni"), a_cluster(), only(EXISTING)) == (LOCAL, "once")


def test_another_provider_for_a_cluster_is_refused():
    with pytest.raises(
        InvalidArgument, match="--provider: 'kind' but cluster 'omni' comes from local; use another --name"
    ):
        choose("kind", UpRequest("omni"), a_cluster(), only(KIND))


def test_unknown_provider_is_refused():
    with pytest.raises(InvalidArgument, match="use auto, existing, kind or local"):
        choose("minikube", UpRequest("omni"), None, only(LOCAL))


def test_control_plane_only_is_always_our_own():
    assert choose("auto", UpRequest("t", control_plane_only=True), None, only(EXISTING))[0] is LOCAL


@pytest.mark.parametrize(
    ("request_", "old", "nodes", "kwok"),
    [
        pytest.param(UpRequest("omni"), None, 1, (), id="new cluster: one node"),
        pytest.param(UpRequest("omni"), a_cluster(), 2, (), id="nothing said: as it was"),
        pytest.param(UpRequest("omni", nodes=1), a_cluster(), 1, (), id="fewer nodes"),
        pytest.param(UpRequest("omni"), a_cluster(kwok_nodes=("a/b=1",)), 2, ("a/b=1",), id="simulated nodes stay"),
        pytest.param(
            UpRequest("omni", kwok_nodes=()), a_cluster(kwok_nodes=("a/b=1",)), 2, (), id="and can be removed"
        ),
        pytest.param(
            UpRequest("omni"), a_cluster(control_plane_only=True, nodes=0), 1, (), id="control plane gets a node"
        ),
    ],
)
def test_what_up_makes_of_the_request(request_, old, nodes, kwok):
    state = plan_state(request_, old, "why")
    assert (state.nodes, state.kwok_nodes, state.control_plane_only) == (nodes, kwok, False)


@pytest.mark.parametrize(
    ("request_", "old"),
    [
        pytest.param(UpRequest("omni", nodes=2, control_plane_only=True), None, id="nodes without nodes"),
        pytest.param(UpRequest("omni", control_plane_only=True), a_cluster(), id="would orphan the nodes"),
        pytest.param(
            UpRequest("omni", kwok_nodes=("nonsense",)), None, id="bad class is refused before anything starts"
        ),
        pytest.param(UpRequest("Not_A_Name"), None, id="name"),
    ],
)
def test_contradictions_are_refused(request_, old):
    with pytest.raises(InvalidArgument):
        plan_state(request_, old, "why")


def test_our_own_kubeconfig_is_not_an_existing_cluster(tmp_path: Path, monkeypatch):
    from omni_cluster.providers.existing import ExistingProvider

    monkeypatch.setenv("OMNI_CACHE", str(tmp_path))
    own = tmp_path / "clusters" / "omni" / "kubeconfig"
    own.parent.mkdir(parents=True)
    own.write_text("{}")
    monkeypatch.setenv("KUBECONFIG", str(own))
    found = ExistingProvider().availability()
    assert not found.usable
    assert "belongs to a cluster of this tool" in found.reason


def test_first_existing_file_of_kubeconfig_counts(tmp_path: Path, monkeypatch):
    second = tmp_path / "b"
    second.write_text("{}")
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path / 'a'}:{second}")
    assert kubeconfig_path() == second


def test_minified_kubeconfig_keeps_the_current_context_only(tmp_path: Path):
    config = {
        "current-context": "b",
        "contexts": [
            {"name": "a", "context": {"cluster": "a", "user": "a"}},
            {"name": "b", "context": {"cluster": "b", "user": "b"}},
        ],
        "clusters": [
            {"name": "a", "cluster": {}},
            {"name": "b", "cluster": {"server": "https://b", "certificate-authority": "ca.crt"}},
        ],
        "users": [{"name": "b", "user": {"client-key": "/abs/key", "token": "t"}}],
    }
    found = minify(config, tmp_path)
    assert found["contexts"] == [config["contexts"][1]]
    assert found["clusters"][0]["cluster"]["certificate-authority"] == str(tmp_path / "ca.crt")
    assert found["users"][0]["user"] == {"client-key": "/abs/key", "token": "t"}


def test_errors_without_text_still_say_something():
    assert first_line(TimeoutError()) == "TimeoutError"
    assert first_line(ValueError("\n  a \n b")) == "a"


def test_never_deletes_through_a_mount():
    info = "1 2 3:4 / /cache/clusters/omni/nodes/n1/x\\040y rw - ext4 /dev/vda rw\n"
    from omni_cluster.errors import ClusterError

    with pytest.raises(ClusterError, match="still mounted at /cache/clusters/omni/nodes/n1/x y"):
        refuse_mounts(Path("/cache/clusters/omni"), info)
    refuse_mounts(Path("/cache/clusters/omn"), info)
