"""What a user may say about a training run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lamina.errors import ConfigError, UnknownNameError, check_known
from lamina.tasks import kind_of

T = TypeVar("T")

Count = Annotated[int, Field(ge=1)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]  # what torch, NumPy and a column of a table can all hold
Share = Annotated[float, Field(ge=0, lt=1)]

_TYPES = {
    "int": "a whole number",
    "float": "a number, such as 0.001",
    "bool": "true or false",
    "string": "a text",
    "dict": "a mapping",
    "mapping": "a mapping",
    "finite": "a finite number",
}
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("above", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("below", "lt"),
}


class FitOptions(BaseModel):
    """How to train readers or a whole model; `lamina.fit` says what each option means."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    epochs: Count | Mapping[str, Count] = 3
    batch_size: Count = 32
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
    max_length: Count | None = None
    stride: Annotated[int, Field(ge=0)] | None = None
    add_prefix_space: bool = False
    eval_batch_size: Count | None = None
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    prefix: str = ""
    max_target_length: Count = 128
    num_beams: Count = 1
    length_penalty: float = 1.0
    augment: bool = True
    test: bool = False
    cache: Literal["off", "auto", "on"] = "off"
    cache_dtype: Literal["float16", "float32"] = "float16"
    cache_dir: str | Path | None = None
    num_workers: Annotated[int, Field(ge=0)] = 0
    importance_steps: Count | None = None
    save_steps: Count | None = None
    resume: bool = False
    tensorboard: bool = False
    progress: bool = True

    @classmethod
    def of(cls, given: Mapping[str, Any], op: str = "fit") -> Self:
        """Build from keywords; UnknownNameError or ConfigError where an option or a value does not exist or fit."""
        check_known(op, given, cls.model_fields, "option")
        try:
            return cls(**given)
        except ValidationError as error:
            raise cls._first_error(error, given, op) from None

    @classmethod
    def of_call(cls, arguments: Mapping[str, Any], op: str, /, **changes: Any) -> Self:
        """Build from the options among the arguments of a call, and from `changes`."""
        return cls.of({key: value for key, value in arguments.items() if key in cls.model_fields} | changes, op)

    @classmethod
    def _first_error(cls, error: ValidationError, given: Mapping[str, Any], op: str) -> ConfigError | UnknownNameError:
        """The first thing that pydantic found, as an error of ours."""
        name = str(error.errors()[0]["loc"][0])
        value = given[name]
        known = [choice for choice in get_args(cls.model_fields[name].annotation) if isinstance(choice, str)]
        if known:
            return UnknownNameError(op=op, got=value, known=known, what=name)
        problems = [problem for problem in error.errors() if problem["loc"][0] == name]
        if isinstance(value, Mapping) and len(problems) > 1:
            problems = [problem for problem in problems if len(problem["loc"]) > 2] or problems
        rule = _rule(problems[0]) + (", or None" if cls.model_fields[name].default is None else "")
        return ConfigError(f"{op}: {name} is {value!r}; it must be {rule}.")

    def check_use(self, op: str, kinds: Iterable[str], *, bank: bool, train_base: bool = False) -> None:
        """Raise ConfigError if an option was given that has no effect on tasks of these kinds, a bank or a model."""
        for kind in kinds:
            if self.prefix and not kind_of(kind).takes_prefix:
                raise ConfigError(f"{op}: prefix is '{self.prefix}' for a task of kind {kind}, which has none.")
        where, unused = "a whole model", ("cache", "base_learning_rate", "importance_steps")
        if bank:
            where, unused = "a bank whose base is frozen", _OF_BASES * (not train_base)
        for name in unused:
            value = getattr(self, name)
            if value != type(self).model_fields[name].get_default(call_default_factory=True):
                raise ConfigError(f"{op}: {name} is {value!r}; {where} has no use for it.")

    @property
    def moments(self) -> int:
        """How many numbers the optimizer keeps for each that is trained."""
        return int(self.momentum > 0) if self.optimizer == "sgd" else 2

    @property
    def scoring_batch_size(self) -> int:
        """Rows per pass when scoring."""
        return self.eval_batch_size or 2 * self.batch_size

    @property
    def step_size(self) -> int:
        """Rows per step."""
        return self.batch_size * self.gradient_accumulation_steps


_OF_BASES = ("layer_decay", "layer_rates", "base_learning_rate")  # options of a model that is trained


def _rule(problem: Any) -> str:
    """What must hold, in words."""
    if problem["type"] in _BOUNDS:
        word, key = _BOUNDS[problem["type"]]
        bound = problem["ctx"][key]
        return f"{word} {bound}" if isinstance(bound, int) else f"{word} {bound:g}"
    return next((words for start, words in _TYPES.items() if problem["type"].startswith(start)), problem["msg"])


def each(value: T | Mapping[str, T], names: list[str], option: str) -> dict[str, T]:
    """One value per reader, from one for all or a mapping, which must name exactly the readers that are trained."""
    if not isinstance(value, Mapping):
        return dict.fromkeys(names, value)
    check_known(f"fit: {option}", value, names, "reader")
    for name in names:
        if name not in value:
            raise ConfigError(f"fit: {option} has no value for reader '{name}'; it needs one for each.")
    return dict(value)
