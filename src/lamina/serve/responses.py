"""Conversion between requests and responses, in the shapes that clients know, and examples and answers of a bank."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, TypedDict, cast

from lamina.errors import ConfigError
from lamina.serve.schemas import FileInput
from lamina.serve.uploads import TEXT, Example, Upload, medium_of
from lamina.tasks import kind_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lamina.bank import ReaderBank
    from lamina.heads.base import HeadConfig
    from lamina.serve.schemas import InferTensor, Inputs
    from lamina.serve.workers import Prediction
    from lamina.utils import JSON

_YES = ("yes", "true", "1", "flagged", "unsafe", "harmful", "toxic", "spam")  # labels that flag a text


class LabelScore(TypedDict):
    """A label with its probability, or its logit if raw scores were requested; None where it is not finite."""

    label: str
    score: float | None


class ModerationResult(TypedDict):
    """The moderation of one text in OpenAI's shape.

    Keys:
        flagged: Whether the text is flagged in any category.
        categories: Category -> whether the text is flagged in it.
        category_scores: Category -> score of the text.
    """

    flagged: bool
    categories: dict[str, bool]
    category_scores: dict[str, float]


class Moderation(TypedDict):
    """The response of OpenAI's moderation endpoint."""

    id: str
    model: str
    results: list[ModerationResult]


class TensorMetadata(TypedDict):
    """An input or output of a model, as KServe describes it; a size of -1 is the number of rows of a request."""

    name: str
    datatype: str
    shape: list[int]


class OutputMetadata(TensorMetadata):
    """An output of a model; `parameters` has the labels of its columns."""

    parameters: dict[str, list[str]]


class ModelMetadata(TypedDict):
    """KServe's description of a model."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[OutputMetadata]


class OutputTensor(TypedDict):
    """A tensor of a KServe response: `data` is flat, row by row; datatype "FP32" holds numbers, "BYTES" holds JSON."""

    name: str
    datatype: str
    shape: list[int]
    data: list[float] | list[str]


def examples_of(inputs: Inputs) -> tuple[list[Example], bool]:
    """Return the texts, pairs or files of a request's `inputs`, and whether there is a single example, not a list.

    Raises:
        ConfigError: If the examples are not all of one kind, or a file is not Base64.
    """
    if isinstance(inputs, str | FileInput):
        return [_example(inputs)], True
    texts = [part for part in inputs if isinstance(part, str)]
    if texts:  # a text or a pair; in a list of several examples, each example is a list itself
        return [_example(texts)], True
    examples = [_example(part) for part in inputs]
    if len({example.medium if isinstance(example, Upload) else type(example) for example in examples}) > 1:
        raise ConfigError("serve: inputs are of several kinds; all must be texts, or pairs, or images, or audio.")
    return examples, False


def _example(part: str | Sequence[str] | FileInput) -> Example:
    """Return one element of `inputs` as a text, a pair or an upload; raise ConfigError if a file is not Base64."""
    if isinstance(part, str):
        return part
    if isinstance(part, FileInput):
        return Upload.of(*part.content())
    return part[0] if len(part) == 1 else (part[0], part[1])


def tei(answer: Prediction, only_task: str | None) -> JSON | list[LabelScore]:
    """Return the answer about one text in the shape of text-embeddings-inference.

    Args:
        answer: Task -> prediction.
        only_task: Return this task's prediction alone. None: a mapping of all tasks.
    """
    return _ranked(answer[only_task]) if only_task is not None else {t: _ranked(said) for t, said in answer.items()}


def _ranked(prediction: JSON) -> JSON | list[LabelScore]:
    """Return a prediction of classes as labels with scores, best first; other predictions (spans, ...) unchanged."""
    scores = prediction.get("logits", prediction.get("probabilities")) if isinstance(prediction, dict) else None
    if scores is None:
        return prediction
    return [LabelScore(label=name, score=scores[name]) for name in sorted(scores, key=scores.__getitem__, reverse=True)]


def categories_of(bank: ReaderBank) -> dict[str, tuple[str, ...]]:
    """Return task -> the labels that flag a text, for the tasks of a bank that can be used for moderation.

    A multi-label task flags by each of its labels. A task with two labels flags by the label that is called "yes",
    "true", "1", "flagged", "unsafe", "harmful", "toxic", "spam", or like the task itself. All other tasks are left out.

    Raises:
        ConfigError: If no task flags texts.
    """
    categories: dict[str, tuple[str, ...]] = {}
    for task in bank:
        head = bank[task].config.head
        if not _scores_whole_texts(head) or medium_of(bank, task) != TEXT or head.problem_type == "regression":
            continue
        if head.problem_type == "multi_label":
            categories[task] = tuple(head.labels)
        elif len(head.labels) == 2:
            yes = [label for label in head.labels if label.lower() in (*_YES, task.lower())]
            if len(yes) == 1:
                categories[task] = (yes[0],)
    if not categories:
        rule = (
            f"one of its two labels must be called {', '.join(_YES)} or as the task, or it must be a multi-label task"
        )
        raise ConfigError(f"serve: no task of this bank flags texts; {rule}. Use /predict.")
    return categories


def _scores_whole_texts(head: HeadConfig) -> bool:
    """Return whether a head gives each text a score per label, or a number, and no scores of tokens or words."""
    kind = kind_of(head.kind)
    return kind.has_classes and not kind.per_token


def category_scores(answer: Prediction, categories: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Return category -> score of one text. A multi-label task has a category "task/label" for each of its labels.

    Args:
        answer: Task -> prediction, with probabilities.
        categories: The result of `categories_of`.
    """
    scores: dict[str, float] = {}
    for task, labels in categories.items():
        prediction = cast("Mapping[str, Mapping[str, float]]", answer[task])
        is_multi_label = "labels" in prediction
        scores |= {f"{task}/{name}" if is_multi_label else task: prediction["probabilities"][name] for name in labels}
    return scores


