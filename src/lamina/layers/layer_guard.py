"""Whether a model's layers are still those that were found, and whether a bank reads it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, final

from torch import nn

from lamina.errors import ConfigError
from lamina.layers.adapters import active_adapters, has_adapters
from lamina.layers.stack import LayerStack, by_path, children_of
from lamina.layers.wrappers import is_compiled

EDITS = "_lamina_edits"  # an attribute of the model object, so that copies of a model carry the record of its edits
_HARMLESS = ("freeze", "merge")  # edits after which the model computes what it did, up to rounding


@final
class LayerGuard:
    """Tells whether the layers of a model's stacks are still those that were found; a check takes microseconds."""

    def __init__(self, model: nn.Module, by_name: Mapping[str, LayerStack]) -> None:
        paths = {module: path for path, module in by_path(model).items()}
        blocks = {paths[block].rpartition(".")[0] for stack in by_name.values() for block in stack.blocks}
        self._children: dict[str, dict[str, nn.Module]] = {parent: {} for parent in blocks}
        for stack in by_name.values():
            for module in (*stack.blocks, *(point.module for point in stack.points), stack.scope):
                parent, _, name = paths[module].rpartition(".")
                if name:
                    self._children.setdefault(parent, {})[name] = module
        self._lists = {path: len(children_of(model.get_submodule(path))) for path in blocks}
        owners = (model, getattr(model, "base_model", model), *(stack.scope for stack in by_name.values()))
        self._edits = {owner: getattr(owner, EDITS, ()) for owner in owners}
        self.compiled = any(map(is_compiled, model.modules()))
        self._adapted: tuple[nn.Module, str] | None = None  # parent and name of the first layer with adapters
        self._live = self._live_adapters(model)

    def check(self, model: nn.Module, op: str) -> None:
        """Raise ConfigError if a block was replaced, added or taken out, the model edited, or other adapters used.

        Edits that change nothing of what is computed, as freezing and merging, are let pass.
        """
        change = self._change(model)
        if change is not None:
            raise ConfigError(
                f"{op}: the model's layers are no longer those that were found: {change}. Its readers were made for "
                "the layers before; make a new bank for the edited model."
            )

    def _change(self, model: nn.Module) -> str | None:
        for owner, known in self._edits.items():
            done: tuple[Any, ...] = getattr(owner, EDITS, ())
            since = [edit.kind for edit in done[len(known) :] if edit.kind not in _HARMLESS]
            if since or done[: len(known)] != known:
                return f"it was edited ({', '.join(since) or 'its record is another'})"
        for path, known in self._children.items():
            try:
                children = children_of(model.get_submodule(path))
            except AttributeError:
                return f"there is no '{path}'"
            for name, module in known.items():
                if children.get(name) is not module:
                    return f"'{path}.{name}' is another module".replace("'.", "'")
            if len(children) != self._lists.get(path, len(children)):
                return f"'{path}' has {len(children)} blocks, not {self._lists[path]}"
        if (live := self._live_adapters(model)) != self._live:
            was, now = (" and ".join(names) or "none" for names in (self._live, live))
            return f"it computed with the adapters {was}, and does with {now} now"
        return None

    def _live_adapters(self, model: nn.Module) -> tuple[str, ...]:
        """The adapters the model computes with; PEFT switches those of all layers together, so one is looked at."""
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
    """Mark a model as read by a bank, for as long as the bank exists; see `is_read_by_bank`."""
    for module in model.modules():
        if hasattr(module, "base_model_prefix"):  # a transformers model, whole or part of one
            holders = _banks.setdefault(module, [])
            holders.append(weakref.ref(bank, holders.remove))


def is_read_by_bank(model: nn.Module) -> bool:
    """Whether a bank that still exists reads this model, or one around or inside it, and relies on its weights."""
    return any(_banks.get(module) for module in model.modules())
