"""The inserted layer: a small linear map that the output of a projection or a convolution passes through.

It is a child of the projection it follows (`...query.inserted_0`), applied by a forward hook that looks it up there.
So every name the model had stays, copies and pickles of a model work, and any training loop finds the weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from torch import Tensor, einsum, nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jaxtyping import Float

PREFIX = "inserted_"
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": functional.gelu, "relu": functional.relu}
_CONVOLVE: dict[int, Callable[..., Tensor]] = {1: functional.conv1d, 2: functional.conv2d}  # by count of axes
_CONTENT = "_lamina_content"
_USUAL = ("gelu", "weight")  # activation and placement


def is_inserted(name: str) -> bool:
    """Whether the full name of a parameter is that of an inserted layer."""
    return any(part.startswith(PREFIX) for part in name.split("."))


@final
class InsertedLayer(nn.Module):
    """A(x) = act(W) x, or act(W x), per head or over the full width; after a convolution, act(W) is convolved with x.

    The weight stays in float32 in a model of half precision: bfloat16 has no number whose gelu is 1.
    """

    def __init__(
        self,
        weight: Float[Tensor, "*shape"],
        activation: str | None,
        placement: str,
        *,
        content_only: bool = False,
        axes: int = 0,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)  # [width, width]; [heads, width, width]; [channels, channels, kernel...]
        self.activation, self.placement = activation, placement  # what is activated: "weight" or "output"
        self.content_only = content_only  # calls with anything but the block's states are left alone
        self.axes = axes  # that a convolution runs over, 1 or 2; 0 without one

    @property
    def fingerprint_facts(self) -> str:
        """What a base's fingerprint has of the layer beside its weight; nothing of one with the usual settings."""
        own = (self.activation, self.placement)
        return "" if own == _USUAL else repr(own)

    def applied_weight(self) -> Float[Tensor, "*shape"]:
        """The weight as it is applied, in its own precision."""
        return self._activated(self.weight, "weight")

    def _activated(self, values: Tensor, place: str) -> Tensor:
        """The values, through the activation if that is its place."""
        return values if self.activation is None or self.placement != place else ACTIVATIONS[self.activation](values)

    def forward(self, states: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Apply the layer to a projection's `[..., width]` or a convolution's `[batch, channels, ...]`.

        The shape and the precision stay. A convolution has zeros around its input, as many as that takes.
        """
        weight = self.applied_weight().to(states.dtype)
        if self.axes:
            changed = _CONVOLVE[self.axes](states, weight, padding="same")
        elif weight.ndim == 2:
            changed = functional.linear(states, weight)
        else:
            per_head = states.unflatten(-1, weight.shape[:2])
            changed = einsum("...hj,hij->...hi", per_head, weight).flatten(-2)
        return self._activated(changed, "output").to(states.dtype)

    def extra_repr(self) -> str:
        """What `print(model)` shows."""
        return f"{list(self.weight.shape)}, activation={self.activation}, placement={self.placement}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> InsertedLayer:
        def keep_wide(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            is_half = moved.is_floating_point() and moved.element_size() < 4
            return tensor.to(moved.device) if is_half else moved

        super()._apply(keep_wide, recurse)
        return self


def inserted_in(projection: nn.Module) -> list[InsertedLayer]:
    """The layers inserted after a projection, in the order they are applied."""
    return [child for child in projection.children() if isinstance(child, InsertedLayer)]


def all_inserted(model: nn.Module) -> dict[str, nn.Module]:
    """Path -> projection, of all projections that are followed by inserted layers."""
    return {path: module for path, module in model.named_modules() if inserted_in(module)}


def attach(projection: nn.Module, layer: InsertedLayer) -> str:
    """Insert a layer after a projection, and after those inserted there before; returns its name in the projection."""
    before = len(inserted_in(projection))
    name = f"{PREFIX}{before}"
    projection.add_module(name, layer)
    if not before:  # first of the hooks: whoever else looks at this module sees what the model goes on with
        projection.register_forward_hook(apply_inserted, prepend=True)
    return name


def detach(projection: nn.Module) -> list[str]:
    """Remove all layers inserted after a projection, and the hook; returns the names they had in the projection."""
    names = [name for name, child in projection.named_children() if isinstance(child, InsertedLayer)]
    for name in names:
        delattr(projection, name)
    for key in [key for key, hook in projection._forward_hooks.items() if hook is apply_inserted]:
        del projection._forward_hooks[key]
    return names


def mark_content_of(attention: nn.Module) -> None:
    """Make an attention mark the states it is called with, to tell them from position embeddings."""
    if mark_content not in attention._forward_pre_hooks.values():
        attention.register_forward_pre_hook(mark_content, with_kwargs=True)


def apply_inserted(projection: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    """Forward hook of a projection: pass its output through the inserted layers."""
    for layer in inserted_in(projection):
        if not layer.content_only or hasattr(args[0], _CONTENT):
            output = layer(output)
    return output


def mark_content(
    _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Forward pre-hook of an attention: mark a view of the states; nothing is kept between or beside calls."""
    marked = {name: _marked(kwargs[name]) for name in ("hidden_states", "query_states") if name in kwargs}
    return tuple(_marked(arg) if place == 0 else arg for place, arg in enumerate(args)), {**kwargs, **marked}


def _marked(states: Any) -> Any:
    if not isinstance(states, Tensor):
        return states
    view = states.view_as(states)
    setattr(view, _CONTENT, True)
    return view
