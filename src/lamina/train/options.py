"""What a user may say about a training run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar

from lamina.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from pathlib import Path

T = TypeVar("T")
CHOICES: Mapping[str, tuple[str, ...]] = {
    "optimizer": ("adamw", "adam"),
    "schedule": ("linear", "plateau", "constant"),
    "precision": ("float32", "bfloat16", "float16"),
    "cache": ("off", "auto", "on"),
    "cache_dtype": ("float16", "float32"),
}
TUNE_CHOICES: Mapping[str, tuple[str, ...]] = {
    "optimizer": ("adamw", "adam", "sgd"),
    "schedule": ("linear", "cosine", "constant"),
    "precision": ("float32", "bfloat16", "float16"),
}

WHOLE = (
    *("epochs", "batch_size", "plateau_patience", "patience", "seed", "max_length", "stride", "eval_batch_size"),
    *("save_steps", "warmup_steps", "max_steps", "accumulate", "max_target_length", "beams"),
)
NUMBERS = (
    *("learning_rate", "base_learning_rate", "min_learning_rate", "weight_decay", "warmup", "plateau_factor", "clip"),
    *("layer_rates", "layer_decay", "momentum", "epsilon", "length_penalty"),
)
Check = tuple[str, bool, str]  # an option, whether it holds, and what must


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What `fit` and `finetune` have in common; see there."""

    batch_size: int = 32
    weight_decay: float = 0.0
    warmup: float = 0.0
    clip: float = 1.0
    patience: int | None = None
    seed: int = 0
    max_length: int | None = None
    stride: int | None = None
    eval_batch_size: int | None = None
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    save_steps: int | None = None
    resume: bool = False
    tensorboard: bool = False
    progress: bool = True

    op: ClassVar[str] = "fit"
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = CHOICES
    mappings: ClassVar[tuple[str, ...]] = ("epochs", "learning_rate")  # what may have several values

    def __post_init__(self) -> None:
        for name, known in self.choices.items():
            if getattr(self, name) not in known:
                raise UnknownNameError(op=self.op, got=getattr(self, name), known=known, what=name)
        self._check_types()
        for name, holds, rule in self._checks():
            if not holds:
                raise ConfigError(f"{self.op}: {name} is {getattr(self, name)}; it must be {rule}. Change it.")

    def _checks(self) -> list[Check]:
        return [
            ("batch_size", self.batch_size >= 1, "at least 1"),
            ("weight_decay", self.weight_decay >= 0, "0 or more"),
            ("warmup", 0 <= self.warmup < 1, "a share, from 0 up to but not 1"),
            ("clip", self.clip >= 0, "0 (none) or more"),
            ("patience", self.patience is None or self.patience >= 1, "at least 1, or None"),
            ("eval_batch_size", self.eval_batch_size is None or self.eval_batch_size >= 1, "at least 1, or None"),
            ("save_steps", self.save_steps is None or self.save_steps >= 1, "at least 1, or None"),
        ]

    def _check_types(self) -> None:
        """Raise ConfigError where a value is of another kind: in YAML `1e-3` is a text, and nothing is None."""
        for one in fields(self):
            name, value = one.name, getattr(self, one.name)
            if value is None and one.default is None:
                continue
            several = value if isinstance(value, Mapping) and name in self.mappings else None
            kind, what = _kind(name, one.default, many=several is not None)
            for each in [value] if several is None else several.values():
                if not isinstance(each, kind) or (isinstance(each, bool) and kind not in (bool, object)):
                    raise ConfigError(f"{self.op}: {name} is {each!r}; it must be {what}. Change it.")

    @classmethod
    def of(cls, given: Mapping[str, object]) -> Self:
        """Build from keywords.

        Raises:
            UnknownNameError: If a key does not exist.
        """
        known = [field.name for field in fields(cls)]
        for key in given:
            if key not in known:
                raise UnknownNameError(op=cls.op, got=key, known=known, what="option")
        return cls(**given)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, kw_only=True)
