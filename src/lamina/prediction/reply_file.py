"""Read labelled prompts and replies from a file, and divide them into parts that share no prompt."""

from __future__ import annotations

import json
import logging
import random
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch

from lamina.data.continuations import frame_of
from lamina.data.encode import encode
from lamina.data.read import Table, missing_column, read_table
from lamina.errors import ConfigError, DataError
from lamina.layers.types import tokenizer_of
from lamina.tasks.chat_templates import REPLIES, Chat, chat_problem, last_reply, render
from lamina.tasks.label_cells import LabelCellError, class_name, is_missing, look
from lamina.tasks.metrics import named_class
from lamina.tasks.span_forms import UnplacedSpanError, places, read_spans
from lamina.tasks.words import Span, word_spans
from lamina.utils import parse_json

if TYPE_CHECKING:
    from lamina.layers.types import Processor, Tokenizer

logger = logging.getLogger(__name__)

USUAL = {  # what a column holds -> its usual names
    "messages": ("messages", "conversation", "conversations", "chat"),
    "prompt": ("prompt", "user_query", "query", "question", "instruction"),
    "reply": ("reply", "response", "chatgpt_response", "completion", "answer"),
    "label": ("label", "verdict", "class", "hallucination"),
}
SHARES = {"train": 0.4, "choosing": 0.15, "calibration": 0.25, "test": 0.2}  # part -> its fraction of the replies


# the end of a prompt and the start of a reply between which most languages write a space; Chinese and others do not
_ENDS, _BEGINS = re.compile(r"[0-9A-Za-z\u00c0-\u052f.,;:!?]\Z"), re.compile(r"[0-9A-Za-z\u00c0-\u052f]")


@final
@dataclass(frozen=True)
class ReplyColumns:
    """Names of the columns in a file of replies. None: find the column by its usual names, see `USUAL`.

    Args:
        messages: Column of chats, whose last message is the reply; in place of `prompt` and `reply`.
        prompt: Column of prompts. A reply follows its prompt with nothing added between them.
        reply: Column of replies.
        label: Column of the label of the reply.
        spans: Column of the spans of the reply that are bad; a positive reply without spans is bad as a whole. None:
            every positive reply is bad as a whole.
    """

    messages: str | None = None
    prompt: str | None = None
    reply: str | None = None
    label: str | None = None
    spans: str | None = None


@final
@dataclass(frozen=True)
class LabelledReply:
    """A `prompt`, its `reply`, whether the reply is bad (`positive`), and where its bad words are (`spans`).

    `spans` are ranges of characters: all words if no bad ones were marked, and () for a good reply.
    """

    prompt: str
    reply: str
    positive: bool
    spans: Sequence[Span] = field(default_factory=tuple)


def replies_of(labelled: Labelled, processor: Processor) -> tuple[list[LabelledReply], str]:
    """Return the replies of a file that `read_labels` has read, and a digest of their prompts, texts, labels and spans.

    The chat template of `processor`, the model's tokenizer, writes the prompts of chats. A warning is logged if most
    replies begin with a word directly after a word of their prompt, and the tokenizer reads the two as one.

    Raises:
        DataError: If a row has no prompt or reply, or a span that is not in its reply.
        ConfigError: If there are chats and no chat template.
    """
    table, labels, positive, names = labelled
    texts = _chats(table, names["messages"], processor) if "messages" in names else _pairs(table, names)
    column = names.get("spans", "")
    spans = table.cells(column) if column else [None] * len(table)
    replies: list[LabelledReply] = []
    for row, (before, reply, content), label, cell in zip(table.rows, texts, labels, spans, strict=True):
        bad = _bad_words(table, row, column, content, cell) if label == positive else ()
        # the white space that a template puts before the reply moves the spans
        moved = len(reply) - len(reply.lstrip()) - len(content) + len(content.lstrip())
        shifted = tuple((start + moved, end + moved) for start, end in bad)
        replies.append(LabelledReply(before, reply, label == positive, shifted))
    _warn_of_joined_words(replies, tokenizer_of(processor))
    digest = sha256()
    for reply in replies:
        digest.update(json.dumps([reply.prompt, reply.reply, reply.positive, list(reply.spans)]).encode())
    return replies, digest.hexdigest()[:16]


