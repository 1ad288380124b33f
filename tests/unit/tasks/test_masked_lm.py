"""Hidden tokens: how many, which, what takes their places, how they are scored, and what fills the gaps of a text."""

from __future__ import annotations

import copy
import math
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.encoded import features
from tests.support.files import jsonl, put

from lamina.errors import ConfigError, DataError, UnknownNameError
from lamina.tasks import kind_of
from lamina.tasks.base import EncodeOptions
from lamina.tasks.language_modeling import best_tokens
from lamina.tasks.masked_lm import Masking, mask_token
from lamina.tasks.split import Split
from lamina.tasks.task import Task

if TYPE_CHECKING:
    from pathlib import Path

KIND = kind_of("masked_lm")
TEXT = "\n".join(["", " = One = ", " ", *(f" Line {i} . " for i in range(39))])
TASK = Task(kind_of("masked_lm"), "classification", ("token",), "perplexity", ("perplexity", "accuracy"), {}, "it")
MASKING = Masking(token=4, special=frozenset({0, 1, 2, 3, 4}), vocabulary=1000)


@given(st.lists(st.integers(0, 999), max_size=80), st.integers(0, 2**62))
@settings(deadline=None)
def test_what_is_hidden_can_be_told_from_the_labels(ids: list[int], seed: int):
    read, labels = MASKING.hide(ids, seed)
    assert len(read) == len(labels) == len(ids)
    ordinary = [one for one in ids if one not in MASKING.special]
    chosen = [at for at, label in enumerate(labels) if label != -100]
    assert len(chosen) == (max(1, round(0.15 * len(ordinary))) if ordinary else 0)
    assert all(labels[at] == ids[at] and ids[at] not in MASKING.special for at in chosen)
    assert all(read[at] == ids[at] for at in range(len(ids)) if at not in chosen)
    assert (read, labels) == MASKING.hide(ids, seed)


def test_eight_in_ten_become_the_mask_one_another_token_and_one_stays():
    ids = [5 + at % 900 for at in range(2000)]
    kinds: Counter[str] = Counter()
    others: set[int] = set()
    where: Counter[int] = Counter()
    for seed in range(100):
        read, labels = MASKING.hide(ids, seed)
        for at, label in enumerate(labels):
            if label != -100:
                kind = "mask" if read[at] == 4 else "same" if read[at] == ids[at] else "other"
                kinds[kind] += 1
                where[at] += 1
                others |= {read[at]} if kind == "other" else set()
    assert kinds.total() == 100 * 300
    assert kinds["mask"] / kinds.total() == pytest.approx(0.8, abs=0.02)
    assert kinds["other"] / kinds.total() == pytest.approx(0.1, abs=0.01)
    assert kinds["same"] / kinds.total() == pytest.approx(0.1, abs=0.01)
    assert len(others) > 900  # of 1000: drawn from the whole vocabulary
    assert len(where) == 2000


def test_another_seed_hides_others():
    ids = list(range(5, 205))
    assert MASKING.hide(ids, 0)[1] != MASKING.hide(ids, 1)[1]


def test_what_a_tokenizer_says(minilm):
    masking = Masking.of(minilm)
    assert (masking.token, masking.vocabulary) == (103, 30522)
    assert masking.special == {0, 100, 101, 102, 103}
    assert mask_token(minilm) == "[MASK]"


def test_a_tokenizer_without_a_mask_token(byte_level):
    with pytest.raises(ConfigError, match="masked_lm: the tokenizer has no mask token"):
        Masking.of(byte_level)


# From files


def test_plain_text_is_read_line_by_line(tmp_path: Path):
    train = put(tmp_path / "some.txt", TEXT)
    task = Task.from_files("masked_lm", train=train)
    assert (task.kind, task.problem_type, task.labels, task.name) == ("masked_lm", "classification", ("token",), "some")
    assert (task.metric, task.metrics) == ("perplexity", ("perplexity", "accuracy"))
    assert task.split("train").texts == (" = One = ", *(f" Line {i} . " for i in range(35)))
    assert task.split("train").labels == (None,) * 36


def test_the_last_tenth_of_a_text_validates(tmp_path: Path):
    """Its lines belong together: those set aside are one piece, whatever the seed."""
    train = put(tmp_path / "some.txt", TEXT)
    for seed in (0, 1):
        task = Task.from_files("masked_lm", train=train, seed=seed)
        assert task.split("validation").texts == tuple(f" Line {i} . " for i in range(35, 39))


