"""The entry point that vLLM calls in each of its processes: put hooks where an engine starts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lamina.vllm.layout import Layout

logger = logging.getLogger(__name__)
TRIED = ("0.32.0",)  # versions of vLLM with which the tests have run


def register() -> None:
    """Hook the places where engines start; an engine without readers in its `additional_config` is left as it is.

    vLLM may call this several times in a process; only the first call has an effect.
    """
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    for runner in (GPUModelRunner, CPUModelRunner):
        _after(runner, "load_model", _start_worker)
    _after(Scheduler, "__init__", _start_scheduler)
    for frontend in (LLMEngine, AsyncLLM):
        _after(frontend, "__init__", _start_frontend)


def _after(owner: type, method: str, act: Callable[[Any], None]) -> None:
    """Replace a method of a class by one that calls `act(instance)` when the original has returned."""
    original = owner.__dict__[method]
    if hasattr(original, "lamina"):
        return

    @wraps(original)
    def with_action(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        act(self)
        return result

    with_action.lamina = True  # pyright: ignore[reportAttributeAccessIssue]
    setattr(owner, method, with_action)


def _start_worker(runner: Any) -> None:
    """Let a model runner score tokens, if its engine was started with a bank."""
    if "lamina" in (runner.vllm_config.additional_config or {}):
        from lamina.vllm import worker
        from lamina.vllm.layout import Layout

        if (layout := Layout.from_config(runner.vllm_config.additional_config)) is not None:
            worker.install(runner, layout)


def _start_scheduler(scheduler: Any) -> None:
    """Let a scheduler send scores, if its engine was started with a bank."""
    if "lamina" in (scheduler.vllm_config.additional_config or {}):
        from lamina.vllm import transport
        from lamina.vllm.layout import Layout

        if (layout := Layout.from_config(scheduler.vllm_config.additional_config)) is not None:
            transport.install(scheduler, layout)


def _start_frontend(engine: Any) -> None:
    """Let a frontend answer, if its engine was started with a bank; warn about a version that was not tried."""
    if "lamina" in (engine.vllm_config.additional_config or {}):
        import vllm

        from lamina.vllm import answers
        from lamina.vllm.layout import Layout

        if vllm.__version__ not in TRIED:
            logger.warning("lamina: vLLM %s was not tried; versions that were: %s.", vllm.__version__, ", ".join(TRIED))
        if (layout := Layout.from_config(engine.vllm_config.additional_config)) is not None:
            answers.install(engine, layout)
            if type(engine).__name__ == "AsyncLLM":
                _start_server(layout)


def _start_server(layout: Layout) -> None:
    """Let the OpenAI-shaped routes of this process answer, once they are made for an engine with readers."""
    from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
    from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion

    from lamina.vllm import http

    def start(install: Callable[[Any, Layout], None], serving: Any) -> None:
        if "lamina" in (serving.engine_client.vllm_config.additional_config or {}):
            install(serving, layout)

    _after(OpenAIServingChat, "__init__", partial(start, http.install_chat))
    _after(OpenAIServingCompletion, "__init__", partial(start, http.install_completion))
