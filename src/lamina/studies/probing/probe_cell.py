"""One seed of one task: probes of all layers, with their controls and codes, trained in the same frozen passes."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar, cast, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lamina.bank import Reader, ReaderBank
from lamina.fusion.base import Fusion, FusionConfig, LayerView, Stream, require_fed
from lamina.heads.base import HeadConfig, ProblemType
from lamina.heads.sequence_classification import SequenceClassification
from lamina.heads.token_classification import TokenClassification
from lamina.layers.preserve import evaluating
from lamina.layers.sites import Site
from lamina.layers.wrappers import unwrapped
from lamina.store import load
from lamina.studies.probing.controls import LabelBits, code_blocks, code_length, control_task, only_rows
from lamina.tasks import kind_of
from lamina.train.groups import groups_of
from lamina.train.options import FitOptions
from lamina.train.scoring import collect
from lamina.train.training_run import open_runner, train
from lamina.utils import check_range

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jaxtyping import Bool, Float
    from transformers import PreTrainedModel

    from lamina.heads.base import Head
    from lamina.tasks.base import Results, Targets
    from lamina.tasks.task import Task
    from lamina.train.groups import Group

MLP = "mlp"
Collected = TypeVar("Collected", bound="Results")


class Place(NamedTuple):
    """What a probe reads, and its kind."""

    layer: int
    site: Site
    probe: str  # "linear" or "mlp"


@dataclass(frozen=True)
class ProbeSettings:
    """What all cells of a probing study have in common; plain data."""

    layers: tuple[int, ...]
    stack: str
    probes: tuple[str, ...]  # "linear", "mlp"
    split: str  # that is scored
    hidden: int  # of the MLP
    rates: Mapping[str, float]  # the highest learning rate of each kind of probe
    controls: bool
    code_length: bool
    training: Mapping[str, Any]  # other options of `fit`, but for the seed
    sites: tuple[Site, ...] = ("output",)

    @property
    def places(self) -> dict[str, Place]:
        """Name -> probe; the embeddings, which have no site within, are read as they are."""
        first: list[tuple[int, Site]] = [(0, "output")]
        reads = first * (0 in self.layers) + [(layer, site) for site in self.sites for layer in self.layers if layer]
        named = {"output": "layer", "attention": "attention", "ffn": "ffn"}
        places = [Place(layer, site, probe) for probe in self.probes for layer, site in reads]
        return {f"{named[place.site]}{place.layer}-{place.probe}": place for place in places}


@final
@dataclass(frozen=True)
class ProbeHead(HeadConfig):
    """The linear map of a probe, for a task of any kind with classes or numbers."""

    labels: Sequence[str]
    kind: str  # pyright: ignore[reportIncompatibleVariableOverride]  that of the task
    problem_type: ProblemType = "classification"
    tags: bool = False  # a label for each token

    def build(self, dim: int) -> Head:
        """Make the module; a text's features come as those of its first token."""
        if self.tags:
            return TokenClassification(self.labels, encoder_layers=0, dropout=0.0).build(dim)
        options: dict[str, Any] = {"pooling": "first", "dropout": 0.0, "problem_type": self.problem_type}
        return SequenceClassification(self.labels, **options).build(dim)


@contextmanager
def probe_bank(
    model: PreTrainedModel,
    processor: Any,
    task: Task,
    readers: Mapping[str, Place],
    how: ProbeSettings,
    seed: int,
) -> Iterator[ReaderBank]:
    """A bank of probes by name; afterwards the model learns and drops out as before."""
    base, tags = unwrapped(model), kind_of(task.kind).tags_words
    learnt = [(parameter, parameter.requires_grad) for parameter in base.parameters()]
    head = ProbeHead(task.labels, task.kind, task.problem_type, tags)  # pyright: ignore[reportArgumentType]
    with evaluating(base):
        bank = ReaderBank(base, processor)
        for name, (layer, site, probe) in readers.items():
            fusion = ProbeLayer(layer, pooled=not tags, hidden=how.hidden if probe == MLP else None, site=site)
            bank.add(name, Reader(fusion, head, stack=how.stack, seed=seed))
        try:
            yield bank
        finally:
            for parameter, flag in learnt:
                parameter.requires_grad_(flag)


