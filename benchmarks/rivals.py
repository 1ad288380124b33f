"""Alternatives to Lamina's readers, for other benchmarks: regression on embeddings, LoRA, fine-tuning and SetFit.

LoRA and fine-tuning keep the epoch that is best on the task's validation split; without one, the last.
"""

from __future__ import annotations

import sys
import time
from contextlib import redirect_stdout
from functools import cache, lru_cache, partial
from importlib import import_module
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np
import torch

import lamina
from lamina.data.batches import length_batches
from lamina.layers.devices import usable_device
from lamina.store.models import source_of
from lamina.studies.benchmarking.regressions import fewer_columns
from lamina.tasks.base import EncodeOptions, GenerationOptions
from lamina.train.base import to_device

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor

    from lamina import Task

RATES = {"LoRA": (3e-4, 1e-3, 3e-3, 1e-2), "fine-tuning": (3e-5, 1e-4, 3e-4)}
STRENGTHS = (0.01, 0.1, 1.0, 10.0, 100.0)
Trained = tuple[Any, float, int]  # a trained classifier, the seconds that training took, number of trained parameters
MIXED = "LoRA, one mixed batch"  # a copy of the batch per task, each with its adapter, in one pass


@cache
def device() -> torch.device:
    """Return the device to compute on: a GPU if there is one. A process that has asked cannot be forked any more."""
    return usable_device("auto")


def fine_tuned(task: Task, *, seed: int, max_length: int, epochs: int, only: str) -> dict[str, Any]:
    """Fine-tune the whole model at the learning rate that `only` names, such as "rate 0.0001"; return the result."""
    torch.manual_seed(seed)
    model, tokenizer = _with_head(task)
    options: dict[str, Any] = {"epochs": epochs, "batch_size": 16, "learning_rate": _rate(only), "seed": seed}
    options |= {"max_length": max_length, "warmup_ratio": 0.1, "test": True, "progress": False}
    options["keep"] = "best" if "validation" in task.splits else "last"
    result = lamina.finetune(model, task, processor=tokenizer, **options)
    [best], [test] = result.best.values(), result.test.values()
    size = sum(parameter.numel() for parameter in model.parameters())
    row = {"variant": only, "score": test[task.metric], "held out": best.get(task.metric)}
    return {**row, "trained": size, "stored": size, "seconds": result.seconds}


