"""What a user may say about a training run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, TypeVar

from lamina.errors import ConfigError, UnknownNameError

if TYPE_CHECKING:
    from pathlib import Path

T = TypeVar("T")
CHOICES = {
    "optimizer": ("adamw", "adam"),
    "schedule": ("linear", "plateau", "constant"),
    "precision": ("float32", "bfloat16", "float16"),
    "cache": ("off", "auto", "on"),
    "cache_dtype": ("float16", "float32"),
}

WHOLE = (
    *("epochs", "batch_size", "plateau_patience", "patience", "seed"),
    *("max_length", "stride", "eval_batch_size", "save_steps"),
)
NUMBERS = (
    *("learning_rate", "base_learning_rate", "min_learning_rate"),
    *("weight_decay", "warmup", "plateau_factor", "clip"),
)


@dataclass(frozen=True, kw_only=True)
class FitOptions:
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
    batch_size: int = 32
    learning_rate: float | Mapping[str, float] = 1e-3
    base_learning_rate: float = 2e-5
    optimizer: Literal["adamw", "adam"] = "adamw"
    weight_decay: float = 0.0
    schedule: Literal["linear", "plateau", "constant"] = "linear"
    warmup: float = 0.0
    plateau_factor: float = 0.5
    plateau_patience: int = 5
    min_learning_rate: float = 1e-6
    clip: float = 1.0
    patience: int | None = None
    seed: int = 0
    max_length: int | None = None
    stride: int | None = None
    eval_batch_size: int | None = None
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    cache: Literal["off", "auto", "on"] = "off"
    cache_dtype: Literal["float16", "float32"] = "float16"
    cache_dir: str | Path | None = None
    save_steps: int | None = None
    resume: bool = False
    tensorboard: bool = False
    progress: bool = True

    def __post_init__(self) -> None:
        for name, known in CHOICES.items():
            if getattr(self, name) not in known:
                raise UnknownNameError(op="fit", got=getattr(self, name), known=known, what=name)
        self._check_numbers()
        rates = self.learning_rate.values() if isinstance(self.learning_rate, Mapping) else [self.learning_rate]
        rounds = self.epochs.values() if isinstance(self.epochs, Mapping) else [self.epochs]
        checks = [
            ("learning_rate", all(rate > 0 for rate in rates), "positive"),
            ("base_learning_rate", self.base_learning_rate > 0, "positive"),
            ("epochs", all(count >= 1 for count in rounds), "at least 1"),
            ("weight_decay", self.weight_decay >= 0, "0 or more"),
            ("warmup", 0 <= self.warmup < 1, "a share, from 0 up to but not 1"),
            ("plateau_factor", 0 < self.plateau_factor < 1, "between 0 and 1"),
            ("plateau_patience", self.plateau_patience >= 0, "0 or more"),
            ("clip", self.clip >= 0, "0 (none) or more"),
            ("patience", self.patience is None or self.patience >= 1, "at least 1, or None"),
            ("min_learning_rate", self.min_learning_rate >= 0, "0 or more"),
            ("eval_batch_size", self.eval_batch_size is None or self.eval_batch_size >= 1, "at least 1, or None"),
            ("save_steps", self.save_steps is None or self.save_steps >= 1, "at least 1, or None"),
        ]
        for name, holds, rule in checks:
            if not holds:
                raise ConfigError(f"fit: {name} is {getattr(self, name)}; it must be {rule}. Change it.")

    def _check_numbers(self) -> None:
        """Raise ConfigError where a number is none, as `1e-3` in YAML is a text."""
        for names, kind, what in ((WHOLE, int, "a whole number"), (NUMBERS, int | float, "a number, such as 0.001")):
            for name in names:
                value = getattr(self, name)
                for one in value.values() if isinstance(value, Mapping) else [value]:
                    if one is not None and (isinstance(one, bool) or not isinstance(one, kind)):
                        raise ConfigError(f"fit: {name} is {one!r}; it must be {what}. Change it.")

    @classmethod
    def of(cls, given: Mapping[str, object]) -> FitOptions:
        """Build from keywords.

        Raises:
            UnknownNameError: If a key does not exist.
        """
        known = [field.name for field in fields(cls)]
        for key in given:
            if key not in known:
                raise UnknownNameError(op="fit", got=key, known=known, what="option")
        return cls(**given)  # pyright: ignore[reportArgumentType]


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
