"""What each layer adds to a reader's features at each token of a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd

from lamina.bank.layer_amounts import layer_amounts
from lamina.data.batches import tokenizer_of
from lamina.errors import ConfigError
from lamina.studies.passes import text_inputs
from lamina.studies.study import Figure, Study, library_versions, model_facts

if TYPE_CHECKING:
    from lamina.bank import ReaderBank


def contributions(bank: ReaderBank, text: Any, *, readers: Sequence[str] | None = None) -> Study:
    """Measure what each layer adds to a reader's features at each token of one text.

    Where a fusion weighs layers anew for each token (Gated, DWAtt), it is the size of the weight; of Routing that of
    the token's credit; where it adds up the states (ScalarMix, Elementwise, Mean, Concat), the length of a layer's
    term; where it pools each layer's tokens (PooledLayers), the layer's share times what its queries take of the token.

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
    for name, amounts in layer_amounts(bank, [*bank] if readers is None else readers, batch).items():
        if amounts is None:
            silent.append(f"'{name}' ({type(bank[name].config.fusion).__name__})")
            continue
        for layer, shares in zip(bank[name].layers, amounts / amounts.sum(0), strict=True):
            for position, (token, share) in enumerate(zip(tokens, shares.tolist(), strict=True)):
                place = {"reader": name, "position": position, "token": token, "layer": layer}
                rows.append({**place, "measure": "contribution", "score": share})
    if silent and (readers is not None or not rows):
        rule = (
            "fusions that weigh states can: Gated, DWAtt, Routing, ScalarMix, Elementwise, Mean, Concat, PooledLayers"
        )
        raise ConfigError(f"contributions: {', '.join(silent)} cannot say what a layer adds at a token; {rule}.")
    settings = {
        "models": {"model": model_facts(bank.model)},
        "text": text,
        "left_out": silent,
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
        for name in dict.fromkeys(row["reader"] for row in rows)
    }
    return Study("contributions", pd.DataFrame(rows), settings, figures)
