"""NaN and infinity: training stops and names the step and the learner; nothing of it is kept, loaded or shown."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.finetuned import bert, masking_tokenizer, running_text, tune
from tests.support.training import names, reader, tiny_bank, tiny_model, tiny_tokenizer, train, weights, yes_no

from lamina.bank import ReaderBank
from lamina.errors import NotFiniteError, StoreError
from lamina.prediction import evaluate, predict, predict_file
from lamina.store import load, save
from lamina.tasks.class_results import ClassResults
from lamina.train.bank_runner import BankRunner
from lamina.train.engine import Engine
from lamina.train.learner import Learner

BAD = pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
TASK = yes_no(train=20, validation=8)


def spoil(module: torch.nn.Module, bad: float = math.nan, name: str | None = None) -> str:
    """Put a bad number into a weight of two axes, and give its name."""
    named = dict(module.named_parameters())
    name = name or next(key for key, weight in named.items() if weight.ndim > 1)
    with torch.no_grad():
        named[name].view(-1)[-1] = bad
    return name


def two_readers(**options: Any) -> ReaderBank:
    return tiny_bank({"one": reader(TASK), "two": reader(TASK, seed=1)}, **options)


# Training


@pytest.fixture
def bad_loss(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the loss of the second reader bad at one call of the model."""

    def at(call: int, bad: float = math.nan) -> None:
        real, calls = BankRunner.losses, []

        def losses(*args: Any) -> list[torch.Tensor]:
            calls.append(1)
            given = real(*args)
            return [*given[:-1], given[-1] * bad] if len(calls) == call else given

        monkeypatch.setattr(BankRunner, "losses", losses)

    return at


@pytest.mark.parametrize(("step", "bad"), [(1, math.nan), (4, math.inf), (7, -math.inf)])
def test_a_bad_loss_names_the_step_and_the_reader(step: int, bad: float, bad_loss: Any, tmp_path: Path):
    bank = two_readers()
    bad_loss(step, bad)
    message = rf"fit: the loss or the gradient of reader 'two' is NaN or infinite at step {step}; training stops\. "
    with pytest.raises(NotFiniteError, match=message) as error:
        train(bank, {"one": TASK, "two": TASK}, epochs=2, output=tmp_path / "out")
    assert (error.value.name, error.value.step) == ("two", step)
    assert all(bool(weight.isfinite().all()) for weight in weights(bank).values())  # the step was not taken
    assert {path.name for path in tmp_path.glob("out/*")} == ({"checkpoints"} if step > 5 else set())
    for path in tmp_path.rglob("*.safetensors"):
        assert all(bool(tensor.isfinite().all()) for tensor in load_file(path).values())


def test_the_step_is_right_where_batches_are_accumulated(bad_loss: Any):
    bad_loss(6)  # the second part of the third step
    with pytest.raises(NotFiniteError, match="reader 'two' is NaN or infinite at step 3;"):
        train(two_readers(), {"one": TASK, "two": TASK}, batch_size=2, gradient_accumulation_steps=2)


@pytest.mark.parametrize("limit", [1.0, 0.0])
def test_what_is_looked_at_later_has_the_step_that_it_was(limit: float, bad_loss: Any, monkeypatch: pytest.MonkeyPatch):
    """As on a GPU, where nobody waits for the numbers of a step."""
    from lamina.train import engine as divergence

    bad_loss(2)
    real = divergence.DivergenceGuard.check
    monkeypatch.setattr(divergence.DivergenceGuard, "check", lambda _: None)
    plain = divergence.DivergenceGuard.check_weights

    def last(guard: Any, *args: Any) -> None:
        monkeypatch.setattr(divergence.DivergenceGuard, "check", real)
        plain(guard, *args)

    monkeypatch.setattr(divergence.DivergenceGuard, "check_weights", last)
    with pytest.raises(NotFiniteError, match="the gradient of reader 'two' is NaN or infinite at step 2;"):
        train(two_readers(), {"one": TASK, "two": TASK}, max_grad_norm=limit)


def test_a_rate_that_is_too_high_stops_a_model(tmp_path: Path):
    options: dict[str, Any] = {"learning_rate": 1e30, "optimizer": "sgd", "epochs": 5, "max_grad_norm": 0.0}
    with pytest.raises(
        NotFiniteError, match=r"finetune: the (loss|weight) .* the model is NaN or infinite at (or|step)"
    ):
        tune(bert(), TASK, tmp_path / "out", **options)
    assert not list(tmp_path.rglob("*.parquet"))
    assert not list(tmp_path.rglob("model.safetensors"))