class FitOptions(TrainOptions):
    """How to train. Where a mapping is allowed, its keys are readers.

    Args:
        epochs: How often each reader goes through its texts.
        batch_size: Windows (texts, where they are not cut) per step.
        learning_rate: The highest learning rate.
        base_learning_rate: That of the model, in a bank that trains it too; over all steps of the run.
        optimizer: "adamw" or "adam" (weight decay as a part of the gradient).
        weight_decay: On matrices only: not on layer scores, biases and norms.
        schedule: "linear" (to 0 over the reader's own steps), "plateau" (times `plateau_factor` when its score has
            not risen for `plateau_patience` epochs) or "constant".
        warmup: Share of a reader's steps over which its learning rate rises from 0.
        plateau_factor: See `schedule`.
        plateau_patience: In epochs.
        min_learning_rate: The plateau schedule goes no lower.
        clip: Largest gradient norm, of each reader by itself; 0: none.
        patience: Stop a reader whose score has not risen for so many epochs; None: never.
        seed: Decides the order of the texts. (A reader's own seed decides its start and dropout.)
        max_length: Tokens per window; None: what the model allows.
        stride: Tokens two windows of a long text share; None: a quarter of the window.
        eval_batch_size: Windows per step when scoring; None: twice `batch_size`.
        precision: "float32", "bfloat16" or "float16" (mixed).
        cache: Keep the hidden states of a frozen model on disk and read them in place of its passes: "on", "off", or
            "auto", where reading takes less time than computing and there is room.
        cache_dtype: "float16" or "float32", of the files.
        cache_dir: Where; None: `$LAMINA_CACHE`, else the user's folder for caches.
        save_steps: Also save a checkpoint every so many steps, not only after epochs; None: not.
        resume: Go on from the newest checkpoint in the output folder, if there is one.
        tensorboard: Write TensorBoard events into the output folder.
        progress: Show a progress bar.
    """

    epochs: int | Mapping[str, int] = 3
    learning_rate: float | Mapping[str, float] = 1e-3
    base_learning_rate: float = 2e-5
    optimizer: Literal["adamw", "adam"] = "adamw"
    schedule: Literal["linear", "plateau", "constant"] = "linear"
    plateau_factor: float = 0.5
    plateau_patience: int = 5
    min_learning_rate: float = 1e-6
    cache: Literal["off", "auto", "on"] = "off"
    cache_dtype: Literal["float16", "float32"] = "float16"
    cache_dir: str | Path | None = None

    def _checks(self) -> list[Check]:
        rates = self.learning_rate.values() if isinstance(self.learning_rate, Mapping) else [self.learning_rate]
        rounds = self.epochs.values() if isinstance(self.epochs, Mapping) else [self.epochs]
        return [
            ("learning_rate", all(rate > 0 for rate in rates), "positive"),
            ("base_learning_rate", self.base_learning_rate > 0, "positive"),
            ("epochs", all(count >= 1 for count in rounds), "at least 1"),
            ("plateau_factor", 0 < self.plateau_factor < 1, "between 0 and 1"),
            ("plateau_patience", self.plateau_patience >= 0, "0 or more"),
            ("min_learning_rate", self.min_learning_rate >= 0, "0 or more"),
            *super()._checks(),
        ]


