"""Readers of a bank: their names, which layers run, losses, dropout, copies and errors."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from tests.support.formulas import stir_
from tests.support.tiny import FAMILIES

from lamina.bank import BankOutput, Reader, ReaderBank, is_read_by_bank
from lamina.bank.layer_amounts import layer_amounts
from lamina.editing.freeze import freeze_
from lamina.editing.insert import insert_
from lamina.editing.keep import truncate_
from lamina.editing.merge import merge_
from lamina.editing.reinit import reinit_
from lamina.errors import ConfigError, LayerIndexError, UnknownNameError
from lamina.fusion.ada_layers import AdaLayers
from lamina.fusion.base import FusionConfig
from lamina.fusion.extra_layers import ExtraLayers
from lamina.fusion.mean import Mean
from lamina.fusion.single_layer import SingleLayer
from lamina.heads.sequence_classification import SequenceClassification
from lamina.heads.token_classification import TokenClassification
from lamina.layers import stacks
from lamina.layers.layer_guard import EDITS
from lamina.monitors import Cascade, LastScore, Monitor

TWO = SequenceClassification(("a", "b"))


@pytest.fixture
def model() -> Any:
    return FAMILIES["bert"].known()


@pytest.fixture
def batch(model: Any) -> dict[str, torch.Tensor]:
    return FAMILIES["bert"].inputs(model, batch=2, tokens=7)


@pytest.fixture
def bank(model: Any) -> ReaderBank:
    bank = ReaderBank(model)
    bank.add("ada", Reader(AdaLayers(dim=8), TWO))
    bank.add("low", Reader(SingleLayer(layer=1, dim=8), TWO))
    return bank.eval()


def runs(model: Any) -> tuple[list[int], Any]:
    """Counts how often each block runs."""
    counts = [0] * len(stacks(model)["main"].blocks)

    def count(at: int) -> Any:
        def hook(*_: Any) -> None:
            counts[at] += 1

        return hook

    for at, block in enumerate(stacks(model)["main"].blocks):
        block.register_forward_hook(count(at))
    return counts, model


# What runs


def test_blocks_above_the_last_needed_layer_are_not_run(bank: ReaderBank, batch: dict[str, torch.Tensor]):
    counts, _ = runs(bank.model)
    bank(**batch, readers=["low"])
    assert counts == [1, 0, 0]
    bank(**batch, readers=["low"], main=True)
    assert counts == [2, 1, 1]
    bank(**batch)
    assert counts == [3, 2, 2]


def test_reading_the_embeddings_runs_no_block(bank: ReaderBank, batch: dict[str, torch.Tensor]):
    bank.add("none", Reader(SingleLayer(layer=0, dim=8), TWO))
    counts, _ = runs(bank.model)
    bank(**batch, readers=["none"])
    assert counts == [0, 0, 0]


def test_layers_that_a_cutoff_removed_are_not_run(model: Any, batch: dict[str, torch.Tensor]):
    bank = ReaderBank(model)
    reader = bank.add("r", Reader(AdaLayers(dim=8, alpha=1.0, cutoff=0.2), TWO))
    with torch.no_grad():
        reader.fusion.scores.copy_(torch.tensor([5.0, 5.0, 0.0]))
    counts, _ = runs(model)
    bank.eval()(**batch)
    assert counts == [1, 1, 0]


def test_main_runs_the_model_head_too():
    family = FAMILIES["bert-SequenceClassification"]
    model = family.known()
    bank = ReaderBank(model)
    bank.add("r", Reader(SingleLayer(layer=1, dim=8), TWO))
    counts, _ = runs(model)
    out = bank(**family.inputs(model), main=True)
    assert counts == [1, 1, 1]
    assert out.main.logits.shape == (2, 2)


def test_only_the_stack_that_is_needed_runs():
    family = FAMILIES["bart-Seq2SeqLM"]
    model = family.known()
    bank = ReaderBank(model)
    bank.add("r", Reader(AdaLayers(dim=8), TWO, stack="encoder"))
    calls = []
    model.get_decoder().register_forward_pre_hook(lambda *_: calls.append(1))
    found = len(calls)
    bank(**family.inputs(model))
    assert len(calls) == found
    bank(**family.inputs(model), main=True)
    assert len(calls) == found + 1


def test_names_of_readers_may_come_from_a_generator():
    family = FAMILIES["bart-Seq2SeqLM"]
    bank = ReaderBank(model := family.known())
    for name, stack in (("e", "encoder"), ("d", "decoder")):
        bank.add(name, Reader(AdaLayers(dim=8), TWO, stack=stack))
    out = bank(**family.inputs(model), readers=(name for name in ("d", "e")))  # pyright: ignore[reportArgumentType]
    assert list(out) == ["d", "e"]


def test_no_state_is_referenced_after_it_was_read(bank: ReaderBank, batch: dict[str, torch.Tensor]):
    """Beyond the current layer's, no hidden state outlives its reading, unless there are few tokens."""
    import weakref

    batch = {name: value.repeat(40, 1) for name, value in batch.items()}

    bank.remove("low")
    seen: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def hook(_module: Any, _args: Any, output: Any) -> None:
        state = output[0] if isinstance(output, tuple) else output
        alive.append(sum(ref() is not None for ref in seen))
        seen.append(weakref.ref(state))

    for block in stacks(bank.model)["main"].blocks:
        block.register_forward_hook(hook)
    with torch.no_grad():
        bank(**batch, main=True)
    assert max(alive) <= 1  # the input of the block that runs


