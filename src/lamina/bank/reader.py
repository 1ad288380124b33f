"""Readers: what reads one task, its parameters, and what it says about a batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from lamina.errors import ConfigError, UnknownNameError
from lamina.fusion.base import FusionConfig
from lamina.heads import HEADS
from lamina.heads.base import IGNORE, HeadConfig, ReadTask
from lamina.layers import LayerStack, select
from lamina.layers.selectors import ranges
from lamina.utils import check_range, derive_seed, rank, seed_torch

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from transformers import PreTrainedModel


@final
@dataclass(frozen=True)
class Reader:
    """What reads one task: a fusion, a head, and where they attach.

    Args:
        fusion: Config of the fusion, e.g. `AdaLayers(dim=64)`.
        head: Config of the head, e.g. `SequenceClassification(("no", "yes"))`.
        stack: Which stack is read; None: the only one, or the encoder; of a model with towers (CLIP) the one that reads
            what the head is for, texts or images.
        seed: Seeds the parameters' start and dropout.
    """

    fusion: FusionConfig
    head: HeadConfig
    stack: str | None = None
    seed: int = 0

    @classmethod
    def default(cls, task: ReadTask) -> Reader:
        """What to begin with for a task, a `lamina.Task`.

        One whole text: `PooledLayers`. A pair: `PairedLayers`; it asks that the tokenizer puts a token between two
        texts, and `PooledLayers` reads any. Tags: `Concat` to 128 numbers behind one encoder layer.
        recipes/small/default-*.yaml train each beside others.

        Raises:
            ConfigError: If nothing was chosen for tasks of its kind.
        """
        if task.kind not in HEADS.names():
            have = ", ".join(HEADS.names())
            came = f"tasks of kind '{task.kind}' have no readers; those of {have} do"
            raise ConfigError(f"reader: {came}. Fine-tune a model for it with lamina.finetune.")
        return cls(*HEADS.get(task.kind).default(task))

    def __post_init__(self) -> None:
        check_range("reader", "seed", self.seed, 0, (1 << 63) - 1)
        if self.stack == "both" or not isinstance(self.stack, str | None):
            rule = "a reader reads one stack, since the tokens of two are not the same"
            raise ConfigError(f"reader: stack is {self.stack!r}; {rule}. Add one reader per stack: they share a pass.")


@final
class ReaderModule(nn.Module):
    """A reader attached to a model: the fusion's and the head's parameters, and what was learned about them."""

    def __init__(self, config: Reader, stack: LayerStack, model: PreTrainedModel) -> None:
        super().__init__()
        self.config, self.stack = config, stack.name
        self.layers = tuple(select(config.fusion.selector(), stack.layers, op="reader"))
        self.info: dict[str, Any] = {}  # JSON-ready facts about its training, saved with it
        self.step = 0  # training passes so far; with the seed, it fixes dropout's random numbers
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(config.seed)  # parts are made on the CPU; those of GPUs are left alone
            self.fusion = config.fusion.build_on(model, stack, len(self.layers))
            self.head = config.head.build_on(model, self.fusion.dim)
        self.fusion.check_head(self.head)
        self.head.check_reads(model, stack, self.fusion)

    def extra_repr(self) -> str:
        """What it reads and how, for the print of its modules."""
        return f"layers {ranges(self.layers)} of {self.stack}, {self.config.fusion}"

    def seed_dropout(self, device: torch.device) -> None:
        """Start a training pass with this reader's own random numbers; other processes draw others."""
        process = (rank(),) if rank() else ()
        for part, module in (("fusion", self.fusion), ("head", self.head)):
            if module.generator is None or module.generator.device != device:
                module.generator = torch.Generator(device)
            module.generator.manual_seed(derive_seed(self.config.seed, self.step, part, *process))
        self.step += 1

    def logits(
        self, features: Float[Tensor, "batch tokens dim"], mask: Bool[Tensor, "batch tokens"], labels: Tensor | None
    ) -> Tensor:
        """The output of a head that runs alone, of labelled positions only where it can; seeds torch while training."""
        options: dict[str, Tensor] = {}
        if self.head.logits_to_keep and labels is not None:
            options["logits_to_keep"] = (labels != IGNORE).to(features.device)
        with torch.random.fork_rng(devices=[features.device] if features.is_cuda else [], enabled=self.training):
            if self.training:
                seed_torch(derive_seed(self.config.seed, self.step, "head"))
            return self.head(features, mask, **options)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The head's loss plus the fusion's regularization."""
        loss = self.head.loss(logits, labels.to(logits.device))
        regularization = self.fusion.regularization(self.head)
        return loss if regularization is None else loss + regularization

    def on_epoch_end(self, done: float) -> bool:
        """Let the fusion go on to its next stage, with this reader's own random numbers; see `Fusion.on_epoch_end`."""
        devices = {parameter.device for parameter in self.parameters() if parameter.is_cuda}
        with torch.random.fork_rng(devices=devices):
            seed_torch(derive_seed(self.config.seed, "stage"))
            return self.fusion.on_epoch_end(done, self.head)

    def importance(self) -> dict[int, float]:
        """Layer -> share, for fusions that mix; empty for those that do not."""
        measure = getattr(self.fusion, "importance", None)
        return {} if measure is None else dict(zip(self.layers, measure().tolist(), strict=True))

    def restart_importance(self) -> None:
        """Have a fusion that counts what it weighs (`InputWeighted`) begin a new count, as a change of mode does."""
        mode = self.fusion.training
        self.fusion.train(not mode).train(mode)

    def size(self) -> int:
        """Number of parameters."""
        return sum(parameter.numel() for parameter in self.parameters())


@dataclass
class ReaderOutput:
    """What one reader says about one batch."""

    # [batch, classes] or [batch, tokens, classes]; of a vocabulary that was given labels [labelled tokens, classes]
    logits: Tensor
    mask: Tensor  # [batch, tokens], True at real tokens
    loss: Tensor | None = None  # where labels were given
    tokens: Tensor | None = None  # [batch, tokens], the ids, where `generate` was listened to


@dataclass
class BankOutput:
    """Reader name -> `ReaderOutput`, and the model's own output."""

    readers: dict[str, ReaderOutput] = field(default_factory=dict)
    loss: Tensor | None = None  # the sum of the readers'; None without labels
    main: Any = None  # the model's own output, if it was wanted
    unheard: dict[str, str] = field(default_factory=dict)  # under `bank.listen`: why a reader has nothing to say yet

    def clear(self) -> None:
        """Forget everything; under `bank.listen`, the readers then hear the model's next pass."""
        self.readers.clear()
        self.loss = self.main = None

    def __getitem__(self, name: str) -> ReaderOutput:
        if name not in self.readers and name in self.unheard:
            raise ConfigError(f"bank.listen: reader '{name}' heard nothing: {self.unheard[name]}.")
        if name not in self.readers:
            raise UnknownNameError(op="output", got=name, known=self.readers, what="reader")
        return self.readers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.readers)

    def __len__(self) -> int:
        return len(self.readers)

    def __contains__(self, name: object) -> bool:
        return name in self.readers
