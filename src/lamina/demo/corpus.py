"""Make the demo corpus: short sentences with a sentiment, a judgement of their grammar, and tagged entities.

All three labels belong to the same sentences, so that three readers can be trained in one pass. Names, organisations
and places of the test split occur in no other split, and some other words are reserved for the test split: a reader
that only memorised words fails there. The meaning of some words depends on the sentence: Jordan and Washington are
people and places, Amazon is a company and a river, and `not bad` is positive.

Sentences come from templates, and from a file of handwritten pairs if one is given. An unacceptable sentence has one
grammar fault; a strange meaning is no fault. Both sentences of a handwritten pair are in the same split.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from lamina.demo.faults import corrupt
from lamina.demo.sentences import read_pairs, split_pairs
from lamina.demo.templates import Sentence, Writer, held_out_names, row_of, words
from lamina.errors import ConfigError
from lamina.utils import write_text

SPLITS = ("train", "validation", "test")
SENTIMENTS = ("negative", "neutral", "positive")
ACCEPTABILITY = ("unacceptable", "acceptable")
TAGS = ("O", "B-LOC", "I-LOC", "B-MISC", "I-MISC", "B-ORG", "I-ORG", "B-PER", "I-PER")

MIN_ROWS = 48
MAX_HELD_OUT = 1000  # rows of the validation split, and of the test split
WRITTEN_SHARE = 0.8  # share of handwritten sentences in each split, while there are enough


def corpus(seed: int = 0, rows: int = 3000, *, sentences: Path | str | None = None) -> dict[str, list[Sentence]]:
    """Make the demo corpus in memory.

    Args:
        seed: Seed of the corpus. The same seed gives the same corpus on every machine.
        rows: Number of sentences in all three splits together. An eighth goes to validation and an eighth to test, at
            most 1,000 each.
        sentences: File of handwritten pairs, such as `examples/data/demo-sentences.tsv` of the repository. They make up
            80 % of each split while there are enough. None: all sentences come from templates.

    Returns:
        The rows of "train", "validation" and "test". All combinations of sentiment and acceptability are about equally
        frequent, and no text occurs twice.

    Raises:
        ConfigError: If `rows` is less than 48.
        DataError: If the file of pairs cannot be read.
    """
    if rows < MIN_ROWS:
        raise ConfigError(f"demo corpus: rows is {rows}; each split needs a few rows. Give at least {MIN_ROWS}.")
    held_out = min(rows // 8, MAX_HELD_OUT)
    sizes = {"train": rows - 2 * held_out, "validation": held_out, "test": held_out}
    written: dict[str, list[Sentence]] = {split: [] for split in SPLITS}
    if sentences is not None:
        pairs = split_pairs(
            read_pairs(Path(sentences)),
            seed,
            {split: int(size * WRITTEN_SHARE / 2) for split, size in sizes.items()},
            elsewhere=words(),
            excluded=held_out_names(),
        )
        written = {split: [row for pair in pairs[split] for row in pair.rows()] for split in SPLITS}
    texts = {row["text"].lower() for split in SPLITS for row in written[split]}
    return {split: _fill_split(split, sizes[split], seed, written[split], texts) for split in SPLITS}


def write(
    folder: Path | str, *, seed: int = 0, rows: int = 3000, sentences: Path | str | None = None
) -> dict[str, Path]:
    """Write the demo corpus as `train.jsonl`, `validation.jsonl` and `test.jsonl` into `folder`.

    The other parameters are those of `corpus`. A file that cannot be written completely is not written at all.

    Returns:
        Split -> path of its file.

    Raises:
        ConfigError: If `rows` is less than 48.
        DataError: If the file of pairs cannot be read.
    """
    splits = corpus(seed, rows, sentences=sentences)
    folder = Path(folder)
    return {split: _write_lines(folder / f"{split}.jsonl", splits[split]) for split in SPLITS}


def _write_lines(path: Path, rows: list[Sentence]) -> Path:
    """Write rows as JSON lines and return the path."""
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def _fill_split(split: str, size: int, seed: int, written: list[Sentence], texts: set[str]) -> list[Sentence]:
    """Add sentences from templates to the handwritten ones until a split has `size` rows, and shuffle them.

    `texts` has every lower-case text used so far; the new texts are added to it.
    """
    rng = random.Random(f"{seed}/{split}")
    writer = Writer(rng, split)
    labels = [(sentiment, acceptability) for sentiment in SENTIMENTS for acceptability in ACCEPTABILITY]
    rows = list(written)
    while len(rows) < size:
        sentiment, acceptability = labels[len(rows) % len(labels)]
        tokens = writer.sentence(sentiment)
        row = row_of(tokens if acceptability == "acceptable" else corrupt(tokens, rng), sentiment, acceptability)
        if row["text"].lower() not in texts:
            texts.add(row["text"].lower())
            rows.append(row)
    rng.shuffle(rows)
    return rows
