"""Chats: messages with roles, and the text that a tokenizer's chat template makes of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, cast, final

from lamina.data.arrow import derived
from lamina.data.read import Table
from lamina.errors import ConfigError, convert_errors
from lamina.layers.types import tokenizer_of
from lamina.tasks import labels as lab
from lamina.tasks.base import ColumnSpec
from lamina.tasks.split import Split
from lamina.tasks.words import Span
from lamina.utils import JSON

if TYPE_CHECKING:
    from lamina.layers.types import Processor, Tokenizer

Message: TypeAlias = Mapping[str, JSON]  # "role" and "content"
ROLES = ("system", "developer", "user", "assistant", "tool")
REPLIES = "assistant"  # the role whose messages are replies
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


@final
class Chat(str):
    """A chat as a string: the contents of its messages, one per line; `messages` has the messages and roles."""

    __slots__ = ("messages",)

    messages: tuple[Message, ...]

    def __new__(cls, messages: Sequence[Message]) -> Chat:
        """Return the chat of these messages. The caller must have checked them with `chat_problem`."""
        chat = super().__new__(cls, "\n".join(str(message["content"]) for message in messages))
        chat.messages = tuple(messages)
        return chat


def is_chat(cell: object) -> TypeGuard[Sequence[Message]]:
    """Return whether a cell is a list or tuple of mappings, or an empty one; `chat_problem` checks the mappings."""
    return isinstance(cell, list | tuple) and all(isinstance(message, Mapping) for message in cell)


def chat_problem(cell: object) -> str | None:
    """Return what is wrong with a cell as a chat, as text; None if nothing is.

    What can be wrong: it is no list of messages, is empty, or has an unknown role or a content that is not a string.
    """
    if not is_chat(cell) or not cell:
        return "is not a chat: a list of messages, each with a role and a content"
    for number, message in enumerate(cell):
        if message.get("role") not in ROLES:
            return f"has the role {message.get('role')!r} in message {number}; the roles are: {', '.join(ROLES)}"
        if not isinstance(message.get("content"), str):
            return f"has {type(message.get('content')).__name__} for the content of message {number}; it must be a text"
    return None


def chat_split(chats: Iterable[Sequence[Message]]) -> Split:
    """Return a split without labels whose examples are `Chat` objects, stored as JSON."""
    stored = Split.of(json.dumps([dict(message) for message in chat]) for chat in chats)
    rows = stored.rows.add_column("row", range(len(stored)))  # pyright: ignore[reportArgumentType]
    return Split(derived(rows, stored.rows), _to_chat)


def _to_chat(text: str, _row: int) -> Chat:
    return Chat(json.loads(text))


def chats_of(table: Table, spec: ColumnSpec) -> Split:
    """Return the chats in the column `spec.text` of a table.

    A chat whose replies are all blank, or that has none, has no label. Raises DataError if a cell is not a chat, no
    chat has a label, or one has none and `spec.missing_labels` is not "drop".
    """
    column = spec.text
    for row, cell in zip(table.rows, table.column(column), strict=True):
        if problem := chat_problem(cell):
            raise lab.bad_cell(table, row, column, f"{problem}.")
    name = f"{column}.{REPLIES}"
    replies = [
        "".join(message["content"] for message in chat if message["role"] == REPLIES) for chat in table.column(column)
    ]
    table = replace(table, columns={**table.columns, name: replies})
    return chat_split(lab.labelled_table(table, replace(spec, label=name), texts=True).column(column))


def render(chat: Chat, processor: Processor, *, prompt: bool = False, op: str = "causal_lm") -> tuple[str, list[Span]]:
    """Apply the tokenizer's chat template to a chat.

    A template that marks replies with `{% generation %}` gives their spans, end tokens included if it marks them. With
    any other template, a reply is the difference between two texts: the chat up to and including the reply, and the
    chat before it with the prompt for a reply. Raises ConfigError if there is no chat template, the template fails, or
    it writes earlier messages differently once others follow.

    Args:
        chat: The chat.
        processor: A tokenizer, or a processor that contains one.
        prompt: Whether to end with the prompt for the next reply, for generation. No spans are returned then.
        op: The operation, for error messages.

    Returns:
        The text, and the replies' character ranges (start, end).
    """
    tokenizer = tokenizer_of(processor)
    messages = list(chat.messages)
    if not tokenizer.chat_template:
        got = f"{type(tokenizer).__name__} has no chat template, which turns a chat into a text"
        hint = "Set tokenizer.chat_template, or name the columns of prompts and replies: text=..., text_pair=..."
        raise ConfigError(f"{op}: {got}. {hint}")
    with convert_errors(lambda reason: ConfigError(f"{op}: the chat template fails on {messages[0]} ... ({reason}).")):
        if prompt:
            return _text(tokenizer, messages, prompt=True), []
        template = tokenizer.get_chat_template()
        if not _MARKED.search(template):
            return _differences(tokenizer, messages, op)
        (text,), (spans,) = _rendered(tokenizer, messages, return_assistant_tokens_mask=True)
        return text, [(start, stop) for start, stop in spans]


def last_reply(chat: Chat, processor: Processor, prompt: str, op: str) -> str:
    """Return the last message of a chat as the chat template writes it after `prompt`, with the white space before it.

    Llama 2's template puts a space before a reply, and so does the model when it writes one. The message's content is
    returned as it is if the template writes anything but white space between the two.

    Args:
        chat: The chat.
        processor: A tokenizer with a chat template, or a processor that contains one.
        prompt: The chat before the last message, as `render` writes it.
        op: The operation, for the error message.

    Raises:
        ConfigError: If the template fails.
    """
    messages = list(chat.messages)
    with convert_errors(lambda reason: ConfigError(f"{op}: the chat template fails on {messages[0]} ... ({reason}).")):
        whole = _text(tokenizer_of(processor), messages)
    content = str(messages[-1]["content"])
    rest = whole[len(prompt) :] if whole.startswith(prompt) else ""
    text = rest.lstrip()
    return rest[: len(rest) - len(text)] + content.lstrip() if text.startswith(content.strip()) else content


def _text(tokenizer: Tokenizer, messages: list[Message], *, prompt: bool = False) -> str:
    """Return messages as text by the tokenizer's template; if `prompt` is set, the prompt for a reply ends it.

    `messages` may be empty.
    """
    if not messages:  # `apply_chat_template` does not accept an empty chat
        return _rendered(tokenizer, messages, add_generation_prompt=True)[0][0] if prompt else ""
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)


def _rendered(tokenizer: Tokenizer, messages: list[Message], **options: bool) -> tuple[list[str], list[list[Span]]]:
    """Return what transformers renders for one chat: a list with its text, and a list with the spans of its replies.

    `options` are those of its `render_jinja_template`.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    arguments: dict[str, Any] = {"conversations": [messages], "chat_template": tokenizer.get_chat_template(), **options}
    return cast("Any", render_jinja_template)(**arguments, **tokenizer.special_tokens_map)


def _differences(tokenizer: Tokenizer, messages: list[Message], op: str) -> tuple[str, list[Span]]:
    """Return the text of messages and the spans of its replies, for a template that does not mark replies.

    A reply's span lies between the end of the earlier messages with the prompt for a reply, and the end of the text
    with the reply. Raises ConfigError, whose message begins with `op`, if one of these two texts changes when more
    messages follow.
    """
    whole, spans = _text(tokenizer, messages), list[Span]()
    for number, message in enumerate(messages):
        if message["role"] == REPLIES:
            before = _text(tokenizer, messages[:number], prompt=True)
            after = _text(tokenizer, messages[: number + 1])
            if not whole.startswith(after) or not after.startswith(before):
                hint = "Mark the replies in the template with {% generation %} and {% endgeneration %}."
                raise ConfigError(
                    f"{op}: the chat template writes message {number} differently once others follow, or begins "
                    f"it differently, so that the place of the reply cannot be found. {hint}"
                )
            spans.append((len(before), len(after)))
    return whole, spans
