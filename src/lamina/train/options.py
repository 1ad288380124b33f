"""Options of training runs, with their defaults and checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from pydantic import Field

from lamina.errors import ConfigError, check_known
from lamina.tasks.base import EncodeOptions
from lamina.train.base import Count, PassOptions

if TYPE_CHECKING:
    from lamina.tasks.kind import Kind

T = TypeVar("T")

NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]  # fits torch, NumPy and an integer column of a table
Share = Annotated[float, Field(ge=0, lt=1)]


class FitOptions(PassOptions):
    """Options of a training run, for readers or a whole model; the docstring of `lamina.fit` explains each."""

    epochs: Count | Mapping[str, Count] = 3
    learning_rate: Positive | Mapping[str, Positive] | None = None
    base_learning_rate: Positive = 2e-5
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    layer_rates: Mapping[str | int, NotNegative] = Field(default_factory=dict)
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    momentum: Share = 0.9
    adam_epsilon: Positive = 1e-8
    weight_decay: NotNegative = 0.0
    schedule: Literal["linear", "cosine", "plateau", "constant"] = "linear"
    warmup_ratio: Share = 0.0
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    plateau_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    plateau_patience: Annotated[int, Field(ge=0)] = 5
    min_learning_rate: NotNegative = 1e-6
    max_grad_norm: NotNegative = 1.0
    early_stopping_patience: Count | None = None
    keep: Literal["best", "last"] = "best"
    max_steps: Count | None = None
    gradient_accumulation_steps: Count = 1
    seed: Seed = 0
    eval_batch_size: Count | None = None
    augment: bool = True
    test: bool = False
    cache: Literal["off", "auto", "on"] = "off"
    cache_dtype: Literal["float16", "float32"] = "float16"
    cache_dir: str | Path | None = None
    importance_steps: Count | None = None
    save_steps: Count | None = None
    resume: bool = False
    tensorboard: bool = False
    progress: bool = True

    def check_use(self, op: str, kinds: Iterable[Kind], *, bank: bool, train_base: bool = False) -> None:
        """Raise ConfigError if an option is set that has no effect in this run.

        Args:
            op: The operation, which errors name.
            kinds: Kinds of the tasks that are trained.
            bank: Whether the readers of a bank are trained, and not a whole model.
            train_base: Whether the bank's base model is trained too.
        """
        self.check_kinds(op, kinds)
        where, unused = "a whole model", _OF_BANKS
        if bank:
            where, unused = "a bank whose base is frozen", () if train_base else _BASE_ONLY
        for name in unused:
            value = getattr(self, name)
            if value != type(self).model_fields[name].get_default(call_default_factory=True):
                raise ConfigError(f"{op}: {name} is {value!r}; {where} has no use for it.")

    def encode_options(self, part: str, max_length: int) -> EncodeOptions:
        """Return how to encode one part for training or scoring; `seed` decides masked tokens and image crops."""
        options = super().encode_options(part, max_length)
        return replace(options, seed=self.seed, augment=self.augment)

    @property
    def moments(self) -> int:
        """How many numbers the optimizer stores for each parameter that is trained."""
        return int(self.momentum > 0) if self.optimizer == "sgd" else 2

    @property
    def scoring_batch_size(self) -> int:
        """Rows per pass without gradients: `eval_batch_size`, or twice `batch_size`."""
        return self.eval_batch_size or 2 * self.batch_size

    @property
    def step_size(self) -> int:
        """Rows per optimizer step, over all processes and accumulated batches."""
        return self.batch_size * self.gradient_accumulation_steps


_OF_BANKS = ("cache", "base_learning_rate", "importance_steps")  # options without effect on a whole model
_BASE_ONLY = ("layer_decay", "layer_rates", "base_learning_rate")  # options of a base model that is trained


def per_reader(value: T | Mapping[str, T], names: list[str], option: str) -> dict[str, T]:
    """Return reader name -> value of an option, from one value for all readers or a mapping with one for each.

    Raises:
        UnknownNameError: If the mapping names a reader that is not among `names`.
        ConfigError: If the mapping has no value for one of `names`.
    """
    if not isinstance(value, Mapping):
        return dict.fromkeys(names, value)
    check_known(f"fit: {option}", value, names, "reader")
    for name in names:
        if name not in value:
            raise ConfigError(f"fit: {option} has no value for reader '{name}'; it needs one for each.")
    return dict(value)
