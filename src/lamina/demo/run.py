"""Run the demo: train readers for three tasks in one pass of a frozen model; compare, save and time them."""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import torch

from lamina.bank import Reader, ReaderBank
from lamina.demo.corpus import ACCEPTABILITY, SENTIMENTS, TAGS, write
from lamina.demo.timing import in_turn, ratio
from lamina.errors import LaminaError, require_packages
from lamina.fusion.last_layer import LastLayer
from lamina.fusion.single_layer import SingleLayer
from lamina.heads.sequence_classification import SequenceClassification
from lamina.heads.token_classification import TokenClassification
from lamina.prediction import evaluate, predict
from lamina.recipes.report_file import Curves, Point
from lamina.report.importance_charts import draw_curves, importance
from lamina.store import load
from lamina.tasks.task import Task
from lamina.train import fit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


LABELS = {"sentiment": SENTIMENTS, "acceptability": ACCEPTABILITY, "entities": TAGS}  # task -> its labels
MODEL = "minilm"
EPOCHS = 6
ROWS, ROWS_FULL = 6_500, 20_000  # sentences of the short and of the full demo; three quarters or more are trained on


@dataclass(frozen=True)
class Example:
    """A sentence (`text`), predicted at the end of the demo, with its right `sentiment` and `acceptability`."""

    text: str
    sentiment: str
    acceptability: str


EXAMPLES = (
    Example("The new phone from Nokia is not bad at all.", "positive", "acceptable"),
    Example("Maria Lopez flew to Lisbon on Monday.", "neutral", "acceptable"),
    Example("The pasta at Luigi's was cold.", "negative", "acceptable"),
    Example("The waiters was rude and the soup were cold.", "negative", "unacceptable"),
    Example("She have never liked the hotel in Madrid.", "negative", "unacceptable"),
)


class Prediction(TypedDict):
    """The answers of the three readers for one example.

    Attributes:
        text: The sentence; `sentiment` and `acceptability` are the labels that the readers gave it.
        entities: Found names, such as "Lisbon (LOC)".
        wrong: The right labels for a wrong `sentiment` or `acceptability`, in this order; [] if both are right.
    """

    text: str
    sentiment: str
    acceptability: str
    entities: list[str]
    wrong: list[str]


class Score(TypedDict):
    """The test scores of one task.

    Attributes:
        metric: The metric of all scores.
        last_layer: Score of a linear head on the last layer; `default_reader` is the default reader's.
        best_layer: Layer whose single-layer reader is best on the validation split; None in the short demo.
        best_single_layer: Test score of that reader; None in the short demo.
    """

    task: str
    metric: str
    last_layer: float
    default_reader: float
    best_layer: int | None
    best_single_layer: float | None


class LayerScore(TypedDict):
    """The test `score` of a reader of a single `layer` on a `task`, by its `metric`."""

    task: str
    metric: str
    layer: int
    score: float


@dataclass(frozen=True)
class Demo:
    """The results of the demo.

    Attributes:
        scores: Test scores, one row per task.
        layers: The same for single layers, one row per task and layer. Empty in the short demo.
        timing: What `time_passes` returns for 64 texts and three readers.
        reload_difference: Largest difference between the logits before saving and after loading: 0.0, or the demo
            raises an error.
        predictions: Five sentences with the answers of the three readers.
        seconds: Wall-clock time of the demo.
        picture: Image file: importances of layers, or in the full demo the scores of single layers.
        folder: Folder with the bank, the picture and the corpus.
    """

    scores: list[Score]
    layers: list[LayerScore]
    timing: dict[str, float]
    reload_difference: float
    predictions: list[Prediction]
    seconds: float
    picture: Path
    folder: Path


@dataclass(frozen=True)
class DemoReader:
    """A reader that the demo trains.

    Attributes:
        name: Its name in the bank: the task's, with "-last" added for the last layer, or "-single-3" for layer 3.
        task: Name of its task.
        layer: The layer, if it reads a single one that is compared with others; else None.
    """

    name: str
    task: str
    layer: int | None = None


