"""Runs of a model that a study reads: texts as batches, and each layer's state handed on as it is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

import numpy as np
import torch
from torch import Tensor

from lamina.bank.stack_pass import real_tokens
from lamina.data.batches import length_batches
from lamina.data.encode import encode, length_limit
from lamina.errors import ConfigError, UnsupportedModelError
from lamina.layers import default_stack, select, watch
from lamina.layers.hooks import StopForward, token_mask
from lamina.layers.preserve import evaluating
from lamina.layers.roles import family_of
from lamina.layers.towers import run_stacks, tower_inputs
from lamina.layers.wrappers import uncompiled, unwrapped
from lamina.studies.sources import own_processor
from lamina.tasks.inputs import TextInputs, check_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.layers.selectors import Selector
    from lamina.tasks.base import Inputs

Batch = Mapping[str, Any]  # what a model is called with
Group = Iterable[tuple[list[int], Batch]]  # batches, each with the numbers of its rows
OnLayer = Callable[[int, Tensor, Tensor], None]


@final
class LayerReader:
    """Chosen layers of one stack of a model."""

    def __init__(
        self, model: PreTrainedModel, layers: Selector = "all", stack: str | None = None, *, op: str = "study"
    ) -> None:
        self.model, self._op = unwrapped(model), op
        self.stack = default_stack(self.model, stack, op=op)
        self.layers = select(layers, self.stack.layers, op=op)

    @torch.no_grad()
    def read(self, batch: Batch, on_state: OnLayer) -> None:
        """Run the model, in eval mode, up to the last chosen layer.

        Args:
            batch: What the model is called with.
            on_state: Called with each chosen layer, its state `[batch, tokens, width]` and the mask of its real tokens
                `[batch, tokens]`, layers ascending.

        Raises:
            UnsupportedModelError: If the pass did not come to every chosen layer.
        """
        stop, device = StopForward(), self.model.device
        batch = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
        given: list[Tensor | None] = []
        taken: list[int] = []

        def start(args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            given[:] = [token_mask(self.stack, tower_inputs(self.stack, batch), args, kwargs)]

        def pass_on(layer: int, state: Tensor) -> None:
            taken.append(layer)
            on_state(layer, state, real_tokens(given[0], state, self.model))
            if taken == self.layers:
                raise stop

        with uncompiled(), evaluating(self.model), watch(self.stack, self.layers, pass_on, start):
            run_stacks(self.model, [self.stack], batch, stop)
        if taken != self.layers:
            reason = f"a pass came to the layers {taken} of its stack '{self.stack.name}', not to {self.layers}"
            hint = "Give batches that run the whole model."
            raise UnsupportedModelError(op=self._op, model_type=family_of(self.model), reason=reason, hint=hint)


def text_inputs(
    model: PreTrainedModel, texts: Iterable[Any], processor: Any, max_length: int | None, *, op: str
) -> TextInputs:
    """Tokenise texts, or pairs of texts; a longer one loses its end.

    Without a processor it is the one that belongs to `model.name_or_path`.

    Raises:
        ConfigError: If something else came than texts, there is none, or no tokenizer.
    """
    hint = "Give a list of texts, or of pairs of texts."
    if isinstance(texts, str | bytes | Mapping) or not isinstance(texts, Iterable):
        raise ConfigError(f"{op}: texts is one {type(texts).__name__}. {hint}")
    listed = texts if isinstance(texts, Sequence) else list(texts)
    if not len(listed):
        raise ConfigError(f"{op}: there is no text; at least one is needed.")
    size = 0 if isinstance(listed[0], str) else 2
    for row, text in enumerate(listed):
        parts = text if size and isinstance(text, tuple | list) else [text]
        if len(parts) != (size or 1) or not all(isinstance(part, str) for part in parts):
            raise ConfigError(f"{op}: entry {row} of texts is {type(text).__name__} unlike the first. {hint}")
    own = own_processor(model, processor)
    check_tokenizer(own)
    limit = length_limit(model, own, max_length)
    return TextInputs(encode(listed, own, max_length=limit, offsets=False), own)


def row_groups(count: int, size: int, seed: int) -> list[list[int]]:
    """Row numbers in random groups of `size` to twice as many less one, or one smaller group of all."""
    order = np.random.default_rng(seed).permutation(count)
    return [part.tolist() for part in np.array_split(order, max(1, count // size))]


def group_batches(inputs: Inputs, rows: Sequence[int], batch_size: int) -> Group:
    """Some rows of inputs as batches of like length, each with the numbers of its rows."""
    equal = bool(getattr(inputs, "equal_lengths", False))
    for places in length_batches([int(inputs.lengths[row]) for row in rows], batch_size, equal=equal):
        numbers = [rows[place] for place in places]
        yield numbers, inputs.batch(numbers)


def batch_groups(batches: Iterable[Batch], size: int) -> Iterator[Group]:
    """Batches in the order they come, in groups of at least `size` rows; a smaller rest joins the last group."""
    held: list[tuple[list[int], Batch]] = []
    group: list[tuple[list[int], Batch]] = []
    rows = total = 0
    for batch in batches:
        count = len(next(iter(batch.values())))
        group.append((list(range(total, total + count)), batch))
        rows, total = rows + count, total + count
        if rows >= size:
            if held:
                yield held
            held, group, rows = group, [], 0
    if not total:
        raise ConfigError("study: there is no batch; at least one is needed.")
    yield [*held, *group]
