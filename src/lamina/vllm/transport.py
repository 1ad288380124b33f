"""From the worker to the frontend: hang the scores of a step on the outputs that the scheduler makes of it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from lamina.vllm.layout import KEY
from lamina.vllm.worker import ATTRIBUTE, StepScores


def install(scheduler: Any) -> None:
    """Make a scheduler of vLLM send the scores of a request along with its tokens.

    The scores travel in `kv_transfer_params`, the only free-form field of an `EngineCoreOutput`; the frontend takes
    them out again. A step of a prompt in pieces has no output, so its scores wait for the first output of the request.
    """
    update_from_output = scheduler.update_from_output
    waiting: dict[str, list[StepScores]] = defaultdict(list)

    def update_and_send(scheduler_output: object, model_runner_output: object) -> dict[int, Any]:
        for request, rows in getattr(model_runner_output, ATTRIBUTE, {}).items():
            waiting[request].append(rows)
        outputs = update_from_output(scheduler_output, model_runner_output)
        for client in outputs.values():
            for output in client.outputs:
                if parts := waiting.pop(output.request_id, None):
                    output.kv_transfer_params = {**(output.kv_transfer_params or {}), KEY: [tuple(p) for p in parts]}
        for request in [request for request in waiting if request not in scheduler.requests]:
            del waiting[request]
        return outputs

    scheduler.update_from_output = update_and_send
