"""Fusions on whatever shapes, scores and masks there may be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.formulas import FORMULAS, stir_

from lamina.fusion import FUSIONS
from lamina.fusion.ada_layers import AdaLayers
from lamina.fusion.base import LayerView
from lamina.heads.sequence_classification import SequenceClassification

FEW = settings(deadline=None, max_examples=20, database=None)  # torch's first call is slow

SIZES = st.tuples(st.integers(1, 6), st.integers(1, 3), st.integers(1, 5), st.integers(1, 9))
SCORES = st.floats(-2, 2, width=32)


def options_of(draw: Any, name: str, layers: int) -> dict[str, Any]:
    """Any settings of a fusion that its number of layers allows."""
    sizes = {"gated": ("hidden",), "concat": ("dim",), "depth_lstm": ("dim",), "dwatt": ("bottleneck", "position_dim")}
    options: dict[str, Any] = {size: draw(st.integers(1, 7)) for size in sizes.get(name, ())}
    if name in ("ada_layers", "single_layer"):
        options = {
            "dim": draw(st.integers(2, 7)),
            "positions": draw(st.booleans()),
            "output_activation": draw(st.booleans()),
        }
    if name == "ada_layers":
        options |= {"alpha": draw(st.floats(0.1, 64)), "cutoff": draw(st.floats(0, 0.99)) / layers}
    if name == "single_layer":
        options["layer"] = draw(st.integers(-layers, layers - 1))
    if name in ("pooled_layers", "paired_layers"):
        options = {"dim": draw(st.integers(2, 7)), "heads": 1}
    if name == "concat":
        options["bias"] = draw(st.booleans())
    if name in ("head2toe", "routing"):
        options["per_token"] = draw(st.booleans())
    return options


@st.composite
def fusions(draw: Any, names: Sequence[str] = FUSIONS.names()) -> tuple[str, Any, torch.Tensor, torch.Tensor]:
    """Name, module with any parameters, states and mask."""
    name = draw(st.sampled_from(names))
    layers, batch, tokens, width = draw(SIZES)
    options = options_of(draw, name, layers)
    torch.manual_seed(draw(st.integers(0, 1000)))
    module = FUSIONS.get(name)(**options).build(layers, width).eval()
    if hasattr(module, "scores"):
        with torch.no_grad():
            module.scores.copy_(torch.tensor(draw(st.lists(SCORES, min_size=layers, max_size=layers))))
    else:
        stir_(module, draw(st.integers(0, 1000)))
    real = draw(st.lists(st.booleans(), min_size=batch * tokens, max_size=batch * tokens))
    return name, module, torch.randn(layers, batch, tokens, width), torch.tensor(real).view(batch, tokens)


@FEW
@given(fusions(tuple(FORMULAS)))
@torch.no_grad()
def test_a_stream_computes_the_formula(case: tuple[str, Any, torch.Tensor, torch.Tensor]):
    name, module, states, mask = case
    # a norm over few features that are almost equal magnifies rounding
    torch.testing.assert_close(
        module(states, mask)[mask], FORMULAS[name](module, states, mask)[mask], rtol=1e-3, atol=1e-3
    )


@FEW
@given(fusions())
@torch.no_grad()
def test_features_are_numbers_whatever_the_mask_is(case: tuple[str, Any, torch.Tensor, torch.Tensor]):
    _, module, states, mask = case
    assert bool(module(states, mask).isfinite().all())


@FEW
@given(fusions())
@torch.no_grad()
def test_importances_are_shares(case: tuple[str, Any, torch.Tensor, torch.Tensor]):
    _, module, states, mask = case
    assert set(module.active_layers()) <= set(range(len(states)))
    assert module.active_layers() == tuple(sorted(set(module.active_layers())))
    module(states, mask)
    if hasattr(module, "importance"):
        shares = module.importance()
        assert abs(shares.sum().item() - 1) < 1e-5
        assert bool((shares >= 0).all())
        assert {at for at, share in enumerate(shares.tolist()) if share > 0} <= set(module.active_layers())


@FEW
@given(
    st.integers(1, 5),
    st.lists(st.tuples(st.floats(0.1, 64), st.floats(0, 0.99), st.integers(0, 1000)), min_size=2, max_size=5),
    st.booleans(),
)
def test_fusions_that_run_as_one_are_what_each_is_alone(
    layers: int, members: list[tuple[float, float, int]], training: bool
):
    states = torch.randn(layers, 2, 3, 6, generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, 3, dtype=torch.bool)
    made = []
    for alpha, cutoff, seed in members:
        torch.manual_seed(seed)
        made.append(AdaLayers(dim=4, alpha=alpha, cutoff=cutoff / layers, dropout=0.3).build(layers, 6).train(training))
        with torch.no_grad():
            made[-1].scores.add_(torch.randn(layers) * 0.1)

    def seeded() -> None:
        for (_, _, seed), module in zip(members, made, strict=True):
            module.generator = torch.Generator().manual_seed(seed)

    with torch.set_grad_enabled(training):
        seeded()
        alone = [module(states, mask) for module in made]
        seeded()
        stream = made[0].stream(made)
        for index in sorted({index for module in made for index in module.active_layers()}):
            stream.step(index, LayerView(states[index], mask))
        for one, other in zip(alone, stream.finish(mask), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@FEW
@given(
    st.sampled_from(["attention", "mean", "first"]),
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.lists(st.booleans(), min_size=4, max_size=4),
    st.integers(0, 1000),
)
@torch.no_grad()
def test_pooling_sees_real_tokens_only(pooling: Any, lengths: list[int], left: list[bool], seed: int):
    torch.manual_seed(seed)
    head = SequenceClassification(("a", "b"), attention_heads=2, pooling=pooling).build(4).eval()
    longest = max(lengths)
    features = 10 * torch.randn(len(lengths), longest, 4)
    mask = torch.zeros(len(lengths), longest, dtype=torch.bool)
    for row, length in enumerate(lengths):
        mask[row, slice(longest - length, None) if left[row] else slice(length)] = True
    together = head(features, mask)
    for row in range(len(lengths)):
        real = features[row, mask[row]][None]
        alone = head(real, torch.ones(real.shape[:2], dtype=torch.bool))
        torch.testing.assert_close(alone[0], together[row], rtol=0, atol=1e-5)
