"""The logit lens: what each layer would say through the model's own output head."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from lamina.data.batches import tokenizer_of
from lamina.errors import ConfigError, DataError
from lamina.layers.preserve import evaluating
from lamina.studies.passes import LayerReader, group_batches, text_inputs
from lamina.studies.states.output_head import OutputHead, asked_states, in_parts, logits_in_parts
from lamina.studies.states.vectors import own_tokens
from lamina.studies.study import Figure, Study, library_versions, model_facts
from lamina.utils import check_range, derive_seed, pluralize, progress_bar

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.layers.selectors import Selector
    from lamina.studies.passes import Batch

_OP = "lens"
_SHOWN = {  # measure -> its unit, and what to see in its figure
    "probability": ("mean probability of the true token", "Higher is better."),
    "loss": ("cross-entropy (nats)", "Lower is better; where the line is flat, blocks add little to the answer."),
    "rank": ("mean rank (1 is the best)", "Lower is better; a few rare tokens can raise it much."),
    "accuracy": ("share of tokens of rank 1", "Where the line nears its end, the answer is there."),
}
_MEASURES = tuple(_SHOWN)
_MOST = 0.9  # of the model's own right answers


def lens(  # noqa: PLR0913 the options of a public entry point
    model: PreTrainedModel,
    texts: Iterable[Any],
    *,
    processor: Any = None,
    layers: Selector = "all",
    mask_share: float = 0.15,
    batch_size: int = 32,
    max_length: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> Study:
    """Measure how well each layer foretells tokens, if its states went straight to the model's own output head.

    Each layer's states take the place of what the last block gives, so that the model itself applies its final norm and
    head to them. A causal model (which is found by trying) foretells every next token; of another, a masked one, some
    tokens of each text are hidden behind the mask token.

    Measures, means over all tokens that are to be foretold, special ones left out: "probability" of the true token,
    "loss" (nats), "rank" (1 is the best), "accuracy" (share of rank 1).

    Args:
        model: A causal or masked language model with its head; it is left as it is.
        texts: Texts, or pairs of texts.
        processor: The tokenizer; None: the one that belongs to `model.name_or_path`.
        layers: Which layers; the last gives the model's own answers.
        mask_share: Share of each text's tokens that are hidden, at least one, from a masked model.
        batch_size: Texts per pass; it changes nothing but speed.
        max_length: Tokens of a text; None: what the model reads.
        seed: Of the tokens that are hidden.
        progress: Show a progress bar.

    Returns:
        A study whose table has "layer", "measure", "tokens" (how many were foretold) and "score".

    Raises:
        ConfigError: If the model has no language model head, or an option is out of range.
        UnsupportedModelError: If the model has two stacks, no module per block, or does more than a norm and a head.
        DataError: If no text has a token to foretell.
        LayerIndexError: If there is no such layer.

    Source:
        nostalgebraist 2020, "interpreting GPT: the logit lens"; for masked models the same with hidden tokens.
    """
    check_range(_OP, "mask_share", mask_share, 0, 1)
    reader = LayerReader(model, layers, op=_OP)
    head = OutputHead(reader.model, op=_OP)
    inputs = text_inputs(reader.model, texts, processor, max_length, op=_OP)
    mask_token = None if head.causal else _mask_token(inputs.processor)
    sums, count = torch.zeros(len(reader.layers), len(_MEASURES), dtype=torch.float64), 0
    batches = group_batches(inputs, range(len(inputs.encoded)), batch_size)
    with evaluating(reader.model), torch.no_grad():
        for numbers, batch in progress_bar(batches, show=progress, desc=_OP):
            seeds = [derive_seed(seed, number) for number in numbers]
            asked, places, truth = _asked(batch, inputs.processor, mask_token, mask_share, seeds)
            if not len(truth):
                continue
            count += len(truth)
            for index, states in enumerate(asked_states(reader, head, asked, places)):
                for logits, true in zip(logits_in_parts(head, states), in_parts(truth, head), strict=True):
                    sums[index] += _scores(logits, true.to(logits.device))
    if not count:
        raise DataError(f"{_OP}: no text has a token to foretell; texts of two tokens or more are needed.")
    rows = [
        {"layer": layer, "measure": measure, "tokens": count, "score": float(score)}
        for layer, scores in zip(reader.layers, sums / count, strict=True)
        for measure, score in zip(_MEASURES, scores, strict=True)
    ]
    settings = {
        "models": {"model": model_facts(reader.model)},
        "layers": reader.layers,
        "causal": head.causal,
        "mask_share": None if head.causal else mask_share,
        "batch_size": batch_size,
        "max_length": max_length,
        "seed": seed,
        "versions": library_versions(),
    }
    figures = {
        name: Figure(
            "line",
            x="layer",
            where={"measure": name},
            title=f"The true token by layer: {name}",
            value_title=value,
            note=f"The last layer is the model itself. {note}",
        )
        for name, (value, note) in _SHOWN.items()
    }
    return Study(_OP, pd.DataFrame(rows), settings, figures, tuple(_conclusions(rows, reader.stack.depth)))


def perplexity(
    model: PreTrainedModel, texts: Iterable[Any], processor: Any, layer: int, max_length: int | None = None
) -> float:
    """The exponential of the loss, in nats, with which a layer foretells tokens; see `lens`."""
    table = lens(model, texts, processor=processor, layers=[layer], max_length=max_length).table.set_index("measure")
    return math.exp(min(700.0, table.loc["loss", "score"]))


def _conclusions(rows: Sequence[Mapping[str, Any]], depth: int) -> Iterator[str]:
    """Which layer is nearly as often right as the model itself, if that was asked."""
    right = {row["layer"]: row["score"] for row in rows if row["measure"] == "accuracy"}
    if max(right) < depth:
        return
    top = right[depth]
    early = next(layer for layer in sorted(right) if right[layer] >= _MOST * top)
    if top > 0 and early == max(right):
        yield f"No layer below the last reaches {_MOST:.0%} of the model's own accuracy ({top:.1%})."
    elif top > 0:
        yield (
            f"Layer {early} is the first whose accuracy is {_MOST:.0%} of the model's own or more "
            f"({right[early]:.1%} of {pluralize(rows[0]['tokens'], 'token')}; the model {top:.1%})."
        )


def _mask_token(processor: Any) -> int:
    token = tokenizer_of(processor).mask_token_id
    if token is None:
        raise ConfigError(f"{_OP}: the model is not causal, and its tokenizer has no mask token to hide tokens behind.")
    return token


def _asked(
    batch: Batch, processor: Any, mask_token: int | None, share: float, seeds: Sequence[int]
) -> tuple[Batch, tuple[Tensor, Tensor], Tensor]:
    """What the model is called with, the rows and positions at which it is asked, and the true tokens."""
    ids, own = batch["input_ids"], own_tokens(batch["input_ids"], processor)
    own &= batch.get("attention_mask", torch.ones_like(ids)).bool()
    if mask_token is None:
        rows, positions = own[:, 1:].nonzero(as_tuple=True)
        return batch, (rows, positions), ids[rows, positions + 1]
    hidden = torch.zeros_like(own)
    for row, seed in enumerate(seeds):
        tokens = own[row].nonzero().flatten().numpy()
        many = max(1, round(share * len(tokens))) if len(tokens) else 0
        hidden[row, np.random.default_rng(seed).permutation(tokens)[:many]] = True
    places = hidden.nonzero(as_tuple=True)
    return {**batch, "input_ids": ids.masked_fill(hidden, mask_token)}, (places[0], places[1]), ids[places]


def _scores(logits: Tensor, true: Tensor) -> Tensor:
    """Sums of the measures over rows."""
    chances = logits.float().log_softmax(-1)
    said = chances.gather(1, true.unsqueeze(1))
    rank = 1 + (chances > said).sum(1)
    return torch.stack([said.exp().sum(), -said.sum(), rank.sum().float(), (rank == 1).sum().float()]).double().cpu()


def lens_tokens(
    model: PreTrainedModel, text: str, *, processor: Any = None, layers: Selector = "all", top: int = 5
) -> Study:
    """List what each layer would say at each token of one text: its likeliest tokens, through the model's own head.

    A causal model says the next token. A masked one says the token itself, at the mask tokens in the text if there are
    any, else at all of its tokens.

    Args:
        model: A causal or masked language model with its head; it is left as it is.
        text: One text.
        processor: The tokenizer; None: the one that belongs to `model.name_or_path`.
        layers: Which layers.
        top: How many tokens, at least 1.

    Returns:
        A study whose table has "layer", "position" (in the model's input), "token" (the one there), "place" (1 is the
        likeliest), "predicted" and "score" (its probability).

    Raises:
        ConfigError: If the model has no language model head, or `top` is out of range.
        UnsupportedModelError: As `lens`.

    Source:
        As `lens`.
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
    places = shown.nonzero(as_tuple=True)
    rows: list[dict[str, Any]] = []
    with evaluating(reader.model), torch.no_grad():
        for layer, states in zip(reader.layers, asked_states(reader, head, batch, places), strict=True):
            likeliest = torch.cat([logits.float().softmax(-1).topk(top)[0] for logits in logits_in_parts(head, states)])
            names = torch.cat([logits.topk(top)[1] for logits in logits_in_parts(head, states)])
            for position, scores, predicted in zip(places[1].tolist(), likeliest.tolist(), names.tolist(), strict=True):
                token = tokenizer.convert_ids_to_tokens(int(ids[0, position]))
                for place, (score, number) in enumerate(zip(scores, predicted, strict=True), start=1):
                    guess = tokenizer.convert_ids_to_tokens(number)
                    said = {"place": place, "predicted": guess, "score": score}
                    rows.append({"layer": layer, "position": position, "token": token, **said})
    settings = {
        "models": {"model": model_facts(reader.model)},
        "layers": reader.layers,
        "text": text,
        "top": top,
        "causal": head.causal,
        "versions": library_versions(),
    }
    title = "The likeliest token of each layer"
    note = "Read up a column: from where a token stays the same, higher layers change nothing of the answer."
    figure = Figure(
        "heat",
        x="position",
        y="layer",
        label="predicted",
        x_label="token",
        where={"place": 1},
        title=title,
        x_title="token of the text",
        value_title="probability of the likeliest token",
        note=note,
    )
    return Study("lens_tokens", pd.DataFrame(rows), settings, {"likeliest": figure})
