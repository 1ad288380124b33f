"""Readers: their settings, their trainable module, and the outputs that a bank returns for them."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar, cast, final

import torch
import xxhash
from torch import Tensor, nn

from lamina.bank.linear_probes import linear_probe
from lamina.errors import ConfigError, UnknownNameError
from lamina.fusion.base import FusionConfig
from lamina.fusion.concat import Concat
from lamina.heads import HEADS
from lamina.heads.base import HeadConfig, ReadTask, label_names
from lamina.heads.sequence_classification import SequenceClassification
from lamina.heads.token_classification import TokenClassification
from lamina.layers import LayerStack, select
from lamina.layers.recorded import StatesPooling
from lamina.layers.selectors import ranges
from lamina.layers.stack import bytes_of
from lamina.utils import JSONObject, check_range, check_type, check_types, derive_seed, rank, seed_torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

Info = JSONObject  # JSON-ready facts that are saved with a reader or a bank
# The key of the monitors in `ReaderModule.info`, which is saved with the reader and replaced when it is trained again.
MONITORS = "monitors"
WATCHES = "watch"  # the key in `ReaderModule.info` of a reader that was added with `watch=True`; training keeps it
# The key of a tagger on a decoder whose tags belong to the steps that read the words; earlier ones had the step before.
READS_WORDS = "reads_words"


_EXAMPLES = {"fusion": "AdaLayers(dim=64)", "head": "SequenceClassification(labels)"}


@final
@dataclass(frozen=True)
class Reader:
    """The settings of a reader: a fusion, a head and a stack. A reader solves one task from a model's hidden states.

    The fusion combines the hidden states of the layers into features, and the head turns the features into logits.
    `bank.add(name, reader)` builds the trainable module from these settings.

    Args:
        fusion: Config of the fusion, such as `AdaLayers(dim=64)`. It also selects the layers that are read.
        head: Config of the head, such as `SequenceClassification(("no", "yes"))`.
        stack: Name of the stack whose states are read: "main", "encoder" or "decoder", or a tower's name. None: the
            only stack of the model, or the encoder; in a model with several towers (CLIP), the tower that reads the
            head's kind of input, text or images.
        seed: Seed of the initial parameters and of dropout, from 0.
        weights: Initial values of all parameters by name, as `from_sklearn` sets them; `bank.add` raises ConfigError if
            names or shapes differ. None: random ones.

    Raises:
        ConfigError: If the fusion or the head is not a config object, `seed` is not an int of that range, `stack` is
            "both", empty or not a string, or `weights` is not a mapping of names to tensors.
    """

    fusion: FusionConfig
    head: HeadConfig
    stack: str | None = None
    seed: int = 0
    weights: Mapping[str, Tensor] | None = field(default=None, compare=False, repr=False)

    @classmethod
    @check_types("reader")
    def default(cls, task: ReadTask, *, watch: bool = False) -> Reader:
        """Return the recommended reader for a task.

        The choice depends on the kind of the task and on its examples:

        - Single sequences get `PooledLayers`.
        - Pairs of sequences get `PairedLayers`, which needs a tokenizer that puts a separator between the two
          sequences. For other tokenizers, build a reader with `PooledLayers`.
        - Token classification gets `Concat`, projected to 128 features, under one transformer encoder layer.

        Args:
            task: The task, usually a `lamina.Task`.
            watch: Choose a reader that a monitor can use: its scores of a token do not depend on later tokens. It reads
                all layers by `Concat`; its head labels each token by itself, or takes the mean of the tokens.

        Raises:
            ConfigError: If tasks of this kind have no reader, or no recommended reader; or with `watch`, if no reader
                for such tasks can be used by a monitor.
        """
        if not isinstance(task, ReadTask):
            raise ConfigError(f"reader: got {type(task).__name__}; a lamina.Task is needed.")
        if str(task.kind) not in HEADS.names():
            have = ", ".join(HEADS.names())
            problem = f"tasks of kind '{task.kind}' have no readers; those of {have} do"
            raise ConfigError(f"reader: {problem}. Fine-tune a model for it with lamina.finetune.")
        head = HEADS.get(str(task.kind))
        return cls(*(head.default_for_watching(task) if watch else head.default(task)))

    @classmethod
    @check_types("reader")
    def from_sklearn(
        cls,
        probe: object,
        *,
        layers: int | Sequence[int],
        pooling: StatesPooling | None = "mean",
        labels: Sequence[str] | None = None,
        stack: str | None = None,
    ) -> Reader:
        """Return a reader that computes the same as a fitted linear model of scikit-learn, or a probe of lmprobe.

        With two classes, the first logit is 0 and the second is the model's decision function, so that the
        probabilities are those of `LogisticRegression`. `LinearSVC` and `RidgeClassifier` have scores but no
        probabilities, so the probabilities of such a reader mean little.

        Example:
            ```python
            probe = make_pipeline(StandardScaler(), LogisticRegression()).fit(states, labels)  # means of layer 4
            bank.add("sentiment", Reader.from_sklearn(probe, layers=4))
            ```

        Args:
            probe: The fitted model. In a `Pipeline`, scalers before it (StandardScaler, MinMaxScaler, MaxAbsScaler,
                PCA) are folded into the weights. Files are refused: nothing is unpickled.
            layers: The layer whose states the model was fitted on; or several ascending layers, if their states were
                concatenated. (Layer i of lmprobe is layer i + 1 here.)
            pooling: How the model's inputs were made from a text's token states: "mean", or the state of the "first" or
                "last" token. None: each input is the state of one token, and the model labels tokens.
            labels: Names of the classes in the order of `probe.classes_`, as texts; for a regression, one name for the
                number. None: `str` of each class in `probe.classes_`, or "value".
            stack: Name of the stack that the reader reads, as in `Reader`. None: the only stack, or the encoder.

        Raises:
            ConfigError: If the model is not linear, not fitted or has NaN; if its features or classes do not fit
                `layers` or `labels`; if `labels` is empty or not of texts; if `layers` are not ascending numbers from
                0; if `pooling` is None and the model is a regressor or predicts several labels.
            UnknownNameError: If `pooling` is unknown.
        """
        linear, chosen = linear_probe(probe), _ascending(layers)
        weight, bias = linear.by_layer(len(chosen))
        names = label_names("reader", linear.classes or ("value",) if labels is None else labels)
        if len(names) != len(bias):
            raise ConfigError(f"reader: {len(names)} labels for a probe of {len(bias)} classes; each class has a name.")
        weights = {"fusion.projection": weight, "fusion.bias": bias}
        fusion = Concat(dim=len(bias), layers=tuple(chosen), bias=True)
        if pooling is None:
            if linear.problem_type != "classification":
                raise ConfigError(f"reader: a probe of tokens is a {linear.problem_type}; it must be a classification.")
            weights |= {"head.output.weight": torch.eye(len(bias)), "head.output.bias": torch.zeros(len(bias))}
            return cls(fusion, TokenClassification(names, encoder_layers=0, dropout=0.0), stack, weights=weights)
        head = SequenceClassification(
            names, problem_type=linear.problem_type, pooling=pooling, linear=False, dropout=0.0
        )
        return cls(fusion, head, stack, weights=weights)

    def __post_init__(self) -> None:
        for name, kind in (("fusion", FusionConfig), ("head", HeadConfig)):
            if not isinstance(value := getattr(self, name), kind):
                got = value.__name__ if isinstance(value, type) else repr(value)[:60]
                raise ConfigError(f"reader: {name} is {got}; it must be an object, such as {_EXAMPLES[name]}.")
        object.__setattr__(self, "seed", check_type("reader", "seed", self.seed, "int"))
        check_range("reader", "seed", self.seed, 0, (1 << 63) - 1)
        if self.stack in ("both", "") or not isinstance(self.stack, str | None):
            rule = "a reader reads one stack, since two stacks have different tokens"
            raise ConfigError(f"reader: stack is {self.stack!r}; {rule}. Add one reader per stack: they share a pass.")
        weights = {} if self.weights is None else self.weights
        if not isinstance(weights, Mapping) or not all(isinstance(weight, Tensor) for weight in weights.values()):
            what = "a mapping of parameters' names to tensors is needed"
            raise ConfigError(f"reader: weights is {repr(weights)[:60]}; {what}.")


def _ascending(layers: object) -> list[int]:
    """Return the layers of a probe as a list; a single number gives a list of one.

    Raises ConfigError unless they are ascending integers of at least 0.
    """
    items = list(cast("Sequence[object]", layers)) if isinstance(layers, (list, tuple, range)) else [layers]
    numbers = [int(item) for item in items if isinstance(item, Integral) and not isinstance(item, bool)]
    if not items or len(numbers) < len(items) or numbers[0] < 0 or numbers != sorted(set(numbers)):
        raise ConfigError(f"reader: layers is {layers!r}; the layers of a probe are ascending numbers from 0.")
    return numbers


@final
class ReaderModule(nn.Module):
    """The trainable module of one reader in a bank: its fusion and its head. `bank.add` builds it.

    Attributes:
        config: The `Reader` from which the module was built.
        stack: Name of the stack that the reader reads.
        layers: Numbers of the layers that the fusion selects, ascending; 0 is the embeddings.
        info: JSON-ready facts about the reader, such as its scores after training. They are saved with the reader.
        inputs: Facts about the processor with which the reader was trained or loaded. None: not known.
        step: Number of training passes so far. The seed and this number determine the random numbers of dropout.
        first_hash: `weights_hash` of the random weights with which `bank.add` built the reader. None: the reader began
            with given weights or was loaded, or `warn_of_untrained` has looked at it.
    """

    instead_of_model: ClassVar = "It is a reader: give the model of its bank, bank.model"
    inputs: Info | None = None
    first_hash: str | None = None

    def __init__(self, config: Reader, stack: LayerStack, model: PreTrainedModel) -> None:
        super().__init__()
        self.config, self.stack = config, stack.name
        self.layers = tuple(select(config.fusion.selector(), stack.layers, op="reader"))
        self.info: Info = {}
        self.step = 0
        with torch.random.fork_rng(devices=[]):
            # parameters are initialised on the CPU, so the generators of GPUs need not be saved and restored
            torch.default_generator.manual_seed(config.seed)
            self.fusion = config.fusion.build_on(model, stack, len(self.layers))
            self.head = config.head.build_on(model, self.fusion.dim)
        if config.weights is not None:
            self._start_from(config.weights)
        self.fusion.check_head(self.head)
        self.head.check_reads(model, stack, self.fusion)

    @torch.no_grad()
    def _start_from(self, weights: Mapping[str, Tensor]) -> None:
        """Copy `weights` into the parameters; raise ConfigError unless all names and shapes agree."""
        shapes = {name: tuple(parameter.shape) for name, parameter in self.named_parameters()}
        given = {name: tuple(weight.shape) for name, weight in weights.items()}
        if shapes != given:
            got = f"the weights are {given}, and the reader of this model has {shapes}"
            raise ConfigError(f"reader: {got}; the probe belongs to a model of another width, or to other layers.")
        for name, parameter in self.named_parameters():
            parameter.copy_(weights[name])

    def extra_repr(self) -> str:
        """Return the layers, the stack and the fusion, as `print(bank)` shows them."""
        return f"layers {ranges(self.layers)} of {self.stack}, {self.config.fusion}"

    def read_from(self, fusion: FusionConfig, stack: LayerStack) -> None:
        """Make the reader read the layers that `fusion` selects from `stack`, as many as before; the weights stay.

        `fusion` must be the reader's fusion config with other layers. Raises LayerIndexError if the stack lacks a
        layer.
        """
        self.layers = tuple(select(fusion.selector(), stack.layers, op="reader"))
        self.config = replace(self.config, fusion=fusion)
        self.fusion.config = fusion

    def seed_dropout(self, device: torch.device) -> None:
        """Seed the reader's own dropout generators, on `device`, for the next training pass, and count the pass.

        Their seed depends only on the reader's seed, the number of the pass and the rank of this process.
        """
        process = (rank(),) if rank() else ()
        device = torch.device("cpu") if device.type == "meta" else device  # there, no numbers are drawn
        for part, module in (("fusion", self.fusion), ("head", self.head)):
            if module.generator is None or module.generator.device != device:
                module.generator = torch.Generator(device)
            module.generator.manual_seed(derive_seed(self.config.seed, self.step, part, *process))
        self.step += 1

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of the head, a scalar, plus the regularization of the fusion if it has any.

        Raises ConfigError if the labels have a shape or values that the head's `loss` does not take.
        """
        loss = self.head.loss(logits, labels.to(logits.device))
        regularization = self.fusion.regularization(self.head)
        return loss if regularization is None else loss + regularization

    def on_epoch_end(self, done: float) -> bool:
        """Let the fusion start its next training stage, if one is due, with the reader's own random numbers.

        `done` is the finished fraction of the epochs. Returns, as `Fusion.on_epoch_end`, whether parameters were reset.
        """
        devices = {parameter.device for parameter in self.parameters() if parameter.is_cuda}
        with torch.random.fork_rng(devices=devices):
            seed_torch(derive_seed(self.config.seed, "stage"))
            return self.fusion.on_epoch_end(done, self.head)

    def importance(self) -> dict[int, float]:
        """Return layer -> its weight in the fusion; the weights sum to 1. {} if the fusion does not weigh layers."""
        measure = getattr(self.fusion, "importance", None)
        return {} if measure is None else dict(zip(self.layers, measure().tolist(), strict=True))

    def restart_importance(self) -> None:
        """Reset the running sums of a fusion whose importance depends on its inputs (`InputWeighted`), if it is one."""
        mode = self.fusion.training
        self.fusion.train(not mode).train(mode)

    @property
    def monitors(self) -> Info:
        """The monitors in `info`: monitor name -> the dict that `Monitor.to_dict` returned; {} if there are none."""
        monitors = self.info.get(MONITORS)
        return monitors if isinstance(monitors, dict) else {}  # what was saved may be damaged

    def rename_in_monitors(self, name: str, to: str) -> None:
        """Replace the reader name `name` by `to` in the monitors that are stored with this reader."""
        for part in (part for fields in self.monitors.values() for part in _parts(fields)):
            if part.get("reader") == name:
                part["reader"] = to

    def cascades_of(self, readers: Collection[str]) -> list[str]:
        """Return the names of the stored cascades whose first reader is one of `readers`; their second is this one."""
        firsts = {name: fields.get("first") for name, fields in self.monitors.items() if isinstance(fields, dict)}
        return [name for name, part in firsts.items() if isinstance(part, dict) and str(part.get("reader")) in readers]

    def drop_cascades_of(self, readers: Collection[str]) -> None:
        """Remove the stored cascades whose first reader is one of `readers`."""
        for name in self.cascades_of(readers):
            self.drop_monitor(name)

    def drop_monitor(self, name: str) -> None:
        """Remove a monitor from `info`, which must have it."""
        rest = {other: fields for other, fields in self.info.pop(MONITORS).items() if other != name}
        self.info |= {MONITORS: rest} if rest else {}

    def weights_hash(self) -> str | None:
        """Return a hash of all parameters; None if there are none, or they are on the meta device."""
        values = [parameter.detach() for parameter in self.parameters()]
        if not values or any(value.is_meta for value in values):
            return None
        digest = xxhash.xxh3_64()
        for value in values:
            digest.update(bytes_of(value))
        return digest.hexdigest()

    def size(self) -> int:
        """Return the number of parameters."""
        return sum(parameter.numel() for parameter in self.parameters())


