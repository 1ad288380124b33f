"""What each layer adds to a reader's features at each token of a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional as F

from lamina.data.batches import tokenizer_of
from lamina.errors import ConfigError
from lamina.fusion.base import Fusion, InputWeighted, LayerView, WeightedSum
from lamina.fusion.concat import ConcatFusion
from lamina.fusion.pooled_layers import PooledLayersFusion, PooledTokens, token_shares
from lamina.layers.preserve import evaluating
from lamina.studies.passes import text_inputs
from lamina.studies.study import Figure, Study, library_versions, model_facts

if TYPE_CHECKING:
    from lamina.bank import ReaderBank, ReaderModule


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


def layer_amounts(bank: ReaderBank, names: Sequence[str], batch: Mapping[str, Any]) -> dict[str, Tensor | None]:
    """How much each layer adds for readers `[layers, tokens]`, in the one text of a batch; see `contributions`.

    None for a reader whose fusion cannot say.
    """
    wanted: dict[str, set[int]] = {}
    for name in names:
        wanted.setdefault(bank[name].stack, set()).update(bank[name].layers)
    with evaluating(bank), torch.no_grad():
        states = bank.record_states({stack: sorted(layers) for stack, layers in wanted.items()}, batch)
        return {name: _amounts(bank[name], states[bank[name].stack]) for name in names}


def _amounts(reader: ReaderModule, states: Mapping[int, Tensor]) -> Tensor | None:
    fusion, own = reader.fusion, [states[layer] for layer in reader.layers]
    if isinstance(fusion, InputWeighted):
        return _weights(fusion, own)
    if isinstance(fusion, PooledLayersFusion) and not fusion.config.reads_pairs:
        return torch.stack([_pooled(fusion, index, state) for index, state in enumerate(own)])
    if isinstance(fusion, ConcatFusion):
        maps = zip(own, fusion.projection, strict=True)
        return torch.stack([F.linear(state[0].to(weight.dtype), weight).float().norm(dim=-1) for state, weight in maps])
    if isinstance(fusion.stream([fusion]), WeightedSum):
        return torch.stack([_run(fusion, {index: state})[0].float().norm(dim=-1) for index, state in enumerate(own)])
    return None


def _run(fusion: Fusion, states: Mapping[int, Tensor]) -> Tensor:
    """What a fusion makes of some of its states."""
    stream = fusion.stream([fusion])
    for index, state in states.items():
        stream.step(index, LayerView(state, _every(state)))
    return stream.finish(_every(next(iter(states.values()))))[0]


def _every(state: Tensor) -> Tensor:
    """The mask of a text without padding."""
    return torch.ones(state.shape[:2], dtype=torch.bool, device=state.device)


def _weights(fusion: InputWeighted, states: Sequence[Tensor]) -> Tensor:
    """What it gives each state of each token; a twin is asked, so that the fusion's own count does not change."""
    seen: list[Tensor] = []

    def observe(weights: Tensor, mask: Tensor) -> None:
        del mask
        seen.append(weights.detach())

    twin = copy(fusion)
    twin.observe = observe
    _run(twin, dict(enumerate(states)))
    return seen[0][:, 0].float().abs()


def _pooled(fusion: PooledLayersFusion, index: int, state: Tensor) -> Tensor:
    """The share of a layer, over the tokens as its queries divide it."""
    queries, mask = fusion.queries[index].unsqueeze(0), _every(state)
    normed = LayerView(state, mask).normed.to(queries.dtype)
    (shares,) = token_shares(normed, queries, [PooledTokens.from_mask(mask)])
    return fusion.importance()[index].float() * shares[0, 0].float().mean(0)
