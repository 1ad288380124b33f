"""Options of passes over examples and of training runs, with their defaults and checks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator

from lamina.errors import ConfigError, LaminaError, UnknownNameError, check_known
from lamina.tasks.base import EncodeOptions, Kind

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


T = TypeVar("T")

Count = Annotated[int, Field(ge=1)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]  # fits torch, NumPy and an integer column of a table
Share = Annotated[float, Field(ge=0, lt=1)]

_TYPES = {
    "int": "a whole number",
    "float": "a number, such as 0.001",
    "bool": "true or false",
    "string": "a text",
    "dict": "a mapping",
    "mapping": "a mapping",
    "finite": "a finite number",
    "sequence": "a list",
    "is_instance_of": "a list",
}
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("above", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("below", "lt"),
}


class PassOptions(BaseModel):
    """Options of every pass of a model over examples, as in `predict`, `evaluate` and `calibrate`.

    The docstring of `lamina.evaluate` explains each of them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    batch_size: Count = 32
    max_length: Count | None = None
    stride: Annotated[int, Field(ge=0)] | None = None
    add_prefix_space: bool = False
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    prefix: str = ""
    max_target_length: Count = 128
    num_beams: Count = 1
    length_penalty: float = 1.0
    num_workers: Annotated[int, Field(ge=0)] = 0
    progress: bool = False

    @classmethod
    def checked(cls, op: str, /, **options: object) -> Self:
        """Build the options from keywords, in which numbers may be those of NumPy or torch. `op` begins messages.

        Raises:
            UnknownNameError: If an option, or the choice for an option, does not exist.
            ConfigError: If a value has the wrong type or is out of range.
        """
        try:
            return cls.model_validate(options)
        except ValidationError as error:
            check_known(op, options, cls.model_fields, "option", "help(lamina.fit)")
            raise cls._first_error(error, options, op) from None

    @field_validator("*", mode="before")
    @classmethod
    def _plain(cls, value: Any) -> Any:  # noqa: ANN401
        """Return a NumPy or torch number as a Python number; in a mapping, all of them. Other values stay."""
        if isinstance(value, Mapping):
            return {key: cls._plain(item) for key, item in value.items()}
        return value.item() if getattr(value, "ndim", None) == 0 else value

    @classmethod
    def of(cls, given: Mapping[str, object], op: str = "fit") -> Self:
        """Build the options from a mapping, such as a recipe's. `op` begins messages; errors are those of `checked`."""
        return cls.checked(op, **given)

    @classmethod
    def _first_error(cls, error: ValidationError, given: Mapping[str, object], op: str) -> LaminaError:
        """Return pydantic's first problem as an UnknownNameError (for an unknown choice) or a ConfigError.

        `given` are the keywords that were checked, and `op` is the operation, for the message.
        """
        name = str(error.errors()[0]["loc"][0])
        value = cls._plain(given[name])
        known = [choice for choice in get_args(cls.model_fields[name].annotation) if isinstance(choice, str)]
        if known:
            return UnknownNameError(op=op, got=str(value), known=known, what=name)
        problems = [problem for problem in error.errors() if problem["loc"][0] == name]
        if isinstance(value, Mapping) and len(problems) > 1:
            problems = [problem for problem in problems if len(problem["loc"]) > 2] or problems
        rule = _rule(problems[0]) + (", or None" if cls.model_fields[name].default is None else "")
        return ConfigError(f"{op}: {name} is {value!r}; it must be {rule}.")

    def check_kinds(self, op: str, kinds: Collection[Kind]) -> None:
        """Raise ConfigError, about the operation `op`, if an option is set that has no effect; see `without_effect`.

        `prefix` (text in front of every source) must be allowed by all of `kinds`.
        """
        for kind in kinds:
            if self.prefix and not kind.takes_prefix:
                raise ConfigError(f"{op}: prefix is '{self.prefix}' for a task of kind {kind}, which takes no prefix.")
        for name, reason in self.without_effect(kinds):
            raise ConfigError(f"{op}: {name} is {getattr(self, name)!r} {reason}.")

    def without_effect(self, kinds: Collection[Kind]) -> Iterator[tuple[str, str]]:
        """Yield (name, reason) of options that are set but have no effect, given other options or the tasks' kinds.

        An option is set if its value is not the default. It is enough if one kind uses it. Without kinds, options are
        only compared with each other. The reason is the end of a sentence.
        """
        for name in filter(self._is_set, ("max_target_length", "num_beams")):
            if kinds and not any(kind.generates for kind in kinds):
                yield name, f"for a task of kind {next(iter(kinds))}, which has no use for it. Leave it out"
        for name, (other, values) in _ONLY_WITH.items():
            if self._is_set(name) and getattr(self, other) not in values:
                yield name, f"and only has an effect with {other}={' or '.join(map(str, values))}"
        for name, other in _ONLY_BESIDE.items():
            if self._is_set(name) and not self._is_set(other):
                yield name, f"and has no effect without {other}"

    def _is_set(self, name: str) -> bool:
        field = type(self).model_fields.get(name)
        return field is not None and getattr(self, name) != field.get_default(call_default_factory=True)

    def encode_options(self, part: str, max_length: int) -> EncodeOptions:
        """Return options for encoding the split `part` as inputs of at most `max_length` tokens or samples."""
        return EncodeOptions(
            part=part,
            max_length=max_length,
            stride=self.stride,
            prefix=self.prefix,
            max_target_length=self.max_target_length,
            add_prefix_space=self.add_prefix_space,
        )

    @property
    def scoring_batch_size(self) -> int:
        """Rows per pass without gradients: `batch_size` here; `FitOptions` overrides it."""
        return self.batch_size


