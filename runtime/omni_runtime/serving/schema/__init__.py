"""What clients may send, one module per surface: OpenAI's fields, vLLM-Omni's, and ours. Frozen values.

Fields that would change the answer but are not supported are refused by name; fields that are unknown are ignored, as
OpenAI-compatible servers do, so that newer clients keep working.
"""