def warn_of_untrained(op: str, readers: Mapping[str, ReaderModule]) -> None:
    """Log a warning, which `op` begins, about each of `readers` (by name) that nothing has trained, but only once.

    A reader whose weights were loaded, set, trained or converted to another dtype has other weights than at first.
    """
    for name, reader in readers.items():
        first, reader.first_hash = reader.first_hash, None
        if first is not None and not reader.step and reader.weights_hash() == first:
            problem = "was not trained: its weights are the random ones of bank.add, so its answers mean nothing"
            logger.warning("%s: reader '%s' %s. Train it, for instance with lamina.fit", op, name, problem)


def _parts(fields: object) -> list[Info]:
    """Return the dicts in a stored monitor: its own and, in a cascade, its two monitors'; damaged ones are left out."""
    parts = (fields, fields.get("first"), fields.get("second")) if isinstance(fields, dict) else ()
    return [part for part in parts if isinstance(part, dict)]


@dataclass
class ReaderOutput:
    """The output of one reader for one batch.

    Attributes:
        logits: `[batch, classes]`, or `[batch, tokens, classes]` for a head that labels tokens. A head over a
            vocabulary returns `[labelled tokens, classes]` if it was called with labels.
        mask: `[batch, tokens]`, True at tokens, False at padding.
        loss: Scalar loss; None without labels.
        tokens: In `bank.listen`, the ids `[batch, tokens]` of the text that `generate` read and wrote; else None.
    """

    logits: Tensor
    mask: Tensor
    loss: Tensor | None = None
    tokens: Tensor | None = None


