"""Detect changes of a model's layers and weights since a bank was made, and record which models banks read."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any, cast, final

import xxhash
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from lamina.errors import ConfigError
from lamina.layers.adapters import active_adapters, adapted_layers, has_adapters, without_adapters
from lamina.layers.base_facts import StackSettings
from lamina.layers.block_moves import Move
from lamina.layers.discovery import stacks
from lamina.layers.module_guard import ModuleGuard
from lamina.layers.preserve import is_compiled
from lamina.layers.stack import LayerStack, by_path, bytes_of, children_of

EDITS = "_lamina_edits"  # attribute of the model with the record of its edits, so that copies carry it too
_ADAPTERS = "peft_config"  # attribute in which PEFT keeps the adapters of a model
_HARMLESS = ("freeze", "merge")  # edits that leave what the model computes as it was, up to rounding
_Weights = dict[str, nn.Parameter | None]  # a module's own weights by name; None where a module goes without a bias
_values = cast("Callable[[dict[str, Any]], Iterable[Any]]", dict.values)  # pyright: ignore[reportUnknownMemberType]
_get = cast("Callable[[dict[str, object], str], object]", dict.get)  # pyright: ignore[reportUnknownMemberType]
_version: Callable[[Tensor], int] = attrgetter("_version")  # how often a tensor was changed in place


@final
class LayerGuard:
    """Remembers the layers and weights of a model; its methods tell within microseconds whether they have changed.

    `by_name` are the stacks from `stacks(model)`.

    Attributes:
        stacks: The stacks by name, as they were found when this guard was made.
        attributes: `vars(module)` of all modules of the model.
        compiled: Whether a module of the model is compiled.
        weights: Stack name -> guard of the stack's weights.
        modules: Stack name -> guard of everything else that the stack computes with.
        facts: Stack name -> settings, other than weights, on which the stack's states depend. Recorded before any
            pass, because some models change their own modules when they run.
    """

    def __init__(self, model: nn.Module, by_name: Mapping[str, LayerStack]) -> None:
        self.stacks = dict(by_name)
        self._remember(model, by_name)

    def _remember(self, model: nn.Module, by_name: Mapping[str, LayerStack]) -> None:
        """Record the layers and weights of the model as they are now; `by_name` has its stacks."""
        paths = {module: path for path, module in by_path(model).items()}
        blocks = [block for stack in by_name.values() for block in stack.blocks]
        others = [part for stack in by_name.values() for part in (*(p.module for p in stack.points), stack.scope)]
        self._places = {paths[module]: module for module in (*blocks, *others) if paths[module]}
        lists = {paths[block].rpartition(".")[0] for block in blocks}
        self._block_counts = {path: len(children_of(model.get_submodule(path))) for path in lists}
        owners = (model, getattr(model, "base_model", model), *(stack.scope for stack in by_name.values()))
        self._edits = {owner: getattr(owner, EDITS, ()) for owner in owners}
        self.compiled = any(map(is_compiled, model.modules()))
        self._adapted: tuple[nn.Module, str] | None = None  # parent and name of the first layer with adapters
        self._active = self._active_adapters(model)
        self.facts = {name: StackSettings.of(model, stack) for name, stack in by_name.items()}
        self.weights = {name: WeightGuard(model, stack, paths) for name, stack in by_name.items()}
        self.modules = {name: ModuleGuard(model, stack) for name, stack in by_name.items()}
        self._remember_modules(model)

    def _remember_modules(self, model: nn.Module) -> None:
        """Record what `check` compares first, because it is quick: the modules, and marks of edits and adapters."""
        modules = list(model.modules())
        self.attributes = [vars(module) for module in modules]
        self._holders = [children for module in modules if (children := vars(module)["_modules"])]
        self._modules: list[nn.Module | None] = list(chain.from_iterable(map(_values, self._holders)))
        self._owners = [vars(owner) for owner in self._edits]
        self._marks, self._has_adapters = _marks(self._owners), any(_ADAPTERS in own for own in self._owners)

    def __getstate__(self) -> dict[str, object]:
        # a copied module has dicts of its own: `check` finds them anew
        return {**vars(self), "attributes": [], "_holders": [], "_modules": [None], "_owners": []}

    def edits_since(self, model: nn.Module) -> Sequence[Move] | None:
        """Return the model's edits since its layers were recorded; None if its record of earlier edits has changed."""
        known, edits = self._edits[model], tuple(getattr(model, EDITS, ()))
        return edits[len(known) :] if edits[: len(known)] == known else None

    def check(self, model: nn.Module, op: str) -> None:
        """Raise ConfigError if a block was replaced, added or removed, the model edited, or its adapters switched.

        Edits that do not change the model's outputs (freezing, merging) are allowed, and the guard then records the
        model as it is now. Changed weights raise nothing here. `op` is the operation that the message begins with.
        """
        same_modules = list(chain.from_iterable(map(_values, self._holders))) == self._modules
        same_owners = _marks(self._owners) == self._marks
        if same_modules and same_owners and not (self._has_adapters and self._active_adapters(model) != self._active):
            return
        if (change := self._change(model)) is not None:
            rule = "The bank's readers were made for the old layers; make a new bank for it"
            hint = "If layers only moved, call bank.remap_()."
            raise ConfigError(f"{op}: the model's layers are no longer those that were found: {change}. {rule}. {hint}")
        if any(getattr(owner, EDITS, ()) != known for owner, known in self._edits.items()):
            self._remember(model, stacks(model))
            return
        for guard in self.weights.values():  # some models replace modules inside their blocks when they run
            guard.follow(model)
        for guard in self.modules.values():
            guard.look_again()
        self._remember_modules(model)

    def changed_modules(self, model: nn.Module, name: str) -> str | None:
        """Return how the modules of the stack `name` have changed, besides their weights, as a phrase.

        If they have not, they are recorded as they are now, `compiled` is looked up again, and None is returned.
        """
        if (change := self.modules[name].find_change()) is None:
            self.compiled = any(map(is_compiled, model.modules()))
        return change

    def accept(self, model: nn.Module, stack: LayerStack, fingerprint: str) -> None:
        """Record a stack as it is now, with the fingerprint of its weights. Earlier changes no longer count."""
        if not self.modules[stack.name].is_same() and self.changed_modules(model, stack.name) is not None:
            self.modules[stack.name] = ModuleGuard(model, stack)
            self.facts[stack.name] = StackSettings.of(model, stack)
        self.weights[stack.name].accept(model, fingerprint)

    def _change(self, model: nn.Module) -> str | None:
        """Return how the model has changed since this guard was made, as a phrase for a message; None if it has not.

        Edits count, and the number of blocks, the active adapters, and replaced modules if they are blocks, scopes of
        stacks or modules at which a state is read. Changed weights, other replaced modules, and edits that leave the
        outputs as they were (freezing layers, merging inserted layers) do not count.
        """
        for owner, known in self._edits.items():
            edits: tuple[Move, ...] = getattr(owner, EDITS, ())
            if edits == known:
                continue
            since = [edit.kind for edit in edits[len(known) :] if edit.kind not in _HARMLESS]
            if since or edits[: len(known)] != known:
                return f"it was edited ({', '.join(since) or 'its record differs'})"
        now = by_path(model, every_path=True)  # a module may have got a second path, before the known one
        for path, module in self._places.items():
            if (parent := path.rpartition(".")[0]) not in now:
                return f"there is no '{parent}'"
            if now.get(path) is not module:
                return f"'{path}' is another module"
        for path, count in self._block_counts.items():
            if (blocks := len(children_of(now[path]))) != count:
                return f"'{path}' has {blocks} blocks, not {count}"
        return self._changed_adapters(model)

    def _changed_adapters(self, model: nn.Module) -> str | None:
        """Return how the active adapters have changed since this guard was made, as a phrase; None if they have not."""
        if (active := self._active_adapters(model)) == self._active:
            return None
        before, after = (" and ".join(names) or "none" for names in (self._active, active))
        if not active and any(getattr(layer, "merged", False) for layer in adapted_layers(model)):
            return f"it computed with the adapters {before}, which are merged into its weights now"
        return f"it computed with the adapters {before}, and does with {after} now"

    def _active_adapters(self, model: nn.Module) -> tuple[str, ...]:
        """Return the names of a model's active adapters; () if none. One layer is asked: PEFT switches all together."""
        if not any(_ADAPTERS in vars(owner) for owner in self._edits):
            return ()
        if self._adapted is None:
            named = ((module, *item) for module in model.modules() for item in children_of(module).items())
            self._adapted = next(((parent, name) for parent, name, child in named if has_adapters(child)), None)
        layer = self._adapted and children_of(self._adapted[0]).get(self._adapted[1])
        return active_adapters(layer) if layer is not None and has_adapters(layer) else ()