def _warn_of_joined_words(replies: Sequence[LabelledReply], tokenizer: Tokenizer) -> None:
    """Log a warning if most replies follow their prompts without the space that tells the tokenizer words apart."""
    if frame_of(tokenizer) is None:
        return
    ids = encode([("a", "a"), ("a", " a")], tokenizer, max_length=12, windows=True).batch([0, 1], {})["input_ids"]
    joined = [one for one in replies if _ENDS.search(one.prompt) and _BEGINS.match(one.reply)]
    if torch.equal(*ids) or 2 * len(joined) <= len(replies):
        return
    word = f"{joined[0].prompt.split()[-1]}{joined[0].reply.split()[0]}"
    came = f"{len(joined)} of {len(replies)} replies follow their prompts without a space, as in '{word:.60}'"
    hint = (
        "If the model wrote a space, begin the reply with it: decode prompt and reply together, then cut the prompt off"
    )
    logger.warning("monitor: %s. %s.", came, hint)


class Labelled(NamedTuple):
    """The `table` of a file of replies, with the label of each row; made by `read_labels`.

    Attributes:
        labels: The label of each row.
        positive: The label that marks bad replies.
        names: What a column holds -> its name; see `_roles`.
    """

    table: Table
    labels: list[str]
    positive: str
    names: dict[str, str]


def read_labels(path: str | Path, columns: ReplyColumns, positive: str | int | None) -> Labelled:
    """Read a file of replies and its labels, before a model is loaded.

    Replies with any label but the positive one count as good; a warning lists these labels if there are several.

    Args:
        path: File: .jsonl, .csv, .tsv or .parquet.
        columns: Names of its columns.
        positive: The label that marks bad replies. None is an error, which lists the labels.

    Raises:
        DataError: If the file cannot be read, a row has no label, or one that differs from the positive label only in
            case, width or spaces, or it is not clear which column to use.
        ConfigError: If no positive label is named, it is a tag of words such as O or B-x, or all rows have one label.
        UnknownNameError: If no row has the positive label.
    """
    table = read_table(path)
    names = _roles(table, columns)
    labels = _labels(table, names["label"])
    known = sorted(set(labels))
    if positive is None:
        raise ConfigError(f"monitor: no positive label is named; {path} has {_listed(known)}. Use --positive LABEL.")
    positive = named_class("monitor", positive, known)
    if len(known) == 1:
        raise ConfigError(f"monitor: every reply has the label '{known[0]}'; bad and good replies are both needed.")
    if positive == "O" or (positive[:2] in ("B-", "I-") and len(positive) > 2):
        raise ConfigError(f"monitor: the positive label '{positive}' is a tag of words; rename it in the file.")
    for label in known:
        if label != positive and look(label) == look(positive):
            problem = f"the label '{label}' would count as good, but looks like the positive label '{positive}'"
            raise _bad(table, table.rows[labels.index(label)], names["label"], f"{problem}. Correct the row.")
    if len(known) > 2:
        good = Counter(label for label in labels if label != positive)
        shown = ", ".join(f"'{label}' ({count})" for label, count in good.most_common(10))
        logger.warning("monitor: these labels count as good: %s%s.", shown, " and others" * (len(good) > 10))
    return Labelled(table, labels, positive, names)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names[:10]) + (" and others" if len(names) > 10 else "")


def _usual(table: Table, what: str) -> str | None:
    """Return the column with a usual name for `what` (a key of `USUAL`), in small or capital letters; None if none has.

    Raises DataError if several columns have such a name.
    """
    found = [name for name in table.columns if name.lower() in USUAL[what]]
    if len(found) > 1:
        problem = f"the columns {_listed(found)} may each be the {what}"
        raise DataError(f"monitor: {table.path}: {problem}. Use --{what} COLUMN.", path=table.path)
    return found[0] if found else None


