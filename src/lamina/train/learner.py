"""A learner: a module with an optimizer, its parameter groups, a learning-rate schedule and an early stop."""

from __future__ import annotations

import fnmatch
import math
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, TypedDict

import numpy as np
import torch

from lamina.bank import ReaderModule
from lamina.editing.inserted_layer import InsertedLayer
from lamina.errors import ConfigError, LayerIndexError, StoreError
from lamina.layers import select, stacks
from lamina.layers.layer_modules import layer_modules
from lamina.tasks.metrics import better

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor, nn
    from torch.optim import Optimizer
    from transformers import PreTrainedModel

    from lamina.tasks.targets import Array
    from lamina.train.options import FitOptions
    from lamina.utils import JSON, JSONObject

BASE = ".base"  # name of a base model that is trained with its readers; no reader can have it, since names have no dot


@dataclass
class Progress:
    """The state of a learner's training, except tensors. Checkpoints store it as JSON.

    Attributes:
        scores: Metric -> score at `best_epoch`.
        best_epoch: The best epoch, from 1; 0 before the first. With `keep="last"`, or without validation rows, it is
            the last epoch so far.
        top: The best score so far; None before the first.
        mark: The score that early stopping compares with; None before the first.
        stalled: Epochs since the score was last better than `mark` by more than `early_stopping_min_delta`.
        cooled: Epochs since the score was last better than `top`, or since the plateau schedule acted, if later.
        scale: Factor of the learning rate that the plateau schedule has reached.
        done: Optimizer steps so far.
        began: `done` when the present stage of training began (see `Fusion.on_epoch_end`).
        stopped: Epoch (from 0) after which the learner stopped early; None: it has not.
        step: Training passes of a reader, by which its dropout is seeded.
    """

    scores: dict[str, float] = field(default_factory=dict)
    best_epoch: int = 0
    top: float | None = None
    mark: float | None = None
    stalled: int = 0
    cooled: int = 0
    scale: float = 1.0
    done: int = 0
    began: int = 0
    stopped: int | None = None
    step: int = 0