# Names


def test_a_bank_is_a_mapping_of_readers(bank: ReaderBank):
    assert list(bank) == ["ada", "low"]
    assert len(bank) == 2
    assert "ada" in bank
    assert "other" not in bank
    assert bank["ada"].layers == (1, 2, 3)
    bank.remove("ada")
    assert list(bank) == ["low"]


@pytest.mark.parametrize("name", ["type", "keys", "training", "forward", "a", "9", "a-b_C", "x" * 100])
def test_allowed_reader_names(bank: ReaderBank, batch: dict[str, torch.Tensor], name: str):
    bank.add(name, Reader(AdaLayers(dim=8), TWO))
    assert bank(**batch)[name].logits.shape == (2, 2)
    assert name in list(bank)
    assert bank.training is bank[name].training is False
    assert any(key.startswith((f"readers.{name}.", f"readers.{name}:.")) for key in bank.state_dict())
    bank.remove(name)
    assert name not in bank


@pytest.mark.parametrize("name", ["", "a b", "a/b", "a.b", "../a", "-a", "_a", "é", "x" * 101, "a\n"])
def test_reader_names_that_are_refused(bank: ReaderBank, name: str):
    with pytest.raises(ConfigError, match=r"(?s)bank\.add: '.*' cannot be a reader's name"):
        bank.add(name, Reader(AdaLayers(dim=8), TWO))
    assert list(bank) == ["ada", "low"]


def test_a_name_that_is_taken_is_refused(bank: ReaderBank):
    kept = bank["ada"]
    with pytest.raises(ConfigError, match=r"bank\.add: there is a reader 'ada' already. Remove it first"):
        bank.add("ada", Reader(AdaLayers(dim=8), TWO))
    assert bank["ada"] is kept


def test_renaming(bank: ReaderBank, batch: dict[str, torch.Tensor]):
    before = bank(**batch)["ada"].logits
    bank.rename("ada", "new")
    assert list(bank) == ["new", "low"]
    assert torch.equal(bank(**batch)["new"].logits, before)
    with pytest.raises(UnknownNameError, match=r"bank\.rename: unknown reader 'ada'; known: new, low"):
        bank.rename("ada", "x")
    with pytest.raises(ConfigError, match=r"bank\.rename: there is a reader 'low' already"):
        bank.rename("new", "low")
    with pytest.raises(ConfigError, match=r"bank\.rename: 'a b' cannot be a reader's name"):
        bank.rename("new", "a b")


def test_readers_of_another_bank_on_the_same_model(bank: ReaderBank, batch: dict[str, torch.Tensor]):
    other = ReaderBank(bank.model)
    for name in ("low", "more", "left"):
        other.add(name, Reader(SingleLayer(layer=2, dim=8), TWO, seed=7))
    before, said = bank(**batch), other.eval()(**batch)
    bank.update(other, "low")
    bank.update(other, ["low", "more"])
    assert list(bank) == ["ada", "low", "more"]
    assert bank["low"] is other["low"]
    found = bank(**batch)
    for name, logits in (("ada", before["ada"].logits), ("low", said["low"].logits), ("more", said["more"].logits)):
        assert torch.allclose(found[name].logits, logits, atol=1e-6)
    assert not torch.allclose(before["low"].logits, found["low"].logits, atol=1e-3)
    with pytest.raises(UnknownNameError, match=r"bank\.update: unknown reader 'x'; known: low, more, left"):
        bank.update(other, ["x"])
    with pytest.raises(ConfigError, match=r"one model. Load it with ReaderBank.from_pretrained\(folder, bank.model\)"):
        bank.update(ReaderBank(FAMILIES["bert"].known()))


def bank_with_cascade(model: Any, seed: int) -> ReaderBank:
    """Return a bank in which 'strong' has a monitor of its own, and a cascade after 'cheap'."""
    bank = ReaderBank(model)
    for name in ("cheap", "strong", "odd"):
        head = TokenClassification(("a", "b"), encoder_layers=0)
        bank.add(name, Reader(SingleLayer(layer=1, dim=8), head, seed=seed))
    cheap, strong = (Monitor(name, "b", LastScore(), threshold=0.5, name=name) for name in ("cheap", "strong"))
    bank.keep_monitor(Cascade(cheap, strong, name="both"))
    bank.keep_monitor(strong)
    return bank


def test_a_replaced_reader_takes_along_the_monitors_that_use_it(model: Any, caplog: pytest.LogCaptureFixture):
    bank, other, same = (bank_with_cascade(model, seed) for seed in (0, 1, 0))
    bank.update(other, ["odd"])
    bank.update(bank)
    bank.update(same, ["cheap"])  # its weights are those that the thresholds were chosen for
    assert set(bank.monitors) == {"both", "strong"}
    bank.update(other, ["cheap"])
    assert set(bank.monitors) == {"strong"}
    problem = "they were calibrated with another first reader than the bank has now"
    hint = "Add both readers from one bank, or calibrate again"
    assert caplog.messages == [f"bank.update: removed the cascades both of reader 'strong': {problem}. {hint}"]
    other.update(bank, ["odd"])
    bank.update(other)
    assert set(bank.monitors) == {"both", "strong"}


