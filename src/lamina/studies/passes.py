"""Run a model for a study: batches go in, and each layer's state is passed to a function as it is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias, cast, final

import numpy as np
import torch
from torch import Tensor

from lamina.bank.stack_pass import real_tokens
from lamina.data.batches import length_batches
from lamina.data.encode import encode, length_limit
from lamina.errors import ConfigError, DataError, UnsupportedModelError
from lamina.layers import default_stack, select, watch
from lamina.layers.hooks import StopForward, holds_cache, run_stacks, token_mask, tower_inputs
from lamina.layers.preserve import evaluating, uncompiled
from lamina.layers.roles import family_of
from lamina.layers.types import Batch, check_tokenizer, ids_problem, tokenizer_of
from lamina.layers.wrappers import unwrapped
from lamina.studies.runner import own_processor
from lamina.tasks.kind import TextInputs
from lamina.utils import check_range, derive_seed

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from transformers import PreTrainedModel

    from lamina.layers.selectors import Selector
    from lamina.layers.types import Processor
    from lamina.studies.states.measures import LayerMeasure
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
        LaminaError: If the stack or a layer does not exist, or the model's layers cannot be found.
    """

    def __init__(
        self, model: PreTrainedModel, layers: Selector = "all", stack: str | None = None, *, op: str = "study"
    ) -> None:
        self.model, self._op = unwrapped(model), op
        self.stack = default_stack(self.model, stack, op=op)
        self.layers = select(layers, self.stack.layers, op=op)

    @torch.no_grad()
    def read(self, batch: Batch, on_state: OnState) -> None:
        """Run the model on one batch, in eval mode and without gradients, and stop after the highest chosen layer.

        With a cache among the arguments, the model runs to its end.

        Args:
            batch: Keyword arguments of the model; tensors are moved to the model's device.
            on_state: Called once per chosen layer, in ascending order, with the layer's number, its state `[batch,
                tokens, width]` and the mask `[batch, tokens]`: True at tokens that are not padding, and at the first of
                a row of padding alone.

        Raises:
            UnsupportedModelError: If the pass did not compute every chosen layer.
            ConfigError: If the batch lacks an input, has an empty one, has a token id for which the model has no row,
                or has a mask that `token_mask` refuses or that does not fit the states.
        """
        stop = None if holds_cache(batch) else StopForward()
        device, given = self.model.device, batch
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
            if stop is not None and computed == self.layers:
                raise stop

        with uncompiled(), evaluating(self.model), watch(self.stack, self.layers, receive, start):
            try:
                run_stacks(self.model, [self.stack], batch, stop)
            except (IndexError, RuntimeError) as error:
                if problem := ids_problem(self.model, given):
                    raise ConfigError(f"{self._op}: {problem}.") from error
                raise
        if computed != self.layers:
            reason = f"a pass computed the layers {computed} of its stack '{self.stack.name}' instead of {self.layers}"
            hint = "Pass batches that run the whole model."
            raise UnsupportedModelError(op=self._op, model_type=family_of(self.model), reason=reason, hint=hint)


def text_inputs(
    model: PreTrainedModel, texts: Iterable[Text], processor: Processor | None, max_length: int | None, *, op: str
) -> TextInputs:
    """Tokenise texts, or pairs of texts, for a model. Longer texts are cut at the tokenizer's `truncation_side`.

    Args:
        model: The model that will read the texts.
        texts: All texts, or all pairs of texts (tuples or lists of two strings).
        processor: The tokenizer. None: the one saved with `model.name_or_path`.
        max_length: Maximum tokens per text or pair, special tokens included. None: what the model allows.
        op: Name of the study, for error messages.

    Returns:
        The encoded texts in the order of `texts`, with the tokenizer that encoded them as `.processor`.

    Raises:
        ConfigError: If `texts` is empty, has an entry that is neither a text nor a pair, or mixes texts and pairs; if
            there is no tokenizer; or if the model does not allow `max_length`, or this leaves no room for text.
        StoreError: If the saved tokenizer is damaged.
    """
    listed = texts if isinstance(texts, Sequence) else list(texts)
    if not len(listed):
        raise ConfigError(f"{op}: there is no text; at least one is needed.")
    size = 0 if isinstance(listed[0], str) else 2
    for row, text in enumerate(listed):
        parts = text if size and isinstance(text, tuple | list) else [text]
        if len(parts) != (size or 1) or not all(isinstance(part, str) for part in parts):
            got = f"texts[{row}] is {text!r:.60}"
            raise ConfigError(f"{op}: {got}; each entry must be a text, or each a pair of texts.")
    tokenizer = own_processor(model, processor)
    check_tokenizer(tokenizer)
    tokenizer = cast("Processor", tokenizer)
    encoded = encode(
        cast("Sequence[str | tuple[str, str]]", listed),
        tokenizer,
        max_length=length_limit(model, tokenizer, max_length),
        offsets=False,
    )
    return TextInputs(encoded, tokenizer).for_model(model)


