"""Alternatives to Lamina's readers, for `frontier.py`: regression on embeddings, LoRA and fine-tuning."""

from __future__ import annotations

import time
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

import lamina
from lamina.data.batches import length_batches
from lamina.tasks.base import EncodeOptions, GenerationOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from lamina import Task

RATES = {"lora": (3e-4, 1e-3, 3e-3, 1e-2), "fine-tuning": (3e-5, 1e-4, 3e-4)}
STRENGTHS = (0.01, 0.1, 1.0, 10.0)
MIXED = "LoRA, one mixed batch"  # a copy of the batch per task, each with its adapter, in one pass


def fine_tuned(task: Task, *, seed: int, max_length: int, epochs: int, only: str | None) -> dict[str, Any]:
    """Fine-tune the whole model at each learning rate, or at the one that `only` names; return the best result."""
    rows = []
    for rate in _rates("fine-tuning", only):
        torch.manual_seed(seed)
        model, tokenizer = _with_head(task)
        options: dict[str, Any] = {"epochs": epochs, "batch_size": 16, "learning_rate": rate, "seed": seed}
        options |= {"max_length": max_length, "warmup_ratio": 0.1, "test": True, "progress": False}
        result = lamina.finetune(model, task, processor=tokenizer, **options)
        [best], [test] = result.best.values(), result.test.values()
        size = sum(parameter.numel() for parameter in model.parameters())
        rows.append({"variant": f"rate {rate:g}", "score": test[task.metric], "held out": best[task.metric]})
        rows[-1] |= {"trained": size, "stored": size, "seconds": result.seconds}
    return _best(rows)