def test_a_cascade_needs_the_first_reader_of_the_bank_that_it_comes_from(model: Any):
    bank, other = (bank_with_cascade(model, seed) for seed in (0, 1))
    bank.update(other, ["strong"])
    assert set(bank.monitors) == {"strong"}
    assert set(other.monitors) == {"both", "strong"}  # the other bank still has its own first reader
    assert bank["strong"].head is other["strong"].head
    empty = ReaderBank(model)
    empty.update(other, ["strong"])
    empty.update(other, ["cheap"])  # one after the other
    assert set(empty.monitors) == {"both", "strong"}


@pytest.mark.parametrize("order", [("strong", "cheap"), ("cheap", "strong")])
def test_readers_of_a_cascade_may_come_from_two_loads_of_one_folder(model: Any, order: tuple[str, str]):
    bank = ReaderBank(model)
    for name in order:
        bank.update(bank_with_cascade(model, 0), [name])
    assert set(bank.monitors) == {"both", "strong"}


@pytest.mark.parametrize("how", ["update", "add"])
def test_a_new_reader_does_not_take_the_place_of_a_removed_one_in_a_cascade(model: Any, how: str):
    bank, other = (bank_with_cascade(model, seed) for seed in (0, 1))
    shared = ReaderBank(model)
    shared.update(bank)
    bank.remove("cheap")
    if how == "update":
        bank.update(other, ["cheap"])
    else:
        assert bank.add("cheap", Reader(SingleLayer(layer=1, dim=8), TWO)) is bank["cheap"]
    assert set(bank.monitors) == {"strong"}
    assert set(shared.monitors) == {"both", "strong"}


@pytest.mark.parametrize("training", [True, False])
def test_readers_of_another_bank_take_the_mode_of_this_one(bank: ReaderBank, training: bool):
    other = ReaderBank(bank.model)
    other.add("more", Reader(SingleLayer(layer=2, dim=8), TWO))
    bank.train(training).update(other.train(not training))
    assert {part.training for part in bank["more"].modules()} == {training}


def test_an_unknown_reader_is_an_error_that_lists_the_known_ones(bank: ReaderBank, batch: dict[str, torch.Tensor]):
    unknown = "unknown reader 'aba'; known: ada, low. Did you mean 'ada'?"
    with pytest.raises(UnknownNameError, match=f"bank: {unknown}"):
        bank(**batch, readers=["aba"])
    with pytest.raises(UnknownNameError, match=f"bank: {unknown}"):
        bank(**batch, labels={"aba": torch.tensor([0, 1])})
    with pytest.raises(UnknownNameError, match=rf"bank\.remove: {unknown}"):
        bank.remove("aba")
    with pytest.raises(UnknownNameError, match=rf"bank\.listen: {unknown}"), bank.listen(["aba"]):
        pass
    with pytest.raises(ConfigError, match="bank: readers is 5; it must be a list"):
        bank(**batch, readers=5)
    with pytest.raises(ConfigError, match=r"bank\.update: other is 'low'; it must be a Re"):
        bank.update("low")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"bank\.keep_monitor: monitor is 'low'; it must be a Monitor or a Cascade"):
        bank.keep_monitor("low")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"bank\.watch: every is 'low'; it must be a whole number"):
        bank.watch(every="low")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UnknownNameError, match=r"bank: unknown reader '\['low'\]'"):
        bank(**batch, readers=[["low"]])
    with pytest.raises(ConfigError, match="bank: labels of 'low' are a int; a tensor is needed"):
        bank(**batch, labels={"low": 1})
    assert list(bank(**batch, readers="low")) == ["low"]  # not its letters
    with pytest.raises(UnknownNameError, match=f"bank: {unknown}"):
        bank["aba"]
    with pytest.raises(UnknownNameError, match=f"output: {unknown}"):
        bank(**batch)["aba"]


def test_an_empty_bank_has_nothing_to_run(model: Any, batch: dict[str, torch.Tensor]):
    with pytest.raises(ConfigError, match=r"bank: there is no reader to run. Call bank\.add"):
        ReaderBank(model)(**batch)


def test_a_layer_or_stack_the_model_does_not_have_is_refused(bank: ReaderBank):
    with pytest.raises(LayerIndexError, match=r"reader: layer 4 does not exist; the model has 4 layers.*0\.\.3"):
        bank.add("x", Reader(SingleLayer(layer=4), TWO))
    with pytest.raises(LayerIndexError, match="layer -5 does not exist"):
        bank.add("x", Reader(Mean(layers=[0, -5]), TWO))
    with pytest.raises(UnknownNameError, match=r"'encoder'.*main"):
        bank.add("x", Reader(Mean(), TWO, stack="encoder"))
    with pytest.raises(ConfigError, match="attention_heads is 8 for features of size 12"):
        bank.add("x", Reader(AdaLayers(dim=12), TWO))
    assert list(bank) == ["ada", "low"]


# What comes out


