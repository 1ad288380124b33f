"""The entry point that vLLM calls in each of its processes: install hooks where an engine starts."""

# vLLM is not installed where types are checked: it needs another transformers.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from lamina.vllm.engine_types import Configured, EngineConfig, Route, Runner, Scheduler
    from lamina.vllm.frontend_types import Frontend
    from lamina.vllm.layout import Layout

    class Offline(Protocol):
        """vLLM's `LLM`, which runs an engine without a server."""

        llm_engine: Configured

    RouteT = TypeVar("RouteT", bound=Route)

T = TypeVar("T")


def register() -> None:
    """Install hooks where engines start. Engines without readers in their `additional_config` are not affected.

    vLLM may call this several times in a process; only the first call has an effect. In a version of vLLM that lacks
    what the hooks need, engines with readers are refused, and the others start as usual.
    """
    try:
        _hook_engines()
    except (ImportError, KeyError) as error:
        from vllm.config import VllmConfig

        _hook(VllmConfig, "__post_init__", after=partial(_refuse_version, f"{type(error).__name__}: {error}"))


def _hook_engines() -> None:
    """Hook the frontends, schedulers and model runners of vLLM; raise ImportError or KeyError if one does not exist."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as SecondGPUModelRunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    for runner in (GPUModelRunner, CPUModelRunner):
        _hook(runner, "load_model", after=_start_worker)
    _hook(SecondGPUModelRunner, "load_model", after=_refuse_second_runner)
    _hook(Scheduler, "__init__", after=_start_scheduler)
    for frontend in (LLMEngine, AsyncLLM):
        _hook(frontend, "__init__", before=_check_frontend, after=_start_frontend)


def _hook(
    owner: type[T],
    method: str,
    *,
    before: Callable[..., None] | None = None,
    after: Callable[[T], None] | None = None,
) -> None:
    """Wrap a method of a class, so that a call runs `before`, the method, and then `after(instance)`.

    `before` gets the instance and the arguments of the method. A method that is wrapped already stays as it is. Raises
    KeyError if the class itself defines no such method.
    """
    original = owner.__dict__[method]
    if hasattr(original, "lamina"):
        return

    @wraps(original)
    def hooked(self: T, *args: object, **kwargs: object) -> object:
        if before is not None:
            before(self, *args, **kwargs)
        result = original(self, *args, **kwargs)
        if after is not None:
            after(self)
        return result

    hooked.lamina = True
    setattr(owner, method, hooked)


def _refuse_version(problem: str, vllm_config: EngineConfig) -> None:
    """Raise ConfigError if an engine has a bank: `problem` says why the hooks do not fit this version of vLLM."""
    if "lamina" in (vllm_config.additional_config or {}):
        import vllm
        from lamina.errors import ConfigError
        from lamina.vllm.layout import TRIED

        what = f"readers cannot run in vLLM {vllm.__version__} ({problem})"
        raise ConfigError(f"vllm: {what}; versions that were tried: {', '.join(TRIED)}. Install one of these.")


def layout_of(vllm_config: EngineConfig) -> Layout | None:
    """Return the layout of the readers for an engine with this config; None if it has no readers.

    An engine without readers imports nothing else of Lamina. Raises ConfigError, StoreError or UnknownNameError as
    `Layout.from_config` does.
    """
    if "lamina" not in (vllm_config.additional_config or {}):
        return None
    from lamina.vllm.layout import Layout

    return Layout.from_config(vllm_config.additional_config, pooling=vllm_config.model_config.runner_type == "pooling")


def _check_frontend(_engine: object, vllm_config: EngineConfig, *_args: object, **_kwargs: object) -> None:
    """Check, before an engine starts, that the readers can run in it; log warnings about untried combinations.

    Raises ConfigError if the engine has settings that readers do not support, BaseMismatchError if its model has
    another size than the bank's, and ConfigError, StoreError or UnknownNameError as `layout_of` does.
    """
    if (layout := layout_of(vllm_config)) is not None:
        import vllm
        from lamina.vllm.layout import check_engine, warn_untried

        check_engine(vllm_config)
        config = vllm_config.model_config
        layout.check_base(layers=config.hf_text_config.num_hidden_layers + 1, width=config.hf_text_config.hidden_size)
        warn_untried(layout, vllm.__version__, str(config.dtype).removeprefix("torch."))


def _start_frontend(engine: Frontend) -> None:
    """Make a frontend, and the routes of its server, return the readers' answers, if its engine has a bank.

    An offline beam search then raises ConfigError.
    """
    if (layout := layout_of(engine.vllm_config)) is not None:
        from vllm.entrypoints.generate.beam_search.offline import BeamSearchOfflineMixin
        from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
        from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
        from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
        from vllm.entrypoints.pooling.base.serving import PoolingBaseServing
        from vllm.outputs import ClassificationRequestOutput, EmbeddingRequestOutput

        from lamina.vllm import frontend, http

        frontend.install(engine, layout)
        for output in (EmbeddingRequestOutput, ClassificationRequestOutput) if layout.pooling else ():
            frontend.keep_answers(output)
        _hook(BeamSearchOfflineMixin, "beam_search", before=_refuse_beams)
        # the routes of a server are made after its engine
        _hook(OpenAIServingChat, "__init__", after=partial(_start_route, http.install_chat))
        _hook(OpenAIServingCompletion, "__init__", after=partial(_start_route, http.install_completion))
        _hook(OpenAIServingResponses, "__init__", after=partial(_start_route, http.install_responses))
        _hook(PoolingBaseServing, "__init__", after=partial(_start_route, http.install_pooling))


def _refuse_beams(llm: Offline, *_args: object, **_kwargs: object) -> None:
    """Raise ConfigError if an engine with a bank is asked for a beam search, whose outputs would have no answers."""
    if layout_of(llm.llm_engine.vllm_config) is not None:
        from lamina.errors import ConfigError

        raise ConfigError("vllm: readers do not run with beam search. Use generate(), or an engine without a bank.")


def _start_route(install: Callable[[RouteT, Layout], None], serving: RouteT) -> None:
    """Call `install` with a route's object (`serving`) and the readers' layout, if the engine has a bank."""
    if (layout := layout_of(serving.engine_client.vllm_config)) is not None:
        install(serving, layout)


def _start_scheduler(scheduler: Scheduler) -> None:
    """Make a scheduler send the readers' scores to the frontend, and end flagged requests, if its engine has a bank."""
    if (layout := layout_of(scheduler.vllm_config)) is not None:
        from lamina.vllm import transport

        transport.install(scheduler, layout)


def _start_worker(runner: Runner) -> None:
    """Make a model runner run the readers on each step, if its engine has a bank; LaminaError if they cannot."""
    if (layout := layout_of(runner.vllm_config)) is not None:
        from lamina.vllm import pooling_models, worker

        worker.install(runner, layout, pooling_models.TextReaders if layout.pooling else worker.EngineReaders)


def _refuse_second_runner(runner: Configured) -> None:
    """Raise ConfigError if an engine with a bank uses vLLM's second model runner."""
    if layout_of(runner.vllm_config) is not None:
        from lamina.errors import ConfigError

        raise ConfigError("vllm: readers run on the first model runner only. Set VLLM_USE_V2_MODEL_RUNNER=0.")
