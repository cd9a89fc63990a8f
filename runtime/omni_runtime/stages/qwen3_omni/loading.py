"""Loads the parts of a Qwen3-Omni checkpoint that a stage needs: the rest is emptied in the configuration first, so
that a talker process never holds the thinker's 30 B parameters."""

from __future__ import annotations

from typing import Any


def load_parts(
    path: str, *, revision: str | None, dtype: Any, talker: bool, code2wav: bool, experts: str | None = None
) -> Any:
    """Qwen3OmniMoeForConditionalGeneration with the named parts whole; of the thinker, only the token embedding."""
    from transformers import AutoConfig, Qwen3OmniMoeForConditionalGeneration
    from transformers.utils import logging

    logging.set_verbosity_error()  # "unexpected keys" are what we want here
    logging.disable_progress_bar()
    config: Any = AutoConfig.from_pretrained(path, revision=revision)
    thinker = config.thinker_config
    thinker.text_config.num_hidden_layers = 0
    thinker.vision_config.depth = 0
    thinker.vision_config.deepstack_visual_indexes = []
    thinker.audio_config.encoder_layers = 0
    thinker.audio_config.num_hidden_layers = 0
    if not talker:
        config.talker_config.text_config.num_hidden_layers = 0
        config.talker_config.code_predictor_config.num_hidden_layers = 0
    if not code2wav:
        config.code2wav_config.num_hidden_layers = 0
    options = {"experts_implementation": experts} if experts else {}
    model = Qwen3OmniMoeForConditionalGeneration.from_pretrained(
        path, revision=revision, config=config, dtype=dtype, **options
    )
    if not code2wav:
        del model.code2wav
    if not talker:
        del model.talker
    return model.eval()
