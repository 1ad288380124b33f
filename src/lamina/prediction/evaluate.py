"""Score the readers of a bank, or a whole model, on a split of their tasks."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from lamina.bank import ReaderBank
from lamina.bank.reader import warn_of_untrained
from lamina.data.read import read_chunks
from lamina.errors import ConfigError, DataError, check_known, require_packages
from lamina.prediction.backends import BACKENDS, Backend, engine_of
from lamina.tasks import kind_of
from lamina.tasks.class_results import class_scores
from lamina.tasks.label_cells import EvaluateOnly
from lamina.tasks.metrics import require_metrics
from lamina.tasks.split import Split, is_missing
from lamina.tasks.task import Task
from lamina.train.bank_runner import BankRunner
from lamina.train.base import Runner, checked_target
from lamina.train.groups import groups_of, tasks_by_name, with_positive
from lamina.train.model_runner import ModelRunner, task_of
from lamina.train.options import PassOptions
from lamina.train.training_run import open_runner
from lamina.utils import JSONObject, check_range, check_types, is_dir

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.bank.reader import Info
    from lamina.heads.base import HeadConfig, TaskLike
    from lamina.layers.types import Processor
    from lamina.tasks.outputs import Label, Results
    from lamina.train.plan import Group
    from lamina.train.results import Scores

logger = logging.getLogger(__name__)

WHOLE = "model"  # name of the task of a whole model
_AS_TRAINED = ("max_length", "stride", "add_prefix_space")  # options that follow a reader's training
_KEPT_TOKENS = 1 << 22  # tokens of encoded examples that stay in memory, some 100 MB with their labels


@check_types("evaluate")
def evaluate(  # noqa: PLR0913
    bank_or_model: ReaderBank | PreTrainedModel,
    tasks: Mapping[str, Task] | Task | str | Path,
    *,
    split: str = "validation",
    text: str | int | None = None,
    text_pair: str | int | None = None,
    labels: Mapping[str, str | int] | str | int | None = None,
    positive: Mapping[str, str | int] | str | int | None = None,
    compare: bool = False,
    tfidf: bool | str | Path = False,
    processor: Processor | None = None,
    batch_size: int = 64,
    per_class: bool = False,
    errors: int = 0,
    max_length: int | None = None,
    stride: int | None = None,
    add_prefix_space: bool = False,
    precision: Literal["float32", "bfloat16", "float16"] = "float32",
    prefix: str = "",
    max_target_length: int = 128,
    num_beams: int = 1,
    length_penalty: float = 1.0,
    num_workers: int = 0,
    backend: Backend = "torch",
    progress: bool = False,
    **unknown: object,
) -> Scores:
    """Score the readers of a bank, or a model with a head of its own, on a split of their tasks.

    Readers whose tasks have the same examples share every pass. All examples are encoded and checked first. Warnings
    name readers that are untrained, that read only the start of examples, or that were trained on pairs and now read
    single texts (or the other way round).

    Args:
        bank_or_model: A bank, or a whole model.
        tasks: Reader name -> task. For a whole model: any name -> a task that its head is for; or a single task. If its
            classes are named LABEL_0, LABEL_1 and so on, class 0 is scored as the task's first label, and a warning
            says so. Or a labelled file, or a folder of images or audio clips as in `Task.from_files`: every reader is
            scored on all its rows, by default with the columns that it was trained on.
        text: Column of the text in a file. None: the column that a reader learnt from.
        text_pair: Column of the second text in a file. None: the column that a reader learnt from, if any.
        labels: Reader name -> column of its label in a file, or one column for all. None, and for other readers: as in
            training.
        positive: The positive class, for "f1" and the recalls: reader name -> class, or one class for all readers (with
            a file only for those with two labels, if there are any). None: the task's positive class, or the one with
            which a reader was trained.
        compare: Add "rows" (with a label), "always" (the best constant answer: the most frequent class, or the mean; if
            the task's metric is F1, the positive class or the labels with the highest F1), "baseline" (metric -> score
            of always giving the answer that is best by this metric), "interval" (metric -> ends of the 95 % interval of
            the score, a bootstrap over rows) and "verdict" (None, or that the reader is not better than "always").
        tfidf: Add "tfidf", metric -> score of TF-IDF and logistic regression (scikit-learn). True: trained on the
            "train" split of each task. A path, if `tasks` is a file: trained on the file at this path.
        split: "train", "validation" or "test"; with a file, the name under which its rows are scored.
        processor: Tokenizer, image processor or feature extractor. None: the bank's, or the one that belongs to
            `model.name_or_path`.
        batch_size: Rows per pass. A row is a window of tokens, a block of text, an image or an audio clip.
        per_class: Also return "per_class": a row per class (or type of span) and for "micro avg", "macro avg" and
            "weighted avg", with "label", "precision", "recall", "f1", "count" (true examples) and "guessed"
            (predictions).
        errors: Also return "errors": this number of wrong predictions, the most confident first, with "row" (from 0),
            "text" (a list for a pair), "true", "predicted" and "confidence" (the probability of the predicted class, or
            in multi-label tasks of the most confident wrong decision). Regression has "error" in its place, and the
            largest come first. For token tasks "true" and "predicted" are lists of wrong spans with "start" and "end"
            (characters), "label", "score" (mean probability of the tags of the span's words) and "error": "missed",
            "extra", or "wrong" for overlapping spans; the confidence is the highest of these scores. 0: none.
        max_length: Tokens per window, or samples per audio clip. None: what the readers were trained with, else the
            most that the model allows.
        stride: Tokens that two neighbouring windows share. None: as in training, else a quarter of a window.
        add_prefix_space: Put a space before every text if the tokenizer needs one to read the first word as it reads
            any other word. False: it is put only for readers that were trained with this option.
        precision: "float32", or "bfloat16" or "float16" for mixed precision.
        prefix: Text that is put before every text to summarise or translate. "": none.
        max_target_length: Maximum number of tokens to generate per example.
        num_beams: Number of beams for generating. 1: greedy decoding.
        length_penalty: Exponent of the length in beam search; above 0 prefers longer texts.
        num_workers: Number of processes that prepare batches. 0: this process prepares them.
        backend: What computes a bank's answers, as in `predict`; all but "torch" need a bank and float32. Tasks whose
            inputs contain the labels (masked or next tokens) are computed by PyTorch.
        progress: Show a progress bar.
        **unknown: Other keywords raise UnknownNameError, which suggests the nearest option.

    Returns:
        Reader name (or the given name) -> metric -> value.

    Raises:
        UnknownNameError: If a reader, the split, a class in `positive`, `precision`, the backend or an option does not
            exist.
        ConfigError: If there is no task or no processor, a task does not fit its reader or the model, an option is out
            of range or does not fit the tasks or another option, `errors` is set for a kind of task whose predictions
            are not right or wrong, or the frozen model or the processor of a bank has changed.
        DataError: If a file cannot be read, or a column is missing.
        BaseMismatchError: If `processor` makes different inputs than the bank's own.
        NotFiniteError: If the outputs for a row, or a score, are NaN or infinite.
        LaminaError: If the backend is "onnx" or "int8" and cannot answer for the bank; see `predict`.
        MissingExtraError: If the packages of a metric, the backend or the baseline are not installed.
    """
    check_known("evaluate", unknown, list(signature(evaluate).parameters)[2:-1], "option", "help(lamina.evaluate)")
    check_range("evaluate", "errors", errors, 0)
    options = PassOptions.checked(
        "evaluate",
        batch_size=batch_size,
        max_length=max_length,
        stride=stride,
        add_prefix_space=add_prefix_space,
        precision=precision,
        prefix=prefix,
        max_target_length=max_target_length,
        num_beams=num_beams,
        length_penalty=length_penalty,
        num_workers=num_workers,
    )
    target = checked_target("evaluate", bank_or_model)
    check_known("evaluate", [backend], BACKENDS, "backend")
    if backend != "torch" and (precision != "float32" or not isinstance(target, ReaderBank)):
        what = "a whole model" if precision == "float32" else f"precision {precision}"
        raise ConfigError(f"evaluate: backend is '{backend}' with {what}; it is for banks, in float32.")
    # a file has an ending, or is a folder of images; another text, such as the name of a preset, is no task
    if isinstance(tasks, Path) or (isinstance(tasks, str) and (Path(tasks).suffix or is_dir(tasks))):
        if tfidf and split == "train":
            raise ConfigError("evaluate: split is 'train', so tfidf would learn from the scored rows. Leave split out.")
        train = None if isinstance(tfidf, bool) else tfidf
        columns = FileColumns(text, text_pair, labels)
        tasks = tasks_of_file(target, tasks, split, columns, positive=positive, train=train)
    elif (text, text_pair, labels) != (None, None, None) or not isinstance(tfidf, bool):
        raise ConfigError("evaluate: text, text_pair, labels and a file for tfidf are for a file, not for tasks.")
    else:
        tasks = with_positive("evaluate", tasks_by_name("evaluate", tasks), positive)
    require_metrics("evaluate", (metric for task in tasks.values() for metric in task.metrics))
    for task in tasks.values() if tfidf else ():
        _check_tfidf(task)
    more = partial(_more, per_class=per_class, errors=errors, compared=compare)
    runs = [tasks] if isinstance(target, ReaderBank) else [{name: task} for name, task in tasks.items()]
    scores: Scores = {}
    prepared = [_prepared(target, run, split, processor, options, errors, len(tasks)) for run in runs]
    for run, (runner, groups) in zip(runs, prepared, strict=True):
        if isinstance(runner, BankRunner):
            runner.engine = engine_of(runner.bank, backend, list(run), "evaluate")
        scores |= runner.score(groups, options, more=more, progress=progress)
    for name, task in tasks.items() if tfidf else ():
        scores[name]["tfidf"] = tfidf_scores(task, split)
    return {name: scores[name] for name in tasks}


def _more(results: Results, metrics: Sequence[str], *, per_class: bool, errors: int, compared: bool) -> JSONObject:
    """Return the extra entries of a reader's scores: "per_class" and "errors".

    With `compared` also those of `results.compare(metrics)`, a comparison with a constant answer.

    `results` are the reader's outputs. At most `errors` wrong answers are listed. {} without any option.
    """
    more: JSONObject = {}
    if per_class:
        more["per_class"] = results.per_class()
    if errors:
        more["errors"] = results.errors(errors)
    return {**more, **results.compare(metrics)} if compared else more


def _prepared(
    target: ReaderBank | PreTrainedModel,
    tasks: Mapping[str, Task],
    split: str,
    processor: Processor | None,
    options: PassOptions,
    errors: int,
    count: int,
) -> tuple[Runner, Iterator[Group]]:
    """Return the runner for `target`, and the groups of a split of the tasks. For the arguments see `evaluate`.

    All groups are encoded and checked here. If they have over 2**22 tokens, they are dropped, and encoded again when
    they are scored. A single group with all `count` tasks of the call is always kept.

    The warnings of `evaluate` are logged here. Raises ConfigError if `errors` is not 0 and the answers of a task are
    not right or wrong one by one; other errors are those of `evaluate`.
    """
    runner = open_runner(target, tasks, "evaluate", processor, options)
    runner.check(tasks, (split,))
    if unjudged := [task for task in tasks.values() if errors and not task.kind.has_classes]:
        what = "whose answers are not right or wrong one by one"
        raise ConfigError(f"evaluate: errors is {errors} for a task of kind {unjudged[0].kind}, {what}.")
    parts = {name: task.split(split) for name, task in tasks.items()}
    runner.warn_about_pairs({name: part.pairs for name, part in parts.items() if part.written})
    checked: list[Group] = []
    tokens, encodes_again = 0, False
    for group in scoring_groups(runner, tasks, split, options):
        if isinstance(runner, ModelRunner):
            runner.fit_head(group, keep=False)
        for name in group.names:
            if cut := group.truncated(name):
                logger.warning("evaluate: %s saw only the start of %d examples, which are too long", name, cut)
        checked.append(group)
        tokens += int(sum(group.inputs.lengths))
        if encodes_again := len(group.tasks) < count and tokens > _KEPT_TOKENS * len(tasks) // count:
            checked = [replace(group, inputs=None, targets={}) for group in checked]  # pyright: ignore[reportArgumentType]
    if isinstance(runner, BankRunner):
        warn_of_untrained("evaluate", runner.bank.select([*tasks], "evaluate"))
        runner.prepare_recorded(checked, options)
    groups = scoring_groups(runner, tasks, split, options) if encodes_again else checked
    return runner, (replace(group, states=same.states) for group, same in zip(groups, checked, strict=True))


def scoring_groups(runner: Runner, tasks: Mapping[str, Task], split: str, options: PassOptions) -> Iterator[Group]:
    """Yield one split of the tasks as groups: tasks with the same examples, which are encoded once for all of them.

    Examples are encoded as in training, unless `options` say otherwise. Raises UnknownNameError, ConfigError or
    DataError, as `groups_of` does.
    """
    apart: dict[tuple[object, ...], dict[str, Task]] = defaultdict(dict)
    for name, task in tasks.items():
        length, stride, space = (runner.trained_with([name], option) for option in _AS_TRAINED)
        length = length if options.max_length is None else options.max_length
        stride = stride if options.stride is None else options.stride
        apart[task.kind.inputs, length, stride, options.add_prefix_space or bool(space)][name] = task
    for (_, *how), some in apart.items():
        trained: dict[str, object] = dict(zip(_AS_TRAINED, how, strict=True))
        yield from groups_of(runner, some, split, options.model_copy(update=trained))


_NEVER = -1e9  # logit of a class without a training row


def _check_tfidf(task: Task) -> None:
    """Check that `tfidf_scores` can score a task.

    Raises:
        ConfigError: If the task has no class or number per text, or no train split with words and (if there is one
            class per text) two classes.
        MissingExtraError: If scikit-learn is not installed.
    """
    require_packages("evaluate", "sklearn", "sklearn")
    kind = task.kind
    if kind.per_token or kind.processor != "tokenizer" or not kind.has_classes:
        raise ConfigError(f"evaluate: tfidf is set for a task of kind {kind}; it is for one answer per text.")
    if "train" not in task.splits:
        hint = "Give tasks with one, or in place of tfidf=True a file to learn from"
        raise ConfigError(f"evaluate: tfidf is set, and task {task.name} has no train part. {hint}.")
    texts, labels = _labelled(task.split("train"))
    if (task.problem_type == "classification" and len(set(labels)) < 2) or not any(map(str.strip, texts)):
        got = f"the train part of task {task.name} has one class or no words"
        raise ConfigError(f"evaluate: tfidf is set, and {got}; it learns from words of at least two classes. Add rows.")


def tfidf_scores(task: Task, split: str) -> dict[str, float]:
    """Return metric -> score of logistic regression (for numbers: ridge regression) on TF-IDF of words and word pairs.

    Args:
        task: A task over texts or pairs of texts. The baseline is trained on its "train" split.
        split: The split that is scored. Rows without a label are skipped in both splits.

    `_check_tfidf` must have accepted the task.
    """
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression, Ridge
    from sklearn.multiclass import OneVsRestClassifier
    from sklearn.pipeline import make_pipeline

    (texts, labels), (held, truths) = (_labelled(task.split(part)) for part in ("train", split))
    logistic = LogisticRegression(max_iter=1000)
    several = task.problem_type == "multi_label"
    model = {"regression": Ridge(), "multi_label": OneVsRestClassifier(logistic)}.get(task.problem_type, logistic)
    targets = torch.tensor(labels).numpy() if several else labels
    learnt = make_pipeline(TfidfVectorizer(ngram_range=(1, 2), token_pattern=r"(?u)\w+|[^\w\s]"), model)
    learnt.fit(texts, targets)
    if task.problem_type == "classification":
        logits = torch.full((len(held), len(task.labels)), _NEVER)
        logits[:, torch.tensor(learnt.classes_)] = torch.from_numpy(learnt.predict_log_proba(held)).float()
    else:
        values = torch.from_numpy(learnt.predict(held)).float().reshape(len(held), -1)
        logits = values * 2 - 1 if several else values
    return class_scores(task.metrics, logits, torch.tensor(truths), task)


def _labelled(split: Split) -> tuple[list[str], Sequence[Label]]:
    rows = [(text, label) for text, label in zip(split.texts, split.labels, strict=True) if not is_missing(label)]
    return [text if isinstance(text, str) else " ".join(text) for text, _ in rows], [label for _, label in rows]


# Tasks from one labelled file, for readers that remember the columns on which they were trained


@dataclass(frozen=True)
class FileColumns:
    """The columns of a file that a user has named. A column that is None is the one on which a reader was trained.

    Attributes:
        text: Column of the text.
        text_pair: Column of the second text.
        labels: Reader name -> column of its label, or one column for all readers.
    """

    text: str | int | None = None
    text_pair: str | int | None = None
    labels: Mapping[str, str | int] | str | int | None = None

    def of(self, reader: str) -> dict[str, str | int]:
        """Return the columns that are set for a reader, as arguments of `Task.from_files`."""
        label = self.labels.get(reader) if isinstance(self.labels, Mapping) else self.labels
        columns = {"text": self.text, "text_pair": self.text_pair, "label": label}
        return {key: column for key, column in columns.items() if column is not None}


def tasks_of_file(
    bank_or_model: ReaderBank | PreTrainedModel,
    path: str | Path,
    split: str,
    columns: FileColumns,
    *,
    positive: Mapping[str, str | int] | str | int | None = None,
    train: str | Path | None = None,
    reader: str | None = None,
) -> dict[str, Task]:
    """Return reader name -> a task that scores the reader on all rows of a file.

    Args:
        bank_or_model: The bank, whose readers remember their columns, or a whole model.
        path: The file, in a form that `Task.from_files` reads.
        split: Name of the split that the rows become.
        columns: The columns that the user has named.
        positive: Reader name -> positive class. Or one class: for the readers with two labels, or for all if none has
            two. None: the classes with which the readers learnt.
        train: File of the train split, for scores that need one. None: there is none.
        reader: The only reader to score; for a whole model, the name of its task (None: "model"). If the reader
            remembers no columns, or the file lacks the text or label column that it learnt from, the default of
            `Task.from_files` is used. None: all readers of the bank.

    Raises:
        ConfigError: If the bank has no readers; if a reader does not remember its columns, `reader` is None and
            `columns` has no label for it; or if a reader with a class in `positive` does not have two labels.
        UnknownNameError: If a reader, or a class in `positive`, does not exist.
        DataError: If a file cannot be read, or has no such column; the message names the reader.
    """
    heads: dict[str, TaskLike | HeadConfig]
    infos: dict[str, Info]
    if isinstance(bank_or_model, ReaderBank):
        readers = bank_or_model.select(reader, "evaluate")
        heads = {name: module.config.head for name, module in readers.items()}
        infos = {name: module.info for name, module in readers.items()}
    else:
        heads, infos = {reader or WHOLE: task_of(bank_or_model, op="evaluate")}, {reader or WHOLE: {"columns": {}}}
    if reader is not None:
        infos[reader] = {**infos[reader], "columns": _columns_there(path, infos[reader].get("columns", {}))}
    if not heads:
        raise ConfigError("evaluate: the bank has no readers; there is nothing to score.")
    for given in (columns.labels if reader is None else None, positive):
        check_known("evaluate", given if isinstance(given, Mapping) else (), heads, "reader")
    files = {"validation": path} if train is None else {"train": train, "validation": path}
    has_binary = any(len(head.labels) == 2 for head in heads.values())  # one class for all is only for these readers
    tasks: dict[str, Task] = {}
    for name, head in heads.items():
        own = positive.get(name) if isinstance(positive, Mapping) else positive
        task = _task(name, head, infos[name], files, columns.of(name))
        if own is not None and (len(head.labels) == 2 or isinstance(positive, Mapping) or not has_binary):
            task = task.with_positive(own)
        kept = {"train": task.split("train")} if train is not None else {}
        tasks[name] = replace(task, splits={**kept, split: task.split("validation")})
    return tasks


def _columns_there(path: str | Path, learnt: Mapping[str, str | int]) -> dict[str, str | int]:
    """Return `learnt` (key -> column) without the keys "text" and "label" whose column is not found in a file.

    A column given by number counts as found, and so does "a.b" if the file has "a". If reading the file at `path`
    fails, no error is raised, and columns that did not occur before the failure count as not found.
    """
    names, wanted = set[str](), {name for key, name in learnt.items() if key in ("text", "label")}
    with suppress(DataError):  # `Task.from_files` reads more formats, or raises the error
        for chunk in read_chunks(path, rows=1000):  # in JSONL a column may begin late
            names |= chunk.columns.keys()
            if all(_is_there(name, names) for name in wanted):
                break
    return {key: name for key, name in learnt.items() if name not in wanted or _is_there(name, names)}


def _is_there(column: str | int, names: set[str]) -> bool:
    """Return whether a file with these `names` may have a column: True for a number, and for "a.b" if it has "a"."""
    return isinstance(column, int) or column in names or column.partition(".")[0] in names


def _task(
    name: str,
    head: TaskLike | HeadConfig,
    info: Info,
    files: Mapping[str, str | Path],
    chosen: Mapping[str, str | int],
) -> Task:
    """Return the task of one reader over files; see `tasks_of_file`, also for errors.

    `head` has the kind of task and the labels. `info`, the record of the reader's training, has its columns, its
    positive class, and what was done with empty cells. `files` is split name -> file; "validation" is required, and its
    file gives the task its name. `chosen` are columns that the user has named, "text", "text_pair" and "label". They
    replace those in `info`.
    """
    kind = kind_of(str(head.kind))
    if "columns" not in info and kind.has_classes and "label" not in chosen:
        got = f"reader '{name}' does not say which columns it learnt from"
        raise ConfigError(f"evaluate: {got}. Name them: labels={{'{name}': column}}, or --label {name}=COLUMN.")
    columns: JSONObject = {**info.get("columns", {}), **chosen}
    missing = EvaluateOnly.MASK_NULLS if info.get("missing_labels") is None else "mask"
    is_binary = len(head.labels) == 2 and kind.single_label(head.problem_type)
    sources: dict[str, Any] = dict(files)
    try:
        return Task.from_files(
            kind,
            labels=head.labels,
            problem_type=head.problem_type,
            missing_labels=missing if "mask" in kind.missing else None,
            positive=info.get("positive") if is_binary else None,
            name=Path(files["validation"]).stem,
            **sources,
            **columns,
        )
    except DataError as error:
        if error.column is None or error.row is not None:
            raise
        named = f"labels={{'{name}': column}}, text=column or text_pair=column"
        hint = f"Name the columns of reader '{name}': {named} (--label {name}=COLUMN, --text COLUMN, --pair COLUMN)"
        raise DataError(f"{error} {hint}.", path=error.path, column=error.column) from error
