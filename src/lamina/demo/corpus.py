"""Make the demo corpus: short sentences with a sentiment, a judgement of their grammar, and tagged entities.

All three labels belong to the same sentences, so that three readers can be trained in one pass. Names, organisations
and places of the test split occur in no other split, and some other words are reserved for the test split: a reader
that only memorised words fails there.

Sentences come from templates, and from a file of handwritten pairs if one is given. An unacceptable sentence has one
grammar fault; a strange meaning is not a fault. Both sentences of a handwritten pair are in the same split.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from lamina.demo.templates import Sentence, Token, Writer, data, held_out_names, row_of, verb_forms, words, words_of
from lamina.errors import ConfigError, DataError, first_line
from lamina.utils import no_pipe, write_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence, Set

COLUMNS = ("good", "broken", "fault", "sentiment", "names")
_PUNCTUATION = re.compile(r"[.,!?;:](?=[\s.,!?;:]|$)")  # at the end of a word


@dataclass(frozen=True)
class Pair:
    """One line of the file of handwritten sentences: an acceptable sentence, and the same sentence with a fault.

    Args:
        good: An acceptable sentence.
        broken: The same sentence with one fault.
        fault: Type of the fault: "agreement", "form", "number", "determiner", "order", "missing", "case",
            "comparison", "extra" or "word".
        sentiment: Sentiment of both sentences: "negative", "neutral" or "positive".
        names: Text and type (PER, ORG, LOC, MISC) of each entity. Both sentences contain them all.
    """

    good: str
    broken: str
    fault: str
    sentiment: str
    names: tuple[tuple[str, str], ...]

    def rows(self) -> list[Sentence]:
        """Return both sentences as rows of the corpus, the acceptable one first."""
        return [self._row(self.good, "acceptable"), self._row(self.broken, "unacceptable")]

    def words(self) -> set[str]:
        """Return the lower-case words of both sentences."""
        return words_of(f"{self.good} {self.broken}")

    def _row(self, text: str, acceptability: str) -> Sentence:
        words, tags = _tag_words(text, self.names)
        return Sentence(
            text=" ".join(words), words=words, tags=tags, sentiment=self.sentiment, acceptability=acceptability
        )


def read_pairs(path: Path) -> tuple[Pair, ...]:
    """Read all pairs of a tab-separated file with the columns good, broken, fault, sentiment and names.

    The first line, a header, is skipped. Raises DataError if the file cannot be read or has no pairs, or a line does
    not have five columns, or has an unknown sentiment or type of entity.
    """
    try:
        lines = no_pipe(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise DataError(f"demo: {path} cannot be read ({first_line(error)}). Check --sentences.") from None
    pairs = []
    for number, line in enumerate(lines[1:], start=2):
        if len(columns := line.split("\t")) != len(COLUMNS):
            got = f"it has {len(columns)} columns; {', '.join(COLUMNS)} are needed"
            raise DataError(f"demo: {path}, line {number}: {got}.")
        good, broken, fault, sentiment, listed = columns
        entities = [name.rpartition("=") for name in listed.split(";") if name]  # such as "Anna=PER;Rosa's=ORG"
        pair = Pair(good, broken, fault, sentiment, tuple((name, kind) for name, _, kind in entities))
        if pair.sentiment not in SENTIMENTS or not {f"B-{kind}" for _, kind in pair.names} <= {*TAGS}:
            rule = "a sentiment is negative, neutral or positive, and names are as in Anna=PER;Oslo=LOC"
            raise DataError(f"demo: {path}, line {number}: it ends in {columns[3:]}; {rule} (or ORG, MISC).")
        pairs.append(pair)
    if not pairs:
        raise DataError(f"demo: {path} has no pairs below its first line, which names the columns. Check --sentences.")
    return tuple(pairs)


def split_pairs(
    pairs: Sequence[Pair], seed: int, sizes: Mapping[str, int], *, elsewhere: Set[str], excluded: Set[str]
) -> dict[str, list[Pair]]:
    """Split pairs into train, validation and test; entities of validation and test occur in no other pair.

    Args:
        pairs: All pairs.
        seed: Seed of the shuffle.
        sizes: Number of pairs for "train", "validation" and "test". A split is smaller if there are not enough pairs.
        elsewhere: Lower-case words of sentences from templates; entities of validation and test contain none of them.
        excluded: Lower-case words; pairs that contain one of them are left out, and so are pairs with a sentence of an
            earlier pair.
    """
    usable: list[Pair] = []
    sentences = set[str]()
    for pair in pairs:
        own = {row["text"].lower() for row in pair.rows()}
        if not pair.words() & excluded and sentences.isdisjoint(own):
            usable.append(pair)
            sentences |= own
    random.Random(f"{seed}/written").shuffle(usable)
    count = Counter(word for pair in usable for word in pair.words())
    named = [pair for pair in usable if pair.names]
    # Only these may go into validation and test: no other pair has a word of their entities.
    names = {pair: words_of(" ".join(name for name, _ in pair.names)) for pair in named}
    unseen = [pair for pair in named if all(count[word] == 1 and word not in elsewhere for word in names[pair])]
    unnamed, share = [pair for pair in usable if not pair.names], len(named) / max(1, len(usable))
    splits: dict[str, list[Pair]] = {}
    for split in ("test", "validation"):
        with_names = round(sizes[split] * share)
        splits[split] = [unseen.pop() for _ in range(min(with_names, len(unseen)))]
        splits[split] += [unnamed.pop() for _ in range(min(sizes[split] - with_names, len(unnamed)))]
    held_out = {pair for pairs in splits.values() for pair in pairs}
    return {"train": [pair for pair in usable if pair not in held_out][: sizes["train"]], **splits}


def _tag_words(text: str, names: tuple[tuple[str, str], ...]) -> tuple[list[str], list[str]]:
    """Split a text into words; return the words, and one IOB2 tag for each.

    Words end at spaces, before punctuation, and at both ends of an entity. `names` are the text and type of each
    entity; if entities overlap, the longer one wins.
    """
    spans: list[tuple[int, int, str]] = []
    for name, entity_type in sorted(names, key=lambda name: -len(name[0])):
        for start, end in (match.span() for match in re.finditer(rf"(?<!\w){re.escape(name)}(?!\w)", text)):
            if all(end <= first or last <= start for first, last, _ in spans):
                spans.append((start, end, entity_type))
    cuts = {edge for start, end, _ in spans for edge in (start, end)}
    cuts |= {mark.start() for mark in _PUNCTUATION.finditer(text)}
    words, tags = [], []
    for chunk in re.finditer(r"\S+", text):
        edges = {*chunk.span(), *(cut for cut in cuts if chunk.start() < cut < chunk.end())}
        for start, end in pairwise(sorted(edges)):
            entity = next(((first, name) for first, last, name in spans if first <= start and end <= last), None)
            words.append(text[start:end])
            tags.append("O" if entity is None else f"{'B' if entity[0] == start else 'I'}-{entity[1]}")
    return words, tags


SPLITS = ("train", "validation", "test")
SENTIMENTS = ("negative", "neutral", "positive")
ACCEPTABILITY = ("unacceptable", "acceptable")
TAGS = ("O", "B-LOC", "I-LOC", "B-MISC", "I-MISC", "B-ORG", "I-ORG", "B-PER", "I-PER")
MIN_ROWS = 48
MAX_HELD_OUT = 1000  # rows of the validation split, and of the test split
WRITTEN_SHARE = 0.8  # share of handwritten sentences in each split, while there are enough
AGREEMENT = {"is": "are", "was": "were", "has": "have", "does": "do"}
CASES = {"I": "me", "he": "him", "she": "her", "they": "them", "we": "us"}
DETERMINERS = ("a", "the", "this", "every", "our", "my")


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
        DataError: As in `read_pairs`.
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
    """Write the demo corpus as `train.jsonl`, `validation.jsonl` and `test.jsonl` into `folder`, which is created.

    The other parameters and errors are those of `corpus`. Each file is replaced whole or not at all.

    Returns:
        Split -> path of its file.

    Raises:
        StoreError: If a file cannot be written.
    """
    splits = corpus(seed, rows, sentences=sentences)
    paths = {split: Path(folder) / f"{split}.jsonl" for split in SPLITS}
    for split, path in paths.items():
        write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in splits[split]))
    return paths


def _fill_split(split: str, size: int, seed: int, written: list[Sentence], texts: set[str]) -> list[Sentence]:
    """Return a split's `size` rows in random order: the handwritten ones (`written`), and sentences from templates.

    The seed and the split's name decide the sentences. No text occurs twice: `texts` has every lower-case text used so
    far, and the new texts are added to it.
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


