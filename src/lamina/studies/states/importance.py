"""The studies `importance` (weights of layers that fusions learned) and `contributions` (what layers add)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING

import pandas as pd
import torch

from lamina.bank import ReaderBank
from lamina.bank.layer_amounts import layer_amounts
from lamina.errors import ConfigError
from lamina.fusion.input_weighted import InputWeighted
from lamina.layers.hooks import record_token_ids
from lamina.layers.selectors import ranges
from lamina.layers.types import tokenizer_of
from lamina.studies.passes import Text, group_batches, text_inputs
from lamina.studies.runner import check_given
from lamina.studies.statistics import mean_and_interval
from lamina.studies.study import Figure, Study, study_settings
from lamina.train.results import INTERVAL_SEEDS, tied
from lamina.utils import JSON, Row, check_types, progress_bar

if TYPE_CHECKING:
    from lamina.bank import ReaderModule


_OP = "importance"
_STANDS_OUT = 1.25  # a layer stands out if its share is this many times the mean share


@dataclass(frozen=True)
class _ReaderShares:
    """One reader's share of importance per layer: how much the reader uses each layer. `_reader_shares` makes it.

    Attributes:
        run: Name of the reader's bank.
        reader: Its name.
        series: Its name without the seed: readers that differ only in the seed have the same series.
        fusion: Class of the fusion's config.
        seed: Its seed.
        shares: Layer -> its share; shares sum to 1.
    """

    run: str
    reader: str
    series: str
    fusion: str
    seed: int
    shares: Mapping[int, float]

    def rows(self) -> Iterator[dict[str, JSON]]:
        """Yield this reader's table rows, one per layer."""
        place = {"run": self.run, "reader": self.reader, "fusion": self.fusion, "seed": self.seed}
        for layer, share in self.shares.items():
            yield {**place, "layer": layer, "measure": _OP, "score": share}


@check_types("importance")
def importance(
    banks: ReaderBank | Mapping[str, ReaderBank],
    texts: Iterable[Text] | None = None,
    *,
    batch_size: int = 32,
    max_length: int | None = None,
    progress: bool = False,
) -> Study:
    """List the importance of each layer in each reader, for banks of several tasks or seeds.

    The importance is the layer's share of the fusion's weights, as the fusion's method `importance` defines it. Readers
    of fusions without weights per layer, such as SingleLayer, are left out. With `texts`, the banks stay in eval mode,
    and their fusions keep the weights of these texts alone.

    Args:
        banks: A bank of trained readers, or name -> bank.
        texts: Texts, or pairs of texts, that the readers read first, with each bank's own processor. Fusions such as
            Gated and DWAtt compute their weights for each token, so that they have shares only after they have read
            texts. None: no texts; a reader with such a fusion is an error.
        batch_size: Texts per pass.
        max_length: Maximum tokens per text. None: what the model allows.
        progress: Show a progress bar.

    Returns:
        A study with the columns "run" (name of the bank), "reader", "fusion", "seed", "layer", "measure" ("importance")
        and "score": the layer's share. The shares of a reader sum to 1.

    Raises:
        ConfigError: If `banks` holds something else than banks; if no reader has weights per layer; if a reader's
            weights depend on the token, and `texts` is None; if `texts` is empty or holds something else, or a bank has
            no tokenizer for them; or if `batch_size` or `max_length` is out of range.
        StoreError: If the saved tokenizer is damaged.
    """
    named = dict(banks) if isinstance(banks, Mapping) else {"bank": banks}
    if others := [type(bank).__name__ for bank in named.values() if not isinstance(bank, ReaderBank)]:
        raise ConfigError(f"{_OP}: got a {others[0]}; a bank of trained readers is needed, or name -> bank.")
    listed = None if texts is None else list(texts)
    readers: list[_ReaderShares] = []
    for run, bank in named.items():
        if listed is not None:
            _read(bank, listed, batch_size, max_length, progress=progress)
        readers += [_reader_shares(bank[name], name, run, was_read=listed is not None) for name in bank]
    readers = [reader for reader in readers if reader.shares]
    if not readers:
        hint = "Train one with ScalarMix, AdaLayers or another fusion that does."
        raise ConfigError(f"{_OP}: no reader weighs layers. {hint}")
    models = {run: bank.model for run, bank in named.items()}
    settings = study_settings(models, texts=None if listed is None else len(listed), max_length=max_length)
    figures = {
        run: Figure(
            "heat",
            x="layer",
            y="reader",
            where={"run": run},
            title=f"Which layers each reader uses: {run}",
            value_title="share of the layer",
            note="In each row the shares sum to 1. A row in one colour: the reader uses all layers alike.",
        )
        for run in dict.fromkeys(reader.run for reader in readers)
    }
    table = pd.DataFrame([row for reader in readers for row in reader.rows()])
    return Study(_OP, table, settings, figures, tuple(_conclusions(readers)))


