"""Which layers trained readers use: their learned weights, and what each layer adds at each token of a text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from torch import Tensor

from lamina.bank import ReaderBank
from lamina.data.batches import tokenizer_of
from lamina.errors import ConfigError
from lamina.fusion.base import LayerView, WeightedSum
from lamina.fusion.gated import InputWeighted
from lamina.layers.isolation import evaluating
from lamina.studies.passes import group_batches, text_inputs
from lamina.studies.study import Figure, Study, library_versions, model_facts
from lamina.utils import progress_bar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lamina.bank import ReaderModule

_OP = "importance"


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
        run: Figure("heat", x="layer", y="reader", where={"run": run}, title=f"{title}: {run}")
        for run in dict.fromkeys(row["run"] for row in rows)
    }
    return Study(_OP, pd.DataFrame(rows), settings, figures)


def contributions(bank: ReaderBank, text: Any, *, readers: Sequence[str] | None = None) -> Study:
    """Measure what each layer adds to a reader's features at each token of one text.

    Where a fusion weighs layers anew for each token (Gated, DWAtt), it is the size of the weight; where it adds up
    weighted states (ScalarMix, Elementwise, Mean), the length of each layer's term.

    Args:
        bank: Trained readers, with their processor; left as they are.
        text: A text, or a pair of texts.
        readers: Which readers; None: all that can say.

    Returns:
        A study whose table has "reader", "position" (in the model's input), "token", "layer", "measure"
        ("contribution") and "score", a share: those of a token sum to 1.

    Raises:
        ConfigError: If a reader that was asked for, or every one, has a fusion that cannot say.
        UnknownNameError: If there is no such reader.
    """
    inputs = text_inputs(bank.model, [text], bank.processor, None, op="contributions")
    batch = {name: value.to(bank.device) for name, value in inputs.batch([0]).items()}
    tokens = tokenizer_of(inputs.processor).convert_ids_to_tokens(batch["input_ids"][0].tolist())
    rows: list[dict[str, Any]] = []
    silent: list[str] = []
    for name in bank if readers is None else readers:
        with evaluating(bank), torch.no_grad():
            amounts = _amounts(bank, name, batch)
        if amounts is None:
            silent.append(f"'{name}' ({type(bank[name].config.fusion).__name__})")
            continue
        for layer, shares in zip(bank[name].layers, amounts / amounts.sum(0), strict=True):
            for position, (token, share) in enumerate(zip(tokens, shares.tolist(), strict=True)):
                place = {"reader": name, "position": position, "token": token, "layer": layer}
                rows.append({**place, "measure": "contribution", "score": share})
    if silent and (readers is not None or not rows):
        rule = "fusions that weigh states can: Gated, DWAtt, ScalarMix, Elementwise, Mean"
        raise ConfigError(f"contributions: {', '.join(silent)} cannot say what a layer adds at a token; {rule}.")
    settings = {
        "models": {"model": model_facts(bank.model)},
        "text": text,
        "left_out": silent,
        "versions": library_versions(),
    }
    figures = {
        name: Figure("heat", x="position", y="layer", where={"reader": name}, title=f"What each layer adds: {name}")
        for name in dict.fromkeys(row["reader"] for row in rows)
    }
    return Study("contributions", pd.DataFrame(rows), settings, figures)


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


def _amounts(bank: ReaderBank, name: str, batch: Mapping[str, Tensor]) -> Tensor | None:
    """How much each layer adds `[layers, tokens]` in the one text of a batch; None if the fusion cannot say."""
    reader = bank[name]
    if isinstance(reader.fusion, InputWeighted):
        with _observed(reader.fusion) as weights:
            bank(**batch, readers=[name])
        return weights[0][:, 0].float().abs()
    if not isinstance(reader.fusion.stream([reader.fusion]), WeightedSum):
        return None
    states = bank.record_states({reader.stack: reader.layers}, batch)[reader.stack]
    terms: list[Tensor] = []
    for index, state in enumerate(states.values()):
        stream, mask = reader.fusion.stream([reader.fusion]), torch.ones(state.shape[:2], dtype=torch.bool)
        stream.step(index, LayerView(state, mask.to(state.device)))
        terms.append(stream.finish(mask.to(state.device))[0][0].float().norm(dim=-1))
    return torch.stack(terms)


@contextmanager
def _observed(fusion: InputWeighted) -> Iterator[list[Tensor]]:
    """The weights `[layers, batch, tokens]` that a fusion gives out, which do not count for its importances."""
    seen: list[Tensor] = []

    def observe(weights: Tensor, mask: Tensor) -> None:
        del mask
        seen.append(weights.detach())

    fusion.observe = observe
    try:
        yield seen
    finally:
        del fusion.observe