def lora(task: Task, *, seed: int, max_length: int, epochs: int, only: str) -> dict[str, Any]:
    """Train LoRA adapters of rank 8 on queries and values, and the head, at the rate that `only` names."""
    torch.manual_seed(seed)
    start = time.perf_counter()
    model, tokenizer = _with_head(task)
    adapted = _adapted(model).to(device())
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=_rate(only), weight_decay=0.0)
    parts = {part: _Part(task, part, tokenizer, max_length) for part in task.splits}
    held_out, best = parts.get("validation"), None
    steps = epochs * len(parts["train"].batches(seed))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    state: list[Tensor] = []
    for epoch in range(epochs):
        adapted.train()
        for batch, labels in parts["train"].rows(seed + 1000 * epoch):
            loss = adapted(**batch, labels=labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        score = None if held_out is None else held_out.score(adapted)
        if best is None or score is None or score > best:
            best, state = score, [parameter.detach().clone() for parameter in trained]
    with torch.no_grad():
        for parameter, kept in zip(trained, state, strict=True):
            parameter.copy_(kept)
    size = sum(parameter.numel() for parameter in trained)
    row = {"variant": only, "score": parts["test"].score(adapted), "held out": best, "trained": size, "stored": size}
    return {**row, "seconds": time.perf_counter() - start}


def embedded(
    task: Task, *, seed: int, max_length: int, only: str | None, layers: slice = slice(-1, None)
) -> dict[str, Any]:
    """Fit a regression on the means of the hidden states of some layers, by default the last, and return its result.

    For a pair of texts, the features are the means of both, their distance and their product.
    """
    from sklearn.linear_model import LogisticRegression, Ridge

    parts = ("train", "validation", "test")
    data, times = zip(*(_features(task, part, max_length, layers) for part in parts), strict=True)
    labels = {part: np.array(list(task.split(part).labels)) for part in parts}
    start = time.perf_counter()
    train, others = fewer_columns(data[0], np.concatenate(data[1:]))
    held, test = others[: len(data[1])], others[len(data[1]) :]
    prepared = sum(times) + time.perf_counter() - start
    rows = []
    for strength in STRENGTHS:
        if only not in (None, f"C {strength:g}"):
            continue
        start = time.perf_counter()
        if task.problem_type == "regression":
            fitted: Any = Ridge(alpha=1 / strength, random_state=seed).fit(train, labels["train"])
        else:
            model = LogisticRegression(C=strength, max_iter=2000, random_state=seed)
            fitted = model.fit(train, labels["train"])
        size = data[0].shape[1] * (1 if task.problem_type == "regression" else len(task.labels))
        rows.append({"variant": f"C {strength:g}", "trained": size, "stored": size})
        rows[-1]["score"] = _metric(task, labels["test"], fitted.predict(test))
        rows[-1]["held out"] = _metric(task, labels["validation"], fitted.predict(held))
        rows[-1]["seconds"] = prepared + time.perf_counter() - start
    return _best(rows)


def setfit(texts: list[str], labels: np.ndarray, *, seed: int, length: int) -> Trained:
    """Train SetFit with its default settings."""
    package: Any = import_module("setfit")
    model = package.SetFitModel.from_pretrained(source_of("minilm", None))
    model.model_body.max_seq_length = length
    rows = datasets.Dataset.from_dict({"text": texts, "label": labels.tolist()})
    with TemporaryDirectory() as folder:
        options: dict[str, Any] = {"output_dir": folder, "save_strategy": "no", "report_to": "none"}
        trainer = package.Trainer(
            model=model,
            args=package.TrainingArguments(seed=seed, show_progress_bar=False, **options),
            train_dataset=rows,
        )
        start = time.perf_counter()
        with redirect_stdout(sys.stderr):  # SetFit prints its log
            trainer.train()
        seconds = time.perf_counter() - start
    return model, seconds, sum(parameter.numel() for parameter in model.model_body.parameters())


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
            yield to_device(self._inputs.batch(rows), device()), labels.to(device())

    @torch.no_grad()
    def score(self, model: Any) -> float:
        model.eval()
        results = self._kind.results(self._task, self._split, self._inputs)
        for rows in self.batches(size=64):
            batch = to_device(self._inputs.batch(rows), device())
            results.add(rows, self._kind.outputs(model, batch, self._processor, GenerationOptions()))
        return results.scores([self._task.metric])[self._task.metric]


def _features(task: Task, part: str, max_length: int, layers: slice) -> tuple[np.ndarray, float]:
    """Return the features of a split's texts or pairs, and the seconds that the model took to read them."""
    split = task.split(part)
    sides = [tuple(pair[side] for pair in split.texts) for side in (0, 1)] if split.pairs else [tuple(split.texts)]
    read = [_means(side, max_length) for side in sides]
    seconds = sum(taken for _, taken in read)
    features = []
    for means, _ in read:
        chosen = means[:, layers]
        features.append((chosen / np.linalg.norm(chosen, axis=-1, keepdims=True)).reshape(len(means), -1))
    if not split.pairs:
        return features[0], seconds
    one, two = features
    return np.concatenate([one, two, abs(one - two), one * two], axis=1), seconds


@lru_cache(maxsize=6)  # both sides of three splits: the regressions of a task share them
@torch.no_grad()
def _means(texts: tuple[str, ...], max_length: int) -> tuple[np.ndarray, float]:
    """Return each layer's states, averaged over the tokens, `[texts, layers, width]`, and the seconds that it took."""
    start = time.perf_counter()
    model, tokenizer = lamina.load("minilm")
    torch.nn.Module.to(model, device())
    shape = len(texts), model.config.num_hidden_layers + 1, model.config.hidden_size
    means: Any = np.empty(shape, dtype=np.float32)
    for rows in length_batches([len(text) for text in texts], 64):
        chosen = [texts[row] for row in rows]
        batch = tokenizer(chosen, padding=True, truncation=True, max_length=max_length, return_tensors="pt").to(
            device()
        )
        states = torch.stack(model(**batch, output_hidden_states=True).hidden_states, dim=1)
        mask = batch["attention_mask"][:, None, :, None]
        means[rows] = ((states * mask).sum(2) / mask.sum(2)).cpu().numpy()
    return means, time.perf_counter() - start


def _metric(task: Task, truth: np.ndarray, guesses: Any) -> float:
    """Return the task's own metric for predictions (`guesses`) of rows whose labels are `truth`."""
    from sklearn.metrics import accuracy_score, matthews_corrcoef

    if task.problem_type == "regression":
        return float(np.corrcoef(truth, guesses)[0, 1])
    return float((matthews_corrcoef if task.metric == "mcc" else accuracy_score)(truth, guesses))


def _rate(variant: str) -> float:
    """Return the learning rate of a variant such as "rate 0.001"."""
    return float(variant.removeprefix("rate "))


def _best(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the result with the best score on held-out rows."""
    return max(rows, key=lambda row: row["held out"])
