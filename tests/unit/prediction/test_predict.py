"""Scoring and predicting: one answer per text, in order, whatever the text."""

from __future__ import annotations

import functools
import inspect
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from tests.support.causal import causal_model, starting_tokenizer
from tests.support.finetuned import bert, drawn, image_processor, t5, t5_tokenizer, vit
from tests.support.masked import MASK, masked_bank, masked_model, masking_tokenizer, running
from tests.support.training import (
    PEOPLE,
    PLACES,
    length_of_text,
    names,
    reader,
    several,
    tiny_bank,
    tiny_model,
    tiny_tokenizer,
    train,
    yes_no,
)

from lamina.bank import Reader, ReaderBank
from lamina.errors import ConfigError, UnknownNameError
from lamina.fusion.ada_layers import AdaLayers
from lamina.fusion.mean import Mean
from lamina.fusion.pooled_layers import PooledLayers
from lamina.heads.sequence_classification import SequenceClassification
from lamina.heads.token_classification import TokenClassification
from lamina.prediction import evaluate, predict
from lamina.prediction.predict import Predictor
from lamina.tasks.base import EncodeOptions
from lamina.tasks.task import Task
from lamina.train.groups import group_tasks
from lamina.train.options import PassOptions

STRANGE = {
    "empty": "",
    "spaces": "  \t\n ",
    "emoji": "anna 😀👍🏽 went to paris 🇫🇷 !",
    "right to left": "שלום anna مرحبا paris",
    "unknown": "qqq zzz",
    "accents": "Ána e\u0301te\u0301 — “oslo”…",
    "wide": "東京 ben 東京",
    "nulls": "anna\x00 \u200b\ufeff paris",
    "one long word": "a" * 5000,
    "new lines": "anna\n\nben\r\npARIS",
}


@functools.cache
def trained() -> tuple[ReaderBank, dict[str, Task]]:
    tasks = {"mood": yes_no(), "who": names(train=80), "words": length_of_text(), "what": several()}
    bank = tiny_bank(
        {name: reader(task, seed=at, layers="all", dim=16) for at, (name, task) in enumerate(tasks.items())}
    )
    train(bank, tasks, epochs=16, batch_size=8, learning_rate=0.03)
    return bank, tasks


def test_every_kind_of_answer():
    bank, _ = trained()
    (answer,) = predict(bank, ["anna went to paris"])
    assert list(answer) == ["mood", "who", "words", "what"]
    assert answer["mood"]["label"] in ("no", "yes")
    assert sum(answer["mood"]["probabilities"].values()) == pytest.approx(1)
    assert isinstance(answer["words"]["value"], float)
    assert set(answer["what"]["probabilities"]) == {"who", "where", "how"}
    assert isinstance(answer["who"], list)


def test_entities_stand_where_they_are_said_to_stand():
    bank, _ = trained()
    texts = ["We saw  anna,\tben and the film in Paris.", "oslo", "the film", "rome oslo\nis not rome"]
    found = [[(one["label"], one["text"]) for one in answer["who"]] for answer in predict(bank, texts)]
    for text, answer in zip(texts, predict(bank, texts), strict=True):
        assert all(text[one["start"] : one["end"]] == one["text"] for one in answer["who"])
    known = dict.fromkeys(PEOPLE, "PER") | dict.fromkeys(PLACES, "LOC")
    said = {text.lower(): label for row in found for label, text in row}
    assert sum(known.get(text) == label for text, label in said.items()) >= 3
    assert found[2] == []


@pytest.mark.parametrize("kind", STRANGE)
def test_strange_texts(kind: str):
    bank, _ = trained()
    text = STRANGE[kind]
    alone, beside = predict(bank, [text])[0], predict(bank, ["anna went", text, "the film is good and fun"])[1]
    for answer in (alone, beside):
        assert answer["mood"]["score"] > 0
        assert all(text[one["start"] : one["end"]] == one["text"] for one in answer["who"])
        assert all(one["text"].strip() for one in answer["who"])
    assert beside["words"]["value"] == pytest.approx(alone["words"]["value"], abs=1e-5)
    assert [(one["start"], one["end"]) for one in alone["who"]] == [(one["start"], one["end"]) for one in beside["who"]]