class Learner:
    """A module that is trained: a reader, a base model that is trained with its readers, or a whole model.

    It holds the module's optimizer, its `progress`, and with `keep="best"` a copy of its weights at the best epoch.

    Args:
        name: Name of the reader or task, or `BASE`.
        module: The module.
        groups: Parameter groups for torch's optimizer; "lr" is the highest learning rate of a group.
        metric: Name of the metric that decides the best epoch.
        total: Number of optimizer steps, unless the learner stops early.
        options: Options of the run.
        on_stage: Called once a new stage of training has reset parameters of the module. None: not called.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        groups: Sequence[ParameterGroup],
        *,
        metric: str,
        total: int,
        options: FitOptions,
        on_stage: Callable[[], None] | None = None,
    ) -> None:
        self.name, self.module, self.metric, self.total = name, module, metric, total
        self._on_stage = on_stage
        self._options = options
        self.parameters: list[nn.Parameter] = [parameter for group in groups for parameter in group["params"]]
        self.rates = [float(group["lr"]) for group in groups]
        self._reader = module if isinstance(module, ReaderModule) else None
        fused = groups[0]["params"][0].device.type in ("cpu", "cuda")
        plain = [dict(group) for group in groups]
        self.optimizer: Optimizer
        if options.optimizer == "sgd":
            self.optimizer = torch.optim.SGD(plain, momentum=options.momentum, fused=fused)
        else:
            kind = torch.optim.AdamW if options.optimizer == "adamw" else torch.optim.Adam
            self.optimizer = kind(plain, eps=options.adam_epsilon, fused=fused)
        self.progress = Progress()
        self.best: dict[str, Tensor] = {}  # tensors of the best epoch; empty with `keep="last"`
        trained = {id(parameter) for parameter in self.parameters}
        named = module.named_parameters(remove_duplicate=False)
        self._frozen = {key for key, parameter in named if id(parameter) not in trained}

    def factor(self) -> float:
        """Return the factor, from 0 to 1, of the next step's learning rates.

        The warm-up gives the factor until it ends, then the schedule does. Steps are counted from the start of the
        present training stage.
        """
        options, progress = self._options, self.progress
        total, done = self.total - progress.began, progress.done - progress.began
        rise = int(total * options.warmup_ratio) if options.warmup_steps is None else options.warmup_steps
        if done < rise:
            return (done + 1) / rise
        if options.schedule == "linear":
            return max(0.0, (total - done) / max(1, total - rise))
        if options.schedule == "cosine":
            return (1 + math.cos(math.pi * min(1.0, (done - rise) / max(1, total - rise)))) / 2
        return progress.scale

    def step(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """Take an optimizer step with the learning rates scaled by `factor`, clear the gradients, and count the step.

        With a gradient `scaler`, which float16 needs, the weights stay as they are if a gradient is not finite; the
        step counts all the same. The caller calls `scaler.update` after the steps of all learners.
        """
        factor = self.factor()
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate * factor
        if scaler is None:
            self.optimizer.step()
        else:
            scaler.step(self.optimizer)
        self.optimizer.zero_grad()
        self.progress.done += 1

    def record(self, epoch: int, scores: dict[str, float]) -> bool:
        """Process the scores after an epoch: keep the weights, lower the rate ("plateau"), stop early.

        Weights are kept if they are the best so far, or always with `keep` "last". After too many epochs without a
        better score (`early_stopping_patience`), `progress.stopped` becomes `epoch`.

        Args:
            epoch: Number of the epoch, from 0.
            scores: Metric -> score. Empty for a learner without validation rows, whose last weights are kept.

        Returns:
            Whether the weights of this epoch were kept.
        """
        if not scores:
            self.keep(epoch, scores)
            return True
        progress, options, score = self.progress, self._options, scores[self.metric]
        rose = progress.top is None or better(self.metric, score, progress.top)
        if progress.mark is None or better(self.metric, score, progress.mark, by=options.early_stopping_min_delta):
            progress.mark, progress.stalled = score, 0
        else:
            progress.stalled += 1
        if rose:
            progress.top, progress.cooled = score, 0
        else:
            progress.cooled += 1
            if options.schedule == "plateau" and progress.cooled > options.plateau_patience:
                lowest = min(1.0, options.min_learning_rate / max(self.rates))
                progress.scale, progress.cooled = max(progress.scale * options.plateau_factor, lowest), 0
        if options.early_stopping_patience is not None and progress.stalled >= options.early_stopping_patience:
            progress.stopped = epoch
        if keep := rose or options.keep == "last":
            self.keep(epoch, scores)
        return keep

    def keep(self, epoch: int, scores: dict[str, float]) -> None:
        """Record `epoch` (from 0) and its scores as the best; with the option `keep="best"`, copy the weights too."""
        self.progress.scores, self.progress.best_epoch = dict(scores), epoch + 1
        self.best = self.tensors() if self._options.keep == "best" else {}

    def importance(self) -> dict[int, float]:
        """Return layer -> importance; importances sum to 1. {} unless the module is a reader that weighs layers."""
        return {} if self._reader is None else self._reader.importance()

    def restart_importance(self) -> None:
        """Reset the importances of a reader whose fusion averages them over the tokens that the fusion has read.

        For other learners nothing happens.
        """
        if self._reader is not None:
            self._reader.restart_importance()

    def end_epoch(self, done: float) -> bool:
        """Tell a reader that the fraction `done` of its epochs is over; return whether its fusion begins a new stage.

        Most fusions train in a single stage. When another begins, the optimizer's state is cleared, because the stage
        may have new parameter values. False for a learner that is not a reader.
        """
        if self._reader is None or not self._reader.on_epoch_end(done):
            return False
        self.optimizer.state.clear()
        if self._on_stage is not None:
            self._on_stage()
        return True

    def begin_stage(self, *, schedule: bool = True) -> None:
        """Forget the best scores and weights, and an early stop: a new stage of training begins.

        The factor of the plateau schedule is 1 again; with `schedule`, the other schedules and the warm-up start again
        too. The count of steps continues.
        """
        done, began = self.progress.done, self.progress.began
        self.progress = Progress(done=done, began=done if schedule else began)
        self.best = {}

    def tensors(self) -> dict[str, Tensor]:
        """Return name in the module's state dict -> copy, on the CPU, of every tensor that training may change."""
        state = self.module.state_dict()
        return {key: value.detach().clone().cpu() for key, value in state.items() if key not in self._frozen}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Load tensors that the method `tensors` returned into the module; an empty dict changes nothing."""
        if tensors:
            self.module.load_state_dict(tensors, strict=False)

    # For checkpoints

    @property
    def checkpoint_bytes(self) -> int:
        """Approximate size in bytes of the learner's tensors in a checkpoint."""
        state = {key: value.nbytes for key, value in self.module.state_dict().items() if key not in self._frozen}
        moments = self._options.moments * sum(parameter.nbytes for parameter in self.parameters)
        return (2 if self._options.keep == "best" else 1) * sum(state.values()) + moments

    def to_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint: weights, best weights and the optimizer's state; see `from_tensors`."""
        tensors = {f"now/{key}": value for key, value in self.tensors().items()}
        tensors |= {f"best/{key}": value for key, value in self.best.items()}
        for number, state in self.optimizer.state_dict()["state"].items():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"optimizer/{number}/{key}"] = value.detach().cpu().clone()
        return {name: tensor.contiguous() for name, tensor in tensors.items()}

    def from_tensors(self, tensors: dict[str, Tensor], progress: JSONObject) -> None:
        """Restore weights, best weights, optimizer and progress from the results of `to_tensors` and `to_json`.

        Raises:
            StoreError: If names or shapes of the tensors differ from the module's. Nothing is restored then.
        """
        parts: dict[str, dict[str, Tensor]] = {"now": {}, "best": {}, "optimizer": {}}
        for key, value in tensors.items():
            part, _, rest = key.partition("/")
            parts[part][rest] = value
        shapes = {key: value.shape for key, value in self.module.state_dict().items() if key not in self._frozen}
        for part in ("now", "best") if parts["best"] else ("now",):
            if {key: value.shape for key, value in parts[part].items()} != shapes:
                what = f"the checkpoint has other tensors than '{self.name}'; another version of lamina wrote it"
                raise StoreError(f"resume: {what}. Train without resume.")
        self.load(parts["now"])
        self.best = parts["best"]
        state: dict[int, dict[str, Tensor]] = {}
        for key, value in parts["optimizer"].items():
            number, _, name = key.partition("/")
            state.setdefault(int(number), {})[name] = value
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": state})
        self.progress = Progress(**progress)
        if self._reader is not None:
            self._reader.step = self.progress.step

    def to_json(self) -> dict[str, JSON]:
        """Return `progress` as a JSON-ready dict; see `from_tensors`.

        For a reader, its number of training passes is first copied into `progress`.
        """
        if self._reader is not None:
            self.progress.step = self._reader.step
        return asdict(self.progress)


