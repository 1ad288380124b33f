"""Law 3, streaming equals stacking, for every registered fusion; and what every fusion promises."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch
from tests.support.tiny import FAMILIES
from tests.unit.fusion.formulas import FORMULAS, SETTINGS, stir_

from lamina.bank import Reader, ReaderBank
from lamina.errors import ConfigError
from lamina.fusion import FUSIONS
from lamina.fusion.base import LayerView
from lamina.heads.sequence_classification import SequenceClassification
from lamina.heads.token_classification import TokenClassification
from lamina.layers import select, stacks

CASES = [
    pytest.param(name, settings, id=f"{name}-{number}")
    for name in FUSIONS.names()
    for number, settings in enumerate(SETTINGS.get(name, [{}]))
]
READ = [("bert", "main"), ("gpt2", "main"), ("bart", "encoder"), ("bart", "decoder"), ("t5", "encoder")]
LAYERS, WIDTH = 5, 12


@functools.cache
def model_of(name: str) -> Any:
    return FAMILIES[name].build()


def made(name: str, settings: dict[str, Any], layers: int = LAYERS, width: int = WIDTH) -> Any:
    torch.manual_seed(0)
    fusion = FUSIONS.get(name)(**settings).build(layers, width).eval()
    stir_(fusion)
    return fusion


def states_and_mask(layers: int = LAYERS) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(3)
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[1, 5:], mask[2, :3] = False, False  # padding on either side
    return torch.randn(layers, 3, 7, WIDTH, generator=rng), mask


def test_every_registered_fusion_has_a_reference_formula():
    assert set(FUSIONS.names()) == set(FORMULAS) == set(SETTINGS)


@pytest.mark.parametrize("name", FUSIONS.names())
def test_the_cases_use_every_option(name: str):
    options = {field.name for field in dataclasses.fields(FUSIONS.get(name))} - {"dropout"}
    assert options == {key for settings in SETTINGS[name] for key in settings}


@pytest.mark.parametrize(("name", "settings"), CASES)
@torch.no_grad()
def test_the_module_computes_its_formula(name: str, settings: dict[str, Any]):
    fusion = made(name, settings)
    states, mask = states_and_mask()
    got = fusion(states, mask)
    assert got.shape == (3, 7, fusion.dim)
    torch.testing.assert_close(got[mask], FORMULAS[name](fusion, states, mask)[mask], rtol=0, atol=2e-6)


@pytest.mark.parametrize(("name", "settings"), CASES)
@torch.no_grad()
def test_a_mask_of_numbers_and_a_mask_of_truths_are_the_same(name: str, settings: dict[str, Any]):
    fusion = made(name, settings)
    states, mask = states_and_mask()
    assert torch.equal(fusion(states, mask), fusion(states, mask.float()))
    assert torch.equal(fusion(states), fusion(states, torch.ones_like(mask)))


@pytest.mark.parametrize(("name", "settings"), CASES)
@torch.no_grad()
def test_states_that_are_not_live_change_nothing(name: str, settings: dict[str, Any]):
    fusion = made(name, settings)
    states, mask = states_and_mask()
    expected = fusion(states, mask)
    live = fusion.live()
    assert live
    assert set(live) <= set(range(LAYERS))
    for index in range(LAYERS):
        changed = states.clone()
        changed[index] += torch.randn(changed[index].shape, generator=torch.Generator().manual_seed(9))
        assert torch.equal(fusion(changed, mask), expected) is (index not in live)


@pytest.mark.parametrize(("name", "settings"), CASES)
@torch.no_grad()
def test_a_stream_that_is_fed_by_hand_gives_what_the_module_gives(name: str, settings: dict[str, Any]):
    fusion = made(name, settings)
    states, mask = states_and_mask()
    stream = fusion.stream([fusion])
    for index in fusion.live():
        stream.step(index, LayerView(states[index]))
    assert torch.equal(stream.finish(mask)[0], fusion(states, mask))


@pytest.mark.parametrize(("name", "settings"), CASES)
@torch.no_grad()
def test_feeding_changes_no_state(name: str, settings: dict[str, Any]):
    """The states are the main job's own: an operation in place would reach its output."""
    fusion = made(name, settings)
    states, mask = states_and_mask()
    before = states.clone()
    fusion(states, mask).add_(0)
    assert torch.equal(states, before)


