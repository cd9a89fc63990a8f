"""`omni cluster ...`: the commands. What they do is in providers/; this file reads flags and prints."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from omni_cluster import providers
from omni_cluster.errors import ClusterError
from omni_cluster.paths import current_bin_dir
from omni_cluster.progress import say
from omni_cluster.providers.base import ComponentStatus, UpRequest
from omni_cluster.providers.local import fail_node
from omni_cluster.state import exclusive, load_state

app = typer.Typer(
    name="cluster",
    help="Kubernetes clusters for development: an existing one, kind, or our own nodes on this machine.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # brackets in help texts are brackets
)
Name = Annotated[str, typer.Option("--name", help="Name of the cluster.", envvar="OMNI_CLUSTER_NAME")]


@contextmanager
def _errors_for_people() -> Iterator[None]:
    """Our own errors say all that helps; a stack trace would bury it."""
    try:
        yield
    except ClusterError as error:
        say(f"error: {error}")
        raise typer.Exit(1) from error


@app.command()
def up(
    name: Name = "omni",
    provider: Annotated[str, typer.Option(help="auto, existing, kind or local.")] = "auto",
    nodes: Annotated[int | None, typer.Option(help="Real nodes (local, kind).", min=1, max=16)] = None,
    control_plane_only: Annotated[
        bool, typer.Option("--control-plane-only", help="etcd, API server and controllers; no node, no root needed.")
    ] = False,
    kwok_nodes: Annotated[
        list[str] | None,
        typer.Option(
            help="Simulated accelerator nodes: RESOURCE=COUNT[xDEVICES], e.g. nvidia.com/gpu=4x8; a YAML file; or none."
        ),
    ] = None,
) -> None:
    """Bring the cluster up, or repair it. Quick and without effect when it already is as asked for."""
    request = UpRequest(name, nodes, control_plane_only, _classes(kwok_nodes))
    with _errors_for_people(), exclusive(name):
        state = providers.up(request, provider)
        say(f"cluster {state.name!r} is up ({state.provider}); kubeconfig: {state.kubeconfig}")
        say(f'use it: eval "$(omni cluster env --name {state.name})"')


@app.command()
def down(name: Name = "omni") -> None:
    """Remove the cluster: processes, mounts, interfaces, control groups and files. Never touches an existing one."""
    with _errors_for_people(), exclusive(name):
        providers.down(name)


@app.command()
def status(name: Name = "omni") -> None:
    """Show every component, whether it is healthy, and its log. Exit status 1 when something is not healthy."""
    with _errors_for_people():
        state = load_state(name)
        found = providers.of(state).status(state)
        print(f"cluster {state.name}: provider {state.provider}, {state.reason}\nkubeconfig {state.kubeconfig}\n")
        print(render_status(found))
    if any(item.problem for item in found):
        raise typer.Exit(1)


@app.command()
def kubeconfig(
    name: Name = "omni", raw: Annotated[bool, typer.Option("--raw", help="Print the content, not the path.")] = False
) -> None:
    """Print the path of the kubeconfig."""
    with _errors_for_people():
        path = Path(load_state(name).kubeconfig)
        sys.stdout.write(path.read_text() if raw else f"{path}\n")


@app.command()
def load(
    image: Annotated[str, typer.Argument(help="Archive (OCI or docker), OCI layout folder, or buildah image.")],
    name: Name = "omni",
    name_as: Annotated[str | None, typer.Option("--as", help="Name of the image in the cluster.")] = None,
) -> None:
    """Put an image into every node. Layers and images that a node already has are not sent again."""
    with _errors_for_people(), exclusive(name):
        state = load_state(name)
        providers.of(state).load(state, image, name_as)


@app.command()
def fail(
    node: Annotated[str, typer.Argument(help="Node, e.g. n2.")],
    name: Name = "omni",
    how: Annotated[
        str, typer.Option(help="stop: the machine is gone; cut: it runs on, but nothing reaches it.")
    ] = "stop",
) -> None:
    """Make a node fail, to see what then happens (local provider). `up` brings it back."""
    with _errors_for_people(), exclusive(name):
        fail_node(load_state(name), node, how)


@app.command()
def env(name: Name = "omni") -> None:
    """Print shell exports of PATH and KUBECONFIG: eval "$(omni cluster env)"."""
    with _errors_for_people():
        state = load_state(name)
        print(f'export KUBECONFIG="{state.kubeconfig}"')
        print(f'export PATH="{current_bin_dir()}:$PATH"')


def _classes(texts: list[str] | None) -> tuple[str, ...] | None:
    """None when the flag was not given (leave the simulated nodes as they are); `none` removes them."""
    return None if texts is None else tuple(text for text in texts if text != "none")


def render_status(items: tuple[ComponentStatus, ...]) -> str:
    """A table with columns wide enough for their content."""
    head = ("COMPONENT", "PID", "HEALTHY", "LOG")
    rows = [
        (item.component, str(item.pid or "-"), f"no: {item.problem}" if item.problem else "yes", item.log or "-")
        for item in items
    ]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(3)]
    return "\n".join("  ".join([*(row[c].ljust(widths[c]) for c in range(3)), row[3]]) for row in [head, *rows])
