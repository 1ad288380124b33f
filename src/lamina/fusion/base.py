"""Base classes of fusions: a frozen config builds a module, and a stream computes modules layer by layer.

A fusion combines the hidden states of several layers into features. A stream is one forward pass that computes several
fusions, its members, over the same layers.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import Field, dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lamina.errors import ConfigError
from lamina.layers.selectors import Selector
from lamina.layers.sites import Site
from lamina.layers.stack import LayerStack
from lamina.utils import check_fields, check_range

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int
    from transformers import PreTrainedModel


T = TypeVar("T")
Generators = Sequence[torch.Generator | None]  # source of dropout's random numbers of each of several readers
# Elements of the states of several layers, up to which a GPU computes these layers in one operation. A fast GPU needs
# about as long for an operation on so many as Python needs to start one.
KEPT_ON_GPU = 1 << 24
_PIECE = 1 << 16  # elements per inner product; the rounding error of a longer one is larger
_LEVELS = 1 << 16  # 16 random bits per element: drawing them takes a quarter of the time of `bernoulli_`


class Range(NamedTuple):
    """The numbers that a setting may have: from `low` to `high`, without `high` itself if `open_high`.

    A setting whose value is None is not checked.
    """

    low: float
    high: float = math.inf
    open_high: bool = False


SIZE, PROBABILITY = Range(1, 1 << 20), Range(0, 1, open_high=True)


def check_settings(op: str, settings: object, ranges: Mapping[str, Range]) -> None:
    """Raise ConfigError, whose message begins with `op`, if a field of a dataclass has a wrong type or is out of range.

    Fields may be stored again in another form; see `lamina.utils.check_fields`. `ranges` is name of a field -> its
    range.
    """
    check_fields(op, settings)
    for name, allowed in ranges.items():
        check_range(op, name, getattr(settings, name), allowed.low, allowed.high, open_high=allowed.open_high)


def fusion_name(config: FusionConfig) -> str:
    """Return a fusion's name in error messages, made from the name of its class: "ada_layers" for `AdaLayers`."""
    return re.sub("(?<=[a-z])(?=[A-Z])", "_", type(config).__name__).lower()


class FusionConfig:
    """The settings of a fusion. Subclasses are frozen dataclasses.

    They have `layers`, a layer selector, or override `selector`. A module class is tied to its config by `class
    MeanFusion(Fusion, config=Mean)`, which sets `module` and `streams` of the config. A field with a value of the wrong
    type, or outside its range, raises ConfigError.

    Attributes:
        module: The class of the module that `build` makes.
        streams: Whether the module processes one layer's state at a time. False: it implements `fuse`, which needs the
            states of all layers at once, so that a bank keeps them during the pass.
        needs_block_inputs: Whether the module needs the arguments of the model's blocks; see `Fusion.block_inputs`.
        site: Where in each block the states are read; see `lamina.layers.sites.at_site`.
        reads_pairs: Whether the fusion needs to know which tokens belong to the first and to the second of two texts.
    """

    _ranges: ClassVar[Mapping[str, Range]] = {}  # name of a field -> the numbers that it may have
    module: ClassVar[type[Fusion]]
    streams: ClassVar[bool] = True
    needs_block_inputs: ClassVar[bool] = False
    site: ClassVar[Site] = "output"
    reads_pairs: ClassVar[bool] = False

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Field[object]]]

    def __post_init__(self) -> None:
        check_settings(fusion_name(self), self, self._ranges)
        if isinstance(layers := getattr(self, "layers", None), list | range):  # JSON has no tuples
            object.__setattr__(self, "layers", tuple(layers))

    @property
    def reads_inside(self) -> bool:
        """Whether the fusion reads inside the model's blocks, so that states after the blocks are not enough for it."""
        return self.needs_block_inputs or self.site != "output"

    def selector(self) -> Selector:
        """Return the selector of the layers that are read: the field `layers`, if a subclass does not override it."""
        return self.layers  # pyright: ignore[reportAttributeAccessIssue]  a field of most subclasses

    def build(self, layers: int, width: int) -> Fusion:
        """Return a new module for `layers` states of size `width`, initialised with torch's global generator.

        Raises ConfigError if the settings do not fit these numbers.
        """
        return self.module(self, layers=layers, width=width)

    def build_on(self, model: PreTrainedModel, stack: LayerStack, layers: int) -> Fusion:
        """Return a new module for `layers` states of a stack of `model`; ConfigError as in `build`.

        By default only the stack's width is used.
        """
        return self.build(layers, stack.width)


