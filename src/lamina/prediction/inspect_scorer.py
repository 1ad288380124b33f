"""A scorer for Inspect AI: the monitors of a bank score each reply of a conversation."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, TypedDict, cast

import torch

from lamina.bank.monitoring import check_monitors, scores_of_monitors
from lamina.data.encode import encode, length_limit
from lamina.errors import ConfigError, NotFiniteError, require_packages
from lamina.layers.causality import is_causal
from lamina.layers.types import special_ids, tokenizer_of
from lamina.prediction.calibrate import range_mask
from lamina.tasks.chat_templates import REPLIES, Chat, render
from lamina.train.base import to_device
from lamina.utils import pluralize

if TYPE_CHECKING:
    from torch import Tensor

    from lamina.bank import ReaderBank
    from lamina.layers.types import Processor
    from lamina.monitors.cascade import AnyMonitor


class MessageScore(TypedDict):
    """A monitor's highest score in one reply.

    Attributes:
        message: Index of the reply among the messages, from 0.
        monitor: Name of the monitor.
        score: The highest score.
        flagged_at: Index, from 0, of the reply's token at which it was flagged; None: it was not, or there is no
            threshold.
        unread: Number of tokens at the beginning of the reply that were not scored, because the reply is too long.
    """

    message: int
    monitor: str
    score: float
    flagged_at: int | None
    unread: int


def inspect_scorer(bank: ReaderBank, monitors: Sequence[AnyMonitor | str] | None = None) -> Any:  # noqa: ANN401
    """Return a scorer of Inspect AI that stores the score of each monitor for each reply of a conversation.

    The value of a sample is monitor name -> highest score of its replies; NaN if no reply has a token.
    `Score.metadata["messages"]` has a row for each reply and monitor, see `MessageScore`, and the explanation says the
    same in words. The bank's model reads the replies again, so any model may have written them. If the bank's own model
    did, the scores equal those during generation, provided that the text is split into the same tokens again. If the
    model reads in both directions, scores depend on later tokens of the reply too.

    Conversations are written by the tokenizer's chat template; if one is longer than the model can read, its latest
    tokens are read. Without a template, a reply is read after the messages before it, one per line, as `lamina.monitor`
    reads a prompt and a reply. The scorer raises NotFiniteError if a score is NaN.

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
        ConfigError: If there is no monitor, two have the same name, a monitor does not fit its reader, a reader needs
            later tokens, or the bank has no tokenizer.
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
            text = "\n".join(map(_sentence, rows)) or "No reply was scored."
            return Score(value=value, explanation=text, metadata={"messages": rows})

        return score

    return lamina_monitors()


def _sentence(row: MessageScore) -> str:
    at = row["flagged_at"]
    flagged = "" if at is None else f", flagged after {pluralize(at + 1, 'token')}"
    return f"Message {row['message']}: {row['monitor']} {row['score']:.3g}{flagged}."


class _Reading(NamedTuple):
    """One pass of the model that scores tokens of a reply: its inputs, and where the reply's tokens are in them.

    `batch` is the model's, for one text. `reply` is True at the reply's tokens, `[1, tokens]`, and `own` at those that
    are scored: all but the special ones. `first` is the index of the first token of `reply` among all of the reply.
    """

    batch: dict[str, Tensor]
    reply: Tensor
    own: Tensor
    first: int


class _Trained(NamedTuple):
    """The options `max_length`, `stride` and `add_prefix_space` of a reader's training. None: the default."""

    max_length: int | None
    stride: int | None
    add_prefix_space: bool | None


def _scores(
    bank: ReaderBank, monitors: dict[str, AnyMonitor], messages: Sequence[tuple[str, str]]
) -> list[MessageScore]:
    """Return the rows of all replies (role `REPLIES`), in their order: one per monitor, none for an empty reply.

    `messages` are pairs of a role and a text. Raises NotFiniteError if a score is NaN.
    """
    replies = [number for number, (role, _) in enumerate(messages) if role == REPLIES]
    if tokenizer_of(bank.processor).chat_template:
        readings = _readings_of_chat(bank, messages)
        both = zip(replies, readings, strict=True)
        return [row for number, own in both if own for row in _of_reply(bank, monitors, number, own)]
    texts = [text for _, text in messages]
    alike: dict[_Trained, dict[str, AnyMonitor]] = defaultdict(dict)
    for name, monitor in monitors.items():
        alike[_Trained(*map(bank[monitor.readers[0]].info.get, _Trained._fields))][name] = monitor
    rows: list[MessageScore] = []
    for number in replies:
        for trained, some in alike.items():
            own = _readings_of_pair(bank, ("\n".join(texts[:number]), texts[number]), trained)
            rows += _of_reply(bank, some, number, own) if own else []
    return rows


