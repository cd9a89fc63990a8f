"""`omni models`: model folders that come with the distribution."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from omni_runtime.errors import OmniError
from omni_runtime.models import catalogue

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Packaged models: list them, prepare them once.")

Target = Annotated[
    Path | None, typer.Option("--target", help="Folder that holds one folder per model.", show_default="<cache>/models")
]


@app.command("list")
def list_models(target: Target = None) -> None:
    """Names, topologies, and whether each is prepared."""
    root = target or catalogue.default_models_dir()
    for model in catalogue.PACKAGED:
        state = "prepared" if catalogue.is_prepared(model.name, root) else "not prepared"
        typer.echo(f"{model.name:<18} {model.topology:<16} {state:<13} {model.description}")
    typer.echo(f"folder: {root}")


@app.command("prepare")
def prepare_models(
    names: Annotated[list[str] | None, typer.Argument(help="Model names.", show_default="all")] = None,
    target: Target = None,
    force: Annotated[bool, typer.Option("--force", help="Build again even if it is there.")] = False,
) -> None:
    """Build the packaged models that are not there yet."""
    root = target or catalogue.default_models_dir()
    started = time.monotonic()

    def report(line: str) -> None:
        typer.echo(f"[{time.monotonic() - started:5.1f} s] {line}")

    try:
        for name in names or [m.name for m in catalogue.PACKAGED]:
            catalogue.prepare(name, root, report, force=force)
    except OmniError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error
