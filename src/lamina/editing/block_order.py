"""Put the blocks of a stack in a new order, with some left out or repeated, and adapt the model and its config.

`truncate_`, `keep_`, `drop_` and `duplicate_` use this. Two models without weights, built from the config before and
after, show which attributes of which block depend on its place. A number of the block is set to its new value; anything
else must stay the same, or the edit is refused.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import torch
from torch import nn

from lamina.editing.block_config import CACHE_DEPTH, OVERRIDES, cut_configs, move_alignment_heads
from lamina.editing.editable import check_shared
from lamina.errors import ConfigError, first_line
from lamina.layers.block_moves import is_first, names_after
from lamina.layers.roles import BLOCK_TABLES, FIRST_BLOCK, family_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from transformers import PretrainedConfig, PreTrainedModel

    from lamina.layers import LayerStack
    from lamina.utils import JSON

_PLAIN = (bool, int, float, str, list, tuple, type(None))
_HAND = "It was changed by hand; load it again."
_GENERATING = ("decoder", "main")  # stacks whose blocks the settings for generation may name


@dataclass(frozen=True)
class Rearranged:
    """The result of `rearrange`.

    Attributes:
        path: Path of the module list that holds the blocks; None if one block serves as all layers.
        gone: Names, before the change, of the removed parameters.
        added: Names, after it, of the copied blocks' parameters.
        settings: "order", "path" and perhaps "first", for the record of the edit; see `block_moves.Move`.
    """

    path: str | None
    gone: tuple[str, ...]
    added: tuple[str, ...]
    settings: dict[str, JSON]


def rearrange(model: PreTrainedModel, stack: LayerStack, order: Sequence[int], op: str) -> Rearranged:
    """Put the blocks of a stack in a new order, in place, with some left out or repeated; adapt the configs.

    `order` has the numbers of present blocks, from 1. The first occurrence of a number is the block itself; others are
    copies. If a check fails, the model is unchanged. `op` is the operation, for messages.

    Raises:
        ConfigError: If the family cannot have this order, no setting holds the depth, the shape of another part depends
            on the depth, the blocks are in no list, or no model can be built from the config.
    """
    path = _path_of_blocks(model, stack, op)
    plan = _plan(model, stack, order, path, op)
    now = dict(model.named_parameters(remove_duplicate=False))
    gone = tuple(name for name in now if not plan.renamed(name))
    if path is not None:
        _move_blocks(model, path, plan)
    for name in plan.tables.keys() & now.keys():
        _move_parts(now[name], plan.tables[name], order, stack.depth)
    old, new = dict(plan.before.named_modules()), dict(plan.after.named_modules())
    for name, module in model.named_modules():
        if name in old and name in new and (path is None or not name.startswith(f"{path}.")):
            _copy_changes(module, old[name], new[name])
            for buffer in old[name]._buffers.keys() - new[name]._buffers.keys():
                module._buffers.pop(buffer, None)  # such as the frequencies of a rotary type that no block uses
                module._non_persistent_buffers_set.discard(buffer)
    _rename_ties(model, plan)
    if stack.name in _GENERATING:
        move_alignment_heads(getattr(model, "generation_config", None), order, op)
    copies = tuple(f"{path}.{place}." for place, layer in enumerate(order) if path and layer in order[:place])
    added = tuple(name for name, _ in model.named_parameters() if name.startswith(copies))
    settings: dict[str, JSON] = {"order": list(order), "path": path}
    if plan.first:
        settings["first"] = list(plan.first)
    return Rearranged(path, gone, added, settings)


@dataclass
class _Plan:
    """A planned change of block order.

    Attributes:
        before: The model without weights before the change; `after` is the model after it.
        order: The old number of each new block.
        path: Path of the module list that holds the blocks; None if one block serves as all layers.
        first: Paths, relative to a block, of parts that only the first block has.
        attributes: For each new block what must be set in it; see `_changes`. Empty if `path` is None.
    """

    before: PreTrainedModel
    after: PreTrainedModel
    order: Sequence[int]
    path: str | None
    first: tuple[str, ...] = ()
    attributes: list[dict[str, dict[str, object]]] = field(default_factory=list)

    def renamed(self, name: str) -> list[str]:
        """Return the names of the parameter `name` after the move; several if it is copied, [] if it is removed."""
        return [name] if self.path is None else names_after(name, self.path, self.order, self.first)

    @property
    def tables(self) -> dict[str, int]:
        """Weights outside of the blocks with one part per block: name -> axis of the parts. {} if `path` is None."""
        owner = self.path[: self.path.rfind(".") + 1] if self.path else ""
        return {f"{owner}{name}": axis for name, axis in BLOCK_TABLES.items()} if self.path else {}

    def shape_after(self, name: str, shape: torch.Size, depth: int) -> torch.Size:
        """Return the shape of the parameter `name` after the move; `shape` is that before it.

        Only weights in `tables` change their shape. `depth` is the number of blocks before the move.
        """
        sizes = list(shape)
        if (axis := self.tables.get(name)) is not None:
            sizes[axis] = sizes[axis] * len(self.order) // depth
        return torch.Size(sizes)


class _WrongPlaceError(Exception):
    """Raised if a block cannot work at its new place in the stack; the message says why."""


def _plan(model: PreTrainedModel, stack: LayerStack, order: Sequence[int], path: str | None, op: str) -> _Plan:
    """Check whether a stack's blocks can be put in a new order, and return the plan; nothing is changed yet.

    `order` and `op` are those of `rearrange`, and `path` is what `_path_of_blocks` returns. Raises ConfigError if no
    model can be built from the present config, or no config describes the changed model.
    """
    first = tuple(FIRST_BLOCK.get(family_of(stack.tower or model), ()))
    errors: list[tuple[ConfigError, Exception]] = []
    try:
        before = _build_empty(model, model.config)
    except Exception as error:  # configs and constructors raise many types of errors
        problem = f"no model can be built from the config ({type(error).__name__}: {first_line(error)})"
        raise ConfigError(f"{op}: {problem}. {_HAND}") from error
    owner: object = getattr(stack.tower or stack.scope, "config", None)
    with_head = model.base_model is not model
    for config in cut_configs(model.config, stack.name, stack.depth, order, op, owner=owner, with_head=with_head):
        try:
            plan = _Plan(before, _build_empty(model, config), order, path, first)
        except Exception as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            problem = f"with {len(order)} blocks the config is not consistent ({reason})"
            errors.append((ConfigError(f"{op}: {problem}. Keep other blocks."), error))
            continue
        try:
            plan.attributes = [] if path is None else _changes(plan, stack.depth, path)
            _check_shapes(model, plan, stack.depth)
        except _WrongPlaceError as error:
            errors.append((ConfigError(f"{op}: {error}"), error))
            continue
        return plan
    problem, cause = errors[0]
    raise problem from cause


def _path_of_blocks(model: PreTrainedModel, stack: LayerStack, op: str) -> str | None:
    """Return the path of the module list that holds a stack's blocks; None if one block serves as all layers.

    Raises ConfigError, about the operation `op`, if there is no such list, or only some layers share a block.
    """
    if len(set(stack.blocks)) == 1 < stack.depth:
        return None
    check_shared(stack, [1], op)
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and tuple(module) == stack.blocks:
            return path
    raise ConfigError(f"{op}: the blocks of the {stack.name} stack are in no list of their own, so none can be moved.")


def _build_empty(model: PreTrainedModel, config: PretrainedConfig) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        return type(model)(type(config).from_dict(config.to_dict()))


def _changes(plan: _Plan, depth: int, path: str) -> list[dict[str, dict[str, object]]]:
    """Return for each new block what must be set because of its place: path of a module in it -> name -> value.

    These are attributes and dropout submodules. They come from a comparison of the empty models in `plan`. `depth` is
    the number of blocks before, and `path` the path of their module list.

    Raises:
        _WrongPlaceError: If a block would differ from the old one in more than its number, or a model built from the
            config has another number of blocks.
    """
    try:
        old, new = (list(built.get_submodule(path).children()) for built in (plan.before, plan.after))
    except AttributeError:
        old = new = []
    if (len(old), len(new)) != (depth, len(plan.order)):
        raise _WrongPlaceError(f"a model built from the config has {len(old)} blocks at '{path}', not {depth}. {_HAND}")
    changes: list[dict[str, dict[str, object]]] = []
    for place, layer in enumerate(plan.order):
        was, now = (_parts(block, plan.first) for block in (old[layer - 1], new[place]))
        where = f"block {layer} cannot become block {place + 1}"
        if was.keys() != now.keys():
            part = min(was.keys() ^ now.keys())
            has = f"a block of '{family_of(plan.after)}' {'has' if part in now else 'has no'} '{part}'"
            raise _WrongPlaceError(f"{where}: there {has}, from its config. {_ORDER}")
        found = {name: _differing(was[name], now[name], name, (layer - 1, place), where, plan) for name in now}
        changes.append({name: differing for name, differing in found.items() if differing})
    return changes


_ORDER = "Choose blocks so that each comes to a place of its own kind."


def _parts(block: nn.Module, first: Iterable[str]) -> dict[str, nn.Module]:
    named = block.named_modules()
    return {name: part for name, part in named if not is_first(name, first) and not _is_dropout(name, part)}


def _is_dropout(name: str, module: nn.Module) -> bool:
    """Return whether a module is a dropout without weights, or an `nn.Identity` that stands in place of a dropout.

    An identity counts if `name`, its path in the block, contains "drop".
    """
    is_drop = "drop" in type(module).__name__.lower() or (type(module) is nn.Identity and "drop" in name)
    return is_drop and next(module.parameters(), None) is None


def _facts(module: nn.Module) -> tuple[type, dict[str, object]]:
    """Return the class of a module, and its attributes that are numbers, strings, lists, tuples or None."""
    return type(module), {key: value for key, value in vars(module).items() if isinstance(value, _PLAIN)}


def _differing(
    was: nn.Module, now: nn.Module, name: str, numbers: tuple[int, int], where: str, plan: _Plan
) -> dict[str, object]:
    """Return the attributes and dropout submodules that must be set on a block when it moves to another place.

    `was` is a module of the block at its old place, and `now` the same module at the new place, in the empty models of
    `plan`. `name` is its path in the block ("": the block itself), and `numbers` the block's old and new number, from
    0. `where` begins the error message. The result is name -> value or submodule of `now`, where it differs.

    Raises:
        _WrongPlaceError: If the class differs; or an attribute does that is neither the block's number nor a setting of
            the config or of dropout.
    """
    label = f"'{name}'" if name else "the block"
    if type(was) is not type(now):
        kinds = f"{type(now).__name__}, not {type(was).__name__}"
        raise _WrongPlaceError(f"{where}: there {label} is {kinds}, from the config. {_ORDER}")
    children = dict(was.named_children())
    changes: dict[str, object] = {
        key: child
        for key, child in now.named_children()
        if _is_dropout(f"{name}.{key}", child) and (key not in children or _facts(child) != _facts(children[key]))
    }
    owns_first = any(fnmatchcase(name, pattern.rpartition(".")[0]) for pattern in plan.first)
    for key, value in vars(now).items():
        old = vars(was).get(key)
        if key.startswith("_") or not isinstance(value, (*_PLAIN, dict)) or (value == old and type(value) is not dict):
            continue
        is_number = type(value) is int and type(old) is int and value - old == numbers[1] - numbers[0]
        is_setting = _is_setting(key, value, old, plan)
        fits = _table_fits(key, value, old, numbers) if isinstance(value, dict) else is_number or is_setting
        if fits or "drop" in key or (owns_first and isinstance(value, bool)):
            changes[key] = copy.copy(value)
        else:
            differs = f"is {value}, not {old}" if value != old else f"has the entry of block {numbers[1] + 1}"
            raise _WrongPlaceError(f"{where}: there '{f'{name}.{key}'.lstrip('.')}' {differs}. {_ORDER}")
    return changes


def _is_setting(key: str, value: object, old: object, plan: _Plan) -> bool:
    """Return whether the attribute `key` of a block only repeats a setting of the config, such as a list of all blocks.

    The setting has the attribute's name, or is a list that changed from `old` (the attribute before the move) to
    `value` (after it).
    """
    was, now = vars(plan.before.config), vars(plan.after.config)
    lists = [name for name, setting in now.items() if isinstance(setting, list) and setting == value]
    return (key in now and value == now[key]) or any(was.get(name) == old for name in lists)


def _table_fits(key: str, value: dict[object, object], old: object, numbers: tuple[int, int]) -> bool:
    """Return whether the dict `value`, which a block's attribute `key` has after a move, is correct.

    Before the move, the attribute was `old`. In a module that several blocks share (Zamba 2), a dict with "layer" in
    its name maps a block's number to its adapter: the entry for the new number must equal the old entry for the old
    number. Any other dict must not change. `numbers` are the block's old and new number, from 0.
    """
    if "layer" not in key:
        return value == old
    return isinstance(old, dict) and value.get(numbers[1]) == old.get(numbers[0])


def _check_shapes(model: nn.Module, plan: _Plan, depth: int) -> None:
    """Raise _WrongPlaceError unless the model's parameters, under their new names, have the shapes that are planned.

    Parameters that the user has added or removed are left out; `plan.before` shows which. `depth` is the number of
    blocks before the move.
    """
    named = (built.named_parameters(remove_duplicate=False) for built in (model, plan.before, plan.after))
    now, was, will_be = ({(name, part.shape) for name, part in pairs} for pairs in named)
    known = {new for name, _ in now ^ was for new in plan.renamed(name)}
    staying = {(new, plan.shape_after(name, shape, depth)) for name, shape in now for new in plan.renamed(name)}
    if wrong := sorted({name for name, _ in staying ^ will_be} - known):
        problem = f"the shape of {wrong[0]} depends on the number of blocks"
        raise _WrongPlaceError(f"{problem}. Load the model without that part.")


def _move_blocks(model: PreTrainedModel, path: str, plan: _Plan) -> None:
    """Put a model's blocks, the modules at `path`, in the order of `plan`, and set what changes.

    Repeated blocks are copied. Copies share configs, and modules that several blocks or other parts of the model use.
    Parts that only the first block has go to the new first block.
    """
    holder = model.get_submodule(path)
    old = list(holder.children())
    parts = {name: part for name, part in old[0].named_modules() if name and is_first(name, plan.first)}
    outer = {name: part for name, part in parts.items() if name.rpartition(".")[0] not in parts}
    for name in outer:
        parent, _, child = name.rpartition(".")
        delattr(old[0].get_submodule(parent), child)
    # a copy shares configs, and modules that are registered outside of the blocks too, with the block it is copied from
    values = (value for part in model.modules() for value in vars(part).values())
    shared: dict[int, object] = {id(value): value for value in values if hasattr(value, "to_dict")}
    named = model.named_modules(remove_duplicate=False)
    shared |= {id(module): module for name, module in named if not name.startswith(f"{path}.")}
    uses = Counter(part for block in old for part in (*block.modules(), *block.parameters()))
    shared |= {id(part): part for part, count in uses.items() if count > 1}  # the attention of a Zamba
    new: list[nn.Module] = []
    for layer in plan.order:
        block = old[layer - 1]
        new.append(copy.deepcopy(block, dict(shared)) if block in new else block)
    for name, part in outer.items():
        parent, _, child = name.rpartition(".")
        new[0].get_submodule(parent).add_module(child, part)
    for key in list(holder._modules):
        del holder._modules[key]
    for place, (block, changes) in enumerate(zip(new, plan.attributes, strict=True)):
        holder.add_module(str(place), block)
        _set_attributes(block, changes)


def _move_parts(table: nn.Parameter, axis: int, order: Sequence[int], depth: int) -> None:
    """Give a weight the parts of the blocks in `order` (numbers from 1), in place; drop its gradient.

    Along `axis` it has one part per block: `depth` before, `len(order)` after.
    """
    index = torch.tensor([layer - 1 for layer in order], device=table.device)
    parts = table.data.unflatten(axis, (depth, -1))
    table.data, table.grad = parts.index_select(axis, index).flatten(axis, axis + 1), None


def _set_attributes(block: nn.Module, changes: Mapping[str, Mapping[str, object]]) -> None:
    """Set attributes and dropout submodules in a block: `changes` is path of a module -> attribute -> value.

    Modules that the block lacks are skipped.
    """
    modules = dict(block.named_modules())
    for name, attributes in changes.items():
        for key, value in attributes.items():
            if name not in modules:
                continue
            if isinstance(value, nn.Module):
                modules[name]._modules[key] = copy.deepcopy(value).train(block.training)
            else:
                setattr(modules[name], key, value)


def _rename_ties(model: PreTrainedModel, plan: _Plan) -> None:
    """Update transformers' list of tied weights: rename entries, delete removed weights, add copies that are shared.

    The list is a dict of the model, changed in place; `plan` has the new names of parameters.
    """
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    sources = {name: new[0] for name, source in tied.items() if (new := plan.renamed(source))}
    renamed = {new: source for name, source in sources.items() for new in plan.renamed(name)}
    now = dict(model.named_parameters(remove_duplicate=False))
    planned: dict[str, str] = getattr(plan.after, "all_tied_weights_keys", None) or {}
    ties = {name: source for name, source in planned.items() if name in now and now[name] is now.get(source)}
    tied.clear()
    tied.update({name: source for name, source in renamed.items() if name not in ties.values()} | ties)


# Copying `_non_persistent_buffers_set` from a model without a buffer would make the buffer persistent.
_RECORDS_OF_TORCH = frozenset(vars(nn.Module()))


def _copy_changes(target: object, was: object, now: object) -> None:
    """Copy attributes that depend on the number of blocks to `target`, a module or config, and to its nested configs.

    `was` and `now` are the same module or config before and after the move. Where they differ, integers, lists, tuples
    and sets are copied; also the overrides per block, the names of tied weights and `CACHE_DEPTH`. Attributes in which
    torch keeps its own records of a module are left out.
    """
    for name, value in vars(now).items():
        old = vars(was).get(name)
        if isinstance(now, nn.Module) and name in _RECORDS_OF_TORCH:
            continue
        if hasattr(value, "to_dict") and hasattr(old, "to_dict"):
            if getattr(target, name, None) is not None:
                _copy_changes(getattr(target, name), old, value)
        elif (
            (isinstance(value, int | list | tuple | set) or name in (OVERRIDES, "_tied_weights_keys"))
            and type(old) is type(value)
            and old != value
        ):
            setattr(target, name, copy.copy(value))
        elif name == CACHE_DEPTH and old != value:
            setattr(target, name, value)
    if CACHE_DEPTH in vars(was).keys() - vars(now).keys():
        vars(target).pop(CACHE_DEPTH, None)