def test_outputs_come_in_the_order_asked_for(bank: ReaderBank, batch: dict[str, torch.Tensor]):
    out = bank(**batch, readers=["low", "ada"])
    assert list(out) == ["low", "ada"]
    assert len(out) == 2
    assert "low" in out
    assert list(bank(**batch)) == ["ada", "low"]


def test_the_loss_is_the_sum_of_the_readers_losses(bank: ReaderBank, batch: dict[str, torch.Tensor]):
    labels = {"ada": torch.tensor([0, 1]), "low": torch.tensor([1, 1])}
    out = bank(**batch, labels=labels)
    for name, target in labels.items():
        expected = torch.nn.functional.cross_entropy(out[name].logits, target)
        torch.testing.assert_close(out[name].loss, expected)
    torch.testing.assert_close(out.loss, out["ada"].loss + out["low"].loss)
    some = bank(**batch, labels={"low": labels["low"]})
    assert some["ada"].loss is None
    assert torch.equal(some.loss, out["low"].loss)
    assert bank(**batch).loss is None


def test_the_penalty_of_a_fusion_is_part_of_the_loss(model: Any, batch: dict[str, torch.Tensor]):
    bank = ReaderBank(model)
    bank.add("r", Reader(AdaLayers(dim=8, entropy=3.0), TWO))
    out = bank.eval()(**batch, labels={"r": torch.tensor([0, 1])})
    plain = torch.nn.functional.cross_entropy(out["r"].logits, torch.tensor([0, 1]))
    assert out["r"].loss is not None
    assert (out["r"].loss - plain).item() == pytest.approx(
        torch.log(torch.tensor(3.0)).item(), abs=1e-5
    )  # 3 * log 3 / 3


def test_gradients_are_kept_while_training_only(bank: ReaderBank, batch: dict[str, torch.Tensor]):
    labels = {"ada": torch.tensor([0, 1])}
    assert not bank.eval()(**batch, labels=labels).loss.requires_grad
    bank.train()
    assert bank(**batch, labels=labels).loss.requires_grad
    with torch.no_grad():
        assert not bank(**batch, labels=labels).loss.requires_grad


def test_a_reader_starts_from_its_seed_alone(model: Any):
    def state(seed: int, outer: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(outer)
        bank = ReaderBank(model)
        bank.add("r", Reader(AdaLayers(dim=8), TWO, seed=seed))
        return bank.state_dict()

    one, same, other = state(1, 5), state(1, 6), state(2, 5)
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert any(not torch.equal(one[key], other[key]) for key in one)


def test_adding_and_running_draws_no_random_number_of_the_callers(model: Any, batch: dict[str, torch.Tensor]):
    before = torch.get_rng_state()
    bank = ReaderBank(model)
    bank.add("r", Reader(AdaLayers(dim=8, dropout=0.5), TokenClassification(("a", "b"), feedforward=8)))
    bank.train()(**batch)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("in_fusion", "in_head"), [(0.5, 0.0), (0.0, 0.5)])
def test_dropout_is_decided_by_seed_and_step(
    model: Any, batch: dict[str, torch.Tensor], in_fusion: float, in_head: float
):
    head = SequenceClassification(("a", "b"), dropout=in_head)

    def passes(seed: int, outer: int) -> list[torch.Tensor]:
        torch.manual_seed(outer)
        bank = ReaderBank(model)
        bank.add("r", Reader(AdaLayers(dim=8, dropout=in_fusion), head, seed=seed))
        bank["r"].load_state_dict(start)
        bank.train()
        return [bank(**batch)["r"].logits for _ in range(3)]

    start = ReaderBank(model).add("r", Reader(AdaLayers(dim=8), head, seed=0)).state_dict()
    one, same, other = passes(0, 5), passes(0, 6), passes(1, 5)
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not torch.equal(one[0], other[0])
    assert not torch.equal(one[0], one[1])


def test_the_two_parts_of_a_reader_draw_different_numbers(model: Any, batch: dict[str, torch.Tensor]):
    bank = ReaderBank(model)
    bank.add("r", Reader(AdaLayers(dim=8, dropout=0.5), TWO))
    bank.train()(**batch)
    seeds = {part.generator.initial_seed() for part in (bank["r"].fusion, bank["r"].head)}
    assert len(seeds) == 2


def test_processes_of_one_run_draw_different_numbers(
    model: Any, batch: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
):
    logits = []
    for process in (0, 1, 0):
        monkeypatch.setattr("lamina.bank.reader.rank", lambda process=process: process)
        bank = ReaderBank(model)
        bank.add("r", Reader(AdaLayers(dim=8, dropout=0.5), TWO))
        logits.append(bank.train()(**batch)["r"].logits)
    assert not torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])


