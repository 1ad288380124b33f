"""Banks on the Hugging Face hub: their model card, their download, and why the hub refused a request."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, cast

import huggingface_hub
from huggingface_hub import EvalResult, ModelCard, ModelCardData, errors

from lamina.bank import NAME
from lamina.errors import LaminaError, StoreError, first_line
from lamina.fusion import FUSIONS
from lamina.layers.selectors import ranges
from lamina.monitors import Cascade
from lamina.store.manifest import BASE, CARD, MANIFEST, PROCESSOR, READER, READERS, WEIGHTS
from lamina.store.models import check_revision
from lamina.utils import is_dir

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from lamina.bank import ReaderBank, ReaderModule
    from lamina.monitors.cascade import AnyMonitor

_LOGIN = "Log in with `hf auth login`, or set HF_TOKEN"


def local_folder(folder: str, revision: str | None, readers: Collection[str] | None, *, base: bool) -> Path:
    """Return `folder` as a path if it is a folder; else download the bank from the hub, and return its cached folder.

    Only the readers named in `readers` are downloaded (None: all), and a base model in the repository only with `base`.

    Raises:
        StoreError: If `folder` is a file, neither folder nor repository exists, or the download fails.
        ConfigError: If there is a revision other than "main" for a local folder.
    """
    path = Path(folder)
    if is_dir(path):
        check_revision(folder, revision)
        return path
    try:
        if path.exists():
            raise StoreError(f"load: {path} is a file; a bank is a folder.")
        patterns = _patterns(readers, base=base)
        downloaded = huggingface_hub.snapshot_download(  # pyright: ignore[reportUnknownMemberType]
            folder, revision=revision, allow_patterns=patterns
        )
        return Path(downloaded)
    except LaminaError:
        raise
    except Exception as error:  # the hub's, the connection's and the disk's errors have no common class
        problem = "there is no such folder, and it cannot be loaded from the hub"
        raise StoreError(f"load: no bank '{folder}'; {problem} ({failure(error, revision, 'read')}).") from error


def _patterns(readers: Collection[str] | None, *, base: bool) -> list[str]:
    """Return patterns of the files of a bank to download, with the model's only if `base`. `readers` None: all readers.

    A name that no reader can have (such as "*") would act as a pattern and is left out; loading reports it later.
    """
    names = ["*"] if readers is None else [name for name in readers if NAME.fullmatch(name)]
    reader_files = [f"{READERS}/{name}/{file}" for name in names for file in (READER, WEIGHTS)]
    return [MANIFEST, CARD, f"{PROCESSOR}/*", *reader_files, *([f"{BASE}/*"] if base else [])]


def failure(error: BaseException, revision: str | None, access: str) -> str:
    """Return why a request to the hub failed with `error`, as a phrase for an error message.

    `revision` is the revision that was requested; None: the main branch. `access` is the access that the request needs,
    "read" or "write".
    """
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__  # it says that the file is not in the cache; its cause is why the hub did not give it
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.HFValidationError):
        return "it is not the id of a repository, such as user/name"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"the repository has no revision '{revision or 'main'}'"
    if isinstance(error, errors.GatedRepoError):
        return f"access must be requested on its page. {_LOGIN}"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"the hub has no such repository, or it is private. {_LOGIN}"
    if status == 401:
        return f"the hub did not accept the login. {_LOGIN}"
    if status == 403:
        return f"the token does not allow it. Use one with {access} access"
    return first_line(error)


SHOWN_LABELS = 8
_FROZEN = "The model itself is frozen and unchanged."
_TRAINED = "The model was fine-tuned with them; the folder `base` has it, as a plain checkpoint of transformers."
# kind -> the hub's name of such tasks, if it is not the kind's name with hyphens
_TAGS = {
    "sequence_classification": "text-classification",
    "masked_lm": "fill-mask",
    "causal_lm": "text-generation",
}
_METRICS = {"mcc": "matthews_correlation", "pearson": "pearsonr", "spearman": "spearmanr"}  # our name -> the hub's

_CARD = """---
{{ card_data }}
---

# {{ title }}

{{ count }} on one model, {{ base }}, made with Lamina. One forward pass of the model serves all readers: each of them
computes its predictions from the outputs of the model's layers. {{ about_base }}

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

