"""`lamina evaluate`: score a bank's readers, or a whole model, on labelled texts."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypedDict, cast

from typer import Argument, Option

from lamina.cli import shared_options as options
from lamina.cli.shared_options import print_json, print_table
from lamina.errors import ConfigError, UnknownNameError, check_known
from lamina.utils import JSON, JSONObject, is_dir, is_file, pluralize

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.text import Text

    from lamina.tasks.outputs import WrongAnswer
    from lamina.tasks.task import Task
    from lamina.train.results import Scores

PER_CLASS = ("label", "precision", "recall", "f1", "count", "guessed")
_PER_CLASS = "Also print a table per reader with the scores of each label."
_ERRORS = "Number of wrong predictions to show per reader, the most confident first. Default: none."
_FILE = "Labelled file that every reader is scored on, with the columns that it learnt from."
_LABEL = "Column of the label in a file, for one reader or for all. Default: the column that a reader learnt from."
_POSITIVE = "Positive class of two, which F1 and recalls count, for one reader or for all. Default: 1, yes or true."
_TFIDF = "Labelled file to train a rival on: TF-IDF with logistic regression, by scikit-learn. Default: no rival."
_COMPARED = ("rows", "always", "baseline", "interval", "verdict", "tfidf")  # what `lamina.evaluate` adds to the metrics
_DATA = "Folder with a subfolder of data files per preset. Default: presets are loaded from the hub."
_SPLIT = 'Split of a preset: "train", "validation" (the default) or "test". All rows of a file are scored.'
_TASK = (
    'A reader and what to score it on: a labelled file, or a preset such as "cola"; may be repeated. '
    "For a whole model READER is any name."
)


class Span(TypedDict):
    """A wrong span of a text, the characters `[start:end]`; `error` is "missed", "extra" or "wrong"."""

    start: int
    end: int
    label: str
    error: str


def evaluate(  # noqa: PLR0913
    bank_or_model: options.SavedArgument,
    file: Annotated[str | None, Argument(metavar="[FILE]", help=_FILE, show_default=False)] = None,
    task: Annotated[list[str] | None, Option(metavar="READER=TASK", help=_TASK)] = None,
    data: Annotated[Path | None, Option(help=_DATA)] = None,
    split: Annotated[str | None, Option(help=_SPLIT)] = None,
    text: options.TextOption = None,
    pair: options.PairOption = None,
    label: Annotated[list[str] | None, Option(metavar="[READER=]COLUMN", help=_LABEL)] = None,
    positive: Annotated[list[str] | None, Option(metavar="[READER=]CLASS", help=_POSITIVE)] = None,
    tfidf: Annotated[str | None, Option(metavar="FILE", help=_TFIDF)] = None,
    per_class: Annotated[bool, Option("--per-class", help=_PER_CLASS)] = False,
    errors: Annotated[int, Option(min=0, metavar="N", help=_ERRORS)] = 0,
    model: options.ModelOption = None,
    device: options.DeviceOption = "auto",
    batch_size: options.BatchSizeOption = 32,
    backend: options.BackendOption = options.Backend.TORCH,
    as_json: options.JsonOption = False,
) -> None:
    """Score the readers of a bank, or a fine-tuned model, on labelled texts.

    FILE is scored by every reader of the bank. With --task, a reader has a file or preset of its own. Beside each score
    stand its 95 % interval over the rows, and the score of always giving the most frequent answer. Wrong input ends
    with one sentence and exit code 2.

    Examples: lamina evaluate out/bank test.csv; lamina evaluate out/bank --task mood=test.tsv --text sentence
    """
    sources = options.by_reader("evaluate", "--task", task or [], "READER=TASK, such as ner=conll2003,")
    if (file is None) == (not sources):
        raise ConfigError("evaluate: give either FILE, which every reader is scored on, or --task READER=TASK.")
    _check_used(
        sources if file is None else {"": file},
        for_files={"--text": text, "--pair": pair, "--label": label},
        for_presets={"--data": data, "--split": split},
    )
    options.check_used("evaluate", "FILE", {"--tfidf": tfidf is not None}, requested=file is not None)
    from lamina.bank import ReaderBank
    from lamina.prediction import evaluate as run
    from lamina.prediction.evaluate import FileColumns, tasks_of_file

    labels, flags = _by_reader("--label", label), _by_reader("--positive", positive)
    if sources:
        check_known("evaluate", labels if isinstance(labels, dict) else (), sources, "reader")
    target = options.open_on(bank_or_model, base=model, device=device)
    if isinstance(target, ReaderBank):
        target.select(list(sources), "evaluate")
    tasks: dict[str, Task] = {}
    split, columns = split or "validation", FileColumns(text, pair, labels)
    for name, source in sources.items():
        if _is_data(source):
            tasks |= tasks_of_file(target, source, split, columns, reader=name)
        else:
            tasks[name] = _preset(source, data)
    if file is not None:
        tasks, flags = tasks_of_file(target, file, split, columns, positive=flags, train=tfidf), None
    scores = run(
        target,
        tasks,
        split=split,
        positive=flags,
        batch_size=batch_size,
        per_class=per_class,
        errors=errors,
        compare=True,
        tfidf=tfidf is not None,
        backend=backend.value,
        progress=sys.stderr.isatty(),
    )
    print_json(scores) if as_json else _show(scores, tasks)


def _by_reader(option: str, values: list[str] | None) -> dict[str, str] | str | None:
    """Return the values of a repeated option: reader -> value; or one value for all readers; or None if there is none.

    Raises ConfigError, which names the `option`, if one of several values, or a single value with "=", is not of the
    form READER=VALUE, or a reader comes twice.
    """
    if not values:
        return None
    if len(values) == 1 and "=" not in values[0]:
        return values[0]
    return options.by_reader("evaluate", option, values, "one value for all readers, or READER=VALUE")


def _check_used(
    sources: Mapping[str, str], *, for_files: Mapping[str, object], for_presets: Mapping[str, object]
) -> None:
    """Raise ConfigError if an option was given that no task uses: `for_files` are for files, `for_presets` for presets.

    `sources` is reader -> preset or file; the other two are option -> its value, or None if it was not given.
    """
    files = [source for source in sources.values() if _is_data(source)]
    for option in (option for option, value in for_files.items() if value is not None and not files):
        problem = f"{option} was given, but no task is an existing file"
        raise ConfigError(f"evaluate: {problem}: {', '.join(sources.values())}; only files have columns.")
    for option in (option for option, value in for_presets.items() if value is not None and len(files) == len(sources)):
        problem = f"{option} was given, but no task is a preset"
        raise ConfigError(f"evaluate: {problem}: {', '.join(files)}; all rows of a file are scored.")


def _is_data(source: str) -> bool:
    """Return whether a task is a file, or a folder of images or audio clips; False if a folder has a preset's name.

    Raises ConfigError if a folder has a preset's name with a wrong language code, such as "wikiann/english".
    """
    from lamina.tasks.presets import find_preset

    with suppress(UnknownNameError):
        return is_file(source) or (is_dir(source) and not find_preset(source))
    return True


def _preset(name: str, data: Path | None) -> Task:
    """Return a preset, read from the subfolder of `data` with its name without "glue/", or from the hub for None.

    Raises UnknownNameError if there is no such preset, and the other errors of `Task.preset`, such as DataError.
    """
    from lamina.tasks.presets import PRESETS, find_preset
    from lamina.tasks.task import Task

    try:
        find_preset(name)
    except UnknownNameError:
        see = "lamina.tasks.presets.PRESETS"
        raise UnknownNameError(op="evaluate", got=name, known=PRESETS, what="file or preset", see=see) from None
    return Task.preset(name, files=None if data is None else data / name.removeprefix("glue/"))


def _show(scores: Scores, tasks: Mapping[str, Task]) -> None:
    """Print a table of all metrics, then verdicts, and the tables "per_class" and "errors" of readers that have them.

    `scores` is what `lamina.evaluate` returned with `compare=True`, and `tasks` is reader -> task.
    """
    rows = [
        (reader, tasks[reader].name, metric, *_row(metric, values))
        for reader, values in scores.items()
        for metric in values
        if metric not in ("per_class", "errors", *_COMPARED)
    ]
    columns = ["reader", "scored on", "metric", "value", "95 % interval", "always one answer", "TF-IDF"]
    columns = columns if any("tfidf" in values for values in scores.values()) else columns[:-1]
    print_table("", columns, [row[: len(columns)] for row in rows])
    for reader, values in scores.items():
        if values.get("verdict"):
            print(f"{reader}: {values['verdict']}, on {pluralize(values['rows'], 'row')}")
    for reader, values in scores.items():
        table = values.get("per_class")
        if table:
            print_table(f"\n{reader}", PER_CLASS, [[row.get(key) for key in PER_CLASS] for row in table])
        elif table is not None:
            print(f"\n{reader}: numbers and running text have no classes")
    for reader, values in scores.items():
        if "errors" in values:
            print_errors(reader, values["errors"])


def _row(metric: str, values: JSONObject) -> list[str]:
    """Return the cells for one metric of a reader: score, interval, score of a constant answer, TF-IDF's score.

    `values` are the reader's scores, with what `lamina.evaluate` adds. A cell without a value is "". The constant
    answer itself is shown for the first metric only.
    """
    count = values.get("rows", 0)
    low_high = [shown(end, count) for end in values.get("interval", {}).get(metric, ())]
    other, words = values.get("baseline", {}).get(metric), values.get("tfidf", {}).get(metric)
    always = "" if other is None else shown(other, count)
    if metric == next(iter(values.get("baseline", {})), None):
        always += f" ({values['always']})"
    return [shown(values[metric], count), " to ".join(low_high), always, "" if words is None else shown(words, count)]


def shown(value: float, rows: int) -> str:
    """Return a score with as many decimals as its number of rows supports: two, or three from 2,500 rows on."""
    return f"{value:.{3 if rows >= 2500 else 2}f}"


SHOWN = 600  # characters of a text that are printed; a quarter as many of the text between two marked spans
_STYLES = {"wrong": "bold yellow", "missed": "bold red", "extra": "bold magenta"}


def print_errors(reader: str, errors: Sequence[WrongAnswer]) -> None:
    """Print a reader's wrong answers as a table, or that there are none. Spans are marked in the text that has them."""
    if not errors:
        print(f"\n{reader}: every prediction is right")
        return
    sides = [answer for row in errors for answer in (row["true"], row["predicted"])]
    has_spans = any(isinstance(part, dict) for side in sides if isinstance(side, list) for part in side)
    last = "error" if "error" in errors[0] else "confidence"
    columns = ("row", *(() if has_spans else ("text",)), "true", "predicted", last)
    rows: list[list[object]] = []
    for row in errors:
        if has_spans:
            text = row["text"][-1] if isinstance(row["text"], list) else row["text"]  # the labelled text of a pair
            answers = [marked(str(text), cast("list[Span]", row[side])) for side in ("true", "predicted")]
        else:
            answers = [_plain(row["text"]), _value(row["true"]), _value(row["predicted"])]
        rows.append([str(row["row"]), *answers, row.get(last)])
    order = "largest errors" if last == "error" else "errors, most confident first"
    print_table(f"\n{reader}: {order}", columns, rows)


