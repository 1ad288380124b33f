"""The demo corpus: sentences made from templates, each with three labels.

Every sentence carries a sentiment, a judgement of its grammar and the entities in it, so that
three readers can be trained over the same texts. Names, organisations and places of the test
part occur in no other part, and a share of its other words neither: a reader that has only
learnt words by heart fails there. Which sense a word has is left to the sentence: Jordan and
Washington are people and places, Amazon a company and a river, and `not bad` is positive.

A sentence is unacceptable because its grammar is broken in one place; an odd meaning is no fault.
"""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamina.errors import ConfigError
from lamina.utils import write_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

PARTS = ("train", "validation", "test")
SENTIMENTS = ("negative", "neutral", "positive")
ACCEPTABILITY = ("unacceptable", "acceptable")
TAGS = ("O", "B-LOC", "I-LOC", "B-MISC", "I-MISC", "B-ORG", "I-ORG", "B-PER", "I-PER")

MIN_ROWS = 48
HELD_OUT_SHARE = 0.5  # of the draws in the test part that come from its own words, where a list has any
NEGATED_SHARE = 0.3  # of the sentences with a sentiment that get it by negation
OPENER_SHARE = TAIL_SHARE = 0.35

OTHER = {"positive": "negative", "negative": "positive"}
AGREEMENT = {"is": "are", "was": "were", "has": "have", "does": "do"}
CASES = {"I": "me", "he": "him", "she": "her", "they": "them", "we": "us"}
DETERMINERS = ("a", "the", "this", "every", "our", "my")
ENTITIES = {"org": "ORG", "team": "ORG", "loc": "LOC", "misc": "MISC"}
ONCE = ("{loc}", "{day}", "{month}")  # an opener or a tail does not repeat these
PRESENT = re.compile(r"\b(?!was/|were/)\w+/f|\.(s|base)}|\bwill\b")  # such a clause takes no "last May"
# Slot of a template -> word list and role. "%" is the polarity that the slot takes.
SLOTS = {
    "adj": ("adj_%", "j"),
    "opposite": ("adj_%", "j"),
    "mild": ("mild_%", "j"),
    "comp": ("comp_%", "c"),
    "adv": ("adv_%", "adv"),
    "neutral": ("adj_neutral", "j"),
    "state": ("state", "j"),
    "fate": ("fate_%", "j"),
    "degree": ("degree", "adv"),
    "day": ("day", ""),
    "month": ("month", ""),
    "number": ("number", "num"),
    "thing": ("thing", "n"),
    "job": ("job", "n"),
    "kin": ("kin", "n"),
    "place": ("place", "n"),
    "like": ("verb_%", ""),
    "mlike": ("mild_verb_%", ""),
    "do": ("verb_neutral", ""),
}
FORMS = {"base": (0, "f"), "s": (1, "f"), "past": (2, "p"), "part": (3, "v"), "ing": (4, "")}


@dataclass(frozen=True)
class Token:
    """One word of a sentence in the making.

    Args:
        word: As written, before the first letter of the sentence becomes a capital.
        tag: IOB2 tag.
        role: `f` finite verb, `p` past verb, `v` verb after another verb, `n` countable noun in the
            singular, `s` one in the plural, `j` adjective, `adv` adverb, `c` comparative, `num` number,
            `r` subject pronoun, or nothing.
        keep: Whether the sentiment rests on this word, so that a fault may bend it but not drop it.
    """

    word: str
    tag: str = "O"
    role: str = ""
    keep: bool = False