def test_dropout_of_a_reader_does_not_depend_on_who_runs_beside_it(model: Any, batch: dict[str, torch.Tensor]):
    def run(*names: str) -> list[torch.Tensor]:
        bank = ReaderBank(model)
        for name in names:
            bank.add(name, Reader(AdaLayers(dim=8, dropout=0.5), TWO, seed=len(name)))
        bank.train()
        return [bank(**batch)["a"].logits for _ in range(3)]

    for one, other in zip(run("a"), run("bbb", "a", "cc"), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "reader",
    [
        lambda p: Reader(AdaLayers(dim=8, dropout=p), TWO),
        lambda p: Reader(AdaLayers(dim=8), SequenceClassification(("a", "b"), dropout=p)),
        lambda p: Reader(AdaLayers(dim=8), TokenClassification(("a", "b"), feedforward=8, dropout=p)),
    ],
    ids=["fusion", "text head", "token head"],
)
def test_readers_that_differ_in_dropout_alone_keep_their_own(model: Any, batch: dict[str, torch.Tensor], reader: Any):
    def run(**rates: float) -> BankOutput:
        bank = ReaderBank(model)
        for name, rate in rates.items():
            bank.add(name, reader(rate))
        return bank.train()(**batch)

    rates = {"none": 0.0, "half": 0.5}
    beside = run(**rates)
    for name, rate in rates.items():
        torch.testing.assert_close(beside[name].logits, run(**{name: rate})[name].logits, rtol=0, atol=1e-6)


def test_importances_are_by_layer(bank: ReaderBank):
    assert bank["ada"].importance() == pytest.approx({1: 1 / 3, 2: 1 / 3, 3: 1 / 3})
    assert bank["low"].importance() == {}


def test_sizes(bank: ReaderBank):
    assert bank["ada"].size() == 3 * 8 * 32 + 3 + (4 * 8 * 8 + 4 * 8) + (2 * 8 + 2)


def test_the_bank_holds_readers_only(bank: ReaderBank):
    assert all(key.startswith("readers.") for key in bank.state_dict())
    own = {id(parameter) for parameter in bank.parameters()}
    assert not own & {id(parameter) for parameter in bank.model.parameters()}


