"""Train the readers of a bank, all of them in one pass of the model, or a whole model on one task."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import TYPE_CHECKING, Literal, cast

from lamina.errors import ConfigError, begin_with, check_known
from lamina.layers.wrappers import checked_model
from lamina.tasks.base import PARTS
from lamina.tasks.recorded_rows import StatesOfSplits, splits_on_states
from lamina.train.groups import tasks_by_name, warn_of_texts, with_positive
from lamina.train.options import OF_BANKS, FitOptions
from lamina.train.training_run import train
from lamina.utils import check_type, rank

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel

    from lamina.bank import ReaderBank
    from lamina.layers.types import Processor
    from lamina.tasks.split import Split
    from lamina.tasks.task import Task
    from lamina.train.results import FitResult

logger = logging.getLogger(__name__)


@begin_with("fit")
def fit(  # noqa: PLR0913
    bank_or_model: ReaderBank | PreTrainedModel,
    tasks: Mapping[str, Task] | Task,
    *,
    states: StatesOfSplits | Mapping[str, StatesOfSplits] | None = None,
    grid: Mapping[str, Mapping[str, Sequence[object]]] | None = None,
    positive: Mapping[str, str] | str | None = None,
    processor: Processor | None = None,
    output: str | Path | None = None,
    epochs: int | Mapping[str, int] = 3,
    batch_size: int = 32,
    learning_rate: float | Mapping[str, float] | None = None,
    base_learning_rate: float = 2e-5,
    layer_decay: float = 1.0,
    layer_rates: Mapping[str | int, float] | None = None,
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw",
    momentum: float = 0.9,
    adam_epsilon: float = 1e-8,
    weight_decay: float = 0.0,
    weight_decay_on: Literal["matrices", "all"] | Sequence[str] = "matrices",
    schedule: Literal["linear", "cosine", "plateau", "constant"] = "linear",
    warmup_ratio: float = 0.0,
    warmup_steps: int | None = None,
    plateau_factor: float = 0.5,
    plateau_patience: int = 5,
    min_learning_rate: float = 1e-6,
    max_grad_norm: float = 1.0,
    early_stopping_patience: int | None = None,
    early_stopping_min_delta: float = 0.0,
    keep: Literal["best", "last"] = "best",
    max_steps: int | None = None,
    gradient_accumulation_steps: int = 1,
    seed: int = 0,
    max_length: int | None = None,
    stride: int | None = None,
    add_prefix_space: bool = False,
    eval_batch_size: int | None = None,
    precision: Literal["float32", "bfloat16", "float16"] = "float32",
    prefix: str = "",
    max_target_length: int = 128,
    num_beams: int = 1,
    length_penalty: float = 1.0,
    augment: bool = True,
    test: bool = False,
    cache: Literal["off", "auto", "on"] = "auto",
    cache_dtype: Literal["float16", "float32"] = "float16",
    cache_dir: str | Path | None = None,
    num_workers: int = 0,
    importance_steps: int | None = None,
    save_steps: int | None = None,
    resume: bool = False,
    tensorboard: bool = False,
    trackers: Sequence[str] = (),
    progress: bool = True,
    **unknown: object,
) -> FitResult:
    """Train the readers of a bank, or a whole model, in place; by default, the weights of the best epoch are kept.

    Tasks over the same examples share every pass; tasks over different examples take turns. Each reader has its own
    gradient clipping, learning-rate schedule, early stopping and best epoch, so what it learns does not depend on the
    other readers. In a bank with `train_base`, one best epoch and one stop hold for all; the readers' mean score
    decides them. The `info` of each trained reader is replaced, so its stored monitors are dropped. A whole model is
    trained with its own head; frozen parameters (`freeze_`) stay as they are. Under `torchrun`, every process computes
    its shard of each step, and process 0 saves. Warnings name blank, repeated and cut texts, readers that may have
    learnt little, and tasks whose "test" part was not scored.

    Args:
        bank_or_model: A bank; its readers without a task are not trained. Or a transformers model with a head for the
            task. A head whose classes have no names gets the names of the task's labels. Both are moved to the device
            of the run.
        tasks: Reader name -> task with "train" and "validation" parts, or for a whole model its task. With
            `keep="last"` and no other option that needs scores, a task without "validation" is not scored.
        states: Folder of recorded hidden states (see `lamina extract`), one row for each row of the tasks' source, so
            that the model is not run. Or a mapping: split -> folder, or reader name -> folder or such a mapping. Splits
            that were held out from "train" need no folder of their own, and `max_length` can only be that of the
            recording. None: the model computes them.
        grid: Reader name -> key -> values, such as `{"cola": {"fusion.alpha": [1, 8], "seed": [0, 1]}}`. Readers
            "cola_0001", "cola_0002" ... replace the reader "cola": one per combination, all trained in the same passes.
            Keys are fields of the fusion and the head, "fusion" (whole methods), "stack", "seed", "learning_rate" and
            "epochs".
        positive: The positive class, for "f1" and the recalls: reader name -> class, or one class for all readers.
            None: the task's positive class.
        processor: Tokenizer, image processor or feature extractor. None: the bank's, or the one that belongs to
            `model.name_or_path`. An image processor is set to the task's `image_size`, if it has one.
        output: Folder for the bank or model, `history.json`, `table.parquet`, for a bank `importances.parquet`, and the
            checkpoints of the run. None: nothing is written.
        epochs: Number of passes over the training rows; a mapping has a number for each reader.
        batch_size: Rows per pass, over all processes. A row is a window of tokens, a block of text, an image or an
            audio clip.
        learning_rate: Highest learning rate; a mapping has a rate for each reader. None: 1e-3 for readers, 2e-5 for a
            whole model.
        base_learning_rate: Highest learning rate of the base model when `train_base=True`; its schedule covers all
            steps of the run.
        layer_decay: In a trained model, the learning rate of a layer is that of the layer above it times this factor.
            The top block, and parameters outside the layers (pooler, head), have the full rate. 1: all layers have it.
        layer_rates: Layer selector -> learning rate, which replaces the rate from `layer_decay`; if several selectors
            name a layer, the last one counts. "head" means the parameters outside the layers, "inserted" the inserted
            layers. Rate 0 leaves a layer as it is. None: no layer has a rate of its own.
        optimizer: "adamw", "adam" (weight decay as a part of the gradient) or "sgd" (with `momentum`).
        momentum: Momentum of "sgd".
        adam_epsilon: Term that AdamW and Adam add to the denominator.
        weight_decay: Weight decay of the parameters that `weight_decay_on` names. 0: no decay.
        weight_decay_on: Parameters with weight decay: "matrices" (layer scores, biases and norms have none), "all", or
            patterns of parameter names; a pattern with "!" excludes: `["*", "!*.scores"]` is all but layer scores.
        schedule: How the learning rate changes: "linear" (to 0 over the learner's steps), "cosine" (to 0), "plateau"
            (multiplied by `plateau_factor` after more than `plateau_patience` epochs without a better score) or
            "constant".
        warmup_ratio: Fraction of a learner's steps over which its learning rate rises from 0. 0: no warm-up.
        warmup_steps: Number of warm-up steps, which replaces `warmup_ratio`. None: `warmup_ratio` decides.
        plateau_factor: Factor of the learning rate in the "plateau" schedule.
        plateau_patience: Epochs without a better score that the "plateau" schedule waits.
        min_learning_rate: Lowest learning rate of the "plateau" schedule.
        max_grad_norm: Gradients of each learner are clipped to this norm. 0: no clipping.
        early_stopping_patience: Stop a learner after this number of epochs without a better score. None: never.
        early_stopping_min_delta: Smallest improvement that counts as a better score for early stopping. The best epoch
            and the "plateau" schedule count every improvement.
        keep: Final weights of a learner: those of its "best" or of its "last" epoch.
        max_steps: Optimizer steps per learner, in place of `epochs`. None: `epochs` decides.
        gradient_accumulation_steps: Batches per optimizer step.
        seed: Seed of the order of the rows, of masked tokens and image crops, and of a trained model's dropout. (The
            weights and dropout of a reader follow the reader's own seed.)
        max_length: Tokens per window, or samples per audio clip at the rate of the feature extractor. None: what the
            model allows; 30 seconds of audio.
        stride: Tokens that two windows of a long text share, for tasks that label words. Other tasks read only one
            window of a text. None: a quarter of a window.
        add_prefix_space: Put a space before every text if the tokenizer needs one to read the first word as it reads
            any other word (byte-level BPE, such as RoBERTa's and BART's).
        eval_batch_size: Rows per pass when scoring. None: twice `batch_size`.
        precision: "float32", or "bfloat16" or "float16" (only on a GPU) for mixed precision.
        prefix: Text that is put before every text to summarise or translate. "": none.
        max_target_length: Maximum tokens of a target text, in training and when generating.
        num_beams: Number of beams when generating for evaluation. 1: greedy decoding.
        length_penalty: Exponent of the length in beam search; above 0 prefers longer texts.
        augment: Crop and flip training images at random.
        test: Score the final weights on the "test" part.
        cache: Whether to keep the hidden states of a frozen model, so that it reads each text once and not in every
            epoch. "auto": for two epochs or more, in memory if they take at most a quarter of the free memory, else on
            disk if there is room and reading is faster than computing. "on": on disk, where later runs find them.
            "off": they are not kept.
        cache_dtype: Dtype of states on disk: "float16" or "float32". In memory they are float32.
        cache_dir: Folder of states on disk. None: `$LAMINA_CACHE`, else the user's cache folder.
        num_workers: Number of processes that prepare batches, for example decode images. 0: this process prepares them.
            The batches are the same.
        importance_steps: Record a reader's layer importances at its start and after every `importance_steps` of its
            steps, in addition to each epoch's end. Fusions whose weights depend on the token (`Gated`, `DWAtt`,
            `Routing`) then report the importances on the rows of that step. None: after epochs only.
        save_steps: Save a checkpoint also after every `save_steps` steps. None: after epochs only.
        resume: Continue from the newest checkpoint in `output`, which must be set, if there is one. False: checkpoints
            of an earlier run in `output` are deleted.
        tensorboard: Write TensorBoard events into `output`, which must be set.
        trackers: Experiment trackers that get the scores after each epoch: "tensorboard", "mlflow", "trackio" or
            "wandb". Their packages must be installed, and are configured in their own way.
        progress: Show a progress bar on standard error.
        **unknown: Other keywords raise UnknownNameError, which suggests the nearest option.

    Returns:
        The scores, their history, and the history of the layer importances.

    Raises:
        UnknownNameError: If an option, a reader, a positive class, a key of a grid, or a needed split does not exist.
        ConfigError: If there is no task, an option or a task does not fit, a bank reads the whole model to be trained,
            the frozen model of a bank has changed, a batch of readers does not fit in memory, the checkpoint to resume
            from belongs to another run, or a tracker other than TensorBoard is not installed.
        LayerIndexError: If a learning rate names a layer that does not exist.
        UnsupportedModelError: If layers have learning rates of their own, and the layers of the model cannot be found.
        DataError: If an image, an audio clip or recorded states cannot be read; or if rows have no label, no other task
            shares them, and the task's `missing_labels` is None.
        BaseMismatchError: If states were recorded from a different model than the bank's.
        MissingExtraError: If TensorBoard, or a package that a metric needs, is not installed.
        CacheError: If `cache="on"` and the states cannot be stored.
        StoreError: If the output folder cannot be written, or holds files of another program (raised before training),
            the checkpoint to resume from is damaged, or a folder in `states` has no valid manifest.
        NotFiniteError: If a loss, gradient, weight or score becomes NaN or infinite. The weights, and the readers of
            grids, stay as they are then, as after any error during training.
    """
    options = FitOptions.checked(
        "fit",
        epochs=epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        base_learning_rate=base_learning_rate,
        layer_decay=layer_decay,
        layer_rates=layer_rates,
        optimizer=optimizer,
        momentum=momentum,
        adam_epsilon=adam_epsilon,
        weight_decay=weight_decay,
        weight_decay_on=weight_decay_on,
        schedule=schedule,
        warmup_ratio=warmup_ratio,
        warmup_steps=warmup_steps,
        plateau_factor=plateau_factor,
        plateau_patience=plateau_patience,
        min_learning_rate=min_learning_rate,
        max_grad_norm=max_grad_norm,
        early_stopping_patience=early_stopping_patience,
        early_stopping_min_delta=early_stopping_min_delta,
        keep=keep,
        max_steps=max_steps,
        gradient_accumulation_steps=gradient_accumulation_steps,
        seed=seed,
        max_length=max_length,
        stride=stride,
        add_prefix_space=add_prefix_space,
        eval_batch_size=eval_batch_size,
        precision=precision,
        prefix=prefix,
        max_target_length=max_target_length,
        num_beams=num_beams,
        length_penalty=length_penalty,
        augment=augment,
        test=test,
        cache=cache,
        cache_dtype=cache_dtype,
        cache_dir=cache_dir,
        num_workers=num_workers,
        importance_steps=importance_steps,
        save_steps=save_steps,
        resume=resume,
        tensorboard=tensorboard,
        trackers=trackers,
        progress=progress,
        **unknown,
    )
    by_name = with_positive("fit", tasks_by_name("fit", tasks), positive)
    warn_of_texts("fit", by_name.values())
    learnt = by_name if states is None else _on_states(by_name, states, test=test)
    result = train(bank_or_model, learnt, options, grid=grid, processor=processor, output=output)
    _mention_unused("fit", by_name, test=test)
    return result


def _on_states(
    tasks: Mapping[str, Task], states: StatesOfSplits | Mapping[str, StatesOfSplits], *, test: bool
) -> dict[str, Task]:
    """Return the tasks (reader name -> task) on recorded states in place of texts; `states` is the option of `fit`.

    Raises ConfigError if `states` names some readers and not all, or `test` is set and the test split has no states;
    UnknownNameError if it names a reader that is not trained; and the errors of `splits_on_states`.
    """
    by_reader = states if isinstance(states, Mapping) and any(name in tasks for name in {*states} - {*PARTS}) else None
    if by_reader is not None:
        check_known("fit: states", by_reader, tasks, "reader")
        if lacking := [name for name in tasks if name not in by_reader]:
            raise ConfigError(f"fit: there are no states of '{lacking[0]}'; give every reader a folder.")
    changed: dict[str, Task] = {}
    opened: dict[tuple[object, ...], dict[str, Split]] = {}
    for name, task in tasks.items():
        op = f"fit: states of '{name}'"
        own = cast("StatesOfSplits", states if by_reader is None else by_reader[name])
        label, parts = task.columns.get("label", "label"), [(part, id(split)) for part, split in task.splits.items()]
        key = (task.kind, label, *parts, repr(own))  # the readers of one task share its states
        if key not in opened:
            opened[key] = splits_on_states(op, task.kind, task.splits, own, label)
        splits = opened[key]
        if test and "test" in task.splits and "test" not in splits:
            raise ConfigError(f"{op}: test=True needs those of 'test'. Give {{'train': FOLDER, 'test': FOLDER}}.")
        changed[name] = replace(task, splits=splits)
    return changed


def _mention_unused(op: str, tasks: Mapping[str, Task], *, test: bool) -> None:
    """Log a warning if tasks have a test split that was not scored, because the option `test` was not set.

    `tasks` is learner name -> task. `op` begins the message. Only rank 0 logs.
    """
    if not test and not rank() and (names := [name for name, task in tasks.items() if "test" in task.splits]):
        hint = "Give test=True, or call lamina.evaluate with split='test'"
        logger.warning("%s: the test part of %s was not scored. %s.", op, ", ".join(map(repr, names)), hint)


@begin_with("finetune")
def finetune(
    model: PreTrainedModel,
    task: Task,
    *,
    positive: str | None = None,
    processor: Processor | None = None,
    output: str | Path | None = None,
    **options: object,
) -> FitResult:
    """Fine-tune a whole model with its own head, in place: `fit` for one model and its one task.

    Args:
        model: A transformers model with a head for the task, plain or edited. It must not be read by a bank.
        task: The task.
        positive: The positive class, for "f1" and the recalls. None: the task's positive class.
        processor: Tokenizer, image processor or feature extractor. None: the one that belongs to `model.name_or_path`.
        output: Folder for the model, as `lamina.save` writes it, its scores and checkpoints. None: nothing is written.
        **options: Options of `fit`, with its defaults, except those that only banks have: `states`, `grid`, `cache`,
            `cache_dtype`, `cache_dir`, `base_learning_rate` and `importance_steps`.

    Returns:
        The scores and their history, under the task's name.

    Raises:
        UnknownNameError: If an option does not exist; it suggests the nearest one.
        ConfigError: If an option or the task does not fit the model, or a bank reads the model.
        LayerIndexError: If a learning rate names a layer that does not exist.
        UnsupportedModelError: If layers have learning rates of their own, and the layers of the model cannot be found.
        StoreError: If the output folder cannot be written, or holds files of another program. Raised before training.
        NotFiniteError: If a loss, gradient, weight or score becomes NaN or infinite.
        LaminaError: The other errors of `fit`, except those about a bank.
    """
    known = [name for name in signature(fit).parameters if name in FitOptions.model_fields.keys() - {*OF_BANKS}]
    check_known("finetune", options, ["positive", "processor", "output", *known], "option", "help(lamina.finetune)")
    chosen = FitOptions.of(options, "finetune")
    model = checked_model(model, "finetune")
    task = check_type("finetune", "task", task, "Task")
    task = task if positive is None else task.with_positive(positive)
    warn_of_texts("finetune", [task])
    result = train(model, task, chosen, op="finetune", processor=processor, output=output)
    _mention_unused("finetune", {task.name: task}, test=chosen.test)
    return result
