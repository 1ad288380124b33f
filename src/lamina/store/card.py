"""The model card: what a bank's folder says about itself to a person."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from lamina.fusion import FUSIONS
from lamina.layers.selectors import ranges
from lamina.monitors import Cascade

if TYPE_CHECKING:
    from lamina.bank import ReaderBank, ReaderModule
    from lamina.monitors.cascade import AnyMonitor

SHOWN_LABELS = 8
_FROZEN = "The model itself is frozen: it stays as it is."
_TRAINED = "The model was fine-tuned along with them; the folder `base` holds it as it is now, a plain checkpoint."
_TAGS = {  # what the hub calls a kind, where it is not its name
    "sequence_classification": "text-classification",
    "masked_lm": "fill-mask",
    "causal_lm": "text-generation",
}
_METRICS = {"mcc": "matthews_correlation", "pearson": "pearsonr", "spearman": "spearmanr"}  # so too

_CARD = """---
{{ card_data }}
---

# {{ title }}

{{ count }} on one model, {{ base }}, made with Lamina. The model runs once; each reader takes its answer from the
layers on the way. {{ about_base }}

| reader | task | fusion | layers | labels | parameters | score |
|---|---|---|---|---|---|---|
{{ rows }}
{{ monitors }}
## Use

```python
from lamina import ReaderBank, predict

bank = ReaderBank.from_pretrained("{{ title }}")
predict(bank, ["A text to read."])
```

The readers fit this base alone; its fingerprint is checked on loading.
"""


def model_card(bank: ReaderBank, title: str) -> ModelCard:
    """Write the card of a bank: Markdown with the front matter that the hub reads."""
    base = str(getattr(bank.model, "name_or_path", "") or "")
    on_hub = not Path(base).exists() and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", base)
    kinds = dict.fromkeys(_task_type(bank[name]) for name in bank)
    frozen = [] if bank.saves_base else ["frozen-base"]
    results = [result for name in bank for result in _results(name, bank[name])]
    card: Any = ModelCard
    return card.from_template(
        ModelCardData(
            library_name="lamina",
            base_model=base if on_hub else None,
            tags=["lamina", *frozen, *kinds],
            model_name=title if results else None,
            eval_results=results or None,
        ),
        template_str=_CARD,
        title=title,
        count=f"{len(bank)} reader{'' if len(bank) == 1 else 's'}",
        base=f"`{base}`" if on_hub else f"a `{bank.model.config.model_type}`",
        about_base=_TRAINED if bank.saves_base else _FROZEN,
        rows="\n".join(_row(name, bank[name]) for name in bank),
        monitors=_monitors(bank),
    )


def _results(name: str, reader: ReaderModule) -> list[EvalResult]:
    """What a reader was measured at, as its training noted it: its own metric first; none if it was not trained.

    Whatever reads the card joins results of one task and data set, so each metric is named after the reader too.
    """
    scores, metric, task = (reader.info.get(key) for key in ("scores", "metric", "task"))
    if not isinstance(scores, dict):
        return []
    measured: dict[str, Any] = {str(key): value for key, value in cast("dict[Any, Any]", scores).items()}
    order = sorted(measured, key=lambda key: key != metric)
    return [
        EvalResult(
            task_type=_task_type(reader),
            task_name=str(task or name),
            dataset_type=str(task or name),
            dataset_name=str(task or name),
            dataset_split="validation",
            metric_type=_METRICS.get(key, key),
            metric_name=f"{key} of {name}",
            metric_value=float(measured[key]),
        )
        for key in order
        if isinstance(measured[key], int | float) and math.isfinite(measured[key])
    ]


def _task_type(reader: ReaderModule) -> str:
    kind = reader.config.head.kind
    return _TAGS.get(kind, kind.replace("_", "-"))


_MONITORS = """
## Monitors

They score a text while the model writes it, and flag it from the threshold on. The rates are of whole texts, with
their confidence intervals.

| monitor | reader | flags | threshold | false positives | recall |
|---|---|---|---|---|---|
"""


def _monitors(bank: ReaderBank) -> str:
    """A table of the monitors that are kept with the bank; nothing if there are none."""
    rows = [_cells(_monitor_cells(name, monitor)) for name, monitor in bank.monitors.items()]
    return _MONITORS + "\n".join(rows) + "\n" if rows else ""


def _monitor_cells(name: str, monitor: AnyMonitor) -> list[str]:
    second = monitor.second if isinstance(monitor, Cascade) else monitor  # of a cascade, the one that decides
    facts, threshold, rates = monitor.calibration, monitor.threshold, ["", ""]
    if facts is not None:
        false = facts.false_positive_rate, facts.false_positive_interval, facts.negatives
        true = facts.recall, facts.recall_interval, facts.positives
        rates = [f"{rate:.3f} ({low:.3f} to {high:.3f}, {count} texts)" for rate, (low, high), count in (false, true)]
    readers, flags = ", ".join(monitor.readers), ", ".join(second.flag)
    return [name, readers, flags, "none" if threshold is None else f"{threshold:.4g}", *rates]


def _row(name: str, reader: ReaderModule) -> str:
    labels = [str(label) for label in reader.config.head.labels]
    more = f" and {len(labels) - SHOWN_LABELS} more" if len(labels) > SHOWN_LABELS else ""
    shown = ", ".join(labels[:SHOWN_LABELS]) + more
    metric = reader.info.get("metric")
    scores: Any = reader.info.get("scores")  # if it was trained; whatever else was put there
    score: object = cast("dict[object, object]", scores).get(metric) if isinstance(scores, dict) else None
    task, fusion = reader.config.head.kind.replace("_", " "), FUSIONS.name_of(reader.config.fusion)
    scored = f"{metric} {score:.3f}" if isinstance(score, int | float) else ""
    return _cells([name, task, fusion, ranges(reader.layers), shown, f"{reader.size():,}", scored])


def _cells(cells: list[str]) -> str:
    """A row of a table."""
    return "| " + " | ".join(re.sub(r"\s+", " ", cell.replace("|", "\\|")) for cell in cells) + " |"