@dataclass(eq=False)
class LayerView:
    """The hidden state of one layer, and values computed from it once (GELU, norm) that several fusions share.

    Attributes:
        state: The hidden state; or several layers' states, stacked.
        mask: True at tokens, False at padding.
        segment_ids: 1 at tokens of the first of two texts, 2 at tokens of the second, 0 at others. None: every token
            belongs to the first text.
        is_padded: False if it is known that `mask` is True everywhere. Operations that use the mask are then left out.
    """

    state: Float[Tensor, "*layers batch tokens width"]
    mask: Bool[Tensor, "batch tokens"]
    segment_ids: Int[Tensor, "batch tokens"] | None = None
    is_padded: bool = True

    @classmethod
    def of_text(cls, state: Float[Tensor, "1 tokens width"]) -> Self:
        """Return the view of `state`, one layer's state of a single text without padding."""
        return cls(state, torch.ones(state.shape[:2], dtype=torch.bool, device=state.device))

    @cached_property
    def segments(self) -> Int[Tensor, "batch tokens"]:
        """Return `segment_ids`; if they are None, 1 at every token and 0 at padding."""
        return self.mask.int() if self.segment_ids is None else self.segment_ids

    @cached_property
    def gelu(self) -> Float[Tensor, "*layers batch tokens width"]:
        """Return the exact GELU (not the tanh approximation) of the state."""
        return F.gelu(self.state)

    @cached_property
    def normed(self) -> Float[Tensor, "*layers batch tokens width"]:
        """Return the LayerNorm of the state, without weight and bias."""
        return F.layer_norm(self.state, self.state.shape[-1:])

    @cached_property
    def matches(self) -> Float[Tensor, "*layers batch 8"]:
        """Return 8 numbers per pair of texts that say how well the two texts match; `PairedLayers` lists them.

        Each number m is rescaled to `4 (m - 1/2)`, so that it lies around 0.
        """
        first, second = (self.segments == 1) & self.mask, (self.segments == 2) & self.mask
        directions = F.normalize(self.normed.float(), dim=-1)
        cosines = directions @ directions.mT
        means = [(directions * side.unsqueeze(-1)).sum(-2) for side in (first, second)]
        sizes = [side.sum(1) for side in (first, second)]
        forth, back = (_best_matches(cosines, side, other) for side, other in ((first, second), (second, first)))
        length_gap = (sizes[0] - sizes[1]) / (sizes[0] + sizes[1]).clamp(min=1)
        numbers = torch.broadcast_tensors(*forth, *back, F.cosine_similarity(*means, dim=-1), length_gap)
        return 4 * (torch.stack(numbers, dim=-1) - 0.5)


def _best_matches(
    cosines: Float[Tensor, "*layers batch tokens tokens"],
    side: Bool[Tensor, "batch tokens"],
    other: Bool[Tensor, "batch tokens"],
) -> list[Float[Tensor, "*layers batch"]]:
    """Return how well one text's tokens are matched in the other: mean, minimum and standard deviation over tokens.

    A token's match is its highest cosine similarity with a token of the other text; -1 if the other text is empty.
    `cosines` has the similarity of every pair of tokens. The masks are True at the tokens that are matched (`side`),
    and at those of the other text (`other`). Without tokens to match, the mean is 0, the minimum 1.
    The deviation is at least 0.001.
    """
    best = cosines.masked_fill(~other.unsqueeze(1), -1).amax(-1)
    count = side.sum(1).clamp(min=1)
    mean = (best * side).sum(-1) / count
    least = best.masked_fill(~side, 1).amin(-1)
    variance = ((best - mean.unsqueeze(-1)).square() * side).sum(-1) / count
    return [mean, least, (variance + 1e-6).sqrt()]


