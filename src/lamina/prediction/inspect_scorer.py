"""A scorer for Inspect AI: the monitors of a bank score each reply of a conversation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, TypedDict

import torch

from lamina.bank.monitoring import check_monitors, scores_of_monitors
from lamina.data.batches import tokenizer_of
from lamina.data.encode import length_limit
from lamina.errors import ConfigError, require_packages
from lamina.layers.causality import is_causal
from lamina.tasks.chat_templates import Chat, render

if TYPE_CHECKING:
    from torch import Tensor

    from lamina.bank import ReaderBank
    from lamina.monitors.cascade import AnyMonitor

Span = tuple[int, int]


class MessageScore(TypedDict):
    """A monitor's highest score in one reply.

    Attributes:
        message: Index of the reply among the messages.
        monitor: Name of the monitor.
        score: The highest score.
        flagged_at: Index of the reply's token at which it was flagged; None: it was not.
        unread: Number of tokens at the beginning of the reply that were not scored, because the reply is too long.
    """

    message: int
    monitor: str
    score: float
    flagged_at: int | None
    unread: int


def inspect_scorer(bank: ReaderBank, monitors: Sequence[AnyMonitor | str] | None = None) -> Any:  # noqa: ANN401
    """Return a scorer of Inspect AI that stores the score of each monitor for each reply of a conversation.

    The value of a sample is monitor name -> highest score of its replies. `Score.metadata["messages"]` has a row for
    each reply and monitor, see `MessageScore`. The bank's model reads the replies again, with its chat template, so the
    evaluated model may be any. If that model is the bank's own and has a chat template, the scores equal those during
    generation, provided that the text is split into the same tokens again. If a conversation is longer than the model
    can read, its latest tokens are read.

    Example:
        ```python
        task = inspect_ai.Task(dataset=samples, scorer=lamina.monitors.inspect_scorer(bank))
        ```

    Args:
        bank: The bank, with a tokenizer.
        monitors: Monitors, or names of stored ones. None: all stored ones.

    Raises:
        MissingExtraError: If `inspect-ai` is not installed.
        UnknownNameError: If a monitor, reader or label does not exist.
        ConfigError: If there is no monitor, a monitor does not fit its reader, or the bank has no tokenizer.
    """
    require_packages("inspect_scorer", "inspect", "inspect_ai")
    from anyio import to_thread
    from inspect_ai.scorer import Score, mean, scorer  # pyright: ignore[reportMissingImports]

    if bank.processor is None:
        raise ConfigError("inspect_scorer: the bank has no tokenizer. Use ReaderBank(model, processor=tokenizer).")
    chosen = check_monitors("inspect_scorer", monitors, bank.monitors, {name: bank[name] for name in bank})
    lock = Lock()  # samples are scored at the same time, and a pass on a CPU uses all cores

    def score_messages(messages: Sequence[Any]) -> list[MessageScore]:
        with lock:
            return _scores(bank, chosen, [(str(one.role), str(one.text)) for one in messages])

    @scorer(metrics={"*": [mean()]}, name="lamina_monitors")
    def lamina_monitors() -> Any:  # noqa: ANN401
        async def score(state: Any, target: Any) -> Any:  # noqa: ANN401, ARG001
            rows = await to_thread.run_sync(score_messages, state.messages)
            highest = {name: [row["score"] for row in rows if row["monitor"] == name] for name in chosen}
            value = {name: max(own, default=math.nan) for name, own in highest.items()}
            return Score(value=value, metadata={"messages": rows})

        return score

    return lamina_monitors()


def _scores(
    bank: ReaderBank, monitors: dict[str, AnyMonitor], messages: Sequence[tuple[str, str]]
) -> list[MessageScore]:
    """Return the scores of each reply. `messages` are pairs of a role and a text."""
    text, spans = _rendered(bank, messages)
    replies = [number for number, (role, _) in enumerate(messages) if role == "assistant"]
    tokenizer = tokenizer_of(bank.processor)
    encoded = tokenizer(text, return_tensors="pt", return_offsets_mapping=True, add_special_tokens=False)
    offsets, ids = encoded["offset_mapping"][0], encoded["input_ids"].to(bank.device)
    limit = length_limit(bank.model, tokenizer)
    rows: list[MessageScore] = []
    for number, (start, stop) in zip(replies, spans, strict=True):
        own = (offsets[:, 1] > start) & (offsets[:, 0] < stop) & (offsets[:, 1] > offsets[:, 0])
        end = int(own.nonzero().max()) + 1 if bool(own.any()) else 0
        part = slice(max(0, end - limit), end)  # the latest tokens, if the model cannot read them all
        batch: dict[str, Tensor] = {"input_ids": ids[:, part], "attention_mask": torch.ones_like(ids[:, part])}
        if own[part].any():
            rows += _of_reply(bank, monitors, number, batch, own[part].unsqueeze(0), int(own[: part.start].sum()))
    return rows


def _of_reply(
    bank: ReaderBank,
    monitors: dict[str, AnyMonitor],
    number: int,
    batch: dict[str, Tensor],
    own: Tensor,
    unread: int,
) -> list[MessageScore]:
    """Return the monitors' scores for one reply. The mask `own` is True at the reply's tokens in `batch`.

    `number` is its index among the messages, and `unread` the number of its first tokens that the model could not read.
    """
    reader = next(iter(monitors.values())).readers[0]
    finished = not is_causal(bank.model, bank.stacks[bank[reader].stack])
    scores = scores_of_monitors(bank, list(monitors.values()), batch, own, finished=finished)
    rows: list[MessageScore] = []
    for name, values in scores.items():
        reply = values[own]
        limit = monitors[name].threshold
        hits = [] if limit is None else (reply >= limit).nonzero().flatten().tolist()
        rows.append(
            {
                "message": number,
                "monitor": name,
                "score": float(reply.max()),
                "flagged_at": unread + hits[0] if hits else None,
                "unread": unread,
            }
        )
    return rows


def _rendered(bank: ReaderBank, messages: Sequence[tuple[str, str]]) -> tuple[str, Sequence[Span]]:
    """Return a conversation as one text, and the character spans of the replies in it.

    A tokenizer without a chat template reads the messages one per line.
    """
    if tokenizer_of(bank.processor).chat_template:
        chat = Chat([{"role": role, "content": text} for role, text in messages])
        return render(chat, bank.processor, op="inspect_scorer")  # pyright: ignore[reportArgumentType]
    text, spans = "", list[Span]()
    for role, content in messages:
        if role == "assistant":
            spans.append((len(text), len(text) + len(content)))
        text += f"{content}\n"
    return text, spans
