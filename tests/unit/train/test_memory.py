"""What training keeps for its gradients is measured: the count is that of a real step, whatever reads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.support.masked import masked_bank, running
from tests.support.portions import one_in
from tests.support.stored import tiny_tokenizer
from tests.support.training import LENGTH, names, tiny_bank, tiny_model, yes_no

from lamina import (
    AdaLayers,
    Concat,
    DWAtt,
    ExtraLayers,
    Head2Toe,
    Reader,
    ReaderBank,
    Routing,
    ScalarMix,
    SequenceClassification,
    SingleLayer,
    TokenClassification,
    fit,
)
from lamina.errors import ConfigError
from lamina.fusion import FUSIONS, ada_layers
from lamina.train import bank_runner as readers_module
from lamina.train.bank_runner import BankRunner
from lamina.train.groups import groups_of
from lamina.train.memory import BatchBytes, peak_bytes, reader_memory, saved_bytes, scoring_memory
from lamina.train.options import FitOptions

LABELS = ("no", "yes")
HEADS: dict[str, Any] = {
    "pooled": SequenceClassification(LABELS, attention_heads=2, attention_dropout=0.2),
    "first": SequenceClassification(LABELS, pooling="first"),
}


def readers_of(bank: ReaderBank) -> dict[str, Any]:
    return {name: (bank.stacks[bank[name].stack], bank[name]) for name in bank}


def really_saved(bank: ReaderBank, batch: dict[str, Any], labels: dict[str, Any]) -> int:
    """What autograd saves in a training pass of the bank itself."""
    own = [*bank.parameters(), *bank.buffers(), *bank.model.parameters()]
    bank.train()
    return saved_bytes(lambda: bank(**batch, labels=labels), own)


@pytest.mark.parametrize(
    ("name", "rows"), one_in(6, [(name, rows) for rows in (2, 7) for name in FUSIONS.names() if name != "extra_layers"])
)
def test_few_rows_tell_what_a_step_keeps(name: str, rows: int):
    fusion = FUSIONS.get(name)()
    of_texts = name in ("pooled_layers", "paired_layers")
    pooling = "first" if of_texts or name == "head2toe" else "pooled"
    bank = ReaderBank(tiny_model(), tiny_tokenizer())
    if of_texts:
        fusion = FUSIONS.get(name)(dim=8, heads=2)
    for reader in ("a", "b"):
        bank.add(reader, Reader(fusion, HEADS[pooling]))
    ids = torch.ones(rows, 24, dtype=torch.long)
    labels = dict.fromkeys(bank, torch.zeros(rows, dtype=torch.long))
    kept = reader_memory(
        bank.model, readers_of(bank), 24, lambda count: dict.fromkeys(bank, torch.zeros(count, dtype=torch.long))
    )
    saved = really_saved(bank, {"input_ids": ids, "attention_mask": ids}, labels)
    again = kept._replace(small_row=0).total(rows)
    assert again == pytest.approx(saved, rel=0.01) or again < saved <= kept.total(rows) < 2 * saved
    assert kept.row > 0


@pytest.mark.parametrize("most", [0, 1 << 22])
def test_features_that_are_kept_are_within_the_estimate(most: int, monkeypatch: pytest.MonkeyPatch):
    """A batch with few features keeps them, and one with more computes them again, which the estimate cannot know."""
    monkeypatch.setattr(ada_layers, "KEPT", most)
    bank = ReaderBank(tiny_model(), tiny_tokenizer())
    for reader in ("a", "b"):
        bank.add(reader, Reader(AdaLayers(), HEADS["first"]))
    needs = reader_memory(bank.model, readers_of(bank), 24)
    assert needs.row > 0
    for rows in (1, 4, 32):
        ids = torch.ones(rows, 24, dtype=torch.long)
        saved = really_saved(bank, {"input_ids": ids, "attention_mask": ids}, {})
        again = needs._replace(small_row=0).total(rows)
        assert 0.95 * again <= saved <= needs.total(rows)
        assert (saved > 1.1 * again) == (most > 0)


def test_ada_layers_keep_the_activated_states_and_share_them():
    """Per token: gelu(z) of each layer, once for all readers; 16 random bits per feature, for each reader."""
    bank, tokens, width, layers = ReaderBank(tiny_model()), 64, 16, 3
    head = SequenceClassification(LABELS, pooling="first", dropout=0.0)
    for count, names_of in ((1, ["a"]), (2, ["b"])):
        for name in names_of:
            bank.add(name, Reader(AdaLayers(dim=8, output_activation=False), head))
        kept = reader_memory(bank.model, readers_of(bank), tokens)
        shared, own = layers * width * 4, layers * 8 * 2
        assert kept.row - tokens * (shared + count * own) <= count * 8 * 4 * tokens  # the head reads the features
        assert kept.row >= tokens * (shared + count * own)


def test_attention_with_dropout_grows_with_the_square_of_the_tokens():
    bank = tiny_bank({"r": Reader(SingleLayer(dim=8), HEADS["pooled"])})
    short, long = (reader_memory(bank.model, readers_of(bank), tokens).row for tokens in (512, 1024))
    assert long > 3 * short


def test_measuring_changes_nothing():
    bank = ReaderBank(tiny_model())
    bank.add("a", Reader(DWAtt(), HEADS["pooled"]))
    bank.train()
    before = {key: value.clone() for key, value in bank.state_dict().items()}
    state, amounts, step = torch.get_rng_state(), bank["a"].fusion.amounts.clone(), bank["a"].step
    reader_memory(bank.model, readers_of(bank), 8)
    scoring_memory(bank.model, readers_of(bank), 8)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(bank["a"].fusion.amounts, amounts)
    assert (bank["a"].step, bank.training, bank["a"].training) == (step, True, True)
    assert all(torch.equal(value, before[key]) for key, value in bank.state_dict().items())
    assert all(parameter.grad is None for parameter in bank.parameters())


def test_without_weights_the_count_is_the_same():
    """On the meta device, as estimates count; weights that are not there are not 0."""
    for fusion in (AdaLayers(dim=8, cutoff=0.1), Concat(), ScalarMix(layer_dropout=0.2), DWAtt()):
        bank = ReaderBank(tiny_model())
        bank.add("a", Reader(fusion, HEADS["pooled"]))
        real = reader_memory(bank.model, readers_of(bank), 16)
        without = reader_memory(bank.model.to("meta"), readers_of(bank.to("meta")), 16)
        assert without.total(100) == pytest.approx(real.total(100), rel=0.005)


def test_blocks_that_need_the_model_s_pass_are_left_out():
    bank = ReaderBank(tiny_model())
    bank.add("a", Reader(ExtraLayers(), HEADS["first"]))
    assert reader_memory(bank.model, readers_of(bank), 16) == BatchBytes(0, 0)


@pytest.mark.parametrize(
    ("rows", "free", "expected"),
    [
        (1200, 1000 + 1200 * 10, 1),
        (1200, 1000 + 600 * 10, 2),
        (1200, 1000 + 55 * 10, 24),
        (7, 1060, 7),
        (7, 1005, None),
    ],
)
def test_which_accumulation_fits(rows: int, free: int, expected: int | None):
    kept = BatchBytes(1000, 10)
    assert kept.accumulation_steps(rows, free) == expected
    if expected is not None:
        assert kept.total(rows // expected) <= free
        assert rows % expected == 0


@pytest.mark.parametrize("free", [0, 999, 1029, 1030, 1239, 1240, 1299, 1300, 5000])
def test_the_most_rows_are_as_many_as_fit(free: int):
    kept = BatchBytes(1000, 10, small_row=20, small_most=200)
    most = kept.max_rows(free)
    assert most == 0 or kept.total(most) <= free
    assert kept.total(most + 1) > free


# Scoring


def test_the_peak_is_of_what_lives_at_once_and_was_made_meanwhile():
    before = torch.zeros(1000)

    def run() -> torch.Tensor:
        view = torch.zeros(100)[:10]  # 400 bytes, for as long as a view of them lives
        view = view + before[:10].mul_(2)  # 40, and then the 400 go
        many = torch.ones(1000) + before  # 4000 twice
        del many
        return view + 1

    assert peak_bytes(run, [before]) == 40 + 8000


@pytest.mark.parametrize("name", one_in(4, [name for name in FUSIONS.names() if name != "extra_layers"]))
@pytest.mark.parametrize(("rows", "tokens"), [(40, 24), (3, 300)])
def test_few_rows_tell_what_scoring_holds(name: str, rows: int, tokens: int):
    fusion = FUSIONS.get(name)(dim=8, heads=2) if name in ("pooled_layers", "paired_layers") else FUSIONS.get(name)()
    pooling = "first" if name in ("pooled_layers", "paired_layers", "head2toe") else "pooled"
    bank = tiny_bank({"a": Reader(fusion, HEADS[pooling]), "b": Reader(fusion, HEADS[pooling])}).eval()
    held = scoring_memory(bank.model, readers_of(bank), tokens)
    states = {"main": {at: torch.zeros(rows, tokens, 16) for at in range(4)}}
    batch = {"input_ids": torch.ones(rows, tokens, dtype=torch.long)}
    with torch.no_grad():
        own = [*bank.parameters(), *bank.buffers(), *bank.model.parameters(), *bank.model.buffers()]
        own += states["main"].values()  # what is there before, as the weights of a mean, is not of the batch
        real = peak_bytes(lambda: bank.read_states(states, batch), own)
    given = rows * tokens * 16 * 4  # one state is the model's own
    assert real <= held.total(rows) <= 1.1 * real + 4 * given


@pytest.mark.full
def test_routing_of_single_tokens_holds_no_more_votes_for_more_rows():
    bank = tiny_bank({"a": Reader(Routing(dim=8, per_token=True), HEADS["pooled"])}).eval()
    short, long = (scoring_memory(bank.model, readers_of(bank), tokens) for tokens in (8, 512))
    assert long.row / short.row == pytest.approx(512 / 8, rel=0.3)


# Before a run


def refused(bank: ReaderBank, tasks: Any, monkeypatch: pytest.MonkeyPatch, free: int, **options: Any) -> str:
    monkeypatch.setattr(readers_module, "free_bytes", lambda device: free)
    with pytest.raises(ConfigError) as info:
        fit(bank, tasks, epochs=1, progress=False, **options)
    return str(info.value)


def test_streaming_readers_that_do_not_fit_are_refused_with_what_would(monkeypatch: pytest.MonkeyPatch):
    task = yes_no(train=64)
    bank = tiny_bank({"mood": Reader(AdaLayers(dim=8), HEADS["pooled"])})
    runner = BankRunner(bank, "fit")
    (group,) = groups_of(runner, {"mood": task}, "train", FitOptions())
    kept, tokens = runner.training_memory(group, FitOptions()), int(max(group.inputs.lengths))
    before = {key: value.clone() for key, value in bank.state_dict().items()}
    message = refused(bank, {"mood": task}, monkeypatch, kept.total(16) + 10, batch_size=64)
    assert f"fit: the gradients of mood keep 0.0 GiB for 64 rows of {tokens} tokens" in message
    assert "Use batch_size=16 with gradient_accumulation_steps=4, which makes the same steps" in message
    assert all(torch.equal(value, before[key]) for key, value in bank.state_dict().items())
    fit(bank, {"mood": task}, epochs=1, progress=False, batch_size=16, gradient_accumulation_steps=4)


def test_steps_that_were_accumulated_already_stay_the_same(monkeypatch: pytest.MonkeyPatch):
    task = yes_no(train=64)
    bank = tiny_bank({"mood": Reader(AdaLayers(dim=8), HEADS["pooled"])})
    runner = BankRunner(bank, "fit")
    (group,) = groups_of(runner, {"mood": task}, "train", FitOptions())
    free = runner.training_memory(group, FitOptions()).total(8)
    message = refused(bank, {"mood": task}, monkeypatch, free, batch_size=32, gradient_accumulation_steps=2)
    assert "Use batch_size=8 with gradient_accumulation_steps=8, which" in message


def test_a_row_that_does_not_fit(monkeypatch: pytest.MonkeyPatch):
    bank = tiny_bank({"mood": Reader(AdaLayers(dim=8), HEADS["pooled"])})
    message = refused(bank, {"mood": yes_no()}, monkeypatch, 1000, batch_size=8)
    assert "Not one row fits. Use a smaller max_length, fewer layers or fewer readers" in message


def test_a_batch_to_score_that_does_not_fit_is_refused_with_what_would(monkeypatch: pytest.MonkeyPatch):
    task = yes_no(train=64, validation=64)
    bank = tiny_bank({"mood": Reader(Head2Toe(), HEADS["first"])})
    runner = BankRunner(bank, "fit")
    (group,) = groups_of(runner, {"mood": task}, "validation", FitOptions())
    held, tokens = runner.scoring_memory(group, FitOptions()), int(max(group.inputs.lengths))
    options = {"batch_size": 2, "eval_batch_size": 64}
    message = refused(bank, {"mood": task}, monkeypatch, held.total(16) + 10, **options)
    assert f"fit: scoring mood takes 0.0 GiB for 64 rows of {tokens} tokens" in message
    assert "Use eval_batch_size=16, or a smaller max_length" in message
    fit(bank, {"mood": task}, epochs=1, progress=False, **options | {"eval_batch_size": 16})
    bank = tiny_bank({"who": Reader(SingleLayer(dim=2), HEADS["first"])})
    monkeypatch.setattr(BankRunner, "training_memory", lambda *_: BatchBytes(0, 0))
    assert "Not one row fits. Use a smaller max_length" in refused(bank, {"who": task}, monkeypatch, 10)


def test_rows_of_tags_and_of_hidden_tokens_are_measured(monkeypatch: pytest.MonkeyPatch):
    task = names(train=20)
    bank = tiny_bank({"who": Reader(Concat(), TokenClassification(task.labels, attention_heads=2))})
    assert "gradients of who keep" in refused(bank, {"who": task}, monkeypatch, 1000)
    assert f"gradients of m keep 0.0 GiB for 1 rows of {LENGTH} tokens" in refused(
        masked_bank("m"), {"m": running()}, monkeypatch, 1000, batch_size=1
    )


def test_states_that_are_held_count_where_nothing_of_them_is_saved():
    """Head2Toe has no parameters, so autograd saves none of the states that it waits for."""
    task = yes_no(train=8)
    bank = tiny_bank({"toe": Reader(Head2Toe(), HEADS["first"])})
    runner = BankRunner(bank, "fit")
    (group,) = groups_of(runner, {"toe": task}, "train", FitOptions())
    kept, tokens = runner.training_memory(group, FitOptions()), int(max(group.inputs.lengths))
    assert kept.row >= tokens * 4 * 16 * 4  # four states of width 16 in single precision
