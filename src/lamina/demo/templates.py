"""Write sentences from templates, with the grammatical role of each word, so that `corpus.corrupt` can break them."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import TypedDict

from lamina.utils import JSONObject

HELD_OUT_SHARE = 0.5  # probability that a test sentence takes a word reserved for the test split
NEGATED_SHARE = 0.3  # share of positive and negative sentences that use a negation
OPENER_SHARE = TAIL_SHARE = 0.35

OTHER = {"positive": "negative", "negative": "positive"}
ENTITIES = {"org": "ORG", "team": "ORG", "loc": "LOC", "misc": "MISC"}
ONCE = ("{loc}", "{day}", "{month}")  # slots that occur at most once in a sentence
# clauses in the present or future tense: no "last May"
PRESENT = re.compile(r"\b(?!was/|were/)\w+/f|\.(s|base)}|\bwill\b")
# Slot of a template -> word list and role. "%" stands for the polarity, "positive" or "negative".
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


class Sentence(TypedDict):
    """One row of the demo corpus.

    Attributes:
        text: The words joined by spaces.
        tags: IOB2 tag of each of the `words`, over PER, ORG, LOC and MISC.
        sentiment: "negative", "neutral" or "positive".
        acceptability: "acceptable" or "unacceptable".
    """

    text: str
    words: list[str]
    tags: list[str]
    sentiment: str
    acceptability: str


@dataclass(frozen=True)
class Token:
    """One word of a sentence, before the sentence gets its capital letter.

    Args:
        word: The word as written.
        tag: Its IOB2 tag.
        role: Its grammatical role: `f` finite verb, `p` verb in the past tense, `v` verb after another verb, `n`
            countable singular noun, `s` plural noun, `j` adjective, `adv` adverb, `c` comparative, `num` number, `r`
            subject pronoun, or an empty string.
        keep: Whether the sentence's sentiment depends on this word. A fault may change such a word but not remove it.
    """

    word: str
    tag: str = "O"
    role: str = ""
    keep: bool = False


@cache
def data() -> JSONObject:
    """Return the content of words.json: lists of words under "words", templates under "templates"."""
    return json.loads(resources.files("lamina.demo").joinpath("words.json").read_text(encoding="utf-8"))


def words_of(text: str) -> set[str]:
    """Return the lower-case words of a text."""
    return set(re.findall(r"[^\W\d_]+", text.lower()))


@cache
def words() -> set[str]:
    """Return every lower-case word that a sentence from templates may contain."""
    return words_of(json.dumps(data(), ensure_ascii=False))


@cache
def held_out_names() -> set[str]:
    """Return the lower-case words of names that occur in the validation or test split but not in train."""
    named = [data()["words"][name] for name in ("first", "surname", *ENTITIES)]
    shown = {split: words_of(" ".join(name for groups in named for name in groups[split])) for split in named[0]}
    return (shown["validation"] | shown["test"]) - shown["train"]


@cache
def verb_forms() -> dict[str, list[str]]:
    """Return form of a verb -> all forms of the same verb: base, third person, past, participle, -ing."""
    words = data()["words"]
    lists = [name for name in words if name == "form" or "verb_" in name]
    verbs = [verb.split("/") for name in lists for group in words[name].values() for verb in group]
    return {form: forms for forms in verbs for form in forms}


class Writer:
    """Fills templates with random words (drawn with `rng`) of one split: "train", "validation" or "test"."""

    def __init__(self, rng: random.Random, split: str) -> None:
        self.rng = rng
        self.split = split
        self.templates: dict[str, list[str]] = data()["templates"]
        self.used: set[str] = set()  # words of the current sentence, so that none is drawn twice

    def sentence(self, sentiment: str) -> list[Token]:
        """Return the tokens of a random acceptable sentence with the given sentiment; its words are kept in `used`."""
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
        """Return a clause with a random opener, a tail, both or neither; an exclamation stays unchanged.

        They fit the clause's tense, and add no second place, day or month.
        """
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
        """Return the tokens for one piece of a template: `word`, `word/role`, `{slot}` or `{slot.form/role}`.

        `polarity` is the sentiment of words drawn for a slot that has one; the slot `opposite` draws the other.
        """
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
        """Return a random word for the slot `name`. Slots with a sentiment have `polarity`; "opposite" has the other.

        `form` is a form of a verb (a key of FORMS) or "". `role` is the word's role in the template; "": the usual role
        of the slot. A name with a plural "s", such as "things", gives a noun's plural, whose role is always "s".
        """
        singular = name.removesuffix("s") if name not in SLOTS else name
        listed, usual_role = SLOTS[singular]
        drawn = self._draw(listed.replace("%", OTHER[polarity] if name == "opposite" else polarity))
        forms = drawn.split("/")
        if form:
            column, usual_role = FORMS[form]
            return Token(forms[column], role=role or usual_role, keep="like" in name)
        return Token(forms[1], role="s") if singular != name else Token(forms[0], role=role or usual_role)

    def _person(self) -> list[Token]:
        """Return the tokens of a random name of a person: title and surname, first name, or full name."""
        chance = self.rng.random()
        if chance < 0.15:
            return [Token(self._draw("title")), *_entity(self._draw("surname"), "PER")]
        first = self._draw("first")
        return _entity(first if chance < 0.4 else f"{first} {self._draw('surname')}", "PER")

    def _draw(self, listed: str) -> str:
        """Draw a word that the writer's split may have from the list `listed` of words.json, and add it to `used`.

        Words that the sentence has already are drawn only if the list has no others.
        """
        groups = data()["words"][listed]
        if "shared" not in groups:
            choices = groups[self.split]
        else:
            reserved = self.split == "test" and groups["test"] and self.rng.random() < HELD_OUT_SHARE
            choices = groups["test" if reserved else "shared"]
        drawn = self.rng.choice([word for word in choices if word not in self.used] or choices)
        self.used.add(drawn)
        return drawn


def _entity(name: str, entity_type: str) -> list[Token]:
    """Return the tokens of a name, tagged with `entity_type`. A leading "the" is not tagged, as in CoNLL-2003."""
    the, words = ([Token("the")], name.split()[1:]) if name.startswith("the ") else ([], name.split())
    return the + [Token(word, tag=f"{'I' if i else 'B'}-{entity_type}") for i, word in enumerate(words)]


def row_of(tokens: list[Token], sentiment: str, acceptability: str) -> Sentence:
    """Return tokens as a row of the corpus with these labels.

    "a" becomes "an" where the next word sounds like a vowel, and the first letter becomes a capital.
    """
    words = [token.word for token in tokens]
    for i, (word, after) in enumerate(pairwise(words)):
        if word == "a" and _takes_an(after):
            words[i] = "an"
    words[0] = words[0][0].upper() + words[0][1:]
    tags = [token.tag for token in tokens]
    return Sentence(text=" ".join(words), words=words, tags=tags, sentiment=sentiment, acceptability=acceptability)


def _takes_an(word: str) -> bool:
    word = word.lower()
    vowel = word[0] in "aeiou" and not word.startswith(("uni", "use", "eu", "ukr", "one"))
    return vowel or word.startswith(("hour", "honest"))
