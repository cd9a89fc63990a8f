"""vLLM's executor for a stage of one worker on CPUs: it computes where its engine core schedules.

vLLM gives that worker a process of its own there, to set the thread variables before torch starts, and its core asks the
worker's queue again and again, without a pause, for a second after each answer. Our variables are set before vLLM's
first process (`arguments.environment`). So a step takes no way between two processes, and on a node of two cores the
one that the core would spin on is the talker's.
"""

from __future__ import annotations

from vllm.v1.executor.uniproc_executor import UniProcExecutor


class InCoreExecutor(UniProcExecutor):
    """vLLM's own, under a name that its CPU platform does not replace by the executor with processes."""