def lora(task: Task, *, seed: int, max_length: int, epochs: int, only: str | None) -> dict[str, Any]:
    """Train LoRA adapters of rank 8 on queries and values, and the head, at each rate; return the best result."""
    rows = []
    for rate in _rates("lora", only):
        torch.manual_seed(seed)
        start = time.perf_counter()
        model, tokenizer = _with_head(task)
        adapted = _adapted(model)
        trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.0)
        parts = {part: _Part(task, part, tokenizer, max_length) for part in ("train", "validation", "test")}
        steps = epochs * len(parts["train"].batches(seed))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step, steps=steps: 1 - step / steps)
        best, state = -2.0, {}
        for epoch in range(epochs):
            adapted.train()
            for batch, labels in parts["train"].rows(seed + 1000 * epoch):
                loss = adapted(**batch, labels=labels).loss
                loss.backward()
                torch.nn.utils.clip_grad_norm_(trained, 1.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            if (score := parts["validation"].score(adapted)) > best:
                best, state = score, [parameter.detach().clone() for parameter in trained]
        with torch.no_grad():
            for parameter, kept in zip(trained, state, strict=True):
                parameter.copy_(kept)
        size = sum(parameter.numel() for parameter in trained)
        rows.append({"variant": f"rate {rate:g}", "held out": best, "trained": size, "stored": size})
        rows[-1]["score"] = parts["test"].score(adapted)
        rows[-1]["seconds"] = time.perf_counter() - start
    return _best(rows)


def embedded(task: Task, *, seed: int, max_length: int, only: str | None) -> dict[str, Any]:
    """Fit a regression on the mean of the last hidden states, and return its result.

    For a pair of texts, the features are both means, their distance and their product.
    """
    from sklearn.linear_model import LogisticRegression, Ridge

    start = time.perf_counter()
    model, tokenizer = lamina.load("minilm")
    data = {part: _embeddings(task, part, model, tokenizer, max_length) for part in ("train", "validation", "test")}
    inputs, labels = data["train"]
    rows = []
    embedding = time.perf_counter() - start
    for strength in STRENGTHS:
        if only not in (None, f"C {strength:g}"):
            continue
        start = time.perf_counter()
        if task.problem_type == "regression":
            fitted: Any = Ridge(alpha=1 / strength, random_state=seed).fit(inputs, labels)
        else:
            fitted = LogisticRegression(C=strength, max_iter=2000, random_state=seed).fit(inputs, labels)
        held, test = (_metric(task, part, fitted.predict(data[part][0])) for part in ("validation", "test"))
        size = inputs.shape[1] * (1 if task.problem_type == "regression" else len(task.labels))
        rows.append({"variant": f"C {strength:g}", "score": test, "held out": held, "trained": size, "stored": size})
        rows[-1]["seconds"] = embedding + time.perf_counter() - start
    return _best(rows)


def lora_passes(inputs: Mapping[str, Tensor], *, tasks: int) -> dict[str, Callable[[], object]]:
    """Return two ways in which adapters answer several tasks for one batch: one by one, or in one mixed batch."""
    peft: Any = import_module("peft")
    model, _ = lamina.load("minilm")
    names = [f"t{number}" for number in range(tasks)]
    adapted = _adapted(model, names[0])
    for name in names[1:]:
        adapted.add_adapter(name, peft.LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value"]))
    adapted.eval()

    def in_turn() -> None:
        for name in names:
            adapted.set_adapter(name)
            adapted(**inputs)

    count = len(inputs["input_ids"])
    mixed = {key: value.repeat(tasks, 1) for key, value in inputs.items()}
    who = [name for name in names for _ in range(count)]
    return {"LoRA": in_turn, MIXED: partial(adapted, **mixed, adapter_names=who)}


def _with_head(task: Task) -> tuple[Any, Any]:
    head: Any = task.kind.name
    model, tokenizer = lamina.load("minilm", head=head, labels=task.labels)
    task.kind.configure(model.config, task)
    return model, tokenizer


def _adapted(model: Any, name: str = "default") -> Any:
    peft: Any = import_module("peft")
    heads = [head for head in ("pooler", "classifier") if any(head in key for key, _ in model.named_modules())]
    saved = heads if "classifier" in heads else None
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value"], modules_to_save=saved)
    return peft.get_peft_model(model, config, adapter_name=name)


class _Part:
    """One part of a task as batches of a whole model."""

    def __init__(self, task: Task, part: str, tokenizer: Any, max_length: int) -> None:
        self._task, self._kind, self._split = task, task.kind, task.split(part)
        self._processor = tokenizer
        self._inputs = self._kind.encode(self._split, tokenizer, EncodeOptions(part=part, max_length=max_length))
        self._targets = self._kind.targets(task, self._split, self._inputs)

    def batches(self, seed: int | None = None, size: int = 16) -> list[list[int]]:
        return length_batches(self._inputs.lengths, size, seed=seed)

    def rows(self, seed: int) -> Any:
        for rows in self.batches(seed):
            labels = self._kind.model_labels(self._targets.tensor(rows), self._task)  # pyright: ignore
            yield self._inputs.batch(rows), labels

    @torch.no_grad()
    def score(self, model: Any) -> float:
        model.eval()
        results = self._kind.results(self._task, self._split, self._inputs)
        for rows in self.batches(size=64):
            results.add(rows, self._kind.outputs(model, self._inputs.batch(rows), self._processor, GenerationOptions()))
        return results.scores([self._task.metric])[self._task.metric]


@torch.no_grad()
def _embeddings(task: Task, part: str, model: Any, tokenizer: Any, max_length: int) -> tuple[Any, Any]:
    split = task.split(part)

    def embed(texts: list[str]) -> np.ndarray:
        found: Any = np.empty((len(texts), model.config.hidden_size), dtype=np.float32)
        for rows in length_batches([len(text) for text in texts], 64):
            chosen = [texts[row] for row in rows]
            batch = tokenizer(chosen, padding=True, truncation=True, max_length=max_length, return_tensors="pt")
            states, mask = model(**batch).last_hidden_state, batch["attention_mask"].unsqueeze(-1)
            found[rows] = ((states * mask).sum(1) / mask.sum(1)).numpy()
        return found / np.linalg.norm(found, axis=1, keepdims=True)

    texts = list(split.texts)
    if split.pairs:
        one, two = (embed([pair[side] for pair in texts]) for side in (0, 1))
        return np.concatenate([one, two, abs(one - two), one * two], axis=1), np.array(list(split.labels))
    return embed(texts), np.array(list(split.labels))


def _metric(task: Task, part: str, guesses: Any) -> float:
    """Return the task's own metric for predictions (`guesses`)."""
    from sklearn.metrics import accuracy_score, matthews_corrcoef

    truth = np.array(list(task.split(part).labels))
    if task.problem_type == "regression":
        return float(np.corrcoef(truth, guesses)[0, 1])
    return float((matthews_corrcoef if task.metric == "mcc" else accuracy_score)(truth, guesses))


def _rates(method: str, only: str | None) -> list[float]:
    return [rate for rate in RATES[method] if only in (None, f"rate {rate:g}")]


def _best(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the result with the best score on held-out rows."""
    return max(rows, key=lambda row: row["held out"])
