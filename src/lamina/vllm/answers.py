"""The frontend's side: collect the scores of a request's tokens, and compute the readers' answers from them.

vLLM runs the model in worker processes; its frontend handles requests and responses. A request may have several output
sequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast, final

import numpy as np
import torch

from lamina.errors import LaminaError
from lamina.heads.sequence_classification import SequenceClassification
from lamina.vllm.layout import KEY, Layout, ReaderColumns
from lamina.vllm.monitors import Verdict
from lamina.vllm.worker import StepScores

if TYPE_CHECKING:
    from lamina.utils import JSON


@final
class Answers(Mapping[str, "dict[str, JSON]"]):
    """The readers' answers for one sequence: reader name -> answers, computed on access.

    The value of a reader has the keys "prompt", "output" and "both", each with the answer over that part of the text,
    or None for a part without tokens; and "tokens", the scores of each token that the engine has read, prompt first.
    Readers that label tokens have only "tokens", and readers that pool whole prompts only "prompt". The engine does not
    read the last token of a sequence.

    Args:
        layout: The engine's readers.
        names: Names of the readers that the request has chosen.
        prompt: Number of tokens of the prompt.

    Attributes:
        monitors: Monitor name -> its verdict on the output so far.
        ended_by: Name of the monitor that ended the request; None: no monitor did.
    """

    def __init__(self, layout: Layout, names: Sequence[str], prompt: int) -> None:
        self._layout, self._names, self._prompt = layout, names, prompt
        self._scores = np.empty((0, layout.token_columns), dtype=np.float32)
        self._end = 0  # number of tokens that have scores
        self._whole: np.ndarray | None = None  # logits of the readers of whole prompts
        self.monitors: dict[str, Verdict] = {}
        self.ended_by: str | None = None

    def on_message(self, message: Mapping[str, Any]) -> None:
        """Add a message from the scheduler: scores of one or several steps, and verdicts."""
        for part in message["scores"]:
            self.add(StepScores(*part))
        self.monitors = {name: Verdict(*verdict) for name, verdict in message.get("monitors", {}).items()}
        self.ended_by = message.get("ended_by")

    def add(self, scores: StepScores) -> None:
        """Add the scores of a step. If a token was computed again, its new scores replace the old ones."""
        if scores.prompt is not None:
            self._whole = np.frombuffer(scores.prompt, dtype=np.float32).copy()  # torch needs a writable array
        if not self._layout.token_columns:
            return
        first, part = scores.first, np.frombuffer(scores.tokens, dtype=np.float32)
        part = part.reshape(-1, self._layout.token_columns)
        last = first + len(part)
        if last > len(self._scores):
            grown = np.full((max(last, 2 * len(self._scores)), self._layout.token_columns), np.nan, dtype=np.float32)
            grown[: len(self._scores)] = self._scores
            self._scores = grown
        self._scores[first:last] = part
        self._end = max(self._end, last)

    def __getitem__(self, name: str) -> dict[str, JSON]:
        """Return the answers of one reader."""
        if name not in self._names:
            raise KeyError(name)
        reader = self._layout.readers[name]
        if reader.whole:
            whole = None if self._whole is None else torch.from_numpy(self._whole[None, reader.first : reader.last])
            return {"prompt": None if whole is None else answer(reader, whole)}
        tokens = self._token_rows(reader, 0, self._end)
        if not isinstance(reader.head, SequenceClassification):
            return {"tokens": tokens}
        scores = torch.from_numpy(self._scores[: self._end, reader.first : reader.last])
        parts = {"prompt": scores[: self._prompt], "output": scores[self._prompt :], "both": scores}
        answers: dict[str, JSON] = {part: answer(reader, rows) for part, rows in parts.items()}
        return {**answers, "tokens": tokens}

    def _token_rows(self, reader: ReaderColumns, first: int, last: int) -> list[JSON]:
        """Return the probabilities of the tokens at positions `first` to `last - 1`, a list for each token."""
        logits = torch.from_numpy(self._scores[first:last, reader.first : reader.first + reader.logits])
        return probabilities(reader, logits).tolist()

    @property
    def read(self) -> int:
        """Number of tokens of the text with scores."""
        return self._end

    def before(self, output: int) -> int:
        """Return how many tokens of the text the engine reads until it has chosen `output` tokens of the output."""
        return self._prompt + output - 1

    def to_dict(self, first: int = 0) -> dict[str, JSON]:
        """Return all answers as JSON-ready values: reader name -> its answers, and the monitors' verdicts.

        The scores of the first `first` tokens of the text are left out.
        """
        fields = {name: self[name] for name in self}
        for name in self._streamed():
            fields[name]["tokens"] = cast("list[JSON]", fields[name]["tokens"])[first:]
        return {**fields, **self._verdicts()}

    def part_to_dict(self, first: int, last: int) -> dict[str, JSON]:
        """Return the scores of the tokens at positions `first` to `last - 1`, and the verdicts, as JSON-ready values.

        Readers that pool whole prompts add their answer if the part begins with the first token.
        """
        fields: dict[str, JSON] = {name: self[name] for name in self if first == 0 and name not in self._streamed()}
        for name in self._streamed():
            fields[name] = {"tokens": self._token_rows(self._layout.readers[name], first, last)}
        return {**fields, **self._verdicts()}

    def _streamed(self) -> list[str]:
        """Return the names of the chosen readers that score tokens."""
        return [name for name in self if not self._layout.readers[name].whole]

    def _verdicts(self) -> dict[str, JSON]:
        """Return `{"monitors": {name: verdict}}`; {} if there are no monitors."""
        return (
            {"monitors": {name: verdict._asdict() for name, verdict in self.monitors.items()}} if self.monitors else {}
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __repr__(self) -> str:
        return f"Answers({dict(self)})"


def probabilities(reader: ReaderColumns, logits: torch.Tensor) -> torch.Tensor:
    """Return the probabilities of the classes, from logits `[..., classes]`; for a regression the values themselves."""
    if reader.head.problem_type == "regression":
        return logits
    return logits.sigmoid() if reader.head.problem_type == "multi_label" else logits.softmax(-1)


def answer(reader: ReaderColumns, scores: torch.Tensor) -> dict[str, JSON] | None:
    """Return a reader's answer over some tokens, from their scores `[tokens, columns]`; None without tokens."""
    if not len(scores):
        return None
    logits = scores[:, : reader.logits].double()
    if reader.weighs_tokens:
        pooled = (logits * scores[:, reader.logits].double().softmax(0).unsqueeze(-1)).sum(0)
    else:
        pooled = logits.mean(0)
    values = probabilities(reader, pooled).tolist()
    if reader.head.problem_type == "regression":
        return {"value": values[0]}
    by_label: dict[str, JSON] = dict(zip(reader.head.labels, values, strict=True))
    if reader.head.problem_type == "multi_label":
        above = [label for label, value in zip(by_label, values, strict=True) if value > 0.5]
        return {"labels": above, "probabilities": by_label}
    return {"label": list(by_label)[values.index(max(values))], "probabilities": by_label}


