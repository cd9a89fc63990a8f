"""Qwen3-Omni's talker and code2wav as engines of our own. Never imports vLLM."""
