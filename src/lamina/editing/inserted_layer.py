"""The inserted layer: a linear map that is applied to the output of a projection or convolution.

It is a submodule of the projection that it follows (`...query.inserted_0`), and a forward hook of the projection
applies it. So all other names in the model stay, the model can be copied and pickled, and any training loop finds the
new weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from torch import Tensor, einsum, nn
from torch.nn import functional

from lamina.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jaxtyping import Float

PREFIX = "inserted_"
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": functional.gelu, "relu": functional.relu}
_CONVOLVE: dict[int, Callable[..., Tensor]] = {1: functional.conv1d, 2: functional.conv2d}  # by number of axes
_CONTENT = "_lamina_content"  # attribute that marks hidden states, see `mark_states`
_DEFAULTS = ("gelu", "weight")  # default activation and placement


def is_inserted(name: str) -> bool:
    """Return whether the full parameter name `name` belongs to an inserted layer."""
    return any(part.startswith(PREFIX) for part in name.split("."))


@final
class InsertedLayer(nn.Module):
    """A layer after a projection or convolution. It computes act(W) x or act(W x), per head or over the full width.

    The weight stays in float32 in a model of half precision, because bfloat16 has no number whose gelu is 1.

    Args:
        weight: Weight `[width, width]`, `[heads, width, width]`, or `[channels, channels, kernel...]` after a
            convolution.
        activation: Name of the activation in `ACTIVATIONS`. None: no activation.
        placement: Where the activation is applied: to the "weight" or to the "output".
        content_only: Whether to apply the layer only to hidden states that `mark_states` has marked. Some projections
            are also applied to position embeddings, which must stay unchanged.
        axes: Number of spatial axes of the convolution, 1 or 2; 0 for a linear map.
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
        self.weight = nn.Parameter(weight)
        self.activation, self.placement = activation, placement
        self.content_only, self.axes = content_only, axes
        # the module that holds the projection, and its name there; a tuple, so that it is no submodule of the layer
        self.place: tuple[nn.Module, str] | None = None

    @property
    def fingerprint_facts(self) -> str:
        """The activation and its placement as text, for fingerprints of the model; "" for the defaults."""
        settings = (self.activation, self.placement)
        return "" if settings == _DEFAULTS else repr(settings)

    def applied_weight(self) -> Float[Tensor, "*shape"]:
        """Return the weight that is applied, in its own precision: activated if `placement` is "weight"."""
        return self._activated(self.weight, "weight")

    def _activated(self, values: Tensor, place: str) -> Tensor:
        return values if self.activation is None or self.placement != place else ACTIVATIONS[self.activation](values)

    def forward(self, states: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Apply the layer to a projection's output `[..., width]` or a convolution's output `[batch, channels, ...]`.

        Shape and dtype stay the same. A convolution pads its input with zeros to keep the size.
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
        """Return the text that `print(model)` shows for the layer."""
        return f"{list(self.weight.shape)}, activation={self.activation}, placement={self.placement}"

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> InsertedLayer:
        """Move or convert the layer by `fn`, as `to` and `half` do, but keep the weight in at least float32."""

        def keep_wide(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            is_half = moved.is_floating_point() and moved.element_size() < 4
            return tensor.to(moved.device) if is_half else moved

        super()._apply(keep_wide, recurse)
        return self


def layers_after(projection: nn.Module) -> list[InsertedLayer]:
    """Return the layers that were inserted after a projection, in the order in which they are applied."""
    return [child for child in projection.children() if isinstance(child, InsertedLayer)]


def add_layer_after(projection: nn.Module, layer: InsertedLayer, place: tuple[nn.Module, str]) -> str:
    """Insert a layer after a projection and its earlier inserted layers; return the layer's name in the projection.

    `place` is (the module that holds the projection, the projection's name there). The layer stores it, so that
    `apply_inserted` notices if another library replaces or wraps the projection. The first layer after a projection
    also registers that hook.
    """
    layer.place = place
    before = len(layers_after(projection))
    name = f"{PREFIX}{before}"
    projection.add_module(name, layer)
    if not before:  # first of all hooks, so that later ones see the final output
        projection.register_forward_hook(apply_inserted, prepend=True)
    return name


def remove_layers_after(projection: nn.Module) -> list[str]:
    """Remove all inserted layers after a projection, and the hook; return the layers' names in the projection."""
    names = [name for name, child in projection.named_children() if isinstance(child, InsertedLayer)]
    for name in names:
        delattr(projection, name)
    for key in [key for key, hook in projection._forward_hooks.items() if hook is apply_inserted]:
        del projection._forward_hooks[key]
    return names


def mark_states_of(attention: nn.Module) -> None:
    """Register `mark_states` as a hook of an attention module, unless it is registered already."""
    if mark_states not in attention._forward_pre_hooks.values():
        attention.register_forward_pre_hook(mark_states, with_kwargs=True)


def unmark_states_of(attention: nn.Module) -> None:
    """Remove the hook that `mark_states_of` registered, if there is one."""
    for key in [key for key, hook in attention._forward_pre_hooks.items() if hook is mark_states]:
        del attention._forward_pre_hooks[key]
        attention._forward_pre_hooks_with_kwargs.pop(key, None)


def apply_inserted(projection: nn.Module, args: tuple[object, ...], output: Tensor) -> Tensor:
    """Return `output`, which a projection computed from `args`, after all inserted layers; a forward hook.

    Layers with `content_only` are skipped if `mark_states` has not marked the projection's input.

    Raises:
        ConfigError: If another library has replaced the projection, or wraps it.
    """
    layers = layers_after(projection)
    place = layers[0].place if layers else None
    if not layers or (place is not None and place[0]._modules.get(place[1]) is not projection):
        _check_place(projection, layers)
    for layer in layers:
        if not layer.content_only or hasattr(args[0], _CONTENT):
            output = layer(output)
    return output


def _check_place(projection: nn.Module, layers: list[InsertedLayer]) -> None:
    if not layers:
        kind = f"{type(projection).__module__.split('.')[0]}'s {type(projection).__name__}"
        problem = f"{kind} has replaced a projection, and the layers that were inserted after it are lost"
        raise ConfigError(f"insert_: {problem}. Load the model again, call merge_, and then quantise it.")
    place = layers[0].place
    wrapper = None if place is None else place[0]._modules.get(place[1])
    # a replica of DataParallel is at no place, and no module wraps it
    if place is not None and wrapper is not None and any(part is projection for part in wrapper.modules()):
        library = type(wrapper).__module__.split(".")[0]
        problem = f"{library} wraps the projection '{place[1]}', after which a layer is inserted"
        rule = "merged, the wrapper's change would pass through that layer too, and give another function"
        raise ConfigError(f"insert_: {problem}; {rule}. Call merge_ first, or wrap other modules.")


def mark_states(
    _: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Return an attention's arguments, with the hidden states marked; a forward pre-hook of the attention.

    Hidden states are the first positional argument, `hidden_states` and `query_states`. The mark is an attribute of a
    view of the states, so that it exists only during the call. It tells an inserted layer whether its projection is
    applied to hidden states or to position embeddings.
    """
    marked = {name: _marked(kwargs[name]) for name in ("hidden_states", "query_states") if name in kwargs}
    return tuple(_marked(arg) if position == 0 else arg for position, arg in enumerate(args)), {**kwargs, **marked}


def _marked(states: object) -> object:
    if not isinstance(states, Tensor):
        return states
    view = states.view_as(states)
    setattr(view, _CONTENT, True)
    return view
