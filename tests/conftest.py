"""What every test shares: hypothesis without time limits per example, which only measure how busy the machine is."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("omni", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("omni")
