"""What every fusion is: a frozen config that builds a module, and a stream that feeds it layer by layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lamina.errors import ConfigError
from lamina.layers.selectors import Selector
from lamina.layers.sites import Site
from lamina.layers.stack import LayerStack
from lamina.utils import check_range

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from transformers import PreTrainedModel


class FusionConfig:
    """Settings of one fusion. Subclasses are frozen dataclasses, most of them with a `layers` selector.

    The fusion names its config, `class MeanFusion(Fusion, config=Mean)`, which sets `module` and `streams`.
    """

    module: ClassVar[type[Fusion]]
    streams: ClassVar[bool] = True  # False: needs every state at once (it has `fuse`), so the bank keeps them
    needs_block_inputs: ClassVar[bool] = False  # True: recorded states are not enough
    site: ClassVar[Site] = "output"  # where in its blocks the stack is read; see `layers.at_site`
    reads_pairs: ClassVar[bool] = False  # True: asks which tokens belong to which of two texts

    def __post_init__(self) -> None:
        if isinstance(layers := getattr(self, "layers", None), list):
            object.__setattr__(self, "layers", tuple(layers))  # as it comes back from a file

    def selector(self) -> Selector:
        """Which layers are read; the `layers` field unless a subclass fixes them."""
        return self.layers  # pyright: ignore[reportAttributeAccessIssue]  a field of most subclasses

    def build(self, layers: int, width: int) -> Fusion:
        """Make the module for `layers` hidden states of size `width`, initialised from torch's global generator."""
        return self.module(self, layers=layers, width=width)

    def build_on(self, model: PreTrainedModel, stack: LayerStack, layers: int) -> Fusion:
        """Make the module for a stack of a model that is at hand; most fusions need only its width."""
        return self.build(layers, stack.width)


class LayerView:
    """One layer's hidden state, its mask (True at real tokens), and the work that several fusions share, done once."""

    def __init__(
        self,
        state: Float[Tensor, "batch tokens width"],
        mask: Bool[Tensor, "batch tokens"],
        segments: Int[Tensor, "batch tokens"] | None = None,
    ) -> None:
        self.state, self.mask = state, mask
        self.segments = mask.int() if segments is None else segments  # 1: of the first text, 2: of the second, 0: none

    @cached_property
    def gelu(self) -> Float[Tensor, "batch tokens width"]:
        """The exact GELU of the state."""
        return F.gelu(self.state)

    @cached_property
    def normed(self) -> Float[Tensor, "batch tokens width"]:
        """The state layer-normed, without affine part."""
        return F.layer_norm(self.state, self.state.shape[-1:])

    @cached_property
    def matches(self) -> Float[Tensor, "batch 8"]:
        """How two texts match, in numbers around 0; see `PairedLayers`."""
        first, second = (self.segments == 1) & self.mask, (self.segments == 2) & self.mask
        directions = F.normalize(self.normed.float(), dim=-1)
        cosines = directions @ directions.mT
        means = [(directions * side.unsqueeze(-1)).sum(1) for side in (first, second)]
        sizes = [side.sum(1) for side in (first, second)]
        one, two = (_best_matches(cosines, side, other) for side, other in ((first, second), (second, first)))
        apart = (sizes[0] - sizes[1]) / (sizes[0] + sizes[1]).clamp(min=1)
        return 4 * (torch.stack([*one, *two, F.cosine_similarity(*means, dim=-1), apart], dim=1) - 0.5)


def _best_matches(
    cosines: Float[Tensor, "batch tokens tokens"],
    side: Bool[Tensor, "batch tokens"],
    other: Bool[Tensor, "batch tokens"],
) -> list[Float[Tensor, " batch"]]:
    """Mean, least and standard deviation of the highest cosine of each token of a side with the other side's."""
    best = cosines.masked_fill(~other.unsqueeze(1), -1).amax(2)
    count = side.sum(1).clamp(min=1)
    mean = (best * side).sum(1) / count
    least = best.masked_fill(~side, 1).amin(1)
    variance = ((best - mean.unsqueeze(1)).square() * side).sum(1) / count
    return [mean, least, (variance + 1e-6).sqrt()]


