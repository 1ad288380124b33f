"""What probes read, alone and many at once, against the model's own states."""

from __future__ import annotations

import pytest
import torch
from tests.support.stored import TEXTS, tiny_model, tiny_tokenizer
from torch.nn import functional as F

from lamina.bank import Reader, ReaderBank
from lamina.errors import ConfigError, UnknownNameError
from lamina.studies.probing.probe_cell import ProbeHead, ProbeLayer


def filled(*, tags: bool) -> ReaderBank:
    """Three probes of each of two layers, linear and with a hidden layer."""
    bank = ReaderBank(tiny_model(), tiny_tokenizer())
    head = ProbeHead(("a", "b", "c"), "token_classification" if tags else "sequence_classification", tags=tags)
    for layer in (0, 2):
        for hidden in (None, 5):
            for seed in range(3):
                fusion = ProbeLayer(layer, pooled=not tags, hidden=hidden)
                bank.add(f"l{layer}-h{hidden}-{seed}", Reader(fusion, head, seed=seed))
    return bank


def batch(side: str) -> dict[str, torch.Tensor]:
    tokenizer = tiny_tokenizer()
    tokenizer.padding_side = side
    return dict(tokenizer(TEXTS, padding=True, return_tensors="pt"))


@pytest.mark.parametrize("tags", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_probes_compute_their_formula_alone_and_together(tags: bool, side: str):
    bank, given = filled(tags=tags), batch(side)
    real = given["attention_mask"].bool()
    with torch.no_grad():
        states = bank.model(**given, output_hidden_states=True).hidden_states
        alone = {name: bank.eval()(**given, readers=[name])[name].logits for name in bank}
    together = bank.train()(**given)
    for name in bank:
        config, reader = bank[name].config.fusion, bank[name]
        state = F.layer_norm(states[config.layer], states[0].shape[-1:])
        if config.pooled:
            state = torch.stack([row[mask].mean(0) for row, mask in zip(state, real, strict=True)])
        if config.hidden is not None:
            state = F.gelu(F.linear(state, reader.fusion.inner.weight, reader.fusion.inner.bias))
        expected = F.linear(state, reader.head.output.weight, reader.head.output.bias)
        kept = real if tags else slice(None)
        torch.testing.assert_close(alone[name][kept], expected[kept], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(together[name].logits[kept], expected[kept], rtol=1e-5, atol=1e-5)
        assert torch.equal(together[name].mask, real)


@pytest.mark.parametrize("tags", [False, True])
def test_probes_learn_the_same_alone_and_together(tags: bool):
    bank, given = filled(tags=tags), batch("right")
    labels = torch.randint(0, 3, given["input_ids"].shape if tags else (3,), generator=torch.Generator().manual_seed(0))
    bank.train()(**given, labels=dict.fromkeys(bank, labels)).loss.backward()
    together = {key: value.grad.clone() for key, value in bank.named_parameters()}
    bank.zero_grad()
    for name in bank:
        bank(**given, readers=[name], labels={name: labels}).loss.backward()
    for key, value in bank.named_parameters():
        torch.testing.assert_close(value.grad, together[key], rtol=1e-5, atol=1e-6)


def test_a_probe_on_stacked_states():
    states = torch.randn(1, 2, 4, 8)
    fusion = ProbeLayer(0, pooled=False).build(1, 8)
    torch.testing.assert_close(fusion(states), F.layer_norm(states[0], (8,)))
    assert list(fusion.parameters()) == []


def test_a_hidden_layer_has_a_size():
    with pytest.raises(ConfigError, match="hidden is 0; it must be at least 1"):
        ProbeLayer(0, hidden=0)


@pytest.mark.parametrize(
    ("options", "kind", "told"),
    [
        ({"site": "x"}, UnknownNameError, "probe: unknown site 'x'; known: output, attention, ffn"),
        ({"site": None}, UnknownNameError, "probe: unknown site 'None'"),
        ({"layer": "top"}, ConfigError, "probe_layer: layer is 'top'; it must be a whole number"),
        ({"pooled": "yes"}, ConfigError, "probe_layer: pooled is 'yes'; it must be True or False"),
        ({"hidden": 1.5}, ConfigError, "probe_layer: hidden is 1.5; it must be a whole number or None"),
        ({"hidden": 0}, ConfigError, "probe: hidden is 0; it must be at least 1"),
    ],
)
def test_a_wrong_field_is_refused(options: dict[str, object], kind: type[Exception], told: str):
    with pytest.raises(kind, match=told):
        ProbeLayer(**{"layer": 1, **options})  # pyright: ignore[reportArgumentType]
