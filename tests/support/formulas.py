"""Every fusion's formula, written a second time from the papers, without a stream and without grouping."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from lamina.fusion.base import LayerView


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def layer_norm(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def positions(mask: Tensor, dim: int) -> Tensor:
    """Vaswani et al. 2017, counted over real tokens: sines at even places, cosines at odd ones."""
    table = torch.zeros(*mask.shape, dim)
    for row in range(mask.shape[0]):
        place = 0
        for token in range(mask.shape[1]):
            for at in range(dim):
                angle = place / 10000 ** ((at - at % 2) / dim)
                table[row, token, at] = math.cos(angle) if at % 2 else math.sin(angle)
            place += bool(mask[row, token])
    return table


def shares(fusion: Any) -> Tensor:
    """AdaLayers' importances: softmax, cutoff, the rest made to sum to 1 again."""
    raw = torch.exp(fusion.config.alpha * (fusion.scores - fusion.scores.max()))
    raw = raw / raw.sum()
    kept = torch.where(raw <= fusion.config.cutoff, torch.zeros(()), raw) if fusion.config.cutoff else raw
    return kept / kept.sum()


def _finished(settings: Any, total: Tensor, mask: Tensor) -> Tensor:
    total = gelu(total) if settings.output_activation else total
    return total + positions(mask, settings.dim) if settings.positions else total


def ada_layers(fusion: Any, states: Tensor, mask: Tensor) -> Tensor:
    weights = shares(fusion)
    total = sum(
        weights[i] * layer_norm(gelu(states[i]) @ fusion.projection[i].T) for i in range(len(states)) if weights[i] > 0
    )
    return _finished(fusion.config, torch.as_tensor(total), mask)


def single_layer(fusion: Any, states: Tensor, mask: Tensor) -> Tensor:
    return _finished(fusion.config, layer_norm(gelu(states[fusion.index]) @ fusion.projection[0].T), mask)


def last_layer(_fusion: Any, states: Tensor, _mask: Tensor) -> Tensor:
    return states[-1]


def mean(_fusion: Any, states: Tensor, _mask: Tensor) -> Tensor:
    return states.mean(0)


def scalar_mix(fusion: Any, states: Tensor, _mask: Tensor) -> Tensor:
    weights = fusion.scores.exp() / fusion.scores.exp().sum()
    return fusion.scale * torch.einsum("l,lbtw->btw", weights, states)


def elementwise(fusion: Any, states: Tensor, _mask: Tensor) -> Tensor:
    return torch.einsum("lw,lbtw->btw", fusion.scales, states)


def gated(fusion: Any, states: Tensor, _mask: Tensor) -> Tensor:
    hidden = gelu(torch.einsum("hw,lbtw->lbth", fusion.inner.weight, states) + fusion.inner.bias)
    weights = torch.einsum("h,lbth->lbt", fusion.outer.weight[0], hidden) + fusion.outer.bias
    return torch.einsum("lbt,lbtw->btw", weights, states)


def pooled_layers(fusion: Any, states: Tensor, mask: Tensor) -> Tensor:
    """Text by text, layer by layer and head by head, over the real tokens alone; all of them are of the first text."""
    shares = fusion.scores.exp() / fusion.scores.exp().sum()
    rows = []
    for row in range(mask.shape[0]):
        total = torch.zeros(fusion.dim)
        for i in range(len(states)):
            pooled = torch.cat(_pooled(fusion, i, layer_norm(states[i, row, mask[row]])))
            total = total + shares[i] * gelu(layer_norm(fusion.projection[i] @ pooled))
        rows.append(total)
    return torch.stack(rows).unsqueeze(1).expand(-1, mask.shape[1], -1)


def _pooled(fusion: Any, i: int, z: Tensor) -> list[Tensor]:
    """For each query a layer's normed states of some tokens, each head's slice averaged as it says; 0 of none."""
    heads, size, pooled = fusion.config.heads, fusion.width // fusion.config.heads, []
    for query in range(fusion.config.queries):
        slices = []
        for h in range(heads):
            weights = (z @ fusion.queries[i, query * heads + h]).exp()
            slices.append(weights / weights.sum().clamp(min=1e-30) @ z[:, h * size : (h + 1) * size])
        pooled.append(torch.cat(slices))
    return pooled


