"""The studies `lens` and `lens_tokens` (logit lens): what each layer predicts through the model's own output head."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, cast, final

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from lamina.errors import ConfigError, DataError, NotFiniteError, UnsupportedModelError
from lamina.layers import default_stack
from lamina.layers.preserve import evaluating, preserve_model
from lamina.layers.probe_input import probe_input
from lamina.layers.roles import family_of
from lamina.layers.stack import alike, swapped
from lamina.layers.types import tokenizer_of
from lamina.studies.passes import LayerReader, group_batches, is_text_token, text_inputs
from lamina.studies.study import Figure, Study, study_settings
from lamina.utils import JSON, check_range, check_types, derive_seed, pluralize, progress_bar

if TYPE_CHECKING:
    from collections.abc import Callable

    from transformers import PreTrainedModel

    from lamina.layers.selectors import Selector
    from lamina.layers.types import Batch, Processor
    from lamina.studies.passes import Text


# What a block returns: its state, or a tuple that begins with its state.
BlockOutput: TypeAlias = Tensor | tuple[Tensor, ...]
_CLOSE = 1e-3  # relative to the largest logit; a norm that is left out or applied twice is off by far more
_LOGITS = 2**23  # number of logits that are computed at a time
_SAME = 1e-6  # the tolerance for tokens that a later token cannot influence


@final
class OutputHead:
    """Computes logits from the states of any layer, as the model does from the output of its last block.

    The model runs on one placeholder token. A hook replaces the output of its last block by the states, and the model
    applies its own final norm and head to them. When an instance is made, it checks on a small input that these are the
    model's own logits. The model must be in eval mode when logits are computed.

    Args:
        model: A causal or masked language model.
        op: Name of the study, for error messages.

    Attributes:
        model: The model.
        stack: Its only stack.
        causal: Whether the logits of a token do not depend on the tokens after it.
        classes: Size of the vocabulary.

    Raises:
        ConfigError: If the model has no output over a vocabulary.
        UnsupportedModelError: If the model has two stacks, no module per block, or states of another shape than
            `[batch, tokens, width]`, or mixes tokens after its last block.
    """

    def __init__(self, model: PreTrainedModel, *, op: str) -> None:
        self.model, self._op = model, op
        self.stack = default_stack(model, op=op)
        if self.stack.name != "main" or not self.stack.blocks:
            raise self._unsupported("it is not a single stack with a module per block")
        if self.stack.is_converted:
            raise self._unsupported("its blocks pass on states that are not [batch, tokens, width]")
        if model.get_output_embeddings() is None:
            problem = f"{type(model).__name__} has no output over a vocabulary"
            hint = "Load it with a language modelling head: head='causal_lm' or 'masked_lm'."
            raise ConfigError(f"{op}: {problem}. {hint}")
        self._block, self._wide = self.stack.blocks[-1], False
        # where blocks share weights, the same module is called several times in a pass; the last call is the last block
        self._call = self.stack.blocks.count(self._block) - 1
        points = [point for point in self.stack.points[1:] if isinstance(point.module, type(self._block))]
        self._swap = points[-1].swap if points else None
        self._carrier = {name: value[:1] for name, value in probe_input(model, 1, seed=0).inputs.items()}
        inputs = probe_input(model, 8, seed=1).inputs
        with preserve_model(model), self.last_states() as last:
            own = self._run(inputs)
            again = self._try(last[0].flatten(0, 1)).view_as(own)
            if not alike(again, own, _CLOSE):
                raise self._unsupported("what it does after its last block is not done token by token")
            changed = inputs["input_ids"].clone()
            changed[0, -1] = changed[0, 0]
            other = self._run({**inputs, "input_ids": changed})
        self.classes = own.shape[-1]
        self.causal = alike(other[:1, :-1], own[:1, :-1], _SAME)

    def _unsupported(self, reason: str) -> UnsupportedModelError:
        hint = "Use a causal or a masked language model."
        return UnsupportedModelError(op=self._op, model_type=family_of(self.model), reason=reason, hint=hint)

    def _try(self, states: Tensor) -> Tensor:
        """Return the logits of states. If the model fails on one placeholder token, run it on as many tokens as states.

        Later calls of `logits` do the same. GPT needs this: it reshapes the output of its last block to the shape of
        its input, which raises RuntimeError with one token.
        """
        try:
            return self.logits(states)
        except RuntimeError:
            self._wide = True
            return self.logits(states)

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits `[rows, classes]` that the model gives if `states` `[rows, width]` leave its last block."""

        def replace(output: BlockOutput) -> BlockOutput:
            state = swapped(states.unsqueeze(1), self._swap)
            return state if isinstance(output, Tensor) else (state, *output[1:])

        with self._after_last_block(replace):
            rows = len(states) if self._wide else 1
            return self._run({name: value.expand(rows, -1) for name, value in self._carrier.items()}).flatten(0, 1)

    @contextmanager
    def last_states(self) -> Generator[list[Tensor]]:
        """Record the output of the last block, before a final norm, in this thread's passes inside the `with` block.

        Yields:
            A list, to which each pass appends the state `[batch, tokens, width]`.
        """
        last: list[Tensor] = []

        def record(output: BlockOutput) -> None:
            last.append(swapped(output if isinstance(output, Tensor) else output[0], self._swap))

        with self._after_last_block(record):
            yield last

    def _run(self, inputs: Mapping[str, Tensor]) -> Tensor:
        out = self.model(**inputs)  # pyright: ignore[reportCallIssue]
        logits = getattr(out, "logits", None)
        return out.prediction_logits if logits is None else logits

    @contextmanager
    def _after_last_block(self, act: Callable[[BlockOutput], BlockOutput | None]) -> Generator[None]:
        """Call `act` with the output of the last block, in forward passes of this thread inside the `with` block.

        If `act` returns something other than None, it replaces the output.
        """
        thread, calls = get_ident(), 0

        def hook(_module: nn.Module, _args: object, output: object) -> BlockOutput | None:
            nonlocal calls
            if get_ident() != thread:
                return None
            calls += 1
            is_last = (calls - 1) % (self._call + 1) == self._call
            return act(cast("BlockOutput", output)) if is_last else None

        handle = self._block.register_forward_hook(hook)
        try:
            yield
        finally:
            handle.remove()


