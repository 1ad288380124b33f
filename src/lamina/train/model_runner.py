"""Train and score a whole model with its own head."""

from __future__ import annotations

import heapq
import inspect
import logging
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from torch import nn

from lamina.bank import is_read_by_bank
from lamina.data.windows import IGNORED
from lamina.errors import ConfigError, first_line
from lamina.layers.adapters import without_wrapper
from lamina.layers.preserve import eval_mode
from lamina.layers.types import ids_problem, tokenizer_of
from lamina.store.models import load_processor
from lamina.store.save_model import check_reloads
from lamina.tasks import KINDS, kind_of
from lamina.tasks.base import GenerationOptions, Kind, KindedTask, TaskOutline, as_output
from lamina.tasks.labels import are_unnamed
from lamina.tasks.position_interpolation import size_problem
from lamina.tasks.targets import label_array
from lamina.train.base import Runner
from lamina.train.checkpoint import starting_weights
from lamina.train.learner import Learner, parameter_groups, start_output

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor
    from transformers import PreTrainedConfig, PreTrainedModel

    from lamina.bank.stack_pass import States
    from lamina.layers.types import Batch, Processor
    from lamina.tasks.task import Task
    from lamina.train.options import FitOptions, PassOptions
    from lamina.train.plan import Group, Plan
    from lamina.utils import JSON

logger = logging.getLogger(__name__)

_PROCESSOR = "_lamina_processor"  # attribute of a model object: its processor, if a task changed the image size
LEARNT = "lamina_learnt"  # entry of a model's config: what `Kind.learnt` returned when the model was fine-tuned
_NO_PADDING = "no padding token is defined"  # in the error of transformers' classifiers that read a text's last token
_ALL_COUNT = ("regression", "multi_label")  # problem types for which the losses of transformers ignore no label
_IMAGE_SIZE = "Leave image_size out, or set the processor to the model's size."


class UnfitHeadError(ConfigError):
    """Raised when a model has no head for a task, or its head does not fit the task."""


