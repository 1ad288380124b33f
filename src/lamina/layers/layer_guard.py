"""Check that a model's layers have not changed since a bank was made for it, and record which models have banks."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Protocol, final

from torch import nn

from lamina.errors import ConfigError
from lamina.layers.adapters import active_adapters, has_adapters
from lamina.layers.stack import LayerStack, by_path, children_of
from lamina.layers.wrappers import is_compiled

EDITS = "_lamina_edits"  # attribute of the model with the record of its edits, so that copies carry it too
_HARMLESS = ("freeze", "merge")  # edits that leave what the model computes as it was, up to rounding


class _Edit(Protocol):
    """The part of an `editing.record.Edit` that this module uses."""

    kind: str


@final
class LayerGuard:
    """Remembers the layers of a model, so that `check` can tell within microseconds whether they have changed.

    Args:
        model: The model, of a bank.
        by_name: The model's stacks, from `stacks(model)`.
    """

    def __init__(self, model: nn.Module, by_name: Mapping[str, LayerStack]) -> None:
        paths = {module: path for path, module in by_path(model).items()}
        blocks = {paths[block].rpartition(".")[0] for stack in by_name.values() for block in stack.blocks}
        self._children: dict[str, dict[str, nn.Module]] = {parent: {} for parent in blocks}  # path -> name -> module
        for stack in by_name.values():
            for module in (*stack.blocks, *(point.module for point in stack.points), stack.scope):
                parent, _, name = paths[module].rpartition(".")
                if name:
                    self._children.setdefault(parent, {})[name] = module
        self._block_counts = {path: len(children_of(model.get_submodule(path))) for path in blocks}
        owners = (model, getattr(model, "base_model", model), *(stack.scope for stack in by_name.values()))
        self._edits = {owner: getattr(owner, EDITS, ()) for owner in owners}
        self.compiled = any(map(is_compiled, model.modules()))
        self._adapted: tuple[nn.Module, str] | None = None  # parent and name of the first layer with adapters
        self._active = self._active_adapters(model)

    def check(self, model: nn.Module, op: str) -> None:
        """Raise ConfigError if a block was replaced, added or removed, the model edited, or its adapters switched.

        Edits that do not change the model's outputs (freezing, merging) are allowed.
        """
        change = self._change(model)
        if change is not None:
            raise ConfigError(
                f"{op}: the model's layers are no longer those that were found: {change}. The bank's readers were made "
                "for the old layers; make a new bank for the edited model."
            )

    def _change(self, model: nn.Module) -> str | None:
        """Return how the model has changed since this guard was made, as part of a sentence; None if it has not."""
        for owner, known in self._edits.items():
            edits: tuple[_Edit, ...] = getattr(owner, EDITS, ())
            since = [edit.kind for edit in edits[len(known) :] if edit.kind not in _HARMLESS]
            if since or edits[: len(known)] != known:
                return f"it was edited ({', '.join(since) or 'its record is another'})"
        for path, known in self._children.items():
            try:
                children = children_of(model.get_submodule(path))
            except AttributeError:
                return f"there is no '{path}'"
            for name, module in known.items():
                if children.get(name) is not module:
                    return f"'{path}.{name}' is another module".replace("'.", "'")
            if len(children) != self._block_counts.get(path, len(children)):
                return f"'{path}' has {len(children)} blocks, not {self._block_counts[path]}"
        if (active := self._active_adapters(model)) != self._active:
            was, now = (" and ".join(names) or "none" for names in (self._active, active))
            return f"it computed with the adapters {was}, and does with {now} now"
        return None

    def _active_adapters(self, model: nn.Module) -> tuple[str, ...]:
        """Return the active adapters of a model, read from one layer only, as PEFT switches all layers together."""
        if not any("peft_config" in vars(owner) for owner in self._edits):
            return ()
        if self._adapted is None:
            inside = (
                (module, name)
                for module in model.modules()
                for name, child in module.named_children()
                if has_adapters(child)
            )
            self._adapted = next(inside, None)
        layer = self._adapted and children_of(self._adapted[0]).get(self._adapted[1])
        return active_adapters(layer) if layer is not None and has_adapters(layer) else ()


_banks: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[nn.Module]]] = weakref.WeakKeyDictionary()


def mark_as_read(model: nn.Module, bank: nn.Module) -> None:
    """Record that `bank` reads a model, until the bank is garbage-collected; see `is_read_by_bank`."""
    for module in model.modules():
        if hasattr(module, "base_model_prefix"):  # a transformers model, whole or part of one
            banks = _banks.setdefault(module, [])
            banks.append(weakref.ref(bank, banks.remove))


def is_read_by_bank(model: nn.Module) -> bool:
    """Return whether a bank in memory reads this model, or a model that shares modules with it.

    Such a bank relies on the model's weights not changing.
    """
    return any(_banks.get(module) for module in model.modules())