HEAD, INSERTED = "head", "inserted"  # keys of `layer_rates`: parameters outside the layers, and inserted layers
_OP = "fit: layer_rates"


class ParameterGroup(TypedDict):
    """Parameters with the same learning rate and weight decay, in the form of torch's optimizers.

    Attributes:
        params: The parameters.
        lr: The highest learning rate of these parameters.
        weight_decay: The weight decay of these parameters.
    """

    params: list[nn.Parameter]
    lr: float
    weight_decay: float


def reader_groups(module: nn.Module, rate: float, options: FitOptions, op: str = "fit") -> list[ParameterGroup]:
    """Return a reader's parameter groups, the one with weight decay before the one without; their rates are equal.

    Frozen parameters are in no group, and a group without parameters is left out.

    Args:
        module: The reader.
        rate: Highest learning rate of all parameters.
        options: Options of the run, with the weight decay and the parameters that have it.
        op: The operation, for messages.

    Raises:
        ConfigError: If a pattern of `weight_decay_on` without "!" matches no parameter.
    """
    groups = _groups(module, {name: rate for name, _ in module.named_parameters()}, options, op)
    return sorted(groups, key=lambda group: -group["weight_decay"])


def start_output(output: nn.Linear, labels: Array) -> float:
    """Return the standard deviation of a regression's labels, 1 if all are equal. Scale a new `output` to the labels.

    An output with a zero bias that can be trained counts as new. Its bias becomes the labels' mean, in place, and its
    weights are multiplied by the deviation, so that its first predictions are near the labels. NaN is no label.
    """
    known = labels[np.isfinite(labels)].astype(np.float64)
    spread = float(known.std()) or 1.0
    if output.bias is not None and output.bias.requires_grad and not output.bias.any():
        with torch.no_grad():
            output.weight.mul_(spread)
            output.bias.fill_(float(known.mean()))
    return spread


