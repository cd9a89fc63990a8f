"""Autoregressive text on vLLM, with speech segments or hidden-state rows for the next stage."""
