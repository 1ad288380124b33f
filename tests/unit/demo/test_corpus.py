from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from collections import Counter
from importlib import resources
from itertools import pairwise
from pathlib import Path

import pytest

from lamina.demo import corpus as demo
from lamina.demo import templates
from lamina.demo.corpus import FAULTS
from lamina.demo.run import run_demo
from lamina.demo.templates import Token
from lamina.errors import ConfigError

SENTENCES = Path(__file__).resolve().parents[3] / "examples" / "data" / "demo-sentences.tsv"
WORDS = json.loads(resources.files("lamina.demo").joinpath("words.json").read_text(encoding="utf-8"))
LISTS, TEMPLATES = WORDS["words"], WORDS["templates"]
# Words that many organisations and places share and that name none of them alone.
GENERIC = {
    "airlines",
    "and",
    "bank",
    "books",
    "capital",
    "college",
    "council",
    "energy",
    "foods",
    "hospital",
    "insurance",
    "lake",
    "logistics",
    "media",
    "mining",
    "mount",
    "motors",
    "sea",
    "software",
    "studios",
    "systems",
    "university",
}


@pytest.fixture(scope="module")
def parts() -> dict[str, list[dict]]:
    return demo.corpus(sentences=SENTENCES)


@pytest.fixture(scope="module")
def templated() -> dict[str, list[dict]]:
    """Make a corpus from templates alone."""
    return demo.corpus()


@pytest.fixture(scope="module")
def rows(parts) -> list[dict]:
    return [row for part in parts.values() for row in part]


def entities(rows: list[dict]) -> set[tuple[str, str]]:
    found = set()
    for row in rows:
        spans = re.findall(
            r"(\S+)/B-(\w+)((?: \S+/I-\w+)*)", " ".join(map("/".join, zip(row["words"], row["tags"], strict=True)))
        )
        found |= {(kind, f"{first}{re.sub('/I-' + kind, '', rest)}") for first, kind, rest in spans}
    return found


def lower_words(rows: list[dict], *, tagged: bool = False) -> set[str]:
    return {
        word.lower()
        for row in rows
        for word, tag in zip(row["words"], row["tags"], strict=True)
        if tag != "O" or not tagged
    }


def names(rows: list[dict]) -> set[str]:
    return {word for word in lower_words(rows, tagged=True) if word[0].isalpha()} - GENERIC


def test_sizes(parts):
    assert {part: len(rows) for part, rows in parts.items()} == {"train": 2250, "validation": 375, "test": 375}
    assert {part: len(rows) for part, rows in demo.corpus(rows=100).items()} == {
        "train": 76,
        "validation": 12,
        "test": 12,
    }


def test_rows_are_well_formed(rows):
    for row in rows:
        assert set(row) == {"text", "words", "tags", "sentiment", "acceptability"}
        assert row["text"] == " ".join(row["words"])
        assert len(row["words"]) == len(row["tags"]) >= 3
        assert all(word and word == word.strip() and " " not in word for word in row["words"])
        assert row["text"][0].isupper()
        assert not re.search(r"[{}%]|/\w", row["text"])
        assert row["sentiment"] in demo.SENTIMENTS
        assert row["acceptability"] in demo.ACCEPTABILITY
        for before, tag in pairwise(["O", *row["tags"]]):
            assert tag in demo.TAGS
            assert not tag.startswith("I-") or before[2:] == tag[2:]


def test_labels_are_as_frequent_as_the_docs_say(parts):
    for part in parts.values():
        sentiments = Counter(row["sentiment"] for row in part)
        assert set(sentiments) == set(demo.SENTIMENTS)
        assert max(sentiments.values()) <= 1.6 * min(sentiments.values())
        acceptable = sum(row["acceptability"] == "acceptable" for row in part)
        assert acceptable == pytest.approx(0.5 * len(part), abs=1)
        kinds = Counter(tag[2:] for row in part for tag in row["tags"] if tag.startswith("B-"))
        assert set(kinds) == {"PER", "ORG", "LOC", "MISC"}
        assert min(kinds.values()) >= 0.04 * len(part)


