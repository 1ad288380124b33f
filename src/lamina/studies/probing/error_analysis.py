"""Where probes err: which rows, whether layers agree, and how errors go with length and with words left out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from lamina.layers import default_stack, select
from lamina.layers.wrappers import unwrapped
from lamina.studies.probing.probe import RATES, check_task
from lamina.studies.probing.probe_cell import Place, ProbeSettings, Trained, probe_bank, results_of
from lamina.studies.probing.row_scores import row_counts
from lamina.studies.sources import own_processor
from lamina.studies.study import Figure, Study, library_versions, model_facts
from lamina.tasks import kind_of
from lamina.tasks.split import Split
from lamina.tasks.token_classification import join
from lamina.train.options import FitOptions
from lamina.utils import check_range, derive_seed, pluralize

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.layers.selectors import Selector
    from lamina.tasks.base import Results
    from lamina.tasks.task import Task

_BINS = 4  # of lengths, of about as many rows each


def errors(  # noqa: D417, PLR0913 the options of a public entry point
    model: PreTrainedModel,
    tasks: Mapping[str, Task] | Task,
    *,
    processor: Any = None,
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
    """Train one probe per layer, as `probe` does, and look at its errors.

    Args:
        model: A transformers model of any family that can be read; it is left as it is.
        tasks: Name -> a task with classes, tags or numbers, or such a task alone.
        processor: Tokenizer or image processor; None: the one that belongs to `model.name_or_path`.
        split: The part that is looked at.
        layers: Which layers.
        stack: Which stack; None: the only one, or the encoder.
        probe: "linear" or "mlp".
        hidden: Size of the MLP's hidden layer.
        count: Wrong answers of each layer that are listed, at most.
        deleted: Shares of a text's words that are left out, as one span at a random place. Images have no words.
        seed: Of the probes, and of the spans.
        epochs: As of `probe`, and so are the options that follow.

    Returns:
        A study whose table has "task", "layer", "measure", "metric", "rows" and "score". Measures: "error", a wrong
        answer, the most confident first, with "row" (from 0), "text", "true" and "predicted", and the confidence (of
        numbers the size of the error) for a score; "agreement" of a layer and an "other_layer" (Cohen's kappa of their
        answers, of numbers the correlation); "by_length", the score of rows of up to "length" words; "deleted", the
        score with a share "deleted" of the words left out, 0 first.

    Raises:
        LaminaError: As `probe`; ConfigError also if a share is not between 0 and 1.

    Source:
        Cohen 1960, "A Coefficient of Agreement for Nominal Scales".
    """
    source, named = unwrapped(model), dict(tasks) if isinstance(tasks, Mapping) else {tasks.name: tasks}
    for share in deleted:
        check_range("errors", "deleted", share, 0, 1, open_high=True)
    used = default_stack(source, stack, op="errors")
    chosen = tuple(select(layers, used.layers, op="errors"))
    own = own_processor(source, processor)
    rate = RATES[probe] if learning_rate is None else learning_rate
    how = ProbeSettings(chosen, used.name, (probe,), split, hidden, {probe: rate}, False, False, {})
    given = {"epochs": epochs, "batch_size": batch_size, "learning_rate": rate, "max_length": max_length}
    fixed = {"seed": seed, "keep": "last", "max_grad_norm": 0.0, "augment": False, "progress": False}
    options = FitOptions.of({**given, **fixed}, "errors")
    places = {f"layer{at}": Place(at, "output", probe) for at in chosen}
    rows: list[dict[str, Any]] = []
    said: list[str] = []
    for name, task in named.items():
        check_task(name, task, split)
        with probe_bank(source, own, task, places, how, seed) as bank:
            found = _Errors(task, split, chosen, Trained(bank, dict.fromkeys(bank, task), options, split))
            some = [*found.wrong(count), *found.agreement(), *found.by_length(), *found.deleted(deleted, seed)]
        rows += [{"task": name, **row} for row in some]
        said += [f"{name}: {sentence}" for sentence in found.conclusions()]
        del bank, found
    asked = {**given, "layers": list(chosen), "stack": used.name, "probe": probe, "hidden": hidden, "split": split}
    asked |= {"seed": seed, "deleted": list(deleted), "versions": library_versions()}
    settings = {**asked, "models": {"model": model_facts(source)}}
    table = pd.DataFrame(rows)
    whole = [column for column in ("other_layer", "row", "length") if column in table]
    return Study("errors", table.astype(dict.fromkeys(whole, "Int64")), settings, _figures(table), tuple(said))


class _Errors:
    """What the trained probes of one task say."""

    def __init__(self, task: Task, split: str, layers: Sequence[int], trained: Trained) -> None:
        self._task, self._split, self._layers, self._trained = task, split, layers, trained
        self._results = self._run(task)
        self._truths = list(task.split(split).labels)
        self._guesses = {layer: own.guesses() for layer, own in self._results.items()}

    def _run(self, task: Task) -> dict[int, Results]:
        names = {f"layer{layer}": layer for layer in self._layers}
        found = self._trained.run(dict.fromkeys(names, task), self._split, results_of)
        return {names[name]: own for name, own in found.items()}

    def wrong(self, count: int) -> list[dict[str, Any]]:
        """The wrong answers that were surest, layer by layer."""
        rows: list[dict[str, Any]] = []
        for layer, own in self._results.items():
            for wrong in own.errors(count):
                metric = "confidence" if "confidence" in wrong else "error"
                facts = {key: _plain(wrong[key]) for key in ("text", "true", "predicted")}
                numbers = {"row": wrong["row"], "rows": 1, "score": abs(wrong[metric])}
                rows.append({"layer": layer, "measure": "error", "metric": metric, **numbers, **facts})
        return rows

    def agreement(self) -> list[dict[str, Any]]:
        """How far each two layers give the same answers, right or wrong."""
        from sklearn.metrics import cohen_kappa_score

        numbers = self._task.problem_type == "regression"
        flat = {layer: np.concatenate([np.atleast_1d(own) for own in given]) for layer, given in self._guesses.items()}
        rows: list[dict[str, Any]] = []
        for layer, one in flat.items():
            for other, two in flat.items():
                same = bool((one == two).all())  # of one class alone there is no kappa
                measured = np.corrcoef(one, two)[0, 1] if numbers else 1.0 if same else cohen_kappa_score(one, two)
                facts = {"measure": "agreement", "metric": "pearson" if numbers else "kappa", "rows": len(self._truths)}
                rows.append({"layer": layer, "other_layer": other, **facts, "score": float(measured)})
        return rows

    def by_length(self) -> list[dict[str, Any]]:
        """Scores of short and of long rows."""
        if not self._reads_text:
            return []
        texts = self._task.split(self._split).texts
        lengths = np.array([len((text if isinstance(text, str) else " ".join(text)).split()) for text in texts])
        edges = np.unique(np.quantile(lengths, np.linspace(0, 1, _BINS + 1)[1:], method="higher"))
        bins = np.searchsorted(edges, lengths)
        rows: list[dict[str, Any]] = []
        for layer, given in self._guesses.items():
            counts, score = row_counts(self._task, self._task.metric, given, self._truths)
            for number, edge in enumerate(edges):
                of_bin = counts[bins == number]
                facts = {"length": int(edge), "rows": len(of_bin), "score": float(score(of_bin.sum(0)))}
                rows.append({"layer": layer, "measure": "by_length", "metric": self._task.metric, **facts})
        return rows

    def deleted(self, shares: Sequence[float], seed: int) -> list[dict[str, Any]]:
        """Scores with a span of words left out of every row."""
        rows: list[dict[str, Any]] = []
        for share in (0.0, *shares) if self._reads_text and shares else ():
            part = without_span(self._task, self._split, share, seed)
            own = self._run(replace(self._task, splits={**self._task.splits, self._split: part}))
            for layer, results in own.items():
                score = results.scores((self._task.metric,))[self._task.metric]
                facts = {"deleted": share, "rows": len(part), "score": score}
                rows.append({"layer": layer, "measure": "deleted", "metric": self._task.metric, **facts})
        return rows

    def conclusions(self) -> list[str]:
        """How many rows are answered wrongly, and how many by all layers."""
        if self._task.problem_type == "regression":
            return []
        wrong = {
            layer: np.array([guess != truth for guess, truth in zip(given, self._truths, strict=True)])
            for layer, given in self._guesses.items()
        }
        best = min(wrong, key=lambda layer: int(wrong[layer].sum()))
        total, everywhere = len(self._truths), int(np.all(list(wrong.values()), axis=0).sum())
        said = [f"layer {best} answers fewest rows wrongly, {int(wrong[best].sum())} of {total}."]
        if len(wrong) > 1:
            are = "is" if everywhere == 1 else "are"
            said.append(f"{pluralize(everywhere, 'row')} {are} answered wrongly at all of {len(wrong)} layers.")
        return said

    @property
    def _reads_text(self) -> bool:
        return kind_of(self._task.kind).processor == "tokenizer"


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _figures(table: pd.DataFrame) -> dict[str, Figure]:
    kept = {
        "agreement": Figure(
            "heat",
            x="layer",
            y="other_layer",
            facet="task",
            where={"measure": "agreement"},
            title="Agreement of the answers of layers",
            note="Layers that agree know the same; where they differ, a mix of both may know more.",
        ),
        "by_length": Figure(
            "line",
            x="length",
            colour="layer",
            facet="task",
            where={"measure": "by_length"},
            title="Score by length of the text",
            x_title="words, at most",
        ),
        "deleted": Figure(
            "line",
            x="deleted",
            colour="layer",
            facet="task",
            where={"measure": "deleted"},
            title="Score with a span of words left out",
            x_title="share of the words that is left out",
            note="Flat: the layer does not need all words.",
        ),
    }
    return {name: figure for name, figure in kept.items() if name in set(table["measure"])}


def without_span(task: Task, part: str, share: float, seed: int) -> Split:
    """A part of a task without one span of each text's words, at a random place; a tag goes with its word.

    Words are what stands between spaces, of tasks that tag words those words; of a pair both texts lose a span. The
    span has `share` of the words, rounded, and one word at least stays.
    """
    split = task.split(part)
    if kind_of(task.kind).tags_words:
        kept: list[tuple[list[str], tuple[int, ...]]] = []
        for row, (text, spans, tags) in enumerate(zip(split.texts, split.words or (), split.labels, strict=True)):
            places = _places(len(spans), share, derive_seed("deletion", seed, row))
            words = [text[start:end] for start, end in spans]
            kept.append(([words[place] for place in places], tuple(tags[place] for place in places)))
        joined = [join(words) for words, _ in kept]
        return Split.of((text for text, _ in joined), (tags for _, tags in kept), (spans for _, spans in joined))
    return Split.of((_cut(text, share, seed, row) for row, text in enumerate(split.texts)), split.labels)


def _cut(text: Any, share: float, seed: int, row: int) -> Any:
    if not isinstance(text, str):
        return tuple(_cut(side, share, seed, row) for side in text)
    words = text.split()
    return " ".join(words[place] for place in _places(len(words), share, derive_seed("deletion", seed, row)))


def _places(count: int, share: float, seed: int) -> list[int]:
    """Which of so many words stay."""
    size = min(round(share * count), count - 1) if count else 0
    start = int(np.random.default_rng(seed).integers(0, count - size + 1))
    return [*range(start), *range(start + size, count)]