class ModelRunner(Runner):
    """Runs batches through a whole model with its own head, for one task.

    Args:
        model: The model, with a head for the task.
        task: The task. For predictions, it may be a `TaskOutline`, a task without examples.
        op: The public operation, such as "predict". Messages begin with it; for "predict" the head is checked.
        processor: Tokenizer, image processor or feature extractor. None: the one that an earlier run left on the model
            object, or the one that belongs to `model.name_or_path`.
        options: Options of the passes. Only the options for generating texts are read here.

    Raises:
        ConfigError: If there is no processor, or for "predict" if the head does not fit the task.
        StoreError: If the files of the processor cannot be read.
    """

    def __init__(
        self, model: PreTrainedModel, task: KindedTask, op: str, processor: Processor | None, options: PassOptions
    ) -> None:
        self.model = self.base = model
        self.modules, self.uses_global_rng, self.op, self.task = (model,), True, op, task
        self.kind: Kind = task.kind
        if processor is None:
            processor = vars(model).get(_PROCESSOR)
        if processor is None and model.name_or_path:
            processor = load_processor(model.name_or_path, model)
        if processor is None:
            raise ConfigError(
                f"{op}: no processor was given, and there is none where the model came from "
                f"('{model.name_or_path}'). Give processor=..., a tokenizer, an image processor or a feature extractor."
            )
        self.processor = processor
        if op == "predict" and (reason := self.kind.model_problem(model)):
            raise self._no_head(reason)
        names = {field.name for field in fields(GenerationOptions)}
        self.generation = GenerationOptions(**options.model_dump(include=names))

    def info(self, name: str) -> dict[str, JSON]:  # noqa: ARG002
        """Return the dict of facts that is saved in the model's config. Without any: a new {}, which is not saved."""
        return vars(self.model.config).get(LEARNT) or {}

    def set_learnt(self, name: str, facts: Mapping[str, JSON]) -> None:  # noqa: ARG002
        """Write the facts that `Kind.learnt` returned into the model's config, and remove those of an earlier run."""
        if facts:
            setattr(self.model.config, LEARNT, dict(facts))
        else:
            vars(self.model.config).pop(LEARNT, None)

    def title(self, name: str) -> str:  # noqa: ARG002
        """Return "the model", because there is only one learner."""
        return "the model"

    def settings(self, name: str) -> dict[str, JSON]:  # noqa: ARG002
        """Return {}: besides its task, a whole model has no settings."""
        return {}

    def starting_weights(self, trained: Sequence[Tensor]) -> str:
        """Return a fingerprint of the model's weights. Weights that start at random, such as a new head, are left out.

        The argument is that of `Runner.starting_weights`.
        """
        return starting_weights(self.model, trained)

    def prepare(self, groups: Sequence[Group], options: FitOptions, passes: int) -> None:  # noqa: ARG002
        """Check that the model can be trained on the task, and give a new head's classes the names of its labels.

        Two rows of the first group are run through the model as a test. The task's problem type stays in the config
        too. An image processor is set to the image size of the task, and stays on the model object for later
        predictions. The arguments are those of `Runner.prepare`; `passes` is not used.

        Raises:
            ConfigError: If a bank reads the model, everything is frozen, a trained parameter is in float16, the options
                do not fit the model, the head does not fit the task, the model could not be loaded again after it is
                saved, or the processor cannot make images of the task's size.
            LayerIndexError: If the options give a rate to a layer that does not exist.
            UnsupportedModelError: If layers have rates of their own, and the model's layers cannot be found.
        """
        if is_read_by_bank(self.model):
            raise ConfigError(
                f"{self.op}: a bank reads this model and keeps it as it is; fine-tuning changes it. "
                "Load the model a second time, or train it with the bank: ReaderBank(model, train_base=True)."
            )
        parameter_groups(self.model, options, 1.0, self.op)
        self.fit_head(groups[0])
        if self.kind.fit_processor(self.processor, self.task):
            vars(self.model)[_PROCESSOR] = self.processor

    def _fit_padding(self) -> None:
        """Write the tokenizer's padding token into the model's config if that names none.

        A classifier such as Llama's reads the last token of a text, and finds it by this entry. For other kinds of task
        nothing is written.
        """
        token = getattr(tokenizer_of(self.processor), "pad_token_id", None)
        if token is not None and self.kind.has_classes and not self.kind.per_token:
            config = self.model.config.get_text_config()
            if getattr(config, "pad_token_id", None) is None:
                config.pad_token_id = token

    def fit_head(self, group: Group, *, keep: bool = True) -> None:
        """Check that the model's head fits the task, by running it on the two shortest rows of `group`.

        The tokenizer's padding token stays in the model's config if that names none. After an error, the config is as
        before.

        Args:
            group: Encoded examples with labels.
            keep: Whether the task's class names and problem type stay in the model's config too. True: the model
                must also be one that can be loaded again after it is saved. False: a warning says which label each
                class of a head without class names is taken as.

        Raises:
            ConfigError: If the head does not fit, or the saved model could not be loaded again.
        """
        config = self.model.config
        with _restored_after_error(config, config.get_text_config()):
            self._fit_padding()
            before = dict(vars(config))
            if reason := self.kind.model_problem(self.model):
                raise self._no_head(reason)
            try:
                self.kind.configure(config, self.task)
            except ConfigError as error:
                accepted = inspect.signature(self.model.forward).parameters
                if self.model.base_model is not self.model or "labels" in accepted:
                    raise ConfigError(f"{self.op}: {error}") from error
                raise self._no_head("it takes no labels") from error  # only its config has classes
            self._try(group)
            if keep:
                check_reloads(self.model, self.op)
        if not keep:
            self._warn_of_order(list((before.get("id2label") or {}).values()))
            _reset(config, before)

    def _warn_of_order(self, names: Sequence[str]) -> None:
        """Log which label each class of the head is taken as, if the head's class `names` are LABEL_0, LABEL_1, ...

        Nothing is logged if the task's labels are these names or 0, 1, ...; if there is a single label; or if there are
        more labels than classes, or fewer, because a kind of task may use its labels otherwise.
        """
        labels = list(self.task.labels)
        count = len(labels)
        if are_unnamed(names) and len(names) == count > 1 and labels not in (names, list(map(str, range(count)))):
            pairs = [f"{name} as '{label}'" for name, label in zip(names, labels, strict=True)]
            taken = ", ".join(pairs[:5]) + ", ..." * (len(pairs) > 5)
            hint = "If the model was trained in another order, give the task labels=[...] in that order"
            more = "or write the names into model.config.id2label, and they are compared with the task's"
            what = f"the classes of the head have no names, and are taken in the order of the task's labels: {taken}"
            logger.warning("%s: %s. %s, %s.", self.op, what, hint, more)

    def _try(self, group: Group) -> None:
        """Run the model with labels on the two shortest rows of `group`.

        Raises ConfigError if that fails, gives no loss, or gives outputs that do not fit the task.
        """
        inputs, lengths = group.inputs, group.inputs.lengths
        shortest = heapq.nsmallest(2, range(len(lengths)), key=lengths.__getitem__)
        batch = inputs.batch(shortest)
        (labels,) = group.labels(shortest, batch.pop("labels", None), group.names).values()
        try:
            with eval_mode(self.model):
                out = self._forward(batch, labels)
        except ConfigError:  # of `_forward`
            raise
        except Exception as error:  # models raise errors of any type
            reason = first_line(error)
            if problem := size_problem(self.model, batch):
                raise ConfigError(f"{self.op}: {problem} ({reason}). {_IMAGE_SIZE}") from error
            if (values := batch.get("pixel_values")) is None:
                raise self._no_padding() if _NO_PADDING in reason else self._no_head(reason) from error
            size = " x ".join(map(str, values.shape[-2:]))
            got = f"{type(self.model).__name__} fails on images of {size} ({reason})"
            rule = "it needs a head for classes, and images of its size"
            hint = f"Load it with {self.kind.auto_class}, and set the processor's size"
            raise UnfitHeadError(f"{self.op}: {got}; {rule}. {hint}.") from error
        if getattr(out, "loss", None) is None:
            raise self._no_head("it gives no loss")
        if reason := self.kind.output_problem(out, self.task):
            raise self._no_head(reason)

    def _no_padding(self) -> ConfigError:
        """Return the UnfitHeadError for a model that needs a padding token and a tokenizer without one."""
        got = f"{type(self.model).__name__} finds the end of texts by padding, and the tokenizer has no padding token"
        hint = "Set tokenizer.pad_token = tokenizer.eos_token, and pass processor=tokenizer"
        return UnfitHeadError(f"{self.op}: {got}. {hint}.")

    def _no_head(self, reason: str) -> ConfigError:
        """Return the UnfitHeadError for a model without a head for the task; the message quotes `reason`.

        If the config has `return_dict=False`, the message blames that instead.
        """
        name, reason = type(self.model).__name__, reason.rstrip(".")
        if getattr(self.model.config, "return_dict", True) is False:
            got = f"{name} fails with return_dict=False in its config ({reason}); its outputs are read by name"
            return UnfitHeadError(f"{self.op}: {got}. Set model.config.return_dict = True.")
        got = f"{name} has no head for a task of kind {self.task.kind} ({reason})"
        return UnfitHeadError(f"{self.op}: {got}. Load one with {self.kind.auto_class}.")

    def learners(
        self, tasks: Mapping[str, Task], plan: Plan, rates: Mapping[str, float], options: FitOptions
    ) -> list[Learner]:
        """Return a list with the model as its only learner, named after its task.

        Its parameters are grouped by learning rate and weight decay. A regression's new output with a bias starts at
        the mean of the labels; see `start_output`. Raises the errors of `parameter_groups`.
        """
        ((name, task),) = tasks.items()
        linear = [module for module in self.model.modules() if isinstance(module, nn.Linear)]
        if task.problem_type == "regression" and linear and linear[-1].out_features == 1:
            start_output(linear[-1], label_array(task.split("train")))
        groups = parameter_groups(self.model, options, rates[name], self.op)
        return [Learner(name, self.model, groups, metric=task.metric, total=plan.steps_of(name), options=options)]

    def _forward(self, batch: Batch, labels: Tensor) -> Any:  # noqa: ANN401
        """Run the model on a batch with labels, and return its outputs (a transformers ModelOutput), loss included.

        Raises ConfigError if the batch has a token id for which the model has no row.
        """
        labels = self.kind.model_labels(labels, self.task).to(self.device)
        arguments = self.arguments(batch)
        try:
            return self.model(**arguments, labels=labels, **as_output(self.model))  # pyright: ignore
        except (IndexError, RuntimeError) as error:
            if problem := ids_problem(self.model, batch):
                raise ConfigError(f"{self.op}: {problem}.") from error
            raise

    def losses(
        self, batch: dict[str, Tensor], labels: Mapping[str, Tensor], names: Sequence[str], states: States | None
    ) -> list[Tensor]:
        """Return a list with one item: the loss of the model's own head for a batch.

        Only rows with a label count. If there are none, the loss is 0, because the mean over no labels would be NaN.
        `states` are ignored.
        """
        del states
        (name,) = names
        own = labels[name]
        rows = self._is_label(own).reshape(len(own), -1).any(1)
        counts = bool(rows.any())
        if self.task.problem_type in _ALL_COUNT and counts and not rows.all():
            batch, own = {key: values[rows] for key, values in batch.items()}, own[rows]
        out = self._forward(batch, own)
        return [out.loss if counts else out.logits.sum() * 0.0]

    def count_labels(self, name: str, labels: Tensor) -> float:  # noqa: ARG002
        """Return the number of labels that count in the loss: those that are not NaN, -100 or, for a class set, -1."""
        return int(self._is_label(labels).sum())

    def _is_label(self, labels: Tensor) -> Tensor:
        if labels.is_floating_point():
            return ~labels.isnan()
        return labels >= 0 if self.task.problem_type == "multi_label" else labels != IGNORED

    def outputs(
        self, batch: dict[str, Tensor], labels: Tensor | None, names: Sequence[str], states: States | None
    ) -> dict[str, object]:
        """Return learner name -> the model's outputs for a batch, in the form that its kind of task expects.

        If `labels` is None, these are the outputs for a prediction, else those from which the loss is computed; the
        values of `labels` do not count. `states` is ignored. For "predict", the tokenizer's padding token is written
        into the model's config if that names none (see `_fit_padding`).

        Raises:
            ConfigError: If the model cannot read images of this size or has no row for a token id, or needs a padding
                token and there is none.
        """
        del states
        if self.op == "predict":  # only here, so that a call that is refused leaves the config as it was
            self._fit_padding()
        run = self.kind.predict_outputs if labels is None else self.kind.outputs
        arguments = self.arguments(batch)
        try:
            return {name: run(self.model, arguments, self.processor, self.generation) for name in names}
        except (ValueError, RuntimeError, IndexError) as error:
            if problem := ids_problem(self.model, batch):
                raise ConfigError(f"{self.op}: {problem}.") from error
            if _NO_PADDING in str(error):
                raise self._no_padding() from error
            if reason := size_problem(self.model, batch):
                raise ConfigError(f"{self.op}: {reason} ({first_line(error)}). {_IMAGE_SIZE}") from error
            raise

    def outputs_per_position(self, name: str) -> int:  # noqa: ARG002
        """Return the number of outputs of the model for each token: the vocabulary's size, or 1 if it has none."""
        return int(getattr(self.model.config.get_text_config(), "vocab_size", 1))


