"""Fine-tune a whole model, plain or edited, on one task."""

from __future__ import annotations

import heapq
import json
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lamina.bank import is_held
from lamina.errors import ConfigError, LaminaError
from lamina.store.edited import save
from lamina.store.models import load_processor, name_classes
from lamina.tasks.kinds import GENERATION, IMAGE, MASKED, SEQUENCE, SUMMARIZATION, TOKEN, TRANSLATION
from lamina.train.answers import asking
from lamina.train.fit import FitResult
from lamina.train.options import TuneOptions
from lamina.train.rates import parameter_groups
from lamina.train.rows import open_rows
from lamina.train.runs import begin, checkpoint_folder, own_randomness, put_back
from lamina.train.scoring import score_model
from lamina.train.tables import write_parquet
from lamina.utils import barrier, rank, write_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from transformers import PreTrainedModel, TrainingArguments

    from lamina.tasks.task import Task
    from lamina.train.rows import Rows
    from lamina.train.tuner import Tuner

logger = logging.getLogger(__name__)

HEADS: Mapping[str, str] = {
    SEQUENCE: "AutoModelForSequenceClassification",
    TOKEN: "AutoModelForTokenClassification",
    MASKED: "AutoModelForMaskedLM",
    SUMMARIZATION: "AutoModelForSeq2SeqLM",
    TRANSLATION: "AutoModelForSeq2SeqLM",
    IMAGE: "AutoModelForImageClassification",
}
"""Kind of task -> auto class of transformers whose models have the head for it."""

PROBLEMS = {
    "classification": "single_label_classification",
    "regression": "regression",
    "multi_label": "multi_label_classification",
}
_CLASSIFIED = (SEQUENCE, TOKEN, IMAGE)
_OP = "finetune"


def finetune(
    model: PreTrainedModel,
    task: Task,
    *,
    processor: Any = None,
    output: str | Path | None = None,
    **options: Any,
) -> FitResult:
    """Fine-tune a model with a head of its own, in place; it ends with the weights of its best epoch.

    What is frozen stays as it is (`freeze_`); inserted layers are trained with the rest. Started under `torchrun`,
    every process takes its share of each batch, and process 0 saves.

    Args:
        model: A transformers model with a head for the task, such as those of `AutoModelForSequenceClassification` with
            `num_labels=len(task.labels)`; plain or edited. A head without names for its classes gets the task's.
        task: A task with "train" and "validation" parts: classification or regression of texts and pairs, tags for
            words, hidden tokens, summaries, translations, or images.
        processor: Its tokenizer or image processor; None: the one that belongs to `model.name_or_path`.
        output: Folder for the model (as `lamina.save` writes it), `history.json`, `table.parquet` and checkpoints to
            resume from; None: nothing is written.
        **options: See `TuneOptions`: epochs, batch_size, learning_rate, layer_decay, patience, seed, resume ...

    Returns:
        Scores and their history; in it the task's name stands where `fit` has a reader's.

    Raises:
        UnknownNameError: If an option does not exist.
        ConfigError: If an option cannot be, the model does not fit the task, or a bank reads the model.
        LayerIndexError: If a learning rate names a layer that does not exist.
    """
    chosen = TuneOptions.of(options)
    if chosen.resume and output is None:
        raise ConfigError(f"{_OP}: resume is set but no output folder; checkpoints are kept in one. Give `output`.")
    _check_model(model, chosen)
    processor = processor if processor is not None else find_processor(model, _OP)
    train = open_rows(task, "train", model, processor, chosen)
    validation = open_rows(task, "validation", model, processor, chosen)
    test = open_rows(task, "test", model, processor, chosen) if chosen.test else None
    groups = parameter_groups(model, chosen)  # what cannot be is told before anything is touched
    fit_head(model, task, train)
    start = time.perf_counter()
    with own_randomness(), checkpoint_folder(output) as checkpoints:
        from lamina.train.tuner import Job, Tuner

        tuner = Tuner(
            model,
            Job(task, train, validation, processor, chosen, groups),
            _arguments(chosen, checkpoints, keep=output is not None),
        )
        newest = begin(checkpoints, resume=chosen.resume)
        if newest is None or not tuner.restore(newest):
            with put_back(model):
                tuner.train(resume_from_checkpoint=None if newest is None else str(newest))
    model.load_state_dict(tuner.best.weights)
    if not all(one.isfinite().all() for one in model.parameters()):
        logger.warning("%s: the weights are no longer numbers; the learning rate is too high, or a label is none", _OP)
    scores = {} if test is None else score_model(model, test, task, task.split("test"), processor, chosen)
    result = _result(tuner, train, scores, seconds=time.perf_counter() - start, output=output)
    if output is not None and rank() == 0:
        _write(model, processor, result, Path(output))
    barrier()
    return result