def dropout(values: Tensor, p: float, generators: Generators, *, axis: int = 0) -> Tensor:
    """Return `values` after dropout, for several readers that each have a random generator of their own.

    Args:
        values: The values of several readers, one slice per reader along `axis`.
        p: Probability with which an element is set to 0; the remaining ones are scaled up. With 0, `values` is returned
            unchanged.
        generators: One generator per reader. None in place of one: torch's global generator.
        axis: The axis of `values` along which the readers are.
    """
    return values if p == 0 else drop(values, p, draw(values.shape, generators, values.device, axis=axis))


def draw(shape: torch.Size, generators: Generators, device: torch.device, *, axis: int = 0) -> Tensor:
    """Return uniform random signed 16-bit integers of the given shape on `device`, for `drop`.

    Slice i along `axis` comes from `generators[i]`, which must be on `device` too; None there: torch's global
    generator.
    """
    slice_shape = torch.Size((*shape[:axis], *shape[axis + 1 :]))
    count, bits = slice_shape.numel(), []
    for generator in generators:
        words = torch.empty(-(-count // 4), dtype=torch.int64, device=device)  # 4 integers per word, rounded up
        words.random_(-(1 << 63), None, generator=generator)
        bits.append(words.view(torch.int16)[:count].view(slice_shape))
    return torch.stack(bits, dim=axis)


def drop(values: Tensor, p: float, bits: Tensor) -> Tensor:
    """Return `values` after dropout: random elements are set to 0, and the remaining ones are scaled up.

    Args:
        values: The values.
        p: Probability with which an element is set to 0, rounded to a multiple of 1/65,536.
        bits: Random integers from `draw`, of the shape of `values`. They decide which elements are set to 0.
    """
    level = min(round(p * _LEVELS), _LEVELS - 1)
    keep = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    torch.ge(bits, level - _LEVELS // 2, out=keep)  # writes ones and zeros: no conversion
    return values * keep.mul_(_LEVELS / (_LEVELS - level))


class Stream(ABC):
    """One forward pass of several fusions, its members, on the same layers. `Fusion.stream` makes one per pass."""

    @abstractmethod
    def step(self, index: int, view: LayerView) -> None:
        """Process the state of one layer, in `view`.

        `index` is the layer's position among the selected layers, from 0. Calls come in ascending order.
        """

    @abstractmethod
    def finish(
        self, mask: Bool[Tensor, "batch tokens"]
    ) -> Sequence[Float[Tensor, "batch tokens dim"]] | Float[Tensor, "members batch tokens dim"]:
        """Return the features of each member, as one tensor or as a list. `mask` is True at tokens, False at padding.

        It is called once, after `step` was called for every active layer.
        """

    def active_layers(self, members: Sequence[Fusion]) -> Sequence[int]:
        """Return, ascending, the indices among the selected layers on which the features of any member depend."""
        if type(members[0]).active_layers is Fusion.active_layers:
            return range(members[0].layers)
        return sorted({index for member in members for index in member.active_layers()})

    def renewed(self) -> Stream | None:
        """Return a stream of the same members for the next pass, which reuses what was computed from their parameters.

        The parameters must not change between the passes, and gradients must be off. Returns None (the default) if
        there is nothing to reuse; the caller then calls `Fusion.stream` again.
        """
        return None


_FUSION_SETTINGS = ("generator", "token_wise", "stream_of", "shared")  # attributes of the class `Fusion`


class Fusion(nn.Module, ABC):
    """Base class of modules that turn hidden states into features; `FusionConfig.build` makes instances.

    A bank passes it the states of the layers one by one, through a `Stream`. A direct call passes all states, stacked.

    A subclass names its config in the class keyword `config=` (see `FusionConfig`); its constructor takes `config`,
    `layers` and `width`. It sets `stream_of`, overrides `stream`, or implements `fuse`. If it does none of these, a
    pass raises NotImplementedError.

    Args:
        config: The fusion's config. All arguments become attributes.
        layers: Number of layers whose states it gets, at least 1.
        width: Size of each state.
        dim: Size of the features. None: `width`.

    Attributes:
        generator: Source of dropout's random numbers. None: torch's global generator.
        token_wise: What `is_token_wise` returns by default; False if a subclass does not set it.
        stream_of: Class of the stream that computes fusions with equal `group` together. None: `fuse` gets all states
            at once, unless `stream` is overridden.
        shared: Names of the settings that are equal in fusions that are computed together; see `group`.

    Raises:
        ConfigError: If `layers` is below 1, or a submodule is assigned under the name of one of these attributes.
    """

    generator: torch.Generator | None = None
    token_wise: ClassVar[bool] = False
    stream_of: ClassVar[Callable[[Sequence[Any]], Stream] | None] = None
    shared: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, config: type[FusionConfig] | None = None) -> None:
        super().__init_subclass__()
        if config is not None:
            config.module, config.streams = cls, cls.fuse is Fusion.fuse

    def __init__(self, config: Any, *, layers: int, width: int, dim: int | None = None) -> None:  # noqa: ANN401
        super().__init__()
        check_range("fusion", "layers", layers, 1)
        self.config, self.layers, self.width, self.dim = config, layers, width, dim or width

    def __setattr__(self, name: str, value: object) -> None:
        # torch stores a submodule beside the attributes, and Python then finds the attribute of the class instead
        if isinstance(value, nn.Module) and name in _FUSION_SETTINGS:
            problem = f"{type(self).__name__} has a submodule '{name}', which is a setting of every fusion"
            raise ConfigError(f"fusion: {problem}. Give the submodule another name, such as '{name}_layer'.")
        super().__setattr__(name, value)  # pyright: ignore[reportArgumentType]  torch names two types, and takes any

    def stream(self, members: Sequence[Any]) -> Stream:
        """Return a new stream for one pass of `members`: fusions of this class with equal `group`, this one included.

        Without `stream_of`, this fusion is the only member; the stream stores all states and passes them to `fuse` at
        the end.
        """
        stream_class = type(self).stream_of
        return _BufferedStream(self.fuse) if stream_class is None else stream_class(members)

    def fuse(self, states: dict[int, Tensor], mask: Bool[Tensor, "batch tokens"]) -> Float[Tensor, "batch tokens dim"]:
        """Return the features from the states of all active layers. Fusions that need all states at once implement it.

        In other fusions it raises NotImplementedError.

        Args:
            states: Index among the selected layers -> state `[batch, tokens, width]`, lowest layer first. It may be
                emptied.
            mask: True at tokens that are not padding.
        """
        raise NotImplementedError

    def group(self) -> Hashable | None:
        """Return a key: fusions of one class on the same layers with equal keys are computed in one stream.

        None: this fusion is always computed alone. With `stream_of`, the key consists of the mode (training or eval),
        the `shared` settings, and the parameters' shapes, dtypes and devices.
        """
        if self.stream_of is None:
            return None
        # most fusions have no submodules, and their own dict is quicker than `parameters`
        parameters = self.parameters() if self._modules else self._parameters.values()
        shapes = tuple((part.shape, part.dtype, part.device) for part in parameters if part is not None)
        return (self.training, *(getattr(self.config, name) for name in self.shared), *shapes)

    def active_layers(self) -> tuple[int, ...]:
        """Return the indices, among the selected layers, of those on which the features depend now; by default all."""
        return tuple(range(self.layers))

    def is_token_wise(self) -> bool:
        """Return whether a token's features depend on this token's own states only, not on other tokens.

        Such a fusion can read a text token by token, as it is generated.
        """
        return self.token_wise

    def regularization(self, head: nn.Module | None = None) -> Tensor | None:
        """Return a scalar to add to the training loss; None (the default): nothing.

        It may depend on `head`, which reads the features.
        """
        return None

    def check_head(self, head: nn.Module) -> None:
        """Raise ConfigError if `head` cannot read this fusion's features. By default any head can."""

    def on_epoch_end(self, done: float, head: nn.Module) -> bool:
        """Begin the fusion's next training stage, if it trains in stages. Training calls this after each epoch.

        Args:
            done: Finished share of the epochs, up to 1.
            head: The head that reads the features.

        Returns:
            Whether parameters were reset. Training then resets optimizer state, schedule and best epoch too. False by
            default.
        """
        return False

    def contributions(self, states: Sequence[Float[Tensor, "1 tokens width"]]) -> Float[Tensor, "layers tokens"] | None:
        """Return each layer's contribution to the features at each token of one text, `[layers, tokens]`.

        For a weighted sum of states, it is the norm of each summand. Returns None if contributions cannot be measured
        for this fusion. `lamina.studies.contributions` says what is measured for which fusion.

        Args:
            states: The state of each layer that the fusion reads, lowest layer first.
        """
        rows: list[Tensor] = []
        for index, state in enumerate(states):
            stream, view = self.stream([self]), LayerView.of_text(state)
            if not isinstance(stream, WeightedSum):
                return None
            stream.step(index, view)
            rows.append(stream.finish(view.mask)[0][0].float().norm(dim=-1))
        return torch.stack(rows)

    def block_inputs(self, stack: LayerStack) -> AbstractContextManager[None]:
        """Return a context manager that records the arguments with which the model calls each block of `stack`.

        A bank enters it around its passes if the config has `needs_block_inputs`. By default it records nothing.
        """
        return nullcontext()

    def forward(
        self,
        states: Float[Tensor, "layers batch tokens width"],
        mask: Bool[Tensor, "batch tokens"] | Float[Tensor, "batch tokens"] | None = None,
        segments: Int[Tensor, "batch tokens"] | None = None,
    ) -> Float[Tensor, "batch tokens dim"]:
        """Return the features of stacked states, in the dtype of the fusion's parameters and buffers.

        Args:
            states: Hidden states of the selected layers, lowest layer first.
            mask: True (or 1) at tokens, False at padding. None: there is no padding.
            segments: For fusions of two texts: 1 at tokens of the first text, 2 at tokens of the second, 0 at others.
                None: all tokens belong to the first text.

        Raises:
            ConfigError: If the number or the width of the states differs from that for which the module was built.
        """
        if len(states) != self.layers or states[0].shape[-1] != self.width:
            problem = f"got {len(states)} states of width {states[0].shape[-1]}"
            raise ConfigError(f"fusion: {problem}; this one was built for {self.layers} of width {self.width}.")
        if mask is None:
            mask = torch.ones(states[0].shape[:2], dtype=torch.bool, device=states[0].device)
        stream, mask = self.stream([self]), mask.bool()
        for index in self.active_layers():
            stream.step(index, LayerView(states[index], mask, segments))
        return stream.finish(mask)[0]


class _BufferedStream(Stream):
    """The stream of a fusion that needs all states at once: it stores them, and calls `fuse` at the end."""

    def __init__(self, fuse: Callable[[dict[int, Tensor], Tensor], Tensor]) -> None:
        self._fuse = fuse
        self._states: dict[int, Tensor] = {}

    def step(self, index: int, view: LayerView) -> None:
        self._states[index] = view.state

    def finish(self, mask: Bool[Tensor, "batch tokens"]) -> list[Float[Tensor, "batch tokens dim"]]:
        states, self._states = self._states, {}
        return [self._fuse(states, mask)]


def layer_sum(
    weights: Float[Tensor, "members layers"], features: Float[Tensor, "members layers *batch dim"]
) -> Float[Tensor, "members *batch dim"]:
    """Return each member's (fusion's) weighted sum over layers; under autocast in the dtype of the weights."""
    kind = weights.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return (features * weights.view(*weights.shape, *(1,) * (features.ndim - 2))).sum(1)
    return torch.bmm(weights[:, None], features.flatten(2)).view(len(weights), *features.shape[2:])


def is_on_gpu(values: Tensor) -> bool:
    """Return whether a tensor is on a GPU or another accelerator. The meta device stands for a CPU."""
    return values.device.type not in ("cpu", "meta")


def is_full(mask: Bool[Tensor, "batch tokens"]) -> bool:
    """Return whether it is known that `mask` is True everywhere, so that operations on padding can be left out.

    It is never known on a GPU, because reading its values would mean waiting for it, nor while a graph is traced.
    """
    return mask.is_cpu and not torch.compiler.is_compiling() and bool(mask.all())


def nonzero_indices(values: Float[Tensor, " layers"] | Bool[Tensor, " layers"]) -> tuple[int, ...]:
    """Return the indices at which `values` is not 0 or False. On the meta device, which has no values: all indices."""
    return tuple(range(len(values)) if values.is_meta else values.nonzero().flatten().tolist())


def require_fed(total: T | None) -> T:
    """Return a stream's accumulated result `total`; raise ConfigError if it is None, because no state was processed."""
    if total is None:
        raise ConfigError("fusion: no state was fed; feed every active layer before finish.")
    return total


class WeightedSum(Stream):
    """The stream of fusions that compute `sum_i weight_i * state_i` over the layers i.

    Args:
        weights: Weight of each layer: `[layers]` for a single fusion, or `[layers, members, 1, 1, width]` for several
            (the members), with a weight per entry of the state.
    """

    _total: Tensor | None = None  # [members, batch, tokens, width]

    def __init__(self, weights: Tensor) -> None:
        self._weights = (weights.view(-1, 1, 1, 1, 1) if weights.ndim == 1 else weights).unbind(0)

    def step(self, index: int, view: LayerView) -> None:
        """Multiply the state of layer `index` by the layer's weight, and add it to the sum."""
        weight = self._weights[index]
        self._add(view.state.to(weight.dtype), weight.to(view.state.device))

    def _add(self, state: Float[Tensor, "batch tokens width"], weight: Float[Tensor, "members ..."]) -> None:
        """Add `state * weight` to each member's sum, in place unless gradients are recorded."""
        if weight.requires_grad and weight.numel() == 1 and not state.requires_grad:
            self._total = cast("Tensor", _AddFrozen.apply(self._total, state, weight))
        elif self._total is None:
            self._total = state * weight
        elif torch.is_grad_enabled():
            self._total = torch.addcmul(self._total, state, weight)
        else:
            self._total.addcmul_(state, weight)

    def finish(self, mask: Bool[Tensor, "batch tokens"]) -> list[Float[Tensor, "batch tokens width"]]:
        """Return a list with the sum of each member; ConfigError if no state was processed. `mask` is unused."""
        return list(require_fed(self._total).unbind(0))


class _AddFrozen(torch.autograd.Function):
    """`total + state * weight` for a weight with one element, and a state without gradient; `total` may be None.

    On a CPU the gradient of the weight is a sum of inner products. Torch's own is first a product of the size of the
    state, which takes twice as long.
    """

    @staticmethod
    def forward(total: Tensor | None, state: Tensor, weight: Tensor) -> Tensor:
        return state * weight if total is None else torch.addcmul(total, state, weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor | None, Tensor, Tensor], output: Tensor) -> None:  # noqa: ANN401, ARG004
        total, state, weight = inputs
        ctx.save_for_backward(state)
        ctx.first, ctx.shape = total is None, weight.shape

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401  # pyright: ignore
        (state,), (gradient,) = ctx.saved_tensors, grad_outputs
        if state.is_cpu and state.dtype in (torch.float32, torch.float64):
            pieces = zip(state.flatten().split(_PIECE), gradient.flatten().split(_PIECE), strict=True)
            inner = torch.stack([torch.dot(*pair) for pair in pieces]).sum().view(ctx.shape)
        else:
            inner = (state * gradient).sum().view(ctx.shape)
        return None if ctx.first else gradient, None, inner


def normalized(amounts: Float[Tensor, " layers"]) -> Float[Tensor, " layers"]:
    """Return `amounts`, which must not be negative, divided by their sum; equal shares if all of them are 0."""
    total = amounts.sum()
    equal = torch.full_like(amounts, 1 / len(amounts))
    return torch.where(total > 0, amounts / total.clamp(min=torch.finfo(amounts.dtype).tiny), equal)