def restart_output(output: nn.Linear, labels: Array) -> None:
    """Scale the output of a regression to the labels as `start_output` does, after its parameters were reset."""
    if output.bias is not None:
        with torch.no_grad():
            output.bias.zero_()
    start_output(output, labels)


def scaled_groups(groups: Sequence[ParameterGroup], output: nn.Linear, factor: float) -> list[ParameterGroup]:
    """Return the groups with the learning rate of the parameters of `output` multiplied by `factor`.

    `BankRunner.losses` divides the loss of a regression by the variance of its labels. If `factor` is their standard
    deviation (its square with SGD), the reader learns as from labels that were divided by the deviation. The weight
    decay per step stays the same.
    """
    own, split = set(map(id, output.parameters())), list[ParameterGroup]()
    for group in groups:
        rest = [parameter for parameter in group["params"] if id(parameter) not in own]
        scaled = [parameter for parameter in group["params"] if id(parameter) in own]
        rate, decay = group["lr"] * factor, group["weight_decay"] / factor
        split += [{**group, "params": rest}, ParameterGroup(params=scaled, lr=rate, weight_decay=decay)]
    return [group for group in split if group["params"]]


def _groups(module: nn.Module, rates: dict[str, float], options: FitOptions, op: str) -> list[ParameterGroup]:
    """Return groups of the parameters that are trained; `rates` is parameter name -> learning rate.

    Frozen parameters, and those with rate 0, are left out. Raises ConfigError if a pattern of `weight_decay_on` without
    "!" matches no parameter.
    """
    decayed = decayed_names(module, options, op)
    groups: dict[tuple[float, float], ParameterGroup] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and rates[name]:
            decay = options.weight_decay if name in decayed else 0.0
            empty = ParameterGroup(params=[], lr=rates[name], weight_decay=decay)
            groups.setdefault((rates[name], decay), empty)["params"].append(parameter)
    return list(groups.values())


def decayed_names(module: nn.Module, options: FitOptions, op: str) -> set[str]:
    """Return the names of the parameters in `module` that have weight decay, by the option `weight_decay_on`.

    "all" selects every parameter, and "matrices" selects those with at least two axes. A list holds shell patterns
    (`*`, `?`, `[...]`) for full names. The last pattern that matches a name decides: if it begins with "!", the
    parameter has no weight decay; otherwise it has. A parameter that no pattern matches has none. `op` is the
    operation, for messages.

    Raises:
        ConfigError: If a pattern without "!" matches no parameter.
    """
    named = dict(module.named_parameters())
    if isinstance(options.weight_decay_on, str):
        return {name for name, parameter in named.items() if parameter.ndim >= 2 or options.weight_decay_on == "all"}
    decayed: set[str] = set()
    for pattern in options.weight_decay_on:
        matched = set(fnmatch.filter(named, pattern.removeprefix("!")))
        if not matched and not pattern.startswith("!"):  # an exclusion may match nothing in some readers of the run
            raise ConfigError(
                f"{op}: weight_decay_on names '{pattern}', which matches none of {len(named)} parameters, such as "
                f"'{next(iter(named))}'. Use patterns of full names, as in '*.scores'."
            )
        decayed = decayed - matched if pattern.startswith("!") else decayed | matched
    return decayed


