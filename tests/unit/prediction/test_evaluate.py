"""Scores of whole models, and of every reader of a bank on one file."""

from __future__ import annotations

import copy
import json
import math
import random
import weakref
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.finetuned import (
    bert,
    copies,
    image_processor,
    masking_tokenizer,
    running_text,
    shades,
    t5,
    t5_tokenizer,
    tensors,
    vit,
)
from tests.support.portions import one_in
from tests.support.training import (
    LENGTH,
    length_of_text,
    names,
    reader,
    same,
    several,
    tiny_bank,
    tiny_tokenizer,
    train,
    yes_no,
)

from lamina import evaluate, fit, predict
from lamina.bank import Reader, ReaderBank
from lamina.errors import ConfigError, DataError, MissingExtraError, UnknownNameError
from lamina.fusion.mean import Mean
from lamina.heads.masked_lm import MaskedLM
from lamina.heads.sequence_classification import SequenceClassification
from lamina.heads.token_classification import TokenClassification
from lamina.layers.preserve import eval_mode
from lamina.store import save_bank
from lamina.tasks.base import EncodeOptions
from lamina.tasks.split import Split
from lamina.tasks.task import Task
from lamina.train.bank_runner import BankRunner
from lamina.train.groups import group_tasks

TOKEN = "AutoModelForTokenClassification"


def scored(model: Any, task: Any, processor: Any = None, part: str = "validation", **given: Any) -> dict[str, Any]:
    return evaluate(model, {"it": task}, split=part, processor=processor or tiny_tokenizer(), **given)["it"]


@pytest.mark.parametrize(
    ("build", "make", "options"),
    one_in(
        3,
        [
            (bert, yes_no, {}),
            (lambda: bert(labels=1), length_of_text, {}),
            (lambda: bert(labels=3), several, {}),
            (lambda: bert(TOKEN, 5), names, {}),
            (lambda: bert(TOKEN, 5), lambda: names(validation=5, low=60, high=90), {}),
            (lambda: bert("AutoModelForMaskedLM"), running_text, {"processor": masking_tokenizer()}),
            (t5, copies, {"processor": t5_tokenizer(), "max_target_length": 6}),
            (vit, shades, {"processor": image_processor()}),
        ],
    ),
)
def test_scores_do_not_depend_on_the_batches(build: Any, make: Any, options: dict[str, Any]):
    task, model = make(), build()
    before = tensors(model)
    one, many = scored(model, task, batch_size=1, **options), scored(model, task, batch_size=64, **options)
    assert one == pytest.approx(many, abs=1e-5)
    assert one.keys() == set(task.metrics)
    assert same(tensors(model), before)


def test_scores_are_those_of_the_model_s_own_answers():
    task, model = yes_no(), bert()
    split, right = task.split("validation"), 0
    for text, label in zip(split.texts, split.labels, strict=True):
        right += int(model(**tiny_tokenizer()([text], return_tensors="pt")).logits.argmax()) == label
    assert scored(model, task)["accuracy"] == pytest.approx(right / len(split))