def _conclusions(readers: Sequence[_ReaderShares]) -> Iterator[str]:
    """Yield one sentence per series of readers: the layers with the largest mean share, or that no layer stands out.

    A series is the readers of a bank that differ only in their seed; their shares are averaged.
    """
    several_runs = len({reader.run for reader in readers}) > 1
    series: dict[str, list[_ReaderShares]] = {}
    for reader in readers:
        series.setdefault(f"{reader.run}, {reader.series}" if several_runs else reader.series, []).append(reader)
    for name, members in series.items():
        shares: dict[int, list[float]] = {}
        for reader in members:
            for layer, share in reader.shares.items():
                shares.setdefault(layer, []).append(share)
        means = {layer: fmean(shares[layer]) for layer in sorted(shares)}
        largest = max(means, key=lambda layer: means[layer])
        if means[largest] < _STANDS_OUT * fmean(means.values()):
            low, high = min(means.values()), means[largest]
            yield f"{name}: no layer stands out; shares are from {low:.3f} to {high:.3f}."
            continue
        if len(layers := tied(means, means[largest], ".3f")) > 1:
            yield f"{name}: layers {ranges(layers)} have the largest share, {means[largest]:.3f} each."
            continue
        over = f" (95 % over {len(shares[largest])} readers)" if len(shares[largest]) >= INTERVAL_SEEDS else ""
        yield f"{name}: layer {largest} has the largest share, {mean_and_interval(shares[largest])}{over}."


def _read(bank: ReaderBank, texts: list[Text], batch_size: int, max_length: int | None, *, progress: bool) -> None:
    """Run texts through a bank in eval mode, so that fusions whose layer weights depend on the token have shares.

    The shares from earlier texts are reset first. The bank stays in eval mode. Raises ConfigError or StoreError as
    `text_inputs` does. The arguments are those of `importance`.
    """
    inputs = text_inputs(bank.model, texts, bank.processor, max_length, op=_OP)
    batches = group_batches(inputs, range(len(inputs.encoded)), batch_size)
    bank.eval()
    for name in bank:
        if isinstance(fusion := bank[name].fusion, InputWeighted):
            fusion.amounts = torch.zeros_like(fusion.amounts)
    with torch.no_grad():
        for _, batch in progress_bar(batches, show=progress, desc=_OP):
            bank(**{name: value.to(bank.device) for name, value in batch.items()})


def _reader_shares(reader: ReaderModule, name: str, run: str, *, was_read: bool) -> _ReaderShares:
    """Return one reader's shares of importance; they are empty if its fusion has no weights per layer.

    `name` is the reader's name in the bank `run`, and `was_read` says whether the bank has just read texts. Raises
    ConfigError if the fusion's weights depend on the token and no texts were read.
    """
    if isinstance(reader.fusion, InputWeighted) and not was_read:
        reason = f"reader '{name}' weighs layers anew for each token, so its shares depend on what it reads"
        raise ConfigError(f"{_OP}: {reason}. Pass texts.")
    seed = reader.config.seed
    # the only place where a bank says which readers are copies: `lamina train` names them "<task>-<method>-<seed>"
    endings = (ending for ending in (f"-{seed}", f"_{seed}") if name.endswith(ending))
    series = name.removesuffix(next(endings, ""))
    return _ReaderShares(run, name, series, type(reader.config.fusion).__name__, seed, reader.importance())