def _marks(owners: Sequence[dict[str, object]]) -> list[object]:
    """Return the edits recorded in each of `owners`, then the adapter configs in each; None where there are none.

    `owners` are `vars(module)` of the model and of parts that may hold such records.
    """
    return [*map(_get, owners, repeat(EDITS)), *map(_get, owners, repeat(_ADAPTERS))]


@final
class WeightGuard:
    """Remembers the weights of a stack. `change` tells within microseconds whether they have changed since then.

    Torch counts the changes of a tensor in place (`_version`). Optimizers with `fused=True` do not count, so the steps
    of all optimizers are observed too. A write through `weight.data` or NumPy is not counted. So each call of `change`
    also compares one number of each weight that lies on the CPU, at one of four places in turn. `is_rewritten` compares
    a checksum of all weights. Offloaded weights are left out, because every pass moves them.

    `paths` is module -> its path in the model.

    Attributes:
        fingerprint: Fingerprint of the stack, as last computed for these weights; None if it never was.
        checksum: Checksum of the weights, as last computed; None if it never was.
    """

    def __init__(self, model: nn.Module, stack: LayerStack, paths: Mapping[nn.Module, str]) -> None:
        self.fingerprint: str | None = None
        self.checksum: str | None = None
        self._reason: str | None = None  # how the weights have changed, as part of a sentence
        owners = [paths[module] for module in stack.run if _own_weights(module)]
        self._remember({path: _own_weights(model.get_submodule(path)) for path in owners})

    def _remember(self, owners: Mapping[str, _Weights]) -> None:
        """Record the weights as they are now. `owners` is path of a module -> weight name -> weight."""
        self._paths, self._owners = list(owners), list(owners.values())
        self._ids: list[int] | None = list(map(id, chain.from_iterable(map(_values, self._owners))))
        named = {f"{path}.{name}": weight for path, own in owners.items() for name, weight in own.items()}
        # quantised weights have no memory of their own, and tensors of inference mode have no version
        self._plain = {n: w for n, w in named.items() if type(w) is nn.Parameter and not w.is_inference()}
        self._names, self._tensors = list(named), list(named.values())
        self._versions = list(map(_version, self._plain.values()))
        self._pointers = list(map(Tensor.data_ptr, self._plain.values()))
        self._kinds = [(weight.dtype, weight.device) for weight in self._plain.values()]
        self._samples = [_samples(self._plain.values(), turn) for turn in range(len(_PLACES))]
        self._sampled = [list(map(_value, samples)) for samples in self._samples]
        self._turn = 0
        _guards.add(self)

    def __getstate__(self) -> dict[str, object]:
        # a copy has weights of its own, which `follow` finds
        kept = {"fingerprint": self.fingerprint, "checksum": self.checksum, "_paths": self._paths}
        return {**kept, "_reason": self.change(), "_ids": None}

    def change(self) -> str | None:
        """Return how the weights have changed since they were recorded, as a phrase; None if they have not.

        A change that was found is returned until `accept` is called. Moving weights to another device is not a change.
        """
        if self._reason is None and self._ids is not None and not self._is_same():
            self._reason = self._find_change()
        return self._reason

    def _is_same(self) -> bool:
        """Return whether no change of the weights is seen. This must be fast, because every pass of a bank calls it."""
        self._turn = turn = (self._turn + 1) % len(_PLACES)
        plain = self._plain.values()
        return (
            list(map(_version, plain)) == self._versions
            and list(map(Tensor.data_ptr, plain)) == self._pointers
            and sum(map(len, self._owners)) == len(self._tensors)
            and all(map(is_, chain.from_iterable(map(_values, self._owners)), self._tensors))
            # last, because it reads from addresses, at which the weights must still be
            and list(map(_value, self._samples[turn])) == self._sampled[turn]
        )

    def _find_change(self) -> str | None:
        """Return the first change of the weights, as a phrase for a message; None if there is none.

        If the weights were only moved to another device, their new place is recorded, and None is returned.
        """
        now = list(map(id, chain.from_iterable(map(_values, self._owners))))
        if now != self._ids:
            name = next((n for n, old, new in zip(self._names, self._ids or (), now, strict=False) if old != new), "")
            return f"'{name or self._paths[-1]}' is another tensor"
        before = zip(self._versions, self._pointers, self._kinds, strict=True)
        for (name, weight), (version, pointer, (dtype, device)) in zip(self._plain.items(), before, strict=True):
            if weight.dtype != dtype:
                return f"'{name}' is {weight.dtype} now, not {dtype}"
            if _version(weight) != version or (weight.data_ptr() != pointer and weight.device == device):
                return f"'{name}' has other values"
        in_place = list(map(Tensor.data_ptr, self._plain.values())) == self._pointers
        if in_place and [list(map(_value, samples)) for samples in self._samples] != self._sampled:
            return "some weights have other values"
        self._remember(dict(zip(self._paths, self._owners, strict=True)))
        return None

    def note_step(self, stepped: set[int]) -> None:
        """Record that an optimizer has changed the tensors with these ids. Ids that are not the stack's are ignored."""
        name = next((name for name, weight in self._plain.items() if id(weight) in stepped), None)
        if name is not None:
            self._reason = self._reason or f"an optimizer has changed '{name}'"

    def seal(self) -> None:
        """Compute the checksum of the weights, to which `is_rewritten` compares them, unless there is one already."""
        self.checksum = self.checksum or _checksum(self._plain)

    def is_rewritten(self) -> bool:
        """Read all weights, and return whether their checksum is another than the one of `seal` or `accept`.

        False if there is none, and in a new copy, which has no weights yet.
        """
        return self.checksum is not None and self._ids is not None and self.checksum != _checksum(self._plain)

    def accept(self, model: nn.Module, fingerprint: str) -> None:
        """Record the weights of the model as they are now, and their fingerprint. Earlier changes no longer count."""
        if self._ids is None:  # this is a copy, which has not looked its weights up yet
            self.follow(model)
        self._reason = None
        self._remember(dict(zip(self._paths, self._owners, strict=True)))
        self.fingerprint, self.checksum = fingerprint, _checksum(self._plain)

    def follow(self, model: nn.Module) -> None:
        """Look the weights up again in `model`, after modules were replaced or the guard was copied together with it.

        Missing modules count as a change, and so do other tensors. In a copied guard other tensors do not, because the
        copied model has its own.
        """
        reason, known = self.change(), self._ids
        owners: dict[str, _Weights] = {}
        for path in self._paths:
            try:
                module = model.get_submodule(path)
            except AttributeError:
                reason = reason or f"there is no '{path}'"
            else:
                owners[path] = _own_weights(without_adapters(module))
        self._remember(owners)
        if known is not None and self._ids != known:
            reason = reason or "some of them are other tensors"
        self._reason = reason


