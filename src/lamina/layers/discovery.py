"""The stacks of a model, found once per model and kept."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast, final

from torch import nn

from lamina.errors import ConfigError, UnknownNameError, UnsupportedModelError
from lamina.layers.isolation import main_device, preserve_model
from lamina.layers.look import UnreadableError, look
from lamina.layers.stack import LayerStack, TapPoint, by_path


def stacks(model: nn.Module) -> dict[str, LayerStack]:
    """Find a model's stacks and where each of their layers is seen.

    The first call runs the model on tiny inputs and leaves it as it was; the result is kept until the model's modules
    change. On the meta device (a config without weights) states are told by identity alone.

    Args:
        model: A transformers model, with or without a head.

    Returns:
        {"main": stack}, or {"encoder": stack, "decoder": stack}.

    Raises:
        UnsupportedModelError: If a layer cannot be found, or cannot be read for certain.
    """
    known = _known.get(model)
    if known is None or not known.holds(model):
        known = _known[model] = _Known.of(model, _look(model))
    return known.stacks(model)


def default_stack(model: nn.Module, name: str | None = None, *, op: str = "stacks") -> LayerStack:
    """Get a stack by name.

    Args:
        model: A transformers model.
        name: Name of the stack; None is the only one, or the encoder.
        op: The operation that asks, named in errors.

    Raises:
        UnknownNameError: If the model has no such stack.
        UnsupportedModelError: If its layers cannot be read.
    """
    found = stacks(model)
    if name is None:
        return found["main"] if "main" in found else found["encoder"]
    if name not in found:
        raise UnknownNameError(op=op, got=name, known=found, what="stack")
    return found[name]


def _look(model: nn.Module) -> dict[str, LayerStack]:
    config: Any = getattr(model, "config", None)
    family = str(getattr(config, "model_type", "") or type(model).__name__)
    if not hasattr(config, "to_dict"):
        reason = "it is no transformers model: it has no config"
        raise UnsupportedModelError(op="stacks", model_type=family, reason=reason, hint="Load it with AutoModel.")
    try:
        with preserve_model(model):
            return look(model)
    except UnreadableError as error:
        raise UnsupportedModelError(op="stacks", model_type=family, reason=error.reason, hint=error.hint) from error


@dataclass(frozen=True, eq=False)
class _Known:
    """What was found, without holding on to the model: modules by path, and what must not have changed since."""

    modules: tuple[weakref.ref[nn.Module], ...]
    settings: tuple[object, ...]
    recipes: tuple[_Recipe, ...]

    @classmethod
    def of(cls, model: nn.Module, found: dict[str, LayerStack]) -> _Known:
        paths = {module: path for path, module in by_path(model).items()}
        recipes = tuple(_Recipe.of(stack, paths) for stack in found.values())
        return cls(tuple(weakref.ref(module) for module in model.modules()), _settings(model), recipes)

    def holds(self, model: nn.Module) -> bool:
        modules = list(model.modules())
        if len(modules) != len(self.modules) or self.settings != _settings(model):
            return False
        return all(known() is module for known, module in zip(self.modules, modules, strict=True))

    def stacks(self, model: nn.Module) -> dict[str, LayerStack]:
        modules = by_path(model)
        return {recipe.name: recipe.build(modules) for recipe in self.recipes}


def _settings(model: nn.Module) -> tuple[object, ...]:
    """What else decides where layers are: whether there are weights, and how many blocks the config uses."""
    config: Any = model.config
    return main_device(model).type == "meta", *(getattr(config, name, None) for name in _DEPTHS)


_DEPTHS = ("num_hidden_layers", "encoder_layers", "decoder_layers", "num_decoder_layers")


@dataclass(frozen=True)
class _Recipe:
    """A stack with paths in place of modules."""

    name: str
    width: int
    blocks: tuple[str, ...]
    points: tuple[tuple[Any, ...], ...]
    scope: str
    run: tuple[str, ...]

    @classmethod
    def of(cls, stack: LayerStack, paths: dict[nn.Module, str]) -> _Recipe:
        points = tuple((each.path, each.side, each.index, each.call, each.calls, each.swap) for each in stack.points)
        blocks, run = (tuple(paths[module] for module in group) for group in (stack.blocks, stack.run))
        return cls(stack.name, stack.width, blocks, points, stack.scope_path, run)

    def build(self, modules: dict[str, nn.Module]) -> LayerStack:
        return LayerStack(
            name=self.name,
            width=self.width,
            blocks=tuple(modules[path] for path in self.blocks),
            points=tuple(TapPoint(modules[path], path, *rest) for path, *rest in self.points),
            scope=modules[self.scope],
            scope_path=self.scope,
            run=tuple(modules[path] for path in self.run),
        )


_known: weakref.WeakKeyDictionary[nn.Module, _Known] = weakref.WeakKeyDictionary()


def same_stacks(model: nn.Module, copy: nn.Module) -> None:
    """Take what was found for a model to hold for a copy of it, so that nobody looks again.

    Args:
        model: The model.
        copy: Has the same modules at the same paths.

    Raises:
        UnsupportedModelError: If the model's layers cannot be read.
    """
    stacks(model)
    _known[copy] = replace(_known[model], modules=tuple(weakref.ref(module) for module in copy.modules()))


EDITS = "_lamina_edits"  # an attribute of the model object, so that copies of a model carry the record of its edits


@final
class LayerGuard:
    """Tells whether a model's layers are still those that were found; a check takes microseconds.

    Args:
        model: The model.
        found: Its stacks.
    """

    def __init__(self, model: nn.Module, found: Mapping[str, LayerStack]) -> None:
        paths = {module: path for path, module in by_path(model).items()}
        blocks = {paths[block].rpartition(".")[0] for stack in found.values() for block in stack.blocks}
        self._children: dict[str, dict[str, nn.Module]] = {parent: {} for parent in blocks}
        for stack in found.values():
            for module in (*stack.blocks, *(point.module for point in stack.points), stack.scope):
                parent, _, name = paths[module].rpartition(".")
                if name:
                    self._children.setdefault(parent, {})[name] = module
        self._lists = {path: len(_children(model.get_submodule(path))) for path in blocks}
        owners = (model, getattr(model, "base_model", model), *(stack.scope for stack in found.values()))
        self._edits = {owner: getattr(owner, EDITS, ()) for owner in owners}

    def check(self, model: nn.Module, op: str) -> None:
        """Compare.

        Args:
            model: The model.
            op: The operation that asks, named in errors.

        Raises:
            ConfigError: If a block was replaced, added or taken out, or an edit was recorded.
        """
        changed = self._change(model)
        if changed is not None:
            raise ConfigError(
                f"{op}: the model's layers are no longer those that were found: {changed}. Its readers were made for "
                "the layers before; make a new bank for the edited model."
            )

    def _change(self, model: nn.Module) -> str | None:
        for owner, known in self._edits.items():
            done: tuple[Any, ...] = getattr(owner, EDITS, ())
            if done is not known:
                return f"it was edited ({', '.join(edit.kind for edit in done[len(known) :]) or 'undone'})"
        for path, known in self._children.items():
            try:
                children = _children(model.get_submodule(path))
            except AttributeError:
                return f"there is no '{path}'"
            for name, module in known.items():
                if children.get(name) is not module:
                    return f"'{path}.{name}' is another module".replace("'.", "'")
            if len(children) != self._lists.get(path, len(children)):
                return f"'{path}' has {len(children)} blocks, not {self._lists[path]}"
        return None


def _children(module: nn.Module) -> dict[str, nn.Module]:
    return dict(cast("Iterable[tuple[str, nn.Module]]", module.named_children()))