def states_at(reader: LayerReader, head: OutputHead, batch: Batch, places: tuple[Tensor, Tensor]) -> Iterator[Tensor]:
    """Run a model on one batch; return an iterator over the layers' states at some tokens, for `OutputHead.logits`.

    Args:
        reader: Reads the layers' states.
        head: Output head of the same model.
        batch: Keyword arguments of the model.
        places: Row numbers and positions of the tokens, as two index tensors.

    Returns:
        For each layer of the reader, ascending, the states `[tokens, width]`. For the model's highest layer they are
        the output of the last block, before the final norm; the model's own `hidden_states` may include that norm.
    """
    states: dict[int, Tensor] = {}
    with head.last_states() as last:
        reader.read(batch, lambda layer, state, _real: states.update({layer: state}))
    if reader.stack.depth in states:
        states[reader.stack.depth] = last[0]
    rows, positions = (place.to(reader.model.device) for place in places)
    return iter([state[rows, positions] for state in states.values()])


def in_parts(values: Tensor, head: OutputHead) -> Sequence[Tensor]:
    """Return `values` in chunks along the first axis, so small that a chunk's logits from `head` fit into memory."""
    return values.split(max(1, _LOGITS // head.classes))


def logits_in_parts(head: OutputHead, states: Tensor) -> Iterator[Tensor]:
    """Yield the logits `[rows, classes]` of states `[rows, width]`, for a few rows at a time; see `in_parts`."""
    return (head.logits(part) for part in in_parts(states, head) if len(part))


_OP = "lens"
_SHOWN = {  # measure -> its unit, and what to look for in its chart
    "probability": ("mean probability of the true token", "Higher is better."),
    "loss": (
        "cross-entropy (nats)",
        "Lower is better. Where the line is level, the blocks add little to the prediction.",
    ),
    "rank": ("mean rank (1 is the best)", "Lower is better. A few rare tokens can raise the mean a lot."),
    "accuracy": (
        "share of tokens of rank 1",
        "Higher is better. From the layer where the line stops rising, higher layers make it right no more often.",
    ),
}
_MEASURES = tuple(_SHOWN)
_MOST = 0.9  # share of the model's own accuracy that a conclusion asks for


@check_types("lens")
def lens(  # noqa: PLR0913 the options of a public entry point
    model: PreTrainedModel,
    texts: Iterable[Text],
    *,
    processor: Processor | None = None,
    layers: Selector = "all",
    mask_share: float = 0.15,
    batch_size: int = 32,
    max_length: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> Study:
    """Measure how well each layer predicts tokens when the model's own output head reads the layer's states.

    The states of each layer replace the output of the last block, and the model applies its own final norm and head to
    them. A causal model predicts every next token. A masked language model predicts some tokens of each text, which are
    replaced by the mask token. A small test input shows which of the two a model is.

    Measures are means over all predicted tokens, without special tokens: "probability" of the true token, "loss"
    (nats), "rank" (1 is the best) and "accuracy" (share of rank 1). All are NaN at a layer that has a NaN logit.

    Args:
        model: A causal or masked language model with its head; it is not changed.
        texts: Texts, or pairs of texts.
        processor: The tokenizer. None: the one saved with `model.name_or_path`.
        layers: Layers to read; the last one gives the model's own predictions.
        mask_share: For masked language models, the share of each text's tokens that is masked, from 0 to 1; at least
            one token is masked.
        batch_size: Texts per pass; it affects only the speed.
        max_length: Maximum tokens per text. None: what the model allows.
        seed: Decides which tokens are masked.
        progress: Show a progress bar.

    Returns:
        A study with the columns "layer", "measure", "tokens" (number of predicted tokens) and "score".

    Raises:
        ConfigError: If the model has no language model head; if there is no text or no tokenizer, or a masked language
            model's tokenizer has no mask token; or if an option is not valid.
        UnsupportedModelError: If the model has two stacks, no module per block, or states of another shape than
            `[batch, tokens, width]`, or mixes tokens after its last block.
        DataError: If no text has a token to predict.
        LayerIndexError: If a layer does not exist.
        StoreError: If the saved tokenizer is damaged.

    Source:
        nostalgebraist 2020, "interpreting GPT: the logit lens". Masked language models were added here.
    """
    check_range(_OP, "mask_share", mask_share, 0, 1)
    reader = LayerReader(model, layers, op=_OP)
    head = OutputHead(reader.model, op=_OP)
    inputs = text_inputs(reader.model, texts, processor, max_length, op=_OP)
    mask_token = None if head.causal else tokenizer_of(inputs.processor).mask_token_id
    if mask_token is None and not head.causal:
        raise ConfigError(f"{_OP}: the model is not causal, and its tokenizer has no mask token to hide tokens behind.")
    sums, count = torch.zeros(len(reader.layers), len(_MEASURES), dtype=torch.float64), 0
    batches = group_batches(inputs, range(len(inputs.encoded)), batch_size)
    with evaluating(reader.model), torch.no_grad():
        for numbers, batch in progress_bar(batches, show=progress, desc=_OP):
            seeds = [derive_seed(seed, number) for number in numbers]
            asked = _predictions_to_make(batch, inputs.processor, mask_token, mask_share, seeds)
            if not len(asked.truth):
                continue
            count += len(asked.truth)
            for index, states in enumerate(states_at(reader, head, asked.batch, asked.places)):
                for logits, true in zip(logits_in_parts(head, states), in_parts(asked.truth, head), strict=True):
                    sums[index] += _scores(logits, true.to(logits.device))
    if not count:
        raise DataError(f"{_OP}: no text has a token to predict; texts of two tokens or more are needed.")
    scores: dict[str, list[float]] = dict(zip(_MEASURES, (sums / count).T.tolist(), strict=True))
    rows = [
        {"layer": layer, "measure": measure, "tokens": count, "score": scores[measure][index]}
        for index, layer in enumerate(reader.layers)
        for measure in _MEASURES
    ]
    passes: dict[str, JSON] = {"batch_size": batch_size, "max_length": max_length, "layers": reader.layers}
    share = None if head.causal else mask_share
    settings = study_settings({"model": reader.model}, **passes, causal=head.causal, mask_share=share, seed=seed)
    figures = {
        name: Figure(
            "line",
            x="layer",
            where={"measure": name},
            title=f"The true token by layer: {name}",
            value_title=value,
            note=f"{note} The last layer is the model's own prediction.",
        )
        for name, (value, note) in _SHOWN.items()
    }
    accuracy = dict(zip(reader.layers, scores["accuracy"], strict=True))
    return Study(_OP, pd.DataFrame(rows), settings, figures, tuple(_conclusions(accuracy, count, reader.stack.depth)))


def perplexity(
    model: PreTrainedModel,
    texts: Iterable[Text],
    processor: Processor | None,
    layer: int,
    max_length: int | None = None,
) -> float:
    """Return the perplexity of one layer on some texts: exp(mean loss), with the loss of `lens` in nats.

    `layer` is the layer's number; the highest layer gives the model's own perplexity. A masked language model predicts
    masked tokens, a causal model all next tokens. The result is at most exp(700). The other arguments and the errors
    are those of `lens`; and NotFiniteError is raised if the loss is NaN.
    """
    table = lens(model, texts, processor=processor, layers=[layer], max_length=max_length).table.set_index("measure")
    if math.isnan(loss := table.loc["loss", "score"]):
        problem = f"the loss at layer {layer} is NaN, so there is no perplexity"
        raise NotFiniteError(f"{_OP}: {problem}. Load the model in float32.", name=f"layer {layer}")
    return math.exp(min(loss, 700.0))  # exp(710) overflows


def _conclusions(accuracy: Mapping[int, float], tokens: int, depth: int) -> Iterator[str]:
    """Yield a sentence that names the lowest layer with at least 90 % of the model's own accuracy.

    If only the last layer, `depth`, has it, the sentence says so. Nothing is yielded if `depth` is not in `accuracy`
    (layer -> accuracy, ascending), the model predicted nothing right, or its accuracy is NaN. `tokens` is the number of
    predicted tokens.
    """
    own = accuracy.get(depth, 0.0)
    if not own > 0:
        return
    early = next(layer for layer in accuracy if accuracy[layer] >= _MOST * own)
    if early == depth:
        yield f"No layer below the last reaches {_MOST:.0%} of the model's own accuracy ({own:.1%})."
    else:
        yield (
            f"Layer {early} is the first whose accuracy is at least {_MOST:.0%} of the model's own "
            f"({accuracy[early]:.1%} of {pluralize(tokens, 'token')}; the model: {own:.1%})."
        )


class _Asked(NamedTuple):
    """The tokens of one batch that a model has to predict.

    Attributes:
        batch: Keyword arguments of the model. For a masked language model, tokens in them are masked.
        places: Row numbers and positions of the states that make the predictions, as two index tensors.
        truth: Id of the true token of each prediction.
    """

    batch: Batch
    places: tuple[Tensor, Tensor]
    truth: Tensor


def _predictions_to_make(
    batch: Batch, processor: Processor, mask_token: int | None, share: float, seeds: Sequence[int]
) -> _Asked:
    """Choose the tokens of a batch that a model must predict, and mask them if the model is not causal.

    A causal model (`mask_token` is None) predicts every next token. Otherwise `share` is the fraction of each text's
    tokens to mask, at least one if it has any, and the text's entry of `seeds` decides which. `batch` stays. Special
    tokens and padding are not predicted.
    """
    ids, in_text = batch["input_ids"], is_text_token(batch["input_ids"], processor)
    in_text &= batch.get("attention_mask", torch.ones_like(ids)).bool()
    if mask_token is None:
        rows, positions = in_text[:, 1:].nonzero(as_tuple=True)
        return _Asked(batch, (rows, positions), ids[rows, positions + 1])
    hidden = torch.zeros_like(in_text)
    for row, seed in enumerate(seeds):
        tokens = in_text[row].nonzero().flatten().numpy()
        many = max(1, round(share * len(tokens))) if len(tokens) else 0
        hidden[row, np.random.default_rng(seed).permutation(tokens)[:many]] = True
    rows, positions = hidden.nonzero(as_tuple=True)
    masked = {**batch, "input_ids": ids.masked_fill(hidden, mask_token)}
    return _Asked(masked, (rows, positions), ids[rows, positions])


def _scores(logits: Tensor, true: Tensor) -> Tensor:
    """Return the sum of each measure over predictions, `[measures]`, in the order of `_MEASURES`.

    `logits` are `[rows, classes]`, one row per prediction, and `true` holds the id of the true token of each. The rank
    is 1 plus the number of tokens with a higher probability. If a logit is NaN, all sums are NaN.
    """
    chances = logits.float().log_softmax(-1)
    true_chance = chances.gather(1, true.unsqueeze(1))
    rank = 1 + (chances > true_chance).sum(1)
    sums = true_chance.exp().sum(), -true_chance.sum(), rank.sum().float(), (rank == 1).sum().float()
    total = torch.stack(sums)
    return torch.where(total[1].isnan(), total[1], total).double().cpu()  # no token is above NaN: its rank would be 1


@check_types("lens_tokens")
def lens_tokens(
    model: PreTrainedModel, text: str, *, processor: Processor | None = None, layers: Selector = "all", top: int = 5
) -> Study:
    """List the most likely tokens that each layer predicts at each token of a text, through the model's own head.

    A causal model predicts the next token. A masked language model predicts the token at its own position: at the mask
    tokens of the text if there are any, else at all tokens.

    Args:
        model: A causal or masked language model with its head; it is not changed.
        text: One text; it is truncated to what the model allows.
        processor: The tokenizer. None: the one saved with `model.name_or_path`.
        layers: Layers to read.
        top: Number of tokens to list, from 1 to the size of the vocabulary.

    Returns:
        A study with the columns "layer", "position" (in the model's input, from 0), "token" (the token there), "place"
        (1 is the most likely), "predicted" and "score" (its probability).

    Raises:
        ConfigError: If the model has no language model head, there is no tokenizer, or an option is not valid.
        UnsupportedModelError: If the model has two stacks, no module per block, or states of another shape than
            `[batch, tokens, width]`, or mixes tokens after its last block.
        LayerIndexError: If a layer does not exist.
        StoreError: If the saved tokenizer is damaged.

    Source:
        nostalgebraist 2020, "interpreting GPT: the logit lens".
    """
    reader = LayerReader(model, layers, op="lens_tokens")
    head = OutputHead(reader.model, op="lens_tokens")
    inputs = text_inputs(reader.model, [text], processor, None, op="lens_tokens")
    check_range("lens_tokens", "top", top, 1, head.classes)
    batch, tokenizer = inputs.batch([0]), tokenizer_of(inputs.processor)
    ids = batch["input_ids"]
    shown = ids == tokenizer.mask_token_id if tokenizer.mask_token_id is not None else torch.zeros_like(ids).bool()
    if head.causal or not shown.any():
        shown = torch.ones_like(shown)
    row_numbers, positions = shown.nonzero(as_tuple=True)
    rows: list[dict[str, JSON]] = []
    with evaluating(reader.model), torch.no_grad():
        for layer, states in zip(reader.layers, states_at(reader, head, batch, (row_numbers, positions)), strict=True):
            likeliest: list[Tensor] = []
            chances: list[Tensor] = []
            for logits in logits_in_parts(head, states):
                likeliest.append(logits.topk(top).indices)
                chances.append(logits.float().softmax(-1).gather(1, likeliest[-1]))
            scores, numbers = torch.cat(chances).tolist(), torch.cat(likeliest).tolist()
            for index, position in enumerate(positions.tolist()):
                token = tokenizer.convert_ids_to_tokens(int(ids[0, position]))
                here = {"layer": layer, "position": position, "token": token}
                for place, (score, number) in enumerate(zip(scores[index], numbers[index], strict=True), start=1):
                    predicted = tokenizer.convert_ids_to_tokens(number)
                    rows.append({**here, "place": place, "predicted": predicted, "score": score})
    options: dict[str, JSON] = {"layers": reader.layers, "text": text, "top": top, "causal": head.causal}
    settings = study_settings({"model": reader.model}, **options)
    title = "The most likely token of each layer"
    note = "Read a column from the bottom up. Once its token stays the same, higher layers do not change it."
    figure = Figure(
        "heat",
        x="position",
        y="layer",
        label="predicted",
        x_label="token",
        where={"place": 1},
        title=title,
        x_title="token of the text",
        value_title="probability of the most likely token",
        note=note,
    )
    return Study("lens_tokens", pd.DataFrame(rows), settings, {"likeliest": figure})