def _own_weights(module: nn.Module) -> _Weights:
    """Return the dict in which a module holds its own parameters; {} if it has none, or they are offloaded."""
    own = cast("_Weights", vars(module)["_parameters"])
    present = [weight for weight in own.values() if weight is not None]
    return {} if not present or any(weight.is_meta for weight in present) else own


_PLACES = (0.41, 0.77, 0.06, 0.93)  # where in a weight the numbers of each sample are, as fractions of its length


_Sample = ctypes.c_uint8 | ctypes.c_uint16 | ctypes.c_uint32 | ctypes.c_uint64
_KINDS: dict[int, type[_Sample]] = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_uint64}
_value: Callable[[_Sample], int] = attrgetter("value")


def _samples(weights: Iterable[nn.Parameter], turn: int) -> list[_Sample]:
    """Return a reference to one number of each weight that is on the CPU and contiguous; `_value` reads it, as an int.

    `turn` is an index in `_PLACES`, which says where in each weight the number is. A reference is an address, not a
    view, which would keep the memory of a weight that was moved to another device. So the weights must still be at
    these addresses when the numbers are read.
    """
    samples: list[_Sample] = []
    for weight in weights:
        size = weight.element_size()
        if weight.device.type == "cpu" and weight.is_contiguous() and weight.numel() and size in _KINDS:
            samples.append(_KINDS[size].from_address(weight.data_ptr() + int(weight.numel() * _PLACES[turn]) * size))
    return samples