def run_demo(
    folder: str | Path,
    *,
    rows: int | None = None,
    epochs: int = EPOCHS,
    seed: int = 0,
    full: bool = False,
    sentences: str | Path | None = None,
    progress: bool = True,
) -> Demo:
    """Make a corpus, train readers in one pass, score them on the test split, save the bank, and load it again.

    The bank is saved with the default readers only, and a picture beside it.

    Args:
        folder: Output folder; results of an earlier demo in it are replaced.
        rows: Number of sentences in the corpus. None: 6,500, or 20,000 in the full demo.
        epochs: Number of passes over the training split.
        seed: Seed of the corpus, the readers and the order of the rows.
        full: Also train a reader on every single layer, and draw their scores.
        sentences: File of handwritten sentences; see `lamina.demo.corpus.corpus`. None: only sentences from templates.
        progress: Show a progress bar.

    Raises:
        ConfigError: If `rows` is below 48.
        DataError: If `sentences` is not a file of pairs.
        MissingExtraError: If the packages of `lamina[demo]` are not installed.
        StoreError: If the folder cannot be written.
        LaminaError: If saved and loaded bank give different logits.
    """
    start, folder = time.perf_counter(), Path(folder)
    require_packages("demo", "demo", "altair", "vl_convert", "seqeval")  # before the training
    if rows is None:
        rows = ROWS_FULL if full else ROWS
    tasks = _tasks(write(folder / "corpus", seed=seed, rows=rows, sentences=sentences))
    model, tokenizer = load(MODEL)
    bank = ReaderBank(model, tokenizer)
    readers = _add_readers(bank, tasks, seed, full=full)
    task_of = {reader.name: tasks[reader.task] for reader in readers}
    with tempfile.TemporaryDirectory(prefix="states-", dir=folder) as states:
        result = fit(
            bank,
            {name: task.without_test() for name, task in task_of.items()},  # scored below
            epochs=epochs,
            batch_size=32,
            learning_rate=2e-3,
            seed=seed,
            cache="on",
            cache_dir=states,
            progress=progress,
        )
    test = {name: scores[task_of[name].metric] for name, scores in evaluate(bank, task_of, split="test").items()}
    validation = {name: scores[task_of[name].metric] for name, scores in result.best.items()}
    scores = [_score(task, tasks[task].metric, readers, validation, test) for task in LABELS]
    layers = [
        LayerScore(task=reader.task, metric=tasks[reader.task].metric, layer=reader.layer, score=test[reader.name])
        for reader in readers
        if reader.layer is not None
    ]
    for reader in readers:
        if reader.name != reader.task:
            bank.remove(reader.name)
    picture = _draw_layers(layers, scores, folder / "layers.png") if full else _draw_importances(bank, folder)
    bank.save_pretrained(folder / "bank")
    return Demo(
        scores=scores,
        layers=layers,
        timing=time_passes(bank, tasks["sentiment"].split("test").texts[:64]),
        reload_difference=_reload_difference(bank, folder / "bank"),
        predictions=_predict_examples(bank),
        seconds=time.perf_counter() - start,
        picture=picture,
        folder=folder,
    )


def _tasks(files: Mapping[str, Path]) -> dict[str, Task]:
    tasks: dict[str, Task] = {}
    for name, labels in LABELS.items():
        has_tags = name == "entities"
        tasks[name] = Task.from_files(
            "token_classification" if has_tags else "sequence_classification",
            train=files["train"],
            validation=files["validation"],
            test=files["test"],
            text="words" if has_tags else "text",
            label="tags" if has_tags else name,
            labels=labels,
            name=name,
        )
    return tasks


def _add_readers(bank: ReaderBank, tasks: Mapping[str, Task], seed: int, *, full: bool) -> list[DemoReader]:
    """Add each task's readers to the bank, with this seed: default, last layer, and if `full` each single layer.

    Return what was added, task by task, in this order.
    """
    readers: list[DemoReader] = []
    for name, task in tasks.items():
        configs = {
            DemoReader(name, name): Reader.default(task),
            DemoReader(f"{name}-last", name): Reader(LastLayer(), _head(name, linear=True)),
        }
        for layer in range(bank.stacks["main"].layers) if full else ():
            single = Reader(SingleLayer(layer, dim=64), _head(name, linear=False))
            configs[DemoReader(f"{name}-single-{layer}", name, layer)] = single
        for reader, config in configs.items():
            bank.add(reader.name, replace(config, seed=seed))
        readers += configs
    return readers


def _head(task: str, *, linear: bool) -> SequenceClassification | TokenClassification:
    if task == "entities":
        return TokenClassification(TAGS, encoder_layers=0 if linear else 1, feedforward=256)
    return SequenceClassification(LABELS[task], pooling="mean" if linear else "attention")


