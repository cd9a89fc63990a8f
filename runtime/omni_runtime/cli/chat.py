"""`omni chat`: ask a running pipeline, read the answer as it comes, keep the speech."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from omni_runtime.client import DEFAULT_URL, Answer, ask, write_wav


def chat(
    question: Annotated[str, typer.Argument(help="What to ask.")],
    url: Annotated[str, typer.Option("--url", envvar="OMNI_URL", help="Where the pipeline's API is.")] = DEFAULT_URL,
    text_only: Annotated[bool, typer.Option("--text-only", help="No speech; talker and code2wav stay idle.")] = False,
    save: Annotated[Path | None, typer.Option("--save", help="Write the speech to this WAV file.")] = None,
    voice: Annotated[str | None, typer.Option("--voice", help="Voice of the answer.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1, help="Upper bound of the text.")] = None,
    timeout: Annotated[float, typer.Option("--timeout", help="Seconds of silence until giving up.")] = 600.0,
) -> None:
    """Print the answer while it streams, then TTFT, TTFP, RTF and underruns."""
    fields: dict[str, Any] = {"audio": {"voice": voice}} if voice is not None else {}
    answer = ask(
        url,
        question,
        modalities=("text",) if text_only else ("text", "audio"),
        on_text=lambda text: (sys.stdout.write(text), sys.stdout.flush()),
        timeout_s=timeout,
        max_tokens=max_tokens,
        **fields,
    )
    typer.echo("\n")
    typer.echo(summary(answer))
    if save is not None:
        if answer.pcm.size == 0:
            typer.echo(f"no speech came, {save} is not written", err=True)
            raise typer.Exit(1)
        write_wav(save, answer.pcm, answer.sample_rate)
        typer.echo(f"speech saved to {save}")


def summary(answer: Answer) -> str:
    """One line of figures."""
    parts = [f"TTFT {_ms(answer.ttft_s)}"]
    if answer.pcm.size:
        parts += [
            f"TTFP {_ms(answer.ttfp_s)}",
            f"RTF {answer.rtf:.2f}",
            f"underrun {_ms(answer.underrun_s)}",
            f"{answer.audio_s:.1f} s of speech",
        ]
    tokens = answer.usage.get("completion_tokens")
    parts += [f"{tokens} tokens"] if tokens else []
    return ", ".join([*parts, f"{answer.e2e_s:.2f} s in all, {answer.finish_reason}, request {answer.request_id}"])


def _ms(seconds: float) -> str:
    return "none" if math.isnan(seconds) else f"{seconds * 1e3:.0f} ms"
