"""The demo: three tasks read off one pass of a frozen model, beside the usual baselines; no network."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lamina.bank import Reader, ReaderBank
from lamina.demo.corpus import ACCEPTABILITY, SENTIMENTS, TAGS, write
from lamina.demo.timing import in_turn, ratio
from lamina.errors import LaminaError
from lamina.fusion.last_layer import LastLayer
from lamina.fusion.single_layer import SingleLayer
from lamina.heads.sequence_classification import SequenceClassification
from lamina.heads.token_classification import TokenClassification
from lamina.prediction import evaluate, predict
from lamina.recipes.report_file import Curves, Point
from lamina.report.chart_files import draw_curves
from lamina.store import load
from lamina.tasks.task import Task
from lamina.train import fit

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lamina.fusion.base import FusionConfig

TASKS = ("sentiment", "acceptability", "entities")
MODEL = "minilm"
EXAMPLES = (
    "The new phone from Nokia is not bad at all .",
    "Maria Lopez flew to Lisbon on Monday .",
    "The waiters was rude and the soup were cold .",
)


@dataclass(frozen=True)
class Demo:
    """What the demo found.

    Attributes:
        scores: One row per task: its metric, and the test scores of the last layer + linear, of the single layer that
            is best on the validation part (and which one that is), and of the task's default reader.
        layers: One row per task and layer: the test score of the reader of that layer alone.
        timing: Median milliseconds of a pass over 64 texts without readers and with the three, and their ratio.
        reload_difference: Largest difference of any logit after saving and loading; 0.0 is bit for bit.
        predictions: Three sentences and what the readers say about them.
        seconds: Wall-clock time of the whole demo.
        picture: The file with the curves of `layers`, the default readers across.
        folder: Where bank, picture and corpus are.
    """

    scores: list[dict[str, Any]]
    layers: list[dict[str, Any]]
    timing: dict[str, float]
    reload_difference: float
    predictions: list[dict[str, Any]]
    seconds: float
    picture: Path
    folder: Path


def run_demo(folder: str | Path, *, rows: int = 20_000, epochs: int = 4, seed: int = 0, progress: bool = True) -> Demo:
    """Make a corpus, train three readers and their baselines in one pass, compare, save, and load again.

    Args:
        folder: Where everything is written.
        rows: Sentences of the corpus, over all parts.
        epochs: Times through the training part.
        seed: Of corpus, readers and order.
        progress: Show a progress bar.
    """
    start, folder = time.perf_counter(), Path(folder)
    tasks = _tasks(write(folder / "corpus", seed=seed, rows=rows))
    model, tokenizer = load(MODEL)
    bank = ReaderBank(model, tokenizer)
    members = _add_readers(bank, tasks, seed)
    result = fit(
        bank,
        {member: tasks[member.partition("-")[0]] for member in members},
        epochs=epochs,
        batch_size=32,
        learning_rate=2e-3,
        seed=seed,
        progress=progress,
    )
    best = {task: _best_single(task, bank, result.best) for task in TASKS}
    test = evaluate(bank, {member: tasks[member.partition("-")[0]] for member in members}, split="test")
    found = {member: scores[tasks[member.partition("-")[0]].metric] for member, scores in test.items()}
    scores = [_score_row(task, tasks[task].metric, best[task], found) for task in TASKS]
    layers = _layer_rows(tasks, bank.stacks["main"].layers, found)
    picture = _draw_layers(layers, scores, folder / "layers.png")
    _keep_defaults(bank)
    bank.save_pretrained(folder / "bank")
    return Demo(
        scores=scores,
        layers=layers,
        timing=time_passes(bank, tasks["sentiment"].split("test").texts[:64]),
        reload_difference=_reload_difference(bank, folder / "bank"),
        predictions=[{"text": text, **answer} for text, answer in zip(EXAMPLES, predict(bank, EXAMPLES), strict=True)],
        seconds=time.perf_counter() - start,
        picture=picture,
        folder=folder,
    )


def _tasks(files: dict[str, Path]) -> dict[str, Task]:
    """Three tasks over the same sentences."""
    sequence = {"sentiment": SENTIMENTS, "acceptability": ACCEPTABILITY}
    tasks = {
        name: _task(files, "sequence_classification", text="text", label=name, labels=labels, name=name)
        for name, labels in sequence.items()
    }
    tasks["entities"] = _task(files, "token_classification", text="words", label="tags", labels=TAGS, name="entities")
    return tasks


def _task(files: dict[str, Path], kind: str, **columns: Any) -> Task:
    return Task.from_files(kind, train=files["train"], validation=files["validation"], test=files["test"], **columns)


def _add_readers(bank: ReaderBank, tasks: dict[str, Task], seed: int) -> list[str]:
    """The default reader, the last layer and every single layer for each task, these under AdaLayers' own head."""
    fusions: dict[str, FusionConfig] = {"last": LastLayer()}
    fusions |= {str(layer): SingleLayer(layer, dim=64) for layer in range(bank.stacks["main"].layers)}
    for name, task in tasks.items():
        bank.add(f"{name}-all", replace(Reader.default(task), seed=seed))
        for how, fusion in fusions.items():
            bank.add(f"{name}-{how}", Reader(fusion, _head(name, linear=how == "last"), seed=seed))
    return list(bank)


