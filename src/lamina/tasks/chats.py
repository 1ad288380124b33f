"""Chats: messages with who speaks, as the text that a tokenizer's chat template makes of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, final

from lamina.data.arrow import derived
from lamina.data.batches import tokenizer_of
from lamina.data.read import Table
from lamina.errors import ConfigError, convert_errors
from lamina.tasks import labels as lab
from lamina.tasks.base import ColumnSpec
from lamina.tasks.split import Split

Message = Mapping[str, Any]
Span = tuple[int, int]
ROLES = ("system", "developer", "user", "assistant", "tool")
REPLIES = "assistant"  # the role whose messages are replies
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


@final
class Chat(str):
    """The texts of a chat's messages, one after the other; `messages` has them with their roles."""

    __slots__ = ("messages",)

    def __new__(cls, messages: Sequence[Message]) -> Chat:
        """Of messages that were checked."""
        chat = super().__new__(cls, "\n".join(message["content"] for message in messages))
        chat.messages = tuple(messages)
        return chat


def is_chat(cell: Any) -> bool:
    """Whether a cell is a list of objects."""
    return isinstance(cell, list | tuple) and all(isinstance(message, Mapping) for message in cell)


def chat_problem(cell: Any) -> str | None:
    """What is wrong with a chat; None if nothing is."""
    if not is_chat(cell) or not cell:
        return "is no chat: a list of messages, each with a role and a content"
    for number, message in enumerate(cell):
        if message.get("role") not in ROLES:
            return f"has the role {message.get('role')!r} in message {number}; the roles are: {', '.join(ROLES)}"
        if not isinstance(message.get("content"), str):
            return f"has {type(message.get('content')).__name__} for the content of message {number}; it must be a text"
    return None


def chat_split(chats: Iterable[Sequence[Message]]) -> Split:
    """Chats as examples, each of whose texts is a `Chat`."""
    plain = Split.of(json.dumps([dict(message) for message in chat]) for chat in chats)
    rows = plain.rows.add_column("row", range(len(plain)))  # pyright: ignore[reportArgumentType]
    return Split(derived(rows, plain.rows), _opened)


def _opened(text: str, _row: int) -> Chat:
    return Chat(json.loads(text))


def chats_of(table: Table, spec: ColumnSpec) -> Split:
    """A column of chats; one without a reply, or with blank ones, is a row without a label."""
    column = spec.text
    for row, cell in zip(table.rows, table.column(column), strict=True):
        if problem := chat_problem(cell):
            raise lab.bad_cell(table, row, column, f"{problem}.")
    name = f"{column}.{REPLIES}"
    replies = ["".join(one["content"] for one in chat if one["role"] == REPLIES) for chat in table.column(column)]
    table = replace(table, columns={**table.columns, name: replies})
    return chat_split(lab.labelled({"": table}, replace(spec, label=name), texts=True)[""].column(column))


def render(chat: Chat, processor: Any, *, prompt: bool = False, op: str = "causal_lm") -> tuple[str, list[Span]]:
    """The text of a chat, and the character spans of the replies in it; as a `prompt`, up to where the next one starts.

    A template that marks replies (`{% generation %}`) says itself where they are, their end token included as it
    marks it. Of any other, a reply is what the text of the chat up to it has more than that of the chat before it with
    the start of a reply.

    Raises:
        ConfigError: If the tokenizer has no chat template, it fails, or changes what was said before.
    """
    tokenizer, messages = tokenizer_of(processor), list(chat.messages)
    if not tokenizer.chat_template:
        came = f"{type(tokenizer).__name__} has no chat template, which makes a text of a chat"
        hint = "Set tokenizer.chat_template, or name the columns of prompts and replies: text=..., text_pair=..."
        raise ConfigError(f"causal_lm: {came}. {hint}")
    with convert_errors(lambda reason: ConfigError(f"{op}: the chat template fails on {messages[0]} ... ({reason}).")):
        if prompt:
            return _text(tokenizer, messages, prompt=True), []
        template = tokenizer.get_chat_template()
        return _marked(tokenizer, messages) if _MARKED.search(template) else _differences(tokenizer, messages)


def _text(tokenizer: Any, messages: list[Message], *, prompt: bool = False) -> str:
    if not messages:
        return _rendered(tokenizer, messages, add_generation_prompt=True)[0][0] if prompt else ""
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)


def _marked(tokenizer: Any, messages: list[Message]) -> tuple[str, list[Span]]:
    (text,), (spans,) = _rendered(tokenizer, messages, return_assistant_tokens_mask=True)
    return text, [(start, stop) for start, stop in spans]


def _rendered(tokenizer: Any, messages: list[Message], **how: bool) -> Any:
    """What a tokenizer's template makes of a chat, which may have no message yet."""
    from transformers.utils.chat_template_utils import render_jinja_template

    given: Any = {"conversations": [messages], "chat_template": tokenizer.get_chat_template(), **how}
    return render_jinja_template(**given, **tokenizer.special_tokens_map)


def _differences(tokenizer: Any, messages: list[Message]) -> tuple[str, list[Span]]:
    whole, spans = _text(tokenizer, messages), list[Span]()
    for number, message in enumerate(messages):
        if message["role"] == REPLIES:
            before = _text(tokenizer, messages[:number], prompt=True)
            after = _text(tokenizer, messages[: number + 1])
            if not whole.startswith(after) or not after.startswith(before):
                came = f"the chat template writes message {number} otherwise once others follow, or begins it otherwise"
                hint = "Mark the replies in the template with {% generation %} and {% endgeneration %}."
                raise ConfigError(f"causal_lm: {came}, so that it does not tell where the reply is. {hint}")
            spans.append((len(before), len(after)))
    return whole, spans