def test_a_very_long_text_is_read_to_its_end():
    bank, _ = trained()
    text = "the film is slow " * 5882 + "and oslo"
    assert len(text) > 100_000
    (answer,) = predict(bank, [text], readers=["who"])
    assert all(text[one["start"] : one["end"]] == one["text"] for one in answer["who"])
    assert answer["who"][-1]["end"] == len(text)


def test_windows_and_a_whole_text_agree_on_words_in_the_middle():
    """The same words at any place in a long text are found; none is lost where windows meet."""
    bank, _ = trained()
    once = predict(bank, ["the oslo film"], readers=["who"])[0]["who"]
    assert [one["text"] for one in once] == ["oslo"]
    text = " ".join(["the oslo film"] * 60)
    found = predict(bank, [text], readers=["who"])[0]["who"]
    assert len({one["start"] for one in found}) == len(found)
    assert len(found) >= 50


def test_readers_get_the_windows_that_they_were_trained_with():
    task = names(train=4, validation=1, low=16, high=16)
    bank, shapes = tiny_bank({"who": reader(task)}), []
    train(bank, {"who": task}, max_length=10, stride=6)
    bank.model.register_forward_pre_hook(
        lambda _, args, batch: shapes.append(batch["input_ids"].shape), with_kwargs=True
    )
    predict(bank, list(task.split("validation").texts))
    evaluate(bank, {"who": task})
    assert shapes == [(5, 10), (5, 10)]  # eight words each, six of them shared


@pytest.mark.parametrize(("stride", "other", "shape"), [(6, 2, (5, 10)), (2, 6, (3, 10))])
def test_windows_are_those_of_the_reader_of_tokens_beside_one_of_texts(stride: int, other: int, shape: tuple[int, int]):
    task, shapes = names(train=4, validation=1, low=16, high=16), []
    bank = tiny_bank({"who": reader(task), "mood": reader()})
    train(bank, {"who": task}, max_length=10, stride=stride)
    train(bank, {"mood": yes_no(train=4)}, max_length=10, stride=other)
    bank.model.register_forward_pre_hook(
        lambda _, args, batch: shapes.append(batch["input_ids"].shape), with_kwargs=True
    )
    predict(bank, list(task.split("validation").texts))
    assert shapes == [shape]


def test_answers_come_in_the_order_of_the_texts():
    bank, tasks = trained()
    texts = list(tasks["mood"].split("validation").texts)
    whole = predict(bank, texts, batch_size=3)
    for text, answer in list(zip(texts, whole, strict=True))[::5]:
        single = predict(bank, [text])[0]
        assert answer["words"]["value"] == pytest.approx(single["words"]["value"], abs=1e-5)
        assert answer["mood"]["probabilities"] == pytest.approx(single["mood"]["probabilities"], abs=1e-5)


def test_only_the_readers_asked_for_answer():
    bank, _ = trained()
    assert [list(answer) for answer in predict(bank, ["a", "b"], readers=["what", "mood"])] == [["what", "mood"]] * 2


def test_no_texts_are_no_answers():
    bank, _ = trained()
    assert predict(bank, []) == []


@pytest.mark.parametrize(
    ("texts", "readers", "said"),
    [
        (["", "a", " \n"], None, ["predict: 2 texts are blank; the answers to them mean nothing"]),
        ([("", " "), ("a", "")], "mood", ["predict: 1 text is blank; the answers to them mean nothing"]),
        (["", "a"], "who", []),  # a blank text has no names
        (["a", "b"], None, []),
    ],
)
def test_blank_texts_are_counted(texts: Any, readers: Any, said: list[str], caplog: pytest.LogCaptureFixture):
    bank = tiny_bank({"mood": reader(yes_no()), "who": reader(names())})
    predict(bank, texts, readers=readers)
    assert caplog.messages == said


def test_pairs_of_texts():
    bank = tiny_bank({"r": reader()})
    texts = [("the film", "is good"), ("is good", "the film"), ("anna", "")]
    answers = predict(bank, texts)
    assert [list(answer) for answer in answers] == [["r"]] * 3
    assert answers[0]["r"]["probabilities"] != answers[1]["r"]["probabilities"]
    with torch.no_grad():
        inputs = tiny_tokenizer()("the film", "is good", return_tensors="pt")
        expected = bank.eval()(
            **{key: inputs[key] for key in ("input_ids", "attention_mask", "token_type_ids") if key in inputs}
        )
    assert answers[0]["r"]["probabilities"]["yes"] == pytest.approx(
        expected["r"].logits.softmax(-1)[0, 1].item(), abs=1e-5
    )