def _matches(first: Tensor, second: Tensor) -> Tensor:
    """The numbers of one pair at one layer, token by token."""
    numbers: list[float] = []
    for side, other in ((first, second), (second, first)):
        best = [max([float(torch.cosine_similarity(a, b, dim=0)) for b in other] or [-1.0]) for a in side]
        mean = sum(best) / max(1, len(best))
        variance = sum((value - mean) ** 2 for value in best) / max(1, len(best))
        numbers += [mean, min(best or [1.0]), math.sqrt(variance + 1e-6)]
    sums = [torch.nn.functional.normalize(side, dim=1).sum(0) for side in (first, second)]
    numbers.append(float(torch.cosine_similarity(sums[0], sums[1], dim=0)))
    numbers.append((len(first) - len(second)) / max(1, len(first) + len(second)))
    return 4 * (torch.tensor(numbers) - 0.5)


def paired_layers(fusion: Any, states: Tensor, mask: Tensor, segments: Tensor | None = None) -> Tensor:
    """Pair by pair, layer by layer and token by token; without segments, all tokens are of the first text."""
    segments = mask.int() if segments is None else segments
    shares = fusion.scores.exp() / fusion.scores.exp().sum()
    rows = []
    for row in range(mask.shape[0]):
        total, matched = states.new_zeros(fusion.dim), fusion.bias
        for i in range(len(states)):
            z = layer_norm(states[i, row])
            first, second = (z[mask[row] & (segments[row] == side)] for side in (1, 2))
            pooled = zip(*(_pooled(fusion, i, part) for part in (z[mask[row]], first, second)), strict=True)
            seen = torch.cat([torch.cat([both, (one - two).abs(), one * two]) for both, one, two in pooled])
            total = total + shares[i] * gelu(layer_norm(fusion.projection[i] @ seen))
            matched = matched + fusion.matching[i] @ _matches(first, second).to(states)
        rows.append(total + gelu(matched))
    return torch.stack(rows).unsqueeze(1).expand(-1, mask.shape[1], -1)


def concat(fusion: Any, states: Tensor, _mask: Tensor) -> Tensor:
    side_by_side = torch.cat(list(states), dim=-1)
    total = side_by_side @ torch.cat(list(fusion.projection), dim=-1).T
    return total if fusion.bias is None else total + fusion.bias


def bottleneck(part: Any, x: Tensor) -> Tensor:
    hidden = layer_norm(gelu(x @ part.down.weight.T + part.down.bias))
    return (hidden * part.norm.weight + part.norm.bias) @ part.up.weight.T


def dwatt_attention(fusion: Any, states: Tensor) -> Tensor:
    """`[batch, tokens, layers]`, from every token's query and every layer's key."""
    top = states[-1] + bottleneck(fusion.query, states[-1])
    query = 1 + torch.where(top > 0, top, top.exp() - 1)
    scores = torch.stack([query @ (fusion.keys.weight @ place) for place in fusion.places], dim=-1)
    scores = (scores - scores.amax(-1, keepdim=True)).exp()
    return scores / scores.sum(-1, keepdim=True)


