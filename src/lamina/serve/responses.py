"""Convert requests of text-embeddings-inference and OpenAI to a bank's examples, and its answers to their responses."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, cast

from lamina.errors import ConfigError
from lamina.serve.schemas import FileInput
from lamina.serve.uploads import TEXT, Example, Upload, medium_of, readers_of
from lamina.serve.web_page import learnt_pairs
from lamina.tasks import kind_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from lamina.bank import ReaderBank
    from lamina.heads.base import HeadConfig
    from lamina.serve.schemas import Inputs
    from lamina.serve.workers import Prediction
    from lamina.utils import JSON

_YES = ("yes", "true", "1", "flagged", "unsafe", "harmful", "toxic", "spam")  # labels that flag a text


def examples_of(inputs: Inputs, pairs: Callable[[], bool]) -> tuple[list[Example], bool]:
    """Return a request's `inputs` as a list of texts, pairs or files, and whether they are one example and no list.

    `pairs` is called if `inputs` is a flat list of two texts; it returns whether these are a pair. Raises its errors,
    and ConfigError if the examples are not all texts, or all files of one kind, or a file is not Base64.
    """
    if isinstance(inputs, str | FileInput):
        return [_example(inputs)], True
    if len(inputs) == 2 and all(isinstance(part, str) for part in inputs) and pairs():
        return [_example([part for part in inputs if isinstance(part, str)])], True
    examples = [_example(part) for part in inputs]
    if len({example.medium if isinstance(example, Upload) else TEXT for example in examples}) > 1:
        raise ConfigError("serve: inputs are of several kinds; all must be texts or pairs, or images, or audio.")
    return examples, False


def reads_pairs(bank: ReaderBank, tasks: Sequence[str] | None) -> bool:
    """Return whether the readers `tasks` (None: all that read text) learnt from pairs, so that two texts are one pair.

    A reader about which this is not recorded counts as trained on single texts.

    Raises UnknownNameError if a reader does not exist, and ConfigError if one does not read text, none does, or only
    some of them were trained on pairs.
    """
    names = readers_of(bank, tasks, ["", ""])
    learnt = [name for name in names if learnt_pairs(bank[name])]
    if learnt and len(learnt) < len(names):
        other = next(name for name in names if name not in learnt)
        came = f"inputs are two texts; '{learnt[0]}' was trained on pairs, and '{other}' was not"
        raise ConfigError(f"serve: {came}. Send [[a, b]] for a pair, or [[a], [b]] for two texts.")
    return bool(learnt)


def _example(part: str | Sequence[str] | FileInput) -> Example:
    """Return an element of `inputs` as text, pair or upload; [a] is the text a. ConfigError if a file is not Base64."""
    if isinstance(part, str):
        return part
    if isinstance(part, FileInput):
        return Upload.of(*part.content())
    return part[0] if len(part) == 1 else (part[0], part[1])


def tei(answer: Prediction, only_task: str | None, top_k: int | None = None) -> JSON:
    """Return one text's answer in the shape of text-embeddings-inference: `top_k` labels per task (None: all).

    If `only_task` is set, the prediction of this task is returned alone; otherwise task -> prediction.
    """
    if only_task is not None:
        return _ranked(answer[only_task], top_k)
    return {task: _ranked(prediction, top_k) for task, prediction in answer.items()}


def check_function(bank: ReaderBank, names: Sequence[str], function: str) -> None:
    """Raise ConfigError if a client asks for scores by another function of the logits than a reader's own.

    Args:
        bank: The readers.
        names: Names of the readers that are asked, from `readers_of`. Readers that predict numbers are not checked.
        function: "softmax", "sigmoid", or "none" (logits, which every task has).
    """
    for name in names if function != "none" else ():
        problem = bank[name].config.head.problem_type
        own = "sigmoid" if problem == "multi_label" else "softmax"
        if function != own and problem != "regression":
            raise ConfigError(f"serve: function_to_apply is {function}, but scores of '{name}' are by {own}.")


def _ranked(prediction: JSON, top_k: int | None) -> JSON:
    """Return the `top_k` best labels (None: all), best first, as {"label", "score"}; other predictions unchanged."""
    scores = prediction.get("logits", prediction.get("probabilities")) if isinstance(prediction, dict) else None
    if scores is None:
        return prediction
    ranked = sorted(scores, key=scores.__getitem__, reverse=True)[:top_k]
    return [{"label": name, "score": scores[name]} for name in ranked]


def categories_of(bank: ReaderBank) -> dict[str, tuple[str, ...]]:
    """Return task -> the labels that flag a text, for the tasks of a bank that can be used for moderation.

    These are tasks that label whole texts. A multi-label task flags by each of its labels. A task with two labels flags
    by the label that is called "yes", "true", "1", "flagged", "unsafe", "harmful", "toxic", "spam", or like the task,
    in upper or lower case; it is left out if both or none are. All other tasks are left out. Raises ConfigError if no
    task flags texts.
    """
    categories: dict[str, tuple[str, ...]] = {}
    for task in bank:
        head = bank[task].config.head
        if not scores_whole_texts(head) or medium_of(bank, task) != TEXT or head.problem_type == "regression":
            continue
        if head.problem_type == "multi_label":
            categories[task] = tuple(head.labels)
        elif len(head.labels) == 2:
            yes = [label for label in head.labels if label.lower() in (*_YES, task.lower())]
            if len(yes) == 1:
                categories[task] = (yes[0],)
    if not categories:
        own = f"one of its two labels must be called {', '.join(_YES)} or as the task"
        rule = f"{own}, or it must be a multi-label task"
        raise ConfigError(f"serve: no task of this bank flags texts; {rule}. Use /predict.")
    return categories


def scores_whole_texts(head: HeadConfig) -> bool:
    """Return whether a head gives one result per text (a score per label, or a number), and not per token."""
    kind = kind_of(head.kind)
    return kind.has_classes and not kind.per_token


def moderation(answers: Sequence[Prediction], categories: Mapping[str, Sequence[str]], model: str) -> dict[str, JSON]:
    """Return the response of OpenAI's moderation endpoint to the predictions about each text.

    It has a random "id", the name `model`, and for each text in "results" its "category_scores" (category -> score),
    "categories" (category -> whether it is flagged there, by a score of at least 0.5), and "flagged": whether it is
    flagged in any category.

    `categories` is from `categories_of`. A task with two labels is one category; its score is the probability of the
    label that flags. A multi-label task has a category "task/label" for each of its labels.
    """
    results: list[JSON] = []
    for answer in answers:
        scores: dict[str, float] = {}
        for task, labels in categories.items():
            prediction = cast("Mapping[str, Mapping[str, float]]", answer[task])
            names = [f"{task}/{label}" for label in labels] if "labels" in prediction else [task]
            scores |= {name: prediction["probabilities"][label] for name, label in zip(names, labels, strict=True)}
        flagged = {category: score >= 0.5 for category, score in scores.items()}
        results.append({"flagged": any(flagged.values()), "categories": flagged, "category_scores": scores})
    return {"id": f"modr-{uuid.uuid4().hex}", "model": model, "results": results}