@pytest.mark.parametrize("training", [True, False])
def test_predicting_leaves_the_bank_as_it_was(training: bool):
    bank = tiny_bank({"r": reader(dropout=0.5)}).train(training)
    one, other = predict(bank, ["the film"]), predict(bank, ["the film"])
    assert one == other
    assert bank.training is training


def test_texts_padded_on_the_left_get_the_same_answers():
    """A tokenizer's padding side is where tokens are put, and must not be seen in what comes out."""
    from tests.support.tiny import FAMILIES

    model = FAMILIES["gpt2"].known()
    answers = []
    for side in ("right", "left"):
        bank = ReaderBank(model, tiny_tokenizer(side))
        bank.add("text", reader())
        bank.add("word", Reader(Mean(), TokenClassification(("x", "y"), feedforward=8, attention_heads=2)))
        answers.append(predict(bank, ["anna", "the film is good", "the film is not very good , we saw it"]))
    for right, left in zip(*answers, strict=True):
        assert left["text"]["probabilities"] == pytest.approx(right["text"]["probabilities"], abs=1e-5)
        assert [one["text"] for one in left["word"]] == [one["text"] for one in right["word"]]
        assert [one["score"] for one in left["word"]] == pytest.approx(
            [one["score"] for one in right["word"]], abs=1e-5
        )


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("one text", "predict: got one str; a list of texts, pairs of texts, images or clips is needed"),
        (["a", 3], "predict: entry 1 is int; all must be texts, or all pairs of texts"),
        (["a", ("a", "b")], "predict: entry 1 is tuple; all must be texts"),
        ([("a", "b"), "a"], "predict: entry 1 is str; all must be texts"),
        ([("a", "b", "c")], "predict: entry 0 is tuple"),
        ([None], "predict: entry 0 is NoneType"),
        ([["a", "b", "c"]], r"predict: entry 0 is list; .* pairs of texts\. Join the words of a text with spaces"),
    ],
)
def test_what_is_no_list_of_texts(texts: Any, message: str):
    bank, _ = trained()
    call = inspect.unwrap(predict)  # as outside these tests: no type checker
    with pytest.raises(ConfigError, match=message):
        call(bank, texts, readers=["mood"])


def test_what_cannot_be_predicted():
    bank, _ = trained()
    with pytest.raises(
        UnknownNameError, match=r"unknown reader 'mod'; known: mood, who, words, what. Did you mean 'mood'"
    ):
        predict(bank, ["a"], readers=["mod"])
    with pytest.raises(ConfigError, match="predict: there is no reader; at least one is needed"):
        predict(bank, ["a"], readers=[])
    with pytest.raises(ConfigError, match="predict: the bank has no processor"):
        predict(ReaderBank(tiny_model()), ["a"])
    with pytest.raises(ConfigError, match="predict: batch_size is 0; it must be at least 1"):
        predict(bank, ["a"], batch_size=0)
    with pytest.raises(ConfigError, match="predict: kind is 'masked_lm' for a bank; each of its readers has its own"):
        predict(bank, ["a"], kind="masked_lm")
    with pytest.raises(ConfigError, match=r"predict: readers are \['mood'\] for a whole model, which has none"):
        predict(t5(), ["a"], readers=["mood"], kind="translation", processor=t5_tokenizer())
    with pytest.raises(ConfigError, match="predict: readers are 'mood' for a whole model"):
        predict(t5(), ["a"], readers="mood", kind="translation", processor=t5_tokenizer())
    with pytest.raises(UnknownNameError, match=r"kind: unknown name '\['translation'\]'.*Did you mean 'translation'"):
        predict(t5(), ["a"], kind=["translation"], processor=t5_tokenizer())  # pyright: ignore[reportArgumentType]


# Scores