def install(engine: Any, layout: Layout) -> None:
    """Make a frontend of vLLM check which readers a request chooses, and give its outputs an attribute `lamina`.

    Args:
        engine: An `LLMEngine` or `AsyncLLM`.
        layout: The engine's readers.
    """
    processor = engine.output_processor
    process_inputs, add_request = engine.input_processor.process_inputs, processor.add_request
    process_outputs = processor.process_outputs

    def check_and_process(request_id: str, prompt: object, params: Any, *args: Any, **kwargs: Any) -> Any:
        _check_choice(params, layout)
        if kwargs.get("resumable"):
            raise ValueError(
                "vllm: the prompt comes in pieces, as a stream; readers need the whole prompt. Send it whole."
            )
        return process_inputs(request_id, prompt, params, *args, **kwargs)

    def add_and_follow(request: Any, *args: Any, **kwargs: Any) -> None:
        add_request(request, *args, **kwargs)
        state = processor.request_states[request.request_id]
        if not hasattr(state, KEY):
            names = layout.asked(_arguments(request.sampling_params or request.pooling_params))
            _attach(state, Answers(layout, names, state.prompt_len))

    def collect_and_process(engine_core_outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
        for output in engine_core_outputs:
            params = output.kv_transfer_params
            if params and KEY in params:
                message = params.pop(KEY)
                output.kv_transfer_params = params or None
                if (state := processor.request_states.get(output.request_id)) is not None:
                    state.lamina.on_message(message)
        return process_outputs(engine_core_outputs, *args, **kwargs)

    engine.input_processor.process_inputs = check_and_process
    processor.add_request, processor.process_outputs = add_and_follow, collect_and_process


def _check_choice(params: Any, layout: Layout) -> None:
    """Raise ValueError if a request names an unknown reader. Let a pooling request skip the prefix cache."""
    try:
        layout.asked(_arguments(params))
    except LaminaError as error:
        raise ValueError(str(error)) from error  # vLLM answers a ValueError with the status of a bad request
    if layout.pooling:
        params.skip_reading_prefix_cache = True  # readers of whole texts need the states of every token


def _arguments(params: Any) -> Any:
    """Return a request's free-form arguments, from its `SamplingParams` or `PoolingParams`."""
    return getattr(params, "extra_args", None) or getattr(params, "extra_kwargs", None)


def keep_answers(output: Any) -> None:
    """Make an output class keep the attribute `lamina` when vLLM builds it from a pooling output."""
    convert = output.from_base
    if hasattr(convert, KEY):
        return

    def convert_with_answers(base: Any) -> Any:
        converted = convert(base)
        if hasattr(base, KEY):
            converted.lamina = base.lamina
        return converted

    vars(convert_with_answers)[KEY] = True
    output.from_base = staticmethod(convert_with_answers)


def _attach(state: Any, answers: Answers) -> None:
    """Set the attribute `lamina` on each output that vLLM creates from a request's `state`.

    A `CompletionOutput` gets the answers about its sequence. A `RequestOutput` gets the answers about its first
    sequence. If a monitor ended a sequence, its finish reason is "content_filter", and its stop reason is the name of
    the monitor.
    """
    state.lamina = answers
    new_completion, make_output = state._new_completion_output, state.make_request_output

    def completion_with_answers(*args: Any, **kwargs: Any) -> Any:
        completion = new_completion(*args, **kwargs)
        completion.lamina = answers
        if answers.ended_by is not None:
            completion.finish_reason, completion.stop_reason = "content_filter", answers.ended_by
        return completion

    def output_with_answers(*args: Any, **kwargs: Any) -> Any:
        output = make_output(*args, **kwargs)
        if output is not None:
            first = output.outputs[0] if isinstance(output.outputs, list) else None
            output.lamina = getattr(first, KEY, answers)  # a pooling output has no sequences
        return output

    state._new_completion_output, state.make_request_output = completion_with_answers, output_with_answers
