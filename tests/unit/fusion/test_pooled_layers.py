from __future__ import annotations

import pytest
import torch
from tests.support.formulas import stir_, view_of
from tests.support.stored import tiny_model

from lamina.bank import Reader, ReaderBank
from lamina.errors import ConfigError
from lamina.fusion import pooled_layers
from lamina.fusion.base import LayerView
from lamina.fusion.paired_layers import PairedLayers
from lamina.fusion.pooled_layers import PooledLayers, PoolingConfig
from lamina.heads.sequence_classification import SequenceClassification
from lamina.heads.token_classification import TokenClassification


def test_parameter_counts():
    """At RoBERTa-large's size: 25 states x (1 query + 64 rows) x 1024, and a score each."""
    fusion = PooledLayers().build(25, 1024)
    assert sum(parameter.numel() for parameter in fusion.parameters()) == 25 * (1 + 64) * 1024 + 25


def test_every_query_has_its_part_of_the_projection():
    fusion = PooledLayers(dim=4, heads=2, queries=3).build(5, 8)
    assert fusion.queries.shape == (5, 3 * 2, 8)
    assert fusion.projection.shape == (5, 4, 3 * 8)
    assert fusion.group() != PooledLayers(dim=4, heads=2).build(5, 8).group()


def test_queries_that_begin_alike_draw_apart():
    fusion = PooledLayers(dim=4, queries=2, dropout=0.0).build(2, 8)
    fusion(torch.randn(2, 3, 5, 8)).square().sum().backward()
    assert fusion.queries.grad is not None
    assert not torch.allclose(fusion.queries.grad[:, 0], fusion.queries.grad[:, 1])


def test_what_is_dropped_otherwise_runs_apart():
    one = PooledLayers(dim=4, heads=2, dropout=0.1).build(3, 8)
    assert one.group() == PooledLayers(dim=4, heads=2, dropout=0.1).build(3, 8).group()
    assert one.group() != PooledLayers(dim=4, heads=2, dropout=0.5).build(3, 8).group()


def test_at_the_start_every_token_weighs_the_same():
    fusion = PooledLayers(dim=4, heads=2).build(1, 6).eval()
    state, mask = torch.randn(1, 1, 5, 6), torch.ones(1, 5, dtype=torch.bool)
    shuffled = state[:, :, torch.tensor([3, 1, 4, 0, 2])]
    torch.testing.assert_close(fusion(state, mask), fusion(shuffled, mask))
    mean = torch.nn.functional.layer_norm(state[0, 0], (6,)).mean(0)
    expected = torch.nn.functional.gelu(torch.nn.functional.layer_norm(fusion.projection[0] @ mean, (4,)))
    torch.testing.assert_close(fusion(state, mask)[0, 0], expected)


def kept_by_stream(layers: int, tokens: int) -> int:
    """Return the number of elements of states and features that a stream holds after `layers` layers."""
    fusion = PooledLayers(dim=4, heads=2).build(layers, 8).eval()
    stream = fusion.stream([fusion])
    for index in range(layers):
        stream.step(index, view_of(torch.randn(2, tokens, 8)))
    return sum(
        part.numel()
        for name, value in vars(stream).items()
        if name != "_weights"
        for item in (value if isinstance(value, list) else [value])
        if isinstance(part := getattr(item, "state", item), torch.Tensor) and part.shape[-1] in (4, 8) and part.ndim < 4
    ) + sum(part.numel() for part in vars(stream)["_pooled"])


@torch.no_grad()
def test_what_a_stream_keeps_grows_neither_with_the_text_nor_with_the_layers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pooled_layers, "_KEPT", 100)
    pooled, total = 2 * 8, 2 * 4
    assert kept_by_stream(3, 50) == kept_by_stream(3, 500) == 3 * pooled
    assert kept_by_stream(8, 50) == total
    assert kept_by_stream(19, 50) == total + 3 * pooled
    assert kept_by_stream(2, 2) == 2 * (2 * 2 * 8)  # two small states; a third would leave no place for one more
    assert kept_by_stream(3, 2) == 3 * pooled


