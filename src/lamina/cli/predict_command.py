"""`lamina predict`: predict with a bank's readers, or a whole model, from texts, a file or standard input."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

from typer import Argument, Option

from lamina.cli import shared_options as options
from lamina.cli.shared_options import print_json, print_table
from lamina.data.row_errors import check_line_feeds
from lamina.errors import ConfigError, DataError, convert_errors
from lamina.utils import JSONObject, is_file, pluralize

if TYPE_CHECKING:
    from lamina.bank import ReaderModule
    from lamina.tasks.lazy_file import LazyFile

    Answer: TypeAlias = JSONObject | Sequence[JSONObject]  # a prediction; see `lamina.predict`

logger = logging.getLogger(__name__)
SHOWN = 60  # characters of a text that the table shows
_TEXTS = "Texts to predict from. Default: the --file, or without it the lines of standard input."
_FILE = "File of texts: .txt with one text per line, .tsv, .csv, .jsonl or .parquet."
_OUTPUT = (
    "Write the predictions to this .jsonl, .csv or .parquet file; an existing file is replaced. Default: print them."
)
_SKIP_BAD = "With --output: skip and count rows that cannot be read. Default: such a row is an error."
_RAY = "With --output: predict with Ray workers on this machine (local), on the running cluster (auto) or at HOST:PORT."
_WORKERS = "With --ray: number of workers. Default: one per GPU, or one per core without GPUs."
_BATCH = "Number of texts per pass of the model. Default: 32; with --output as many as have 2,048 tokens together."
_RESUME = "With --output: continue a run that was interrupted."


def predict(  # noqa: PLR0913
    bank_or_model: options.SavedArgument,
    texts: Annotated[list[str] | None, Argument(metavar="TEXT", help=_TEXTS)] = None,
    file: Annotated[Path | None, Option(help=_FILE)] = None,
    output: Annotated[Path | None, Option("--output", "-o", help=_OUTPUT)] = None,
    text: options.TextOption = None,
    pair: options.PairOption = None,
    readers: options.ReadersOption = None,
    skip_bad: Annotated[bool, Option("--skip-bad", help=_SKIP_BAD)] = False,
    resume: Annotated[bool, Option(help=_RESUME)] = True,
    model: options.ModelOption = None,
    device: options.DeviceOption = "auto",
    batch_size: Annotated[int | None, Option(min=1, help=_BATCH)] = None,
    backend: options.BackendOption = options.Backend.AUTO,
    ray: Annotated[str | None, Option(metavar="local|auto|ADDRESS", help=_RAY)] = None,
    workers: Annotated[int | None, Option(min=1, help=_WORKERS)] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Predict from texts with the readers of a bank, or with a fine-tuned model.

    All readers share one pass of the model. --json prints one JSON object per text, each on a line. Wrong input ends
    with one sentence and exit code 2.

    Example: lamina predict out/bank "The film is good." "The film is bad."
    """
    for_file = {"--text": text is not None, "--pair": pair is not None, "--output": output is not None}
    options.check_used("predict", "--file", for_file, requested=file is not None)
    if texts and file is not None:
        raise ConfigError("predict: texts and --file were both given; give only one of them.")
    for_output = {"--skip-bad": skip_bad, "--no-resume": not resume, "--workers": workers is not None}
    options.check_used("predict", "--output", {**for_output, "--ray": ray is not None}, requested=output is not None)
    if output is None and file is None:
        texts = texts or from_stdin()  # before the bank is opened, so that missing texts are an error at once
    from lamina import prediction
    from lamina.prediction.predict import Predictor
    from lamina.tasks.lazy_file import beside, name_of
    from lamina.train.options import PassOptions

    names = options.names_of("--readers", readers)
    target = options.open_on(bank_or_model, base=model, device=device)
    if output is not None and file is not None:
        result = prediction.predict_file(
            target,
            file,
            output,
            text=text,
            text_pair=pair,
            readers=names,
            batch_size=batch_size,
            backend=backend.value,
            skip_bad=skip_bad,
            resume=resume,
            ray=ray,
            workers=workers,
            progress=sys.stderr.isatty(),
        )
        line = f"{pluralize(result.rows, 'row')} in {result.output}, {result.skipped:,} skipped"
        print_json(result) if as_json else print(line)
        return
    examples: Sequence[object] = texts or []
    settings = PassOptions.checked("predict", batch_size=batch_size or 32)
    predictor = Predictor(target, settings, readers=names, backend=backend.value)
    folder = file.resolve().parent if file is not None and predictor.file is not None else None
    if file is not None:
        examples = from_file(file, text=text, pair=pair, readers=predictor.readers, kind=predictor.file)
    elif predictor.file is None and len(examples) == 1 and is_file(str(examples[0])):
        logger.warning("predict: '%s' was read as a text, but a file has this name. Its rows: --file", examples[0])
    progress = sys.stderr.isatty() and len(examples) > settings.batch_size
    predictor.options = settings.model_copy(update={"progress": progress})
    answers = predictor([beside(folder, example) for example in examples])
    examples = [name_of(example) for example in examples]
    if as_json:
        for example, answer in zip(examples, answers, strict=True):
            print_json({"text": example, "readers": answer}, indent=None)
    else:
        _show(examples, answers)


