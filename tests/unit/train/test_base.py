"""Training the model along with its readers."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.support.masked import masked_model, masking_tokenizer, running
from tests.support.training import LENGTH, reader, tiny_bank, tiny_model, tiny_tokenizer, yes_no
from transformers import AutoModel

from lamina import LastLayer, MaskedLM, Reader, ReaderBank, SequenceClassification, evaluate, fit
from lamina.errors import BaseMismatchError, ConfigError
from lamina.train.base import Runner
from lamina.train.learner import Learner

if TYPE_CHECKING:
    from pathlib import Path

OPTIONS: dict[str, Any] = {"epochs": 2, "batch_size": 8, "progress": False, "base_learning_rate": 1e-2}
TASK = yes_no(train=16, validation=12)
OTHER = yes_no(train=16, validation=12, seed=5)


def trained_bank(*names: str, model: Any = None) -> ReaderBank:
    bank = ReaderBank(model or tiny_model(), tiny_tokenizer(), train_base=True)
    for name in names:
        bank.add(name, reader())
    return bank


def weights(bank: ReaderBank) -> dict[str, torch.Tensor]:
    return {key: value.clone() for key, value in bank.model.state_dict().items()}


def test_the_model_learns_too_and_follows_the_mode():
    bank, task = trained_bank("r"), TASK
    before = weights(bank)
    assert bank.train().model.training
    assert not bank.eval().model.training
    fit(bank, {"r": task}, **OPTIONS)
    changed = [name for name, value in weights(bank).items() if not torch.equal(value, before[name])]
    assert len(changed) == sum(1 for _ in bank.model.parameters())
    assert "readers" not in dict(bank.model.named_children())


def test_gradients_are_those_of_the_whole_computation():
    bank, model = trained_bank(), tiny_model().eval()
    bank.add("r", Reader(LastLayer(), SequenceClassification(2, pooling="mean", dropout=0.0)))
    bank["r"].train()  # the bank as a whole would put dropout on in the model
    bank.training = True
    head = bank["r"].head.output
    ids = torch.randint(4, 20, (3, 7), generator=torch.Generator().manual_seed(0))
    batch, labels = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, torch.tensor([0, 1, 1])
    bank(**batch, labels={"r": labels}).loss.backward()
    logits = model(**batch).last_hidden_state.mean(1) @ head.weight.detach().T + head.bias.detach()
    torch.nn.functional.cross_entropy(logits, labels).backward()
    for (name, one), other in zip(bank.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_the_rates_are_separate():
    options = {
        **OPTIONS,
        "schedule": "constant",
        "optimizer": "adam",
        "max_grad_norm": 0.0,
        "epochs": 1,
        "batch_size": 64,
    }
    bank, task = trained_bank("r"), yes_no(train=40)
    bank.model.config.hidden_dropout_prob = 0.0
    before, reader_before = weights(bank), bank["r"].fusion.projection.detach().clone()
    fit(bank, {"r": task}, **{**options, "learning_rate": 1e-2, "base_learning_rate": 1e-4})
    moved = max(float((value - before[name]).abs().max()) for name, value in weights(bank).items())
    assert moved == pytest.approx(1e-4, rel=0.02)  # one step of Adam moves by the rate
    assert float((bank["r"].fusion.projection.detach() - reader_before).abs().max()) == pytest.approx(1e-2, rel=0.02)


def test_it_learns_as_a_loop_written_by_hand_does():
    model, by_hand, task = tiny_model(), tiny_model(), yes_no(train=12)
    for module in [*model.modules(), *by_hand.modules()]:
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    bank = trained_bank(model=model)
    bank.add("r", Reader(LastLayer(), SequenceClassification(task.labels, pooling="mean", dropout=0.0)))
    head = copy.deepcopy(bank["r"].head.output)
    rates = {"learning_rate": 1e-3, "base_learning_rate": 1e-3, "max_grad_norm": 0.0, "schedule": "constant"}
    result = fit(bank, {"r": task}, epochs=3, batch_size=64, optimizer="adam", progress=False, **rates)
    rows = task.split("train")
    encoded = tiny_tokenizer()(list(rows.texts), padding=True, return_tensors="pt")
    mask = encoded["attention_mask"].unsqueeze(-1).float()
    optimizer = torch.optim.Adam([*by_hand.parameters(), *head.parameters()], lr=1e-3)
    for _ in range(int(result.best["r"]["epoch"])):  # those weights are in the bank
        states = by_hand(input_ids=encoded["input_ids"], attention_mask=encoded["attention_mask"]).last_hidden_state
        logits = head((states * mask).sum(1) / mask.sum(1))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, torch.tensor(rows.labels)).backward()
        optimizer.step()
    torch.testing.assert_close(head.weight, bank["r"].head.output.weight, rtol=0, atol=1e-4)
    for (name, one), other in zip(model.named_parameters(), by_hand.parameters(), strict=True):
        if "key.bias" not in name:
            torch.testing.assert_close(one, other, rtol=0, atol=1e-4, msg=name)


def test_readers_and_base_end_at_one_best_epoch():
    bank = trained_bank("a", "b")
    result = fit(bank, {"a": TASK, "b": OTHER}, **{**OPTIONS, "epochs": 4, "learning_rate": 1e-2})
    assert result.best["a"]["epoch"] == result.best["b"]["epoch"]
    mean = {}
    for row in result.history:
        mean[row["epoch"]] = mean.get(row["epoch"], 0) + row["accuracy"]
    assert mean[result.best["a"]["epoch"]] == max(mean.values())
    again = evaluate(bank, {"a": TASK})
    assert again["a"]["accuracy"] == pytest.approx(result.best["a"]["accuracy"])


def test_the_mean_of_the_scores_decides_for_readers_and_base(monkeypatch: pytest.MonkeyPatch):
    told, step, factors = iter([(0.9, 0.1), (0.6, 0.6), (0.5, 0.5), (0.5, 0.5)]), Learner.step, {}

    def spied(self: Learner, *args: Any) -> None:
        factors[self.name] = self.factor()
        step(self, *args)

    monkeypatch.setattr(Learner, "step", spied)
    real = Runner.score

    def score(*given: Any, names: set[str] | None = None, collected: Any = None) -> dict[str, dict[str, float]]:
        scores = None if names is None else next(told, None)
        if scores is None:  # after the last epoch
            return real(*given, names=names, collected=collected)
        return {name: {"accuracy": one} for name, one in zip("ab", scores, strict=True)}

    monkeypatch.setattr(Runner, "score", score)
    options = {**OPTIONS, "epochs": 4, "schedule": "plateau", "plateau_patience": 0}
    result = fit(trained_bank("a", "b"), {"a": TASK, "b": TASK}, **options)
    assert [best["epoch"] for best in result.best.values()] == [2, 2]
    assert list(factors.values()) == [0.5] * 3  # in the last epoch


def test_the_best_epoch_of_a_perplexity_is_that_of_the_lowest():
    bank = ReaderBank(masked_model(), masking_tokenizer(), train_base=True)
    bank.add("m", Reader(LastLayer(), MaskedLM()))
    result = fit(bank, {"m": running()}, **{**OPTIONS, "epochs": 3, "base_learning_rate": 1e-3})
    scores = [row["perplexity"] for row in result.history]
    assert scores[0] != min(scores) == result.best["m"]["perplexity"]


def test_they_stop_together():
    bank = trained_bank("a", "b")
    tasks = {"a": TASK, "b": OTHER}
    result = fit(bank, tasks, **{**OPTIONS, "epochs": 9, "early_stopping_patience": 1, "base_learning_rate": 1e-9})
    lasts = [max(row["epoch"] for row in result.history if row["reader"] == name) for name in ("a", "b")]
    assert lasts[0] == lasts[1]
    assert lasts[0] < 9


def test_a_saved_bank_carries_the_changed_base(tmp_path: Path):
    bank, task = trained_bank("r"), TASK
    fit(bank, {"r": task}, output=tmp_path / "out", **OPTIONS)
    ids = torch.randint(4, 20, (3, LENGTH // 2), generator=torch.Generator().manual_seed(0))
    bank.eval()
    with torch.no_grad():
        expected = bank(input_ids=ids)["r"].logits
        back = ReaderBank.from_pretrained(tmp_path / "out")
        assert torch.equal(back(input_ids=ids)["r"].logits, expected)
        assert not back.train_base
        back.save_pretrained(tmp_path / "again")
        assert torch.equal(ReaderBank.from_pretrained(tmp_path / "again")(input_ids=ids)["r"].logits, expected)
        plain = AutoModel.from_pretrained(tmp_path / "out" / "base")
    for name, value in weights(bank).items():
        assert torch.equal(plain.state_dict()[name], value)
    assert "fine-tuned" in (tmp_path / "out" / "README.md").read_text()


def test_the_model_before_training_is_not_its_base(tmp_path: Path):
    bank = trained_bank("r")
    fit(bank, {"r": TASK}, output=tmp_path, **OPTIONS)
    with pytest.raises(BaseMismatchError):
        ReaderBank.from_pretrained(tmp_path, tiny_model())


def test_a_frozen_bank_saved_over_it_leaves_no_base(tmp_path: Path):
    trained_bank("r").save_pretrained(tmp_path)
    assert (tmp_path / "base").is_dir()
    tiny_bank({"r": reader()}).save_pretrained(tmp_path)
    assert not (tmp_path / "base").exists()


def test_a_killed_run_resumes_to_the_same_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    options = {**OPTIONS, "epochs": 2}
    whole = trained_bank("r")
    fit(whole, {"r": TASK}, output=tmp_path / "whole", **options)
    from lamina.train.engine import Engine

    cut, count = trained_bank("r"), 0
    evaluate = Engine.score

    def killed(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == 2:
            raise KeyboardInterrupt
        return evaluate(self, *args, **kwargs)

    monkeypatch.setattr(Engine, "score", killed)
    with pytest.raises(KeyboardInterrupt):
        fit(cut, {"r": TASK}, output=tmp_path / "cut", **options)
    monkeypatch.undo()
    again = trained_bank("r")
    fit(again, {"r": TASK}, output=tmp_path / "cut", resume=True, **options)
    for name, value in weights(again).items():
        torch.testing.assert_close(value, weights(whole)[name], rtol=0, atol=1e-6)


def test_readers_with_other_numbers_of_epochs_are_refused():
    bank = trained_bank("a", "b")
    with pytest.raises(ConfigError, match="all must end together"):
        fit(bank, {"a": TASK, "b": TASK}, **{**OPTIONS, "epochs": {"a": 1, "b": 2}})


def test_a_limit_of_steps_that_some_readers_reach_in_an_earlier_epoch_is_refused():
    bank, larger = trained_bank("a", "b"), yes_no(train=24, validation=12)
    with pytest.raises(ConfigError, match=r"have \[2, 3\] epochs.*Set epochs instead of max_steps"):
        fit(bank, {"a": TASK, "b": larger}, **OPTIONS, max_steps=6)
    fit(bank, {"a": TASK, "b": larger}, **OPTIONS, max_steps=2)


def test_a_trained_reader_is_not_left_behind_while_its_model_is_trained():
    bank = trained_bank("a", "b", "new")
    bank["new"].info["watch"] = True  # of a reader that bank.add(watch=True) made
    fit(bank, {"a": TASK}, **OPTIONS)
    with pytest.raises(ConfigError, match="the trained readers 'a' have no task"):
        fit(bank, {"b": TASK}, **OPTIONS)
    fit(bank, {"a": TASK, "b": TASK}, **OPTIONS)
    fit(bank, {"a": TASK, "b": TASK}, grid={"a": {"seed": [0, 1]}}, **OPTIONS)


def test_a_model_that_cannot_learn_is_refused():
    with pytest.raises(ConfigError, match="every parameter of the model is frozen"):
        ReaderBank(tiny_model().requires_grad_(False), train_base=True)


def test_parameters_that_were_frozen_stay_so():
    model = tiny_model()
    model.embeddings.requires_grad_(False)
    before = model.embeddings.word_embeddings.weight.clone()
    bank = trained_bank("r", model=model)
    fit(bank, {"r": TASK}, **OPTIONS)
    assert torch.equal(model.embeddings.word_embeddings.weight, before)