def corrupt(tokens: list[Token], rng: random.Random) -> list[Token]:
    """Return the sentence with one random fault (drawn with `rng`), of a type that the sentence has a place for."""
    names = list(FAULTS)
    rng.shuffle(names)
    options = next(options for name in names if (options := FAULTS[name](tokens)))
    return rng.choice(options)


def _replaced(tokens: list[Token], i: int, words: Sequence[str]) -> list[list[Token]]:
    return [[*tokens[:i], replace(tokens[i], word=word), *tokens[i + 1 :]] for word in words]


def _wrong_agreement(tokens: list[Token]) -> list[list[Token]]:
    """Return variants of a sentence in which one verb has the wrong number: `the keys is here`.

    Verbs after a company's name, where both numbers are correct, are skipped.
    """
    flips = AGREEMENT | {plural: singular for singular, plural in AGREEMENT.items()}
    sentences = []
    for i, token in enumerate(tokens[1:], start=1):
        if token.role == "f" and not tokens[i - 1].tag.endswith("ORG"):
            forms = verb_forms().get(token.word, [token.word] * 2)
            other = flips.get(token.word) or forms[0 if token.word == forms[1] else 1]
            sentences += _replaced(tokens, i, [other])
    return sentences


def _wrong_form(tokens: list[Token]) -> list[list[Token]]:
    """Return variants in which one verb has the wrong form: `did not praised`, `has see`, `she praising the film`."""
    sentences = []
    for i, token in enumerate(tokens):
        if token.role == "p":
            sentences += _replaced(tokens, i, [verb_forms()[token.word][4]])
        elif token.role == "v":
            base, third, past, _, ing = verb_forms()[token.word]
            wrong = (third, past, ing) if token.word == base else (base, third)
            sentences += _replaced(tokens, i, wrong)
    return sentences


