"""Handwritten sentences are well formed, come in pairs, and are not among the plain sentences that judge the demo."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from lamina.demo import corpus as demo
from lamina.demo.templates import held_out_names, words, words_of
from lamina.errors import DataError

FAULTS = {"agreement", "form", "number", "determiner", "order", "missing", "case", "comparison", "extra", "word"}
PAIRS = demo.read_pairs(Path(__file__).resolve().parents[3] / "examples" / "data" / "demo-sentences.tsv")
PLAIN = Path(__file__).resolve().parents[2] / "support" / "plain_sentences.jsonl"


def bare(text: str) -> str:
    return re.sub(r"[^a-z0-9 ]", "", text.lower())


@pytest.fixture(scope="module")
def split() -> dict[str, list[demo.Pair]]:
    sizes = {"train": 5000, "validation": 300, "test": 300}
    return demo.split_pairs(PAIRS, 0, sizes, elsewhere=words(), excluded=held_out_names())


def test_lines_are_well_formed():
    for pair in PAIRS:
        assert pair.fault in FAULTS
        assert pair.sentiment in demo.SENTIMENTS
        assert all(name in pair.good and name in pair.broken for name, _ in pair.names), pair
        assert {kind for _, kind in pair.names} <= {"PER", "LOC", "ORG", "MISC"}
        assert pair.good[0].isupper() and pair.broken[0].isupper()  # noqa: PT018
        assert pair.good[-1] in ".!?"


def test_no_sentence_stands_twice():
    texts = [bare(text) for pair in PAIRS for text in (pair.good, pair.broken)]
    assert [text for text, count in Counter(texts).items() if count > 1] == []


def test_no_sentence_of_the_list_by_which_the_demo_is_judged():
    judged = {bare(json.loads(line)["text"]) for line in PLAIN.read_text(encoding="utf-8").splitlines()}
    texts = {bare(text) for pair in PAIRS for text in (pair.good, pair.broken)}
    assert judged & texts == set()


def test_they_are_many_and_of_every_kind():
    faults = Counter(pair.fault for pair in PAIRS)
    sentiments = Counter(pair.sentiment for pair in PAIRS)
    assert len(PAIRS) >= 7000
    assert min(faults.values()) >= 100
    assert min(sentiments.values()) >= 2000


def test_parts_have_the_sizes_asked_for_and_no_pair_in_common(split):
    assert {part: len(pairs) for part, pairs in split.items()} == {"train": 5000, "validation": 300, "test": 300}
    assert len({pair for pairs in split.values() for pair in pairs}) == 5600


def test_a_pair_that_repeats_a_sentence_is_left_out():
    first, second = PAIRS[:2]
    mixed = dataclasses.replace(second, good=first.good.upper())
    sizes = {"train": 9, "validation": 0, "test": 0}
    parts = demo.split_pairs([first, second, first, mixed], 0, sizes, elsewhere=words(), excluded=held_out_names())
    assert sorted(parts["train"], key=[first, second].index) == [first, second]


def test_names_are_as_frequent_in_each_part(split):
    shares = {part: sum(bool(pair.names) for pair in pairs) / len(pairs) for part, pairs in split.items()}
    assert max(shares.values()) - min(shares.values()) < 0.06


def test_names_of_test_are_nowhere_else(split):
    seen = {word for pair in split["train"] + split["validation"] for word in pair.words()}
    shown = words_of(" ".join(name for pair in split["test"] for name, _ in pair.names))
    assert shown & (seen | words()) == set()
    assert not any(pair.words() & held_out_names() for pairs in split.values() for pair in pairs)


def test_more_than_there_are():
    sizes: dict[str, int] = dict.fromkeys(demo.SPLITS, 100_000)
    split = demo.split_pairs(PAIRS, 0, sizes, elsewhere=set(), excluded=set())
    assert sum(map(len, split.values())) == len(PAIRS)


@pytest.mark.parametrize(
    ("text", "names", "tagged"),
    [
        ("Anna's dog, Rex, isn't in.", "Anna=PER;Rex=PER", "Anna/B-PER 's/O dog/O ,/O Rex/B-PER ,/O isn't/O in/O ./O"),
        ("We ate at Rosa's!", "Rosa's=ORG", "We/O ate/O at/O Rosa's/B-ORG !/O"),
        (
            "Mr. Brown left the Bank of Spain.",
            "Brown=PER;Spain=LOC;Bank of Spain=ORG",
            "Mr/O ./O Brown/B-PER left/O the/O Bank/B-ORG of/I-ORG Spain/I-ORG ./O",
        ),
        ("Is it 9.30 already?", "", "Is/O it/O 9.30/O already/O ?/O"),
    ],
)
def test_words_and_tags(tmp_path: Path, text: str, names: str, tagged: str):
    (file := tmp_path / "pairs.tsv").write_text("header\n" + "\t".join((text, text, "form", "neutral", names)))
    (pair,) = demo.read_pairs(file)
    good, broken = pair.rows()
    assert (good["acceptability"], broken["acceptability"]) == ("acceptable", "unacceptable")
    assert " ".join(map("/".join, zip(good["words"], good["tags"], strict=True))) == tagged
    assert good["text"] == " ".join(good["words"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"demo: .*none\.tsv cannot be read \(.*Check --sentences"),
        ("good\tbroken\nShe left.\tShe leave.\n", r"demo: .*none\.tsv, line 2: it has 2 columns; good, broken, fault"),
        ("She left.\tShe leave.\tform\tneutral\t\n", r"demo: .*none\.tsv has no pairs below its first line"),
        ("\nShe left.\tShe leave.\tform\tfine\t\n", r"line 2: it ends in \['fine', ''\]; a sentiment is negative"),
        ("\nAnna left.\tAnna leave.\tform\tneutral\tAnna\n", r"it ends in \['neutral', 'Anna'\].*Anna=PER"),
    ],
)
def test_a_file_that_cannot_be_used(tmp_path: Path, content: str | None, message: str):
    path = tmp_path / "none.tsv"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        demo.corpus(rows=48, sentences=path)