def corpus(seed: int = 0, rows: int = 3000) -> dict[str, list[dict[str, Any]]]:
    """Make the demo corpus.

    Args:
        seed: The same seed gives the same corpus on every machine.
        rows: Rows in all three parts together; an eighth each for validation and test.

    Returns:
        `train`, `validation` and `test`, each a list of rows with `words`, `text` (the words joined
        by spaces), `tags` (IOB2 over PER, ORG, LOC and MISC), `sentiment` (negative, neutral or
        positive) and `acceptability` (acceptable or unacceptable). Every pair of the two sentence
        labels is as frequent as the others, and no text occurs twice.

    Raises:
        ConfigError: If `rows` is less than 48.
    """
    if rows < MIN_ROWS:
        raise ConfigError(f"demo corpus: rows is {rows}; each part needs a few rows. Give at least {MIN_ROWS}.")
    held_out = rows // 8
    sizes = {"train": rows - 2 * held_out, "validation": held_out, "test": held_out}
    seen: set[str] = set()
    return {part: _part(part, sizes[part], seed, seen) for part in PARTS}


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


def _part(part: str, size: int, seed: int, seen: set[str]) -> list[dict[str, Any]]:
    rng = random.Random(f"{seed}/{part}")
    writer = _Writer(rng, part)
    labels = [(sentiment, judgement) for sentiment in SENTIMENTS for judgement in ACCEPTABILITY]
    rows: list[dict[str, Any]] = []
    while len(rows) < size:
        sentiment, judgement = labels[len(rows) % len(labels)]
        tokens = writer.sentence(sentiment)
        row = _row(tokens if judgement == "acceptable" else _corrupt(tokens, rng), sentiment, judgement)
        if row["text"] not in seen:
            seen.add(row["text"])
            rows.append(row)
    rng.shuffle(rows)
    return rows


def _row(tokens: list[Token], sentiment: str, judgement: str) -> dict[str, Any]:
    words = [token.word for token in tokens]
    for i, (word, after) in enumerate(pairwise(words)):
        if word == "a" and _takes_an(after):
            words[i] = "an"
    words[0] = words[0][0].upper() + words[0][1:]
    tags = [token.tag for token in tokens]
    return {"text": " ".join(words), "words": words, "tags": tags, "sentiment": sentiment, "acceptability": judgement}


def _takes_an(word: str) -> bool:
    word = word.lower()
    vowel = word[0] in "aeiou" and not word.startswith(("uni", "use", "eu", "ukr", "one"))
    return vowel or word.startswith(("hour", "honest"))


@cache
def _data() -> dict[str, Any]:
    return json.loads(resources.files("lamina.demo").joinpath("words.json").read_text(encoding="utf-8"))


@cache
def _verb_forms() -> dict[str, list[str]]:
    """Any written form of a verb -> base, third person, past, participle, -ing."""
    words = _data()["words"]
    lists = [name for name in words if name == "form" or "verb_" in name]
    verbs = [verb.split("/") for name in lists for group in words[name].values() for verb in group]
    return {form: forms for forms in verbs for form in forms}