class Trained:
    """Probes of a bank that were trained on their tasks, none of them chosen by a score."""

    def __init__(self, bank: ReaderBank, tasks: Mapping[str, Task], options: FitOptions, split: str) -> None:
        self._bank, self._options, self._encodings = bank, options, dict[Any, Any]()
        train(bank, _without_scores(tasks, split), options, op="probe", encodings=self._encodings)

    def run(
        self, tasks: Mapping[str, Task], part: str, make: Callable[[str, Group], Collected]
    ) -> dict[str, Collected]:
        """Run probes over a part of their tasks, into what `make` gives each; none of no tasks."""
        results: dict[str, Collected] = {}
        if tasks:
            subject = open_runner(self._bank, tasks, "probe", None, self._options)
            for group in groups_of(subject, tasks, part, self._options, self._encodings):
                own = {name: make(name, group) for name in group.names}
                collect(subject, group, own, self._options)
                results |= own
        return results


@lru_cache(maxsize=1)
def _loaded(source: str) -> PreTrainedModel:
    return load(source)[0]


def probe_rows(
    model: PreTrainedModel | str, processor: Any, task: Task, how: ProbeSettings, seed: int
) -> list[dict[str, Any]]:
    """The rows of one seed; those of measure "score" have the "guesses" that it is of."""
    probes = how.places
    control = control_task(task, ("train", how.split), seed) if how.controls else None
    blocks = code_blocks(len(task.split("train")), seed) if how.code_length and has_code(task) else []
    codes = _Codes(task, blocks)
    learnt = dict.fromkeys(probes, task)
    learnt |= {f"{name}-control": control for name in probes if control is not None}
    learnt |= {f"{name}-code{number}": part for name in probes for number, part in enumerate(codes.learnt)}
    shapes = {name: probes[name.rpartition("-")[0] if name not in probes else name] for name in learnt}
    rates = {name: how.rates[place.probe] for name, place in shapes.items()}
    own = {"learning_rate": rates, "seed": seed, "keep": "last", "max_grad_norm": 0.0}
    options = FitOptions.of({**how.training, **own}, "probe")
    model = _loaded(model) if isinstance(model, str) else model
    with probe_bank(model, processor, task, shapes, how, seed) as bank:
        trained = Trained(bank, learnt, options, how.split)
        scored = trained.run({name: own for name, own in learnt.items() if "-code" not in name}, how.split, results_of)
        asked = {f"{name}-code{number}": part for name in probes for number, part in enumerate(codes.asked)}
        bits = trained.run(asked, "train", lambda name, group: LabelBits(cast("Targets", group.targets[name])))
    rows: list[dict[str, Any]] = []
    for name, place in probes.items():
        measured = _scores(task, scored[name], scored.get(f"{name}-control"))
        measured[0]["guesses"] = scored[name].guesses()
        if codes.learnt:
            measured += codes.rows([bits[f"{name}-code{number}"].bits for number in range(len(codes.asked))])
        rows += [{**place._asdict(), "rows": len(task.split(how.split)), **row} for row in measured]
    return rows


def has_code(task: Task) -> bool:
    """Whether the labels of a task are classes, which a code can send."""
    return task.problem_type == "classification" and len(task.labels) > 1


def results_of(name: str, group: Group) -> Results:
    """An empty collection of a learner's answers."""
    task = group.tasks[name]
    return kind_of(task.kind).results(task, task.split(group.part), group.inputs)


def plain_metric(task: Task) -> str:
    """What selectivity is measured in: accuracy where the task has it."""
    return "accuracy" if "accuracy" in task.metrics else task.metric


