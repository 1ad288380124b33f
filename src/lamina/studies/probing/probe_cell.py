"""One cell of a probing study: train the probes of all layers for one task and one seed, in the same frozen passes."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias, TypeVar, cast, final, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lamina.bank import Reader, ReaderBank
from lamina.errors import check_known
from lamina.fusion.base import Fusion, FusionConfig, LayerView, Stream, require_fed
from lamina.heads.base import HeadConfig, ProblemType
from lamina.heads.sequence_classification import SequenceClassification
from lamina.heads.token_classification import TokenClassification
from lamina.layers.preserve import preserve_training
from lamina.layers.sites import Site
from lamina.layers.wrappers import unwrapped
from lamina.store import load
from lamina.studies.probing.controls import LabelBits, code_length, code_portions, control_task, only_rows
from lamina.train.groups import groups_of
from lamina.train.options import FitOptions
from lamina.train.training_run import open_runner, train
from lamina.utils import JSON, Row, check_range

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jaxtyping import Bool, Float
    from transformers import PreTrainedModel

    from lamina.heads.base import Head
    from lamina.layers.types import Processor
    from lamina.tasks.base import Targets
    from lamina.tasks.outputs import Results
    from lamina.tasks.task import Task
    from lamina.train.groups import Encodings
    from lamina.train.plan import Group

ProbeName: TypeAlias = Literal["linear", "mlp"]
MLP: ProbeName = "mlp"
Collected = TypeVar("Collected", bound="Results")


class Place(NamedTuple):
    """The name of a probe: the layer and the site that it reads, and its kind. Its fields are table columns.

    Attributes:
        layer: Number of the layer.
        site: "output" (the layer's state), "attention" or "ffn" (what that part of the block adds to it).
        probe: Kind of probe: "linear" or "mlp".
    """

    layer: int
    site: Site
    probe: str  # a ProbeName


@final
@dataclass(frozen=True)
class ProbeSpec:
    """One probe to train in a cell.

    Attributes:
        place: The layer and site that the probe reads, and the kind of probe.
        target: Labels that the probe learns. "task": the task's labels. "control": random labels. "code": the task's
            labels on the first portions of the training rows, for an online code (see `code_portions`).
        step: With target "code": number of the last portion that the probe learns, from 0.
    """

    place: Place
    target: Literal["task", "control", "code"] = "task"
    step: int = 0

    @property
    def name(self) -> str:
        """Name of the probe's reader in the bank, such as "layer3-linear" or "ffn3-mlp-control"."""
        site = "layer" if self.place.site == "output" else self.place.site
        ending = {"task": "", "control": "-control", "code": f"-code{self.step}"}[self.target]
        return f"{site}{self.place.layer}-{self.place.probe}{ending}"


@dataclass(frozen=True)
class ProbeSettings:
    """The settings that all cells of a probing study share. A cell trains all probes of one task and seed.

    Attributes:
        layers: Layers to read.
        stack: Name of the stack that the layers belong to.
        probes: Kinds of probes to train on each layer.
        split: Name of the split to score.
        hidden: Size of the MLP's hidden layer.
        rates: Kind of probe -> its peak learning rate.
        controls: Whether to train a control beside each probe.
        code_length: Whether to measure online codes.
        training: Further options of `lamina.fit`, except the seed.
        sites: Sites to read in each block.
    """

    layers: tuple[int, ...]
    stack: str
    probes: tuple[str, ...]
    split: str
    hidden: int
    rates: Mapping[str, float]
    controls: bool
    code_length: bool
    training: Mapping[str, Any]
    sites: tuple[Site, ...] = ("output",)

    @property
    def places(self) -> list[Place]:
        """Every combination of a kind of probe, a layer and a site; layer 0 has only the site "output"."""
        embeddings: list[tuple[int, Site]] = [(0, "output")]
        blocks = [(layer, site) for site in self.sites for layer in self.layers if layer]
        reads = [*(embeddings if 0 in self.layers else []), *blocks]
        return [Place(layer, site, probe) for probe in self.probes for layer, site in reads]


@final
@dataclass(frozen=True)
class ProbeLayer(FusionConfig):
    """A fusion for probes. It returns the states of one layer, after a layer norm without parameters.

    Raises ConfigError if a field has a value of the wrong type, or `hidden` is below 1; UnknownNameError if there is no
    such site.

    Args:
        layer: Number of the layer.
        pooled: Whether to return the mean over a text's tokens, without padding, instead of each token's own state.
        hidden: Size of a hidden layer `gelu(W z + b)` before the head, which turns the probe into an MLP. None: no
            hidden layer; the probe is linear.
        site: "output" reads the layer's states; "attention" and "ffn" read what that part of its block adds to them.
    """

    layer: int
    pooled: bool = True
    hidden: int | None = None
    site: Site = "output"  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range("probe", "hidden", self.hidden, 1)
        check_known("probe", [self.site], get_args(Site), "site")

    def selector(self) -> int:
        """Return the number of the layer that this fusion reads."""
        return self.layer


class _ProbeStream(Stream):
    """Computes the features of several probes that read the same layer and site, in one pass.

    The probes share the normed (and pooled) state; one matrix product computes the hidden layers of all MLPs.
    """

    def __init__(self, members: Sequence[ProbeLayerFusion]) -> None:
        self._members, self._config = members, members[0].config
        self._state: Tensor | None = None

    def step(self, index: int, view: LayerView) -> None:  # noqa: ARG002
        """Store the layer's normed states `[batch, tokens, width]` from `view`; if pooled, their mean over the tokens.

        `index` is not used, because the probes read one layer.
        """
        state = view.normed.float()
        if self._config.pooled:
            weights = view.mask.to(state.dtype) / view.mask.sum(1, keepdim=True)
            state = torch.bmm(weights.unsqueeze(1), state)
        self._state = state

    def finish(self, mask: Bool[Tensor, "batch tokens"]) -> list[Float[Tensor, "batch tokens dim"]]:
        """Return the features `[batch, tokens, dim]` of each probe; pooled features are repeated for every token.

        `mask` only tells the number of tokens.
        """
        state: Tensor = require_fed(self._state)
        if self._config.hidden is None:
            features = state.expand(-1, mask.shape[1], -1) if self._config.pooled else state
            return [features] * len(self._members)
        maps = [member.inner for member in self._members]
        weight, bias = torch.cat([m.weight for m in maps]), torch.cat([m.bias for m in maps])
        inner = F.gelu(F.linear(state, weight, bias)).unflatten(-1, (len(maps), -1)).movedim(2, 0)
        return list(inner.expand(-1, -1, mask.shape[1], -1).unbind(0))


@final
class ProbeLayerFusion(Fusion, config=ProbeLayer):
    """The module of the fusion `ProbeLayer`. Its only parameters are in `inner`, the first linear map of an MLP."""

    stream_of: ClassVar = _ProbeStream
    inner: nn.Linear

    def __init__(self, config: ProbeLayer, *, layers: int, width: int) -> None:
        super().__init__(config, layers=layers, width=width, dim=config.hidden)
        if config.hidden is not None:
            self.inner = nn.Linear(width, config.hidden)

    def group(self) -> Hashable:
        """Return a key; probes with equal keys share one `_ProbeStream`."""
        return (super().group(), self.config.pooled, self.config.hidden, self.config.site)


@final
@dataclass(frozen=True)
class ProbeHead(HeadConfig):
    """The head of a probe: one linear map, for any kind of task with classes or numbers.

    `kind` is the name of the kind of task; with `tags`, each token gets one of the `labels`.
    """

    labels: Sequence[str]
    kind: str  # pyright: ignore[reportIncompatibleVariableOverride]
    problem_type: ProblemType = "classification"
    tags: bool = False

    def build(self, dim: int) -> Head:
        """Return the head's module for features of width `dim`.

        Without `tags` the module reads only the first token, because pooled features are the same at all tokens.
        """
        if self.tags:
            return TokenClassification(self.labels, encoder_layers=0, dropout=0.0).build(dim)
        return SequenceClassification(self.labels, pooling="first", dropout=0.0, problem_type=self.problem_type).build(
            dim
        )


@contextmanager
def probe_bank(
    model: PreTrainedModel,
    processor: Processor | None,
    task: Task,
    places: Mapping[str, Place],
    settings: ProbeSettings,
    seed: int,
) -> Iterator[ReaderBank]:
    """Yield a bank with one untrained probe per name; afterwards restore the model's mode and `requires_grad`.

    Raises the errors of `ReaderBank` and `ReaderBank.add`, such as LayerIndexError if a layer does not exist.

    Args:
        model: The model to read. Inside the `with` block it is frozen and in eval mode.
        processor: Tokenizer, image processor or feature extractor of the model.
        task: The task whose labels the heads have.
        places: Reader name -> layer, site and kind of its probe.
        settings: Settings of the study.
        seed: Seed of the probes' initial weights.
    """
    base, tags = unwrapped(model), task.kind.tags_words
    head = ProbeHead(task.labels, task.kind.name, task.problem_type, tags)  # pyright: ignore[reportArgumentType]
    with preserve_training(base):
        bank = ReaderBank(base, processor)
        for name, (layer, site, probe) in places.items():
            fusion = ProbeLayer(layer, pooled=not tags, hidden=settings.hidden if probe == MLP else None, site=site)
            bank.add(name, Reader(fusion, head, stack=settings.stack, seed=seed))
        yield bank


class TrainedProbes:
    """Trains the probes of a bank when an instance is created, and then runs them over splits of tasks.

    The probes keep the weights of their last epoch. Raises the errors of `lamina.fit`, such as NotFiniteError.

    Args:
        bank: Bank with one reader per probe.
        tasks: Reader name -> the task that it learns.
        options: Training options.
        split: Split that will be scored. Training gets one of its rows as the validation split that it requires.
    """

    def __init__(self, bank: ReaderBank, tasks: Mapping[str, Task], options: FitOptions, split: str) -> None:
        self._bank, self._options = bank, options
        self._encodings: Encodings = {}  # tokenised splits, which training and scoring share
        train(bank, _without_validation(tasks, split), options, op="probe", encodings=self._encodings)

    def run(
        self, tasks: Mapping[str, Task], part: str, new_results: Callable[[str, Group], Collected]
    ) -> dict[str, Collected]:
        """Run probes over the split `part` of their tasks; return reader name -> its outputs ({} without tasks).

        `tasks` is reader name -> task. `new_results` is called with a reader's name and its group (the readers that
        share encoded rows). It returns an empty collection, to which the outputs are added. Raises UnknownNameError if
        a task has no split `part`.
        """
        results: dict[str, Collected] = {}
        if tasks:
            runner = open_runner(self._bank, tasks, "probe", None, self._options)
            for group in groups_of(runner, tasks, part, self._options, self._encodings):
                group_results = {name: new_results(name, group) for name in group.names}
                runner.collect(group, group_results, self._options)
                results |= group_results
        return results


@lru_cache(maxsize=1)
def _loaded(source: str) -> PreTrainedModel:
    """Load a model from a hub id or folder; the last one stays in memory, for the next cells of the same worker.

    Raises the errors of `lamina.load`, such as ModelNotFoundError.
    """
    return load(source)[0]


def probe_rows(
    model: PreTrainedModel | str, processor: Processor | None, task: Task, settings: ProbeSettings, seed: int
) -> list[Row]:
    """Train all probes of one task with one seed, and score them.

    Raises LaminaError if `model` cannot be loaded, or a probe cannot be added (`ReaderBank.add`) or trained (`fit`).

    Args:
        model: A model, or the hub id or folder to load it from.
        processor: Tokenizer, image processor or feature extractor of the model.
        task: The task to probe for.
        settings: Settings of the study.
        seed: Decides the initial weights, the order of the rows, the control's labels and the code's portions.

    Returns:
        Rows of the study's table. Rows of measure "score" also have the scored predictions, under the key "guesses".
    """
    places = settings.places
    portions = code_portions(len(task.split("train")), seed) if settings.code_length and has_code(task) else []
    code = _OnlineCode(task, portions)
    tasks: dict[ProbeSpec, Task] = {ProbeSpec(place): task for place in places}
    if settings.controls:
        control = control_task(task, ("train", settings.split), seed)
        tasks |= {ProbeSpec(place, "control"): control for place in places}
    tasks |= {ProbeSpec(place, "code", step): part for place in places for step, part in enumerate(code.train_tasks)}
    fixed = {
        "learning_rate": {spec.name: settings.rates[spec.place.probe] for spec in tasks},
        "seed": seed,
        "keep": "last",
        "max_grad_norm": 0.0,
    }
    options = FitOptions.of({**settings.training, **fixed}, "probe")
    model = _loaded(model) if isinstance(model, str) else model
    with probe_bank(model, processor, task, {spec.name: spec.place for spec in tasks}, settings, seed) as bank:
        trained = TrainedProbes(bank, {spec.name: part for spec, part in tasks.items()}, options, settings.split)
        scored_tasks = {spec.name: part for spec, part in tasks.items() if spec.target != "code"}
        scored = trained.run(scored_tasks, settings.split, results_of)
        sent_tasks = {spec.name: code.sent_tasks[spec.step] for spec in tasks if spec.target == "code"}
        # the labels of the first portion are only counted, so any probe will do
        first = ProbeSpec(places[0]).name
        if code.train_tasks:
            sent_tasks[first] = code.train_tasks[0]
        sent = trained.run(sent_tasks, "train", lambda name, group: LabelBits(cast("Targets", group.targets[name])))
    rows: list[Row] = []
    for place in places:
        results = scored[ProbeSpec(place).name]
        measured = _score_rows(task, results, scored.get(ProbeSpec(place, "control").name))
        measured[0]["guesses"] = results.guesses()
        if code.train_tasks:
            portions_sent = [sent[ProbeSpec(place, "code", step).name] for step in range(len(code.sent_tasks))]
            measured += code.rows(sent[first].count, portions_sent)
        rows += [{**place._asdict(), "rows": len(task.split(settings.split)), **row} for row in measured]
    return rows


def has_code(task: Task) -> bool:
    """Return whether an online code of a task's labels can be measured: each label is one of at least two classes."""
    return task.problem_type == "classification" and len(task.labels) > 1


def results_of(name: str, group: Group) -> Results:
    """Return an empty collection for the outputs of the reader `name` over the encoded rows of its group."""
    task = group.tasks[name]
    return task.kind.results(task, task.split(group.part), group.inputs)


def plain_metric(task: Task) -> str:
    """Return the metric of controls and selectivity: accuracy if the task has it, else the task's own metric."""
    return "accuracy" if "accuracy" in task.metrics else task.metric


def _score_rows(task: Task, results: Results, control: Results | None) -> list[dict[str, JSON]]:
    """Return the table rows of one probe, from its outputs `results` and those of its control (None: no control).

    The first row is of measure "score". "accuracy" follows if the task has it and its own metric is another. With a
    control, two rows in the metric of `plain_metric` follow: "control" (its score), and "selectivity" (the probe's
    score minus the control's).
    """
    plain = plain_metric(task)
    scores = results.scores(tuple({task.metric: 0, plain: 0}))
    rows: list[dict[str, JSON]] = [{"measure": "score", "metric": task.metric, "score": scores[task.metric]}]
    if plain != task.metric:
        rows.append({"measure": plain, "metric": plain, "score": scores[plain]})
    if control is not None:
        chance = control.scores((plain,))[plain]
        rows.append({"measure": "control", "metric": plain, "score": chance})
        rows.append({"measure": "selectivity", "metric": plain, "score": scores[plain] - chance})
    return rows


def _without_validation(tasks: Mapping[str, Task], split: str) -> dict[str, Task]:
    """Return the tasks with their "train" split. All get the same validation split: a row of the first task's `split`.

    Training requires a validation split, but no epoch of a probe is selected by its score. Only a task's own metric is
    left, and only the first sub-token of a word is learnt.
    """
    first = next(iter(tasks.values())).split(split)
    row = next((row for row, label in enumerate(first.labels) if label != ()), 0)
    validation = first.select_rows([row])
    return {
        name: replace(
            task,
            splits={"train": task.split("train"), "validation": validation},
            metrics=(task.metric,),
            label_all_tokens=False,
        )
        for name, task in tasks.items()
    }


class _OnlineCode:
    """The tasks on which the probes of an online code are trained, and on which they send labels.

    In step i a probe learns the labels of portions 0 to i. Then the labels of portion i + 1 are sent with the
    probabilities that this probe predicts.

    `portions` are the row numbers of each portion of the training rows of `task`; [] if nothing is sent. `train_tasks`
    has a task per step, with labels only in portions 0 to i, and `sent_tasks` one with labels only in portion i + 1.
    """

    def __init__(self, task: Task, portions: Sequence[Sequence[int]]) -> None:
        self._task = task
        self.train_tasks: list[Task] = []
        self.sent_tasks: list[Task] = []
        known: list[int] = []
        for before, sent in pairwise(portions):
            known += before
            self.train_tasks.append(self._with_labels_of(known))
            self.sent_tasks.append(self._with_labels_of(sent))

    def _with_labels_of(self, rows: Sequence[int]) -> Task:
        splits = {**self._task.splits, "train": only_rows(self._task, rows)}
        return replace(self._task, splits=splits, label_all_tokens=False)

    def rows(self, first: int, sent: Sequence[LabelBits]) -> list[dict[str, JSON]]:
        """Return a probe's table rows "code_length" and "compression"; see `code_length` for `first` and `sent`."""
        total, compression = code_length(first, sent, len(self._task.labels))
        return [
            {"measure": "code_length", "metric": "bits", "score": total},
            {"measure": "compression", "metric": "ratio", "score": compression},
        ]