@check_types("contributions")
def contributions(bank: ReaderBank, text: Text, *, readers: Sequence[str] | str | None = None) -> Study:
    """Measure what each layer adds to a reader's features at each token of one text.

    The contribution of a layer at a token depends on the reader's fusion:

    - Gated, DWAtt: absolute value of the weight that the fusion computes for the layer at this token.
    - Routing: the layer's credit at this token.
    - ScalarMix, Elementwise, Mean, Concat: norm of the layer's term in the fusion's sum.
    - PooledLayers, which pools the tokens of each layer: share of the layer times share of the token in that pooling.

    Args:
        bank: Trained readers, with their processor; it is not changed.
        text: A text, or a pair of texts.
        readers: Names of the readers. None: all whose fusion is listed above.

    Returns:
        A study with the columns "reader", "position" (in the stack's input, from 0), "token" (that the stack reads
        there; "" if the model makes the decoder's input itself and gives it only embeddings), "layer", "measure"
        ("contribution") and "score": the contribution divided by the token's sum over layers, so that a token's scores
        sum to 1 (or are all 0, where no layer adds anything). Readers with another fusion are listed in
        `settings["left_out"]`.

    Raises:
        ConfigError: If a reader named in `readers`, or every reader, has another fusion; if there is no reader, or
            `readers` is empty; if `text` is neither a text nor a pair; or if the bank has no tokenizer, or its frozen
            model has changed.
        UnknownNameError: If a reader does not exist.
        StoreError: If the saved tokenizer is damaged.
    """
    names = [*bank.select(readers, "contributions")]
    if not names and readers is None:
        raise ConfigError("contributions: the bank has no readers. Train one with lamina.fit.")
    check_given("contributions", readers=names)
    inputs = text_inputs(bank.model, [text], bank.processor, None, op="contributions")
    batch = {name: value.to(bank.device) for name, value in inputs.batch([0]).items()}
    rows: list[Row] = []
    unsupported: list[str] = []
    with record_token_ids(bank.model, bank.stacks.values(), batch) as ids:
        amounts_by_reader = layer_amounts(bank, names, batch)
    tokenizer = tokenizer_of(inputs.processor)
    tokens = {stack: tokenizer.convert_ids_to_tokens(read[0].tolist()) for stack, read in ids.items()}
    for name, amounts in amounts_by_reader.items():
        if amounts is None:
            unsupported.append(f"'{name}' ({type(bank[name].config.fusion).__name__})")
            continue
        totals = amounts.sum(0).clamp(min=torch.finfo(amounts.dtype).tiny)  # a token that adds nothing has shares of 0
        read = tokens.get(bank[name].stack, [""] * amounts.shape[1])
        for layer, shares in zip(bank[name].layers, amounts / totals, strict=True):
            for position, (token, share) in enumerate(zip(read, shares.tolist(), strict=True)):
                place = {"reader": name, "position": position, "token": token, "layer": layer}
                rows.append({**place, "measure": "contribution", "score": share})
    if unsupported and (readers is not None or not rows):
        rule = (
            "fusions that weigh states can: Gated, DWAtt, Routing, ScalarMix, Elementwise, Mean, Concat, PooledLayers"
        )
        raise ConfigError(f"contributions: {', '.join(unsupported)} cannot say what a layer adds at a token; {rule}.")
    settings = study_settings({"model": bank.model}, text=text, left_out=unsupported)
    figures = {
        name: Figure(
            "heat",
            x="position",
            y="layer",
            x_label="token",
            where={"reader": name},
            title=f"What each layer adds: {name}",
            x_title="token of the text",
            value_title="share of the layer",
            note="In each column the shares sum to 1. The brightest cell is the layer that counts most for this token.",
        )
        for name, amounts in amounts_by_reader.items()
        if amounts is not None
    }
    return Study("contributions", pd.DataFrame(rows), settings, figures)
