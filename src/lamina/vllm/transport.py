"""Send the scores of a step from the worker to the frontend, attached to the scheduler's outputs."""

# vLLM is not installed where types are checked: it needs another transformers.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, final

from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from lamina.layers.types import special_ids
from lamina.vllm.layout import KEY, Layout
from lamina.vllm.monitors import RequestMonitors, engine_special_ids
from lamina.vllm.worker import ATTRIBUTE, StepScores

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lamina.vllm.engine_types import ClientOutputs, Request, Scheduler, TokenOutput
    from lamina.vllm.worker import Message


def install(scheduler: Scheduler, layout: Layout) -> None:
    """Make a vLLM scheduler send a request's scores along with its tokens, and end requests that a monitor flags.

    If `layout.on_flag` is "report", no request is ended. The scores travel in `kv_transfer_params`, the only free-form
    field of `EngineCoreOutput`; the frontend removes them.
    """
    update_from_output, sender = scheduler.update_from_output, _Sender(scheduler, layout)

    def update_and_send(scheduler_output: object, model_runner_output: object) -> Mapping[int, ClientOutputs]:
        scores = getattr(model_runner_output, ATTRIBUTE, {})
        requests = {name: scheduler.requests[name] for name in scores if name in scheduler.requests}
        outputs = update_from_output(scheduler_output, model_runner_output)
        sender.send(scores, requests, [output for client in outputs.values() for output in client.outputs])
        return outputs

    scheduler.update_from_output = update_and_send


@final
class _Sender:
    """Holds the scores and monitors of a scheduler's requests until they are sent or the requests end."""

    def __init__(self, scheduler: Scheduler, layout: Layout) -> None:
        self._scheduler, self._layout = scheduler, layout
        self._special = engine_special_ids(scheduler.vllm_config.model_config) if layout.monitors else special_ids(None)
        # A step of a prompt in pieces has no output, so its scores wait for the first output of the request.
        self._waiting: dict[str, list[StepScores]] = defaultdict(list)
        self._monitors: dict[str, RequestMonitors] = {}

    def send(self, scores: dict[str, StepScores], read: dict[str, Request], outputs: Sequence[TokenOutput]) -> None:
        """Attach scores and verdicts to the `EngineCoreOutput`s of a step, and end flagged requests (see `install`).

        `scores` has the scores of each request in this step. `read` is request id -> request, for requests that had not
        ended before the step; scores of others are dropped. If a request has no output in
        this step, its scores are kept for its next output. If several monitors flag a request in one step, `ended_by`
        names one. At the end, everything stored for requests that have ended is deleted.
        """
        flagged: dict[str, str] = {}
        for name, request in read.items():
            self._waiting[name].append(scores[name])
            if self._layout.monitors:
                new = RequestMonitors(self._layout, request.num_prompt_tokens, self._special)
                monitors = self._monitors.setdefault(name, new)
                if names := monitors.add(scores[name].first, scores[name].tokens, request.output_token_ids):
                    flagged[name] = names[0]
        for output in outputs:
            parts = self._waiting.pop(output.request_id, None)
            if parts is None:
                continue
            message: Message = {"scores": [(part.first, part.tokens, part.prompt) for part in parts]}
            if monitors := self._monitors.get(output.request_id):
                verdicts = monitors.verdicts.items()
                message["monitors"] = {name: (verdict.score, verdict.flagged_at) for name, verdict in verdicts}
            if self._layout.on_flag == "end" and output.finish_reason is None and output.request_id in flagged:
                message["ended_by"] = flagged[output.request_id]
                output.finish_reason = FinishReason.ABORT  # not STOP, which would cut the last token off the text
                self._scheduler.finish_requests(output.request_id, RequestStatus.FINISHED_ABORTED)
            output.kv_transfer_params = {**(output.kv_transfer_params or {}), KEY: message}
        for requests in (self._waiting, self._monitors):
            for request in [request for request in requests if request not in self._scheduler.requests]:
                del requests[request]