def dwatt(fusion: Any, states: Tensor, _mask: Tensor) -> Tensor:
    parts = zip(fusion.values, fusion.norms, states, strict=True)
    values = [layer_norm(bottleneck(value, z)) * norm.weight + norm.bias for value, norm, z in parts]
    return states[-1] + torch.einsum("btl,lbtw->btw", dwatt_attention(fusion, states), torch.stack(values))


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def depth_lstm(fusion: Any, states: Tensor, _mask: Tensor) -> Tensor:
    """Hochreiter and Schmidhuber's cell with a forget gate, gate by gate; torch keeps them as i, f, g, o."""
    cell, dim = fusion.cell, fusion.dim
    hidden = memory = states.new_zeros(*states.shape[1:3], dim)
    for z in states:

        def gate(number: int, z: Tensor = z, hidden: Tensor = hidden) -> Tensor:
            rows = slice(number * dim, (number + 1) * dim)
            below = z @ cell.weight_ih[rows].T + cell.bias_ih[rows]
            return below + hidden @ cell.weight_hh[rows].T + cell.bias_hh[rows]

        memory = sigmoid(gate(1)) * memory + sigmoid(gate(0)) * torch.tanh(gate(2))
        hidden = sigmoid(gate(3)) * torch.tanh(memory)
    return hidden


FORMULAS = {
    "ada_layers": ada_layers,
    "single_layer": single_layer,
    "last_layer": last_layer,
    "mean": mean,
    "scalar_mix": scalar_mix,
    "elementwise": elementwise,
    "gated": gated,
    "pooled_layers": pooled_layers,
    "paired_layers": paired_layers,
    "concat": concat,
    "dwatt": dwatt,
    "depth_lstm": depth_lstm,
}
"""Registered name -> reference, called with the module, the selected states and the mask."""

ELSEWHERE = ("extra_layers", "head2toe", "routing")
"""Registered names whose reference is long and stands in their own unit tests."""

LINEAR_ONLY = ("head2toe",)
"""Registered names whose features only a head of one linear map can read."""

TEXT_ONLY = ("pooled_layers", "paired_layers")
"""Registered names whose features only a head that reads a whole text can read."""

SETTINGS: dict[str, list[dict[str, Any]]] = {
    "ada_layers": [
        {"dim": 16, "alpha": 1.0},
        {"dim": 16, "alpha": 3.0, "cutoff": 0.18, "entropy": 0.1},
        {"dim": 16, "alpha": 2.0, "positions": True, "layers": "all"},
        {"dim": 16, "output_activation": False, "layers": [0, 2]},
    ],
    "single_layer": [
        {"dim": 16},
        {"dim": 16, "layer": 1, "positions": True},
        {"dim": 16, "layer": 0, "output_activation": False},
    ],
    "last_layer": [{}],
    "mean": [{}, {"layers": "1-2"}],
    "scalar_mix": [{}, {"layers": "top:2", "layer_dropout": 0.3}],
    "elementwise": [{}, {"layers": "1-"}],
    "gated": [{}, {"hidden": 5, "layers": "top:2"}],
    "pooled_layers": [
        {"dim": 16, "heads": 4},
        {"dim": 8, "heads": 2, "layers": "1-", "over": "second"},
        {"dim": 8, "heads": 2, "queries": 3},
    ],
    "paired_layers": [{"dim": 16, "heads": 4}, {"dim": 8, "heads": 2, "layers": "1-", "queries": 2}],
    "concat": [{}, {"dim": 16, "bias": True, "layers": "all"}],
    "dwatt": [{}, {"bottleneck": 5, "position_dim": 7, "layers": "all"}],
    "depth_lstm": [{}, {"dim": 16, "layers": "all"}],
    "extra_layers": [{}, {"n": 2}],
    "head2toe": [
        {"layers": "1-", "chunks": 2},
        {"per_token": True, "fraction": 0.5, "group_lasso": 0.01, "score_share": 0.3},
    ],
    "routing": [
        {"dim": 8, "vectors": 5, "size": 6, "iterations": 3, "layers": "1-"},
        {"dim": 16, "vectors": 4, "per_token": True},
    ],
}
"""Registered name -> settings that together use every option."""


def view_of(state: Tensor) -> LayerView:
    """A state of which every token is real, as a stream takes it."""
    return LayerView(state, torch.ones(state.shape[:2], dtype=torch.bool))


def stir_(module: torch.nn.Module, seed: int = 0, size: float = 0.3) -> None:
    """Move every parameter away from its start, where much is 0 or 1 and would hide a mistake."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += size * torch.randn(parameter.shape, generator=rng)
