"""Reading files: what is wrong is said with the place, because no API server looks at these files first."""

from __future__ import annotations

from pathlib import Path

import pytest

from omni_runtime.deploy.load import load_pipeline, load_profiles, local_profiles
from omni_runtime.deploy.resolve import resolve
from omni_runtime.errors import InvalidPipeline

HEAD = "apiVersion: serving.omni.dev/v1alpha1\nkind: OmniPipeline\n"
SPEC = 'spec: {model: {uri: "packaged://smol-omni"}, topology: smol_omni}\n'
GOOD = HEAD + "metadata: {name: one}\n" + SPEC


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "x.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_finds_the_pipeline_among_other_objects(tmp_path: Path) -> None:
    path = written(tmp_path, f"---\n---\nkind: ConfigMap\napiVersion: v1\n---\n{GOOD}")
    pipeline = load_pipeline(path)
    assert pipeline.metadata.name == "one"
    assert resolve(pipeline, local_profiles(), target="local", default_profile="cpu").pipeline == "one"


def test_one_of_several_is_picked_by_name(tmp_path: Path) -> None:
    path = written(tmp_path, f"{GOOD}---\n{GOOD.replace('one', 'two')}")
    assert load_pipeline(path, "two").metadata.name == "two"
    with pytest.raises(InvalidPipeline, match="several OmniPipelines; name the one to use"):
        load_pipeline(path)
    with pytest.raises(InvalidPipeline, match="it has: one, two"):
        load_pipeline(path, "three")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        pytest.param("", "no OmniPipeline", id="empty"),
        pytest.param("a: [", "not valid YAML", id="broken"),
        pytest.param("a: 1\na: 2", "'a' stands twice", id="duplicate key"),
        pytest.param("- a", "not a Kubernetes object", id="a list"),
        pytest.param(b"\xff\xfe", "not UTF-8", id="binary"),
        pytest.param("!!python/object/apply:os.system [true]", "not valid YAML", id="code"),
        pytest.param(GOOD.replace("v1alpha1", "v1"), "use serving.omni.dev/v1alpha1", id="version"),
        pytest.param(HEAD + SPEC, "metadata.name: the object has no name", id="no name"),
        pytest.param(GOOD.replace("topology:", "topolgy:"), "spec.topolgy: unknown field", id="misspelt field"),
        pytest.param(GOOD.replace("topology:", "topolgy:"), "spec.topology", id="and the one that is missing"),
        pytest.param(
            GOOD.replace("smol_omni}", "smol_omni, stages: [{name: talker, replica: 2}]}"),
            "spec.stages[0].replica: unknown field; known fields here: accelerator",
            id="misspelt field in a list",
        ),
        pytest.param(GOOD.replace("smol_omni}", "5}"), "spec.topology: '5'", id="type"),
        pytest.param(HEAD + "metadata: {name: ../../up}\n" + SPEC, "'../../up': not a name", id="a path as name"),
        pytest.param(HEAD + f"metadata: {{name: {'a' * 300}}}\n" + SPEC, "not a name", id="a name too long"),
        pytest.param(HEAD + "metadata: {name: a}\nspec: *nobody", "alias", id="an alias of nothing"),
        pytest.param(HEAD + "metadata: {name: a}\nspec: []", "spec", id="spec of another type"),
        pytest.param(HEAD + "metadata: []\n" + SPEC, "metadata", id="metadata of another type"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, text: str | bytes, says: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(InvalidPipeline) as caught:
        load_pipeline(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)


def _bomb(levels: int) -> str:
    nested = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, levels)]
    return "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(nested) + HEAD


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(_bomb(10) + "metadata: {name: *a9}\n" + SPEC, id="in the name"),
        pytest.param(_bomb(10) + "metadata: {name: a}\nspec: {stages: *a9}\n", id="in the spec"),
        pytest.param(HEAD + "metadata: {name: a}\nspec: &s {stages: [*s]}\n", id="an alias of itself"),
    ],
)
@pytest.mark.timeout(60)
def test_aliases_that_make_billions_of_values(tmp_path: Path, text: str) -> None:
    """Printing one of them for the message would take more memory than there is."""
    with pytest.raises(InvalidPipeline, match="aliases .* make more than"):
        load_pipeline(written(tmp_path, text))


def test_a_few_aliases_are_fine(tmp_path: Path) -> None:
    assert load_pipeline(written(tmp_path, _bomb(3) + "metadata: {name: a}\n" + SPEC)).metadata.name == "a"


def test_missing_and_huge_files(tmp_path: Path) -> None:
    with pytest.raises(InvalidPipeline, match="No such file"):
        load_pipeline(tmp_path / "gone.yaml")
    with pytest.raises(InvalidPipeline, match="larger than 4 MiB"):
        load_pipeline(written(tmp_path, b" " * (5 << 20)))


def test_profiles_by_name(tmp_path: Path) -> None:
    text = """
apiVersion: serving.omni.dev/v1alpha1
kind: OmniRuntimeProfile
metadata: {name: NAME}
spec: {vendor: cpu, images: {runtime: x}, deviceClasses: [{name: cpu, memory: 1Gi}]}
"""
    path = written(tmp_path, text.replace("NAME", "a") + "---" + text.replace("NAME", "b"))
    assert sorted(load_profiles(path)) == ["a", "b"]
    indented = text.strip().replace("NAME", "c").replace("\n", "\n  ")
    assert sorted(load_profiles(written(tmp_path, f"apiVersion: v1\nkind: List\nitems:\n- {indented}"))) == ["c"]
    with pytest.raises(InvalidPipeline, match="no OmniRuntimeProfile"):
        load_profiles(written(tmp_path, GOOD))