def test_templates_give_every_pair_of_labels_alike(templated):
    for part in templated.values():
        counts = Counter((row["sentiment"], row["acceptability"]) for row in part)
        assert len(counts) == 6
        assert max(counts.values()) - min(counts.values()) <= 1


def test_no_text_twice(rows):
    assert max(Counter(row["text"].lower() for row in rows).values()) == 1


def test_names_of_the_test_part_are_in_no_other(parts):
    other = lower_words(parts["train"] + parts["validation"])
    assert names(parts["test"]) & other == set()
    assert names(parts["validation"]) & lower_words(parts["train"]) == set()


def test_a_share_of_the_other_words_of_the_test_part_is_in_no_other(templated):
    other, test = lower_words(templated["train"] + templated["validation"]), lower_words(templated["test"])
    for name, groups in LISTS.items():
        held_out = {form for entry in groups.get("shared", ()) and groups["test"] for form in entry.lower().split("/")}
        assert held_out & other == set(), name
        if name.startswith(("adj_", "verb_", "thing", "job")):
            assert held_out & test, name


def test_the_same_word_is_several_things(templated):
    for part in ("train", "test"):
        kinds = {}
        for kind, name in entities(templated[part]):
            for word in {name, name.split()[0]}:
                kinds.setdefault(word, set()).add(kind)
        assert sum(len(found) > 1 for found in kinds.values()) >= 6
    assert {"rose", "bill", "apple"} <= {word for row in templated["train"] for word in row["words"]}


def test_lists_are_long_and_without_repeats():
    sizes = {name: sum(map(len, groups.values())) for name, groups in LISTS.items()}
    for names in (["first"], ["surname"], ["org"], ["loc"], ["adj_positive", "adj_negative"], ["adj_neutral", "state"]):
        assert sum(sizes[name] for name in names) >= 60, names
    for name, groups in LISTS.items():
        words = [word for group in groups.values() for word in group]
        assert len(words) == len(set(words)), name
    assert len({clause for clauses in TEMPLATES.values() for clause in clauses}) >= 60


def test_every_drawn_verb_shows_its_form():
    """One such as `read` would stay right where a form is to be wrong: `he read it`, `she has read it`."""
    lists = [words for name, groups in LISTS.items() if "verb_" in name for words in groups.values()]
    verbs = [verb for words in lists for verb in words]
    assert [verb for verb in verbs if verb.split("/")[0] in verb.split("/")[2:4]] == []


def test_every_template_is_used(monkeypatch):
    used = []
    frame = templates.Writer._frame
    monkeypatch.setattr(templates.Writer, "_frame", lambda self, clause: used.append(clause) or frame(self, clause))
    demo.corpus()
    assert set(used) == {clause for kind in ("polar", "negated", "neutral") for clause in TEMPLATES[kind]}


@pytest.mark.parametrize("kind", sorted(FAULTS))
def test_fault_changes_every_sentence_it_is_offered(kind):
    writer = templates.Writer(random.Random(0), "train")
    made = 0
    for i in range(300):
        tokens = writer.sentence(demo.SENTIMENTS[i % 3])
        for broken in FAULTS[kind](tokens):
            made += 1
            assert [token.word for token in broken] != [token.word for token in tokens]
            assert [t.word for t in broken if t.tag != "O"] == [t.word for t in tokens if t.tag != "O"]
            assert [t for t in tokens if t.keep and t.word not in [b.word for b in broken]] == [] or len(broken) == len(
                tokens
            )
    assert made >= 5


