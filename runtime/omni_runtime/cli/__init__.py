"""The `omni` command line. Each sub-command is imported when it is called, so that `omni cluster` needs no ZeroMQ and
`omni --help` answers at once even where only a part of the distribution's extras is installed.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import typer
from typer.main import get_command

from omni_runtime.errors import OmniError


@dataclass(frozen=True, slots=True)
class SubCommand:
    """Where a sub-command lives. `target` is a typer app, or a function that becomes one command."""

    name: str
    module: str
    target: str
    help: str


SUBCOMMANDS: tuple[SubCommand, ...] = (
    SubCommand("run", "omni_runtime.cli.run", "run", "Run a pipeline as local processes, without Kubernetes."),
    SubCommand("chat", "omni_runtime.cli.chat", "chat", "Ask a running pipeline; print the answer, save the speech."),
    SubCommand(
        "plan", "omni_operator.cli.plan", "app", "Resolve a pipeline file: plan, memory, cost, and whether it fits."
    ),
    SubCommand("explain", "omni_operator.cli.scaling", "explain", "Why the stages of a pipeline have their replicas."),
    SubCommand("replay", "omni_operator.cli.scaling", "replay_file", "Recorded scaling decisions, run again."),
    SubCommand("models", "omni_runtime.cli.models", "app", "Packaged models: list them, prepare them once."),
    SubCommand("cluster", "omni_cluster.cli", "app", "A local Kubernetes cluster: up, down, status, kubeconfig, load."),
    SubCommand("image", "omni_image.cli", "app", "Build and load the images."),
    SubCommand("demo", "omni_runtime.cli.demo", "demo", "From nothing to a spoken answer on a real cluster."),
)

_PASS_THROUGH = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}

app = typer.Typer(
    name="omni",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Operate and run multi-stage (omni) models.",
)


def load(command: SubCommand) -> typer.Typer:
    """Import a sub-command. Raises OmniError when its dependencies are not installed."""
    try:
        target = getattr(importlib.import_module(command.module), command.target)
    except ModuleNotFoundError as error:
        raise OmniError(
            f"`omni {command.name}` needs the module {error.name!r}, which is not installed; "
            "install the extra that brings it: pip install 'omni-operator[runtime]' (or [operator], [cpu], [demo])"
        ) from error
    if isinstance(target, typer.Typer):
        return target
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    single.command()(target)
    return single


def _register(command: SubCommand) -> None:
    def forward(context: typer.Context) -> None:
        get_command(load(command)).main(args=context.args, prog_name=f"omni {command.name}", standalone_mode=True)

    forward.__doc__ = command.help
    app.command(command.name, help=command.help, context_settings=_PASS_THROUGH, add_help_option=False)(forward)


for _command in SUBCOMMANDS:
    _register(_command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `omni` script: errors of our own tree, and files that cannot be used, become one clear line;
    others keep their traceback."""
    try:
        get_command(app).main(args=None if arguments is None else list(arguments), prog_name="omni")
    except OmniError as error:
        print(f"omni: {error.code}: {error}", file=sys.stderr)
        raise SystemExit(1) from error
    except OSError as error:
        if error.filename is None:
            raise
        print(f"omni: {error.filename}: {error.strerror}", file=sys.stderr)
        raise SystemExit(1) from error
    except KeyboardInterrupt:
        raise SystemExit(130) from None
