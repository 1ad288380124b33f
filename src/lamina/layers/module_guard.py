"""Detect changes of a stack's modules, except in weights: settings, functions, buffers, adapters and config."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import filterfalse
from operator import attrgetter, call, getitem, itemgetter
from typing import TYPE_CHECKING, cast, final

import xxhash
from torch import Tensor, nn

from lamina.layers.adapters import adapter_settings, has_adapters, settings_in_place, without_adapters
from lamina.layers.base_facts import around, is_setting, is_value, modules_around, settings_of
from lamina.layers.preserve import buffers_of, changed_by_passes
from lamina.layers.stack import LayerStack, bytes_of
from lamina.layers.wrappers import unwrapped

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.layers.adapters import PeftLayer

_FORWARD = "forward"
# Attributes of torch's modules that repeat the shapes of their weights.
_SHAPES = frozenset({"in_features", "out_features", "num_embeddings", "embedding_dim", "num_parameters"})
_version: Callable[[Tensor], int] = attrgetter("_version")
_call = cast("Callable[[Callable[[dict[str, object]], object], dict[str, object]], object]", call)
_forward: Callable[[type], object] = attrgetter(_FORWARD)


class _Name(str):
    """The name of a function. Guards hold names, because a copy of a model has functions of its own."""

    __slots__ = ()


@final
class ModuleGuard:
    """Remembers the modules of a stack. `is_same` tells within microseconds whether they are unchanged.

    Some models change themselves when they run. Two such changes are allowed. One is of attributes, modules and buffers
    that a pass of the model is known to change (`changed_by_passes`). The other is a new tensor for a buffer outside
    the state dict, such as a table of positions that grows.
    """

    def __init__(self, model: nn.Module, stack: LayerStack) -> None:
        self._owner = cast("PreTrainedModel", around(model, stack))  # the paths below are paths in it
        modules = modules_around(self._owner, set(stack.run))
        self._modules = {path: unwrapped(module) for path, module in modules}
        self._ignored = {path: changed_by_passes(type(module)) for path, module in self._modules.items()}
        self._remember()

    def _remember(self) -> None:
        self._config, self._adapters = settings_of(self._owner.config), self._adapter_settings()
        self._settings = {path: self._settings_of(path) for path in self._modules}
        self._digests = {key: _digest(tensor) for key, tensor in self._tensors()}
        self._watch()

    def _watch(self) -> None:
        """Record the objects that `is_same` compares."""
        self._kinds = {path: type(module) for path, module in self._modules.items()}
        self._classes = list(dict.fromkeys(self._kinds.values()))
        self._forwards = list(map(_forward, self._classes))
        self._attributes = [vars(module) for module in self._modules.values()]
        self._sizes = list(map(len, self._attributes))
        named = zip(self._settings.values(), self._attributes, strict=True)
        present = ((vars_, [name for name in own if name in vars_]) for own, vars_ in named)
        getters = [(itemgetter(*names), vars_) for vars_, names in present if names]
        self._getters, self._read = [get for get, _ in getters], [vars_ for _, vars_ in getters]
        self._values: list[object] = list(map(_call, self._getters, self._read))
        for _, layer in self._adapted_layers():
            copies = settings_in_place(layer)  # the dicts of a PEFT layer are changed in place
            self._getters.append(get := itemgetter(*copies))
            self._read.append(vars(layer))
            self._values.append(get(copies))
        self._options = dict(vars(self._owner.config))
        self._holders = [buffers_of(self._modules[path]) for path, _ in self._digests]
        self._buffers = [name for _, name in self._digests]
        self._marks = self._buffer_identities()
        self._is_ready = True

    def __getstate__(self) -> dict[str, object]:
        if not self.is_same():  # a table that has grown in a pass is recorded before it is copied
            self.find_change()
        # copied modules have functions and dicts of attributes of their own
        named = {
            path: {name: _name_of(value) if callable(value) else value for name, value in own.items()}
            for path, own in self._settings.items()
        }
        kept = ("_owner", "_modules", "_ignored", "_config", "_adapters", "_digests", "_kinds")
        empty: dict[str, object] = {"_classes": [], "_forwards": [], "_marks": []}
        return {**{name: vars(self)[name] for name in kept}, **empty, "_settings": named, "_is_ready": False}

    def look_again(self) -> None:
        """Make the next comparison check everything, because modules were replaced."""
        self._is_ready = False

    def find_change(self) -> str | None:
        """Return how the modules have changed since they were recorded, as a phrase for a message.

        None if no change counts; the modules are then recorded as they are now.
        """
        if (change := self._first_change()) is None:
            self._remember()
        return change

    def is_same(self) -> bool:
        """Return whether the modules are surely unchanged; if not, `find_change` says whether a change counts.

        This must be fast, because every pass of a bank calls it.
        """
        try:
            return (
                self._is_ready
                and list(map(len, self._attributes)) == self._sizes
                and list(map(_call, self._getters, self._read)) == self._values
                and list(map(type, self._modules.values())) == list(self._kinds.values())
                and list(map(_forward, self._classes)) == self._forwards
                and vars(self._owner.config) == self._options
                and self._buffer_identities() == self._marks
            )
        # an attribute or a buffer was deleted, or is None or a tensor now
        except (KeyError, RuntimeError, TypeError, ValueError):
            return False

    def _buffer_identities(self) -> list[int]:
        """Return the identities, addresses and versions of all buffers, which change if a buffer does."""
        tensors = cast("list[Tensor]", list(map(getitem, self._holders, self._buffers)))
        versions = map(_version, filterfalse(Tensor.is_inference, tensors))  # tensors of inference mode have no version
        return [*map(id, tensors), *map(Tensor.data_ptr, tensors), *versions]

    def _first_change(self) -> str | None:
        """Return the first change that counts, as a phrase for a message; None if none does.

        Modules that passes of the model have replaced are looked up again; those that are gone, or have another class
        now, are forgotten.
        """
        for path, module in list(self._modules.items()):
            if type(module) is not (kind := self._kinds[path]):  # it has the paths of forgotten modules too
                return f"'{path}' is a {type(module).__name__} now, not a {kind.__name__}"
        for path, module in list(self._modules.items()):
            outer = self._outer(path)
            now = None if outer is None else without_adapters(outer)
            if now is not None and type(now) is type(module):
                self._modules[path] = now
            elif self._may_change(path):
                # another thread's pass may find the same change at the same time, and forget the module first
                self._modules.pop(path, None)
                self._settings.pop(path, None)
            else:
                kind = "nothing" if now is None else f"a {type(now).__name__}"
                return f"'{path}' is {kind} now, not a {type(module).__name__}"
        for cls, known in zip(self._classes, self._forwards, strict=True):
            if _forward(cls) is not known:
                return f"{cls.__name__}.forward was replaced"
        changed = next(filter(None, map(self._changed_setting, self._settings)), None)
        return self._changed_config_or_adapter() or changed or self._changed_buffer()

    def _changed_config_or_adapter(self) -> str | None:
        """Return which setting of the config or of an active adapter has changed, as a phrase; None if none has."""
        # a new setting of the config counts only if its class knows it
        kind, config = type(self._owner.config), settings_of(self._owner.config)
        config = {name: value for name, value in config.items() if name in self._config or hasattr(kind, name)}
        both = ((self._config, config, " of its config"), (self._adapters, self._adapter_settings(), ""))
        for known, now, where in both:
            for name in (*known, *now):
                if now.get(name) != known.get(name):
                    return f"{name}{where} is {now.get(name)!r}, not {known.get(name)!r}"
        return None

    def _outer(self, path: str) -> nn.Module | None:
        """Return the module at a path now, unwrapped from compilation but with its adapters; None if there is none."""
        try:
            return unwrapped(self._owner.get_submodule(path))
        except AttributeError:
            return None

    def _adapted_layers(self) -> Iterator[tuple[str, PeftLayer]]:
        for path in self._modules:
            if (layer := self._outer(path)) is not None and has_adapters(layer):
                yield path, layer

    def _adapter_settings(self) -> dict[str, object]:
        """Return the settings of active adapters, as in "scaling of the adapter 'a' of 'layer.0.query'" -> 2.0."""
        settings = ((path, adapter_settings(layer)) for path, layer in self._adapted_layers())
        return {f"{name} of '{path}'": value for path, own in settings for name, value in own.items()}

    def _may_change(self, path: str) -> bool:
        """Return whether passes of the model may replace the module at `path` or one of its parents."""
        parts = path.split(".")
        parents = ((".".join(parts[:count]), part) for count, part in enumerate(parts))
        return any(name in self._ignored.get(parent, ()) for parent, name in parents)

    def _changed_setting(self, path: str) -> str | None:
        """Return which attribute of the module at a path has changed, as a phrase; None if none has."""
        known, now, kind = self._settings[path], self._settings_of(path), type(self._modules[path])
        where = f"'{path}'" if path else "the model"
        # a new attribute counts only if it hides an attribute of the class
        for name in (*known, *(name for name in now if name not in known and hasattr(kind, name))):
            old, new = known.get(name), now.get(name)
            if (_name_of(new) if isinstance(old, _Name) else new) != old:
                if name == _FORWARD or callable(new) or callable(old):
                    return f"{name} of {where} was replaced"
                return f"{name} of {where} is {new!r}, not {old!r}"
        return None

    def _changed_buffer(self) -> str | None:
        """Return a phrase that names a buffer whose values have changed; None if none have.

        A buffer outside the state dict that was replaced by a new tensor does not count.
        """
        ids = dict(zip(self._digests, self._marks, strict=False))
        for (path, name), tensor in self._tensors():
            is_replaced = (path, name) in ids and ids[path, name] != id(tensor)
            if is_replaced and name in vars(self._modules[path])["_non_persistent_buffers_set"]:
                continue
            if (old := self._digests.get((path, name))) is not None and old != _digest(tensor):
                return f"the buffer '{path}.{name}' has other values"
        return None

    def _settings_of(self, path: str) -> dict[str, object]:
        """Return name -> value for attributes that decide what a module computes: numbers, texts, lists and functions.

        None counts in modules of torch, and if the config has a setting of that name. Attributes that passes of the
        model change, and shapes of weights, are left out.
        """
        module, ignored = self._modules[path], self._ignored[path]
        settings: dict[str, object] = {}
        for name, value in vars(module).items():
            if not is_setting(name) or name in _SHAPES or name in ignored or hasattr(nn.Module, name):
                continue
            if isinstance(value, list):
                value = cast("list[object]", value).copy()
            # such as max_norm of nn.Embedding, or sliding_window of attention; other values may be cached in passes
            in_torch = type(module).__module__.startswith("torch.nn.")
            unset = value is None and (in_torch or name in self._config)
            if unset or is_value(value) or callable(value):
                settings[name] = value
        if (forward := _own_forward(module)) is not None:
            settings[_FORWARD] = forward
        return settings

    def _tensors(self) -> Iterator[tuple[tuple[str, str], Tensor]]:
        """Yield ((path, name), buffer) for all buffers, except counters and buffers that passes of the model change."""
        for path, module in self._modules.items():
            for name, buffer in buffers_of(module).items():
                if buffer is None or buffer.is_meta or name in self._ignored[path]:
                    continue
                if buffer.is_floating_point() or buffer.numel() > 1:
                    yield (path, name), buffer


def _own_forward(module: nn.Module) -> object:
    """Return the function that replaces a module's `forward`; None if the module computes as its class does.

    accelerate's and torch's own wrappers around the method do not count.
    """
    attributes = vars(module)
    own = attributes.get("_old_forward" if "_hf_hook" in attributes else _FORWARD)
    own = getattr(own, "_torchdynamo_orig_callable", own)
    is_plain = getattr(own, "__func__", None) is type(module).forward and getattr(own, "__self__", None) is module
    return None if is_plain else own


def _name_of(function: object) -> _Name:
    return _Name(getattr(function, "__qualname__", type(function).__qualname__))


def _digest(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} {xxhash.xxh3_64_hexdigest(bytes_of(tensor))}"