def test_scores_of_a_part():
    bank, tasks = trained()
    found = evaluate(bank, tasks, split="train")
    assert list(found) == list(tasks)
    assert found["mood"]["accuracy"] > 0.8
    assert list(found["mood"]) == ["accuracy", "f1", "mcc"]


def test_scores_are_those_of_the_predictions():
    bank, tasks = trained()
    split = tasks["mood"].split("validation")
    answers = predict(bank, list(split.texts))
    right = [
        answer["mood"]["label"] == ("no", "yes")[label] for answer, label in zip(answers, split.labels, strict=True)
    ]
    assert evaluate(bank, {"mood": tasks["mood"]})["mood"]["accuracy"] == pytest.approx(sum(right) / len(right))


def test_scores_do_not_depend_on_the_size_of_a_batch():
    bank, tasks = trained()
    one, other = evaluate(bank, tasks, batch_size=3), evaluate(bank, tasks, batch_size=64)
    for name in tasks:
        assert one[name] == pytest.approx(other[name], abs=1e-5)


def test_rows_per_class():
    bank, tasks = trained()
    found = evaluate(bank, tasks, per_class=True)
    averages = ["micro avg", "macro avg", "weighted avg"]
    assert [row["label"] for row in found["mood"]["per_class"]] == ["no", "yes", *averages]
    assert [row["label"] for row in found["who"]["per_class"]] == ["LOC", "PER", *averages]
    assert [row["count"] for row in found["mood"]["per_class"][2:]] == [20, 20, 20]


def test_scores_of_a_part_or_reader_there_is_not():
    bank, tasks = trained()
    with pytest.raises(UnknownNameError, match="unknown split 'test'; known: train, validation"):
        evaluate(bank, tasks, split="test")
    with pytest.raises(UnknownNameError, match="evaluate: unknown reader 'mod'"):
        evaluate(bank, {"mod": tasks["mood"]})


# Masked language modelling


def hidden_scores(bank: ReaderBank, name: str, part: str = "validation", max_length: int = 16) -> tuple[float, float]:
    """Perplexity and accuracy, of all hidden tokens at once."""
    how = EncodeOptions(part=part, max_length=max_length)
    inputs = next(group_tasks({name: running()}, how, bank.processor)).inputs
    batch = inputs.batch(range(len(inputs.lengths)))
    labels = batch.pop("labels")
    with torch.no_grad():
        logits = bank.eval()(**batch)[name].logits
    given = labels != -100
    loss = torch.nn.functional.cross_entropy(logits[given], labels[given])
    return loss.exp().item(), (logits[given].argmax(-1) == labels[given]).float().mean().item()


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_perplexity_is_that_of_all_hidden_tokens(batch_size: int):
    bank = masked_bank("m", "n")
    bank["n"].head.bias.data.add_(torch.randn(len(bank["n"].head.bias)))  # pyright: ignore
    found = evaluate(bank, {"m": running(), "n": running()}, batch_size=batch_size, max_length=16)
    for name in ("m", "n"):
        perplexity, accuracy = hidden_scores(bank, name)
        assert found[name]["perplexity"] == pytest.approx(perplexity, rel=1e-4)
        assert found[name]["accuracy"] == pytest.approx(accuracy)
    assert found["m"] != found["n"]


@pytest.mark.parametrize("training", [True, False])
def test_scoring_hidden_tokens_leaves_the_bank_as_it_was(training: bool):
    bank = masked_bank("m").train(training)
    assert evaluate(bank, {"m": running()}) == evaluate(bank, {"m": running()})
    assert bank.training is training
    assert evaluate(bank, {"m": running()}, split="train") == evaluate(bank, {"m": running()}, split="train")
    assert evaluate(bank, {"m": running()}, per_class=True)["m"]["per_class"] == []