def _no_verb(tokens: list[Token]) -> list[list[Token]]:
    """Return variants of a sentence that each lack one verb: `the room very clean`.

    Auxiliaries, the verbs after them, and verbs on which the sentiment depends stay.
    """
    # "the guests have praised it" is correct without "have"
    helps = [any(after.role == "v" for after in tokens[i + 1 : i + 3]) for i in range(len(tokens))]
    places = [i for i, token in enumerate(tokens) if token.role in ("f", "p") and not (helps[i] or token.keep)]
    return [tokens[:i] + tokens[i + 1 :] for i in places]


def _noun_phrases(tokens: list[Token], role: str, starts: Callable[[Token], bool]) -> list[tuple[int, int]]:
    """Return the noun phrases of a sentence, each as the positions of its first token and of its noun.

    A noun phrase is a token for which `starts` returns True, then any adjectives or words of MISC names, then a noun
    with the role `role`.
    """
    phrases = []
    for i, token in enumerate(tokens):
        end = i + 1
        while end < len(tokens) and (tokens[end].role == "j" or tokens[end].tag.endswith("MISC")):
            end += 1
        if starts(token) and end < len(tokens) and tokens[end].role == role:
            phrases.append((i, end))
    return phrases


def _is_determiner(token: Token) -> bool:
    return token.word in DETERMINERS


def _no_determiner(tokens: list[Token]) -> list[list[Token]]:
    """Return variants of a sentence that lack the determiner of one singular noun: `guest praised the room`."""
    return [tokens[:i] + tokens[i + 1 :] for i, _ in _noun_phrases(tokens, "n", _is_determiner)]


def _double_determiner(tokens: list[Token]) -> list[list[Token]]:
    """Return variants of a sentence with a second determiner: `the this room`."""
    places = [i for i, _ in _noun_phrases(tokens, "n", _is_determiner)]
    extra = {i: "this" if tokens[i].word in ("a", "the") else "the" for i in places}
    return [[*tokens[: i + 1], Token(extra[i]), *tokens[i + 1 :]] for i in places]


def _wrong_number(tokens: list[Token]) -> list[list[Token]]:
    """Return variants of a sentence in which one noun has the wrong number: `a hotels`, `these hotel`."""
    singular = _noun_phrases(tokens, "n", lambda token: token.word in ("a", "every", "this"))
    plural = _noun_phrases(tokens, "s", lambda token: token.word == "these" or token.role == "num")
    other = _other_number()
    places = [end for _, end in singular + plural if tokens[end].word in other]
    return [sentence for end in places for sentence in _replaced(tokens, end, [other[tokens[end].word]])]


@cache
def _other_number() -> dict[str, str]:
    """Return a dict from each noun to its other number: singular -> plural, and plural -> singular."""
    words = data()["words"]
    pairs = [
        noun.split("/") for name in ("thing", "job", "kin", "place") for group in words[name].values() for noun in group
    ]
    return dict(pairs) | {plural: singular for singular, plural in pairs}


def _wrong_order(tokens: list[Token]) -> list[list[Token]]:
    """Return variants of a sentence with two words swapped: `room the`, `a room small`, `she the room praised`.

    Entities are not split.
    """
    sentences = []
    for i, (token, after) in enumerate(pairwise(tokens)):
        plain = after.tag == "O" and after.word[0].isalpha() and after.role != "adv"
        moves = token.role in ("f", "p") or (token.role == "j" and after.role in ("n", "s"))
        if plain and (moves or (_is_determiner(token) and after.role in ("n", "j"))):
            sentences.append([*tokens[:i], after, token, *tokens[i + 2 :]])
    return sentences


def _wrong_case(tokens: list[Token]) -> list[list[Token]]:
    """Return variants of a sentence in which one subject has the wrong case: `him praised the room`."""
    places = [i for i, token in enumerate(tokens) if token.role == "r"]
    return [sentence for i in places for sentence in _replaced(tokens, i, [CASES[tokens[i].word]])]


def _double_comparative(tokens: list[Token]) -> list[list[Token]]:
    """Return variants of a sentence with a doubled comparative: `more better`."""
    places = [i for i, token in enumerate(tokens) if token.role == "c"]
    return [[*tokens[:i], Token("more"), *tokens[i:]] for i in places]


FAULTS: dict[str, Callable[[list[Token]], list[list[Token]]]] = {
    "agreement": _wrong_agreement,
    "form": _wrong_form,
    "no verb": _no_verb,
    "no determiner": _no_determiner,
    "double determiner": _double_determiner,
    "number": _wrong_number,
    "order": _wrong_order,
    "case": _wrong_case,
    "double comparative": _double_comparative,
}
