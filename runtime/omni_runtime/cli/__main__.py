"""`python -m omni_runtime.cli`, where the `omni` script is not installed."""

from omni_runtime.cli import main

main()