def _score(
    task: str, metric: str, readers: Sequence[DemoReader], validation: Mapping[str, float], test: Mapping[str, float]
) -> Score:
    """Return the test scores of one task, whose best single layer is chosen by its validation score.

    `validation` and `test` are reader name -> score in the metric, and `readers` are the readers of all tasks. The best
    layer and its score are None if no reader has a single layer.
    """
    single = [reader for reader in readers if reader.task == task and reader.layer is not None]
    best = max(single, key=lambda reader: validation[reader.name], default=None)
    return Score(
        task=task,
        metric=metric,
        last_layer=test[f"{task}-last"],
        default_reader=test[task],
        best_layer=None if best is None else best.layer,
        best_single_layer=None if best is None else test[best.name],
    )


def _draw_layers(layers: Sequence[LayerScore], scores: Sequence[Score], path: Path) -> Path:
    points = [_point(row["task"], "one layer", row["metric"], row["score"], layer=row["layer"]) for row in layers] + [
        _point(row["task"], "default reader", row["metric"], row["default_reader"], layer=None) for row in scores
    ]
    title = "Test score of each single layer, and of the default reader over all layers"
    return draw_curves(Curves(title, "test", "layer (0 = embeddings)", points), path)


def _point(task: str, series: str, metric: str, score: float, *, layer: int | None) -> Point:
    """Return a task's score in a metric as a point of the picture, on the curve `series`.

    `layer` None: a horizontal line.
    """
    return Point(task, series, layer, metric, mean=score, spread=0.0, interval=None, runs=1, settings={})


def _draw_importances(bank: ReaderBank, folder: Path) -> Path:
    """Draw how important each layer is to each reader, as bar charts; return the path of the file."""
    rows = [
        {"reader": name, "layer": layer, "importance": share}
        for name in bank
        for layer, share in bank[name].importance().items()
    ]
    return importance(rows, folder / "importance.png")


def _predict_examples(bank: ReaderBank) -> list[Prediction]:
    """Return the readers' answers for each example, with the right label in `wrong` for each wrong label."""
    predictions = []
    for example, answer in zip(EXAMPLES, predict(bank, [example.text for example in EXAMPLES]), strict=True):
        sentiment, acceptability = answer["sentiment"]["label"], answer["acceptability"]["label"]
        pairs = ((sentiment, example.sentiment), (acceptability, example.acceptability))
        predictions.append(
            Prediction(
                text=example.text,
                sentiment=sentiment,
                acceptability=acceptability,
                entities=[f"{span['text']} ({span['label']})" for span in answer["entities"]],
                wrong=[right for label, right in pairs if label != right],
            )
        )
    return predictions


def _reload_difference(bank: ReaderBank, folder: Path) -> float:
    """Load the saved bank again, and return the largest difference between its logits and those of `bank`.

    Both are put into evaluation mode. Raises LaminaError if the difference is not 0.
    """
    loaded = ReaderBank.from_pretrained(folder).to(bank.device).eval()
    batch = _batch(bank, [example.text for example in EXAMPLES])
    bank.eval()
    with torch.no_grad():
        before, after = bank(**batch), loaded(**batch)
    worst = max(float((before[name].logits - after[name].logits).abs().max()) for name in bank)
    if worst != 0:
        raise LaminaError(f"demo: logits differ by {worst} after loading; they must be equal.")
    return worst


def _batch(bank: ReaderBank, texts: Sequence[str]) -> dict[str, torch.Tensor]:
    batch = bank.processor(list(texts), padding=True, truncation=True, max_length=128, return_tensors="pt")
    return dict(batch.to(bank.device))


def time_passes(bank: ReaderBank, texts: Sequence[str]) -> dict[str, float]:
    """Time a forward pass of the model alone and with all readers, in turns.

    Args:
        bank: A bank of readers on a model; it is put into evaluation mode.
        texts: One batch of texts.

    Returns:
        "base_ms" and "with_readers_ms": median milliseconds. "ratio": median ratio, with readers to without, of passes
        that follow each other.
    """
    batch = _batch(bank, texts)
    bank.eval()
    with torch.no_grad():
        seconds = in_turn({"base": lambda: bank.model(**batch), "with readers": lambda: bank(**batch, main=True)})
    return {
        "base_ms": 1000 * statistics.median(seconds["base"]),
        "with_readers_ms": 1000 * statistics.median(seconds["with readers"]),
        "ratio": ratio(seconds, "with readers", to="base"),
    }
