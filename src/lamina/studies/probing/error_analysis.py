"""The study `errors`: which rows probes get wrong, whether layers agree, and how scores depend on length and words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd

from lamina.errors import check_known
from lamina.layers import default_stack, select
from lamina.layers.selectors import ranges
from lamina.layers.wrappers import unwrapped
from lamina.studies.probing.probe import RATES, check_task
from lamina.studies.probing.probe_cell import Place, ProbeSettings, TrainedProbes, probe_bank, results_of
from lamina.studies.runner import check_given, labelled_task, own_processor
from lamina.studies.statistics import row_counts
from lamina.studies.study import Figure, Study, study_settings
from lamina.tasks.split import Split
from lamina.tasks.token_classification import tagged_text
from lamina.tasks.words import join
from lamina.train.groups import tasks_by_name
from lamina.train.options import FitOptions
from lamina.train.results import tied
from lamina.utils import JSON, Row, check_range, check_types, derive_seed, pluralize

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from lamina.layers.selectors import Selector
    from lamina.layers.types import Processor
    from lamina.tasks.outputs import Results
    from lamina.tasks.task import Task

_BINS = 4  # bins of text length, with about as many rows each


@check_types("errors")
def errors(  # noqa: PLR0913 the options of a public entry point
    model: PreTrainedModel,
    tasks: Mapping[str, Task] | Task,
    *,
    processor: Processor | None = None,
    split: str = "validation",
    layers: Selector = "all",
    stack: str | None = None,
    probe: Literal["linear", "mlp"] = "linear",
    hidden: int = 128,
    count: int = 100,
    deleted: Sequence[float] = (0.1, 0.25, 0.5),
    seed: int = 0,
    epochs: int = 10,
    batch_size: int = 32,
    learning_rate: float | None = None,
    max_length: int | None = None,
) -> Study:
    """Train one probe per layer, as the study `probe` does, and analyse its errors.

    Args:
        model: A transformers model of any supported family; it is not changed.
        tasks: Task name -> a task with classes, tags or numbers; or a single task.
        processor: Tokenizer, image processor or feature extractor. None: the one saved with `model.name_or_path`.
        split: Name of the split to analyse. Rows without a label are left out, here and in training.
        layers: Layers to read.
        stack: Name of the stack to read. None: the only one, or the encoder.
        probe: Kind of probe: "linear" or "mlp".
        hidden: Size of the MLP's hidden layer.
        count: Maximum number of wrong answers to list per layer.
        deleted: Shares of a text's words to remove, from 0 to below 1, as one span at a random place. Empty: this is
            not measured.
        seed: Seed of the probes' initial weights and of the places of the removed spans.
        epochs: Number of passes of the probes over the training rows.
        batch_size: Rows per step.
        learning_rate: Peak learning rate of AdamW; it falls to 0 linearly. None: 3e-3 for linear probes, 1e-3 for MLPs.
        max_length: Maximum tokens per text. None: what the model allows.

    Returns:
        A study with the columns "task", "layer", "measure", "metric", "rows" and "score", and further columns for some
        measures.
        "error": a wrong answer, the most confident first, with "row" (from 0), "text", "true" and "predicted" (lists
        as JSON text). Its score is the confidence, or the absolute error if labels are numbers.
        "agreement": how far the answers of a layer and of an "other_layer" agree: Cohen's kappa, or Pearson's
        correlation if labels are numbers.
        "by_length": the score on the rows of one bin of text lengths; "length" is the largest number of words in the
        bin.
        "deleted": the score after the share of words in the column "deleted" was removed, starting with 0.
        Images and audio have no rows of the last two.

    Raises:
        ConfigError: If there is no task, a task has neither classes nor numbers, an option is not valid, or there is
            no tokenizer or other processor.
        DataError: If no row of a split has a label, or the training rows have fewer than two classes; multi-label tasks
            may.
        UnknownNameError: If a probe, split or stack does not exist, or a task's metric cannot be computed from sums
            over rows.
        LayerIndexError: If a layer does not exist.
        StoreError: If the saved processor is damaged.
        UnsupportedModelError: If the model's layers cannot be found.
        NotFiniteError: If the model or a probe outputs NaN or infinity.

    Source:
        Cohen 1960, "A Coefficient of Agreement for Nominal Scales".
    """
    source, named = unwrapped(model), tasks_by_name("errors", tasks)
    check_given("errors", tasks=named)
    check_known("errors", [probe], RATES, "probe")
    check_range("errors", "hidden", hidden, 1)
    check_range("errors", "count", count, 0)
    for share in deleted:
        check_range("errors", "deleted", share, 0, 1, open_high=True)
    used_stack = default_stack(source, stack, op="errors")
    selected = tuple(select(layers, used_stack.layers, op="errors"))
    own = own_processor(source, processor)
    rate = RATES[probe] if learning_rate is None else learning_rate
    probe_settings = ProbeSettings(
        layers=selected,
        stack=used_stack.name,
        probes=(probe,),
        split=split,
        hidden=hidden,
        rates={probe: rate},
        controls=False,
        code_length=False,
        training={},
    )
    training = {"epochs": epochs, "batch_size": batch_size, "learning_rate": rate, "max_length": max_length}
    fixed = {"seed": seed, "keep": "last", "max_grad_norm": 0.0, "augment": False, "progress": False}
    options = FitOptions.of({**training, **fixed}, "errors")
    places = {f"layer{layer}": Place(layer, "output", probe) for layer in selected}
    rows: list[Row] = []
    sentences: list[str] = []
    for name, whole in named.items():
        task = labelled_task("errors", whole, "train", split)
        check_task(name, task, split)
        with probe_bank(source, own, task, places, probe_settings, seed) as bank:
            trained = TrainedProbes(bank, dict.fromkeys(bank, task), options, split)
            analysis = _ErrorAnalysis(task, split, selected, trained, whole.split(split).labelled_rows())
            task_rows = [
                *analysis.wrong_answers(count),
                *analysis.agreement(),
                *analysis.by_length(),
                *analysis.deleted(deleted, seed),
            ]
        rows += [{"task": name, **row} for row in task_rows]
        sentences += [f"{name}: {sentence}" for sentence in analysis.conclusions()]
        del bank, trained, analysis  # they hold the encodings of this task's rows
    facts: dict[str, JSON] = {"layers": list(selected), "stack": used_stack.name, "probe": probe, "hidden": hidden}
    facts |= {"split": split, "seed": seed, "deleted": list(deleted)}
    settings = study_settings({"model": source}, **training, **facts)
    table = pd.DataFrame(rows)
    integers = [column for column in ("other_layer", "row", "length") if column in table]
    return Study("errors", table.astype(dict.fromkeys(integers, "Int64")), settings, _figures(table), tuple(sentences))


class _ErrorAnalysis:
    """Runs the trained probes of one task over a split, and computes table rows of the study from their outputs.

    `layers` are the layers that have a probe; the probe of layer i is named "layer<i>". `task` has only rows with a
    label. `numbers` has for each of them its number in the whole split.
    """

    def __init__(
        self, task: Task, split: str, layers: Sequence[int], trained: TrainedProbes, numbers: Sequence[int]
    ) -> None:
        self._task, self._split, self._layers, self._trained = task, split, layers, trained
        self._numbers = numbers
        self._results = self._run(task)
        self._truths = list(task.split(split).labels)
        self._predictions = {layer: results.guesses() for layer, results in self._results.items()}

    def _run(self, task: Task) -> dict[int, Results]:
        names = {f"layer{layer}": layer for layer in self._layers}
        results = self._trained.run(dict.fromkeys(names, task), self._split, results_of)
        return {names[name]: outputs for name, outputs in results.items()}

    def wrong_answers(self, count: int) -> list[Row]:
        """Return table rows: at most `count` errors of each layer's probe.

        The most confident come first or, if labels are numbers, the largest.
        """
        rows: list[Row] = []
        for layer, results in self._results.items():
            for wrong in results.errors(count):
                metric = "confidence" if "confidence" in wrong else "error"
                example = {key: _as_text(wrong[key]) for key in ("text", "true", "predicted")}
                numbers = {"row": self._numbers[wrong["row"]], "rows": 1, "score": abs(wrong.get(metric, 0.0))}
                rows.append({"layer": layer, "measure": "error", "metric": metric, **numbers, **example})
        return rows

    def agreement(self) -> list[Row]:
        """Return a table row per ordered pair of layers: how far the answers of their probes agree, right or wrong.

        The score is Cohen's kappa, or Pearson's correlation if the labels are numbers (NaN if a probe gives one answer
        to all rows). Each layer is also paired with itself.
        """
        from sklearn.metrics import cohen_kappa_score

        regression = self._task.problem_type == "regression"
        flat = {
            layer: np.concatenate([np.atleast_1d(prediction) for prediction in predictions])
            for layer, predictions in self._predictions.items()
        }
        rows: list[Row] = []
        for layer, answers in flat.items():
            for other, other_answers in flat.items():
                if regression:
                    score = np.corrcoef(answers, other_answers)[0, 1]
                elif bool((answers == other_answers).all()):
                    score = 1.0  # kappa is undefined if all answers are of one class
                else:
                    score = cohen_kappa_score(answers, other_answers)
                metric = "pearson" if regression else "kappa"
                row = {"measure": "agreement", "metric": metric, "rows": len(self._truths), "score": float(score)}
                rows.append({"layer": layer, "other_layer": other, **row})
        return rows

    def by_length(self) -> list[Row]:
        """Return table rows with the score of each layer on shorter and longer texts; [] if the task has no text.

        The texts are sorted by their number of words into at most four bins with about as many texts each. Each bin is
        scored by itself: "spearman" ranks the texts of one bin. Raises UnknownNameError if the task's metric cannot be
        computed from sums over rows.
        """
        if not self._reads_text:
            return []
        texts = self._task.split(self._split).texts
        lengths = np.array([len((text if isinstance(text, str) else " ".join(text)).split()) for text in texts])
        edges = np.unique(np.quantile(lengths, np.linspace(0, 1, _BINS + 1)[1:], method="higher"))
        bins = np.searchsorted(edges, lengths)
        rows: list[Row] = []
        for layer, predictions in self._predictions.items():
            for number, edge in enumerate(edges):
                chosen = np.flatnonzero(bins == number)
                guesses, truths = ([side[at] for at in chosen] for side in (predictions, self._truths))
                counts, score = row_counts(self._task, self._task.metric, guesses, truths)
                numbers = {"length": int(edge), "rows": len(chosen), "score": float(score(counts.sum(0)))}
                rows.append({"layer": layer, "measure": "by_length", "metric": self._task.metric, **numbers})
        return rows

    def deleted(self, shares: Sequence[float], seed: int) -> list[Row]:
        """Return table rows with the score of each layer after a span of words was removed from every text.

        `shares` are the fractions of the words to remove, below 1; 0 is measured as well, first. `seed` decides the
        places of the spans. Returns [] if the task has no text or `shares` is empty.
        """
        rows: list[Row] = []
        for share in dict.fromkeys((0.0, *shares)) if self._reads_text and shares else ():
            shortened = without_span(self._task, self._split, share, seed)
            layers = self._run(replace(self._task, splits={**self._task.splits, self._split: shortened}))
            for layer, results in layers.items():
                score = results.scores((self._task.metric,))[self._task.metric]
                numbers = {"deleted": share, "rows": len(shortened), "score": score}
                rows.append({"layer": layer, "measure": "deleted", "metric": self._task.metric, **numbers})
        return rows

    def conclusions(self) -> list[str]:
        """Return two sentences: which layers' probes get fewest rows wrong, and how many rows all probes get wrong.

        With one layer there is only the first; [] if labels are numbers.
        """
        if self._task.problem_type == "regression":
            return []
        wrong: dict[int, NDArray[np.bool_]] = {}
        for layer, predictions in self._predictions.items():
            counts, _ = row_counts(self._task, "accuracy", predictions, self._truths)
            wrong[layer] = counts[:, 0] < counts[:, 1]
        counts = {layer: int(rows.sum()) for layer, rows in wrong.items()}
        fewest = min(counts.values())
        best = tied(counts, fewest, ".0f")
        total, everywhere = len(self._truths), int(np.all(list(wrong.values()), axis=0).sum())
        who = f"layer {best[0]} answers" if len(best) == 1 else f"layers {ranges(sorted(best))} answer"
        each = " each" * (len(best) > 1)
        sentences = [f"{who} fewest rows wrongly, {fewest} of {total}{each}."]
        if len(wrong) > 1:
            are = "is" if everywhere == 1 else "are"
            sentences.append(f"{pluralize(everywhere, 'row')} {are} answered wrongly at all of {len(wrong)} layers.")
        return sentences

    @property
    def _reads_text(self) -> bool:
        return self._task.kind.processor == "tokenizer"


def _as_text(value: JSON) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _figures(table: pd.DataFrame) -> dict[str, Figure]:
    """Return chart name -> chart, for the measures that occur in the study's table."""
    charts = {
        "agreement": Figure(
            "heat",
            x="layer",
            y="other_layer",
            facet="task",
            where={"measure": "agreement"},
            title="Agreement between the answers of layers",
            note="1: two layers give the same answer to every text. A pair with a low value may know more together.",
        ),
        "by_length": Figure(
            "line",
            x="length",
            colour="layer",
            facet="task",
            where={"measure": "by_length"},
            title="Score by length of the text",
            x_title="number of words, at most",
        ),
        "deleted": Figure(
            "line",
            x="deleted",
            colour="layer",
            facet="task",
            where={"measure": "deleted"},
            title="Score with a span of words removed",
            x_title="share of the words that is removed",
            note="A line that stays level belongs to a layer that answers as well from part of the text.",
        ),
    }
    return {name: figure for name, figure in charts.items() if name in set(table["measure"])}