def _checksum(weights: Mapping[str, nn.Parameter]) -> str:
    digest = xxhash.xxh3_128()
    for weight in weights.values():
        digest.update(bytes_of(weight))
    return digest.hexdigest()


_guards: weakref.WeakSet[WeightGuard] = weakref.WeakSet()


def _note_step(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    """Tell every guard which tensors an optimizer step has changed. It is a hook that runs after each step."""
    if guards := list(_guards):
        groups: list[dict[str, Any]] = optimizer.param_groups
        stepped = {id(weight) for group in groups for weight in group["params"] if weight.grad is not None}
        for guard in guards:
            guard.note_step(stepped)


register_optimizer_step_post_hook(_note_step)


_banks: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[nn.Module]]] = weakref.WeakKeyDictionary()


def mark_as_read(model: nn.Module, bank: nn.Module) -> None:
    """Record that `bank` reads a model, until the bank is garbage-collected; see `is_read_by_bank`."""
    for module in model.modules():
        if hasattr(module, "base_model_prefix"):  # a transformers model, whole or part of one
            banks = _banks.setdefault(module, [])
            banks.append(weakref.ref(bank, banks.remove))


def is_read_by_bank(model: nn.Module) -> bool:
    """Return whether a bank in memory reads this model, or one that shares a `PreTrainedModel` with it."""
    return any(_banks.get(module) for module in model.modules())
