"""vLLM's worker of this platform, with the model's auxiliary hidden-state outputs switched on while it loads.

Those outputs belong to the model's graph, so that compilation and CUDA graphs stay on; they have to be chosen before
anything is compiled, which is why a call after the start would come too late.
"""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.platforms import current_platform

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker


class AuxStateWorker(PlatformWorker):  # type: ignore[misc, valid-type, unused-ignore]
    """Outputs of layer 0's input and of the input of the layer that the talker listens to."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        super().load_model(*args, **kwargs)
        runner: Any = self.model_runner
        model = runner.get_model()
        if not supports_eagle3(model):
            raise RuntimeError(
                f"{type(model).__name__} has no auxiliary hidden-state outputs; set engineArgs.tap to hooks"
            )
        talker: Any = self.vllm_config.model_config.hf_config.talker_config
        model.set_aux_hidden_state_layers((0, int(talker.accept_hidden_layer)))
        runner.use_aux_hidden_state_outputs = True
