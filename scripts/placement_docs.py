"""Writes the generated parts of docs/placement.md: the comparison with published figures, and `omni plan` of examples.

`python -m scripts.placement_docs` writes, `--check` says whether the page is stale (a test does so too).
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

from omni_operator.cli.plan import app
from omni_operator.placement.config import decoder_parameters, text_part
from omni_operator.placement.devices import BUILT_IN
from omni_operator.placement.known import CONFIGS, QWEN3_OMNI
from omni_operator.placement.kvcache import bytes_per_token
from omni_operator.placement.modelfacts import ModelPart, Parallelism
from omni_operator.placement.weights import device_bytes
from omni_operator.placement.workspace import activation_term
from omni_runtime.topology.types import EngineKind

REPOSITORY = Path(__file__).parents[1]
PAGE = REPOSITORY / "docs" / "placement.md"
GIB = 1 << 30

LLAMA_8B = CONFIGS["meta-llama/meta-llama-3-8b"]
LLAMA_70B = CONFIGS["meta-llama/llama-3.1-70b"]
MIXTRAL = CONFIGS["mistralai/mixtral-8x7b"]
QWEN3_30B = CONFIGS["qwen/qwen3-30b-a3b"]
DEEPSEEK = CONFIGS["deepseek-ai/deepseek-v3"]
GEMMA3 = CONFIGS["google/gemma-3-27b"]
THINKER = QWEN3_OMNI[EngineKind.AR_VLLM]
TALKER = QWEN3_OMNI[EngineKind.QWEN3_OMNI_TALKER]
CODE2WAV = QWEN3_OMNI[EngineKind.QWEN3_OMNI_CODE2WAV]
# SigLIP with 27 layers of 1152 x 4304, 4,096 patches of 14 x 14 pixels, and the projection to 5376.
_SIGLIP = 27 * (4 * 1152 * 1152 + 2 * 1152 * 4304 + 4 * 1152 + 4304 + 1152 + 4 * 1152)
GEMMA3_VISION = _SIGLIP + 14 * 14 * 3 * 1152 + 1152 + 4096 * 1152 + 2 * 1152 + 1152 * 5376 + 1152
GEMMA3_WHOLE = text_part(GEMMA3, extra_parameters=GEMMA3_VISION)
QWEN3_235B = {
    **QWEN3_30B, "hidden_size": 4096, "intermediate_size": 12288, "moe_intermediate_size": 1536,
    "num_hidden_layers": 94, "num_attention_heads": 64,
}  # fmt: skip
QWEN2_5_72B = {
    "model_type": "qwen2", "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 152064,
}  # fmt: skip
LLAMA_405B = {
    **LLAMA_8B, "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Figure:
    """One published number beside ours. unit: parameters, GiB or bytes per token."""

    what: str
    published: float
    ours: float
    unit: str
    source: str

    @property
    def deviation(self) -> float:
        return self.ours / self.published - 1


def _gib(part: ModelPart, **parallel: int) -> float:
    return device_bytes(part, Parallelism(**parallel)) / GIB


def _per_token(part: ModelPart, **parallel: int) -> int:
    return bytes_per_token(part, element=2, **parallel)


VLLM, OMNI = "vllm-project/vllm", "vllm-project/vllm-omni"
HUB = "safetensors parameter count of its model card"
INSIGHTS = "Insights into DeepSeek-V3 (arXiv 2505.09343), table 1"
FIGURES: tuple[Figure, ...] = (
    Figure("Llama-3.1-8B", 8_030_261_248, decoder_parameters(LLAMA_8B).total, "parameters", HUB),
    Figure("Llama-3.1-70B", 70_553_706_496, decoder_parameters(LLAMA_70B).total, "parameters", HUB),
    Figure("Mixtral-8x7B", 46_702_792_704, decoder_parameters(MIXTRAL).total, "parameters", HUB),
    Figure("Qwen3-30B-A3B", 30.5e9, decoder_parameters(QWEN3_30B).total, "parameters", "model card: 30.5B in total"),
    Figure("DeepSeek-V3", 671e9, decoder_parameters(DEEPSEEK).total, "parameters", "README_WEIGHTS.md: 671B"),
    Figure("Gemma-3-27B with its vision tower", 27_432_406_640, GEMMA3_WHOLE.weight_bytes / 2, "parameters", HUB),
    Figure("Qwen3-Omni-30B-A3B, all stages", 35_259_818_545, 31_719_205_488 + 3_324_596_480 + 216_016_577, "parameters",
           "n_parameters in embeddings-benchmark/mteb"),
    Figure("Llama-3-8B, weights, 1 device", 14.96, _gib(text_part(LLAMA_8B)), "GiB", f"log in {VLLM}#10511"),
    Figure("Llama-3-8B, weights, tensor 2", 7.48, _gib(text_part(LLAMA_8B), tensor=2), "GiB", f"log in {VLLM}#10511"),
    Figure("Llama-3-8B, activations", 1.26,
           activation_term(text_part(LLAMA_8B), Parallelism(), 8192, 256, 2).bytes / GIB, "GiB", f"log in {VLLM}#10511"),
    Figure("Llama-3-8B, activations, tensor 2", 1.26,
           activation_term(text_part(LLAMA_8B), Parallelism(tensor=2), 8192, 256, 2).bytes / GIB, "GiB",
           f"log in {VLLM}#10511"),
    Figure("Llama 70B, weights, tensor 8", 16.53, _gib(text_part(LLAMA_70B), tensor=8), "GiB",
           f"peak memory of the framework in {VLLM}#10702"),
    Figure("Qwen3-30B-A3B, weights, tensor 4", 14.2474, _gib(text_part(QWEN3_30B), tensor=4), "GiB", f"log in {VLLM}#17469"),
    Figure("Gemma-3-27B, weights, tensor 4", 13.1665, _gib(GEMMA3_WHOLE, tensor=4), "GiB", f"log in {VLLM}#15676"),
    Figure("Qwen3-Omni thinker, weights, tensor 2", 30.3338, _gib(THINKER, tensor=2), "GiB", f"log in {OMNI}#240"),
    Figure("Qwen3-Omni, weights of all stages", (2 * 78.85 - 88.52) * 1e9 / GIB,
           _gib(THINKER) + _gib(TALKER) + _gib(CODE2WAV) - 2 * 152_064 * 2048 / GIB, "GiB",
           "README of QwenLM/Qwen3-Omni: 78.85 GB with 15 s of video, 88.52 GB with 30 s, drawn back to none"),
    Figure("Qwen3-Omni talker, KV cache", 37.18 * GIB / 1_949_520, _per_token(TALKER), "bytes per token",
           f"37.18 GiB for 1,949,520 tokens in {OMNI}#1434"),
    Figure("Qwen3-235B-A22B, KV cache, tensor 4", 8.11 * GIB / 178_880, _per_token(text_part(QWEN3_235B), tensor=4),
           "bytes per token", f"8.11 GiB for 178,880 tokens in {VLLM}#21348"),
    Figure("DeepSeek-V3, KV cache (MLA)", 70_272, _per_token(text_part(DEEPSEEK)), "bytes per token", INSIGHTS),
    Figure("Qwen2.5-72B, KV cache (GQA)", 327_680, _per_token(text_part(QWEN2_5_72B)), "bytes per token", INSIGHTS),
    Figure("Llama-3.1-405B, KV cache (GQA)", 516_096, _per_token(text_part(LLAMA_405B)), "bytes per token", INSIGHTS),
)  # fmt: skip


def _number(value: float, unit: str) -> str:
    return f"{value:.2f}" if unit == "GiB" else f"{value:,.0f}"


def figures_table() -> Iterator[str]:
    yield "| what | unit | published | ours | difference | source |"
    yield "|---|---|---:|---:|---:|---|"
    for f in FIGURES:
        published, ours = _number(f.published, f.unit), _number(f.ours, f.unit)
        yield f"| {f.what} | {f.unit} | {published} | {ours} | {f.deviation:+.1%} | {f.source} |"


def device_table() -> Iterator[str]:
    yield "| class | resource | memory | a process gets | from | fabric | number types | slices |"
    yield "|---|---|---:|---:|---|---|---|---|"
    for d in BUILT_IN:
        memory, usable = (f"{n / GIB:.4g} GiB" if n else "its container's" for n in (d.memory, d.usable))
        kinds, slices = ", ".join(sorted(d.dtypes)), ", ".join(d.slices or ())
        resource = f"`{d.resource_name}`" if d.resource_name else ""
        yield f"| `{d.name}` | {resource} | {memory} | {usable} | {d.source} | {d.fabric} | {kinds} | {slices} |"


@dataclass(frozen=True, slots=True)
class Run:
    """One call of `omni plan` whose output stands on the page."""

    name: str
    example: str
    nodes: tuple[str, ...]
    replace: tuple[str, str] | None = None  # in the example's text


RUNS: tuple[Run, ...] = (
    Run("two nodes of two H100", "qwen3-omni", ("nvidia-h100-80gb=2x2",)),
    Run("one L4", "qwen3-omni", ("nvidia-l4=1x1",), ("nvidia-h100-80gb", "nvidia-l4")),
    Run("one MI300X", "qwen3-omni.one-mi300x", ("amd-mi300x=1x1",)),
    Run("one Ascend node", "qwen3-omni.npu", ("ascend-910b=1x8",)),
    Run("three makers", "qwen3-omni.mixed", ("amd-mi300x=1x8", "nvidia-h100-80gb=1x2", "ascend-910b=1x8")),
)


def printed(run: Run) -> Iterator[str]:
    """The command as a person types it, and what it prints."""
    path = REPOSITORY / "examples" / f"{run.example}.pipeline.yaml"
    arguments = ["--profiles", str(REPOSITORY / "charts/omni-operator/values.yaml")]
    for nodes in run.nodes:
        arguments += ["--nodes", nodes]
    with tempfile.TemporaryDirectory() as folder:
        if run.replace:
            text = path.read_text().replace(*run.replace)
            path = Path(folder) / path.name
            path.write_text(text)
        result = CliRunner().invoke(app, ["-f", str(path), *arguments])
    nodes = " ".join(f"--nodes {n}" for n in run.nodes)
    yield "```console"
    yield f"$ omni plan -f examples/{run.example}.pipeline.yaml --profiles charts/omni-operator/values.yaml {nodes}"
    # The revision changes with every field that a plan gains, and says nothing here.
    yield re.sub(r"revision [0-9a-f]{10}", "revision ..........", result.output.rstrip())
    yield f"$ echo $?\n{result.exit_code}"
    yield "```"


def parts() -> dict[str, str]:
    """Name of each generated part -> its text."""
    found = {"figures": figures_table(), "devices": device_table(), **{run.name: printed(run) for run in RUNS}}
    return {name: "\n".join(lines) for name, lines in found.items()}


def generated(page: str) -> str:
    """The page with all parts as they are now. Raises ValueError for a part that has no place."""
    for name, text in parts().items():
        begin, end = f"<!-- generated: {name} -->\n", "<!-- end -->"
        if begin not in page:
            raise ValueError(f"docs/placement.md has no place for {name!r}")
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}{text}\n{end}{rest.partition(end)[2]}"
    return page


def main(arguments: list[str]) -> int:
    page = PAGE.read_text(encoding="utf-8")
    fresh = generated(page)
    if "--check" in arguments:
        if fresh != page:
            print(f"stale: {PAGE.relative_to(REPOSITORY)}; run python -m scripts.placement_docs", file=sys.stderr)
        return int(fresh != page)
    PAGE.write_text(fresh, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