@pytest.mark.parametrize(("name", "settings"), CASES)
@torch.no_grad()
def test_a_token_does_not_look_at_other_tokens_or_rows(name: str, settings: dict[str, Any]):
    fusion = made(name, settings)
    states, mask = states_and_mask()
    whole = fusion(states, mask)
    for row in range(3):
        real = mask[row]
        alone = fusion(states[:, row : row + 1, real], mask[row : row + 1, real])
        torch.testing.assert_close(alone[0], whole[row, real], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_every_parameter_gets_a_gradient(name: str, settings: dict[str, Any]):
    fusion = made(name, {**settings, "cutoff": 0.0} if "cutoff" in settings else settings)
    states, mask = states_and_mask()
    if not list(fusion.parameters()):
        assert name in ("last_layer", "mean")  # these have nothing to learn
        return
    fusion(states, mask).square().sum().backward()
    assert [
        key for key, value in fusion.named_parameters() if value.grad is None or not value.grad.abs().sum() > 0
    ] == []


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_importances_sum_to_one(name: str, settings: dict[str, Any]):
    fusion = made(name, settings)
    if not hasattr(fusion, "importance"):
        assert name in ("single_layer", "last_layer")  # these mix no layers
        return
    shares = fusion.importance()
    assert shares.shape == (LAYERS,)
    assert not shares.requires_grad
    assert bool((shares >= 0).all())
    assert float(shares.sum()) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_the_wrong_states_are_refused(name: str, settings: dict[str, Any]):
    fusion = made(name, settings)
    states, mask = states_and_mask()
    with pytest.raises(ConfigError, match="fusion: got 4 states of width 12; this one was built for 5 of width 12"):
        fusion(states[:4], mask)
    with pytest.raises(ConfigError, match="fusion: got 5 states of width 11; this one was built for 5 of width 12"):
        fusion(states[..., :11], mask)


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_configs_survive_the_registry(name: str, settings: dict[str, Any]):
    config = FUSIONS.get(name)(**settings)
    assert FUSIONS.from_dict(FUSIONS.to_dict(config)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.layers = "all"


@pytest.mark.parametrize(("name", "settings"), CASES)
@pytest.mark.parametrize(("family", "stack"), READ)
@torch.no_grad()
def test_a_bank_streams_what_the_module_gives_on_the_stacked_states(
    name: str, settings: dict[str, Any], family: str, stack: str
):
    model = model_of(family)
    bank = ReaderBank(model)
    bank.add("r", Reader(FUSIONS.get(name)(**settings), TokenClassification(("a", "b", "c"), feedforward=16), stack))
    stir_(bank)
    bank.eval()
    batch = FAMILIES[family].inputs(model, batch=3, tokens=9, seed=2)
    prefix = "" if stack == "main" else f"{stack}_"
    everything = torch.stack(model(**batch, output_hidden_states=True)[f"{prefix}hidden_states"])
    states = everything[select(bank["r"].config.fusion.selector(), len(everything), op="test")]
    mask = batch["attention_mask"].bool() if stack != "decoder" else torch.ones(states.shape[1:3], dtype=torch.bool)
    features = bank["r"].fusion(states, mask)
    torch.testing.assert_close(features[mask], FORMULAS[name](bank["r"].fusion, states, mask)[mask], rtol=0, atol=5e-6)
    out = bank(**batch)
    assert torch.equal(out["r"].logits, bank["r"].head(features, mask))
    assert torch.equal(out["r"].mask, mask)


@pytest.mark.parametrize(
    ("fusion", "head", "layers", "width", "size"),
    [
        (
            {"name": "ada_layers", "dim": 64},
            {"name": "sequence_classification", "labels": ("0", "1")},
            24,
            1024,
            1_589_658,
        ),
        (
            {"name": "ada_layers", "dim": 64},
            {"name": "sequence_classification", "labels": ("0", "1")},
            13,
            1024,
            868_751,
        ),
        ({"name": "ada_layers", "dim": 128}, {"name": "token_classification", "labels": 9}, 24, 1024, 3_739_937),
        ({"name": "ada_layers", "dim": 128}, {"name": "token_classification", "labels": 9}, 13, 1024, 2_298_134),
    ],
    ids=["RoBERTa-large", "BART-large", "RoBERTa-large-CoNLL", "BART-large-CoNLL"],
)
def test_readers_have_the_sizes_of_the_papers(
    fusion: dict[str, Any], head: dict[str, Any], layers: int, width: int, size: int
):
    from lamina.heads import HEADS

    module = FUSIONS.from_dict(fusion).build(layers, width)
    top = HEADS.from_dict(head).build(module.dim)
    assert sum(p.numel() for part in (module, top) for p in part.parameters()) == size


def test_alike_readers_run_as_one_and_give_the_same():
    """Eight readers need one matrix product per layer, and each gets what it gets alone."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            projects = func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.linear)
            self.count += projects and 32 in args[0].shape  # states of width 32; not the heads
            return func(*args, **(kwargs or {}))

    model = model_of("bert")
    batch = FAMILIES["bert"].inputs(model, batch=3, tokens=9, seed=2)
    fusion = FUSIONS.get("ada_layers")(dim=16, alpha=2.0)
    head = SequenceClassification(("a", "b"), attention_heads=4)

    def made_of(seeds: range) -> ReaderBank:
        bank = ReaderBank(model)
        for seed in seeds:
            stir_(bank.add(f"r{seed}", Reader(fusion, head, seed=seed)), seed)
        return bank.eval()

    def products(bank: ReaderBank) -> tuple[int, Any]:
        with torch.no_grad(), Products() as seen:
            out = bank(**batch)
        return seen.count, out

    many = made_of(range(8))
    assert len(many._passes(list(many), grad=False)[0]._streams) == 1
    base = products(_reading_nothing_wide(model))[0]
    grouped, out = products(many)
    assert grouped - base == stacks(model)["main"].depth
    for seed in range(8):
        single, alone = products(made_of(range(seed, seed + 1)))
        assert single - base == stacks(model)["main"].depth
        torch.testing.assert_close(out[f"r{seed}"].logits, alone[f"r{seed}"].logits, rtol=0, atol=1e-6)


def _reading_nothing_wide(model: Any) -> ReaderBank:
    """A bank that runs the whole model but projects nothing of its width."""
    bank = ReaderBank(model)
    bank.add("r", Reader(FUSIONS.get("single_layer")(dim=16), SequenceClassification(("a", "b"), pooling="mean")))

    class Nothing(torch.nn.Module):
        def forward(self, features: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return features.sum(1)

    class Reads:
        def step(self, *_: Any) -> None:
            pass

        def finish(self, mask: torch.Tensor) -> list[torch.Tensor]:
            return [torch.zeros(*mask.shape, 16)]

    bank["r"].fusion.stream = lambda members: Reads()
    bank["r"].head = Nothing()
    return bank.eval()


def test_alike_readers_with_other_cutoffs_still_run_as_one():
    """A layer may be alive for one of them and dead for another."""
    model = model_of("bert")
    batch = FAMILIES["bert"].inputs(model, batch=2, tokens=6, seed=2)
    bank = ReaderBank(model)
    fusion = FUSIONS.get("ada_layers")(dim=16, alpha=1.0, cutoff=0.3)
    for number, scores in enumerate(([9.0, 0.0, 0.0], [0.0, 2.0, 2.0], [0.0, 0.0, 9.0])):
        reader = bank.add(f"r{number}", Reader(fusion, SequenceClassification(("a", "b")), seed=number))
        with torch.no_grad():
            reader.fusion.scores.copy_(torch.tensor(scores))
    bank.eval()
    one = bank._passes(list(bank), grad=False)[0]
    assert [names for names, _ in one._streams] == [["r0", "r1", "r2"]]
    assert [reader.fusion.live() for reader in one.readers.values()] == [(0,), (1, 2), (2,)]
    with torch.no_grad():
        states = torch.stack(model(**batch, output_hidden_states=True).hidden_states)[1:]
        together = bank(**batch)
        for name in bank:
            features = FORMULAS["ada_layers"](bank[name].fusion, states, batch["attention_mask"])
            expected = bank[name].head(features, batch["attention_mask"].bool())
            torch.testing.assert_close(together[name].logits, expected, rtol=0, atol=2e-6)
