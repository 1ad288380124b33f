"""Which layers trained readers use: their learned weights."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from lamina.bank import ReaderBank
from lamina.errors import ConfigError
from lamina.fusion.base import InputWeighted
from lamina.studies.passes import group_batches, text_inputs
from lamina.studies.statistics import mean_and_interval
from lamina.studies.study import Figure, Study, library_versions, model_facts
from lamina.utils import progress_bar

if TYPE_CHECKING:
    from lamina.bank import ReaderModule

_OP = "importance"
_STANDS_OUT = 1.25  # times the share that each layer would have if all were alike


def importance(
    banks: ReaderBank | Mapping[str, ReaderBank],
    texts: Iterable[Any] | None = None,
    *,
    batch_size: int = 32,
    max_length: int | None = None,
    progress: bool = False,
) -> Study:
    """List the share that each reader gives to each layer, over the banks of several tasks or seeds.

    Args:
        banks: A bank of trained readers, or name -> bank, as of several seeds. Readers that read one layer, or do not
            weigh their layers, have no rows.
        texts: Texts to read first, with each bank's own processor: fusions such as Gated and DWAtt weigh layers anew
            for each token, so that they have shares of what they read alone.
        batch_size: Texts per pass.
        max_length: Tokens of a text; None: what the model reads.
        progress: Show a progress bar.

    Returns:
        A study whose table has "run" (the bank's name), "reader", "fusion", "seed", "layer", "measure" ("importance")
        and "score", a share: those of a reader sum to 1. What they are is said by `importance` of each fusion.

    Raises:
        ConfigError: If no reader weighs layers, or one weighs them anew for each token and no texts are given.
    """
    named = dict(banks) if isinstance(banks, Mapping) else {"bank": banks}
    listed = None if texts is None else list(texts)
    rows: list[dict[str, Any]] = []
    for run, bank in named.items():
        if listed is not None:
            _read(bank, listed, batch_size, max_length, progress=progress)
        for name in bank:
            rows += [{"run": run, **row} for row in _shares(bank[name], name, was_read=listed is not None)]
    if not rows:
        raise ConfigError(f"{_OP}: no reader weighs layers; train one with ScalarMix, AdaLayers or another that does.")
    settings = {
        "models": {run: model_facts(bank.model) for run, bank in named.items()},
        "texts": None if listed is None else len(listed),
        "max_length": max_length,
        "versions": library_versions(),
    }
    title = "Which layers each reader uses"
    figures = {
        run: Figure(
            "heat",
            x="layer",
            y="reader",
            where={"run": run},
            title=f"{title}: {run}",
            value_title="share of the layer",
            note="Shares of a reader sum to 1; one colour along a row says that no layer stands out.",
        )
        for run in dict.fromkeys(row["run"] for row in rows)
    }
    return Study(_OP, pd.DataFrame(rows), settings, figures, tuple(_conclusions(pd.DataFrame(rows))))


def _conclusions(table: Any) -> Iterator[str]:
    """Per reader of a bank, whatever its seed, the layer with the largest mean share; or that none stands out."""
    several = table["run"].nunique() > 1  # which may be of other tasks, so that nothing is averaged over them
    names = [
        f"{run}, " * several + re.sub(rf"[-_]{seed}$", "", name)
        for run, name, seed in zip(table["run"], table["reader"], table["seed"], strict=True)
    ]
    for name, own in table.groupby(names, sort=False):
        means = own.groupby("layer")["score"].mean()
        if means.max() < _STANDS_OUT * means.mean():
            yield f"{name}: no layer stands out; shares are from {means.min():.3f} to {means.max():.3f}."
            continue
        shares = own.loc[own["layer"] == means.idxmax(), "score"].tolist()
        over = f" (95 % over {len(shares)} readers)" if len(shares) > 1 else ""
        yield f"{name}: layer {means.idxmax()} has the largest share, {mean_and_interval(shares)}{over}."


def _read(bank: ReaderBank, texts: list[Any], batch_size: int, max_length: int | None, *, progress: bool) -> None:
    """Have the readers that weigh layers anew for each token read some texts, and these alone."""
    inputs = text_inputs(bank.model, texts, bank.processor, max_length, op=_OP)
    batches = group_batches(inputs, range(len(inputs.encoded)), batch_size)
    bank.eval()
    for name in bank:
        if isinstance(fusion := bank[name].fusion, InputWeighted):
            fusion.amounts = torch.zeros_like(fusion.amounts)
    with torch.no_grad():
        for _, batch in progress_bar(batches, show=progress, desc=_OP):
            bank(**{name: value.to(bank.device) for name, value in batch.items()})


def _shares(reader: ReaderModule, name: str, *, was_read: bool) -> Iterator[dict[str, Any]]:
    if isinstance(reader.fusion, InputWeighted) and not was_read:
        what = f"reader '{name}' weighs layers anew for each token, so its shares depend on what it reads"
        raise ConfigError(f"{_OP}: {what}. Give texts.")
    fusion, seed = type(reader.config.fusion).__name__, reader.config.seed
    for layer, share in reader.importance().items():
        said = {"measure": _OP, "score": share}
        yield {"reader": name, "fusion": fusion, "seed": seed, "layer": layer, **said}