@dataclass(frozen=True, kw_only=True)
class TuneOptions(TrainOptions):
    """How to fine-tune a model.

    Args:
        epochs: How often the model goes through the rows.
        max_steps: End after so many steps, whatever the epochs; None: not.
        batch_size: Rows (windows, where long texts are cut into several) that a forward takes.
        accumulate: So many batches make a step.
        learning_rate: The highest learning rate.
        layer_decay: The rate of every layer is that of the layer above it times this; the top block of a stack, and
            what is in no layer (pooler, head), have the full one. 1: all the same.
        layer_rates: Layer selector -> learning rate, in place of the others; the last that names a layer holds. "head"
            names what is in no layer, "inserted" the inserted layers.
        optimizer: "adamw", "adam" (weight decay as a part of the gradient) or "sgd" (with `momentum`).
        momentum: See `optimizer`.
        epsilon: Of AdamW and Adam.
        weight_decay: On matrices only: not on biases and norms.
        schedule: "linear" (to 0), "cosine" (to 0) or "constant".
        warmup: Share of the steps over which the learning rate rises from 0.
        warmup_steps: The same as a number of steps; in place of the share.
        clip: Largest gradient norm; 0: none.
        patience: Stop when the score has not risen for so many epochs; None: never.
        seed: Decides the order of the rows, dropout, and how images are cropped.
        max_length: Tokens that are read of a text; None: what the model allows.
        stride: Tokens two windows of a long text share, in token tasks; None: a quarter of the window.
        eval_batch_size: Rows per forward when scoring; None: twice `batch_size`.
        precision: "float32", "bfloat16" or "float16" (mixed).
        prefix: Stands before every text, such as "summarize: " for T5.
        max_target_length: Tokens of a summary or translation, both to learn from and to write.
        beams: Of the beam search that writes them; 1 is greedy.
        length_penalty: Of the beam search: above 0 favours longer texts.
        augment: Crop and flip the training images at random.
        test: Score the best weights on the test part too.
        save_steps: Also save a checkpoint every so many steps, not only after epochs; None: not.
        resume: Go on from the newest checkpoint in the output folder, if there is one.
        tensorboard: Write TensorBoard events into the output folder.
        progress: Show a progress bar.
    """

    epochs: int = 3
    max_steps: int | None = None
    accumulate: int = 1
    learning_rate: float = 2e-5
    layer_decay: float = 1.0
    layer_rates: Mapping[str | int, float] = field(default_factory=dict)
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    momentum: float = 0.9
    epsilon: float = 1e-8
    schedule: Literal["linear", "cosine", "constant"] = "linear"
    warmup_steps: int | None = None
    prefix: str = ""
    max_target_length: int = 128
    beams: int = 1
    length_penalty: float = 1.0
    augment: bool = True
    test: bool = False

    op: ClassVar[str] = "finetune"
    choices: ClassVar[Mapping[str, tuple[str, ...]]] = TUNE_CHOICES
    mappings: ClassVar[tuple[str, ...]] = ("layer_rates",)

    def _checks(self) -> list[Check]:
        return [
            ("epochs", self.epochs >= 1, "at least 1"),
            ("max_steps", self.max_steps is None or self.max_steps >= 1, "at least 1, or None"),
            ("accumulate", self.accumulate >= 1, "at least 1"),
            ("learning_rate", self.learning_rate > 0, "positive"),
            ("layer_decay", 0 < self.layer_decay <= 1, "above 0, up to 1"),
            ("layer_rates", all(rate >= 0 for rate in self.layer_rates.values()), "0 or more, each"),
            ("momentum", 0 <= self.momentum < 1, "from 0 up to but not 1"),
            ("epsilon", self.epsilon > 0, "positive"),
            ("warmup_steps", self.warmup_steps is None or self.warmup_steps >= 0, "0 or more, or None"),
            ("max_target_length", self.max_target_length >= 1, "at least 1"),
            ("beams", self.beams >= 1, "at least 1"),
            *super()._checks(),
        ]


def _kind(name: str, default: object, *, many: bool) -> tuple[Any, str]:
    """Of which type a value, or each of several, must be; and that in words."""
    if name == "layer_rates" and not many:
        return Mapping, "a mapping of layers to rates"
    if name in WHOLE:
        return int, "a whole number"
    if name in NUMBERS:
        return int | float, "a number, such as 0.001"
    if isinstance(default, bool):
        return bool, "true or false"
    return (str, "a text") if name == "prefix" else (object, "")


def each(value: T | Mapping[str, T], names: list[str], option: str) -> dict[str, T]:
    """One value per reader, from one for all or a mapping.

    Raises:
        ConfigError: If the mapping lacks a reader.
        UnknownNameError: If it names one that is not trained.
    """
    if not isinstance(value, Mapping):
        return dict.fromkeys(names, value)
    for name in value:
        if name not in names:
            raise UnknownNameError(op=f"fit: {option}", got=name, known=names, what="reader")
    for name in names:
        if name not in value:
            raise ConfigError(f"fit: {option} has no value for reader '{name}'; it needs one for each. Add it.")
    return dict(value)
