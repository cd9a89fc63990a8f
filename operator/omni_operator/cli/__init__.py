"""Sub-commands of `omni` that need the operator's pure parts. Loaded by name from omni_runtime.cli, which imports none of it."""