def test_few_rows_at_once_where_the_vocabulary_is_large(monkeypatch: pytest.MonkeyPatch):
    """However many are asked, so that the logits fit in memory."""
    bank = masked_bank("m")
    whole = evaluate(bank, {"m": running()}, max_length=16)
    sizes: list[int] = []
    bank.model.register_forward_pre_hook(
        lambda _module, _args, kwargs: sizes.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    monkeypatch.setattr("lamina.tasks.language_modeling._MOST_SCORES", 16 * len(bank["m"].head.bias) * 2)  # pyright: ignore
    assert evaluate(bank, {"m": running()}, max_length=16)["m"] == pytest.approx(whole["m"], rel=1e-4)
    assert max(sizes) == 2


def test_mask_tokens_are_filled_in_as_the_model_does():
    bank = masked_bank("m")
    tokenizer = masking_tokenizer()
    text = "anna [MASK] to  [MASK] ."
    (answer,) = predict(bank, [text])
    assert [text[one["start"] : one["end"]] for one in answer["m"]] == ["[MASK]"] * 2
    inputs = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        logits = masked_model()(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[0]
    for one, at in zip(answer["m"], (inputs["input_ids"][0] == MASK).nonzero(), strict=True):
        shares = logits[at[0]].softmax(-1)
        best = shares.argsort(descending=True)[:5]
        assert [each["token"] for each in one["candidates"]] == tokenizer.convert_ids_to_tokens(best.tolist())
        assert [each["score"] for each in one["candidates"]] == pytest.approx(shares[best].tolist(), abs=1e-5)


def test_texts_without_a_mask_token_have_nothing_to_fill_in():
    bank = masked_bank("m")
    answers = predict(bank, ["anna", "", "[MASK]", "the film [mask]"], batch_size=3)
    assert [len(answer["m"]) for answer in answers] == [0, 0, 1, 0]


def test_mask_tokens_of_a_long_text_are_all_filled_in():
    bank = masked_bank("m")
    text = "the [MASK] film is good " * 40
    (answer,) = predict(bank, [text], batch_size=2)
    assert len({one["start"] for one in answer["m"]}) == 40
    assert all(one["candidates"][0]["score"] > 0 for one in answer["m"])


def test_every_kind_reads_the_same_texts_beside_it():
    bank = masked_bank("m")
    bank.add("mood", reader())
    bank.add("word", Reader(Mean(), TokenClassification(("x", "y"), feedforward=8, attention_heads=2)))
    texts = ["anna [MASK] paris", "the film"]
    together = predict(bank, texts)
    for name in bank:
        alone = [answer[name] for answer in predict(bank, texts, readers=[name])]
        assert [said(answer[name]) for answer in together] == [said(answer) for answer in alone]
    assert [len(answer["word"]) for answer in together] == [5, 2]


def said(answer: Any) -> Any:
    """An answer without its numbers."""
    if isinstance(answer, dict):
        return answer["label"]
    return [(one["start"], one.get("label"), [each["token"] for each in one.get("candidates", ())]) for one in answer]


def test_what_cannot_be_filled_in():
    bank = masked_bank("m")
    with pytest.raises(
        ConfigError, match=r"(?s)predict: got pairs of texts; this kind of task reads single texts.*'m'"
    ):
        predict(bank, [("a", "b")])
    for entry in (3, {"a": "b"}):
        with pytest.raises(ConfigError, match=r"predict: entry 0 is \w+; all must be texts"):
            predict(bank, [entry])
    bank.processor = tiny_tokenizer()
    with pytest.raises(ConfigError, match="masked_lm: the tokenizer has no mask token"):
        predict(bank, ["a"])
    with pytest.raises(ConfigError, match="masked_lm: the tokenizer has no mask token"):
        evaluate(bank, {"m": running()})


def test_a_reader_learns_to_fill_in():
    bank = masked_bank("m")
    before = evaluate(bank, {"m": running()}, max_length=16)["m"]
    result = train(bank, {"m": running()}, epochs=3, batch_size=8, learning_rate=0.01, max_length=16)
    after = evaluate(bank, {"m": running()})["m"]
    assert after["perplexity"] < before["perplexity"] / 2
    assert after["perplexity"] == pytest.approx(min(row["perplexity"] for row in result.history), rel=1e-4)


# Whole models


def test_whole_models_of_every_kind(tmp_path: Path):
    """What the answer is called follows from the model's head; labels are those of its config."""
    tokenizer, texts = tiny_tokenizer(), ["anna was in paris", "the film"]
    model = bert(labels=3)
    (first, _) = predict(model, texts, processor=tokenizer)
    assert list(first["sequence_classification"]["probabilities"]) == ["LABEL_0", "LABEL_1", "LABEL_2"]
    assert "value" in predict(bert(labels=1), texts, processor=tokenizer)[0]["sequence_classification"]
    model.config.problem_type = "multi_label_classification"
    assert "labels" in predict(model, texts, processor=tokenizer)[0]["sequence_classification"]
    tags = bert("AutoModelForTokenClassification", 5)
    assert [span["text"] for span in predict(tags, texts, processor=tokenizer)[1]["token_classification"]] == [
        *("the", "film")
    ]
    masked = predict(masked_model(), ["anna [MASK] paris"], processor=masking_tokenizer())
    assert len(masked[0]["masked_lm"][0]["candidates"]) == 5
    options = {"processor": t5_tokenizer(), "max_target_length": 3}
    written = predict(t5(), texts, **options)
    assert [list(answer["summarization"]) for answer in written] == [["text"]] * 2
    assert predict(t5(), texts, kind="translation", **options)[0]["translation"] == written[0]["summarization"]
    (tmp_path / "x.png").write_bytes(drawn(1, 1).data or b"")
    (answer,) = predict(vit(), [str(tmp_path / "x.png")], processor=image_processor())
    assert set(answer["image_classification"]) == {"label", "score", "probabilities"}


def test_a_model_s_answers_are_those_of_its_own_pass():
    model, text = bert(), "anna was in paris"
    with torch.no_grad():
        logits = model(**tiny_tokenizer()([text], return_tensors="pt")).logits[0]
    (answer,) = predict(model, [text], processor=tiny_tokenizer())
    assert list(answer["sequence_classification"]["probabilities"].values()) == pytest.approx(
        logits.softmax(-1).tolist(), abs=1e-6
    )


def test_a_model_without_a_head():
    with pytest.raises(ConfigError, match="predict: BertModel has no head for any kind of task; known: sequence_"):
        predict(bert("AutoModel"), ["a"], processor=tiny_tokenizer())


def test_one_reader_may_be_named_by_its_name_alone():
    bank, _ = trained()
    assert predict(bank, ["anna was here"], readers="mood") == predict(bank, ["anna was here"], readers=["mood"])


def test_readers_that_learnt_from_pairs_say_so_where_single_texts_come(caplog: pytest.LogCaptureFixture):
    parts = {
        part: [{"a": "anna went", "b": text, "label": label} for text, label in (("good", "no"), ("bad", "yes")) * 4]
        for part in ("train", "validation")
    }
    pairs = Task.from_dataset("sequence_classification", parts, text="a", text_pair="b", name="pairs")
    single = Task.from_dataset("sequence_classification", parts, text="b", name="single")
    bank = tiny_bank({"pairs": reader(pairs), "single": reader(single)})
    train(bank, {"pairs": pairs, "single": single}, epochs=1)
    caplog.clear()  # the splits have the same texts, which `fit` warns of
    predict(bank, ["good"], readers=["single"])
    predict(bank, [("anna went", "good")], readers=["pairs"])
    evaluate(bank, {"pairs": pairs})
    assert caplog.text == ""
    predict(bank, ["good"])
    assert "predict: 'pairs' was trained on pairs of texts and now reads single texts" in caplog.text
    assert "'single'" not in caplog.text
    evaluate(bank, {"single": pairs})
    assert "evaluate: 'single' was trained on single texts and now reads pairs of texts" in caplog.text
    predictor = Predictor(bank, PassOptions(), readers=["pairs", "single"])
    for examples, warned in (([], []), (["good"], ["pairs"]), ([("a", "good")], ["single"]), (["good"], [])):
        caplog.clear()
        predictor(examples)
        assert [name for name in ("pairs", "single") if f"'{name}' was trained on" in caplog.text] == warned


def test_a_reader_that_nothing_has_trained_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    task = yes_no()
    made = {name: reader(task) for name in ("fitted", "by_hand", "own_loop", "loaded", "left")}
    bank = tiny_bank({})
    for name, settings in made.items():
        bank.add(name, settings)
    train(bank, {"fitted": task}, epochs=1)
    caplog.clear()
    bank["by_hand"].head.output.weight.data.fill_(0.5)
    bank["own_loop"].seed_dropout(torch.device("cpu"))  # as in every training pass
    bank["loaded"].load_state_dict(bank["fitted"].state_dict())
    predict(bank, ["good"], readers=[*made][:-1])
    assert caplog.text == ""
    predict(bank, ["good"])
    assert "predict: reader 'left' was not trained: its weights are the random ones of bank.add, so" in caplog.text
    evaluate(bank, {"left": task})
    bank.save_pretrained(tmp_path)
    assert caplog.text.count("was not trained") == 1
    torch.nn.utils.parametrizations.weight_norm(bank.add("named", reader(task)).head.output)
    predict(bank, ["good"])  # other parameters than at first
    bank.add("new", reader(task))
    evaluate(bank, {"new": task})
    assert "evaluate: reader 'new' was not trained" in caplog.text
    bank.add("saved", reader(task))
    bank.save_pretrained(tmp_path)
    assert "bank.save_pretrained: reader 'saved' was not trained" in caplog.text
    assert caplog.text.count("was not trained") == 3


def test_two_words_are_no_pair_for_readers_that_label_the_words_of_single_texts():
    bank, _ = trained()
    with pytest.raises(ConfigError, match="entry 0 is a list of words, and the readers learnt from single texts"):
        predict(bank, [["anna", "paris"]], readers="who")
    pair = predict(bank, [("anna", "paris")], readers="who")
    bank["who"].info["pair"] = True
    assert predict(bank, [["anna", "paris"]], readers="who") == pair
    bank["who"].info["pair"] = False
    assert predict(bank, [["anna was", "in paris"]], readers="who")
    assert predict(bank, [["anna", "paris"]], readers="mood")


def test_how_examples_are_read_is_derived_once_for_a_bank_until_something_changes(monkeypatch: pytest.MonkeyPatch):
    bank, derived, derive = tiny_bank({"a": reader(yes_no()), "b": reader(yes_no())}), [], Predictor._derive_plan
    monkeypatch.setattr(Predictor, "_derive_plan", lambda self: derived.append(self) or derive(self))
    whole = predict(bank, ["good " * 6])
    assert predict(bank, ["good " * 6]) == whole
    assert len(derived) == 1
    for reader_module in (bank["a"], bank["b"]):
        reader_module.info = {"max_length": 4}
    cut = predict(bank, ["good " * 6])
    assert cut != whole
    assert cut == Predictor(bank, PassOptions())(["good " * 6])
    bank["b"].info = {}
    mixed = predict(bank, ["good " * 6])[0]
    for name, answer in (("a", cut[0]["a"]), ("b", whole[0]["b"])):
        assert mixed[name]["probabilities"] == pytest.approx(answer["probabilities"], abs=1e-6)
    assert len(derived) == 3


def test_a_pair_is_read_alike_with_and_without_a_reader_of_tokens():
    bank = ReaderBank(causal_model(), starting_tokenizer())  # puts its start token before the second text too
    bank.add("text", Reader(AdaLayers(dim=8), SequenceClassification(("no", "yes"), pooling="mean"), seed=0))
    bank.add("words", Reader(AdaLayers(dim=8), TokenClassification(("O", "X"), encoder_layers=0), seed=1))
    pairs = [("the film", "is good"), ("bad", "it is slow")]
    rng = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in bank["text"].parameters():
            parameter.normal_(generator=rng)
    both, alone = predict(bank, pairs), predict(bank, pairs, readers=["text"])
    assert [answer["text"] for answer in both] == [answer["text"] for answer in alone]


def test_the_way_of_one_text_is_short():
    """Comprehensions do not count, because they are functions up to Python 3.11 only."""
    bank = ReaderBank(tiny_model(), tiny_tokenizer())
    bank.add("mood", Reader(PooledLayers(dim=8), SequenceClassification(("bad", "good"), pooling="first")))
    predict(bank.eval(), ["anna"])
    folder, entered = str(Path(inspect.getfile(ReaderBank)).parents[1]), set[tuple[str, str]]()

    def profile(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(folder) and not code.co_name.startswith("<"):
            entered.add((code.co_filename, code.co_qualname))

    sys.setprofile(profile)
    try:
        predict(bank, ["anna"])
    finally:
        sys.setprofile(None)
    assert len({file for file, _ in entered}) <= 24
    assert len(entered) <= 134
