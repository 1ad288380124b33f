"""Add grammar faults to sentences from templates.

Each function that adds a fault takes the tokens of a correct sentence, and returns all versions of the sentence with
one fault of its type: a list of token lists, which is empty if the sentence has no place for the fault.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import TYPE_CHECKING

from lamina.demo.templates import Token, data, verb_forms

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

AGREEMENT = {"is": "are", "was": "were", "has": "have", "does": "do"}
CASES = {"I": "me", "he": "him", "she": "her", "they": "them", "we": "us"}
DETERMINERS = ("a", "the", "this", "every", "our", "my")


def corrupt(tokens: list[Token], rng: random.Random) -> list[Token]:
    """Return the sentence with one random fault. Its type is drawn from those that the sentence has a place for."""
    names = list(FAULTS)
    rng.shuffle(names)
    options = next(options for name in names if (options := FAULTS[name](tokens)))
    return rng.choice(options)


def _replaced(tokens: list[Token], i: int, words: Sequence[str]) -> list[list[Token]]:
    """Return one sentence for each of `words`, with that word in the place of token `i`."""
    return [[*tokens[:i], replace(tokens[i], word=word), *tokens[i + 1 :]] for word in words]


def _wrong_agreement(tokens: list[Token]) -> list[list[Token]]:
    """Give a verb the wrong number: `the keys is here`.

    Verbs after a company's name are skipped: both numbers are good English there.
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
    """Give a verb the wrong form: `did not praised`, `has see`, `she praising the film`."""
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
    """Remove a verb: `the room very clean`. Auxiliaries stay: `the guests praised it` is correct without one."""
    helps = [any(after.role == "v" for after in tokens[i + 1 : i + 3]) for i in range(len(tokens))]
    places = [i for i, token in enumerate(tokens) if token.role in ("f", "p") and not (helps[i] or token.keep)]
    return [tokens[:i] + tokens[i + 1 :] for i in places]


def _noun_phrases(tokens: list[Token], role: str, starts: Callable[[Token], bool]) -> list[tuple[int, int]]:
    """Find noun phrases: a token for which `starts` returns True, then adjectives, then a noun with the role `role`.

    Returns for each phrase the position of its first token and of its noun.
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
    """Return whether a token is a determiner."""
    return token.word in DETERMINERS


def _no_determiner(tokens: list[Token]) -> list[list[Token]]:
    """Remove a determiner: `guest praised the room`."""
    return [tokens[:i] + tokens[i + 1 :] for i, _ in _noun_phrases(tokens, "n", _is_determiner)]


def _double_determiner(tokens: list[Token]) -> list[list[Token]]:
    """Add a second determiner: `the this room`."""
    places = [i for i, _ in _noun_phrases(tokens, "n", _is_determiner)]
    extra = {i: "this" if tokens[i].word in ("a", "the") else "the" for i in places}
    return [[*tokens[: i + 1], Token(extra[i]), *tokens[i + 1 :]] for i in places]


def _wrong_number(tokens: list[Token]) -> list[list[Token]]:
    """Give a noun the wrong number: `a hotels`, `these hotel`."""
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
    """Swap two words: `room the`, `a room small`, `she the room praised`. Entities are not split."""
    sentences = []
    for i, (token, after) in enumerate(pairwise(tokens)):
        plain = after.tag == "O" and after.word[0].isalpha() and after.role != "adv"
        moves = token.role in ("f", "p") or (token.role == "j" and after.role in ("n", "s"))
        if plain and (moves or (_is_determiner(token) and after.role in ("n", "j"))):
            sentences.append([*tokens[:i], after, token, *tokens[i + 2 :]])
    return sentences


def _wrong_case(tokens: list[Token]) -> list[list[Token]]:
    """Give a subject the wrong case: `him praised the room`."""
    places = [i for i, token in enumerate(tokens) if token.role == "r"]
    return [sentence for i in places for sentence in _replaced(tokens, i, [CASES[tokens[i].word]])]


def _double_comparative(tokens: list[Token]) -> list[list[Token]]:
    """Double a comparative: `more better`."""
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