The readers work with this model only. Loading compares its weights, its settings and the tokenizer with what was saved.
"""


def model_card(bank: ReaderBank, title: str) -> ModelCard:
    """Return the model card of a bank: Markdown, with the front matter that the hub reads.

    `title` is also the folder or hub id in the card's loading instructions. Raises ConfigError if a stored monitor
    cannot be read.
    """
    base = str(getattr(bank.model, "name_or_path", "") or "")
    on_hub = not Path(base).exists() and re.fullmatch(r"[\w.-]+(/[\w.-]+)?", base)
    kinds = dict.fromkeys(_task_type(bank[name]) for name in bank)
    frozen = [] if bank.saves_base else ["frozen-base"]
    results = [result for name in bank for result in _results(name, bank[name])]
    fields = ModelCardData(
        library_name="lamina",
        base_model=base if on_hub else None,
        tags=["lamina", *frozen, *kinds],
        model_name=title if results else None,
        eval_results=results or None,
    )
    return ModelCard.from_template(  # pyright: ignore[reportUnknownMemberType]
        fields,
        template_str=_CARD,
        title=title,
        count=f"{len(bank)} reader{'' if len(bank) == 1 else 's'}",
        base=f"`{base}`" if on_hub else f"a `{bank.model.config.model_type}`",
        about_base=_TRAINED if bank.saves_base else _FROZEN,
        rows="\n".join(_row(name, bank[name]) for name in bank),
        monitors=_monitors(bank),
    )


def _scores_of(reader: ReaderModule) -> Mapping[str, object]:
    """Return metric -> validation score from the reader's `info`; {} if the reader was not trained.

    A value of another form counts as no scores.
    """
    scores: object = reader.info.get("scores")
    return cast("Mapping[str, object]", scores) if isinstance(scores, dict) else {}


def _results(name: str, reader: ReaderModule) -> list[EvalResult]:
    """Return a reader's finite scores in the hub's format, beginning with the metric that chose the best epoch.

    The name of each metric contains the name of the reader.
    """
    metric, task = reader.info.get("metric"), str(reader.info.get("task") or name)
    return [
        EvalResult(
            task_type=_task_type(reader),
            task_name=task,
            dataset_type=task,
            dataset_name=task,
            dataset_split="validation",
            metric_type=_METRICS.get(str(key), str(key)),
            metric_name=f"{key} of {name}",
            metric_value=float(score),
        )
        for key, score in sorted(_scores_of(reader).items(), key=lambda item: item[0] != metric)
        if isinstance(score, int | float) and math.isfinite(score)
    ]


def _task_type(reader: ReaderModule) -> str:
    kind = reader.config.head.kind
    return _TAGS.get(kind, kind.replace("_", "-"))


_MONITORS = """
## Monitors

A monitor scores a text while the model writes it, and flags the text once the score reaches the threshold. The rates
count whole texts; in parentheses are their confidence intervals.

"""
MONITOR_COLUMNS = ("monitor", "reader", "flags", "threshold", "false positives", "recall", "calibrated")


def _monitors(bank: ReaderBank) -> str:
    rows = [_table_row(monitor_cells(name, monitor)) for name, monitor in bank.monitors.items()]
    head = [_table_row(list(MONITOR_COLUMNS)), "|" + "---|" * len(MONITOR_COLUMNS)]
    return _MONITORS + "\n".join(head + rows) + "\n" if rows else ""


def monitor_cells(name: str, monitor: AnyMonitor) -> list[str]:
    """Return the cells of monitor `name` for `MONITOR_COLUMNS`; the last three are "" if it was not calibrated.

    The threshold is "none" if there is none. A cascade has the flags and the threshold of its second monitor.
    """
    deciding = monitor.second if isinstance(monitor, Cascade) else monitor
    calibration, threshold, rates = monitor.calibration, monitor.threshold, ["", "", ""]
    if calibration is not None:
        negatives = calibration.false_positive_rate, calibration.false_positive_interval, calibration.negatives
        positives = calibration.recall, calibration.recall_interval, calibration.positives
        rates = [
            f"{rate:.3f} ({low:.3f} to {high:.3f}, {count} texts)"
            for rate, (low, high), count in (negatives, positives)
        ]
        facts = [
            calibration.promise(),
            calibration.date,
            f"data {calibration.data}" * bool(calibration.data),
        ]
        rates.append(", ".join(filter(None, facts)))
    readers, flags = ", ".join(monitor.readers), ", ".join(deciding.flag)
    return [name, readers, flags, "none" if threshold is None else f"{threshold:.4g}", *rates]


def _row(name: str, reader: ReaderModule) -> str:
    labels = [str(label) for label in reader.config.head.labels]
    more = f" and {len(labels) - SHOWN_LABELS} more" if len(labels) > SHOWN_LABELS else ""
    shown = ", ".join(labels[:SHOWN_LABELS]) + more
    metric = reader.info.get("metric")
    score = _scores_of(reader).get(str(metric))
    task, fusion = reader.config.head.kind.replace("_", " "), FUSIONS.name_of(reader.config.fusion)
    scored = f"{metric} {score:.3f}" if isinstance(score, int | float) else ""
    return _table_row([name, task, fusion, ranges(reader.layers), shown, f"{reader.size():,}", scored])


def _table_row(cells: list[str]) -> str:
    """Return a row of a Markdown table. Bars in cells are escaped; line breaks and other white space become spaces."""
    return "| " + " | ".join(re.sub(r"\s+", " ", cell.replace("|", "\\|")) for cell in cells) + " |"
