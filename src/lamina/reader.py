"""Readers: what reads one task, its parameters, and what it says about a batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from lamina.errors import UnknownNameError
from lamina.layers import select
from lamina.seeds import mix

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxtyping import Bool, Float

    from lamina.fusion.base import Fusion, FusionConfig
    from lamina.heads.base import Head, HeadConfig
    from lamina.layers import LayerStack


@final
@dataclass(frozen=True)
class Reader:
    """What reads one task: a fusion, a head, and where they attach.

    Args:
        fusion: Config of the fusion, e.g. `AdaLayers(dim=64)`.
        head: Config of the head, e.g. `SequenceClassification(("no", "yes"))`.
        stack: Which stack is read; None: the only one, or the encoder.
        seed: Seeds the parameters' start and dropout.
    """

    fusion: FusionConfig
    head: HeadConfig
    stack: str | None = None
    seed: int = 0


@final
class ReaderModule(nn.Module):
    """A reader attached to a model: the fusion's and the head's parameters, and what was learned about them.

    Attributes:
        config: The `Reader` it was built from.
        stack: Name of the stack that is read.
        layers: The layers that are read, in the numbers of `hidden_states`.
        info: JSON-ready facts about its training, saved with it.
        step: Training passes so far; with the seed, it fixes dropout's random numbers.
    """

    fusion: Fusion
    head: Head

    def __init__(self, config: Reader, stack: LayerStack) -> None:
        super().__init__()
        self.config, self.stack = config, stack.name
        self.layers = tuple(select(config.fusion.selector(), stack.layers, op="reader"))
        self.info: dict[str, Any] = {}
        self.step = 0
        self._generator: torch.Generator | None = None
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            self.fusion = config.fusion.build(len(self.layers), stack.width)
            self.head = config.head.build(self.fusion.dim)

    def begin(self, device: torch.device) -> None:
        """Start a training pass with this reader's own random numbers."""
        if self._generator is None or self._generator.device != device:
            self._generator = self.fusion.generator = torch.Generator(device)
        self._generator.manual_seed(mix(self.config.seed, self.step, "fusion"))
        self.step += 1

    def logits(self, features: Float[Tensor, "batch tokens dim"], mask: Bool[Tensor, "batch tokens"]) -> Tensor:
        """The head's output; while training, with this reader's own random numbers."""
        if not self.training:
            return self.head(features, mask)
        devices = [features.device] if features.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(mix(self.config.seed, self.step, "head"))
            return self.head(features, mask)

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The head's loss plus the fusion's penalty."""
        loss = self.head.loss(logits, labels.to(logits.device))
        penalty = self.fusion.penalty()
        return loss if penalty is None else loss + penalty

    def importance(self) -> dict[int, float]:
        """Layer -> share, for fusions that mix; empty for those that do not."""
        measure = getattr(self.fusion, "importance", None)
        return {} if measure is None else dict(zip(self.layers, measure().tolist(), strict=True))

    def size(self) -> int:
        """Number of parameters."""
        return sum(parameter.numel() for parameter in self.parameters())


@dataclass
class ReaderOutput:
    """What one reader says about one batch.

    Attributes:
        logits: `[batch, classes]` or `[batch, tokens, classes]`.
        mask: `[batch, tokens]`, True at real tokens.
        loss: Scalar where labels were given, else None.
    """

    logits: Tensor
    mask: Tensor
    loss: Tensor | None = None


@dataclass
class BankOutput:
    """Reader name -> `ReaderOutput`, with the sum of the losses and, if asked for, the model's own output."""

    readers: dict[str, ReaderOutput] = field(default_factory=dict)
    loss: Tensor | None = None
    main: Any = None

    def __getitem__(self, name: str) -> ReaderOutput:
        if name not in self.readers:
            raise UnknownNameError(op="output", got=name, known=self.readers, what="reader")
        return self.readers[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.readers)

    def __len__(self) -> int:
        return len(self.readers)

    def __contains__(self, name: object) -> bool:
        return name in self.readers