def without_span(task: Task, part: str, share: float, seed: int) -> Split:
    """Return the split `part` of a task with one span of words, at a place that `seed` decides, removed from each text.

    `share` is the share of the words to remove, rounded to whole words; at least one word stays. In word tagging tasks,
    the words are the tagged ones, and their tags are removed with them; the first text of a pair stays whole. In other
    tasks, words are separated by spaces; both texts of a pair lose a span. Raises UnknownNameError if the task has no
    split `part`.
    """
    split = task.split(part)
    if task.kind.tags_words:
        shortened: list[tuple[list[str], tuple[int, ...]]] = []
        for row, (text, spans, tags) in enumerate(zip(split.texts, split.words or (), split.labels, strict=True)):
            places = _remaining_places(len(spans), share, derive_seed("deletion", seed, row))
            words = [tagged_text(text)[start:end] for start, end in spans]
            shortened.append(([words[place] for place in places], tuple(tags[place] for place in places)))
        joined = [join(words) for words, _ in shortened]
        texts = (
            text if isinstance(whole, str) else (whole[0], text)
            for whole, (text, _) in zip(split.texts, joined, strict=True)
        )
        return Split.of(texts, (tags for _, tags in shortened), (spans for _, spans in joined))
    return Split.of((_without_span(text, share, seed, row) for row, text in enumerate(split.texts)), split.labels)


def _without_span(text: str | tuple[str, ...], share: float, seed: int, row: int) -> str | tuple[str, ...]:
    """Return a text, or both texts of a pair, without a span that holds the fraction `share` of its words.

    At least one word stays. Single spaces join the words. `seed` and the text's number `row` decide the place.
    """
    if not isinstance(text, str):
        return tuple(str(_without_span(side, share, seed, row)) for side in text)
    words = text.split()
    places = _remaining_places(len(words), share, derive_seed("deletion", seed, row))
    return " ".join(words[place] for place in places)


def _remaining_places(count: int, share: float, seed: int) -> list[int]:
    """Return the positions, from 0, of the words that stay when a span is removed from `count` words.

    The span has the fraction `share` of the words, but at least one word stays; `seed` decides its place.
    """
    size = min(round(share * count), count - 1) if count else 0
    start = int(np.random.default_rng(seed).integers(0, count - size + 1))
    return [*range(start), *range(start + size, count)]
