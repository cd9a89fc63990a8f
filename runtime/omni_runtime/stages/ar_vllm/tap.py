"""The hidden-state tap: a vLLM worker extension that pushes rows out of the process that computes, over ZeroMQ, raw.

Rows are keyed by absolute position and leave once: a preempted request is computed again, and the repeat is dropped.
Two ways to the rows, with the same values: forward hooks, which any model has but which need eager mode (captured
graphs do not call hooks), and the model's auxiliary outputs (`aux_worker`), which compiled and captured models have,
too. Both need the V1 runner, and no prefix caching: a hit computes no rows.
"""

from __future__ import annotations

from typing import Any

import torch
import zmq

from omni_runtime.stages.ar_vllm.rows import RowsHeader, encode_header, external_request_id

_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


class HiddenStateTap:
    """Mixed into vLLM's worker by `worker_extension_cls`; `install_tap` is called over collective_rpc."""

    model_runner: Any

    def install_tap(self, layers_path: str, hidden_layer: int, endpoint: str, auxiliary: bool) -> int:
        """Tap the inputs of layer 0 (embeddings, media merged in) and of layer `hidden_layer`; returns the width.

        auxiliary: the worker is an AuxStateWorker, and the model gives both with its output.
        """
        if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
            return 0  # rows are the same on every tensor-parallel rank
        self._tap_values: dict[int, torch.Tensor] = {}
        self._tap_sent: dict[str, int] = {}
        self._tap_layers = (0, hidden_layer)
        self._tap_socket: Any = zmq.Context.instance().socket(zmq.PUSH)
        self._tap_socket.setsockopt(zmq.SNDHWM, 0)
        self._tap_socket.setsockopt(zmq.LINGER, 0)
        self._tap_socket.connect(endpoint)
        if auxiliary:
            self._tap_forward = self.model_runner._model_forward
            self.model_runner._model_forward = self._forward_and_keep
        else:
            layers = self.model_runner.model.get_submodule(layers_path)
            for index in self._tap_layers:
                layers[index].register_forward_pre_hook(self._hook(index), with_kwargs=True)
        self._tap_execute = self.model_runner.execute_model
        self.model_runner.execute_model = self._execute_and_push
        return int(self.model_runner.model_config.get_hidden_size())

    def _hook(self, index: int) -> Any:
        def before(_: Any, args: Any, kwargs: Any) -> None:
            hidden: Any = kwargs.get("hidden_states", args[1] if len(args) > 1 else None)
            residual = kwargs.get("residual", args[2] if len(args) > 2 else None)
            # vLLM adds the residual inside the next norm; the sum is what transformers calls the hidden state.
            self._tap_values[index] = (hidden if residual is None else hidden + residual).detach()

        return before

    def _forward_and_keep(self, *args: Any, **kwargs: Any) -> Any:
        output = self._tap_forward(*args, **kwargs)
        if isinstance(output, tuple):
            self._tap_values = dict(zip(self._tap_layers, output[1], strict=True))
        return output

    def _execute_and_push(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        for finished in scheduler_output.finished_req_ids:
            self._tap_sent.pop(finished, None)
        self._tap_values.clear()
        result = self._tap_execute(scheduler_output, *args, **kwargs)
        if self._tap_values:
            self._push_rows(scheduler_output)
        return result

    def _push_rows(self, scheduler_output: Any) -> None:
        batch = self.model_runner.input_batch
        offset = 0
        for internal in batch.req_ids:
            count = scheduler_output.num_scheduled_tokens.get(internal, 0)
            if not count:
                continue
            request = external_request_id(internal)
            if request is not None:
                start = int(batch.num_computed_tokens_cpu[batch.req_id_to_index[internal]])
                self._push_request(internal, request, start, count, offset)
            offset += count

    def _push_request(self, internal: str, request: str, start: int, count: int, offset: int) -> None:
        sent = self._tap_sent.get(internal, 0)
        if start > sent:
            problem = f"hidden-state rows {sent} to {start} were never computed; is prefix caching on?"
            self._tap_socket.send(encode_header(RowsHeader(request, start, 0, 0, "float32", problem)))
            return
        skip = sent - start  # computed again after a preemption
        if skip >= count:
            return
        rows = [self._tap_values[i][offset + skip : offset + count] for i in self._tap_layers]
        header = RowsHeader(request, sent, count - skip, rows[0].shape[-1], _DTYPES[rows[0].dtype])
        self._tap_socket.send_multipart([encode_header(header), *(_raw(r) for r in rows)])
        self._tap_sent[internal] = start + count


def _raw(rows: torch.Tensor) -> memoryview:
    rows = rows.contiguous().to("cpu")
    if rows.dtype is torch.bfloat16:
        rows = rows.view(torch.uint16)
    return memoryview(rows.numpy()).cast("B")
