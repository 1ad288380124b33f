"""Scoring and predicting: one pass per batch for all readers, answers put back in the order of the texts."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

import torch

from lamina.data.batches import bar, collate, length_batches
from lamina.data.encode import encode, length_limit
from lamina.data.windows import IGNORED
from lamina.errors import ConfigError
from lamina.tasks.kinds import MASKED, TOKEN
from lamina.tasks.masking import mask_token
from lamina.tasks.metrics import TokenSums, compute, per_class
from lamina.tasks.predictions import BEST, best_tokens, decode, fill, mask_spans, word_spans
from lamina.train.answers import MOST_SCORES, asking, blank, guess, places_of, put
from lamina.train.checks import check_processor, check_tasks
from lamina.train.plan import group_tasks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from lamina.bank import ReaderBank
    from lamina.data.windows import Encoded
    from lamina.heads.masked_lm import MaskedLMHead
    from lamina.tasks.task import Task
    from lamina.train.plan import Group
    from lamina.train.states import States

    Words = Sequence[Sequence[tuple[int, int]]]

logger = logging.getLogger(__name__)


def evaluate(
    bank: ReaderBank,
    tasks: Mapping[str, Task],
    *,
    split: str = "validation",
    batch_size: int = 64,
    per_class: bool = False,
    max_length: int | None = None,
    progress: bool = False,
) -> dict[str, dict[str, Any]]:
    """Score readers on a part of their tasks; tasks over the same texts share every pass.

    Args:
        bank: The readers and their model.
        tasks: Reader name -> task.
        split: "train", "validation" or "test".
        batch_size: Windows per pass.
        per_class: Add "per_class", a list of rows with label, precision, recall, F1 and count.
        max_length: Tokens per window; None: what each group's readers were trained with.
        progress: Show a progress bar.

    Returns:
        Reader name -> metric -> value.

    Raises:
        UnknownNameError: If a reader or the part does not exist.
        ConfigError: If a task does not fit its reader.
    """
    check_tasks(bank, tasks, parts=(split,))
    names = list(tasks)
    limit = length_limit(bank.model, bank.processor, max_length or _trained_with(bank, names, "max_length"))
    stride = _trained_with(bank, names, "stride")
    groups = group_tasks(tasks, split, bank.processor, max_length=limit, stride=stride)
    scores: dict[str, dict[str, Any]] = {}
    for group in groups:
        for name in group.names:
            if cut := group.cut(name):
                logger.warning("evaluate: %s saw only the start of %d texts that are longer than it reads", name, cut)
        found = score(bank, group, tasks, group.names, batch_size=batch_size, details=per_class, progress=progress)
        scores |= found
    return {name: scores[name] for name in tasks}


def score(
    bank: ReaderBank,
    group: Group,
    tasks: Mapping[str, Task],
    names: Sequence[str],
    *,
    batch_size: int,
    details: bool = False,
    progress: bool = False,
) -> dict[str, dict[str, Any]]:
    """Score some of a group's readers.

    Args:
        bank: The readers and their model.
        group: Encoded texts, with the part of the tasks they come from.
        tasks: Reader name -> task.
        names: Which readers.
        batch_size: Windows per pass.
        details: Add "per_class" to each.
        progress: Show a progress bar.
    """
    if group.masking is not None:
        return _score_hidden(bank, group, tasks, names, batch_size=batch_size, details=details, progress=progress)
    splits = {name: tasks[name].split(group.part) for name in names}
    words = {name: split.words for name, split in splits.items() if split.words is not None}
    answers = collect(bank, group.encoded, names, words, batch_size=batch_size, progress=progress, states=group.states)
    scores: dict[str, dict[str, Any]] = {}
    for name in names:
        task, guesses = tasks[name], [guess(answer, tasks[name].problem) for answer in answers[name]]
        scores[name] = compute(task, task.metrics, guesses, splits[name].labels)
        if details:
            scores[name]["per_class"] = per_class(task, guesses, splits[name].labels)
    return scores


def _score_hidden(
    bank: ReaderBank,
    group: Group,
    tasks: Mapping[str, Task],
    names: Sequence[str],
    *,
    batch_size: int,
    details: bool,
    progress: bool,
) -> dict[str, dict[str, Any]]:
    """Score readers of masked language modelling; nothing is kept but sums."""
    sums = {name: TokenSums() for name in names}
    lengths = group.encoded.lengths
    fits = MOST_SCORES // (max(lengths, default=1) * max(_vocabulary(bank, name) for name in names))
    with asking(bank):
        for rows in bar(length_batches(lengths, max(1, min(batch_size, fits))), progress):
            batch = group.batch(rows, names, bank.processor)
            labels = {name: one.to(bank.device) for name, one in batch.pop("labels").items()}
            out = bank(**_placed(batch, bank), labels=labels)
            for name in names:
                given = labels[name] != IGNORED
                logits = out[name].logits  # of the hidden tokens alone, or of all
                sums[name].add(logits if logits.ndim == 2 else logits[given], labels[name][given])
    found = {name: dict[str, Any](sums[name].scores(tasks[name].metrics)) for name in names}
    return {name: scores | ({"per_class": []} if details else {}) for name, scores in found.items()}


def _vocabulary(bank: ReaderBank, name: str) -> int:
    """How many tokens a reader of masked language modelling chooses from."""
    return cast("MaskedLMHead", bank[name].head).bias.numel()


def _placed(batch: Mapping[str, Any], bank: ReaderBank) -> dict[str, Any]:
    """A batch on the model's device."""
    return {key: value.to(bank.device) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


def collect(
    bank: ReaderBank,
    encoded: Encoded,
    names: Sequence[str],
    words: Mapping[str, Words],
    *,
    batch_size: int,
    progress: bool = False,
    states: States | None = None,
) -> dict[str, list[Tensor]]:
    """Run the readers over encoded texts.

    Args:
        bank: The readers and their model.
        encoded: Windows of the texts.
        names: Which readers.
        words: Reader name -> spans of every text's words, for readers that answer word by word; of its mask tokens,
            for readers that fill those in.
        batch_size: Windows per pass.
        progress: Show a progress bar.
        states: The windows' cached states, to be read in place of runs of the model.

    Returns:
        Reader name -> per text the logits `[classes]` (of its first window), or `[words, classes]`, each word's from
        the window that shows most around it. A word that has no token gets the label "O", or else the first. Of mask
        tokens the likeliest entries alone, `[masks, best, 2]`, see `best_tokens`.
    """
    texts = encoded.text[-1] + 1 if encoded.text else 0
    places = places_of(encoded, words)
    answers = {name: _blank(bank, name, words.get(name), texts) for name in names}
    masked = {name for name in names if bank[name].config.head.kind == MASKED}
    with asking(bank):
        for rows in bar(length_batches(encoded.lengths, batch_size), progress):
            inputs = collate([encoded.features[row] for row in rows], bank.processor)
            inputs = _placed(inputs, bank)
            if states is None:
                out = bank(**inputs, readers=names)
            else:
                out = bank.read_states(states.batch(rows), inputs, readers=names)
            for name in names:
                if name in masked:
                    put(out[name].logits, rows, encoded, places[name], answers[name], shrink=best_tokens)
                else:
                    put(out[name].logits.float().cpu(), rows, encoded, places.get(name), answers[name])
    return answers


def _blank(bank: ReaderBank, name: str, words: Words | None, texts: int) -> list[Tensor]:
    """A reader's answers before anything was read."""
    head = bank[name].config.head
    if head.kind == MASKED:
        best = min(BEST, _vocabulary(bank, name))
        return [torch.zeros(len(masks), best, 2) for masks in words or ()]
    return blank(head.labels, words, texts)


def _trained_with(bank: ReaderBank, names: Sequence[str], option: str) -> int | None:
    """The largest value of an option that the readers were trained with; None where one does not say."""
    values = [bank[name].info.get(option) for name in names]
    known = [int(value) for value in values if value is not None]
    return max(known) if len(known) == len(values) else None


def predict(
    bank: ReaderBank,
    texts: Sequence[str | tuple[str, str]],
    *,
    batch_size: int = 32,
    readers: Sequence[str] | None = None,
    progress: bool = False,
) -> list[dict[str, Any]]:
    """Predict from texts: every reader's answer, off one pass per batch.

    Texts longer than the model reads are cut for readers of whole texts, and read in overlapping windows by readers of
    tokens. Readers of masked language modelling fill in the mask tokens that stand in a text, such as "[MASK]".

    Args:
        bank: The readers and their model.
        texts: Texts, or pairs of texts; the same kind throughout.
        batch_size: Windows per pass.
        readers: Which readers; None: all.
        progress: Show a progress bar.

    Returns:
        Per text, reader name -> answer. Classification: "label", "score" and "probabilities". Regression: "value".
        Multi-label: "labels" and "probabilities". Tokens: a list of spans with "start" and "end" (characters), "label",
        "text" and "score". Masked language modelling: per mask token its "start" and "end", and "candidates", the five
        likeliest with "token" and "score", best first; an empty list for a text without one.

    Raises:
        ConfigError: If there is no processor or reader, something is not a text, or there is no mask token to fill in.
        UnknownNameError: If a reader does not exist.
    """
    check_processor(bank, "predict")
    names = list(bank) if readers is None else list(readers)
    if not names:
        raise ConfigError("predict: there is no reader; at least one is needed. Train one, or name one of the bank's.")
    _check_texts(texts)
    if not texts:
        return []
    words = _asked_words(bank, names, texts)
    encoded = encode(
        texts,
        bank.processor,
        max_length=length_limit(bank.model, bank.processor, _trained_with(bank, names, "max_length")),
        windows=bool(words),
        stride=_trained_with(bank, names, "stride"),
        offsets=bool(words),
    )
    cut = encoded.truncated or (encoded.window.count(1) if len(words) < len(names) else 0)
    if cut:
        logger.warning("predict: %d texts are longer than the model reads; readers of whole texts saw their start", cut)
    answers = collect(bank, encoded, names, words, batch_size=batch_size, progress=progress)
    results: list[dict[str, Any]] = []
    for row, text in enumerate(texts):
        spans = {name: words[name][row] if name in words else () for name in names}
        results.append({name: _answer(bank, name, answers[name][row], text, spans[name]) for name in names})
    return results


def _asked_words(bank: ReaderBank, names: Sequence[str], texts: Sequence[str | tuple[str, str]]) -> dict[str, Words]:
    """What readers that answer within a text answer about, text by text."""
    kinds = {name: bank[name].config.head.kind for name in names}
    inside = [name for name in names if kinds[name] in (TOKEN, MASKED)]
    if inside and not isinstance(texts[0], str):
        raise ConfigError(
            f"predict: reader '{inside[0]}' reads single texts, and pairs were given. Leave it out, or give texts."
        )
    found: dict[str, Words] = {}
    if TOKEN in kinds.values():
        found[TOKEN] = [word_spans(str(text)) for text in texts]
    if MASKED in kinds.values():
        token = mask_token(bank.processor, "predict")
        found[MASKED] = [mask_spans(str(text), token) for text in texts]
    return {name: found[kinds[name]] for name in inside}


def _answer(
    bank: ReaderBank, name: str, answer: Tensor, text: str | tuple[str, str], words: Sequence[tuple[int, int]]
) -> Any:
    head = bank[name].config.head
    return fill(answer, words, bank.processor) if head.kind == MASKED else decode(answer, head, text, words)


def _check_texts(texts: Sequence[Any]) -> None:
    if isinstance(texts, str):
        raise ConfigError("predict: got one text; a list of texts is needed. Put it in a list.")
    kind = str if texts and isinstance(texts[0], str) else tuple
    for row, text in enumerate(texts):
        parts = [text] if kind is str else text if isinstance(text, tuple | list) and len(text) == 2 else [None]
        if not all(isinstance(part, str) for part in parts):
            raise ConfigError(
                f"predict: entry {row} is {type(text).__name__}; all must be texts, or all pairs of texts. Check it."
            )