@contextmanager
def _restored_after_error(*configs: PreTrainedConfig) -> Iterator[None]:
    """Give the configs back their attributes if the block raises."""
    before = [dict(vars(config)) for config in configs]
    try:
        yield
    except BaseException:
        for config, values in zip(configs, before, strict=True):
            _reset(config, values)
        raise


def _reset(config: PreTrainedConfig, values: Mapping[str, object]) -> None:
    """Give a config back the attributes that `vars` returned earlier."""
    vars(config).clear()
    vars(config).update(values)


_PROBLEM_TYPES = {"regression": "regression", "multi_label_classification": "multi_label"}


def task_of(model: PreTrainedModel, kind: str | None = None, op: str = "predict") -> TaskOutline:
    """Return the `TaskOutline` (kind, problem type and labels, no data) of the task that a model's head is for.

    The kind follows from the model's class, the problem type and the labels from its config. A kind without classes has
    no labels. If the config names no problem type of the kind, it is "regression" for a head with one label (if the
    kind has that), else the kind's first.

    Args:
        model: A model with a head.
        kind: Name of the kind of task; whether the head is for it is not checked. None: the first kind whose auto class
            has models of this class.
        op: The public operation, for messages.

    Raises:
        ConfigError: If `kind` is None, and the head is for no kind of task.
        UnknownNameError: If there is no kind of this name.
    """
    import transformers

    config: Any = model.config
    for name in KINDS.names() if kind is None else ():
        classes = getattr(transformers, kind_of(name).auto_class)._model_mapping.get(type(config), ())
        if isinstance(without_wrapper(model), classes):
            kind = name
            break
    if kind is None:
        known = ", ".join(KINDS.names())
        raise ConfigError(f"{op}: {type(model).__name__} has no head for any kind of task; known: {known}.")
    task_kind = kind_of(str(kind))
    types, labels = task_kind.problem_types, ()
    if task_kind.has_classes:
        labels = tuple(str(config.id2label[number]) for number in range(config.num_labels))
    default = "regression" if len(labels) == 1 else ""
    problem = _PROBLEM_TYPES.get(getattr(config, "problem_type", None) or "", default)
    return TaskOutline(task_kind, problem if problem in types else next(iter(types)), labels)
