"""Run a model for a study: batches go in, and each layer's state is passed to a function as it is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias, cast, final

import numpy as np
import torch
from torch import Tensor

from lamina.bank.stack_pass import real_tokens
from lamina.data.batches import check_tokenizer, length_batches
from lamina.data.encode import encode, length_limit
from lamina.errors import ConfigError, UnsupportedModelError
from lamina.layers import default_stack, select, watch
from lamina.layers.hooks import StopForward, run_stacks, token_mask, tower_inputs
from lamina.layers.preserve import evaluating, uncompiled
from lamina.layers.roles import family_of
from lamina.layers.types import Batch, Processor
from lamina.layers.wrappers import unwrapped
from lamina.studies.runner import own_processor
from lamina.tasks.kind import TextInputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.layers.selectors import Selector
    from lamina.tasks.base import Inputs

# A text, or a pair of texts.
Text: TypeAlias = str | Sequence[str]
# Batches, each with the numbers of its rows; read together because they form one minibatch of a measure.
Group: TypeAlias = Iterable[tuple[list[int], Batch]]
# Called with a layer, its state `[batch, tokens, width]` and the mask of its real tokens `[batch, tokens]`.
OnState: TypeAlias = Callable[[int, Tensor, Tensor], None]


@final
class LayerReader:
    """Reads the states of chosen layers of one stack of a model, batch by batch.

    Args:
        model: The model; it is not changed.
        layers: Layers to read.
        stack: Name of the stack. None: the only one, or the encoder.
        op: Name of the study, for error messages.

    Attributes:
        model: The model, without wrappers such as `torch.compile`.
        stack: The stack that is read.
        layers: Numbers of the layers, ascending.

    Raises:
        LaminaError: If the model has no stack or layer of this name or number.
    """

    def __init__(
        self, model: PreTrainedModel, layers: Selector = "all", stack: str | None = None, *, op: str = "study"
    ) -> None:
        self.model, self._op = unwrapped(model), op
        self.stack = default_stack(self.model, stack, op=op)
        self.layers = select(layers, self.stack.layers, op=op)

    @torch.no_grad()
    def read(self, batch: Batch, on_state: OnState) -> None:
        """Run the model in eval mode on one batch, and stop after the highest chosen layer.

        Args:
            batch: Keyword arguments of the model; tensors are moved to the model's device.
            on_state: Called once per chosen layer, in ascending order, with the layer's number, its state `[batch,
                tokens, width]` and the mask `[batch, tokens]`, True at tokens that are not padding.

        Raises:
            UnsupportedModelError: If the pass did not compute every chosen layer.
        """
        stop, device = StopForward(), self.model.device
        # some models also accept arguments that are no tensors, such as `encoder_outputs`
        batch = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
        masks: list[Tensor | None] = []
        computed: list[int] = []

        def start(args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            inputs = batch if self.stack.tower is None else tower_inputs(self.stack.tower, batch)
            masks[:] = [token_mask(self.stack, inputs, args, kwargs)]

        def receive(layer: int, state: Tensor) -> None:
            computed.append(layer)
            on_state(layer, state, real_tokens(masks[0], state, self.model))
            if computed == self.layers:
                raise stop

        with uncompiled(), evaluating(self.model), watch(self.stack, self.layers, receive, start):
            run_stacks(self.model, [self.stack], batch, stop)
        if computed != self.layers:
            reason = f"a pass computed the layers {computed} of its stack '{self.stack.name}' instead of {self.layers}"
            hint = "Pass batches that run the whole model."
            raise UnsupportedModelError(op=self._op, model_type=family_of(self.model), reason=reason, hint=hint)


def text_inputs(
    model: PreTrainedModel, texts: Iterable[Text], processor: Processor | None, max_length: int | None, *, op: str
) -> TextInputs:
    """Tokenise texts, or pairs of texts, for a model. Texts that are too long are truncated at their end.

    Raises ConfigError if there is no text, an entry is neither a text nor a pair, texts and pairs are mixed, there is
    no tokenizer, or the model does not allow `max_length`.

    Args:
        model: The model that will read the texts.
        texts: All texts, or all pairs of texts (tuples or lists of two strings).
        processor: The tokenizer. None: the one saved with `model.name_or_path`.
        max_length: Maximum tokens per text. None: what the model allows.
        op: Name of the study, for error messages.

    Returns:
        The encoded texts, with the tokenizer that encoded them as `.processor`.
    """
    hint = "Pass a list of texts, or of pairs of texts."
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
    tokenizer = own_processor(model, processor)
    check_tokenizer(tokenizer)
    tokenizer = cast("Processor", tokenizer)
    encoded = encode(
        cast("Sequence[str | tuple[str, str]]", listed),
        tokenizer,
        max_length=length_limit(model, tokenizer, max_length),
        offsets=False,
    )
    return TextInputs(encoded, tokenizer)


def row_groups(count: int, size: int, seed: int) -> list[list[int]]:
    """Return the row numbers 0 to `count` - 1, shuffled with `seed`, in groups of `size` to `2 * size - 1` rows.

    With fewer than `size` rows there is one group of all rows.
    """
    order = np.random.default_rng(seed).permutation(count)
    return [part.tolist() for part in np.array_split(order, max(1, count // size))]


def group_batches(inputs: Inputs, rows: Sequence[int], batch_size: int) -> Iterator[tuple[list[int], Batch]]:
    """Divide `rows` into batches of similar lengths; yield (row numbers, batch) of the encoded `inputs` for each.

    Raises ConfigError if `batch_size` is below 1.
    """
    equal = bool(getattr(inputs, "equal_lengths", False))
    for places in length_batches([int(inputs.lengths[row]) for row in rows], batch_size, equal=equal):
        numbers = [rows[place] for place in places]
        yield numbers, inputs.batch(numbers)


def batch_groups(batches: Iterable[Batch], size: int) -> Iterator[Group]:
    """Join consecutive batches into groups of at least `size` rows.

    Remaining batches with fewer rows join the last group.

    Yields each group as a list of (row numbers, batch) pairs; rows are counted from 0 across all batches. Raises
    ConfigError if there is no batch.
    """
    previous: list[tuple[list[int], Batch]] = []  # yielded only when the next group is complete, since a rest may join
    group: list[tuple[list[int], Batch]] = []
    rows = total = 0
    for batch in batches:
        count = len(next(iter(batch.values())))
        group.append((list(range(total, total + count)), batch))
        rows, total = rows + count, total + count
        if rows >= size:
            if previous:
                yield previous
            previous, group, rows = group, [], 0
    if not total:
        raise ConfigError("study: there is no batch; at least one is needed.")
    yield [*previous, *group]