@torch.no_grad()
@pytest.mark.parametrize("config", [PooledLayers(dim=4, heads=2, queries=3), PairedLayers(dim=4, heads=2, queries=3)])
def test_layers_pooled_together_equal_layers_pooled_one_by_one(config: PoolingConfig, monkeypatch: pytest.MonkeyPatch):
    fusion = config.build(11, 8).eval()
    stir_(fusion, 0)
    generator = torch.Generator().manual_seed(2)
    states, segments = torch.randn(11, 3, 6, 8, generator=generator), torch.randint(0, 3, (3, 6), generator=generator)
    mask = torch.ones(3, 6, dtype=torch.bool)
    mask[1, 4:], mask[2, 0] = False, False
    together = fusion(states, mask, segments)
    monkeypatch.setattr(pooled_layers, "_KEPT", 0)
    torch.testing.assert_close(together, fusion(states, mask, segments), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("texts", [1, 4, 5])
@pytest.mark.parametrize("config", [PooledLayers(dim=4, heads=2, queries=3), PairedLayers(dim=4, heads=2, queries=3)])
def test_few_texts_have_the_features_that_they_have_among_many(
    config: PoolingConfig, texts: int, monkeypatch: pytest.MonkeyPatch
):
    members = [config.build(3, 8).eval() for _ in range(2)]
    for seed, member in enumerate(members):
        stir_(member, seed)
    states, segments = torch.randn(3, 9, 5, 8), torch.randint(0, 3, (9, 5))

    def features(count: int) -> torch.Tensor:
        stream, mask = members[0].stream(members), torch.ones(count, 5, dtype=torch.bool)
        for index, state in enumerate(states[:, :count]):
            stream.step(index, LayerView(state, mask, segments[:count]))
        return torch.as_tensor(stream.finish(mask))

    with torch.no_grad():
        few, many = features(texts), features(9)
        firsts: list[torch.Tensor] = []
        product = torch.bmm
        with monkeypatch.context() as patch:
            patch.setattr(torch, "bmm", lambda first, second: (firsts.append(first), product(first, second))[1])
            features(texts)
        assert any(torch.equal(first, members[0].projection) for first in firsts) == (texts <= pooled_layers._FEW)
    assert few.shape == (2, texts, 5, 4)
    torch.testing.assert_close(few, many[:, :texts])
    torch.testing.assert_close(few, features(texts))  # with gradients, another product


def test_all_tokens_carry_the_same_features_at_the_memory_of_one():
    fusion = PooledLayers(dim=4, heads=2).build(2, 8).eval()
    features = fusion(torch.randn(2, 3, 7, 8))
    assert torch.equal(features, features[:, :1].expand(-1, 7, -1))
    assert features.stride(1) == 0


def test_a_bank_reads_its_features_by_the_mask_of_the_batch():
    bank = ReaderBank(tiny_model())
    stir_(bank.add("r", Reader(PooledLayers(dim=4, heads=2), SequenceClassification(["a", "b"], pooling="first"))))
    bank.eval()
    ids = torch.randint(5, 20, (1, 6))
    mask = torch.ones_like(ids)
    padded = torch.cat([ids, torch.zeros(1, 3, dtype=torch.long)], dim=1)
    seen = torch.cat([mask, torch.zeros(1, 3, dtype=torch.long)], dim=1)
    with torch.no_grad():
        alone = bank(input_ids=ids, attention_mask=mask)["r"].logits
        beside = bank(input_ids=padded, attention_mask=seen)["r"].logits
    torch.testing.assert_close(alone, beside, rtol=1e-5, atol=1e-5)


def test_heads_must_divide_the_width():
    with pytest.raises(ConfigError, match="pooled_layers: 5 heads for states of width 12; they must divide it"):
        PooledLayers(heads=5).build(2, 12)


def test_a_head_that_labels_tokens_is_refused():
    head = TokenClassification(["a", "b"], encoder_layers=0).build(4)
    with pytest.raises(ConfigError, match="the head labels tokens; these features are of a whole text"):
        PooledLayers(dim=4, heads=2).build(2, 8).check_head(head)


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"dim": 0}, "dim"), ({"heads": 0}, "heads"), ({"queries": 0}, "queries"), ({"dropout": 1}, "dropout")],
)
def test_settings_out_of_range(settings: dict[str, int], name: str):
    with pytest.raises(ConfigError, match=f"pooled_layers: {name} is"):
        PooledLayers(**settings)