def test_double_precision_readers_on_a_single_precision_model(bank: ReaderBank, batch: dict[str, torch.Tensor]):
    single = bank(**batch)["ada"].logits
    bank.double()
    assert next(bank.model.parameters()).dtype == torch.float32
    double = bank(**batch)["ada"].logits
    assert double.dtype == torch.float64
    torch.testing.assert_close(double.float(), single, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_model_is_read_in_single_precision(dtype: torch.dtype):
    family = FAMILIES["bert"]
    model = family.known().to(dtype)
    bank = ReaderBank(model)
    for number, fusion in enumerate((AdaLayers(dim=8), Mean(), SingleLayer(dim=8))):
        stir_(bank.add(f"r{number}", Reader(fusion, TWO)), size=0.1)
    out = bank.eval()(**family.inputs(model), main=True)
    assert out.main.last_hidden_state.dtype == dtype
    assert all(out[name].logits.dtype == torch.float32 for name in out)
    assert all(bool(out[name].logits.isfinite().all()) for name in out)


def test_moving_moves_the_model_too(bank: ReaderBank):
    assert bank.to("meta") is bank
    assert bank.device.type == "meta"
    assert next(bank.parameters()).device.type == "meta"


@pytest.mark.parametrize("fusion", [Mean(), AdaLayers(dim=8), SingleLayer(dim=8)])
def test_a_model_without_weights_has_shapes_in_both_modes(fusion: FusionConfig, batch: dict[str, torch.Tensor]):
    known = FAMILIES["bert"].known()
    with torch.device("meta"):
        bank = ReaderBank(type(known)(known.config))
    bank.add("a", Reader(fusion, SequenceClassification(("a", "b"), dropout=0.5)))
    for mode in (True, False):
        logits = bank.train(mode)(input_ids=batch["input_ids"].to("meta"))["a"].logits
        assert (logits.is_meta, logits.shape) == (True, (2, 2))


@pytest.mark.parametrize("order", [torch.channels_last, torch.channels_last_3d])
def test_a_memory_format_is_accepted_as_any_module_does(bank: ReaderBank, order: torch.memory_format):
    shape = (1, 2, 3, 3) if order is torch.channels_last else (1, 2, 3, 3, 3)
    bank["low"].register_buffer("picture", torch.zeros(shape))
    for options in ({}, {"device": "meta"}):
        assert bank.to(**options, memory_format=order)["low"].picture.is_contiguous(memory_format=order)
    assert bank.device.type == "meta"


def test_an_output_is_empty_until_filled():
    out = BankOutput()
    assert len(out) == 0
    with pytest.raises(UnknownNameError, match="output: unknown reader 'x'; known: none"):
        out["x"]


def test_labels_of_a_reader_that_does_not_run_are_refused(bank: ReaderBank, batch: dict[str, torch.Tensor]):
    one, other = list(bank)[:2]
    with pytest.raises(ConfigError, match=f"labels for '{other}', which is not"):
        bank(**batch, readers=[one], labels={other: torch.zeros(2, dtype=torch.long)})


# Copies


@pytest.mark.parametrize("way", [copy.deepcopy, lambda bank: pickle.loads(pickle.dumps(bank))], ids=["copy", "pickle"])
def test_a_copied_bank_reads_its_own_copy_of_the_model(way: Any, bank: ReaderBank, batch: dict[str, torch.Tensor]):
    bank.add("type", Reader(AdaLayers(dim=8), TokenClassification(("a", "b"), feedforward=8)))
    bank.train()(**batch)  # the readers now have generators of their own
    expected = bank.eval()(**batch)
    twin = way(bank)
    assert list(twin) == list(bank)
    assert all(torch.equal(twin(**batch)[name].logits, expected[name].logits) for name in bank)
    assert twin.model is not bank.model
    with torch.no_grad():
        for parameter in twin.model.parameters():
            parameter.zero_()
    with pytest.raises(ConfigError, match="the model has changed"):
        twin(**batch)
    assert torch.equal(bank(**batch)["ada"].logits, expected["ada"].logits)


@pytest.mark.parametrize("way", [copy.deepcopy, lambda bank: pickle.loads(pickle.dumps(bank))], ids=["copy", "pickle"])
def test_a_copied_reader_goes_on_with_the_same_random_numbers(
    way: Any, bank: ReaderBank, batch: dict[str, torch.Tensor]
):
    bank.train()(**batch)
    twin = way(bank)
    assert torch.equal(twin(**batch)["ada"].logits, bank(**batch)["ada"].logits)
    states = torch.randn(3, 2, 7, 32)
    mask = batch["attention_mask"].bool()
    module = way(bank["ada"].eval())
    assert torch.equal(
        module.head(module.fusion(states, mask), mask), bank["ada"].head(bank["ada"].fusion(states, mask), mask)
    )


def test_the_model_of_a_bank_cannot_be_replaced(bank: ReaderBank, batch: dict[str, torch.Tensor]):
    model, before = bank.model, bank(**batch)["ada"].logits
    for other in (FAMILIES["bert"].known(), None, torch.compile(model), 3):
        with pytest.raises(ConfigError, match=r"the bank's Bert.* cannot be replaced\. Make a new bank"):
            bank.model = other
    with pytest.raises(AttributeError, match="model"):
        del bank.model
    bank.model = model
    for twin in (bank, copy.deepcopy(bank), pickle.loads(pickle.dumps(bank))):
        assert [name for name, _ in twin.named_children()] == ["readers"]
        assert torch.equal(twin(**batch)["ada"].logits, before)
    assert bank.model is model


# Who reads a model, and edits under a bank


def test_a_model_is_held_for_as_long_as_a_bank_lives():
    model = FAMILIES["bert-SequenceClassification"].known()
    assert not is_read_by_bank(model)
    first, second = ReaderBank(model), ReaderBank(model.base_model)
    assert is_read_by_bank(model)
    assert is_read_by_bank(model.base_model)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not is_read_by_bank(copied)
    twin = copy.deepcopy(first)
    assert is_read_by_bank(twin.model)
    del second
    assert is_read_by_bank(model.base_model)
    del first
    assert not is_read_by_bank(model)
    assert is_read_by_bank(twin.model)


def test_a_model_is_held_by_a_bank_on_its_backbone():
    model = FAMILIES["bert-SequenceClassification"].known()
    bank = ReaderBank(model.base_model)
    assert is_read_by_bank(model)
    del bank
    assert not is_read_by_bank(model)


def test_a_model_whose_record_of_edits_was_lost_is_refused(model: Any, batch: dict[str, torch.Tensor]):
    freeze_(model)
    bank = ReaderBank(model)
    bank.add("low", Reader(SingleLayer(layer=1, dim=8), TWO))
    setattr(model, EDITS, ())
    with pytest.raises(ConfigError, match=r"no longer those that were found: it was edited \(its record differs\)"):
        bank(**batch)


def without_the_last_block(model: Any) -> None:
    model.encoder.layer = model.encoder.layer[:-1]


def append_a_block(model: Any) -> None:
    model.encoder.layer.append(copy.deepcopy(model.encoder.layer[0]))


def replace_a_block(model: Any) -> None:
    model.encoder.layer[1] = copy.deepcopy(model.encoder.layer[1])


def take_the_encoder_out(model: Any) -> None:
    del model.encoder


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (without_the_last_block, r"'encoder\.layer\.2' is another module"),
        (append_a_block, r"'encoder\.layer' has 4 blocks, not 3"),
        (replace_a_block, r"'encoder\.layer\.1' is another module"),
        (take_the_encoder_out, "there is no 'encoder"),
        (lambda model: truncate_(model, 2), r"it was edited \(truncate\)"),
        (lambda model: reinit_(model, [1]), r"it was edited \(reinit\)"),
        (lambda model: insert_(model, "ffn", layers=[1]), r"it was edited \(insert\)"),
    ],
)
def test_an_edit_under_a_bank_is_an_error_at_the_next_pass(
    edit: Any, message: str, bank: ReaderBank, batch: dict[str, torch.Tensor]
):
    bank(**batch)
    edit(bank.model)
    expected = f"bank: the model's layers are no longer those that were found: {message}.*make a new bank"
    with pytest.raises(ConfigError, match=expected):
        bank(**batch)
    with pytest.raises(ConfigError, match=expected), bank.listen():
        pass
    with pytest.raises(ConfigError, match=expected):
        bank.record_states({"main": [1]}, batch)


@pytest.mark.parametrize("path", ["encoder.layer.0", "encoder"])
def test_a_second_path_of_a_module_is_no_edit(path: str, bank: ReaderBank, batch: dict[str, torch.Tensor]):
    expected = bank.eval()(**batch)
    model: Any = bank.model
    parts = dict(model.named_children())
    for name in parts:
        delattr(model, name)
    model.first = model_part = parts["encoder"].get_submodule(path.removeprefix("encoder").removeprefix("."))
    for name, part in parts.items():
        setattr(model, name, part)
    assert next(name for name, module in model.named_modules() if module is model_part) == "first"
    after = bank(**batch)
    assert all(torch.equal(after[name].logits, expected[name].logits) for name in bank)