class _Writer:
    """Fills templates with the words of one part."""

    def __init__(self, rng: random.Random, part: str) -> None:
        self.rng = rng
        self.part = part
        self.templates: dict[str, list[str]] = _data()["templates"]
        self.used: set[str] = set()  # words drawn for the sentence at hand, none of them twice

    def sentence(self, sentiment: str) -> list[Token]:
        """An acceptable sentence of this sentiment."""
        self.used.clear()
        kind, polarity = "neutral", self.rng.choice(("positive", "negative"))
        if sentiment != "neutral":
            kind, polarity = "polar", sentiment
            if self.rng.random() < NEGATED_SHARE:
                kind, polarity = "negated", OTHER[sentiment]
        template = self._frame(self.rng.choice(self.templates[kind]))
        tokens = [token for piece in template.split() for token in self._fill(piece, polarity)]
        return tokens if template.endswith("!") else [*tokens, Token(".")]

    def _frame(self, clause: str) -> str:
        """The clause, perhaps with something before or after it; a call stands alone."""
        if clause.endswith("!"):
            return clause
        times = "" if PRESENT.search(clause) else "past_"
        for kind, share in (("opener", OPENER_SHARE), ("tail", TAIL_SHARE)):
            if self.rng.random() < share:
                extras = self.templates[kind] + (self.templates[times + kind] if times else [])
                extra = self.rng.choice([t for t in extras if not any(slot in t and slot in clause for slot in ONCE)])
                clause = f"{extra} {clause}" if kind == "opener" else f"{clause} {extra}"
        return clause

    def _fill(self, piece: str, polarity: str) -> list[Token]:
        """The tokens for one piece of a template: `word`, `word/role`, `{slot}`, `{slot.form/role}`."""
        if not piece.startswith("{"):
            word, _, role = piece.partition("/")
            return [Token(word, role=role)]
        name, _, role = piece.strip("{}").partition("/")
        name, _, form = name.partition(".")
        if name == "per":
            return self._person()
        if name == "first":
            return _entity(self._draw("first"), "PER")
        if name == "shop":
            return _entity(self._draw("first") + "'s", "ORG")
        if name in ENTITIES:
            return _entity(self._draw(name), ENTITIES[name])
        return [self._word(name, form, role, polarity)]

    def _word(self, name: str, form: str, role: str, polarity: str) -> Token:
        singular = name.removesuffix("s") if name not in SLOTS else name
        listed, own_role = SLOTS[singular]
        drawn = self._draw(listed.replace("%", OTHER[polarity] if name == "opposite" else polarity))
        forms = drawn.split("/")
        if form:
            column, own_role = FORMS[form]
            return Token(forms[column], role=role or own_role, keep="like" in name)
        return Token(forms[1], role="s") if singular != name else Token(forms[0], role=role or own_role)

    def _person(self) -> list[Token]:
        chance = self.rng.random()
        if chance < 0.15:
            return [Token(self._draw("title")), *_entity(self._draw("surname"), "PER")]
        first = self._draw("first")
        return _entity(first if chance < 0.4 else f"{first} {self._draw('surname')}", "PER")

    def _draw(self, listed: str) -> str:
        groups = _data()["words"][listed]
        if "shared" not in groups:
            choices = groups[self.part]
        else:
            own = self.part == "test" and groups["test"] and self.rng.random() < HELD_OUT_SHARE
            choices = groups["test" if own else "shared"]
        drawn = self.rng.choice([word for word in choices if word not in self.used] or choices)
        self.used.add(drawn)
        return drawn


def _entity(name: str, kind: str) -> list[Token]:
    """The tokens of a name; a leading "the" stays outside, as in CoNLL-2003."""
    the, words = ([Token("the")], name.split()[1:]) if name.startswith("the ") else ([], name.split())
    return the + [Token(word, tag=f"{'I' if i else 'B'}-{kind}") for i, word in enumerate(words)]


# Breaking the grammar. Each function gives every sentence it can make, one fault in each.


def _corrupt(tokens: list[Token], rng: random.Random) -> list[Token]:
    """The sentence with one fault, of a kind drawn among those it has room for."""
    kinds = list(FAULTS)
    rng.shuffle(kinds)
    options = next(options for kind in kinds if (options := FAULTS[kind](tokens)))
    return rng.choice(options)


def _replaced(tokens: list[Token], i: int, words: Sequence[str]) -> list[list[Token]]:
    """One sentence for each of `words`, put in the place of token `i`."""
    return [[*tokens[:i], replace(tokens[i], word=word), *tokens[i + 1 :]] for word in words]


def _wrong_agreement(tokens: list[Token]) -> list[list[Token]]:
    """`the keys is here`. After a company either number is good English, so those are left alone."""
    flips = AGREEMENT | {plural: singular for singular, plural in AGREEMENT.items()}
    made = []
    for i, token in enumerate(tokens[1:], start=1):
        if token.role == "f" and not tokens[i - 1].tag.endswith("ORG"):
            forms = _verb_forms().get(token.word, [token.word] * 2)
            other = flips.get(token.word) or forms[0 if token.word == forms[1] else 1]
            made += _replaced(tokens, i, [other])
    return made