def marked(text: str, spans: Sequence[Span]) -> Text:
    """Return a text with its wrong spans marked, each with its label and error in brackets: "[Ekeus|PER missed] heads".

    Long stretches between spans are shortened. The spans must be in order and must not overlap.
    """
    from rich.text import Text

    out, at = Text(), 0
    for span in spans:
        out.append(shortened(text[at : span["start"]], SHOWN // 4))
        out.append(f"[{text[span['start'] : span['end']]}|{span['label']} {span['error']}]", _STYLES[span["error"]])
        at = span["end"]
    return out.append(shortened(text[at:], SHOWN // 4 if spans else SHOWN))


def shortened(text: str, most: int) -> str:
    """Return a text of about `most` characters, with " [...] " in place of the words in its middle.

    A text of at most `most` characters is returned unchanged.
    """
    if len(text) <= most:
        return text
    start, end = text[: most // 2].rsplit(None, 1), text[-most // 2 :].split(None, 1)
    return f"{''.join(start[:1])} [...] {''.join(end[-1:])}"  # a half of spaces only has no words


def _plain(text: JSON) -> str:
    texts = text if isinstance(text, list) else [text]
    return "\n".join(shortened(" ".join(str(part).split()), SHOWN) for part in texts)


def _value(answer: JSON) -> JSON:
    return ", ".join(map(str, answer)) or "-" if isinstance(answer, list) else answer