@pytest.mark.parametrize(("column", "given"), [("text", {}), ("sentence", {}), ("body", {"text": "body"})])
def test_running_text_may_stand_in_a_column(tmp_path: Path, column: str, given: dict[str, str]):
    path = jsonl(tmp_path / "t.jsonl", [{column: "one\n"}, {column: " \n"}, {column: "two"}])
    assert Task.from_files("masked_lm", test=path, **given).split("test").texts == ("one", "two")


def test_running_text_has_no_labels_and_no_pairs(tmp_path: Path):
    path = put(tmp_path / "t.txt", "a\nb\n")
    with pytest.raises(ConfigError, match="labels are x, y; a task of kind masked_lm has the texts' own tokens"):
        Task.from_files("masked_lm", train=path, labels=("x", "y"))
    with pytest.raises(ConfigError, match="text_pair is 'b'; a task of kind masked_lm reads one text per row"):
        Task.from_files("masked_lm", train=path, text_pair="b")
    with pytest.raises(UnknownNameError, match="unknown metric 'f1'; known: perplexity, accuracy"):
        Task.from_files("masked_lm", train=path, metric="f1")


def test_blank_lines_alone_are_no_text(tmp_path: Path):
    with pytest.raises(DataError, match="is empty; a task needs at least one row"):
        Task.from_files("masked_lm", train=put(tmp_path / "t.txt", "\n \n\t\n"))


# From examples to scores

TEXTS = ["the film is good and", "anna was in paris .", "the film is bad", "a good film and a bad film"] * 3


def encoded(words: Any, part: str = "train", texts: list[str] = TEXTS, **options: Any) -> Any:
    return KIND.encode(Split.of(texts), words, EncodeOptions(part=part, max_length=8, **options))


def test_blocks_are_read_with_hidden_tokens(words: Any):
    inputs = encoded(words)
    rows = [0, 3, 1]
    batch = inputs.batch(rows, epoch=2)
    assert set(batch) == {"input_ids", "token_type_ids", "attention_mask", "labels"}
    assert batch["labels"].shape == batch["input_ids"].shape == (3, 8)
    hidden = batch["labels"] != -100
    assert hidden.any(1).all()
    restored = torch.where(hidden, batch["labels"], batch["input_ids"])
    assert restored.tolist() == [features(inputs.encoded)[row]["input_ids"] for row in rows]
    assert KIND.targets(TASK, Split.of(TEXTS), inputs) is None
    assert inputs.uncacheable == "the texts are masked anew in each epoch"


def test_what_is_hidden_depends_on_row_epoch_and_seed_alone(words: Any):
    inputs = encoded(words, seed=1)

    def labels(rows: list[int], epoch: int, some: Any = inputs) -> Any:
        return some.batch(rows, epoch=epoch)["labels"].tolist()

    assert labels([3, 1], 0)[1] == labels([1], 0)[0] == labels([1, 0, 2], 0)[0]
    everything = list(range(len(inputs.lengths)))
    assert labels(everything, 0) == labels(everything, 0, encoded(words, seed=1))
    assert labels(everything, 0) != labels(everything, 1)
    assert labels(everything, 0) != labels(everything, 0, encoded(words, seed=2))


def test_the_same_is_hidden_in_every_validation(words: Any):
    one, two = (encoded(words, "validation", seed=seed) for seed in (1, 2))
    rows = range(len(one.lengths))
    assert torch.equal(one.batch(rows, epoch=0)["labels"], two.batch(rows, epoch=5)["labels"])
    test = encoded(words, "test")
    assert not torch.equal(one.batch(rows)["labels"], test.batch(rows)["labels"])


def test_the_last_block_is_padded(words: Any):
    inputs = encoded(words, texts=["the film is good and very bad"])
    assert list(inputs.lengths) == [8, 1]
    batch = inputs.batch([0, 1])
    assert batch["input_ids"][1].tolist() == [3, *[0] * 7]
    assert batch["labels"][1].tolist() == [-100] * 8  # a special token is never hidden
    assert batch["attention_mask"][1].tolist() == [1, *[0] * 7]


