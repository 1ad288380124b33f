"""What each layer adds to a reader's features at each token of a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from lamina.bank.layer_amounts import layer_amounts
from lamina.data.batches import tokenizer_of
from lamina.errors import ConfigError
from lamina.studies.passes import Text, text_inputs
from lamina.studies.study import Figure, Study, library_versions, model_facts
from lamina.utils import JSON, Row

if TYPE_CHECKING:
    from lamina.bank import ReaderBank


def contributions(bank: ReaderBank, text: Text, *, readers: Sequence[str] | None = None) -> Study:
    """Measure what each layer adds to a reader's features at each token of one text.

    What is measured depends on the fusion. Gated and DWAtt compute a weight of each layer for each token: the
    contribution is the absolute weight. Routing: the credit of the layer at the token. ScalarMix, Elementwise, Mean and
    Concat add up one term per layer: the norm of the term. PooledLayers pools the tokens of each layer: the share of
    the layer times the share of the token in that pooling.

    Args:
        bank: Trained readers, with their processor; it is not changed.
        text: A text, or a pair of texts.
        readers: Names of the readers. None: all whose fusion supports this.

    Returns:
        A study with the columns "reader", "position" (in the model's input), "token", "layer", "measure"
        ("contribution") and "score": a share, so that the shares of a token sum to 1 over layers. Readers that were
        left out are listed in `settings["left_out"]`.

    Raises:
        ConfigError: If a reader that `readers` names, or every reader, has a fusion that does not support this.
        UnknownNameError: If a reader does not exist.
    """
    inputs = text_inputs(bank.model, [text], bank.processor, None, op="contributions")
    batch = {name: value.to(bank.device) for name, value in inputs.batch([0]).items()}
    tokens = tokenizer_of(inputs.processor).convert_ids_to_tokens(batch["input_ids"][0].tolist())
    rows: list[Row] = []
    unsupported: list[str] = []
    amounts_by_reader = layer_amounts(bank, [*bank] if readers is None else readers, batch)
    for name, amounts in amounts_by_reader.items():
        if amounts is None:
            unsupported.append(f"'{name}' ({type(bank[name].config.fusion).__name__})")
            continue
        for layer, shares in zip(bank[name].layers, amounts / amounts.sum(0), strict=True):
            for position, (token, share) in enumerate(zip(tokens, shares.tolist(), strict=True)):
                place = {"reader": name, "position": position, "token": token, "layer": layer}
                rows.append({**place, "measure": "contribution", "score": share})
    if unsupported and (readers is not None or not rows):
        rule = (
            "fusions that weigh states can: Gated, DWAtt, Routing, ScalarMix, Elementwise, Mean, Concat, PooledLayers"
        )
        raise ConfigError(f"contributions: {', '.join(unsupported)} cannot say what a layer adds at a token; {rule}.")
    settings: dict[str, JSON] = {
        "models": {"model": model_facts(bank.model)},
        "text": text,
        "left_out": unsupported,
        "versions": library_versions(),
    }
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
            note="Shares of a token sum to 1. A bright cell is a layer that this token is read from.",
        )
        for name, amounts in amounts_by_reader.items()
        if amounts is not None
    }
    return Study("contributions", pd.DataFrame(rows), settings, figures)