def moderation(scored: Sequence[Mapping[str, float]], model: str) -> Moderation:
    """Return the response of OpenAI's moderation endpoint; a score of at least 0.5 flags a text in a category.

    Args:
        scored: For each text, category -> score.
        model: Name of the model in the response.
    """
    results: list[ModerationResult] = []
    for scores in scored:
        flagged = {category: score >= 0.5 for category, score in scores.items()}
        results.append({"flagged": any(flagged.values()), "categories": flagged, "category_scores": dict(scores)})
    return {"id": f"modr-{uuid.uuid4().hex}", "model": model, "results": results}


def kserve_metadata(bank: ReaderBank, model: str, tasks: Sequence[str] | None, version: str) -> ModelMetadata:
    """Return KServe's description of a model: its inputs and outputs.

    Args:
        bank: The readers.
        model: Name of the model.
        tasks: Names of the readers that are the model's outputs. None: all.
        version: The model's version.
    """
    outputs: list[OutputMetadata] = []
    for task in tasks or [*bank]:
        head = bank[task].config.head
        is_scored = _scores_whole_texts(head)
        outputs.append(
            {
                "name": task,
                "datatype": "FP32" if is_scored else "BYTES",
                "shape": [-1, len(head.labels)] if is_scored else [-1],
                "parameters": {"labels": list(head.labels)},
            }
        )
    inputs: list[TensorMetadata] = [{"name": "text", "datatype": "BYTES", "shape": [-1]}]
    return {"name": model, "versions": [version], "platform": "lamina", "inputs": inputs, "outputs": outputs}


def kserve_texts(tensor: InferTensor) -> list[Example]:
    """Return the texts of a tensor `[rows]` or `[rows, 1]`, or the pairs of a tensor `[rows, 2]`.

    The data may be flat or nested by row, for any shape.

    Raises:
        ConfigError: If the data are not strings, have no row or do not fit the shape, or the shape is not allowed.
    """
    cells = [cell for part in tensor.data for cell in (part if isinstance(part, list) else [part])]
    size = 1
    for length in tensor.shape:
        size *= length
    columns = tensor.shape[1] if len(tensor.shape) == 2 else 1
    texts = [cell for cell in cells if isinstance(cell, str)]
    if len(texts) < len(cells) or size != len(cells) or columns not in (1, 2) or not cells:
        came = f"the shape is {tensor.shape} for {len(cells)} cells"
        rule = "texts [rows], texts [rows, 1] or pairs [rows, 2] are accepted, with at least one row"
        raise ConfigError(f"serve: {came}; {rule}.")
    if columns == 1:
        return [*texts]
    return [(texts[row], texts[row + 1]) for row in range(0, len(texts), 2)]


def kserve_outputs(bank: ReaderBank, answers: Sequence[Prediction]) -> list[OutputTensor]:
    """Return one tensor per task for the answers about several texts.

    A tensor is `[rows, labels]` for classes, `[rows, 1]` for regression, and `[rows]` of JSON for all other tasks.

    Args:
        bank: The readers, whose labels are the columns.
        answers: For each text, task -> prediction; at least one text.
    """
    return [_kserve_output(bank, task, [answer[task] for answer in answers]) for task in answers[0]]


def _kserve_output(bank: ReaderBank, task: str, predictions: Sequence[JSON]) -> OutputTensor:
    """Return the tensor of one task for its predictions about several texts; see `kserve_outputs`."""
    rows = [prediction for prediction in predictions if isinstance(prediction, dict)]
    if rows and "probabilities" in rows[0]:
        numbers = [row["probabilities"][label] for row in rows for label in bank[task].config.head.labels]
    elif rows and "value" in rows[0]:
        numbers = [row["value"] for row in rows]
    else:
        texts = [json.dumps(prediction) for prediction in predictions]
        return {"name": task, "datatype": "BYTES", "shape": [len(texts)], "data": texts}
    return {"name": task, "datatype": "FP32", "shape": [len(rows), len(numbers) // len(rows)], "data": numbers}