@pytest.mark.parametrize(
    ("kind", "sentence", "broken"),
    [
        ("agreement", "the keys/s in the box/n were/f here", ["the keys in the box was here"]),
        ("agreement", "guests/s open/f it", ["guests opens it"]),
        (
            "form",
            "she/r did not praise/v it",
            ["she did not praises it", "she did not praised it", "she did not praising it"],
        ),
        ("form", "she/r praised/p it", ["she praising it"]),
        ("form", "she/r has/f seen/v it", ["she has see it", "she has sees it"]),
        ("no verb", "the room/n was/f clean/j", ["the room clean"]),
        ("no verb", "she/r has/f praised/v it", []),
        ("no determiner", "a clean/j room/n and the rooms/s", ["clean room and the rooms"]),
        ("double determiner", "the room/n", ["the this room"]),
        ("double determiner", "every room/n", ["every the room"]),
        (
            "number",
            "two/num hotels/s and a small/j hotel/n",
            ["two hotels and a small hotels", "two hotel and a small hotel"],
        ),
        ("number", "the hotel/n", []),
        ("order", "the room/n", ["room the"]),
        ("order", "clean/j rooms/s", ["rooms clean"]),
        ("order", "she/r was/f never/adv here", []),
        ("case", "she/r was/f here", ["her was here"]),
        ("double comparative", "it is/f better/c", ["it is more better"]),
    ],
)
def test_faults(kind, sentence, broken):
    tokens = [Token(word, role=role) for word, _, role in (piece.partition("/") for piece in sentence.split())]
    assert [" ".join(token.word for token in made) for made in FAULTS[kind](tokens)] == broken


def test_agreement_is_left_alone_after_a_company():
    assert FAULTS["agreement"]([Token("Acme", tag="B-ORG"), Token("has", role="f")]) == []


def test_order_keeps_entities_whole():
    tokens = [
        Token("saw", role="p"),
        Token("Cape", tag="B-LOC"),
        Token("Town", tag="I-LOC"),
    ]
    assert FAULTS["order"](tokens) == []


def test_a_and_an():
    tokens = [Token(word) for word in re.findall(r"\w+", "a apple a useful a hour a ugly a Ukrainian a Irish a hotel")]
    text = templates.row_of(tokens, "neutral", "acceptable")["text"]
    assert text == "An apple a useful an hour an ugly a Ukrainian an Irish a hotel"


def test_seed_decides(parts):
    assert demo.corpus(seed=0, sentences=SENTENCES) == parts
    assert demo.corpus(seed=1, sentences=SENTENCES)["train"] != parts["train"]


def test_same_corpus_in_every_process():
    code = "import json; from lamina.demo import corpus as demo; print(json.dumps(demo.corpus(rows=60)))"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}  # this process has a random one
    made = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout
    assert json.loads(made) == demo.corpus(rows=60)


@pytest.mark.parametrize(
    ("names", "tags"),
    [
        ((("City Hall", "ORG"), ("New York City", "LOC")), "O B-LOC I-LOC I-LOC O O"),
        ((("New York", "LOC"), ("York City Hall", "ORG")), "O O B-ORG I-ORG I-ORG O"),
        ((("York", "PER"), ("New York City", "LOC"), ("Hall", "ORG")), "O B-LOC I-LOC I-LOC B-ORG O"),
    ],
)
def test_the_longer_of_overlapping_entities_wins(names, tags):
    pair = demo.Pair("Near New York City Hall.", "Near New York City Hall.", "form", "neutral", names)
    assert [row["tags"] for row in pair.rows()] == [tags.split()] * 2


def test_too_few_rows():
    with pytest.raises(ConfigError, match=r"demo corpus: rows is 47; .* Give at least 48\."):
        demo.corpus(rows=47)


def test_no_rows_are_not_the_usual_number_of_rows(tmp_path):
    with pytest.raises(ConfigError, match="demo corpus: rows is 0;"):
        run_demo(tmp_path, rows=0)


def test_write(tmp_path):
    paths = demo.write(tmp_path / "new" / "demo", seed=3, rows=60)
    assert {part: path.name for part, path in paths.items()} == {part: f"{part}.jsonl" for part in demo.SPLITS}
    read = {part: [json.loads(line) for line in path.read_text("utf-8").splitlines()] for part, path in paths.items()}
    assert read == demo.corpus(seed=3, rows=60)
    assert sorted(path.name for path in (tmp_path / "new" / "demo").iterdir()) == sorted(p.name for p in paths.values())


def test_write_leaves_the_old_file_when_it_fails(tmp_path, monkeypatch):
    path = demo.write(tmp_path, rows=60)["train"]
    before = path.read_text("utf-8")

    def fail(self, target):
        raise OSError("disk full")

    monkeypatch.setattr(demo.Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        demo.write(tmp_path, seed=9, rows=60)
    assert path.read_text("utf-8") == before
    assert len(list(tmp_path.iterdir())) == 3