def parameter_groups(model: PreTrainedModel, options: FitOptions, rate: float, op: str) -> list[ParameterGroup]:
    """Return the parameter groups of a whole model, one for each pair of learning rate and weight decay.

    Frozen parameters, and those whose learning rate is 0, are in no group.

    Args:
        model: The model.
        options: Options of the run, with the learning rates of layers.
        rate: Highest learning rate of parameters for which `options` set no rate of their own.
        op: The operation, for messages.

    Raises:
        ConfigError: If no parameter is left, a trained parameter is in float16, a pattern of `weight_decay_on` without
            "!" matches no parameter, or a key of `layer_rates` does not fit (see `learning_rates`).
        LayerIndexError: If `layer_rates` names a layer that does not exist.
        UnsupportedModelError: If layers have rates of their own, and the model's layers cannot be found.
    """
    groups = _groups(model, learning_rates(model, options, rate), options, op)
    if not groups:
        raise ConfigError(f"{op}: every parameter is frozen or has the learning rate 0; at least one must be trained.")
    halves = {id(weight) for group in groups for weight in group["params"] if weight.dtype == torch.float16}
    if half := [name for name, parameter in model.named_parameters() if id(parameter) in halves]:
        raise ConfigError(
            f"{op}: '{half[0]}' is in float16, in which small steps are lost; trained parameters must be in float32 "
            "or bfloat16. Call model.float(), and set precision='float16' for mixed precision."
        )
    return groups


def learning_rates(model: PreTrainedModel, options: FitOptions, rate: float) -> dict[str, float]:
    """Return parameter name -> highest learning rate in the run, for every parameter of a model.

    A parameter that several layers share has the rate of the topmost of them.

    Args:
        model: The model.
        options: Options of the run; `layer_decay` and `layer_rates` are used. For inserted layers, the rate of
            "inserted" replaces those of selectors.
        rate: Learning rate of the top block and of parameters outside the layers.

    Raises:
        LayerIndexError: If `layer_rates` names a layer that does not exist.
        ConfigError: If a key of `layer_rates` is not a layer selector, or is "inserted" and the model has no inserted
            layers.
        UnsupportedModelError: If layers have rates of their own, and the model's layers cannot be found.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    rates = dict.fromkeys(names.values(), rate)
    if options.layer_decay == 1 and not options.layer_rates:
        return rates
    outside_layers = set(rates)
    named = _named_rates(model, options)
    for stack in stacks(model).values():
        for layer, modules in layer_modules(model, stack, range(stack.layers)).items():
            decayed = rate * options.layer_decay ** (stack.depth - layer)
            inside = _names(modules, names)
            outside_layers.difference_update(inside)
            rates |= dict.fromkeys(inside, named.get((stack.name, layer), decayed))
    for key, key_rate in options.layer_rates.items():
        if key == HEAD:
            rates |= dict.fromkeys(outside_layers, key_rate)
        elif key == INSERTED:
            inserted = _names([part for part in model.modules() if isinstance(part, InsertedLayer)], names)
            if not inserted:
                raise ConfigError(f"{_OP}: '{INSERTED}' has a learning rate; the model has no inserted layers.")
            rates |= dict.fromkeys(inserted, key_rate)
    return rates


def _named_rates(model: PreTrainedModel, options: FitOptions) -> dict[tuple[str, int], float]:
    """Return (stack, layer) -> learning rate, for the layers that the selectors in `options.layer_rates` name.

    A selector names layers of every stack; "head" and "inserted" are skipped. If several selectors name a layer, the
    last one counts. Raises LayerIndexError if no stack has such a layer, ConfigError if a key is not a selector, and
    UnsupportedModelError if the model's layers cannot be found.
    """
    rates: dict[tuple[str, int], float] = {}
    deepest = max(stacks(model).values(), key=lambda stack: stack.layers)
    for key, rate in options.layer_rates.items():
        if key in (HEAD, INSERTED):
            continue
        selector = int(key) if str(key).removeprefix("-").isdecimal() else key
        select(selector, deepest.layers, op=_OP)  # raises if not even the deepest stack has the layer
        for stack in stacks(model).values():
            with suppress(LayerIndexError):  # only a deeper stack has the layer
                rates |= {(stack.name, layer): rate for layer in select(selector, stack.layers, op=_OP)}
    return rates


def _names(modules: Iterable[nn.Module], names: dict[int, str]) -> list[str]:
    return [names[id(parameter)] for module in modules for parameter in module.parameters(recurse=False)]