def _check_model(model: PreTrainedModel, options: TuneOptions) -> None:
    if is_held(model):
        raise ConfigError(
            f"{_OP}: a bank reads this model and keeps it as it is; fine-tuning changes it. "
            "Load the model a second time, or train it with the bank: ReaderBank(model, train_base=True)."
        )
    if options.precision == "float16" and not torch.cuda.is_available():
        raise ConfigError(
            f"{_OP}: precision is 'float16' and there is no GPU; only there it is faster and safe. Use 'bfloat16'."
        )
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype == torch.float16:
            raise ConfigError(
                f"{_OP}: '{name}' is in float16, in which steps are lost; what is trained is in float32 or bfloat16. "
                "Call model.float(), and set precision='float16' for mixed precision."
            )


def find_processor(model: PreTrainedModel, op: str) -> Any:
    """The tokenizer or image processor that belongs to a model.

    Raises:
        ConfigError: If none is where the model came from.
    """
    found = load_processor(model.name_or_path, model) if model.name_or_path else None
    if found is None:
        raise ConfigError(
            f"{op}: no processor was given, and none is where the model came from ('{model.name_or_path}'); it is "
            "needed to read the task. Give processor=..., a tokenizer or an image processor."
        )
    return found


def fit_head(model: PreTrainedModel, task: Task, rows: Rows, *, keep: bool = True) -> None:
    """See that a model's head fits a task, and give its classes their names.

    Args:
        model: The model.
        task: The task.
        rows: Some of its rows, two of which are tried.
        keep: Leave the names, and the kind of loss, in the model's config; else it is as before.

    Raises:
        ConfigError: If it does not; the model is then as it was.
    """
    config: Any = model.config
    before = {name: getattr(config, name, None) for name in ("id2label", "label2id", "problem_type")}
    try:
        if task.kind in _CLASSIFIED:
            _name_classes(config, task)
        if task.kind == SEQUENCE:
            config.problem_type = PROBLEMS[task.problem]
        _try(model, task, rows)
    except LaminaError:
        keep = False
        raise
    finally:
        if not keep:
            vars(config).update(before)


def _try(model: PreTrainedModel, task: Task, rows: Rows) -> None:
    """Run the model on its two shortest rows."""
    if task.kind in GENERATION and not (model.config.is_encoder_decoder and model.can_generate()):
        raise _no_head(model, task, "it reads and writes one text in one stack")
    lengths = rows.lengths
    shortest = heapq.nsmallest(2, range(len(lengths)), key=lengths.__getitem__)
    batch = {key: value.to(model.device) for key, value in rows.batch(shortest).items()}
    try:
        with asking(model):
            out: Any = model(**batch)
    except Exception as error:  # each model raises what it likes
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        if "pixel_values" in batch and model.main_input_name == "pixel_values":
            raise _no_fit(model, batch["pixel_values"], reason) from error
        raise _no_head(model, task, reason) from error
    if getattr(out, "loss", None) is None:
        raise _no_head(model, task, "it gives no loss")
    axes = 3 if task.kind == TOKEN else 2
    if task.kind in _CLASSIFIED and (out.logits.ndim != axes or out.logits.shape[-1] != len(task.labels)):
        raise _no_head(model, task, f"it gives logits of the shape {list(out.logits.shape)}")