def test_a_head_without_class_names_is_scored_in_the_order_of_the_labels(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    task, model = yes_no(), bert()
    before = model.config.to_dict()
    accuracy = scored(model, task)["accuracy"]
    (record,) = caplog.records
    assert record.getMessage().startswith("evaluate: the classes of the head have no names")
    assert "in the order of the task's labels: LABEL_0 as 'no', LABEL_1 as 'yes'. If" in record.getMessage()
    assert model.config.to_dict() == before
    caplog.clear()
    splits = {name: Split.of(part.texts, [1 - int(y) for y in part.labels]) for name, part in task.splits.items()}
    numbered = replace(task, labels=("0", "1"))
    swapped = replace(task, labels=("yes", "no"), splits=splits)
    assert scored(model, numbered)["accuracy"] == accuracy
    assert not caplog.records
    assert scored(model, swapped)["accuracy"] == pytest.approx(1 - accuracy)
    assert "LABEL_0 as 'yes', LABEL_1 as 'no'" in caplog.text
    model.config.id2label = {0: "no", 1: "yes"}
    caplog.clear()
    assert scored(model, task)["accuracy"] == accuracy
    assert not caplog.records
    with pytest.raises(ConfigError, match=r"evaluate: the classes .* a label 0 in the data means the first of them"):
        scored(model, numbered)
    assert scored(bert(labels=1), length_of_text())
    path = tmp_path / "rows.csv"
    path.write_text("sentence,label\n" + "good film,1\nbad,0\n" * 3)
    assert evaluate(bert(), path, processor=tiny_tokenizer())
    assert not caplog.records


@pytest.mark.parametrize("classes", [3, 4])
def test_a_kind_may_have_other_labels_than_the_head(
    classes: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    task = yes_no()
    for name in ("configure", "output_problem"):
        monkeypatch.setattr(type(task.kind), name, lambda *_: None)
    monkeypatch.setattr(type(task.kind), "outputs", lambda _, model, batch, *__: model(**batch).logits[:, :2])
    assert 0 <= scored(bert(labels=classes), task)["accuracy"] <= 1
    assert not caplog.records


@pytest.mark.parametrize("models", [False, True])
def test_the_rows_of_several_tasks_are_not_in_memory_at_once(models: bool, monkeypatch: pytest.MonkeyPatch):
    tasks = {name: yes_no(seed=seed) for seed, name in enumerate("abcde")}
    target = bert() if models else tiny_bank({name: reader(task) for name, task in tasks.items()})
    alone = {name: evaluate(target, {name: task}, processor=tiny_tokenizer())[name] for name, task in tasks.items()}
    made, alive, kind = list[weakref.ref[Any]](), list[int](), type(tasks["a"].kind)

    def encode(*given: Any, encode: Any = kind.encode) -> Any:
        inputs = encode(*given)
        made.append(weakref.ref(inputs))
        alive.append(sum(ref() is not None for ref in made))
        return inputs

    monkeypatch.setattr(kind, "encode", encode)
    assert evaluate(target, tasks, processor=tiny_tokenizer()) == alone
    assert len(made) == 5  # few rows are encoded once
    made.clear()
    alive.clear()
    monkeypatch.setattr(import_module("lamina.prediction.evaluate"), "_KEPT_TOKENS", 0)
    assert evaluate(target, tasks, processor=tiny_tokenizer()) == alone
    assert max(alive) <= 2
    assert len(made) == 10


def test_perplexity_is_that_of_the_hidden_tokens():
    task, model, tokenizer = running_text(), bert("AutoModelForMaskedLM"), masking_tokenizer()
    (group,) = group_tasks({"it": task}, EncodeOptions(part="validation", max_length=LENGTH), tokenizer)
    inputs = group.inputs
    batch = inputs.batch(range(len(inputs.lengths)))
    with torch.no_grad():
        expected = math.exp(float(model(**batch).loss))
    assert scored(model, task, tokenizer)["perplexity"] == pytest.approx(expected, rel=1e-4)


def test_the_words_that_an_engine_predicts_are_scored(monkeypatch: pytest.MonkeyPatch):
    class Doubled:
        def run(self, bank: ReaderBank, batch: Any, names: Any) -> dict[str, torch.Tensor]:
            return {name: 2 * bank(**batch, readers=names)[name].logits for name in names}

    bank, tasks = ReaderBank(bert("AutoModelForMaskedLM"), masking_tokenizer()), {"words": running_text()}
    bank.add("words", Reader(Mean(), MaskedLM()))
    plain = bank["words"].head.forward
    with pytest.MonkeyPatch.context() as patch:  # what PyTorch scores if its own logits are twice as large
        patch.setattr(bank["words"].head, "forward", lambda *args, **given: 2 * plain(*args, **given))
        expected = evaluate(bank, tasks)["words"]
    own = evaluate(bank, tasks)["words"]
    monkeypatch.setattr(import_module("lamina.prediction.evaluate"), "engine_of", lambda *_: Doubled())
    found = evaluate(bank, tasks)["words"]
    assert found == pytest.approx(expected, rel=1e-5)
    assert found["perplexity"] != pytest.approx(own["perplexity"], rel=1e-3)


def test_a_large_vocabulary_is_scored_in_small_batches(monkeypatch: pytest.MonkeyPatch):
    task, model, tokenizer = running_text(), bert("AutoModelForMaskedLM"), masking_tokenizer()
    plain = scored(model, task, tokenizer)
    sizes: list[int] = []
    model.register_forward_pre_hook(lambda _m, _a, given: sizes.append(len(given["input_ids"])), with_kwargs=True)
    monkeypatch.setattr("lamina.tasks.language_modeling._MOST_SCORES", 2 * 32 * model.config.vocab_size)
    assert scored(model, task, tokenizer) == pytest.approx(plain)
    assert max(sizes[1:]) == 2


def test_how_texts_are_written(monkeypatch: pytest.MonkeyPatch):
    task, model, asked = copies(), t5(), []
    plain = model.generate
    monkeypatch.setattr(model, "generate", lambda **given: asked.append(given) or plain(**given))
    scored(model, task, t5_tokenizer(), num_beams=3, length_penalty=0.5, max_target_length=4)
    scored(model, task, t5_tokenizer(), max_target_length=4)
    with pytest.raises(ConfigError, match="and has no effect without num_beams"):
        scored(model, task, t5_tokenizer(), length_penalty=0.5)
    beams, greedy = asked[0], asked[-1]
    assert (beams["num_beams"], beams["length_penalty"], beams["max_new_tokens"]) == (3, 0.5, 4)
    assert beams["do_sample"] is greedy["do_sample"] is False
    assert "length_penalty" not in greedy
    assert "labels" not in beams


def test_texts_come_back_in_the_order_of_the_rows(monkeypatch: pytest.MonkeyPatch):
    """Batches are sorted by length, and the model that repeats what it reads is always right."""
    task, model = copies("translation"), t5()
    texts = tuple(" ".join(["good", "bad", "slow", "fun", "film"][row:] * 2) for row in (3, 0, 4, 1, 2))
    task = replace(task, splits={"validation": Split.of(texts, texts)})
    monkeypatch.setattr(model, "generate", lambda **given: given["input_ids"])
    assert scored(model, task, t5_tokenizer(), batch_size=2)["bleu"] == pytest.approx(100.0)


def test_eval_mode_leaves_the_modes():
    model = bert()
    model.train()
    model.bert.eval()
    modes = [one.training for one in model.modules()]
    with eval_mode(model):
        assert not any(one.training for one in model.modules())
        assert not torch.is_grad_enabled()
    assert [one.training for one in model.modules()] == modes


# Tables per class, and wrong answers


def right(row: dict[str, Any], task: Any, split: Any) -> bool:
    """Whether a row of wrong answers is of the text that it names."""
    return split.texts[row["row"]] == row["text"] and task.labels[split.labels[row["row"]]] == row["true"]


def test_wrong_answers_of_a_model_are_those_of_its_predictions():
    task, model = yes_no(validation=40), bert()
    split, scores = task.split("validation"), scored(model, task, errors=5, per_class=True)
    answers = predict(model, split.texts, processor=tiny_tokenizer())
    said = [answer["sequence_classification"] for answer in answers]
    wrong = [(a["score"], -row) for row, a in enumerate(said) if a["label"] != f"LABEL_{split.labels[row]}"]
    assert len(wrong) > 5
    assert len(scores["errors"]) == 5
    for row, (score, number) in zip(scores["errors"], sorted(wrong, reverse=True), strict=False):
        assert (row["row"], row["confidence"]) == (-number, pytest.approx(score, abs=1e-5))
        assert right(row, task, split)
    assert scores["per_class"][-3]["count"] == 40
    everything = scored(model, task, errors=100)["errors"]
    assert len(everything) == len(wrong)
    assert everything[:5] == scores["errors"]


def test_readers_share_the_pass_that_shows_their_wrong_answers():
    tasks = {"a": yes_no(), "b": names(), "c": several(), "d": length_of_text()}
    bank = tiny_bank({name: reader(task) for name, task in tasks.items()})
    passes: list[int] = []
    bank.model.register_forward_pre_hook(lambda _m, _a, given: passes.append(1), with_kwargs=True)
    plain = evaluate(bank, tasks)
    count = len(passes)
    found = evaluate(bank, tasks, errors=3, per_class=True)
    assert len(passes) == 2 * count
    for name, scores in found.items():
        assert {key: value for key, value in scores.items() if key not in ("errors", "per_class")} == plain[name]
        assert 0 < len(scores["errors"]) <= 3
    assert found["d"]["per_class"] == []
    sizes = [abs(row["error"]) for row in found["d"]["errors"]]
    assert sizes == sorted(sizes, reverse=True)
    for row in found["b"]["errors"]:
        assert all(row["text"][span["start"] : span["end"]] == span["text"] for span in row["true"])
    json.dumps(found)


def test_images_are_shown_by_name():
    task = shades()
    rows = scored(vit(), task, image_processor(), errors=2)["errors"]
    named = [image.name for image in task.split("validation").texts]
    assert rows
    assert all(named[row["row"]] == row["text"] for row in rows)


def test_wrong_answers_where_there_are_none():
    with pytest.raises(ConfigError, match="evaluate: errors is 2 for a task of kind masked_lm, whose answers are not"):
        scored(bert("AutoModelForMaskedLM"), running_text(), masking_tokenizer(), errors=2)
    with pytest.raises(ConfigError, match="evaluate: errors is -1; it must be at least 0"):
        scored(bert(), yes_no(), errors=-1)


@pytest.mark.parametrize("tasks", ["glue/cola", None, [1], {"mood": "glue/cola"}])
@pytest.mark.parametrize("ask", [fit, evaluate])
def test_what_is_no_task(ask: Any, tasks: Any):
    with pytest.raises(
        ConfigError,
        match=r"tasks (are .*; a lamina.Task, or a mapping of names to tasks|is .*; it must be a dict or a Task)",
    ):
        ask(tiny_bank({"mood": reader()}), tasks)


def test_a_head_for_another_kind_answers_nothing():
    model = bert()
    with pytest.raises(ConfigError, match=r"its head is for no task of kind 'token_classification'"):
        predict(model, ["anna is good"], kind="token_classification", processor=tiny_tokenizer())


def test_images_that_are_scored_are_not_augmented():
    task = shades(validation=30)
    task = replace(task, splits={part: task.split("train") for part in ("train", "validation")})
    model, given = vit(size=32), {"processor": image_processor(32)}
    assert scored(model, task, part="train", **given) == scored(model, task, part="validation", **given)


def test_scores_do_not_depend_on_what_else_is_scored():
    long = {part: split.texts for part, split in names(low=20, high=30).splits.items()}
    splits = {part: Split.of(texts, [row % 2 for row in range(len(texts))]) for part, texts in long.items()}
    mood = replace(yes_no(), splits=splits)
    bank = tiny_bank({"short": reader(mood), "long": reader(mood, seed=1)})
    for name, length in (("short", 6), ("long", 24)):
        fit(bank, {name: mood}, epochs=1, max_length=length, progress=False)
    alone = [evaluate(bank, {name: mood})[name] for name in bank]
    together = evaluate(bank, dict.fromkeys(bank, mood))
    assert alone == list(together.values())
    texts = mood.split("validation").texts[:5]
    for name in bank:
        own = [row[name]["score"] for row in predict(bank, texts, readers=[name])]
        assert own == [row[name]["score"] for row in predict(bank, texts)]


# A bank on one file

KIND = "sequence_classification"
COLUMNS = {"mood": "feeling", "urgent": "urgent", "stars": "stars"}  # reader -> column


def write(path: Path, rows: int, *, seed: int = 0, names: tuple[str, ...] = ("message", *COLUMNS.values())) -> Path:
    rng = random.Random(seed)
    lines = [",".join(names)]
    for row in range(rows):
        mood = rng.choice(["good", "bad"])
        values = [f"the film was {mood} {row}", mood, rng.choice(["no", "no", "yes"]), f"{1 + rng.random() * 4:.1f}"]
        lines.append(",".join(values))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> ReaderBank:
    path = write(tmp_path_factory.mktemp("trained") / "train.csv", 60)
    tasks = {
        reader: Task.from_files(KIND, train=path, text="message", label=column, positive=positive)
        for (reader, column), positive in zip(COLUMNS.items(), ("bad", None, None), strict=True)
    }
    how: list[dict[str, Any]] = [{"problem_type": task.problem_type} for task in tasks.values()]
    heads = [SequenceClassification(task.labels, 2, **more) for task, more in zip(tasks.values(), how, strict=True)]
    bank = tiny_bank({name: Reader(Mean(), head) for name, head in zip(tasks, heads, strict=True)})
    train(bank, tasks, epochs=6, batch_size=8, learning_rate=0.05)
    return bank


@pytest.fixture
def bank(trained: ReaderBank) -> ReaderBank:
    """A bank that a test may change."""
    return copy.deepcopy(trained)


def test_a_bank_remembers_the_columns_of_its_tasks(bank: ReaderBank, tmp_path: Path):
    save_bank(bank, tmp_path / "bank")
    loaded = ReaderBank.from_pretrained(tmp_path / "bank", bank.model, bank.processor)
    assert loaded["mood"].info["columns"] == {"text": "message", "label": "feeling"}
    assert loaded["mood"].info["positive"] == "bad"
    scores = evaluate(loaded, write(tmp_path / "test.csv", 80, seed=1), compare=True)
    assert list(scores) == list(COLUMNS)
    mood, urgent, stars = scores.values()
    assert mood["rows"] == urgent["rows"] == stars["rows"] == 80
    assert mood["accuracy"] > 0.9
    assert mood["f1"] > 0.9
    assert mood["verdict"] is None
    assert mood["interval"]["accuracy"][0] > mood["baseline"]["accuracy"]
    assert (urgent["always"], urgent["verdict"]) == ("no", "not better than always answering 'no'")
    share = 1 - urgent["baseline"]["accuracy"]  # of "yes", which is the best constant answer for F1
    assert urgent["baseline"]["f1"] == pytest.approx(2 * share / (1 + share))
    given = torch.tensor([float(row.split(",")[3]) for row in (tmp_path / "test.csv").read_text().splitlines()[1:]])
    off = pytest.approx((given - given.mean()).abs().mean().item(), abs=1e-5)
    assert stars["baseline"] == {"pearson": 0.0, "spearman": 0.0, "mae": off}


def test_other_columns_can_be_named(bank: ReaderBank, tmp_path: Path):
    path = write(tmp_path / "test.csv", 20, names=("text", "mood", "urgent", "stars"))
    with pytest.raises(DataError, match=r"no column 'message'.* Name the columns of reader 'mood': labels=.*, text="):
        evaluate(bank, path, labels={"mood": "mood"})
    with pytest.raises(DataError, match=r"has no column 'feeling'.* Name the columns of reader 'mood'"):
        evaluate(bank, path, text="text")
    named = evaluate(bank, path, text="text", labels={"mood": "mood"})
    assert named == evaluate(bank, write(tmp_path / "same.csv", 20))
    with pytest.raises(UnknownNameError, match="unknown reader 'moods'"):
        evaluate(bank, path, text="text", labels={"moods": "mood"})
    with pytest.raises(ConfigError, match="are for a file, not for tasks"):
        evaluate(bank, {}, text="text")
    for name in bank:
        del bank[name].info["columns"]
    with pytest.raises(ConfigError, match=r"reader 'mood' does not say which columns .* --label mood=COLUMN"):
        evaluate(bank, path)


def test_rows_without_a_label_are_not_scored(bank: ReaderBank, tmp_path: Path):
    path = write(tmp_path / "test.csv", 40)
    path.write_text(path.read_text() + "the film was bad,,yes,2.0\n" * 5)
    scores = evaluate(bank, path, compare=True)
    assert [scores[name]["rows"] for name in COLUMNS] == [40, 45, 45]


@pytest.mark.parametrize(("missing", "rows"), [(None, 4), ("drop", 3), ("mask", 3)])
def test_an_empty_cell_means_what_it_meant_in_training(missing: str | None, rows: int, tmp_path: Path):
    (path := tmp_path / "some.csv").write_text("text,label\na film,good;fun\na bad film,\nfun,fun\ngood,good\n")
    how: dict[str, Any] = {"text": "text", "problem_type": "multi_label", "missing_labels": missing}
    task = Task.from_files(KIND, train=path, validation=path, **how)
    bank = tiny_bank({"topics": Reader.default(task)})
    train(bank, {"topics": task}, epochs=1)
    save_bank(bank, tmp_path / "bank")
    loaded = ReaderBank.from_pretrained(tmp_path / "bank", bank.model, bank.processor)
    assert evaluate(loaded, path, compare=True)["topics"]["rows"] == rows


def test_another_class_can_be_positive(bank: ReaderBank, tmp_path: Path):
    path = write(tmp_path / "test.csv", 40)
    scores = [evaluate(bank, path, positive=positive)["urgent"]["f1"] for positive in (None, {"urgent": "no"})]
    assert scores[0] != scores[1]


def test_tfidf_learns_from_the_train_part_or_a_file(bank: ReaderBank, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path, learnt = write(tmp_path / "test.csv", 60, seed=3), write(tmp_path / "more.csv", 60)
    scores = evaluate(bank, path, tfidf=learnt)
    assert scores["mood"]["tfidf"]["accuracy"] > 0.9
    assert scores["stars"]["tfidf"].keys() == {"pearson", "spearman", "mae"}
    task = Task.from_files(KIND, train=learnt, validation=path, text="message", label="feeling", positive="bad")
    assert evaluate(bank, {"mood": task}, tfidf=True)["mood"]["tfidf"] == scores["mood"]["tfidf"]
    monkeypatch.setattr(BankRunner, "score", None)  # what is missing is said before the model reads a row
    with pytest.raises(ConfigError, match="tfidf is set, and task test has no train part"):
        evaluate(bank, path, tfidf=True)
    for given in (True, learnt):
        with pytest.raises(ConfigError, match="split is 'train', so tfidf would learn from the scored rows"):
            evaluate(bank, path, split="train", tfidf=given)
    learnt.write_text("".join(learnt.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(ConfigError, match="the train part of task test has one class or no words; it learns from"):
        evaluate(bank, path, tfidf=learnt)
    monkeypatch.setattr("lamina.errors.find_spec", lambda name: None if name == "sklearn" else find_spec(name))
    with pytest.raises(MissingExtraError, match="sklearn"):
        evaluate(bank, path, tfidf=tmp_path / "more.csv")


def test_a_test_part_that_fit_does_not_score_is_named(bank: ReaderBank, caplog: pytest.LogCaptureFixture):
    rows = [{"text": f"the film {row}", "label": "xy"[row % 2]} for row in range(60)]
    task = Task.from_dataset(KIND, {"train": rows[:20], "validation": rows[20:40], "test": rows[40:]}, text="text")
    bank.add("more", Reader(Mean(), SequenceClassification(task.labels, 2)))
    assert fit(bank, {"more": task}, positive="x", epochs=1, test=True, progress=False).test["more"].keys() >= {"f1"}
    assert bank["more"].info["positive"] == "x"
    result = fit(bank, {"more": task}, epochs=1, progress=False)
    assert [message for message in caplog.messages if "test part" in message] == [
        "fit: the test part of 'more' was not scored. Give test=True, or call lamina.evaluate with split='test'."
    ]
    assert result.baselines["more"] == {"always": "x", "accuracy": 0.5, "mcc": 0.0, "macro_f1": pytest.approx(1 / 3)}
    caplog.clear()
    assert fit(bank, {"more": task}, epochs=1, test=True, progress=False).test["more"].keys() >= {"accuracy"}
    assert "test part" not in caplog.text


def test_a_tagger_is_compared(tmp_path: Path):
    rows = [{"words": ["anna", "is", "good"], "tags": ["B-PER", "O", "O"]}] * 12
    task = Task.from_dataset("token_classification", {"train": rows, "validation": rows}, text="words", label="tags")
    bank = tiny_bank({"who": Reader(Mean(), TokenClassification(task.labels, 0, 2, 8))})
    result = train(bank, {"who": task}, epochs=1)
    assert result.baselines["who"]["always"] == "O"
    assert bank["who"].info["columns"] == {"text": "words", "label": "tags"}
    assert evaluate(bank, {"who": task}, compare=True)["who"].keys() >= {"interval", "baseline", "verdict"}


def test_what_evaluate_cannot_run_is_told_of_evaluate(tmp_path: Path):
    task = yes_no()
    bank = tiny_bank({"a": reader(task)})
    for backend in ("x", "cuda", "ONNX"):
        with pytest.raises(UnknownNameError, match=f"^evaluate: unknown backend '{backend}'; known: auto, torch"):
            evaluate(bank, {}, backend=backend)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"^evaluate: backend is 'int8', and the bank has no int8 export"):
        evaluate(bank, {"a": task}, backend="int8")
    (file := tmp_path / "texts.jsonl").write_text('{"text": "good", "label": "yes"}\n')
    with pytest.raises(ConfigError, match=r"^evaluate: .* has no head for any kind of task"):
        evaluate(bank.model, file)