def test_a_base_that_is_trained_along_is_named(monkeypatch: pytest.MonkeyPatch):
    bank = ReaderBank(tiny_model(), tiny_tokenizer(), train_base=True)
    bank.add("one", reader(TASK))
    weight = bank.model.get_parameter("encoder.layer.2.output.dense.weight")
    weight.register_hook(lambda gradient: gradient * math.inf)
    with pytest.raises(NotFiniteError, match="fit: the loss or the gradient of the base is NaN or infinite at step 1;"):
        train(bank, {"one": TASK})


@pytest.mark.parametrize("save_steps", [None, 2])
def test_a_bad_weight_is_found_before_it_is_kept(
    save_steps: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Whatever put it there; no gradient norm is taken, and no loss sees it."""
    real, steps = Learner.step, []

    def step(self: Learner, *args: Any) -> None:
        steps.append(1)
        real(self, *args)
        if len(steps) == 3:
            self.parameters[-1].data.view(-1)[0] = math.nan

    monkeypatch.setattr(Learner, "step", step)
    bank = tiny_bank({"one": reader(TASK)})
    at = 5 if save_steps is None else 4
    monkeypatch.setattr(BankRunner, "losses", lambda self, *_: [sum(w.nansum() for w in self.bank.parameters())])
    message = rf"fit: the weight '.*' of reader 'one' is NaN or infinite at or before step {at};"
    with pytest.raises(NotFiniteError, match=message):
        train(bank, {"one": TASK}, epochs=2, output=tmp_path, save_steps=save_steps, max_grad_norm=0.0)
    for path in tmp_path.rglob("*.safetensors"):
        assert all(bool(tensor.isfinite().all()) for tensor in load_file(path).values())


def test_a_score_of_numbers_that_are_none_is_an_error(monkeypatch: pytest.MonkeyPatch):
    """NaN has a largest entry too, so that an accuracy would come out."""
    monkeypatch.setattr(Engine, "step", lambda *_: None)
    real = BankRunner.outputs
    monkeypatch.setattr(BankRunner, "outputs", lambda *args: {k: v * math.nan for k, v in real(*args).items()})
    message = r"fit: reader 'one' gives NaN or infinity for row 0 of the validation part, counted from 0;"
    with pytest.raises(NotFiniteError, match=message):
        train(tiny_bank({"one": reader(TASK)}), {"one": TASK})


def test_a_score_that_is_none_is_an_error(monkeypatch: pytest.MonkeyPatch):
    """As a kind of somebody else's may give it."""
    monkeypatch.setattr(ClassResults, "scores", lambda _, metrics: dict.fromkeys(metrics, math.nan))
    with pytest.raises(
        NotFiniteError, match=r"evaluate: the accuracy of reader 'one' is nan; a score is a finite number"
    ):
        evaluate(tiny_bank({"one": reader(TASK)}), {"one": TASK})


def test_steps_that_a_scaler_skips_are_no_divergence(monkeypatch: pytest.MonkeyPatch):
    """In float16 gradients become infinite until the scale fits."""
    from lamina.train import engine

    scaler = torch.amp.GradScaler
    monkeypatch.setattr(engine.torch.amp, "GradScaler", lambda device, **_: scaler(device, init_scale=2.0**127))
    bank = tiny_bank({"one": reader(TASK)})
    before = weights(bank)
    result = train(bank, {"one": TASK}, epochs=4, max_grad_norm=1.0)
    assert result.steps == 20
    assert any(not torch.equal(before[key], value) for key, value in weights(bank).items())


# Saving and loading


@BAD
@pytest.mark.parametrize("which", ["reader", "base"])
def test_a_bank_with_a_bad_weight_is_not_saved(which: str, bad: float, tmp_path: Path):
    bank = ReaderBank(tiny_model(), tiny_tokenizer(), train_base=True)
    bank.add("one", reader(TASK))
    bank.save_pretrained(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    weight = spoil(bank["one"] if which == "reader" else bank.model, bad)
    what = "reader 'one'" if which == "reader" else "the model"
    with pytest.raises(NotFiniteError, match=f"save: {what} holds NaN or infinity in '{weight}'; such weights are not"):
        bank.save_pretrained(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@BAD
def test_a_model_with_a_bad_weight_is_not_saved(bad: float, tmp_path: Path):
    model = bert()
    weight = spoil(model, bad)
    with pytest.raises(NotFiniteError, match=f"save: the model holds NaN or infinity in '{weight}'"):
        save(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@BAD
def test_a_bank_with_a_bad_weight_is_not_loaded(bad: float, tmp_path: Path):
    two_readers().save_pretrained(tmp_path)
    path = tmp_path / "readers" / "two" / "model.safetensors"
    tensors = load_file(path)
    tensors["fusion.projection"].view(-1)[3] = bad
    save_file(tensors, path)
    with pytest.raises(StoreError, match=rf"load: {path} holds NaN or infinity in 'fusion.projection'"):
        ReaderBank.from_pretrained(tmp_path, model=tiny_model())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_base_with_a_bad_weight_is_not_loaded(dtype: torch.dtype, tmp_path: Path):
    model: Any = tiny_model()
    model.to(dtype)
    model.save_pretrained(tmp_path)
    load(tmp_path)
    weight = spoil(model)
    model.save_pretrained(tmp_path)
    with pytest.raises(StoreError, match=f"load: the weights of {tmp_path} hold NaN or infinity in '{weight}'"):
        load(tmp_path)
    with pytest.raises(NotFiniteError, match=f"bank: the model's weight '{weight}' holds NaN or infinity"):
        ReaderBank(model)


def test_a_buffer_of_infinities_is_no_bad_weight(tmp_path: Path):
    """As masks are in many models."""
    model: Any = tiny_model()
    model.encoder.register_buffer("causal", torch.full((4, 4), -math.inf).triu(1), persistent=False)
    bank = ReaderBank(model, tiny_tokenizer())
    bank.add("one", reader(TASK))
    bank.save_pretrained(tmp_path / "bank")
    save(model, tmp_path / "model")


def test_a_model_without_weights_passes():
    with torch.device("meta"):
        ReaderBank(tiny_model())


# Answers

TEXTS = ["the film is good", "anna was in rome", "a slow film"]


def gives_nan(monkeypatch: pytest.MonkeyPatch, row: int, bad: float = math.nan) -> None:
    """Let readers give a bad number for one text, which begins with another word than the others."""
    real = BankRunner.outputs

    def outputs(self: BankRunner, batch: dict[str, torch.Tensor], *args: Any) -> dict[str, Any]:
        marked = batch["input_ids"][:, 1] == tiny_tokenizer().convert_tokens_to_ids(TEXTS[row].split()[0])
        given = {name: logits.clone() for name, logits in real(self, batch, *args).items()}
        for logits in given.values():
            logits[marked, ..., -1] = bad
        return given

    monkeypatch.setattr(BankRunner, "outputs", outputs)


@pytest.mark.parametrize("task", [TASK, names()], ids=lambda task: task.kind)
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_an_answer_that_is_no_number_names_the_reader_and_the_row(
    bad: float, task: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    bank = tiny_bank({"one": reader(task)})
    gives_nan(monkeypatch, 1, bad)
    with pytest.raises(
        NotFiniteError, match="predict: reader 'one' gives NaN or infinity for example 1, counted"
    ) as error:
        predict(bank, TEXTS)
    assert (error.value.name, error.value.row) == ("one", 1)
    (tmp_path / "in.txt").write_text("\n".join([TEXTS[0], TEXTS[2], TEXTS[0], TEXTS[1], TEXTS[0]]))
    with pytest.raises(NotFiniteError, match=r"predict: .*in\.txt row 4: .*reader 'one' gives NaN") as error:
        predict_file(bank, tmp_path / "in.txt", tmp_path / "out.jsonl", chunk_rows=2, progress=False)
    assert error.value.row == 4
    assert not (tmp_path / "out.jsonl").exists()


def test_a_class_that_cannot_be_is_an_answer(monkeypatch: pytest.MonkeyPatch):
    gives_nan(monkeypatch, 1, -math.inf)
    answers = predict(tiny_bank({"one": reader(TASK)}), TEXTS)
    assert answers[1]["one"]["probabilities"] == {"no": 1.0, "yes": 0.0}
    assert "nan" not in json.dumps(answers).lower()


@pytest.mark.parametrize("kind", ["sequence_classification", "masked_lm"])
def test_a_whole_model_with_a_bad_weight_gives_no_answer(kind: str):
    tokenizer = masking_tokenizer()
    auto = "AutoModelForMaskedLM" if kind == "masked_lm" else "AutoModelForSequenceClassification"
    model, text = bert(auto), "the [UNK] is good"
    spoil(model, name="bert.encoder.layer.1.output.dense.weight")
    with pytest.raises(NotFiniteError, match="predict: the model gives NaN or infinity for example 0"):
        predict(model, [text], kind=kind, processor=tokenizer)
    task = running_text(train=4, validation=4) if kind == "masked_lm" else TASK
    with pytest.raises(
        NotFiniteError, match="evaluate: the model gives NaN or infinity for row 0 of the validation part"
    ):
        evaluate(model, {"it": task}, processor=tokenizer)