def test_scores_are_those_of_hidden_tokens(words: Any):
    inputs = encoded(words, "validation")
    whole, hidden = KIND.results(TASK, Split.of(TEXTS), inputs), KIND.results(TASK, Split.of(TEXTS), inputs)
    for row in range(len(inputs.lengths)):
        labels = inputs.batch([row])["labels"]
        logits = torch.randn(1, labels.shape[1], len(words))
        whole.add([row], logits, labels)
        hidden.add([row], logits[labels != -100], labels)
    scores = whole.scores(("accuracy", "perplexity"))
    assert scores == hidden.scores(("accuracy", "perplexity"))
    assert scores["perplexity"] > 1
    assert (whole.per_class(), whole.predictions()) == ([], [])
    with pytest.raises(ConfigError, match="metrics: no labels for 2 rows"):
        whole.add([0, 1], torch.zeros(2, 8, len(words)))


def test_batches_leave_room_for_a_score_per_token(words: Any):
    inputs = encoded(words)
    assert KIND.batch_size(32, inputs, 30_000) == 32
    assert KIND.batch_size(1024, inputs, 1 << 20) == 16  # rows x 8 tokens x a million scores: 2 ** 27
    assert KIND.batch_size(4, inputs, 1 << 40) == 1


def test_a_model_reads_blocks_not_rows():
    assert KIND.model_rows(1000, 70.4, 128, None) == (550, 128)
    assert KIND.model_rows(2, 10, 512, None) == (1, 20)
    assert math.prod(kind_of("sequence_classification").model_rows(1000, 70.4, 64, None)) == 64_000


# Filling masks


def filled(words: Any, texts: list[str], rule: Any, max_length: int = 8) -> list[Any]:
    split = KIND.examples(texts, words)
    inputs = KIND.encode(split, words, EncodeOptions(part="predict", max_length=max_length))
    results = KIND.answers(TASK, split, inputs, words)
    for row in range(len(inputs.lengths)):
        ids = inputs.batch([row])["input_ids"]
        logits = torch.zeros(*ids.shape, len(words))
        rule(ids, logits)
        results.add([row], logits)
    assert (results.scores(()), results.per_class()) == ({}, [])
    return results.predictions()


def neighbours(ids: torch.Tensor, logits: torch.Tensor) -> None:
    """The token before a mask is the likeliest, the one behind it the next."""
    for at in range(1, ids.shape[1] - 1):
        logits[0, at, ids[0, at - 1]] = 6.0
        logits[0, at, ids[0, at + 1]] = 5.0


@pytest.mark.parametrize("max_length", [8, 32])
def test_mask_tokens_are_filled_in(words: Any, max_length: int):
    texts = ["anna [MASK] paris", "no mask", "the film is good [MASK] and very bad [MASK] paris ."]
    one, none, two = filled(words, texts, neighbours, max_length)
    assert none == []
    assert [(gap["start"], gap["end"]) for gap in two] == [(17, 23), (37, 43)]
    assert [[best["token"] for best in gap["candidates"][:2]] for gap in [*one, *two]] == [
        ["anna", "paris"],
        ["good", "and"],
        ["bad", "paris"],
    ]
    assert all(len(gap["candidates"]) == 5 for gap in [*one, *two])
    weights = torch.zeros(len(words))
    weights[0], weights[1] = 6.0, 5.0
    expected = weights.softmax(-1)[:2].tolist()
    assert [best["score"] for best in one[0]["candidates"][:2]] == pytest.approx(expected, abs=1e-6)


def test_masks_are_found_as_they_are_written(words: Any):
    split = KIND.examples(["a [MASK] b[MASK].[mask]", "a"], words)
    assert split.words == (((2, 8), (10, 16)), ())


def test_a_small_vocabulary_has_fewer_candidates():
    assert best_tokens(torch.zeros(1, 3, dtype=torch.bfloat16)).shape == (1, 3, 2)


def test_predicting_needs_a_mask_token(byte_level: Any):
    with pytest.raises(ConfigError, match="masked_lm: the tokenizer has no mask token"):
        KIND.examples(["a"], byte_level)
    with pytest.raises(ConfigError, match="masked_lm: the tokenizer has no mask token"):
        KIND.encode(Split.of(["a"]), byte_level, EncodeOptions(part="train", max_length=8))
    with pytest.raises(ConfigError, match="task: the processor is a int; texts need a tokenizer"):
        KIND.encode(Split.of(["a"]), 3, EncodeOptions(part="train", max_length=8))


def test_the_tokenizer_may_be_part_of_a_processor(words: Any):
    class Processor:
        tokenizer = copy.deepcopy(words)

    assert torch.equal(encoded(Processor()).batch([0, 1])["labels"], encoded(words).batch([0, 1])["labels"])