def _no_fit(model: PreTrainedModel, pixels: Tensor, reason: str) -> ConfigError:
    height, width = pixels.shape[-2:]
    return ConfigError(
        f"{_OP}: {type(model).__name__} fails on images of {height} x {width} ({reason.rstrip('.')}); it needs a head "
        f"for classes, and images of its size. Load it with {HEADS[IMAGE]}, and set the processor's size."
    )


def _no_head(model: PreTrainedModel, task: Task, reason: str) -> ConfigError:
    return ConfigError(
        f"{_OP}: {type(model).__name__} has no head for task {task.name} of kind {task.kind} ({reason.rstrip('.')}); "
        f"such a model is needed. Load one with {HEADS[task.kind]}."
    )


def _name_classes(config: Any, task: Task) -> None:
    """Give the classes of a new head their names; a head that has names keeps them, and they must be the task's."""
    count = len(task.labels)
    if config.num_labels != count:
        raise ConfigError(
            f"{_OP}: the head has {config.num_labels} classes, task {task.name} has {count} "
            f"({', '.join(task.labels[:5])}{' ...' if count > 5 else ''}); both must be the same. "
            f"Load the model with {HEADS[task.kind]}.from_pretrained(..., num_labels={count})."
        )
    has = [str(config.id2label[number]) for number in range(count)]
    if has == [f"LABEL_{number}" for number in range(count)]:
        name_classes(config, task.labels)
    elif [one.lower() for one in has] != [one.lower() for one in task.labels]:
        raise ConfigError(
            f"{_OP}: the classes of the head are {', '.join(has[:5])}, those of task {task.name} "
            f"{', '.join(task.labels[:5])}; they must agree, in this order. Give the task labels=[...], or the model "
            "other names: model.config.id2label = dict(enumerate(task.labels))."
        )


def _arguments(options: TuneOptions, folder: Path, *, keep: bool) -> TrainingArguments:
    from transformers import TrainingArguments

    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=options.epochs,
        max_steps=-1 if options.max_steps is None else options.max_steps,
        per_device_train_batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        lr_scheduler_type="constant_with_warmup" if options.schedule == "constant" else options.schedule,
        warmup_steps=options.warmup if options.warmup_steps is None else options.warmup_steps,
        max_grad_norm=options.clip,
        seed=options.seed,
        bf16=options.precision == "bfloat16",
        fp16=options.precision == "float16",
        use_cpu=not torch.cuda.is_available(),
        eval_strategy="epoch",
        save_strategy="epoch" if keep else "no",
        save_total_limit=2,
        logging_strategy="no",
        remove_unused_columns=False,
        report_to=["tensorboard"] if options.tensorboard else "none",
        disable_tqdm=True,
    )
    arguments._n_gpu = min(arguments.n_gpu, 1)  # one process, one device; several processes each bring their own
    return arguments


def _result(
    tuner: Tuner, train: Rows, test: dict[str, float], *, seconds: float, output: str | Path | None
) -> FitResult:
    task, best, model = tuner.job.task, tuner.best, tuner.model
    result = FitResult(
        best={task.name: {"epoch": best.best_epoch, **best.scores}},
        history=tuner.history,
        importances=[],
        truncated={task.name: train.truncated},
        test={task.name: test} if test else {},
        steps=tuner.state.global_step,
        seconds=seconds,
        folder=None if output is None else Path(output),
    )
    parameters = list(model.parameters())  # pyright: ignore[reportOptionalMemberAccess]
    learnt = [one for group in tuner.job.groups for one in group["params"]]
    row = {
        "task": task.name,
        "metric": task.metric,
        "score": best.scores[task.metric],
        "best_epoch": best.best_epoch,
        "epochs_run": len(tuner.history),
        "stopped": best.stopped is not None,
        "parameters": sum(one.numel() for one in parameters),
        "trained": sum(one.numel() for one in learnt),
    }
    return replace(result, table=[row])


def _write(model: PreTrainedModel, processor: Any, result: FitResult, folder: Path) -> None:
    save(model, folder, processor)
    facts = {"best": result.best, "test": result.test, "history": result.history}
    write_text(folder / "history.json", json.dumps(facts, indent=1))
    write_parquet(result.table, folder / "table.parquet")
