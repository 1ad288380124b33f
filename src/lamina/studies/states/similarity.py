"""The study `similarity`: CKA between all layers, and how states move, spread and bend from layer to layer."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING, Literal, NotRequired, TypedDict

import pandas as pd
import torch

from lamina.errors import ConfigError, check_known
from lamina.studies.passes import (
    MOST_TOKENS,
    LayerReader,
    RowVectors,
    batch_groups,
    group_batches,
    row_groups,
    text_inputs,
)
from lamina.studies.runner import check_given
from lamina.studies.states.measures import FEWEST, MEASURES, BlockDistance, MinibatchCKA, NeighbourSample
from lamina.studies.study import Figure, Study, study_settings
from lamina.train.results import tied
from lamina.utils import JSON, check_range, check_types, derive_seed, progress_bar

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.layers.selectors import Selector
    from lamina.layers.types import Batch, Processor
    from lamina.studies.passes import Group, Text

_OP = "similarity"
_ALL = ("cka", *MEASURES, "intrinsic_dimension")
_CKA = (
    "1: two layers hold the same states, apart from rotation and scale; 0: unrelated states. "
    "A bright square is a group of layers that are alike."
)
_SHOWN = {  # measure -> its unit, and what to look for in its chart
    "angular_distance": (
        "angle / pi (0 to 1)",
        "How far a block turns the direction of a token's state. A block with a low value does little.",
    ),
    "block_influence": (
        "1 - cosine (0 to 2)",
        "How much a block changes a token's state. The block with the lowest value is the first candidate to cut.",
    ),
    "entropy": (
        "entropy (nats)",
        "Low: the states of a text's tokens point in few directions, so they are much alike.",
    ),
    "curvature": ("mean angle (radians)", "Low: the state changes in a steady direction from one token to the next."),
    "intrinsic_dimension": (
        "dimensions",
        "Number of directions in which the states of the rows vary. Fewer: the layer has compressed the texts more.",
    ),
}
_SAMPLE = 1000  # maximum number of rows among which neighbours are searched
_SHARE = 4  # with per="token", each minibatch has about this many tokens of each text that it reads


class _LayerRow(TypedDict):
    """A row of the study's table: the score of a measure for a layer of a model.

    `other_model` and `other_layer` are only set for measures of two layers.
    """

    measure: str
    model: str
    layer: int
    other_model: NotRequired[str]
    other_layer: NotRequired[int]
    score: float


@check_types("similarity")
def similarity(  # noqa: PLR0913 the options of a public entry point
    model: PreTrainedModel,
    texts: Iterable[Text] | None = None,
    *,
    processor: Processor | None = None,
    batches: Iterable[Batch] | None = None,
    other: PreTrainedModel | None = None,
    other_processor: Processor | None = None,
    layers: Selector = "all",
    stack: str | None = None,
    measures: Literal["all"] | Collection[str] = "all",
    per: Literal["text", "token"] = "text",
    minibatch: int = 256,
    batch_size: int = 32,
    max_length: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> Study:
    """Compare all layers of a model with each other, or with the layers of another model or checkpoint.

    Every batch runs through the model once, and memory does not grow with the number of texts.

    Measures, one number per layer or pair of layers:
        - "cka": debiased linear CKA of two layers: 1 if they are equal up to rotation and scale, about 0 if they are
          independent.
        - "angular_distance" (0 to 1) and "block_influence" (0 to 2): how far a token's state moves from `other_layer`,
          the next lower layer that is read, to `layer`. If all layers are read, that is the effect of block `layer`.
          The last block includes the final norm, if the model's last state does.
        - "entropy" (nats): how evenly a text's tokens spread over directions. "curvature" (radians): how much the path
          from token to token bends.
        - "intrinsic_dimension": dimension of the rows' vectors, on a random sample of at most 1,000 rows.

    Args:
        model: A transformers model of any supported family; it is not changed.
        texts: Texts, or pairs of texts; at least 4.
        processor: The tokenizer. None: the one saved with `model.name_or_path`.
        batches: Keyword arguments of the model, batch by batch, instead of texts: for images and audio. They are read
            once, in their order, which should be random.
        other: Another model, which reads the same texts or batches.
        other_processor: Tokenizer of the other model. None: both models read the same tokens.
        layers: Layers to read, in both models.
        stack: Name of the stack. None: the only one, or the encoder.
        measures: Names of measures, or "all".
        per: What a row is. "text": the mean of the states of a text's tokens, with special tokens, without padding.
            "token": one token's state; at most 16 tokens of each text are drawn at random, so that memory stays
            bounded.
        minibatch: Rows per unbiased estimate of CKA, at least 4. Minibatches have up to twice as many rows if the rows
            do not divide evenly, and fewer if there are fewer rows in all.
        batch_size: Texts per pass; it affects only the speed.
        max_length: Maximum tokens per text. None: what the model allows.
        seed: Decides the order of the texts, and which tokens are drawn.
        progress: Show a progress bar.

    Returns:
        A study with the columns "measure", "model" ("model" or "other"), "layer", "other_model" and "other_layer" (the
        second layer of a pair; empty for measures of one layer) and "score". CKA has a row for every ordered pair.

    Raises:
        ConfigError: If there are fewer than 4 rows, or, for "cka", all rows have the same states in every layer; if
            there is no tokenizer for `texts`; an option is out of range; both or neither of `texts` and `batches` are
            given; a batch does not fit the model; `other_processor` is given without `other` and `texts`, or with
            `per="token"`; or with `per="token"` the two models have different numbers of tokens.
        UnknownNameError: If a measure, the stack or a value of `per` does not exist.
        LayerIndexError: If a model does not have a layer.
        UnsupportedModelError: If a model's layers cannot be read.
        StoreError: If the saved tokenizer is damaged.

    Source:
        Nguyen, Raghu and Kornblith 2021, arXiv:2010.15327, for CKA from minibatches; a minibatch is a random sample of
        all texts here. `lamina.studies.states.measures` names the sources of the other measures.
    """
    chosen = list(_ALL) if measures == "all" else [measures] if isinstance(measures, str) else list(measures)
    check_given(_OP, measures=chosen)
    check_known(_OP, chosen, _ALL, "measure")
    check_known(_OP, [per], ("text", "token"), "kind of row")
    check_range(_OP, "minibatch", minibatch, FEWEST)
    check_range(_OP, "seed", seed, 0)
    if (texts is None) == (batches is None):
        came = "not" if texts is None else "both"
        raise ConfigError(f"{_OP}: texts and batches are {came} given; exactly one must be.")
    if other_processor is not None and (other is None or per == "token" or texts is None):
        raise ConfigError(f"{_OP}: other_processor is given; it reads texts for another model, a row per text.")
    readers = {"model": LayerReader(model, layers, stack, op=_OP)}
    if other is not None:
        readers["other"] = LayerReader(other, layers, stack, op=_OP)
    measure_classes = dict.fromkeys(MEASURES[name] for name in chosen if name in MEASURES)
    sides = {
        name: RowVectors(reader, [measure(len(reader.layers)) for measure in measure_classes], per=per, seed=seed)
        for name, reader in readers.items()
    }
    size = minibatch if per == "text" else max(1, minibatch // _SHARE)
    if texts is None:
        groups = ([list(group)] * len(sides) for group in batch_groups(batches or (), size))
    else:
        processors = {"model": processor} if other_processor is None else {"model": processor, "other": other_processor}
        inputs = [
            text_inputs(readers[name].model, texts, tokenizer, max_length, op=_OP)
            for name, tokenizer in processors.items()
        ]
        numbers = progress_bar(row_groups(inputs[0].encoded.texts, size, seed), show=progress, desc=_OP)
        groups = ([list(group_batches(read, rows, batch_size)) for read in inputs] * len(sides) for rows in numbers)
    cka, sample = _read(list(sides.values()), groups, minibatch, seed)
    places = [(name, layer) for name, reader in readers.items() for layer in reader.layers]
    rows = list(_rows(sides, places, cka if "cka" in chosen else None, sample))
    passes: dict[str, JSON] = {"batch_size": batch_size, "seed": seed, "max_length": max_length, "per": per}
    settings = study_settings(
        {name: reader.model for name, reader in readers.items()},
        layers={name: reader.layers for name, reader in readers.items()},
        stack=readers["model"].stack.name,
        measures=chosen,
        minibatch=minibatch,
        tokens_per_text=MOST_TOKENS if per == "token" else None,
        rows=cka.rows,
        minibatches=cka.minibatches,
        intrinsic_dimension_rows=sample.rows,
        **passes,
    )
    chosen_rows = [row for row in rows if row["measure"] in chosen]
    columns = ["measure", "model", "layer", "other_model", "other_layer", "score"]
    table = pd.DataFrame(chosen_rows, columns=columns).astype({"layer": "Int64", "other_layer": "Int64"})
    return Study(_OP, table, settings, _figures(chosen, sides), tuple(_conclusions(chosen_rows)))


def _read(
    sides: Sequence[RowVectors], groups: Iterable[Sequence[Group]], minibatch: int, seed: int
) -> tuple[MinibatchCKA, NeighbourSample]:
    """Run one or two models over all groups of batches; return the CKA, and the sample for the intrinsic dimension.

    Both have an entry for each layer of each model, in the order of `sides`. `sides` has one object per model, which
    runs it. Each entry of `groups` has one group per model, with the same rows. A minibatch of CKA has `minibatch` to
    `2 * minibatch - 1` rows, or all rows of a smaller group. `seed` decides the order of the rows within a group.
    Raises ConfigError if the models have different numbers of tokens for the same rows, or a minibatch has fewer than 4
    rows.
    """
    cka, sample = MinibatchCKA(), NeighbourSample(_SAMPLE)
    for number, group in enumerate(groups):
        vectors = [layer for side, batches in zip(sides, group, strict=False) for layer in side.read(batches)]
        rows, device = len(vectors[0]), vectors[0].device
        if len({side.tokens for side in sides}) > 1:
            raise ConfigError(
                f"{_OP}: the two models have different numbers of tokens for the same rows; use per='text'."
            )
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(derive_seed(seed, "rows", number)))
        for part in order.tensor_split(max(1, rows // minibatch)):
            features = [layer.to(device)[part.to(device)] for layer in vectors]
            cka.add(features)
            sample.add(features)
    return cka, sample


def _rows(
    sides: Mapping[str, RowVectors],
    places: Sequence[tuple[str, int]],
    cka: MinibatchCKA | None,
    sample: NeighbourSample,
) -> Iterator[_LayerRow]:
    """Yield the table rows of all measures.

    `sides` is model name -> the object that ran the model, with its measures. `places` are the (model, layer) pairs of
    the rows and columns of `cka`, and of the entries of `sample`, in their order. `cka` is None if CKA was not asked
    for. Raises ConfigError if CKA is not defined, because every layer has the same states in all rows.
    """
    for (name, layer), scores in zip(places, cka.cka().tolist(), strict=True) if cka is not None else ():
        for (other, other_layer), score in zip(places, scores, strict=True):
            row: _LayerRow = {"measure": "cka", "model": name, "layer": layer, "score": score}
            yield {**row, "other_model": other, "other_layer": other_layer}
    for name, side in sides.items():
        for measures in side.measures:
            for measure, scores in measures.scores().items():
                lower_layers = [None, *side.reader.layers]
                for lower, layer, score in zip(lower_layers, side.reader.layers, scores, strict=False):
                    row = {"measure": measure, "model": name, "layer": layer, "score": score}
                    if not isinstance(measures, BlockDistance):
                        yield row
                    elif lower is not None:
                        yield {**row, "other_model": name, "other_layer": lower}
    for (name, layer), score in zip(places, sample.dimensions(), strict=True):
        yield {"measure": "intrinsic_dimension", "model": name, "layer": layer, "score": score}


def _figures(chosen: Sequence[str], sides: Iterable[str]) -> dict[str, Figure]:
    """Return chart name -> chart for the chosen measures. `sides` are the models: "model", and maybe "other".

    CKA has a heat map for each pair of models, and for each model with itself. Any other measure has one line
    chart for all models.
    """
    figures: dict[str, Figure] = {}
    for name, other in combinations_with_replacement(sides, 2) if "cka" in chosen else ():
        where = {"measure": "cka", "model": name, "other_model": other}
        title = "CKA of all pairs of layers" + ("" if name == other == "model" else f": {name} and {other}")
        figures[f"cka {name} {other}"] = Figure(
            "heat", x="layer", y="other_layer", where=where, title=title, value_title="debiased linear CKA", note=_CKA
        )
    for measure in chosen:
        if measure != "cka":
            title = f"{measure.replace('_', ' ').capitalize()} by layer"
            value, note = _SHOWN[measure]
            figures[measure] = Figure(
                "line",
                x="layer",
                colour="model",
                where={"measure": measure},
                title=title,
                value_title=value,
                note=note,
            )
    return figures


def _block_name(row: _LayerRow) -> str:
    """Return the number of the block between a row's two layers, or a range: "3-5" for layers 2 and 5."""
    first, last = row.get("other_layer", 0) + 1, row["layer"]
    return f"{first}-{last}" if first < last else str(last)