def _wrong_form(tokens: list[Token]) -> list[list[Token]]:
    """`did not praised`, `has see`, `she praising the film`."""
    made = []
    for i, token in enumerate(tokens):
        if token.role == "p":
            made += _replaced(tokens, i, [_verb_forms()[token.word][4]])
        elif token.role == "v":
            base, third, past, _, ing = _verb_forms()[token.word]
            wrong = (third, past, ing) if token.word == base else (base, third)
            made += _replaced(tokens, i, wrong)
    return made


def _no_verb(tokens: list[Token]) -> list[list[Token]]:
    """`the room very clean`. An auxiliary stays, since `the guests praised it` needs none."""
    helps = [any(after.role == "v" for after in tokens[i + 1 : i + 3]) for i in range(len(tokens))]
    places = [i for i, token in enumerate(tokens) if token.role in ("f", "p") and not (helps[i] or token.keep)]
    return [tokens[:i] + tokens[i + 1 :] for i in places]


def _noun_phrases(tokens: list[Token], role: str, starts: Callable[[Token], bool]) -> list[tuple[int, int]]:
    """Where something that `starts` a phrase is followed by a noun, adjectives between them allowed."""
    found = []
    for i, token in enumerate(tokens):
        end = i + 1
        while end < len(tokens) and (tokens[end].role == "j" or tokens[end].tag.endswith("MISC")):
            end += 1
        if starts(token) and end < len(tokens) and tokens[end].role == role:
            found.append((i, end))
    return found


def _is_determiner(token: Token) -> bool:
    return token.word in DETERMINERS


def _no_determiner(tokens: list[Token]) -> list[list[Token]]:
    """`guest praised the room`."""
    return [tokens[:i] + tokens[i + 1 :] for i, _ in _noun_phrases(tokens, "n", _is_determiner)]


def _double_determiner(tokens: list[Token]) -> list[list[Token]]:
    """`the this room`."""
    places = [i for i, _ in _noun_phrases(tokens, "n", _is_determiner)]
    extra = {i: "this" if tokens[i].word in ("a", "the") else "the" for i in places}
    return [[*tokens[: i + 1], Token(extra[i]), *tokens[i + 1 :]] for i in places]


def _wrong_number(tokens: list[Token]) -> list[list[Token]]:
    """`a hotels`, `these hotel`."""
    one = _noun_phrases(tokens, "n", lambda token: token.word in ("a", "every", "this"))
    many = _noun_phrases(tokens, "s", lambda token: token.word == "these" or token.role == "num")
    other = _other_number()
    places = [end for _, end in one + many if tokens[end].word in other]
    return [sentence for end in places for sentence in _replaced(tokens, end, [other[tokens[end].word]])]


@cache
def _other_number() -> dict[str, str]:
    words = _data()["words"]
    pairs = [
        noun.split("/") for name in ("thing", "job", "kin", "place") for group in words[name].values() for noun in group
    ]
    return dict(pairs) | {plural: singular for singular, plural in pairs}


def _wrong_order(tokens: list[Token]) -> list[list[Token]]:
    """`room the`, `a room small`, `she the room praised`; entities stay whole."""
    made = []
    for i, (token, after) in enumerate(pairwise(tokens)):
        plain = after.tag == "O" and after.word[0].isalpha() and after.role != "adv"
        moves = token.role in ("f", "p") or (token.role == "j" and after.role in ("n", "s"))
        if plain and (moves or (_is_determiner(token) and after.role in ("n", "j"))):
            made.append([*tokens[:i], after, token, *tokens[i + 2 :]])
    return made


def _wrong_case(tokens: list[Token]) -> list[list[Token]]:
    """`him praised the room`."""
    places = [i for i, token in enumerate(tokens) if token.role == "r"]
    return [sentence for i in places for sentence in _replaced(tokens, i, [CASES[tokens[i].word]])]


def _double_comparative(tokens: list[Token]) -> list[list[Token]]:
    """`more better`."""
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
