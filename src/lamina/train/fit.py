"""Train readers on tasks, all of them in one pass of the model; or a whole model on one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from lamina.train.options import FitOptions
from lamina.train.run import train

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from transformers import PreTrainedModel

    from lamina.bank import ReaderBank
    from lamina.tasks.task import Task
    from lamina.train.results import FitResult


def fit(  # noqa: PLR0913
    bank_or_model: ReaderBank | PreTrainedModel,
    tasks: Mapping[str, Task] | Task,
    *,
    grid: Mapping[str, Mapping[str, Sequence[Any]]] | None = None,
    processor: Any = None,
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
    schedule: Literal["linear", "cosine", "plateau", "constant"] = "linear",
    warmup_ratio: float = 0.0,
    warmup_steps: int | None = None,
    plateau_factor: float = 0.5,
    plateau_patience: int = 5,
    min_learning_rate: float = 1e-6,
    max_grad_norm: float = 1.0,
    early_stopping_patience: int | None = None,
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
    cache: Literal["off", "auto", "on"] = "off",
    cache_dtype: Literal["float16", "float32"] = "float16",
    cache_dir: str | Path | None = None,
    num_workers: int = 0,
    importance_steps: int | None = None,
    save_steps: int | None = None,
    resume: bool = False,
    tensorboard: bool = False,
    progress: bool = True,
    **unknown: object,
) -> FitResult:
    """Train the readers of a bank, or a whole model; both end with the weights of their best epoch.

    Tasks over the same examples share every pass; others take turns. Each reader has its own gradient clipping,
    learning-rate schedule, early stop and choice of best epoch, so what it learns does not depend on its neighbours. A
    bank with `train_base` has one best epoch and one stop, by the mean of its readers' scores. A whole model is trained
    with the head it has; what is frozen stays as it is (`freeze_`). Under `torchrun`, every process takes its share of
    each step, and process 0 saves.

    Args:
        bank_or_model: The readers and their model (readers without a task are left alone); or a transformers model with
            a head for the task. A head without names for its classes gets the task's.
        tasks: Reader name -> task with "train" and "validation" parts; with `keep="last"`, where no score decides
            anything, one without "validation" is not scored. For a whole model its one task.
        grid: Reader name -> key -> values, such as `{"cola": {"fusion.alpha": [1, 8], "seed": [0, 1]}}`: in its place
            come "cola_0001" and so on, one reader per combination, all trained in the same passes. Keys are fields of
            the fusion and the head, "fusion" (whole methods), "seed", "learning_rate" and "epochs".
        processor: Tokenizer, image processor or feature extractor; None: the bank's, or the one that belongs to
            `model.name_or_path`. An image processor is set to the task's `image_size`, if it has one.
        output: Folder for the bank or model, `history.json`, `table.parquet`, `importances.parquet` and checkpoints to
            resume from; None: nothing is written.
        epochs: How often each reader (or the model) goes through its rows; a mapping has a number per reader.
        batch_size: Rows per pass: windows, blocks, images or clips.
        learning_rate: The highest learning rate, perhaps per reader; None: 1e-3 for readers, 2e-5 for a whole model.
        base_learning_rate: That of the model in a bank that trains it too, over all steps of the run.
        layer_decay: Of a model that is trained: the rate of every layer is that of the layer above it times this; the
            top block of a stack, and what is in no layer (pooler, head), have the full one.
        layer_rates: Layer selector -> learning rate, in place of the others; the last that names a layer holds. "head"
            names what is in no layer, "inserted" the inserted layers. Rate 0 leaves a layer as it is.
        optimizer: "adamw", "adam" (weight decay as a part of the gradient) or "sgd" (with `momentum`).
        momentum: See `optimizer`.
        adam_epsilon: Of AdamW and Adam.
        weight_decay: On matrices only: not on layer scores, biases and norms.
        schedule: "linear" (to 0 over the learner's own steps), "cosine" (to 0), "plateau" (times `plateau_factor` when
            its score has not risen for more than `plateau_patience` epochs) or "constant".
        warmup_ratio: Share of a learner's steps over which its learning rate rises from 0.
        warmup_steps: The same as a number of steps; in place of the share.
        plateau_factor: See `schedule`.
        plateau_patience: In epochs.
        min_learning_rate: The plateau schedule goes no lower.
        max_grad_norm: Largest gradient norm, of each learner by itself; 0: none.
        early_stopping_patience: Stop a learner whose score has not risen for so many epochs; None: never.
        keep: Which weights a learner ends with: those of its "best" or of its "last" epoch.
        max_steps: End after so many steps of each learner, whatever the epochs; None: not.
        gradient_accumulation_steps: So many batches make a step.
        seed: Decides the order of the rows, hidden tokens and crops, and a trained model's dropout. (A reader's own
            seed decides its start and dropout.)
        max_length: Tokens per window; None: what the model allows. Of sound the samples that are read of a clip, at the
            feature extractor's rate; None: 30 seconds.
        stride: Tokens two windows of a long text share; None: a quarter of the window.
        add_prefix_space: Put a space before every text where the tokenizer needs one to read the first word as any
            other (byte-level BPE, as RoBERTa's and BART's), which is what giving it words one by one amounts to.
        eval_batch_size: Rows per pass when scoring; None: twice `batch_size`.
        precision: "float32", "bfloat16" or "float16" (mixed).
        prefix: Stands before every text that is to be summarised or translated.
        max_target_length: Tokens of a text to write.
        num_beams: Of the search for it when scoring; 1 is greedy.
        length_penalty: Of a search with beams: above 0 favours longer texts.
        augment: Crop and flip training images at random.
        test: Score the kept weights on the "test" part.
        cache: Keep the hidden states of a frozen model on disk and read them in place of its passes: "on", "off", or
            "auto", where reading takes less time than computing and there is room.
        cache_dtype: "float16" or "float32", of the files.
        cache_dir: Where; None: `$LAMINA_CACHE`, else the user's folder for caches.
        num_workers: Processes that make batches ahead, such as decoding images; 0: none. The batches are the same.
        importance_steps: Take down the importances of layers every so many steps of a reader too, from its start on,
            and not only after epochs; None: not. Of fusions that weigh each token anew (`Gated`, `DWAtt`, `Routing`)
            they are those of the step's own rows.
        save_steps: Also save a checkpoint every so many steps, not only after epochs; None: not.
        resume: Go on from the newest checkpoint in the output folder, if there is one.
        tensorboard: Write TensorBoard events into the output folder.
        progress: Show a progress bar.
        **unknown: Refused, with the nearest option.

    Returns:
        Scores, their history, and the history of the importances.

    Raises:
        UnknownNameError: If an option, a reader or a key of a grid does not exist.
        ConfigError: If an option or a task does not fit, a bank reads the model, or kept states do not fit in memory.
        LayerIndexError: If a learning rate names a layer that does not exist.
        CacheError: If states are to be cached and cannot be.
        StoreError: If the output folder cannot be written or holds what something else saved, before any training.
    """
    options = FitOptions.of_call(locals(), "fit", layer_rates={} if layer_rates is None else layer_rates, **unknown)
    return train(bank_or_model, tasks, options, grid=grid, processor=processor, output=output)


def finetune(  # noqa: D417, PLR0913
    model: PreTrainedModel,
    task: Task,
    *,
    processor: Any = None,
    output: str | Path | None = None,
    epochs: int = 3,
    batch_size: int = 32,
    learning_rate: float | None = None,
    base_learning_rate: float = 2e-5,
    layer_decay: float = 1.0,
    layer_rates: Mapping[str | int, float] | None = None,
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw",
    momentum: float = 0.9,
    adam_epsilon: float = 1e-8,
    weight_decay: float = 0.0,
    schedule: Literal["linear", "cosine", "plateau", "constant"] = "linear",
    warmup_ratio: float = 0.0,
    warmup_steps: int | None = None,
    plateau_factor: float = 0.5,
    plateau_patience: int = 5,
    min_learning_rate: float = 1e-6,
    max_grad_norm: float = 1.0,
    early_stopping_patience: int | None = None,
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
    cache: Literal["off", "auto", "on"] = "off",
    cache_dtype: Literal["float16", "float32"] = "float16",
    cache_dir: str | Path | None = None,
    num_workers: int = 0,
    importance_steps: int | None = None,
    save_steps: int | None = None,
    resume: bool = False,
    tensorboard: bool = False,
    progress: bool = True,
    **unknown: object,
) -> FitResult:
    """Fine-tune a whole model with a head of its own, in place: `fit` for a model and its one task, with its options.

    Args:
        model: A transformers model with a head for the task; plain or edited.
        task: The task.
        processor: Its tokenizer or image processor; None: the one that belongs to `model.name_or_path`.
        output: Folder for the model (as `lamina.save` writes it) and its scores; None: nothing is written.

    Returns:
        Scores and their history; the task's name stands where `fit` has a reader's.

    Raises:
        LaminaError: As `fit`.
    """
    rates = {} if layer_rates is None else layer_rates
    options = FitOptions.of_call(locals(), "finetune", layer_rates=rates, **unknown)
    return train(model, task, options, op="finetune", processor=processor, output=output)
