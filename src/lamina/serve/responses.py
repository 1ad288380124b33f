"""Answers of readers in the shapes that clients know."""

from __future__ import annotations

import json
import uuid
from typing import TYPE_CHECKING, Any

from lamina.errors import ConfigError
from lamina.serve.schemas import FileInput
from lamina.serve.uploads import TEXT, Upload, medium_of
from lamina.tasks import kind_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from lamina.bank import ReaderBank
    from lamina.heads.base import HeadConfig
    from lamina.serve.schemas import InferTensor

_YES = ("yes", "true", "1", "flagged", "unsafe", "harmful", "toxic", "spam")


def examples_of(inputs: Any) -> tuple[list[Any], bool]:
    """The texts, pairs or files of a request's `inputs`, and whether it is one alone.

    Raises:
        ConfigError: If they are of several kinds, or a file is not Base64.
    """
    if isinstance(inputs, str | FileInput) or all(isinstance(part, str) for part in inputs):
        return [_one(inputs)], True
    examples = [_one(part) for part in inputs]
    if len({getattr(example, "medium", type(example)) for example in examples}) > 1:
        raise ConfigError("serve: inputs are of several kinds; all must be texts, or pairs, or images, or sound.")
    return examples, False


def _one(parts: str | Sequence[str] | FileInput) -> Any:
    if isinstance(parts, str):
        return parts
    if isinstance(parts, FileInput):
        return Upload.of(*parts.sent())
    return parts[0] if len(parts) == 1 else tuple(parts)


def tei(answer: Mapping[str, Any], alone: str | None) -> Any:
    """Task -> what is said, or what one task says: labels with their scores, best first."""
    return _ranked(answer[alone]) if alone is not None else {task: _ranked(said) for task, said in answer.items()}


def _ranked(said: Any) -> Any:
    """Classes as text-embeddings-inference has them; spans, numbers and candidates as they are."""
    scores = said.get("logits", said.get("probabilities")) if isinstance(said, dict) else None
    if scores is None:
        return said
    return [{"label": label, "score": scores[label]} for label in sorted(scores, key=scores.__getitem__, reverse=True)]


def categories_of(bank: ReaderBank) -> dict[str, tuple[str, ...]]:
    """The tasks that are answered by yes or no -> the labels that flag a text; ConfigError if there is none.

    Of two labels that is the one called "yes" or the like, or as the task; other tasks flag nothing.
    """
    categories: dict[str, tuple[str, ...]] = {}
    for task in bank:
        head = bank[task].config.head
        if not _is_of_whole_texts(head) or medium_of(bank, task) != TEXT or head.problem_type == "regression":
            continue
        if head.problem_type == "multi_label":
            categories[task] = tuple(head.labels)
        elif len(head.labels) == 2:
            yes = [label for label in head.labels if label.lower() in (*_YES, task.lower())]
            if len(yes) == 1:
                categories[task] = (yes[0],)
    if not categories:
        rule = f"of its two labels one must be called {', '.join(_YES)} or as the task, or it must give several at once"
        raise ConfigError(f"serve: no task of this bank flags texts; {rule}. Use /predict.")
    return categories


def _is_of_whole_texts(head: HeadConfig) -> bool:
    """Whether it gives a score for each of its labels, or a number, to each text."""
    kind = kind_of(head.kind)
    return kind.has_classes and not kind.per_token


def flags(answer: Mapping[str, Any], categories: Mapping[str, Sequence[str]]) -> dict[str, float]:
    """Category -> score; a task that gives several labels at once has a category for each."""
    scores: dict[str, float] = {}
    for task, labels in categories.items():
        probabilities = answer[task]["probabilities"]
        several = "labels" in answer[task]
        scores |= {f"{task}/{label}" if several else task: probabilities[label] for label in labels}
    return scores


def moderation(scored: Sequence[Mapping[str, float]], model: str) -> dict[str, Any]:
    """As OpenAI's endpoint answers; a text is flagged in a category from one half on."""
    results = []
    for scores in scored:
        flagged = {category: score >= 0.5 for category, score in scores.items()}
        results.append({"flagged": any(flagged.values()), "categories": flagged, "category_scores": dict(scores)})
    return {"id": f"modr-{uuid.uuid4().hex}", "model": model, "results": results}


def kserve_metadata(bank: ReaderBank, model: str, tasks: Sequence[str] | None, version: str) -> dict[str, Any]:
    """Inputs and outputs of a model of KServe's."""
    outputs = []
    for task in tasks or [*bank]:
        head = bank[task].config.head
        scored = _is_of_whole_texts(head)
        shape = [-1, len(head.labels)] if scored else [-1]
        labels = {"labels": list(head.labels)}
        outputs.append({"name": task, "datatype": "FP32" if scored else "BYTES", "shape": shape, "parameters": labels})
    inputs = [{"name": "text", "datatype": "BYTES", "shape": [-1]}]
    return {"name": model, "versions": [version], "platform": "lamina", "inputs": inputs, "outputs": outputs}


def kserve_texts(tensor: InferTensor) -> list[Any]:
    """The texts `[rows]` or pairs `[rows, 2]` of a tensor; ConfigError if it is none."""
    data = [cell for part in tensor.data for cell in (part if isinstance(part, list) else [part])]
    size = 1
    for length in tensor.shape:
        size *= length
    wide = tensor.shape[1] if len(tensor.shape) == 2 else 1
    if not all(isinstance(cell, str) for cell in data) or size != len(data) or wide not in (1, 2) or not data:
        came = f"the shape is {tensor.shape} for {len(data)} cells"
        raise ConfigError(f"serve: {came}; texts [rows], [rows, 1] or pairs [rows, 2] are taken, one row at least.")
    return data if wide == 1 else [tuple(data[at : at + 2]) for at in range(0, len(data), 2)]


def kserve_outputs(bank: ReaderBank, found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A tensor for each task."""
    outputs = []
    for task in found[0]:
        said = [answer[task] for answer in found]
        labels = list(bank[task].config.head.labels)
        if isinstance(said[0], dict) and "probabilities" in said[0]:
            data = [one["probabilities"][label] for one in said for label in labels]
        elif isinstance(said[0], dict) and "value" in said[0]:
            data = [one["value"] for one in said]
        else:
            data = [json.dumps(one) for one in said]
            outputs.append({"name": task, "datatype": "BYTES", "shape": [len(said)], "data": data})
            continue
        shape = [len(said), len(data) // len(said)]
        outputs.append({"name": task, "datatype": "FP32", "shape": shape, "data": data})
    return outputs
