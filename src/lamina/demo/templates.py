"""Sentences made from templates, with the roles of their words, so that `faults` can break them."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import Any

HELD_OUT_SHARE = 0.5  # of the draws in the test part that come from its own words, where a list has any
NEGATED_SHARE = 0.3  # of the sentences with a sentiment that get it by negation
OPENER_SHARE = TAIL_SHARE = 0.35

OTHER = {"positive": "negative", "negative": "positive"}
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


@cache
def data() -> dict[str, Any]:
    """What words.json holds: lists of words, and templates."""
    return json.loads(resources.files("lamina.demo").joinpath("words.json").read_text(encoding="utf-8"))


def words_of(text: str) -> set[str]:
    """The words of a text, in small letters."""
    return set(re.findall(r"[^\W\d_]+", text.lower()))


@cache
def words() -> set[str]:
    """Every word that a sentence may have, in small letters."""
    return words_of(json.dumps(data(), ensure_ascii=False))


@cache
def held_out_names() -> set[str]:
    """The words of names that the training part does not have, in small letters."""
    named = [data()["words"][name] for name in ("first", "surname", *ENTITIES)]
    shown = {part: words_of(" ".join(name for groups in named for name in groups[part])) for part in named[0]}
    return (shown["validation"] | shown["test"]) - shown["train"]


@cache
def verb_forms() -> dict[str, list[str]]:
    """Any written form of a verb -> base, third person, past, participle, -ing."""
    words = data()["words"]
    lists = [name for name in words if name == "form" or "verb_" in name]
    verbs = [verb.split("/") for name in lists for group in words[name].values() for verb in group]
    return {form: forms for forms in verbs for form in forms}


class Writer:
    """Fills templates with the words of one part."""

    def __init__(self, rng: random.Random, part: str) -> None:
        self.rng = rng
        self.part = part
        self.templates: dict[str, list[str]] = data()["templates"]
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
        groups = data()["words"][listed]
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


def row_of(tokens: list[Token], sentiment: str, judgement: str) -> dict[str, Any]:
    """A row of the corpus; "a" becomes "an", and the first letter a capital."""
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