def _readings_of_chat(bank: ReaderBank, messages: Sequence[tuple[str, str]]) -> Iterator[list[_Reading]]:
    """Yield for each reply in a chat a list with the one pass that scores it; [] if the reply has no token.

    If the chat up to the end of the reply is too long for the model, its latest tokens are read. Raises ConfigError if
    the chat template fails.
    """
    tokenizer = tokenizer_of(bank.processor)
    chat = Chat([{"role": role, "content": text} for role, text in messages])
    text, spans = render(chat, tokenizer, op="inspect_scorer")
    encoded = tokenizer(text, return_tensors="pt", return_offsets_mapping=True, add_special_tokens=False)
    offsets, ids = encoded["offset_mapping"][0], encoded["input_ids"]
    limit, special = length_limit(bank.model, tokenizer), torch.isin(ids[0], special_ids(tokenizer))
    for start, stop in spans:
        reply = (offsets[:, 1] > start) & (offsets[:, 0] < stop) & (offsets[:, 1] > offsets[:, 0])
        own = reply & ~special
        end = int(own.nonzero().max()) + 1 if bool(own.any()) else 0
        part = slice(max(0, end - limit), end)
        batch: dict[str, Tensor] = {"input_ids": ids[:, part], "attention_mask": torch.ones_like(ids[:, part])}
        first = int(reply[: part.start].sum())
        reading = _Reading(batch, reply[part].unsqueeze(0), own[part].unsqueeze(0), first)
        yield [reading] if own[part].any() else []


def _readings_of_pair(bank: ReaderBank, pair: tuple[str, str], trained: _Trained) -> list[_Reading]:
    """Return the passes that score the reply of a pair (prompt, reply): one per window with a token of the reply."""
    encoded = encode(
        [pair],
        cast("Processor", bank.processor),
        max_length=trained.max_length or length_limit(bank.model, bank.processor),
        stride=trained.stride,
        add_prefix_space=bool(trained.add_prefix_space),
        windows=True,
    )
    special = special_ids(bank.processor)
    readings: list[_Reading] = []
    for number, tokens in enumerate(encoded.token_ranges):
        batch = encoded.batch([number], {})
        reply = range_mask([tokens], batch["input_ids"].shape[1])
        own = reply & ~torch.isin(batch["input_ids"], special)
        readings.append(_Reading(batch, reply, own, tokens.number))
    return [reading for reading in readings if reading.own.any()]


def _of_reply(
    bank: ReaderBank, monitors: dict[str, AnyMonitor], number: int, readings: Sequence[_Reading]
) -> list[MessageScore]:
    """Return a row per monitor about one reply; `number` is the reply's index among the messages.

    `readings` are the passes that score the reply; a row has the highest score of all. Raises NotFiniteError if a score
    is NaN.
    """
    named = list(monitors.values())
    finished = not is_causal(bank.model, bank.stacks[bank[named[0].readers[0]].stack])
    rows: dict[str, MessageScore] = {}
    for batch, reply, own, first in readings:
        try:
            scores = scores_of_monitors(bank, named, to_device(batch, bank.device), own, finished=finished)
        except NotFiniteError as error:
            problem = f"the score of message {number} by '{error.name}' is not a number"
            raise NotFiniteError(f"inspect_scorer: {problem}. Load the model in float32.", name=error.name) from None
        for name, values in scores.items():
            scored, limit = values[own], monitors[name].threshold
            row = rows.setdefault(
                name,
                {"message": number, "monitor": name, "score": -math.inf, "flagged_at": None, "unread": first},
            )
            row["score"] = max(row["score"], float(scored.max()))
            hits = [] if limit is None else (own & (values >= limit)).nonzero().tolist()
            if hits and row["flagged_at"] is None:
                row["flagged_at"] = first + int(reply[0, : hits[0][1]].sum())
    return list(rows.values())