def _conclusions(rows: Iterable[_LayerRow]) -> Iterator[str]:
    """Yield a sentence per model with block influences: which blocks change the tokens' states least and most.

    Influences that are NaN or infinite are skipped. A model with fewer than two finite ones gets no sentence.
    """
    influences = [row for row in rows if row["measure"] == "block_influence" and math.isfinite(row["score"])]
    for model in dict.fromkeys(row["model"] for row in influences):
        ranked = sorted((row for row in influences if row["model"] == model), key=lambda row: row["score"])
        if len(ranked) > 1:
            whose = "of the other model " if model == "other" else ""
            by_block = {_block_name(row): row["score"] for row in sorted(ranked, key=lambda row: row["layer"])}
            low, high = ranked[0]["score"], ranked[-1]["score"]
            least, most = (tied(by_block, end, ".3g") for end in (low, high))
            end = "What removing a block costs a task is not measured here."
            if least == most:
                same = f"All {len(ranked)} blocks {whose}change the states of tokens alike (block influence {low:.3g})."
                yield f"{same} {end}"
                continue
            is_one, is_single = len(least) == 1, len(most) == 1
            yield (
                f"Block{'' if is_one else 's'} {', '.join(least)} {whose}change{'s' * is_one} the states of tokens "
                f"least (block influence {low:.3g}) and {'is' if is_one else 'are'} the first "
                f"candidate{'' if is_one else 's'} to remove; block{'' if is_single else 's'} {', '.join(most)} "
                f"change{'s' * is_single} them most ({high:.3g}). {end}"
            )
