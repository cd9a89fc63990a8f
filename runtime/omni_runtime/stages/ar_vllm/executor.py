"""vLLM's executor for stages on CPUs: its engine core sleeps while the worker computes.

vLLM asks a worker's queue again and again, without a pause, for a second after each answer. Where the worker drives a
GPU, that costs a core which has nothing else to do; on a node of two cores it is the core on which the talker speaks.
"""

from __future__ import annotations

from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from omni_runtime.stages.ar_vllm.waking import sleep_at_once


class RestingExecutor(MultiprocExecutor):
    """The queues wake whoever sleeps at them: it is what they do anyway once that second is over."""

    def _post_init_executor(self) -> None:
        super()._post_init_executor()
        for queue in self.response_mqs:
            sleep_at_once(queue._spin_condition)
