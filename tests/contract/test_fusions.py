"""Laws 3 to 6, and what else every fusion promises, for every registered fusion."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
from typing import Any

import pytest
import torch
from tests.support.formulas import ELSEWHERE, FORMULAS, LINEAR_ONLY, SETTINGS, TEXT_ONLY, stir_
from tests.support.portions import one_in
from tests.support.stored import TEXTS, tiny_model, tiny_tokenizer
from tests.support.tiny import FAMILIES, model_of

from lamina.bank import Reader, ReaderBank
from lamina.errors import ConfigError
from lamina.fusion import FUSIONS
from lamina.fusion.base import LayerView, Stream
from lamina.heads.base import Head
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
GROUPED = (
    "ada_layers",
    "single_layer",
    "elementwise",
    "gated",
    "pooled_layers",
    "paired_layers",
    "concat",
    "depth_lstm",
)  # run as one
CONSTANT = ("last_layer", "mean", "head2toe")  # no parameters
UNMIXED = (
    "single_layer",
    "last_layer",
    "concat",
    "depth_lstm",
    "extra_layers",
)  # no shares of layers that would sum to 1


def made(name: str, settings: dict[str, Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    fusion = FUSIONS.get(name)(**settings).build(LAYERS, WIDTH).eval()
    stir_(fusion, seed)
    return fusion


def states_and_mask() -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(3)
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[1, 5:], mask[2, :3] = False, False  # padding on either side
    return torch.randn(LAYERS, 3, 7, WIDTH, generator=rng), mask


def test_every_registered_fusion_has_a_reference_formula():
    assert set(FUSIONS.names()) == {*FORMULAS, *ELSEWHERE} == set(SETTINGS)
    assert not set(FORMULAS) & set(ELSEWHERE)


@pytest.mark.parametrize("name", FUSIONS.names())
def test_the_cases_use_every_option(name: str):
    # a frozen projection has no gradient, which the other tests here look for
    options = {field.name for field in dataclasses.fields(FUSIONS.get(name))} - {"dropout", "frozen"}
    assert options == {key for settings in SETTINGS[name] for key in settings}


@pytest.mark.parametrize(("name", "settings"), CASES)
@torch.no_grad()
def test_a_fusion_without_weights_gives_the_shape_of_its_features(name: str, settings: dict[str, Any]):
    """On the meta device, where nothing has values."""
    states, mask = states_and_mask()
    got = made(name, settings).to("meta")(states.to("meta"), mask.to("meta"))
    assert got.shape[:2] == (3, 7)
    assert got.is_meta


@pytest.mark.parametrize(("name", "settings"), CASES)
@torch.no_grad()
def test_the_module_computes_its_formula(name: str, settings: dict[str, Any]):
    fusion = made(name, settings)
    states, mask = states_and_mask()
    got = fusion(states, mask)
    assert got.shape == (3, 7, fusion.dim)
    if name in FORMULAS:
        torch.testing.assert_close(got[mask], FORMULAS[name](fusion, states, mask)[mask], rtol=2e-6, atol=2e-6)


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
    live = fusion.active_layers()
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
    for index in fusion.active_layers():
        stream.step(index, LayerView(states[index], mask))
    assert torch.equal(stream.finish(mask)[0], fusion(states, mask))


@pytest.mark.parametrize(("name", "settings"), CASES)
@torch.no_grad()
def test_feeding_changes_no_state(name: str, settings: dict[str, Any]):
    """The states are the main job's own: an operation in place would reach its output."""
    fusion = made(name, settings)
    states, mask = states_and_mask()
    before = states.clone()
    features = fusion(states, mask)
    assert torch.equal(states, before)
    assert features.untyped_storage().data_ptr() != states.untyped_storage().data_ptr()


