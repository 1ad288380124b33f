"""The demo corpus: sentences with three labels each, some written one by one and some made from templates.

Every sentence carries a sentiment, a judgement of its grammar and the entities in it, so that
three readers can be trained over the same texts. Names, organisations and places of the test
part occur in no other part, and a share of the templates' other words neither: a reader that
has only learnt words by heart fails there. Which sense a word has is left to the sentence:
Jordan and Washington are people and places, Amazon a company and a river, and `not bad` is positive.

A sentence is unacceptable because its grammar is broken in one place; an odd meaning is no fault.
What was written one by one comes in pairs, an acceptable sentence and its broken twin, in one part.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from lamina.demo import sentences
from lamina.demo.faults import corrupt
from lamina.demo.templates import Writer, held_out_names, row_of, words
from lamina.errors import ConfigError
from lamina.utils import write_text

PARTS = ("train", "validation", "test")
SENTIMENTS = ("negative", "neutral", "positive")
ACCEPTABILITY = ("unacceptable", "acceptable")
TAGS = ("O", "B-LOC", "I-LOC", "B-MISC", "I-MISC", "B-ORG", "I-ORG", "B-PER", "I-PER")

MIN_ROWS = 48
MOST_HELD_OUT = 1000  # rows of validation and of test, at most
WRITTEN_SHARE = 0.8  # of each part, while there are sentences written one by one


def corpus(seed: int = 0, rows: int = 3000) -> dict[str, list[dict[str, Any]]]:
    """Make the demo corpus.

    Args:
        seed: The same seed gives the same corpus on every machine.
        rows: Rows in all three parts together; an eighth each for validation and test, 1,000 at most.

    Returns:
        `train`, `validation` and `test`, each a list of rows with `words`, `text` (the words joined
        by spaces), `tags` (IOB2 over PER, ORG, LOC and MISC), `sentiment` (negative, neutral or
        positive) and `acceptability` (acceptable or unacceptable). Every pair of the two sentence
        labels is about as frequent as the others, and no text occurs twice.

    Raises:
        ConfigError: If `rows` is less than 48.
    """
    if rows < MIN_ROWS:
        raise ConfigError(f"demo corpus: rows is {rows}; each part needs a few rows. Give at least {MIN_ROWS}.")
    held_out = min(rows // 8, MOST_HELD_OUT)
    sizes = {"train": rows - 2 * held_out, "validation": held_out, "test": held_out}
    pairs = sentences.split(
        seed,
        {part: int(size * WRITTEN_SHARE / 2) for part, size in sizes.items()},
        elsewhere=words(),
        kept_back=held_out_names(),
    )
    written = {part: [row for pair in pairs[part] for row in pair.rows()] for part in PARTS}
    seen = {row["text"].lower() for rows in written.values() for row in rows}
    return {part: _part(part, sizes[part], seed, written[part], seen) for part in PARTS}


def write(folder: Path | str, *, seed: int = 0, rows: int = 3000) -> dict[str, Path]:
    """Write the corpus as `train.jsonl`, `validation.jsonl` and `test.jsonl` into `folder`.

    Each file appears whole or not at all. `seed` and `rows` are those of `corpus`.

    Returns:
        The path of each part's file.

    Raises:
        ConfigError: If `rows` is less than 48.
    """
    parts = corpus(seed, rows)
    folder = Path(folder)
    return {part: _write_lines(folder / f"{part}.jsonl", parts[part]) for part in PARTS}


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def _part(part: str, size: int, seed: int, written: list[dict[str, Any]], seen: set[str]) -> list[dict[str, Any]]:
    """What was written one by one, and as many sentences from templates as make up the size."""
    rng = random.Random(f"{seed}/{part}")
    writer = Writer(rng, part)
    labels = [(sentiment, judgement) for sentiment in SENTIMENTS for judgement in ACCEPTABILITY]
    rows = list(written)
    while len(rows) < size:
        sentiment, judgement = labels[len(rows) % len(labels)]
        tokens = writer.sentence(sentiment)
        row = row_of(tokens if judgement == "acceptable" else corrupt(tokens, rng), sentiment, judgement)
        if row["text"].lower() not in seen:
            seen.add(row["text"].lower())
            rows.append(row)
    rng.shuffle(rows)
    return rows
