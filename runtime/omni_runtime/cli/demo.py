"""`omni demo`: the main job from nothing to a spoken answer, with the commands that a user would type.

Every step prints its command, what it waits for and its seconds; every wait has a deadline and, past it, says what was
still missing. Running it twice is quick: each step finds what the first run left.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import typer

from omni_runtime.cli.kubectl import StepFailed, console, install_operator, omni, port_forward, tools, wait_ready

NAMESPACE = "omni-demo"
PIPELINE = "smol-omni"
QUESTION = "Why is the sky blue? Answer in two short sentences."
READY_SECONDS = 900
WER_LIMIT = 0.15


@dataclass(slots=True)
class Steps:
    """Names and seconds of what ran; printed as a table at the end."""

    done: list[tuple[str, float]] = field(default_factory=list)

    @contextmanager
    def step(self, title: str) -> Iterator[None]:
        console.print(f"\n[bold cyan]({len(self.done) + 1}) {title}[/]")
        started = time.monotonic()
        yield
        seconds = time.monotonic() - started
        self.done.append((title, seconds))
        console.print(f"[green]    done in {seconds:.1f} s[/]")

    def table(self) -> str:
        width = max(len(title) for title, _ in self.done)
        lines = [f"  {title:<{width}}  {seconds:8.1f} s" for title, seconds in self.done]
        return "\n".join([*lines, f"  {'total':<{width}}  {sum(s for _, s in self.done):8.1f} s"])


def demo(
    question: str = typer.Option(QUESTION, help="What to ask."),
    save: Path = typer.Option(Path("reply.wav"), help="Where the spoken answer goes."),
    provider: str = typer.Option("auto", help="auto, existing, kind or local."),
) -> None:
    """Cluster, images, operator, pipeline, question, spoken answer, and a listener's verdict."""
    from omni_runtime.client import ask, write_wav
    from omni_runtime.transcribe import Transcriber, word_errors

    steps = Steps()
    with steps.step("cluster"):
        omni("cluster", "up", "--provider", provider)
        environment = {**os.environ, "KUBECONFIG": omni("cluster", "kubeconfig", quiet=True).strip()}
    with steps.step("model weights"):
        omni("models", "prepare")
    with steps.step("images"):
        omni("image", "build", "all", "--load")
    kube = tools(environment)
    with steps.step("operator"):
        install_operator(kube)
    with steps.step("apply"):
        kube.show("apply", "-f", "examples/namespace.yaml")
        kube.show("-n", NAMESPACE, "apply", "-f", "examples/smol-omni.pipeline.yaml")
    with steps.step("ready"):
        wait_ready(lambda: kube.get("-n", NAMESPACE, "omnipipeline", PIPELINE), READY_SECONDS)
        kube.show("-n", NAMESPACE, "get", "omnipipelines,omnistages")
    with steps.step("question"), port_forward(kube, NAMESPACE, PIPELINE) as url:
        console.print(f"    [bold]{question}[/]\n")
        answer = ask(url, question, on_text=lambda text: console.print(text, end=""))
        write_wav(save, answer.pcm, answer.sample_rate)
        console.print(
            f"\n\n    TTFT {answer.ttft_s * 1e3:.0f} ms, TTFP {answer.ttfp_s * 1e3:.0f} ms, RTF {answer.rtf:.2f}, "
            f"{answer.audio_s:.1f} s of speech in {save}"
        )
    with steps.step("listener"):
        heard = Transcriber()(answer.pcm, answer.sample_rate)
        verdict = word_errors(answer.text, heard)
        console.print(f"    whisper-tiny heard: {heard}")
        console.print(f"    word error rate {verdict.rate:.1%} ({verdict.errors} of {verdict.reference_words} words)")
    console.print(f"\n[bold]Seconds of each step[/]\n{steps.table()}")
    if verdict.rate > WER_LIMIT:
        raise StepFailed(f"word error rate {verdict.rate:.1%} is above {WER_LIMIT:.0%}")