# Option -> another option, and the values of it with which the first has an effect.
_ONLY_WITH: Mapping[str, tuple[str, tuple[object, ...]]] = {
    "momentum": ("optimizer", ("sgd",)),
    "adam_epsilon": ("optimizer", ("adamw", "adam")),
    **dict.fromkeys(("plateau_factor", "plateau_patience", "min_learning_rate"), ("schedule", ("plateau",))),
}
# Option -> another option that must be set too.
_ONLY_BESIDE = {
    "early_stopping_min_delta": "early_stopping_patience",
    "weight_decay_on": "weight_decay",
    "length_penalty": "num_beams",
}


Rates = Annotated[Mapping[str | int, NotNegative], BeforeValidator(lambda rates: {} if rates is None else rates)]


def _patterns(names: object) -> object:
    """Return a list of patterns as a tuple. A tuple of patterns, and a value of another type, comes back unchanged.

    Raises ValueError if a list or tuple is empty, or has an entry that is no string, or is "" or "!".
    """
    if not isinstance(names, list | tuple):
        return names
    if not names or not all(isinstance(name, str) and name.removeprefix("!") for name in names):
        raise ValueError('matrices, all, or a list of patterns of names, such as ["*", "!*.scores"]')
    return tuple(names)


class FitOptions(PassOptions):
    """Options of a training run, for readers or a whole model. The docstring of `lamina.fit` explains each of them."""

    epochs: Count | Mapping[str, Count] = 3
    learning_rate: Positive | Mapping[str, Positive] | None = None
    base_learning_rate: Positive = 2e-5
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    layer_rates: Rates = Field(default_factory=dict)
    optimizer: Literal["adamw", "adam", "sgd"] = "adamw"
    momentum: Share = 0.9
    adam_epsilon: Positive = 1e-8
    weight_decay: NotNegative = 0.0
    weight_decay_on: Annotated[Literal["matrices", "all"] | Sequence[str], BeforeValidator(_patterns)] = "matrices"
    schedule: Literal["linear", "cosine", "plateau", "constant"] = "linear"
    warmup_ratio: Share = 0.0
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    plateau_factor: Annotated[float, Field(gt=0, lt=1)] = 0.5
    plateau_patience: Annotated[int, Field(ge=0)] = 5
    min_learning_rate: NotNegative = 1e-6
    max_grad_norm: NotNegative = 1.0
    early_stopping_patience: Count | None = None
    early_stopping_min_delta: NotNegative = 0.0
    keep: Literal["best", "last"] = "best"
    max_steps: Count | None = None
    gradient_accumulation_steps: Count = 1
    seed: Seed = 0
    eval_batch_size: Count | None = None
    augment: bool = True
    test: bool = False
    cache: Literal["off", "auto", "on"] = "auto"
    cache_dtype: Literal["float16", "float32"] = "float16"
    cache_dir: str | Path | None = None
    importance_steps: Count | None = None
    save_steps: Count | None = None
    resume: bool = False
    tensorboard: bool = False
    trackers: Sequence[Literal["tensorboard", "mlflow", "trackio", "wandb"]] = ()
    progress: bool = True

    def check_use(self, op: str, kinds: Collection[Kind], *, bank: bool, train_base: bool = False) -> None:
        """Raise ConfigError if an option is set that has no effect in this run.

        Args:
            op: The operation, for messages.
            kinds: Kinds of the tasks that are trained.
            bank: Whether the readers of a bank are trained. False: a whole model is.
            train_base: Whether the bank's base model is trained too.
        """
        self.check_kinds(op, kinds)
        where, unused = "a whole model", OF_BANKS
        if bank:
            where, unused = "a bank whose base is frozen", () if train_base else _BASE_ONLY
        for name in filter(self._is_set, unused):
            raise ConfigError(f"{op}: {name} is {getattr(self, name)!r}; {where} has no use for it.")

    def without_effect(self, kinds: Collection[Kind]) -> Iterator[tuple[str, str]]:
        """Yield what `PassOptions.without_effect` yields, and `warmup_ratio` if it and `warmup_steps` are set."""
        yield from super().without_effect(kinds)
        if self._is_set("warmup_ratio") and self.warmup_steps is not None:
            yield "warmup_ratio", "and warmup_steps is set too; only one can be set. Leave one out"

    def encode_options(self, part: str, max_length: int) -> EncodeOptions:
        """Return options for encoding the split `part` as inputs of at most `max_length` tokens or samples.

        `seed` decides which tokens are masked and, with `augment`, how images are cropped.
        """
        options = super().encode_options(part, max_length)
        return replace(options, seed=self.seed, augment=self.augment)

    def all_trackers(self) -> list[str]:
        """Return the names of the trackers that receive the scores, each once; `tensorboard=True` adds TensorBoard."""
        return list(dict.fromkeys([*(["tensorboard"] if self.tensorboard else []), *self.trackers]))

    @property
    def moments(self) -> int:
        """Number of values (moments) that the optimizer stores for each number of a trained parameter."""
        return int(self.momentum > 0) if self.optimizer == "sgd" else 2

    @property
    def scoring_batch_size(self) -> int:
        """Rows per pass without gradients: `eval_batch_size`, or twice `batch_size`."""
        return self.eval_batch_size or 2 * self.batch_size

    @property
    def step_size(self) -> int:
        """Rows per optimizer step, summed over all processes and accumulated batches."""
        return self.batch_size * self.gradient_accumulation_steps


# options without effect on a whole model
OF_BANKS = ("cache", "cache_dtype", "cache_dir", "base_learning_rate", "importance_steps")
_BASE_ONLY = ("layer_decay", "layer_rates", "base_learning_rate")  # options of a base model that is trained


def per_reader(value: T | Mapping[str, T], names: list[str], option: str) -> dict[str, T]:
    """Return reader name -> value of an option. `value` is one value for all readers, or a mapping with one for each.

    `names` are all readers, and `option` is the option's name, for messages.

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


def _rule(problem: ErrorDetails) -> str:
    """Return the rule that a value broke, such as "at least 1", from a problem that pydantic reports."""
    if problem["type"] in _BOUNDS:
        word, key = _BOUNDS[problem["type"]]
        bound = problem.get("ctx", {})[key]
        return f"{word} {bound}" if isinstance(bound, int) else f"{word} {bound:g}"
    return next(
        (words for start, words in _TYPES.items() if problem["type"].startswith(start)),
        problem["msg"].removeprefix("Input should be ").removeprefix("Value error, "),
    )
