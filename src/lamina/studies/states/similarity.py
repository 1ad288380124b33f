"""How alike layers are: debiased CKA between all of them, and how states move, spread and bend from layer to layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING, Any, Literal

import pandas as pd
import torch

from lamina.errors import ConfigError, check_known
from lamina.studies.passes import LayerReader, batch_groups, group_batches, row_groups, text_inputs
from lamina.studies.states.measures import FEWEST, MEASURES, BlockDistance, MinibatchCKA, NeighbourSample
from lamina.studies.states.vectors import MOST_TOKENS, RowVectors
from lamina.studies.study import Figure, Study, library_versions, model_facts
from lamina.utils import check_range, derive_seed, progress_bar

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.layers.selectors import Selector
    from lamina.studies.passes import Batch, Group

_OP = "similarity"
_ALL = ("cka", *MEASURES, "intrinsic_dimension")
_CKA = "1 is the same up to rotation and scale, 0 independent. Bright squares are runs of layers that are alike."
_SHOWN = {  # measure -> its unit, and what to see in its figure
    "angular_distance": ("angle / pi (0 to 1)", "How far a block turns a token's state; a low block does little."),
    "block_influence": (
        "1 - cosine (0 to 2)",
        "How far a block moves a token's state; the lowest is the first to cut.",
    ),
    "entropy": ("entropy (nats)", "Low: the tokens of a text point in few directions."),
    "curvature": ("mean angle (radians)", "Low: the path from token to token is straight."),
    "intrinsic_dimension": ("dimensions", "How many directions the vectors of the rows need; few: abstract and tight."),
}
_SAMPLE = 1000  # rows, at most, among which neighbours are looked for
_SHARE = 4  # where rows are tokens, a text gives about this many to each minibatch


def similarity(  # noqa: PLR0913 the options of a public entry point
    model: PreTrainedModel,
    texts: Iterable[Any] | None = None,
    *,
    processor: Any = None,
    batches: Iterable[Batch] | None = None,
    other: PreTrainedModel | None = None,
    other_processor: Any = None,
    layers: Selector = "all",
    stack: str | None = None,
    measures: Literal["all"] | Sequence[str] = "all",
    per: Literal["text", "token"] = "text",
    minibatch: int = 256,
    batch_size: int = 32,
    max_length: int | None = None,
    seed: int = 0,
    progress: bool = False,
) -> Study:
    """Compare all layers of a model with each other, or with those of another model or checkpoint.

    Every batch runs through the model once, and no states are kept: memory grows with layers x layers and with the
    vectors of one minibatch, not with the number of texts.

    Measures, one number per layer or pair of layers:
        - "cka": debiased linear CKA of two layers, 1 for equal up to rotation and scale, about 0 for independent ones.
        - "angular_distance" (0 to 1) and "block_influence" (0 to 2): how far a token's state moves from `other_layer`,
          the next lower layer that is read, to `layer`: with all layers, from the start to the end of block `layer`.
          Where the model returns its last state after a final norm, the last block's includes that.
        - "entropy" (nats): how evenly a text's tokens spread over directions. "curvature" (radians): how much its path
          from token to token bends.
        - "intrinsic_dimension": of the rows' vectors, on a random sample of at most 1,000.

    Args:
        model: A transformers model of any family that can be read; it is left as it is.
        texts: Texts, or pairs of texts; at least 4.
        processor: The tokenizer; None: the one that belongs to `model.name_or_path`.
        batches: What the model is called with, batch by batch, in place of texts: for images and sound. They are read
            once, in their order, which should be random.
        other: Another model, read on the same texts or batches.
        other_processor: Its tokenizer; None: it reads the tokens that `model` reads.
        layers: Which layers, of both models.
        stack: Which stack; None: the only one, or the encoder.
        measures: Names of measures; "all" of them.
        per: What is a row: a "text" (the mean of the states of its real tokens), or a "token" (at most 16 of each text,
            drawn at random, so that memory stays bounded).
        minibatch: Rows over which one unbiased estimate is made, at least 4; up to twice as many where they do not
            divide evenly. Fewer, if there are no more.
        batch_size: Texts per pass; it changes nothing but speed.
        max_length: Tokens of a text; None: what the model reads.
        seed: Of the order of the texts, and of the tokens that are drawn.
        progress: Show a progress bar.

    Returns:
        A study whose table has "measure", "model" ("model" or "other"), "layer", "other_model" and "other_layer" (the
        second layer of a pair; empty where there is none) and "score". CKA is there for every ordered pair.

    Raises:
        ConfigError: If there are fewer than 4 rows, an option is out of range, or not exactly one of `texts` and
            `batches` is given.
        UnknownNameError: If there is no such measure, stack or kind of row.
        LayerIndexError: If a model has no such layer.
        UnsupportedModelError: If a model's layers cannot be read.

    Source:
        Nguyen, Raghu and Kornblith 2021, arXiv:2010.15327, for CKA from minibatches; a minibatch is a random sample of
        all texts here. `lamina.studies.states.measures` names the sources of the other measures.
    """
    chosen = list(_ALL if measures == "all" else measures)
    check_known(_OP, chosen, _ALL, "measure")
    check_known(_OP, [per], ("text", "token"), "kind of row")
    check_range(_OP, "minibatch", minibatch, FEWEST)
    if (texts is None) == (batches is None):
        raise ConfigError(f"{_OP}: texts and batches are {'both' if batches else 'not'} given; exactly one must be.")
    if other_processor is not None and (other is None or per == "token" or texts is None):
        raise ConfigError(f"{_OP}: other_processor is given; it reads texts for another model, a row per text.")
    readers = {"model": LayerReader(model, layers, stack, op=_OP)}
    if other is not None:
        readers["other"] = LayerReader(other, layers, stack, op=_OP)
    kinds = dict.fromkeys(MEASURES[name] for name in chosen if name in MEASURES)
    sides = {
        name: RowVectors(reader, [kind(len(reader.layers)) for kind in kinds], per=per, seed=seed)
        for name, reader in readers.items()
    }
    size = minibatch if per == "text" else max(1, minibatch // _SHARE)
    if texts is None:
        groups = ([list(group)] * len(sides) for group in batch_groups(batches or (), size))
    else:
        processors = {"model": processor} if other_processor is None else {"model": processor, "other": other_processor}
        inputs = [text_inputs(readers[name].model, texts, own, max_length, op=_OP) for name, own in processors.items()]
        numbers = progress_bar(row_groups(inputs[0].encoded.texts, size, seed), show=progress, desc=_OP)
        groups = ([list(group_batches(read, rows, batch_size)) for read in inputs] * len(sides) for rows in numbers)
    cka, sample = _read(list(sides.values()), groups, minibatch, seed)
    places = [(name, layer) for name, reader in readers.items() for layer in reader.layers]
    rows = list(_rows(sides, places, cka, sample))
    settings = {
        "models": {name: model_facts(reader.model) for name, reader in readers.items()},
        "layers": {name: reader.layers for name, reader in readers.items()},
        "stack": readers["model"].stack.name,
        "measures": chosen,
        "per": per,
        "minibatch": minibatch,
        "batch_size": batch_size,
        "seed": seed,
        "max_length": max_length,
        "tokens_per_text": MOST_TOKENS if per == "token" else None,
        "rows": cka.rows,
        "minibatches": cka.minibatches,
        "intrinsic_dimension_rows": sample.rows,
        "versions": library_versions(),
    }
    kept = [row for row in rows if row["measure"] in chosen]
    return Study(_OP, _table(kept), settings, _figures(chosen, sides), tuple(_conclusions(kept)))


def _read(
    sides: Sequence[RowVectors], groups: Iterable[Sequence[Group]], minibatch: int, seed: int
) -> tuple[MinibatchCKA, NeighbourSample]:
    """Read all groups, one batch of rows for each side, and sum up."""
    cka, sample = MinibatchCKA(), NeighbourSample(_SAMPLE)
    for number, group in enumerate(groups):
        vectors = [layer for side, batches in zip(sides, group, strict=False) for layer in side.read(batches)]
        rows, device = len(vectors[0]), vectors[0].device
        if len({side.tokens for side in sides}) > 1:
            raise ConfigError(f"{_OP}: the two models have other numbers of tokens for the same rows; use per='text'.")
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(derive_seed(seed, "rows", number)))
        for part in order.tensor_split(max(1, rows // minibatch)):
            features = [layer.to(device)[part.to(device)] for layer in vectors]
            cka.add(features)
            sample.add(features)
    return cka, sample


def _rows(
    sides: Mapping[str, RowVectors], places: Sequence[tuple[str, int]], cka: MinibatchCKA, sample: NeighbourSample
) -> Iterator[dict[str, Any]]:
    for (name, layer), scores in zip(places, cka.cka().tolist(), strict=True):
        for (other, other_layer), score in zip(places, scores, strict=True):
            pair = {"other_model": other, "other_layer": other_layer}
            yield {"measure": "cka", "model": name, "layer": layer, **pair, "score": score}
    for name, side in sides.items():
        for kind in side.measures:
            for measure, scores in kind.scores().items():
                below = [None, *side.reader.layers]
                for before, layer, score in zip(below, side.reader.layers, scores, strict=False):
                    pair = {"other_model": name, "other_layer": before} if isinstance(kind, BlockDistance) else {}
                    if not pair or before is not None:
                        yield {"measure": measure, "model": name, "layer": layer, **pair, "score": score}
    for (name, layer), score in zip(places, sample.dimensions(), strict=True):
        yield {"measure": "intrinsic_dimension", "model": name, "layer": layer, "score": score}


def _table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    columns = ["measure", "model", "layer", "other_model", "other_layer", "score"]
    return pd.DataFrame(rows, columns=columns).astype({"layer": "Int64", "other_layer": "Int64"})


def _figures(chosen: Sequence[str], sides: Iterable[str]) -> dict[str, Figure]:
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


def _blocks(row: Mapping[str, Any]) -> str:
    """The block, or the run of blocks, between two layers."""
    first, last = int(row["other_layer"]) + 1, int(row["layer"])
    return f"{first}-{last}" if first < last else str(last)


def _conclusions(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Which block moves tokens least: the first that may be left out."""
    influences = [row for row in rows if row["measure"] == "block_influence"]
    for model in dict.fromkeys(row["model"] for row in influences):
        own = sorted((row for row in influences if row["model"] == model), key=lambda row: row["score"])
        if len(own) > 1:
            whose = "the other model's" if model == "other" else "the model's"
            least, most = (f"{_blocks(row)} (block influence {row['score']:.3g})" for row in (own[0], own[-1]))
            yield (
                f"Of {whose} blocks the first to try without is {least}, which moves tokens least; {most} moves them "
                "most. What cutting it costs a task is not measured here."
            )