def test_inserted_layers_are_folded_in_and_parts_frozen_under_a_bank(model: Any, batch: dict[str, torch.Tensor]):
    insert_(model, "both")
    stir_(model)
    bank = ReaderBank(model, train_base=True)
    bank.add("ada", Reader(AdaLayers(dim=8), TWO))
    bank.eval()
    before = bank(**batch)["ada"].logits
    merge_(model)
    freeze_(model, [1])
    assert torch.allclose(bank(**batch)["ada"].logits, before, atol=1e-5)
    truncate_(model, 2)
    with pytest.raises(ConfigError, match=r"it was edited \(truncate\)"):
        bank(**batch)


def test_an_edit_of_a_part_of_the_model_is_an_error_too():
    family = FAMILIES["bert-SequenceClassification"]
    model = family.known()
    bank = ReaderBank(model)
    bank.add("r", Reader(AdaLayers(dim=8), TWO))
    reinit_(model.base_model, [1])
    with pytest.raises(ConfigError, match="it was edited"):
        bank(**family.inputs(model))


# States that are recorded and read


def test_reading_recorded_states_is_running_the_model(bank: ReaderBank, batch: dict[str, torch.Tensor]):
    labels = {"ada": torch.tensor([0, 1])}
    states = bank.record_states({"main": [1, 2, 3]}, batch)
    counts, _ = runs(bank.model)
    read = bank.read_states(states, batch, labels=labels)
    assert counts == [0, 0, 0]
    expected = bank(**batch, labels=labels)
    assert list(read) == list(expected)
    assert all(torch.equal(read[name].logits, expected[name].logits) for name in bank)
    assert all(torch.equal(read[name].mask, expected[name].mask) for name in bank)
    assert torch.equal(read.loss, expected.loss)
    assert list(bank.read_states(states, batch, readers=["low"])) == ["low"]
    assert list(bank.read_states(states, batch, readers="low")) == ["low"]


def test_recorded_states_are_the_models_own(bank: ReaderBank, batch: dict[str, torch.Tensor]):
    expected = bank.model(**batch, output_hidden_states=True).hidden_states
    counts, _ = runs(bank.model)
    states = bank.record_states({"main": [2, 0]}, batch)["main"]
    assert sorted(states) == [0, 2]
    assert all(torch.equal(state, expected[layer]) for layer, state in states.items())
    assert counts == [1, 1, 0]
    assert not any(state.requires_grad for state in states.values())
    assert [sorted(bank.record_states({"main": chosen}, batch)["main"]) for chosen in (2, "top:2")] == [[2], [2, 3]]
    with pytest.raises(UnknownNameError, match="bank: unknown stack 'encoder'; known: main"):
        bank.record_states({"encoder": [1]}, batch)
    with pytest.raises(LayerIndexError, match=r"bank\.record_states: layer 4 does not exist"):
        bank.record_states({"main": [4]}, batch)


@pytest.mark.parametrize("shape", [(0, 5), (2, 0), (0, 0)])
def test_a_batch_without_rows_or_tokens_is_refused(bank: ReaderBank, shape: tuple[int, int]):
    ids = torch.zeros(shape, dtype=torch.long)
    message = rf"^bank: 'input_ids' has the shape \[{shape[0]}, {shape[1]}\]; a batch has at least one row"
    with pytest.raises(ConfigError, match=message):
        bank(input_ids=ids, attention_mask=ids)
    with pytest.raises(ConfigError, match=message):
        bank(input_ids=ids, attention_mask=ids, main=True)
    with pytest.raises(ConfigError, match=message):
        bank.record_states({"main": [1]}, {"input_ids": ids})


@pytest.mark.parametrize("name", ["vit", "wav2vec2", "whisper", "bart"])
def test_empty_inputs_of_every_kind_are_refused(name: str):
    model = FAMILIES[name].known()
    bank = ReaderBank(model)
    bank.add("r", Reader(Mean(), TWO))
    batch = FAMILIES[name].inputs(model, batch=2, tokens=7)
    with pytest.raises(ConfigError, match=rf"^bank: '{model.main_input_name}' has the shape \[0, "):
        bank(**{key: value[:0] for key, value in batch.items()})


@pytest.mark.parametrize("given", [[], ["attention_mask"], ["input_ids"]])
def test_a_batch_without_an_input_is_refused(given: list[str], bank: ReaderBank):
    batch = dict.fromkeys(given) if "input_ids" in given else dict.fromkeys(given, torch.ones(1, 3))
    named = ", ".join(given) or "no input"
    for run in (bank, lambda **rest: bank(**rest, main=True), lambda **rest: bank.record_states({"main": [1]}, rest)):
        with pytest.raises(ConfigError, match=f"bank: the batch has {named}; the model reads 'input_ids'"):
            run(**batch)


