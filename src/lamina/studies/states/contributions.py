"""The study `contributions`: what each layer adds to a reader's features at each token of a text."""

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
        A study with the columns "reader", "position" (in the model's input), "token", "layer", "measure"
        ("contribution") and "score": the contribution divided by the token's sum over layers, so that a token's scores
        sum to 1. Readers with another fusion are listed in `settings["left_out"]`.

    Raises:
        ConfigError: If a reader named in `readers`, or every reader, has another fusion.
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
            note="In each column the shares sum to 1. The brightest cell is the layer that counts most for this token.",
        )
        for name, amounts in amounts_by_reader.items()
        if amounts is not None
    }
    return Study("contributions", pd.DataFrame(rows), settings, figures)