def row_groups(count: int, size: int, seed: int) -> list[list[int]]:
    """Return the row numbers 0 to `count` - 1, shuffled with `seed`, in groups of `size` to `2 * size - 1` rows.

    With fewer than `size` rows there is one group of all rows.
    """
    order = np.random.default_rng(seed).permutation(count)
    return [part.tolist() for part in np.array_split(order, max(1, count // size))]


def group_batches(inputs: Inputs, rows: Sequence[int], batch_size: int) -> Iterator[tuple[list[int], Batch]]:
    """Yield (row numbers, batch) pairs: the `rows` of encoded `inputs`, in batches of similar lengths, longest first.

    If `inputs.equal_lengths` is True, all rows of a batch have the same length. Raises ConfigError if `batch_size` is
    below 1.
    """
    equal = bool(getattr(inputs, "equal_lengths", False))
    for places in length_batches([int(inputs.lengths[row]) for row in rows], batch_size, equal=equal):
        numbers = [rows[place] for place in places]
        yield numbers, inputs.batch(numbers)


def unlabelled_batches(inputs: Inputs, count: int) -> list[Batch]:
    """Return the first `count` rows of encoded `inputs` in random batches of 32 to 63 rows, without their labels.

    With fewer than 32 rows there is one batch of all rows. If `inputs.equal_lengths` is True, each such batch is split
    into batches of one length. Every call draws the same batches.
    """
    groups = list[Batch]()
    for rows in row_groups(count, 32, 0):
        equal = bool(getattr(inputs, "equal_lengths", False))
        groups += [batch for _, batch in group_batches(inputs, rows, len(rows))] if equal else [inputs.batch(rows)]
    return [{name: value for name, value in batch.items() if name != "labels"} for batch in groups]


def batch_groups(batches: Iterable[Batch], size: int) -> Iterator[Group]:
    """Join consecutive batches into groups of at least `size` rows; yield each as a list of (row numbers, batch) pairs.

    Rows are counted from 0 across all batches. Remaining batches with fewer rows join the last group; if there is no
    other group, they form one. Raises ConfigError if there is no batch.
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


MOST_TOKENS = 16  # tokens of one text that become rows, at most


@final
class RowVectors:
    """Runs a model over batches, and returns one vector per row and layer.

    Args:
        reader: Reads the layers' states.
        measures: Measures that receive every state.
        per: What a row is. "text": a text, as the mean over its tokens without padding. "token": one of at most 16
            tokens of each text, drawn at random.
        seed: Seed of the draw; together with a text's number it decides which tokens are drawn.

    Attributes:
        tokens: Number of tokens read so far, without padding. Always 0 with `per="text"`.
    """

    def __init__(
        self, reader: LayerReader, measures: Sequence[LayerMeasure], *, per: Literal["text", "token"], seed: int
    ) -> None:
        self.reader, self.measures = reader, measures
        self._per, self._seed = per, seed
        self.tokens = 0

    def read(self, group: Group) -> list[Tensor]:
        """Run the model over a group's batches; return for each layer of `reader` its float32 vectors `[rows, width]`.

        All states also go to `measures`. Texts are in ascending order of their row numbers. Tokens are in an arbitrary
        order, which is the same for all layers. Raises UnsupportedModelError or ConfigError as `LayerReader.read` does.
        """
        parts: list[list[Tensor]] = [[] for _ in self.reader.layers]
        order: list[int] = []
        for numbers, batch in group:
            drawn: list[tuple[Tensor, Tensor]] = []

            def on_state(
                layer: int,
                state: Tensor,
                real: Tensor,
                numbers: list[int] = numbers,
                drawn: list[tuple[Tensor, Tensor]] = drawn,
            ) -> None:
                index = self.reader.layers.index(layer)
                for measure in self.measures:
                    measure.on_state(index, state, real)
                if self._per == "token" and not drawn:  # once per batch, so that all layers have the same tokens
                    drawn.append(draw_tokens(real, numbers, self._seed))
                    self.tokens += int(real.sum())
                parts[index].append(state[drawn[0]].float() if drawn else mean_state(state, real))

            self.reader.read(batch, on_state)
            order += numbers
        sort = torch.tensor(np.argsort(order)) if self._per == "text" else slice(None)
        return [torch.cat(vectors)[sort] for vectors in parts]


def mean_state(
    state: Float[Tensor, "batch tokens width"], counted: Bool[Tensor, "batch tokens"]
) -> Float[Tensor, "batch width"]:
    """Return each text's mean state, over the tokens where `counted` is True, in float32; NaN without such a token."""
    weights = counted.float() / counted.sum(1, keepdim=True)
    return torch.bmm(weights.unsqueeze(1), state.float()).squeeze(1)


def draw_tokens(real: Bool[Tensor, "batch tokens"], numbers: Sequence[int], seed: int) -> tuple[Tensor, Tensor]:
    """Draw at most `MOST_TOKENS` tokens of each text; return (rows, positions), two index tensors `[drawn]`.

    `real` is True at tokens that are not padding. The draw depends on the seed and a text's number (in `numbers`)
    alone, not on the other texts of the batch.
    """
    rows: list[int] = []
    positions: list[int] = []
    for row, (mask, number) in enumerate(zip(real.cpu(), numbers, strict=True)):
        tokens = mask.nonzero().flatten().numpy()
        drawn = np.random.default_rng(derive_seed(seed, number)).permutation(len(tokens))[:MOST_TOKENS]
        rows += [row] * len(drawn)
        positions += tokens[drawn].tolist()
    return torch.tensor(rows, device=real.device), torch.tensor(positions, device=real.device)


def is_text_token(ids: Tensor, processor: Processor) -> Tensor:
    """Return a mask in the shape of the token `ids` (on the CPU): False at special tokens, such as padding, else True.

    The tokens for an unknown and for a masked word do not count as special here.
    """
    tokenizer = tokenizer_of(processor)
    in_text = {tokenizer.unk_token_id, tokenizer.mask_token_id}
    special = [number for number in tokenizer.all_special_ids if number not in in_text]
    return ~torch.isin(ids, torch.tensor(special, dtype=torch.long))


_TOGETHER = 32  # maximum number of prompts of one length that are continued in one call


def prompt_ids(
    model: PreTrainedModel, texts: Iterable[Text], processor: Processor, *, tokens: int | None, op: str
) -> list[Tensor]:
    """Return the token ids `[tokens]` of each prompt in `texts`, without special tokens at the end.

    Texts are truncated to `tokens` tokens, special ones included, or to what the model allows (if that is less, or for
    None). Texts with special tokens alone are left out. Raises DataError if none is left, and ConfigError or StoreError
    as `text_inputs` does; messages begin with `op`.
    """
    limit = length_limit(model, processor)
    inputs = text_inputs(model, texts, processor, limit if tokens is None else min(tokens, limit), op=op)
    prompts: list[Tensor] = []
    for row in range(len(inputs.lengths)):
        ids = inputs.batch([row])["input_ids"]
        positions = is_text_token(ids, processor)[0].nonzero().flatten().tolist()
        if positions:
            prompts.append(ids[0, : positions[-1] + 1])
    if not prompts:
        raise DataError(f"{op}: no prompt has a token to continue; pass texts with words.")
    return prompts


def continuations(
    model: PreTrainedModel, prompts: Sequence[Tensor], processor: Processor, *, new_tokens: int, op: str
) -> list[list[int]]:
    """Continue each prompt (token ids `[tokens]`) by greedy decoding; return the new token ids of each, in order.

    Generation stops after `new_tokens` tokens, or after an end token, which is part of the result. Prompts of the same
    length are continued together, so that no prompt is padded. Raises ConfigError, whose message begins with `op`, if
    `new_tokens` is below 1, or the longest prompt plus `new_tokens` is longer than what the model allows.
    """
    longest, limit = max(map(len, prompts)), length_limit(model, processor)
    if longest >= limit:
        came = f"a prompt has {longest} tokens, and the model allows {limit}, new ones included"
        raise ConfigError(f"{op}: {came}. Use shorter prompts.")
    check_range(op, "new_tokens", new_tokens, 1, limit - longest)
    ends = model.generation_config.eos_token_id if model.generation_config is not None else None
    end_tokens = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
    # a finished continuation is padded up to the longest of its batch; what comes after an end token is cut off below
    options = {"max_new_tokens": new_tokens, "do_sample": False, "num_beams": 1}
    options["pad_token_id"] = min(end_tokens, default=0)
    generated: dict[int, list[int]] = {}
    rows = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
    while rows:
        length = len(prompts[rows[0]])
        group = [row for row in rows[:_TOGETHER] if len(prompts[row]) == length]
        rows = rows[len(group) :]
        ids = torch.stack([prompts[row] for row in group]).to(model.device)
        with torch.no_grad(), evaluating(model):
            texts = cast("Tensor", model.generate(ids, attention_mask=torch.ones_like(ids), **options))  # pyright: ignore
        for row, tokens in zip(group, texts[:, length:].tolist(), strict=True):
            end = next((place + 1 for place, token in enumerate(tokens) if token in end_tokens), len(tokens))
            generated[row] = tokens[:end]
    return [generated[row] for row in range(len(prompts))]


def same_share(whole: Sequence[int], other: Sequence[int]) -> float:
    """Return the share (0 to 1) of the tokens of `whole` (not empty) before its first difference from `other`.

    If `other` ends first, its end counts as a difference.
    """
    pairs = enumerate(zip(whole, other, strict=False))
    equal = next((place for place, (token, other_token) in pairs if token != other_token), None)
    return (min(len(whole), len(other)) if equal is None else equal) / len(whole)
