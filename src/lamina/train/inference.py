"""Scoring and predicting: one pass per batch for all readers, answers put back in the order of the texts."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from lamina.data.batches import collate, length_batches
from lamina.data.encode import encode, length_limit
from lamina.data.windows import word_tokens
from lamina.errors import ConfigError
from lamina.train.checks import check_processor, check_tasks
from lamina.train.decode import decode, word_spans
from lamina.train.metrics import compute, per_class
from lamina.train.plan import group_tasks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from lamina.bank import ReaderBank
    from lamina.data.task import Task
    from lamina.data.windows import Encoded
    from lamina.train.plan import Group

    Words = Sequence[Sequence[tuple[int, int]]]

TOKEN = "token_classification"
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
    splits = {name: tasks[name].split(group.part) for name in names}
    words = {name: split.words for name, split in splits.items() if split.words is not None}
    answers = collect(bank, group.encoded, names, words, batch_size=batch_size, progress=progress)
    scores: dict[str, dict[str, Any]] = {}
    for name in names:
        task, guesses = tasks[name], [guess(answer, tasks[name].problem) for answer in answers[name]]
        scores[name] = compute(task, task.metrics, guesses, splits[name].labels)
        if details:
            scores[name]["per_class"] = per_class(task, guesses, splits[name].labels)
    return scores


def guess(logits: Tensor, problem: str) -> Any:
    """The prediction that a metric compares: a class id, one per word, a number, or zeros and ones."""
    if problem == "regression":
        return float(logits[0])
    if problem == "multi_label":
        return (logits > 0).int().tolist()
    return logits.argmax(-1).tolist()


def collect(
    bank: ReaderBank,
    encoded: Encoded,
    names: Sequence[str],
    words: Mapping[str, Words],
    *,
    batch_size: int,
    progress: bool = False,
) -> dict[str, list[Tensor]]:
    """Run the readers over encoded texts.

    Args:
        bank: The readers and their model.
        encoded: Windows of the texts.
        names: Which readers.
        words: Reader name -> spans of every text's words, for readers that answer word by word.
        batch_size: Windows per pass.
        progress: Show a progress bar.

    Returns:
        Reader name -> per text the logits `[classes]` (of its first window), or `[words, classes]`, each word's from
        the window that shows most around it. A word that has no token gets the label "O", or else the first.
    """
    texts = encoded.text[-1] + 1 if encoded.text else 0
    places = _places(encoded, words)
    answers: dict[str, list[Tensor]] = {}
    for name in names:
        head = bank[name].config.head
        blank = torch.zeros(len(head.labels))
        if name in words:
            blank[head.labels.index("O") if "O" in head.labels else 0] = 1.0
        answers[name] = [blank.repeat(len(words[name][t]), 1) if name in words else blank for t in range(texts)]
    was_training = bank.training
    bank.eval()
    try:
        with torch.no_grad():
            for rows in _bar(length_batches(encoded.lengths, batch_size), progress):
                inputs = collate([encoded.features[row] for row in rows], bank.processor)
                out = bank(**{key: value.to(bank.device) for key, value in inputs.items()}, readers=names)
                for name in names:
                    _file(
                        out[name].logits.float().cpu(),
                        rows,
                        encoded,
                        places.get(name),
                        answers[name],
                    )
    finally:
        bank.train(was_training)
    return answers


Places = list[list[tuple[int, int]]]  # per window: (position, word)


def _places(encoded: Encoded, words: Mapping[str, Words]) -> dict[str, Places]:
    """Reader name -> where in each window the words are that it counts; made once for readers of the same words."""
    made: dict[int, Places] = {}
    for spans in words.values():
        if id(spans) not in made:
            made[id(spans)] = [[] for _ in encoded.features]
            for found in word_tokens(encoded, spans):
                for word, place in enumerate(found):
                    if place is not None:
                        made[id(spans)][place[0]].append((place[1], word))
    return {name: made[id(spans)] for name, spans in words.items()}


def _file(logits: Tensor, rows: Sequence[int], encoded: Encoded, places: Places | None, answers: list[Tensor]) -> None:
    """Put one batch's logits where they belong."""
    for at, row in enumerate(rows):
        text = encoded.text[row]
        if places is None:
            if encoded.window[row] == 0:
                answers[text] = logits[at]
        elif places[row]:
            positions, words = zip(*places[row], strict=True)
            answers[text][list(words)] = logits[at, list(positions)]


def _bar(batches: list[list[int]], progress: bool) -> Iterable[list[int]]:
    if not progress:
        return batches
    from tqdm.auto import tqdm

    return tqdm(batches, unit="batch")


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
    tokens.

    Args:
        bank: The readers and their model.
        texts: Texts, or pairs of texts; the same kind throughout.
        batch_size: Windows per pass.
        readers: Which readers; None: all.
        progress: Show a progress bar.

    Returns:
        Per text, reader name -> answer. Classification: "label", "score" and "probabilities". Regression: "value".
        Multi-label: "labels" and "probabilities". Tokens: a list of spans with "start" and "end" (characters), "label",
        "text" and "score".

    Raises:
        ConfigError: If there is no processor or reader, or something is not a text.
        UnknownNameError: If a reader does not exist.
    """
    check_processor(bank, "predict")
    names = list(bank) if readers is None else list(readers)
    if not names:
        raise ConfigError("predict: there is no reader; at least one is needed. Train one, or name one of the bank's.")
    _check_texts(texts)
    if not texts:
        return []
    token = [name for name in names if bank[name].config.head.kind == TOKEN]
    paired = not isinstance(texts[0], str)
    if token and paired:
        raise ConfigError(
            f"predict: reader '{token[0]}' reads single texts, and pairs were given. Leave it out, or give texts."
        )
    spans = [word_spans(text) for text in texts if isinstance(text, str)]
    encoded = encode(
        texts,
        bank.processor,
        max_length=length_limit(bank.model, bank.processor, _trained_with(bank, names, "max_length")),
        windows=bool(token),
        stride=_trained_with(bank, names, "stride"),
        offsets=bool(token),
    )
    cut = encoded.truncated or (encoded.window.count(1) if len(token) < len(names) else 0)
    if cut:
        logger.warning("predict: %d texts are longer than the model reads; readers of whole texts saw their start", cut)
    words = dict.fromkeys(token, spans)
    answers = collect(bank, encoded, names, words, batch_size=batch_size, progress=progress)
    results: list[dict[str, Any]] = []
    for row, text in enumerate(texts):
        results.append(
            {n: decode(answers[n][row], bank[n].config.head, text, spans[row] if spans else []) for n in names}
        )
    return results


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