class Stream(ABC):
    """One pass of one or several fusions over the same layers."""

    @abstractmethod
    def step(self, index: int, view: LayerView) -> None:
        """Take in state number `index` (0 is the lowest of the layers that were selected)."""

    @abstractmethod
    def finish(self, mask: Bool[Tensor, "batch tokens"]) -> list[Float[Tensor, "batch tokens dim"]]:
        """Features of each member, after every active layer was taken in."""


class Fusion(nn.Module, ABC):
    """Hidden states -> features. Calling it on stacked states runs the same stream that a bank runs."""

    generator: torch.Generator | None = None  # source of dropout's random numbers; None is torch's own
    token_wise: ClassVar[bool] = False  # see `is_token_wise`
    stream_of: ClassVar[type[Any] | None] = None  # the class of a `Stream` that takes any number of members

    def __init_subclass__(cls, config: type[FusionConfig] | None = None) -> None:
        super().__init_subclass__()
        if config is not None:
            config.module, config.streams = cls, cls.fuse is Fusion.fuse

    def __init__(self, config: Any, *, layers: int, width: int, dim: int | None = None) -> None:
        super().__init__()
        check_range("fusion", "layers", layers, 1)
        self.config, self.layers, self.width, self.dim = config, layers, width, dim or width

    def stream(self, members: Sequence[Any]) -> Stream:
        """Start a pass for `members`, all of this class and `group`; without `stream_of`, one that ends in `fuse`."""
        return _BufferedStream(self.fuse) if self.stream_of is None else self.stream_of(members)

    def fuse(self, states: dict[int, Tensor], mask: Bool[Tensor, "batch tokens"]) -> Float[Tensor, "batch tokens dim"]:
        """Features of all active states, index -> state, lowest first; for fusions that need them at once."""
        raise NotImplementedError

    def group(self) -> Hashable | None:
        """Fusions of one class on the same layers with equal groups are computed as one operation; None: alone.

        With `stream_of` they are those that have parameters of the same shapes at the same place.
        """
        if self.stream_of is None:
            return None
        return tuple((parameter.shape, parameter.dtype, parameter.device) for parameter in self.parameters())

    def active_layers(self) -> tuple[int, ...]:
        """Indices of the states that can change the features now; the others (and their gradients) may be skipped."""
        return tuple(range(self.layers))

    def is_token_wise(self) -> bool:
        """Whether a token's features come of its own states alone, so that a text may be read piece by piece."""
        return self.token_wise

    def regularization(self, head: nn.Module | None = None) -> Tensor | None:
        """A scalar to add to the loss, or None; `head`, which reads the features, may be regularized too."""
        return None

    def check_head(self, head: nn.Module) -> None:
        """Raise ConfigError if `head` cannot read these features; most can."""

    def on_epoch_end(self, done: float, head: nn.Module) -> bool:
        """Go on to the next stage of training, if there is one; `done` (up to 1) of the epochs are over.

        True if parameters were reset; optimizer state, schedule and best epoch are then reset too.
        """
        return False

    def block_inputs(self, stack: LayerStack) -> AbstractContextManager[None]:
        """Record how a pass calls the blocks of `stack`; only for configs with `needs_block_inputs`."""
        return nullcontext()

    def forward(
        self,
        states: Float[Tensor, "layers batch tokens width"],
        mask: Bool[Tensor, "batch tokens"] | Float[Tensor, "batch tokens"] | None = None,
        segments: Int[Tensor, "batch tokens"] | None = None,
    ) -> Float[Tensor, "batch tokens dim"]:
        """Fuse stacked states into features in the dtype of the parameters.

        Args:
            states: The selected layers' hidden states, lowest layer first; as many and as wide as at build time.
            mask: True (or 1) where a token is real; None: everywhere.
            segments: For fusions of pairs, 1 where a token is of the first text, 2 of the second, 0 of neither; None:
                all are of the first.
        """
        if len(states) != self.layers or states[0].shape[-1] != self.width:
            came = f"got {len(states)} states of width {states[0].shape[-1]}"
            raise ConfigError(f"fusion: {came}; this one was built for {self.layers} of width {self.width}.")
        if mask is None:
            mask = torch.ones(states[0].shape[:2], dtype=torch.bool, device=states[0].device)
        stream, mask = self.stream([self]), mask.bool()
        for index in self.active_layers():
            stream.step(index, LayerView(states[index], mask, segments))
        return stream.finish(mask)[0]