@pytest.mark.parametrize(("name", "settings"), CASES)
@torch.no_grad()
def test_a_row_alone_is_that_row_beside_others(name: str, settings: dict[str, Any]):
    """Law 5: without its neighbours or padding, or with padding on the other side; in double, free of rounding."""
    fusion = made(name, settings).double()
    states, mask = states_and_mask()
    states = states.double()
    mask[0, 1:] = False  # one token only
    whole = fusion(states, mask)
    for row in range(3):
        real = mask[row]
        kept = states[:, row : row + 1, real]
        alone = fusion(kept, mask[row : row + 1, real])
        torch.testing.assert_close(alone[0], whole[row, real], rtol=1e-6, atol=1e-6)
        noise = 50 * torch.randn(LAYERS, 1, 4, WIDTH, generator=torch.Generator().manual_seed(row), dtype=states.dtype)
        count = kept.shape[2]
        for parts, at in (((kept, noise), slice(count)), ((noise, kept), slice(4, None))):
            padded = torch.zeros(1, count + 4, dtype=torch.bool)
            padded[0, at] = True
            got = fusion(torch.cat(parts, dim=2), padded)
            torch.testing.assert_close(got[0, at], alone[0], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_a_row_without_a_token_gives_numbers(name: str, settings: dict[str, Any]):
    """Law 5: its features mean nothing, but a NaN there would reach every parameter's gradient."""
    fusion = made(name, settings).train()
    states, mask = states_and_mask()
    mask[1] = False
    features = fusion(states.requires_grad_(), mask)
    assert bool(features.isfinite().all())
    features.square().sum().backward()
    grads = [states.grad, *(parameter.grad for parameter in fusion.parameters())]
    assert all(bool(grad.isfinite().all()) for grad in grads if grad is not None)
    assert not fusion(states, torch.zeros_like(mask)).isnan().any()


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_every_parameter_gets_a_gradient(name: str, settings: dict[str, Any]):
    fusion = made(name, {**settings, "cutoff": 0.0} if "cutoff" in settings else settings)
    states, mask = states_and_mask()
    if not list(fusion.parameters()):
        assert name in CONSTANT
        return
    fusion(states, mask).square().sum().backward()
    assert [
        key for key, value in fusion.named_parameters() if value.grad is None or not value.grad.abs().sum() > 0
    ] == []


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_the_states_get_their_gradients(name: str, settings: dict[str, Any]):
    """A base that is trained learns through every live state."""
    fusion = made(name, settings)
    states, mask = states_and_mask()
    fusion(states.requires_grad_(), mask).square().sum().backward()
    assert states.grad is not None
    assert [index for index in range(LAYERS) if states.grad[index].any()] == list(fusion.active_layers())


@pytest.mark.parametrize(("name", "settings"), CASES)
@torch.no_grad()
def test_importances_sum_to_one(name: str, settings: dict[str, Any]):
    fusion = made(name, settings)
    assert hasattr(fusion, "importance") is (name not in UNMIXED)
    if name in UNMIXED:
        return
    states, mask = states_and_mask()
    for _ in range(2):  # before any state was read and after
        shares = fusion.importance()
        assert shares.shape == (LAYERS,)
        assert not shares.requires_grad
        assert bool((shares >= 0).all())
        assert float(shares.sum()) == pytest.approx(1, abs=1e-6)
        fusion(states, mask)


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_training_draws_no_random_number_of_others(name: str, settings: dict[str, Any]):
    """Law 4: what dropout draws comes from the fusion's own generator."""
    fusion = made(name, settings).train()
    states, mask = states_and_mask()

    def run() -> torch.Tensor:
        fusion.generator = torch.Generator().manual_seed(1)
        return fusion(states, mask)

    before = torch.get_rng_state()
    first = run()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(run(), first)


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_alike_fusions_that_run_as_one_are_what_each_is_alone(name: str, settings: dict[str, Any]):
    """Law 4: values, gradients and what was learned about the layers."""
    states, mask = states_and_mask()
    alone = [made(name, settings, seed=seed) for seed in range(3)]
    together = copy.deepcopy(alone)
    if alone[0].group() is None:
        assert name not in GROUPED
        return
    assert name in GROUPED
    assert len({member.group() for member in together}) == 1
    stream = together[0].stream(together)
    for index in sorted({index for member in together for index in member.active_layers()}):
        stream.step(index, LayerView(states[index], mask))
    for one, other, features in zip(alone, together, stream.finish(mask), strict=True):
        expected = one(states, mask)
        torch.testing.assert_close(features, expected, rtol=1e-6, atol=2e-6)
        for result in (expected, features):
            result.square().mean().backward(retain_graph=True)
        for own, grouped in zip(one.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(own.grad, grouped.grad, rtol=1e-5, atol=1e-6)
        if name not in UNMIXED:
            torch.testing.assert_close(one.importance(), other.importance())


@pytest.mark.parametrize(("name", "settings"), CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@torch.no_grad()
def test_features_have_the_precision_of_the_parameters(name: str, settings: dict[str, Any], dtype: torch.dtype):
    fusion = made(name, settings)
    states, mask = states_and_mask()
    got = fusion(states.to(dtype), mask)
    if not list(fusion.parameters()):
        assert name in CONSTANT
        return
    assert got.dtype == torch.float32
    expected = fusion(states.to(dtype).float(), mask)
    torch.testing.assert_close(got, expected, rtol=0, atol=0.02 if dtype is torch.bfloat16 else 1e-5)
    fusion.double()
    assert fusion(states.to(dtype), mask).dtype == torch.float64


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


def read_in_turn() -> list[Any]:
    """Every case on a few of the stacks, and on all of them with `-m full`."""
    return [
        pytest.param(
            *case.values,
            *place,
            id="-".join((str(case.id), *place)),
            marks=() if (number + other) % 9 == 0 else pytest.mark.full,
        )
        for number, case in enumerate(CASES)
        for other, place in enumerate(READ)
    ]


@pytest.mark.parametrize(("name", "settings", "family", "stack"), read_in_turn())
@torch.no_grad()
def test_a_bank_streams_what_the_module_gives_on_the_stacked_states(
    name: str, settings: dict[str, Any], family: str, stack: str
):
    model = model_of(family)
    bank = ReaderBank(model, tiny_tokenizer())
    config = FUSIONS.get(name)(**settings)
    bank.add("r", Reader(config, head_for(name, settings), stack))
    stir_(bank)
    bank.eval()
    batch = FAMILIES[family].inputs(model, batch=3, tokens=9, seed=2)
    prefix = "" if stack == "main" else f"{stack}_"
    fusion = bank["r"].fusion
    with fusion.block_inputs(bank.stacks[stack]):
        everything = torch.stack(model(**batch, output_hidden_states=True)[f"{prefix}hidden_states"])
        states = everything[select(config.selector(), len(everything), op="test")]
        real = batch["attention_mask"].bool()
        mask = real if stack != "decoder" else torch.ones(states.shape[1:3], dtype=torch.bool)
        features = fusion(states, mask)
    if name in FORMULAS:
        exact = copy.deepcopy(fusion).double()  # so that the rounding of the formula itself counts for nothing
        formula = FORMULAS[name](exact, states.double(), mask)
        torch.testing.assert_close(features[mask], formula[mask].to(features.dtype), rtol=2e-6, atol=1e-5)
    out = bank(**batch)
    assert torch.equal(out["r"].logits, bank["r"].head(features, mask))
    assert torch.equal(out["r"].mask, mask)


def head_for(name: str, settings: dict[str, Any]) -> Any:
    """A head that can read its features."""
    if name not in (*LINEAR_ONLY, *TEXT_ONLY):
        return TokenClassification(("a", "b", "c"), feedforward=16, dropout=0.0)
    if settings.get("per_token"):
        return TokenClassification(("a", "b", "c"), encoder_layers=0, dropout=0.0)
    return SequenceClassification(("a", "b", "c"), pooling="first", dropout=0.0)


def undropped(config: Any) -> Any:
    """The config without dropout."""
    off = {field.name: 0.0 for field in dataclasses.fields(config) if "dropout" in field.name}
    return dataclasses.replace(config, **off)


def readers() -> dict[str, Reader]:
    """One reader per case, and a second of its kind with another seed."""
    made = {}
    for case in CASES:
        name, settings = case.values
        fusion, head = undropped(FUSIONS.get(name)(**settings)), head_for(name, settings)
        made |= {f"{case.id}_{seed}": Reader(fusion, head, seed=seed) for seed in (1, 2)}
    return made


def trained(names: list[str]) -> ReaderBank:
    """A bank whose readers took a few steps on the same batches.

    In double precision where there are parameters: some methods blow rounding up a thousandfold within these steps.
    """
    family, model = FAMILIES["bert"], model_of("bert")
    bank = ReaderBank(model, tiny_tokenizer())
    for name in names:
        reader = bank.add(name, readers()[name])
        reader.to(torch.float64 if list(reader.fusion.parameters()) else torch.float32)
    optimizer = torch.optim.SGD(bank.train().parameters(), lr=0.02)
    for step in range(3):
        labels = torch.randint(0, 3, (3, 9), generator=torch.Generator().manual_seed(step))
        given = {n: labels if bank[n].config.head.kind == "token_classification" else labels[:, 0] for n in names}
        loss = bank(**family.inputs(model, batch=3, tokens=9, seed=step), labels=given).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return bank.eval()


@functools.cache
def trained_together() -> ReaderBank:
    return trained(list(readers()))


@pytest.mark.parametrize("name", one_in(4, [f"{case.id}_1" for case in CASES]))
def test_a_reader_learns_the_same_alone_and_beside_all_others(name: str):
    """Law 4."""
    alone, crowd = trained([name])[name], trained_together()[name]
    fresh = ReaderBank(model_of("bert"), tiny_tokenizer()).add(name, readers()[name])
    fresh.to(next(alone.parameters()).dtype)
    pairs = list(zip(alone.named_parameters(), crowd.parameters(), fresh.parameters(), strict=True))
    assert len(pairs) > 0
    for (key, one), other, start in pairs:
        assert bool(one.isfinite().all()), key
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6, msg=key)
        assert not torch.equal(one, start), key  # it did learn


@pytest.fixture(scope="module")
def banks(tmp_path_factory: pytest.TempPathFactory) -> tuple[ReaderBank, ReaderBank]:
    """Every reader, and the same saved and loaded."""
    folder = tmp_path_factory.mktemp("banks")
    bank = ReaderBank(tiny_model(), tiny_tokenizer())
    for name, reader in readers().items():
        stir_(bank.add(name, reader), reader.seed, size=0.1)
    bank.eval().save_pretrained(folder)
    return bank, ReaderBank.from_pretrained(folder, tiny_model(), tiny_tokenizer()).eval()


@pytest.mark.parametrize("name", [f"{case.id}_2" for case in CASES])
@torch.no_grad()
def test_what_is_saved_comes_back(name: str, banks: tuple[ReaderBank, ReaderBank]):
    """Law 6: bit for bit, what is no parameter included."""
    before, after = banks
    one, other = (json.dumps(FUSIONS.to_dict(bank[name].config.fusion)) for bank in banks)
    assert one == other
    saved, loaded = before[name].state_dict(), after[name].state_dict()
    assert saved.keys() == loaded.keys()
    assert all(torch.equal(saved[key], loaded[key]) for key in saved)
    batch = tiny_tokenizer()(TEXTS, return_tensors="pt", padding=True)
    first, second = (bank(**batch, readers=[name])[name].logits for bank in banks)
    assert torch.equal(first, second)


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
    batch = FAMILIES["bert"].inputs(model, batch=15, tokens=9, seed=2)  # too many tokens to project all layers at once
    fusion = FUSIONS.get("ada_layers")(dim=16, alpha=2.0)
    head = SequenceClassification(("a", "b"), attention_heads=4)

    def made_of(seeds: range) -> ReaderBank:
        bank = ReaderBank(model, tiny_tokenizer())
        for seed in seeds:
            stir_(bank.add(f"r{seed}", Reader(fusion, head, seed=seed)), seed)
        return bank.eval()

    def products(bank: ReaderBank) -> tuple[int, Any]:
        with torch.no_grad(), Products() as seen:
            out = bank(**batch)
        return seen.count, out

    many = made_of(range(8))
    assert len(many.passes(many.select(None, "test"), grad=False)[0]._streams) == 1
    base = products(_reading_nothing_wide(model))[0]
    grouped, out = products(many)
    assert grouped - base == stacks(model)["main"].depth
    for seed in range(8):
        single, alone = products(made_of(range(seed, seed + 1)))
        assert single - base == stacks(model)["main"].depth
        torch.testing.assert_close(out[f"r{seed}"].logits, alone[f"r{seed}"].logits, rtol=0, atol=1e-6)


def _reading_nothing_wide(model: Any) -> ReaderBank:
    """A bank that runs the whole model but projects nothing of its width."""
    bank = ReaderBank(model, tiny_tokenizer())
    bank.add("r", Reader(FUSIONS.get("single_layer")(dim=16), SequenceClassification(("a", "b"), pooling="mean")))

    class Nothing(Head):
        outputs = 1

        def forward(self, features: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return features.sum(1)

        def loss(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return logits.sum()

    class Reads(Stream):
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
    bank = ReaderBank(model, tiny_tokenizer())
    fusion = FUSIONS.get("ada_layers")(dim=16, alpha=1.0, cutoff=0.3)
    for number, scores in enumerate(([9.0, 0.0, 0.0], [0.0, 2.0, 2.0], [0.0, 0.0, 9.0])):
        reader = bank.add(f"r{number}", Reader(fusion, SequenceClassification(("a", "b")), seed=number))
        with torch.no_grad():
            reader.fusion.scores.copy_(torch.tensor(scores))
    bank.eval()
    one = bank.passes(bank.select(None, "test"), grad=False)[0]
    assert [names for names, _ in one._streams] == [["r0", "r1", "r2"]]
    assert [reader.fusion.active_layers() for reader in one.readers.values()] == [(0,), (1, 2), (2,)]
    with torch.no_grad():
        states = torch.stack(model(**batch, output_hidden_states=True).hidden_states)[1:]
        together = bank(**batch)
        for name in bank:
            features = FORMULAS["ada_layers"](bank[name].fusion, states, batch["attention_mask"])
            expected = bank[name].head(features, batch["attention_mask"].bool())
            torch.testing.assert_close(together[name].logits, expected, rtol=0, atol=2e-6)
