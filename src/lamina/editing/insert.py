"""Insert new layers into a model's blocks, or after its convolutions; by default its outputs stay the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Literal, final

import torch
from torch import Tensor, nn

from lamina.editing.editable import check_editable, check_plain, plain_weight, select_blocks, select_convolutions
from lamina.editing.inserted_layer import ACTIVATIONS, InsertedLayer, add_layer_after, mark_states_of
from lamina.editing.record import Edit, draw_seed, names_now, record, recorded
from lamina.errors import ConfigError, UnknownNameError, UnsupportedModelError
from lamina.layers.discovery import default_stack, stacks
from lamina.layers.roles import Attention, Roles, family_of, has_path, head_width_at, modules_at, roles_of
from lamina.layers.selectors import Selector
from lamina.layers.stack import by_path
from lamina.utils import check_types

if TYPE_CHECKING:
    from collections.abc import Iterator

    from jaxtyping import Float
    from transformers import PreTrainedModel

POSITIONS = ("attention", "ffn", "both", "ffn_input", "both_input", "convolution")
_IN_ATTENTION = ("attention", "both", "both_input")
_AFTER_FFN, _BEFORE_FFN = ("ffn", "both"), ("ffn_input", "both_input")
INITS = ("identity", "unit", "xavier", "he", "zero")
PLACEMENTS = ("weight", "output")
KERNEL = 3  # default kernel size of a layer after a convolution
GELU_IS_ONE = 1.1444507183528787  # the c with gelu(c) = c * Phi(c) = 1
RANDOM = ("xavier", "he")  # values of `init` that draw random numbers
_OP = "insert_"


@check_types("insert_")
def insert_(  # noqa: PLR0913 the options of a public entry point
    model: PreTrainedModel,
    position: Literal["attention", "ffn", "both", "ffn_input", "both_input", "convolution"] = "attention",
    layers: Selector = "all",
    *,
    init: Literal["identity", "unit", "xavier", "he", "zero"] = "identity",
    activation: Literal["gelu", "relu"] | None = "gelu",
    placement: Literal["weight", "output"] = "weight",
    stack: str | None = None,
    generator: torch.Generator | None = None,
    kernel: int = KERNEL,
) -> Edit:
    """Insert linear layers A(x) = act(W) x, without bias, into a model's blocks or after its convolutions, in place.

    If an error is raised, the model is unchanged.

    Args:
        model: A transformers model of a family in `lamina.layers.roles` (`ROLES`, or `CONVOLUTIONS` for position
            "convolution").
        position: Where the layers are inserted. "attention": right after the query, key and value projections of self-
            and cross-attention, one matrix per head (also per key and value head, if these are fewer). "ffn": on the
            output of the feed-forward network, before the residual sum, one `[width, width]` matrix. "both":
            "attention" and "ffn". "ffn_input": on the input of the feed-forward network, after its norm, one `[width,
            width]` matrix, in families for which the table of roles names that norm. "both_input": "attention" and
            "ffn_input". "convolution": after every convolution, a convolution over all channels that keeps channels and
            size.
        layers: Layer selector; layer i is block i, from 1, and "all" is every block. With position "convolution" it is
            stage i of a convolutional network, or convolution i, from 1, of a speech model's feature encoder.
        init: Initial weight. "identity": the weight that becomes the identity matrix after the activation. "unit": the
            identity matrix itself. "xavier", "he": normal, for each matrix. "zero". For a convolution the identity is
            the Dirac kernel: the identity matrix in the middle and zeros around it.
        activation: "gelu" (exact), "relu" or None.
        placement: What the activation is applied to: "weight", so that the layer stays linear, or "output", as usual.
        stack: Name of the stack, or "all": `layers` are then selected in every stack. None: the only one, or the
            encoder. The convolutions of a speech model's feature encoder are the stack "feature_encoder".
        generator: Source of the seed for "xavier" and "he". None: torch's global generator.
        kernel: Kernel size, odd, along each axis, of a layer after a convolution. Only layers with kernel 1 can be
            merged. On a GPU convolutions run in TF32 by default, which rounds (`torch.backends.cudnn.allow_tf32`).
            Other positions take only the default.

    Returns:
        The edit, with the names of the new parameters and, for "xavier" and "he", the seed that was drawn.

    Raises:
        ConfigError: If an argument is not valid, or `init` is "identity" with an activation on the output; if layer 0
            is selected, or a layer that shares its weights with one that is not selected; if the stack has no module
            per block; if the model has several towers and none is named; if it cannot be edited (quantised, compiled,
            offloaded, with adapters).
        LayerIndexError: If a layer does not exist.
        UnknownNameError: If the value of an option, or the stack, is unknown.
        UnsupportedModelError: If the family has no row of roles or convolutions, the row does not fit the model, or the
            model's layers cannot be found.

    Source:
        "How to insert additional layers between the middle layers of the pre-trained model", section 3, which uses
        "unit" with gelu on the weight: gelu(I) is 0.84 I. "identity" begins at 1.14 I, whose gelu is I. The paper's
        text puts layers after the feed-forward network ("ffn"), its code for T5 on the network's input ("ffn_input").
        "convolution" is our own.
    """
    # JSON has lists only
    plain = list(layers) if isinstance(layers, Iterable) and not isinstance(layers, str) else layers
    options = Options(position, plain, init, activation, placement, stack, kernel)
    return _insert(model, options, generator=generator)


def replay_insert(model: PreTrainedModel, edit: Edit) -> Edit:
    """Repeat the insertion that `edit` records on a model, in place, with the same random numbers; return the new edit.

    Raises the errors of `insert_` about the model, which is then unchanged.
    """
    return _insert(model, Options(**edit.settings), seed=edit.seed)


@final
@dataclass(frozen=True)
class Options:
    """The arguments `position` to `kernel` of `insert_`, in JSON-ready form. They are checked when an instance is made.

    Raises:
        UnknownNameError: If the value of an option is unknown.
        ConfigError: If `init` is "identity" with an activation on the output, if `kernel` is not odd and positive, or
            if it is set for another position than "convolution".
    """

    position: str
    layers: int | str | list[int]
    init: str
    activation: str | None
    placement: str
    stack: str | None
    kernel: int = KERNEL

    def __post_init__(self) -> None:
        known = {"position": POSITIONS, "init": INITS, "placement": PLACEMENTS, "activation": (*ACTIVATIONS, None)}
        for what, names in known.items():
            got = getattr(self, what)
            if got not in names:
                raise UnknownNameError(op=_OP, got=str(got), known=map(str, names), what=what)
        if self.init == "identity" and self.placement == "output" and self.activation is not None:
            problem = f"init is 'identity' with {self.activation} on the output; no weight undoes an activation there"
            raise ConfigError(f"{_OP}: {problem}. Use placement='weight', activation=None, or init='unit'.")
        if type(self.kernel) is not int or self.kernel < 1 or self.kernel % 2 == 0:
            raise ConfigError(f"{_OP}: kernel is {self.kernel}; it must be odd, to have a middle. Use 1, 3 or 5.")
        if self.position != "convolution" and self.kernel != KERNEL:
            problem = f"kernel is {self.kernel} and position is '{self.position}'"
            rule = "only layers after convolutions have a kernel"
            raise ConfigError(f"{_OP}: {problem}; {rule}. Use position='convolution'.")


@dataclass(frozen=True, eq=False)
class _Site:
    """A place for an inserted layer: the projection, convolution or norm that the layer follows.

    Attributes:
        path: Its path in the model; `projection` is the module there.
        shape: Shape of the new weight.
        attention: The attention around it, if that also projects position embeddings with it; else None.
        axes: Number of axes that a convolution runs over; 0 for a linear map.
    """

    path: str
    projection: nn.Module
    shape: tuple[int, ...]
    attention: nn.Module | None = None
    axes: int = 0


def _insert(
    model: PreTrainedModel, options: Options, *, generator: torch.Generator | None = None, seed: int | None = None
) -> Edit:
    """Insert layers into a model, in place, by the checked options; return the edit.

    `seed` seeds random weights. None: it is drawn from `generator` (None: torch's global generator) if it is needed.
    Raises the errors of `insert_` about the model before anything is changed.
    """
    check_editable(model, _OP)
    stack, chosen, sites = _plan(model, options)
    if seed is None and options.init in RANDOM:
        seed = draw_seed(generator)
    rng = None if seed is None else torch.Generator().manual_seed(seed)
    templates = [next(site.projection.parameters(recurse=False)) for site in sites]
    pairs = zip(sites, templates, strict=True)
    weights = [_new_weight(options, site.shape, site.axes, template, rng) for site, template in pairs]
    names: list[str] = []
    for site, weight in zip(sites, weights, strict=True):
        content_only = site.attention is not None
        layer = InsertedLayer(weight, options.activation, options.placement, content_only=content_only, axes=site.axes)
        layer.train(site.projection.training)
        if site.attention is not None:
            mark_states_of(site.attention)
        parent, _, name = site.path.rpartition(".")
        added = add_layer_after(site.projection, layer, (model.get_submodule(parent), name))
        names.append(f"{site.path}.{added}.weight")
    settings = asdict(options)
    if options.position != "convolution":  # no kernel there
        del settings["kernel"]
    return record(model, Edit("insert", stack, tuple(chosen), tuple(names), settings, seed))


def _plan(model: PreTrainedModel, options: Options) -> tuple[str, list[int], list[_Site]]:
    """Return what the options select: the stack's name (or "all"), the layers, ascending, and the places.

    Raises the errors of `insert_` about the model, except those of `check_editable`.
    """
    if options.position == "convolution":
        name, chosen, convolutions = select_convolutions(model, options.layers, options.stack, _OP)
        return name, chosen, [_convolution_site(model, *item, options.kernel) for item in convolutions.items()]
    roles = roles_of(model, op=_OP)
    default = default_stack(model).name if options.stack is None else options.stack
    names = list(stacks(model)) if default == "all" else [default]
    paths = {module: path for path, module in by_path(model).items()}
    numbers: set[int] = set()
    sites: dict[nn.Module, _Site] = {}
    for name in names:
        stack, chosen = select_blocks(model, options.layers, name, _OP)
        numbers.update(chosen)
        for layer in chosen:
            for site in _block_sites(model, roles, stack.blocks[layer - 1], options.position, paths):
                sites.setdefault(site.projection, site)  # one module may serve several blocks
    return default, sorted(numbers), list(sites.values())


def _convolution_site(model: nn.Module, path: str, convolution: nn.Module, kernel: int) -> _Site:
    """Return the place for a new convolution of size `kernel`, after `convolution`, which is at `path` of the model.

    Raises UnsupportedModelError if that is not a plain convolution.
    """
    weight = plain_weight(model, path, convolution, _OP, convolution=True)
    axes = weight.ndim - 2
    return _Site(path, convolution, (*[len(weight)] * 2, *[kernel] * axes), axes=axes)


def _block_sites(
    model: nn.Module, roles: Roles, block: nn.Module, position: str, paths: dict[nn.Module, str]
) -> Iterator[_Site]:
    """Yield the places in a block of the model at which layers are inserted for the option `position`.

    `roles` is the family's row in the table of roles, and `paths` is module -> path. Raises UnsupportedModelError if
    the row does not fit the block, or names no norm before the feed-forward network although `position` needs it.
    """
    if position in _IN_ATTENTION:
        yield from _attention_sites(model, roles.attention, block, paths)
        if roles.cross is not None and has_path(block, roles.cross.query):
            yield from _attention_sites(model, roles.cross, block, paths)
    if position in _AFTER_FFN:
        for projection in modules_at(block, roles.ffn_out, family=family_of(model), op=_OP):
            path = paths[projection]
            yield _Site(path, projection, (len(plain_weight(model, path, projection, _OP)),) * 2)
    if position in _BEFORE_FFN:
        family = family_of(model)
        if roles.ffn_norm is None:
            reason = f"position is '{position}', and its row names no norm before the feed-forward network"
            hint = "Use position='ffn', or give the row ffn_norm with lamina.layers.roles.add."
            raise UnsupportedModelError(op=_OP, model_type=family, reason=reason, hint=hint)
        for norm in modules_at(block, roles.ffn_norm, family=family, op=_OP):
            check_plain(model, paths[norm], norm, _OP)
            yield _Site(paths[norm], norm, (len(norm.get_parameter("weight")),) * 2)


def _attention_sites(
    model: nn.Module, attention: Attention, block: nn.Module, paths: dict[nn.Module, str]
) -> Iterator[_Site]:
    """Yield the places after the query, key and value projections of one attention of a block; see `_block_sites`.

    Raises UnsupportedModelError if the block lacks a path of `attention`, or heads do not divide a projection's output.
    """
    family = family_of(model)
    width = head_width_at(block, attention.head_width, family=family, op=_OP)
    has_positions = all(getattr(model.config, name, False) for name in attention.positions_if)
    for row_path, roles in attention.projections().items():
        owners = modules_at(block, row_path.rpartition(".")[0], family=family, op=_OP)
        for owner, projection in zip(owners, modules_at(block, row_path, family=family, op=_OP), strict=True):
            path = paths[projection]
            heads, rest = divmod(len(plain_weight(model, path, projection, _OP)), width)
            if rest:
                reason = f"'{path}' does not give whole heads of width {width}"
                raise UnsupportedModelError(op=_OP, model_type=family, reason=reason, hint="Correct its row of roles.")
            marked = owner if has_positions and set(roles) & set(attention.positions) else None
            yield _Site(path, projection, (heads, width, width), marked)


def inserted_at_start(model: nn.Module, edit: Edit) -> dict[str, Tensor]:
    """Compute the initial weights of inserted layers of a model again, from `edit`, the record of the insertion.

    Returns:
        Present name of the parameter -> its initial weight, on the CPU, for the layers that are still in the model.

    Raises:
        ConfigError: If none of the inserted layers is in the model any more, for example because they were merged.
    """
    options = Options(**edit.settings)
    modules, made = by_path(model), recorded(model)
    names = names_now(made, made.index(edit)) if edit in made else {name: [name] for name in edit.parameters}
    candidates = {now: modules.get(now.rpartition(".")[0]) for all_now in names.values() for now in all_now}
    layers = {name: layer for name, layer in candidates.items() if isinstance(layer, InsertedLayer)}
    if not layers:
        raise ConfigError(f"{_OP}: none of the layers that were inserted is in the model; they are merged or cut off.")
    # A layer that was cut off still has to be drawn, to reach the same random numbers for the layers after it. It had
    # the shape of those at the same place in other blocks.
    by_place = {_place(name): layer for name, layer in layers.items()}
    rng = None if edit.seed is None else torch.Generator().manual_seed(edit.seed)
    weights: dict[str, Tensor] = {}
    for name, all_now in names.items():  # in the order in which they were drawn
        layer = by_place[_place(name)]
        template = torch.empty(0, dtype=layer.weight.dtype)
        weight = _new_weight(options, tuple(layer.weight.shape), layer.axes, template, rng)
        weights |= {now: weight for now in all_now if now in layers}
    return weights


def _place(name: str) -> str:
    """Return a parameter's name without numbers: the result is equal for the same parameter of all blocks."""
    return ".".join(part for part in name.split(".") if not part.isdecimal())


def _new_weight(
    options: Options, shape: tuple[int, ...], axes: int, template: Tensor, generator: torch.Generator | None
) -> Float[Tensor, "*shape"]:
    """Return an initial weight of the given shape, as `options.init` says, on the device of `template`.

    The dtype is that of `template`, but at least float32. `axes` is the number of spatial axes of a convolution, 0 for
    a linear map. `generator` draws random weights (None: torch's global one).
    """
    dtype = torch.promote_types(template.dtype, torch.float32)
    if options.init not in RANDOM:
        weight = torch.zeros(shape, dtype=dtype, device=template.device)
        if options.init != "zero":
            scale = GELU_IS_ONE if options.init == "identity" and options.activation == "gelu" else 1.0
            eye = torch.eye(shape[1], dtype=dtype, device=template.device)
            weight[(..., *[options.kernel // 2] * axes)] = scale * eye
        return weight
    weight = torch.empty(shape, dtype=dtype, device="meta" if template.is_meta else "cpu")
    per_head = weight.ndim == 3 and not axes
    for part in () if template.is_meta else weight if per_head else [weight]:
        if options.init == "xavier":
            nn.init.xavier_normal_(part, generator=generator)
        else:
            nn.init.kaiming_normal_(part, nonlinearity="relu", generator=generator)
    return weight.to(template.device)