def _head(task: str, *, linear: bool) -> SequenceClassification | TokenClassification:
    if task == "entities":
        return TokenClassification(TAGS, encoder_layers=0 if linear else 1, feedforward=256)
    labels = SENTIMENTS if task == "sentiment" else ACCEPTABILITY
    return SequenceClassification(labels, pooling="mean" if linear else "attention")


def _best_single(task: str, bank: ReaderBank, best: dict[str, dict[str, float]]) -> str:
    """The single-layer reader that the validation part likes best."""
    names = [f"{task}-{layer}" for layer in range(bank.stacks["main"].layers)]
    return max(names, key=lambda name: best[name][bank[name].info["metric"]])


def _score_row(task: str, metric: str, single: str, found: dict[str, float]) -> dict[str, Any]:
    return {
        "task": task,
        "metric": metric,
        "last layer + linear": found[f"{task}-last"],
        "best single layer": found[single],
        "its layer": int(single.rpartition("-")[2]),
        "default reader": found[f"{task}-all"],
    }


def _layer_rows(tasks: dict[str, Task], layers: int, found: dict[str, float]) -> list[dict[str, Any]]:
    return [
        {"task": name, "metric": task.metric, "layer": layer, "score": found[f"{name}-{layer}"]}
        for name, task in tasks.items()
        for layer in range(layers)
    ]


def _draw_layers(layers: list[dict[str, Any]], scores: list[dict[str, Any]], path: Path) -> Path:
    """A curve over the layers for each task, with its default reader across."""
    single = [(row, "one layer", row["layer"], row["score"]) for row in layers]
    across = [(row, "default reader", None, row["default reader"]) for row in scores]
    points = [
        Point(row["task"], series, x, row["metric"], mean=score, spread=0.0, interval=None, runs=1, settings={})
        for row, series, x, score in single + across
    ]
    title = "What one layer gives, and the default reader over all"
    return draw_curves(Curves(title, "test", "layer (0 = embeddings)", points), path)


def _keep_defaults(bank: ReaderBank) -> None:
    """Leave the default reader of each task, named after it, in the bank."""
    for name in list(bank):
        task, _, how = name.partition("-")
        if how == "all":
            bank.rename(name, task)
        else:
            bank.remove(name)


def _reload_difference(bank: ReaderBank, folder: Path) -> float:
    """Largest difference between the bank's logits and those of what was saved."""
    again = ReaderBank.from_pretrained(folder).to(bank.device).eval()
    batch = _batch(bank, EXAMPLES)
    bank.eval()
    with torch.no_grad():
        before, after = bank(**batch), again(**batch)
    worst = max(float((before[name].logits - after[name].logits).abs().max()) for name in bank)
    if worst != 0:
        raise LaminaError(f"demo: logits differ by {worst} after loading; they must be equal.")
    return worst


def _batch(bank: ReaderBank, texts: Sequence[str]) -> dict[str, torch.Tensor]:
    batch = bank.processor(list(texts), padding=True, truncation=True, max_length=128, return_tensors="pt")
    return dict(batch.to(bank.device))


def time_passes(bank: ReaderBank, texts: Sequence[str], *, repeats: int = 9) -> dict[str, float]:
    """Time the model's own forward and the same with every reader, in turn.

    Args:
        bank: The readers and their model.
        texts: One batch of texts.
        repeats: How often each; the medians count.
    """
    batch = _batch(bank, texts)
    bank.eval()
    with torch.no_grad():
        taken = in_turn(
            {"base": lambda: bank.model(**batch), "with readers": lambda: bank(**batch, main=True)}, repeats=repeats
        )
    return {
        "base_ms": 1000 * statistics.median(taken["base"]),
        "with_readers_ms": 1000 * statistics.median(taken["with readers"]),
        "ratio": ratio(taken, "with readers", to="base"),
    }