class _BufferedStream(Stream):
    """Keeps every state until the pass ends, for fusions that need them all at once (`streams = False`)."""

    def __init__(self, fuse: Callable[[dict[int, Tensor], Tensor], Tensor]) -> None:
        self._fuse = fuse
        self._states: dict[int, Tensor] = {}

    def step(self, index: int, view: LayerView) -> None:
        self._states[index] = view.state

    def finish(self, mask: Bool[Tensor, "batch tokens"]) -> list[Float[Tensor, "batch tokens dim"]]:
        states, self._states = self._states, {}
        return [self._fuse(states, mask)]


def fed(total: Any) -> Any:
    """What a stream has gathered; ConfigError if it was fed no state."""
    if total is None:
        raise ConfigError("fusion: no state was fed; every active layer must be before finish.")
    return total


class WeightedSum(Stream):
    """`sum_i weight_i * state_i`, with weights `[layers]` for one member, or `[layers, members, 1, 1, width]`."""

    _total: Tensor | None = None  # [members, batch, tokens, width]

    def __init__(self, weights: Tensor) -> None:
        self._weights = (weights.view(-1, 1, 1, 1, 1) if weights.ndim == 1 else weights).unbind(0)

    def step(self, index: int, view: LayerView) -> None:
        """Add one weighted state."""
        weight = self._weights[index]
        self._add(view.state.to(weight.dtype), weight.to(view.state.device))

    def _add(self, state: Float[Tensor, "batch tokens width"], weight: Float[Tensor, "members ..."]) -> None:
        if self._total is None:
            self._total = state * weight
        elif torch.is_grad_enabled():
            self._total = torch.addcmul(self._total, state, weight)
        else:
            self._total.addcmul_(state, weight)

    def finish(self, mask: Bool[Tensor, "batch tokens"]) -> list[Float[Tensor, "batch tokens width"]]:
        """The sums."""
        return list(fed(self._total).unbind(0))


class InputWeighted(Fusion):
    """A fusion that weighs its layers anew for each token, and keeps count of what each layer got."""

    amounts: Tensor  # [layers]; not saved, since it tells what was read, not what was learned
    _counting: ClassVar = Lock()  # held for one addition, so that no thread's count is lost

    def __init__(self, config: Any, *, layers: int, width: int, dim: int | None = None) -> None:
        super().__init__(config, layers=layers, width=width, dim=dim)
        self.register_buffer("amounts", torch.zeros(layers), persistent=False)

    def observe(self, weights: Float[Tensor, "layers batch tokens"], mask: Bool[Tensor, "batch tokens"]) -> None:
        """Count the size of the weights of real tokens; a graph that is exported counts nothing."""
        if torch.compiler.is_exporting():
            return
        seen = weights.detach().float().abs().masked_fill(~mask, 0).sum((1, 2))
        with self._counting:
            self.amounts = self.amounts.to(seen) + seen

    def train(self, mode: bool = True) -> Self:
        """As in torch; a change of mode starts a new count."""
        if mode != self.training:
            self.amounts = torch.zeros_like(self.amounts)
        return super().train(mode)

    def importance(self) -> Float[Tensor, " layers"]:
        """Each layer's part of the absolute weights of real tokens since the mode last changed; equal before any."""
        return shares(self.amounts)


def shares(amounts: Float[Tensor, " layers"]) -> Float[Tensor, " layers"]:
    """Amounts of at least 0, divided by their sum; equal shares where all are 0."""
    total = amounts.sum()
    equal = torch.full_like(amounts, 1 / len(amounts))
    return torch.where(total > 0, amounts / total.clamp(min=torch.finfo(amounts.dtype).tiny), equal)