def _scores(task: Task, own: Results, control: Results | None) -> list[dict[str, Any]]:
    plain = plain_metric(task)
    scores = own.scores(tuple({task.metric: 0, plain: 0}))
    rows: list[dict[str, Any]] = [{"measure": "score", "metric": task.metric, "score": scores[task.metric]}]
    if plain != task.metric:
        rows.append({"measure": plain, "metric": plain, "score": scores[plain]})
    if control is not None:
        chance = control.scores((plain,))[plain]
        rows.append({"measure": "control", "metric": plain, "score": chance})
        rows.append({"measure": "selectivity", "metric": plain, "score": scores[plain] - chance})
    return rows


def _without_scores(tasks: Mapping[str, Task], split: str) -> dict[str, Task]:
    """The tasks with one row to validate on: nothing is chosen by scores, and they are taken once, at the end."""
    first = next(iter(tasks.values())).split(split)
    row = next((row for row, label in enumerate(first.labels) if label != ()), 0)
    one = first.select_rows([row])
    own = {"label_all_tokens": False}
    return {
        name: replace(task, splits={"train": task.split("train"), "validation": one}, metrics=(task.metric,), **own)
        for name, task in tasks.items()
    }


class _Codes:
    """The tasks of the online code: of each of its probes the rows that are learnt from, and the block that is sent."""

    def __init__(self, task: Task, blocks: Sequence[Sequence[int]]) -> None:
        self._task, self._blocks = task, blocks
        self.learnt: list[Task] = []
        self.asked: list[Task] = []
        known: list[int] = []
        for before, block in pairwise(blocks):
            known += before
            self.learnt.append(self._only(known))
            self.asked.append(self._only(block))

    def _only(self, rows: Sequence[int]) -> Task:
        splits = {**self._task.splits, "train": only_rows(self._task, rows)}
        return replace(self._task, splits=splits, label_all_tokens=False)

    def rows(self, bits: Sequence[float]) -> list[dict[str, Any]]:
        total, compression = code_length(bits, self._task, self._blocks)
        return [
            {"measure": "code_length", "metric": "bits", "score": total},
            {"measure": "compression", "metric": "ratio", "score": compression},
        ]


@final
@dataclass(frozen=True)
class ProbeLayer(FusionConfig):
    """One layer's states, layer-normed without affine part, so that one learning rate does for all layers.

    Args:
        layer: Which layer.
        pooled: The mean over the real tokens of a text in place of the token's own state.
        hidden: Size of a layer `gelu(W z + b)` before the head, which makes it an MLP; None: the head alone, linear.
        site: "output", the layer's states; "attention" or "ffn", what that part of its block adds to them.
    """

    layer: int
    pooled: bool = True
    hidden: int | None = None
    site: Site = "output"  # pyright: ignore[reportIncompatibleVariableOverride]

    def __post_init__(self) -> None:
        check_range("probe", "hidden", self.hidden, 1)

    @property
    def needs_block_inputs(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether it reads within a block, of which no states are recorded."""
        return self.site != "output"

    def selector(self) -> int:
        """The one layer."""
        return self.layer


class _ProbeStream(Stream):
    """What members read is made once; their hidden layers are one matrix product."""

    def __init__(self, members: Sequence[ProbeLayerFusion]) -> None:
        self._members, self._config = members, members[0].config
        self._state: Tensor | None = None

    def step(self, index: int, view: LayerView) -> None:  # noqa: ARG002
        state = view.normed.float()
        if self._config.pooled:
            weights = view.mask.to(state.dtype) / view.mask.sum(1, keepdim=True)
            state = torch.bmm(weights.unsqueeze(1), state)
        self._state = state

    def finish(self, mask: Bool[Tensor, "batch tokens"]) -> list[Float[Tensor, "batch tokens dim"]]:
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
    """The module of `ProbeLayer`: of an MLP it has `inner`, a linear map."""

    stream_of: ClassVar = _ProbeStream
    inner: nn.Linear

    def __init__(self, config: ProbeLayer, *, layers: int, width: int) -> None:
        super().__init__(config, layers=layers, width=width, dim=config.hidden)
        if config.hidden is not None:
            self.inner = nn.Linear(width, config.hidden)

    def group(self) -> Hashable:
        """Same settings, same place."""
        return (super().group(), self.config.pooled, self.config.hidden, self.config.site)
