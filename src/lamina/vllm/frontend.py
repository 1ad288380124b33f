"""The hooks of the frontend: check which readers a request chooses, and give the outputs their answers."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from lamina.errors import LaminaError
from lamina.vllm.answers import Answers
from lamina.vllm.layout import KEY, Layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lamina.vllm.engine_types import TokenOutput
    from lamina.vllm.frontend_types import Completion, Frontend, NewRequest, Output, OutputClass, Params, RequestState
    from lamina.vllm.worker import Message


def install(engine: Frontend, layout: Layout) -> None:
    """Make a vLLM frontend check which readers a request chooses, and add an attribute `lamina` to its outputs.

    Methods of the frontend's processors are replaced, in place. A request whose choice of readers is wrong, or whose
    prompt is streamed (`resumable`), then raises ValueError. The scheduler's messages are removed from
    `kv_transfer_params`.
    """
    processor = engine.output_processor
    process_inputs, add_request = engine.input_processor.process_inputs, processor.add_request
    process_outputs = processor.process_outputs

    def check_and_process(request_id: str, prompt: object, params: Params, *args: object, **kwargs: object) -> object:
        _check_choice(params, layout)
        if kwargs.get("resumable"):
            raise ValueError(
                "vllm: the prompt comes in pieces, as a stream; readers need the whole prompt. Send it whole."
            )
        return process_inputs(request_id, prompt, params, *args, **kwargs)

    def add_and_follow(request: NewRequest, *args: object, **kwargs: object) -> None:
        add_request(request, *args, **kwargs)
        state = processor.request_states[request.request_id]
        if not hasattr(state, KEY):
            names = layout.asked(_arguments(request.sampling_params or request.pooling_params))
            _attach(state, Answers(layout, names, state.prompt_len))

    def collect_and_process(engine_core_outputs: list[TokenOutput], *args: object, **kwargs: object) -> object:
        for output in engine_core_outputs:
            params = output.kv_transfer_params
            if params and KEY in params:
                message = cast("Message", params.pop(KEY))
                output.kv_transfer_params = params or None
                if (state := processor.request_states.get(output.request_id)) is not None:
                    state.lamina.on_message(message)
        return process_outputs(engine_core_outputs, *args, **kwargs)

    engine.input_processor.process_inputs = check_and_process
    processor.add_request, processor.process_outputs = add_and_follow, collect_and_process


def _check_choice(params: Params, layout: Layout) -> None:
    """Raise ValueError if a request's parameters name an unknown reader, or name readers in a wrong form.

    For pooling models, also set `params` so that the request does not use the prefix cache.
    """
    try:
        layout.asked(_arguments(params))
    except LaminaError as error:
        raise ValueError(str(error)) from error  # vLLM answers a ValueError with the status of a bad request
    if layout.pooling:
        params.skip_reading_prefix_cache = True  # readers of whole texts need the states of every token


def _arguments(params: Params | None) -> Mapping[str, object] | None:
    return getattr(params, "extra_args", None) or getattr(params, "extra_kwargs", None)


def keep_answers(output: OutputClass) -> None:
    """Make an output class keep `lamina` when vLLM converts a pooling output to it; a second call does nothing."""
    convert = output.from_base
    if hasattr(convert, KEY):
        return

    def convert_with_answers(base: Output) -> Output:
        converted = convert(base)
        if hasattr(base, KEY):
            converted.lamina = base.lamina
        return converted

    vars(convert_with_answers)[KEY] = True
    output.from_base = staticmethod(convert_with_answers)


def _attach(state: RequestState, answers: Answers) -> None:
    """Set the attribute `lamina` on each output that vLLM creates from a request's `state`.

    A `CompletionOutput` gets the answers about its sequence. A `RequestOutput` gets the answers about its first
    sequence. If a monitor ended the sequence, its finish reason becomes "content_filter", and its stop reason the
    monitor's name.
    """
    state.lamina = answers
    new_completion, make_output = state._new_completion_output, state.make_request_output

    def completion_with_answers(*args: object, **kwargs: object) -> Completion:
        completion = new_completion(*args, **kwargs)
        completion.lamina = answers
        if answers.ended_by is not None:
            completion.finish_reason, completion.stop_reason = "content_filter", answers.ended_by
        return completion

    def output_with_answers(*args: object, **kwargs: object) -> Output | None:
        output = make_output(*args, **kwargs)
        if output is not None:
            first = output.outputs[0] if isinstance(output.outputs, list) else None
            output.lamina = getattr(first, KEY, answers)  # a pooling output has no sequences
        return output

    state._new_completion_output, state.make_request_output = completion_with_answers, output_with_answers