@dataclass
class BankOutput:
    """The outputs of a bank: `output[name]` is the `ReaderOutput` of a reader. Iterating yields the names.

    Attributes:
        readers: Reader name -> its output.
        loss: Sum of the readers' losses; None without labels.
        main: The model's own output, if `main=True` was given; else None.
        missing: In `bank.listen`, reader name -> why the reader has no output; without meaning once it has one.
    """

    readers: dict[str, ReaderOutput] = field(default_factory=dict)
    loss: Tensor | None = None
    main: Any = None
    missing: dict[str, str] = field(default_factory=dict)

    def clear(self) -> None:
        """Drop all outputs. In `bank.listen`, the readers then read the model's next pass."""
        self.readers.clear()
        self.missing = dict.fromkeys(self.missing, "no pass has run since its outputs were cleared")
        self.loss = self.main = None

    def __getitem__(self, name: str) -> ReaderOutput:
        """Return a reader's output; UnknownNameError if it did not run, ConfigError if it has none in `bank.listen`."""
        if name not in self.readers and name in self.missing:
            raise ConfigError(f"bank.listen: reader '{name}' has no output: {self.missing[name]}.")
        if name not in self.readers:
            raise UnknownNameError(op="output", got=name, known=self.readers, what="reader")
        return self.readers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.readers)

    def __len__(self) -> int:
        return len(self.readers)

    def __contains__(self, name: object) -> bool:
        return name in self.readers