def from_stdin() -> list[str]:
    """Return the lines of standard input, one text per line. An empty line is an empty text.

    Raises ConfigError if standard input is a terminal or closed, and DataError if it is empty, unreadable, not UTF-8 or
    has carriage returns without line feeds.
    """
    if sys.stdin is None or sys.stdin.isatty():  # None: it is closed
        raise ConfigError("predict: there is no text. Give texts as arguments, with --file or on standard input.")
    with convert_errors(lambda reason: DataError(f"read: standard input cannot be read ({reason}).")):
        data = sys.stdin.buffer.read()
    try:
        text = data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        row = data.count(b"\n", 0, error.start) + 1
        reason = f"is not UTF-8 at byte {error.start} (row {row}); texts are read as UTF-8"
        raise DataError(f"read: standard input {reason}.", row=row) from None
    if not text:
        raise DataError("read: standard input is empty. Give one text per line.")
    check_line_feeds("standard input", text)
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def from_file(
    path: Path,
    *,
    text: str | None = None,
    pair: str | None = None,
    readers: Mapping[str, ReaderModule] | None = None,
    kind: type[LazyFile] | None = None,
) -> list[object]:
    """Return the examples of a file: texts, pairs of texts, images or audio clips.

    `kind` is the class of images or audio clips; None: texts. `text` and `pair` name columns; where they are None,
    `columns_of` chooses those that suit `readers`. Raises DataError if the file cannot be read or lacks a column, or a
    row has no text; ConfigError if the columns of a pair are the same, or cannot be chosen.
    """
    from lamina.prediction.bulk import read_examples
    from lamina.prediction.file_columns import columns_of

    columns = columns_of(path, text, pair, readers or {})
    return [example for _, examples, _ in read_examples(path, columns, file=kind) for example in examples]


def _show(texts: Sequence[object], answers: Sequence[Mapping[str, Answer]]) -> None:
    names = list(answers[0]) if answers else []
    rows = [
        (_short(text), *(summary(answer[name]) for name in names)) for text, answer in zip(texts, answers, strict=True)
    ]
    print_table("", ("text", *names), rows)


def _short(text: object) -> str:
    line = " ".join(str(" | ".join(text) if isinstance(text, tuple) else text or "").split())
    return line if len(line) <= SHOWN else line[: SHOWN - 3] + "..."


def summary(answer: Answer) -> str:
    """Return a prediction as a short string; "-" for an empty list of labels or spans.

    A label, span or token has its score beside it; several labels of one text, a number or generated text have none.
    """
    if not isinstance(answer, Mapping):
        if answer and "candidates" in answer[0]:
            best = [mask["candidates"][0] for mask in answer if mask["candidates"]]
            return ", ".join(f"{token['token']} ({token['score']:.2f})" for token in best)
        return ", ".join(f"{span['text']} {span['label']} ({span['score']:.2f})" for span in answer) or "-"
    if "value" in answer:
        return f"{answer['value']:.3f}"
    if "labels" in answer:
        return ", ".join(answer["labels"]) or "-"
    if "label" in answer:
        return f"{answer['label']} ({answer['score']:.2f})"
    return ", ".join(map(str, answer.values()))
