"""What every test shares: hypothesis without time limits per example, which only measure how busy the machine is."""

from __future__ import annotations

import os

from hypothesis import settings

# Transfer engines of two test runs at once must not take each other's ports. An engine gives its own back when it is
# collected, tests later, and takes a second for that.
_PORTS = 20_000 + os.getpid() % 10 * 1000
os.environ.setdefault("MC_MIN_RPC_PORT", str(_PORTS))
os.environ.setdefault("MC_MAX_RPC_PORT", str(_PORTS + 999))

settings.register_profile("omni", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("omni")
