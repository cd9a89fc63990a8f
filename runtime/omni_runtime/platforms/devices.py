"""Where an own torch engine runs, and in which precision."""

from __future__ import annotations

from typing import Any

from omni_runtime.errors import EngineError
from omni_runtime.stages.context import EngineContext


def pick_device(context: EngineContext) -> Any:
    """The accelerator that the plan gives this stage, else the CPU. Raises EngineError if it is not there."""
    import torch

    if context.stage.device.resource_name is None:
        return torch.device("cpu")
    if not torch.cuda.is_available():  # ROCm answers here, too
        raise EngineError(
            f"the plan gives stage {context.stage.name!r} {context.stage.device.resource_name}, "
            "but torch sees no accelerator; check the image and the device plugin"
        )
    device = torch.device("cuda", 0)
    if context.stage.device.memory_fraction < 1:  # stages that share a device keep to their parts (R43, R46)
        torch.cuda.set_per_process_memory_fraction(context.stage.device.memory_fraction, device)
    return device


def pick_dtype(name: str, device: Any) -> Any:
    """`auto`: float32 on CPUs, bfloat16 on accelerators."""
    import torch

    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return getattr(torch, name)
