"""`omni image`: build the images of this checkout and load them into a cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from omni_cluster.errors import ClusterError
from omni_image import build as building
from omni_image import dockerfile, layout, wheelhouse
from omni_image.engines import find_engine
from omni_image.load import load_image
from omni_image.pins import UnpinnedPackage
from omni_image.plan import KINDS, short_name

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Build the images of this checkout; load them.")


class Which(StrEnum):
    OPERATOR = "operator"
    CONNECTOR = "connector"
    CPU = "cpu"
    ALL = "all"

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(KINDS) if self is Which.ALL else (self.value,)


class EngineChoice(StrEnum):
    AUTO = "auto"
    DOCKER = "docker"
    BUILDAH = "buildah"


EngineOption = Annotated[EngineChoice, typer.Option("--engine", help="Docker where its daemon answers, else Buildah.")]
BaseOption = Annotated[
    str | None, typer.Option("--base", help="Base image.", show_default="Debian, made here by debootstrap")
]


@contextmanager
def plain_errors() -> Iterator[None]:
    """What the user can act on is one text, not a traceback."""
    try:
        yield
    except (ClusterError, UnpinnedPackage, layout.NoSuchImage) as error:
        typer.echo(f"omni image: {error}", err=True)
        raise typer.Exit(1) from error


@app.command()
def build(
    which: Annotated[Which, typer.Argument(help="Which image.")] = Which.ALL,
    load: Annotated[bool, typer.Option("--load", help="Load the result into the cluster as well.")] = False,
    cluster: Annotated[str, typer.Option("--cluster", help="Name of the cluster to load into.")] = "omni",
    base: BaseOption = None,
    engine: EngineOption = EngineChoice.AUTO,
) -> None:
    """Build what changed. Prints the names, one a line."""
    with plain_errors():
        chosen = find_engine(engine.value)
        for result in building.build_images(which.kinds, chosen, base):
            if load:
                load_image(chosen, result.name, cluster)
            typer.echo(f"{result.name}  {result.size / 1e6:.0f} MB")


@app.command("list")
def list_images(
    as_json: Annotated[bool, typer.Option("--json", help="For scripts: kind -> name.")] = False,
    base: BaseOption = None,
) -> None:
    """Names that the images of this checkout have, built or not."""
    with plain_errors():
        names = {name: short_name(building.plan(kind, base).image) for name, kind in KINDS.items()}
    if as_json:
        typer.echo(json.dumps(names))
    else:
        for name, image in names.items():
            typer.echo(f"{name:<10} {image}")


@app.command()
def values(base: BaseOption = None) -> None:
    """Values that make the Helm chart use the images of this checkout."""
    with plain_errors():
        names = {name: short_name(building.plan(kind, base).image) for name, kind in KINDS.items()}
    # JSON is YAML. IfNotPresent: the images are loaded into the nodes, and no registry has them.
    typer.echo(json.dumps({"images": {**names, "pullPolicy": "IfNotPresent"}}))


@app.command()
def save(
    which: Annotated[Which, typer.Argument(help="operator, connector or cpu.")],
    archive: Annotated[Path, typer.Argument(help="File to write: an OCI archive, for skopeo or another machine.")],
) -> None:
    """Write a built image to a file (images that Buildah built; with Docker use `docker save`)."""
    if len(which.kinds) != 1:
        raise typer.BadParameter("one image a file: operator, connector or cpu", param_hint="WHICH")
    with plain_errors():
        image = building.plan(KINDS[which.kinds[0]]).image
        size = layout.write_archive(building.images_dir() / "layout", image, archive)
    typer.echo(f"{short_name(image)}  {size / 1e6:.0f} MB  {archive}")


@app.command("wheelhouse")
def make_wheelhouse(
    extra: Annotated[str, typer.Argument(help="What pyproject.toml names so: operator, connector, runtime or cpu.")],
    folder: Annotated[Path, typer.Argument(help="Folder for the wheels; named wheelhouse/ in the build context.")],
    python: Annotated[
        str, typer.Option("--python", help="Python of the base image; GPU images often have 3.12.")
    ] = "3.11",
) -> None:
    """Download the wheels of an image, for builds without a package index."""
    with plain_errors():
        count = wheelhouse.download(extra, folder, python)
    typer.echo(f"{count} wheels in {folder}")


@app.command()
def prune() -> None:
    """Delete images and layers that this checkout does not use."""
    with plain_errors():
        freed = building.prune()
    typer.echo(f"{freed / 1e9:.2f} GB freed")


@app.command()
def lint(
    files: Annotated[
        list[Path] | None, typer.Argument(help="Dockerfiles.", show_default="all of runtime_image/")
    ] = None,
) -> None:
    """Check Dockerfiles against the rules for images that run in a restricted namespace."""
    found = 0
    for path in files or sorted((building.ROOT / "runtime_image").glob("Dockerfile.*")):
        for finding in dockerfile.lint(dockerfile.parse(path.read_text())):
            found += 1
            typer.echo(f"{path}:{finding.line}: {finding.rule}: {finding.problem}; {finding.fix}")
    if found:
        raise typer.Exit(1)