def _column(table: Table, what: str, named: str | None) -> str:
    """Return the column that holds `what`: the user's choice `named`, or else the only column with a usual name.

    Raises DataError if no column or several have a usual name, or `named` does not exist. A path of keys ("a.b") in
    `named` is not checked.
    """
    if named is not None:
        if named not in table.columns and "." not in named:
            raise missing_column(table.path, named, table.columns)
        return named
    if (usual := _usual(table, what)) is None:
        problem = f"no column is known to be the {what}; the columns are {_listed(list(table.columns))}"
        raise DataError(f"monitor: {table.path}: {problem}. Use --{what} COLUMN.", path=table.path)
    return usual


def _bad(table: Table, row: int, column: str, problem: str) -> DataError:
    message = f"monitor: {table.path}, row {row}, column '{column}': {problem}"
    return DataError(message, path=table.path, row=row, column=column)


def _labels(table: Table, column: str) -> list[str]:
    """Return each row's label, a cell of `column`; raise DataError if one is missing or cannot be a class name."""
    labels: list[str] = []
    for row, cell in zip(table.rows, table.cells(column), strict=True):
        if is_missing(cell):
            raise _bad(table, row, column, "the label is missing; every reply needs one. Label the row or remove it.")
        try:
            labels.append(class_name(cell))
        except LabelCellError as error:
            raise _bad(table, row, column, f"{error} is not a label; a label is a name. Correct the row.") from None
    return labels


def _roles(table: Table, columns: ReplyColumns) -> dict[str, str]:
    """Return what a column holds -> its name: "messages", or "prompt" and "reply"; "label"; and "spans" if named.

    Chats are read if their column is named, or if neither `prompt` nor `reply` is named and a column has a usual name
    of chats. Raises DataError if a column is missing or not clear, or has two roles.
    """
    has_chats = columns.messages or (not (columns.prompt or columns.reply) and _usual(table, "messages"))
    roles = [*(["messages"] if has_chats else ["prompt", "reply"]), "label", *(["spans"] if columns.spans else [])]
    names = {role: _column(table, role, getattr(columns, role)) for role in roles}
    if len(set(names.values())) < len(names):
        used = _listed(list(names.values()))
        problem = f"the columns of {', '.join(names)} are {used}; each needs its own"
        raise DataError(f"monitor: {table.path}: {problem}.", path=table.path)
    return names