class Hidden(torch.nn.Module):
    """A wrapper whose `forward` does not name what it reads."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config, self.main_input_name = model, model.config, model.main_input_name

    def forward(self, **inputs: Any) -> Any:
        return self.model(**{name.removeprefix("my_"): value for name, value in inputs.items()})


def test_a_wrapper_reads_inputs_of_other_names(model: Any, batch: dict[str, torch.Tensor]):
    bank = ReaderBank(Hidden(model))  # pyright: ignore[reportArgumentType]
    bank.add("r", Reader(Mean(), TWO)).eval()
    mask = batch["attention_mask"]
    got = bank.eval()(my_input_ids=batch["input_ids"], attention_mask=mask)
    assert torch.equal(got["r"].logits, bank(**batch)["r"].logits)


def test_a_model_runs_from_embeddings_or_from_the_outputs_of_its_encoder(bank: ReaderBank):
    assert len(bank(inputs_embeds=torch.zeros(1, 3, bank.stacks["main"].width))) == 2
    model = FAMILIES["bart"].known()
    reads = ReaderBank(model)
    reads.add("a", Reader(Mean(), TWO, stack="decoder"))
    batch = {"encoder_outputs": (torch.zeros(1, 3, model.config.d_model),)}
    assert len(reads(**batch, decoder_input_ids=torch.ones(1, 2, dtype=torch.long))) == 1


class MeanOfFeedForward(Mean):
    site = "ffn"


def test_a_missing_state_is_named(bank: ReaderBank, batch: dict[str, torch.Tensor]):
    states = bank.record_states({"main": [1, 3]}, batch)
    with pytest.raises(ConfigError, match=r"no state of layer 2 of the stack 'main'; .* need the layers 1, 2, 3"):
        bank.read_states(states, batch)
    bank.add("more", Reader(ExtraLayers(), TWO))
    bank.add("inside", Reader(MeanOfFeedForward(), TWO))
    for name in ("more", "inside"):
        with pytest.raises(ConfigError, match=rf"bank\.read_states: reader '{name}' needs more of the model's pass"):
            bank.read_states(states, batch, readers=[name])


def test_a_fusion_inside_the_blocks_listens_and_has_no_amounts_of_layers(bank: ReaderBank, batch: Any, model: Any):
    bank.add("inside", Reader(MeanOfFeedForward(), TWO))
    with bank.listen() as heard:
        model(**batch)
    assert torch.equal(heard["inside"].logits, bank(**batch)["inside"].logits)
    one = {name: value[:1] for name, value in batch.items()}
    bank.add("mean", Reader(Mean(), TWO))
    amounts = layer_amounts(bank, ["inside", "mean"], one)
    assert amounts["inside"] is None
    assert amounts["mean"].shape == (len(bank["mean"].layers), 7)


def test_a_state_inside_a_block_that_was_not_recorded_is_named(bank: ReaderBank, batch: Any):
    bank.add("inside", Reader(MeanOfFeedForward(), TWO))
    (stack_pass,) = bank.passes(bank.select(["inside"], "bank"), grad=False)
    with pytest.raises(ConfigError, match="reads 'ffn' inside the block of layer 0, which was not recorded"):
        stack_pass.on_state(0, torch.zeros(2, 7, 32))


# Labels that are not there


def test_a_loss_without_any_label_is_zero(bank: ReaderBank, batch: dict[str, torch.Tensor]):
    bank.add("words", Reader(Mean(), TokenClassification(("a", "b"), feedforward=8)))
    bank.add("score", Reader(Mean(), SequenceClassification(("s",), problem_type="regression")))
    bank.add("both", Reader(Mean(), SequenceClassification(("a", "b"), problem_type="multi_label")))
    labels = {
        "ada": torch.full((2,), -100),
        "words": torch.full((2, 7), -100),
        "score": torch.full((2,), torch.nan),
        "both": torch.full((2, 2), -1),
    }
    out = bank.train()(**batch, labels=labels)
    out.loss.backward()
    for name in labels:
        assert out[name].loss.item() == 0
        gradients = [parameter.grad for parameter in bank[name].parameters() if parameter.grad is not None]
        assert gradients
        assert not any(gradient.any() for gradient in gradients)


# Modes


@pytest.mark.parametrize("train_base", [False, True])
def test_listening_restores_every_mode(model: Any, batch: dict[str, torch.Tensor], train_base: bool):
    bank = ReaderBank(model, train_base=train_base)
    for name in ("a", "b"):
        bank.add(name, Reader(AdaLayers(dim=8), TWO))
    bank.train()
    bank["b"].eval()
    bank["a"].head.eval()
    model.embeddings.eval()
    modules = {**dict(bank.named_modules(prefix="bank")), **dict(model.named_modules(prefix="model"))}
    before = {path: module.training for path, module in modules.items()}
    with bank.listen() as outputs:
        model(**batch)
        assert not any(module.training for module in modules.values())
    assert {path: module.training for path, module in modules.items()} == before
    assert list(outputs) == ["a", "b"]
    outputs.clear()
    assert len(outputs) == 0


def test_printing_a_bank_shows_the_model_and_the_layers():
    bank = ReaderBank(FAMILIES["bert"].known())
    bank.model.name_or_path = "tiny"
    bank.add("mood", Reader(Mean(layers="1-"), SequenceClassification(("bad", "good"))))
    assert f"{type(bank.model).__name__} 'tiny'" in repr(bank)
    assert "of main, Mean(layers='1-')" in repr(bank["mood"])
