"""Words that share a token or have none: training rows that are learnt come back whole, under every tokenizer."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.support.portions import one_in
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import BertConfig, BertForTokenClassification, BertModel, PreTrainedTokenizerFast

from lamina import evaluate, finetune, fit, predict
from lamina.bank import Reader, ReaderBank
from lamina.data.windows import IGNORED
from lamina.errors import DataError
from lamina.fusion.concat import Concat
from lamina.heads.token_classification import TokenClassification
from lamina.tasks.base import EncodeOptions
from lamina.tasks.task import Task
from lamina.tasks.words import join, word_spans

if TYPE_CHECKING:
    from pathlib import Path

SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
NAMES = ("北京", "上海", "纽约")
FORMS = ("我在{}工作", "{}很大", "住{}很久")
CHINESE = [(form.format(name), form.index("{"), len(name)) for form in FORMS for name in NAMES]
PLACES = (
    "C++",
    "Ke$$ha",
    "Zoe\u0308",
    "Donau\u00addampf",
    "می\u200cروم",
    "New\u200bYork",
    "👩🏽\u200d🚀",
    "I❤️NY",
    "Lisbon",
)
AROUND = (("we met ", " now"), ("", " was there"))
ENGLISH = [(f"{before}{name}{after}", len(before), len(name)) for name in PLACES for before, after in AROUND]
KINDS = ("WordPiece", "byte-level BPE", "Unigram")
ROWS = {"Chinese": CHINESE, "English": ENGLISH}


@cache
def tokenizer(kind: str, texts: str) -> PreTrainedTokenizerFast:
    """A tokenizer that was trained on the texts of one group of rows."""
    corpus = [text for text, _, _ in ROWS[texts]] * 20
    if kind == "WordPiece":  # divides Chinese at every character, and drops what BERT drops
        backend = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        backend.normalizer, backend.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        trainer: Any = trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL)
    elif kind == "byte-level BPE":
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet)
    else:
        backend = Tokenizer(models.Unigram())
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=70, special_tokens=SPECIAL, unk_token="[UNK]")
    backend.train_from_iterator(corpus, trainer)
    ends = [(name, backend.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    names: dict[str, Any] = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=64, **names)


def trained(kind: str, texts: str, task: Task) -> ReaderBank:
    """A bank with a reader that has learnt the task by heart."""
    torch.manual_seed(0)
    words = tokenizer(kind, texts)
    sizes: dict[str, int] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(words), intermediate_size=64, max_position_embeddings=64, **sizes)
    bank = ReaderBank(BertModel(config, add_pooling_layer=False).eval(), words)
    head = TokenClassification(task.labels, attention_heads=2, feedforward=64, dropout=0.0)
    bank.add("where", Reader(Concat(dim=64), head))
    train = task.split("train").select_rows([*range(len(task.split("train")))] * 8)
    task = replace(task, splits={"train": train, "validation": task.split("validation")})
    fit(bank, {"where": task}, epochs=12, batch_size=12, learning_rate=0.005, progress=False, cache="off", keep="last")
    return bank


def found(bank: ReaderBank, texts: str) -> list[list[tuple[int, int]]]:
    answers = predict(bank, [text for text, _, _ in ROWS[texts]])
    return [[(span["start"], span["end"]) for span in answer["where"]] for answer in answers]


@pytest.mark.parametrize(("kind", "texts"), one_in(3, itertools.product(KINDS, ROWS)))
def test_spans_that_are_learnt_come_back(kind: str, texts: str, tmp_path: Path):
    rows = [{"text": text, "label": [[start, start + size, "X"]]} for text, start, size in ROWS[texts]]
    task = Task.from_dataset("token_classification", {"train": rows, "validation": rows}, text="text")
    bank = trained(kind, texts, task)
    expected = [[(start, start + size)] for _, start, size in ROWS[texts]]
    assert evaluate(bank, {"where": task})["where"]["span_f1"] == 1.0
    assert found(bank, texts) == expected
    bank.save_pretrained(tmp_path / "bank")
    loaded = ReaderBank.from_pretrained(tmp_path / "bank", model=bank.model, processor=tokenizer(kind, texts))
    assert found(loaded, texts) == expected


@pytest.mark.full
def test_a_whole_model_keeps_how_far_spans_reach_inside_a_token(tmp_path: Path):
    rows = [{"text": text, "label": [[start, start + size, "X"]]} for text, start, size in CHINESE]
    task = Task.from_dataset("token_classification", {"train": rows, "validation": rows}, text="text")
    torch.manual_seed(0)
    words = tokenizer("byte-level BPE", "Chinese")
    sizes: dict[str, int] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(words), intermediate_size=64, max_position_embeddings=64, **sizes)
    config.num_labels = len(task.labels)
    options: dict[str, Any] = {"epochs": 40, "batch_size": 9, "learning_rate": 0.003, "keep": "last"}
    output = tmp_path / "model"
    model = BertForTokenClassification(config)
    finetune(model, task, processor=words, output=output, progress=False, **options)
    expected = [[(start, start + size)] for _, start, size in CHINESE]
    for place in (model, output):
        answers = predict(place, [text for text, _, _ in CHINESE], processor=words)
        assert [[(s["start"], s["end"]) for s in next(iter(answer.values()))] for answer in answers] == expected


@pytest.mark.long
@pytest.mark.parametrize(("kind", "by_character"), one_in(3, itertools.product(KINDS, [True, False]), 1))
def test_listed_words_and_plain_texts_agree(kind: str, by_character: bool):
    rows = []
    for text, start, size in CHINESE:
        edges = range(len(text) + 1) if by_character else sorted({0, start, start + size, len(text)})
        words = [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]  # noqa: RUF007
        inside = [start <= a < start + size for a in edges[:-1]]
        tags = ["O" if not here else "I-X" if at and inside[at - 1] else "B-X" for at, here in enumerate(inside)]
        rows.append({"tokens": words, "tags": tags})
    task = Task.from_dataset("token_classification", {"train": rows, "validation": rows}, text="tokens", label="tags")
    assert task.split("train").texts == tuple(text for text, _, _ in CHINESE)
    bank = trained(kind, "Chinese", task)
    assert evaluate(bank, {"where": task})["where"]["span_f1"] == 1.0
    assert found(bank, "Chinese") == [[(start, start + size)] for _, start, size in CHINESE]


def by_heart(task: Task, words: Any, noise: int) -> tuple[float, list[tuple[int, int]]]:
    """Span F1, and the spans of the plain text, if each token says its target, and `noise` where it has none."""
    split, kind = task.split("train"), task.kind
    inputs: Any = kind.encode(split, words, EncodeOptions(part="train", max_length=32, windows=True))
    targets: Any = kind.targets(task, split, inputs)
    chosen = targets.tensor([0])
    logits = torch.eye(len(task.labels))[torch.where(chosen == IGNORED, noise, chosen)] * 20
    plain: Any = kind.answers(task, kind.examples(list(split.texts), words), inputs, words)
    listed: Any = kind.results(task, split, inputs)
    asked: Any = kind.answers(task, split, inputs, words)  # as a tagger does
    for results in (listed, plain, asked):
        results.set_learnt(kind.learnt(task, split, inputs))
        results.add([0], logits)
    assert asked.guesses() == listed.guesses()
    spans = plain.predictions()[0]
    return listed.scores(["span_f1"])["span_f1"], [(span["start"], span["end"]) for span in spans]


LISTED: list[tuple[str, str, list[str], str]] = [
    *(("byte-level BPE", "English", ["we", "met", name, "now"], name) for name in PLACES),
    ("byte-level BPE", "Chinese", ["在北京", "工作", "住"], "在北京"),  # one token has characters of two listed words
    ("byte-level BPE", "English", ["we", "\u202emet\u202c", "Lisbon"], "Lisbon"),
    ("Unigram", "English", ["\u202ewe\u202c", "C++"], "C++"),
]


@pytest.mark.parametrize(("kind", "texts", "words", "name"), LISTED)
def test_listed_words_that_a_plain_text_divides(
    kind: str, texts: str, words: list[str], name: str, caplog: pytest.LogCaptureFixture
):
    row = {"tokens": words, "tags": ["B-X" if word == name else "O" for word in words]}
    rows = {"train": [row], "validation": [row]}
    task = Task.from_dataset("token_classification", rows, text="tokens", label="tags")
    start = task.split("train").texts[0].index(name)
    for noise in range(len(task.labels)):
        assert by_heart(task, tokenizer(kind, texts), noise) == (1.0, [(start, start + len(name))])
    assert "cannot be told apart" not in caplog.text


def test_spans_at_words_that_no_plain_text_has_are_counted(caplog: pytest.LogCaptureFixture):
    row = {"tokens": ["a", "\u200b", " ", "b"], "tags": ["B-X", "I-X", "B-X", "O"]}
    Task.from_dataset("token_classification", {"train": [row], "validation": [row]}, text="tokens", label="tags")
    assert "1 of 1 rows have a span that begins at a word without letters or signs" in caplog.text
    row = {"tokens": ["An", "##a", "#", "##"], "tags": ["B-X", "I-X", "O", "O"]}
    rows = {"train": [row, {"tokens": ["b", "##"], "tags": ["O", "O"]}]}
    Task.from_dataset("token_classification", {**rows, "validation": [row]}, text="tokens", label="tags")
    assert "1 of 2 rows have a word that begins with ## or \u2581, as tokenizers write pieces" in caplog.text


def test_an_unknown_tag_is_refused_before_warnings(caplog: pytest.LogCaptureFixture):
    row = {"tokens": ["##a", "\u200b"], "tags": ["X", "B-Y"]}
    rows, labels = {"train": [row], "validation": [row]}, ["O", "B-Y"]
    with pytest.raises(DataError, match="has label 'X'; the labels are: O, B-Y"):
        Task.from_dataset("token_classification", rows, text="tokens", label="tags", labels=labels)
    assert caplog.text == ""


def test_tags_that_no_token_can_tell_apart_are_counted(caplog: pytest.LogCaptureFixture):
    """The same token with the same first tag, and two ways to go on."""
    rows = [{"text": "we met C++ now", "label": [[7, end, "X"]]} for end in (10, 10, 8)]
    task = Task.from_dataset("token_classification", {"train": rows, "validation": rows}, text="text")
    options = EncodeOptions(part="train", max_length=32, windows=True)
    inputs = task.kind.encode(task.split("train"), tokenizer("byte-level BPE", "English"), options)
    task.kind.targets(task, task.split("train"), inputs)
    shares = len(tokenizer("byte-level BPE", "English").tokenize(" C++")) == 1
    assert ("cannot be told apart" in caplog.text) is shares


def test_words_of_an_unknown_token_are_told_apart_by_their_characters(caplog: pytest.LogCaptureFixture):
    texts = ("we met 🎉🚀 now", "we met 🔥🎂 now", "we met 🔥🎂 now", "we met 🎂🎉 now")
    edges = ([8, 9], [], [], [7, 9])
    rows = [{"text": text, "label": [[*span, "X"]] if span else []} for text, span in zip(texts, edges, strict=True)]
    task = Task.from_dataset("token_classification", {"train": rows, "validation": rows}, text="text")
    words: Any = tokenizer("WordPiece", "Chinese")
    assert words.tokenize(texts[0])[-2:] == ["[UNK]", "[UNK]"]  # 🎉🚀 and "now"
    split, kind = task.split("train"), task.kind
    inputs: Any = kind.encode(split, words, EncodeOptions(part="train", max_length=32, windows=True))
    targets: Any = kind.targets(task, split, inputs)
    results: Any = kind.answers(task, kind.examples(list(texts), words), inputs, words)
    results.set_learnt(kind.learnt(task, split, inputs))
    chosen = targets.tensor([0, 1, 2, 3])
    results.add([0, 1, 2, 3], torch.eye(len(task.labels))[chosen.clamp(min=0)] * 20)
    assert [[[s["start"], s["end"]] for s in row] for row in results.predictions()] == [[e] if e else [] for e in edges]
    assert "cannot be told apart" not in caplog.text


# Words


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (list("我在北京"), "我在北京"),
        (list("2008年"), "2008年"),
        (["在", "2008", "年", "Python", "很", "好", "。"], "在2008年Python很好。"),
        (["ไป", "กรุงเทพ"], "ไปกรุงเทพ"),
        (["서울", "에"], "서울 에"),
        (["a", "b", "."], "a b ."),
        (["", "a"], " a"),
    ],
)
def test_words_are_joined_as_they_are_written(words: list[str], text: str):
    joined, spans = join(words)
    assert joined == text
    assert [joined[start:end] for start, end in spans] == words


@pytest.mark.parametrize(
    "word", ["می\u200cروم", "Donau\u00addampf", "Tel\u200fAviv", "Zoe\u0308", "👩🏽\u200d🚀", "🇩🇪", "1️⃣", "ที่"]
)
def test_what_is_one_word_to_a_reader_is_one_word(word: str):
    assert [word[start:end] for start, end in word_spans(word)] == [word]