def _pairs(table: Table, names: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Return (prompt, reply, reply) for each row, from the columns `names`. DataError if a cell is blank or no text."""
    for what in ("prompt", "reply"):
        name = names[what]
        for row, cell in zip(table.rows, table.cells(name), strict=True):
            if not isinstance(cell, str) or not word_spans(cell):
                got = "blank" if isinstance(cell, str) or cell is None else f"{type(cell).__name__}, no text"
                raise _bad(table, row, name, f"the {what} is {got}; each row has a text. Correct the row or remove it.")
    prompts, replies = table.cells(names["prompt"]), table.cells(names["reply"])
    return list(zip(prompts, replies, replies, strict=True))


def _chats(table: Table, column: str, processor: Processor) -> list[tuple[str, str, str]]:
    """Return (prompt, reply, content of its message) for each row, from a column of chats.

    The tokenizer's chat template writes the prompt, and white space before the reply; see `last_reply`. A cell is a
    list of messages, or the JSON of one. A begin token is removed from the prompt if the tokenizer adds one itself.

    Raises DataError if a cell is not a chat, or the chat does not consist of a prompt and a last message, the reply;
    ConfigError if the tokenizer has no chat template.
    """
    tokenizer = tokenizer_of(processor)
    begins = tokenizer("").input_ids[:1] == [tokenizer.bos_token_id]  # a second begin token would be added
    first = tokenizer.bos_token if begins and tokenizer.bos_token else ""
    texts: list[tuple[str, str, str]] = []
    for row, cell in zip(table.rows, table.column(column), strict=True):
        try:
            chat: Any = parse_json(cell) if isinstance(cell, str) and cell.strip()[:1] == "[" else cell
        except ValueError as error:
            problem = f"is not JSON ({error}); a chat is a list of messages. Correct the row or remove it"
            raise _bad(table, row, column, f"the cell {problem}.") from None
        if problem := chat_problem(chat):
            raise _bad(table, row, column, f"the cell {problem}.")
        last = chat[-1]
        if last["role"] != REPLIES or not word_spans(last["content"]):
            problem = "the chat does not end with a reply: a message with the role 'assistant' and a text"
            raise _bad(table, row, column, f"{problem}. Correct the row or remove it.")
        if len(chat) == 1:
            raise _bad(table, row, column, "the chat has a reply and no prompt. Correct the row or remove it.")
        if not tokenizer.chat_template:
            problem = f"{type(tokenizer).__name__} has no chat template, which turns the chats in '{column}' into texts"
            hint = "Set tokenizer.chat_template and save the tokenizer, or name columns with --prompt and --reply"
            raise ConfigError(f"monitor: {problem}. {hint}.")
        prompt, _ = render(Chat(chat[:-1]), processor, prompt=True, op="monitor")
        reply = last_reply(Chat(chat), processor, prompt, "monitor")
        texts.append((prompt.removeprefix(first), reply, last["content"]))
    return texts


def _bad_words(table: Table, row: int, column: str, reply: str, cell: object) -> tuple[Span, ...]:
    """Return the ranges of a positive reply's bad words, neighbouring words as one range; of all words if none is bad.

    `cell` lists the reply's bad spans; None: there is no such column. Raises DataError, which names the row and the
    column, if it is no list of spans, or a span is not in the reply.
    """
    words = word_spans(reply)
    try:
        marks = [] if cell is None else read_spans(cell)[0]
        parts = [place for mark in marks for place in places(mark, reply, words)]
    except UnplacedSpanError as error:
        raise _bad(table, row, column, f"{error.reason} Correct the row or remove it.") from None
    except LabelCellError as error:
        raise _bad(table, row, column, f"{error}") from None
    bad = [at for at, (start, end) in enumerate(words) if any(start < stop and first < end for first, stop in parts)]
    bad = bad or list(range(len(words)))
    cuts = [0, *(at for at, (one, two) in enumerate(pairwise(bad), 1) if two > one + 1), len(bad)]
    return tuple((words[bad[one]][0], words[bad[two - 1]][1]) for one, two in pairwise(cuts))


def divide(replies: Sequence[LabelledReply], seed: int) -> dict[str, list[LabelledReply]]:
    """Divide replies into parts that share no prompt; return part name -> replies.

    The parts are "train", "choosing", "calibration" and "test"; `SHARES` has their fractions. Prompts with a bad reply
    and prompts without are divided separately. `seed` decides which prompts go where, and their order. Prompts
    with the same words count as one, whatever their case, punctuation, white space and characters without width.

    In "calibration" and "test" a prompt keeps one good and one bad reply, drawn with `seed`: bounds of rates hold for
    independent replies, and replies to one prompt are alike.
    """
    groups: dict[str, list[LabelledReply]] = defaultdict(list)
    for reply in replies:
        text = look(reply.prompt)
        words = "".join(" " if unicodedata.category(sign)[0] == "P" else sign for sign in text).split()
        groups[" ".join(words) or text].append(reply)
    parts: dict[str, list[LabelledReply]] = {part: [] for part in SHARES}
    draw = random.Random(seed)
    for bad in (True, False):
        own = [group for group in groups.values() if any(reply.positive for reply in group) is bad]
        random.Random(seed).shuffle(own)
        total, taken = sum(map(len, own)), dict.fromkeys(SHARES, 0)
        for group in own:  # to the part that lacks most of its share
            part = max(SHARES, key=lambda name: SHARES[name] * total - taken[name])
            taken[part] += len(group)
            parts[part] += group if part in ("train", "choosing") else _one_of_each(group, draw)
    return parts


def _one_of_each(group: Sequence[LabelledReply], draw: random.Random) -> list[LabelledReply]:
    """Return one good and one bad reply of a prompt, as far as it has them, in their order; `draw` decides which."""
    drawn = [draw.choice(own) for label in (True, False) if (own := [one for one in group if one.positive is label])]
    return [one for one in group if any(one is kept for kept in drawn)]
