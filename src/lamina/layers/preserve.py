"""Change a model, its mode or the random generators temporarily, and restore them exactly."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import chain
from operator import attrgetter, itemgetter
from threading import Lock
from typing import cast
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from lamina.layers.devices import main_device
from lamina.layers.pass_lock import exclusive


@contextmanager
def preserve_randomness(**fork_options: object) -> Generator[None]:
    """Restore the global random generators of Python, NumPy and torch at the end of the `with` block.

    `fork_options` are keyword arguments of `torch.random.fork_rng`, such as the devices.
    """
    before = random.getstate(), np.random.get_state()
    fork: Callable[..., AbstractContextManager[None]] = vars(torch.random)["fork_rng"]
    try:
        with fork(**fork_options):
            yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


@contextmanager
def preserve_model(model: nn.Module) -> Generator[None]:
    """Run a model in eval mode inside the `with` block, without gradients, autocast and compiled code; then restore it.

    Some models change themselves when they are called, as BigBird does on short inputs. So modes, buffers with their
    values, parameters (not their values), submodules, hooks and plain attributes are restored, and the global random
    generators too. If the model has a `pass_lock`, it is held exclusively: other threads' passes wait.

    RWKV rescales its weights in place in its first pass in eval mode, and records that in a plain attribute. Weights
    are not copied and cannot be restored, so after such a pass numbers and flags of the modules are not restored
    either.
    """
    devices = {tensor.device for tensor in model.parameters() if tensor.device.type not in ("cpu", "meta")}
    kind = next(iter(devices)).type if devices else "cuda"
    main = main_device(model).type
    with (
        exclusive(model),
        preserve_randomness(devices=[device.index or 0 for device in devices], device_type=kind),
        torch.inference_mode(False),
        torch.no_grad(),
        torch.autocast("cpu" if main == "meta" else main, enabled=False),
        uncompiled(),
        ExitStack() as exits,
    ):
        weights = [weight for weight in model.parameters() if not weight.is_inference()]
        versions = [weight._version for weight in weights]

        def is_rescaled() -> bool:
            return [weight._version for weight in weights] != versions

        for module in model.modules():
            exits.callback(_snapshot(module, is_rescaled))
        for module in model.modules():
            for name, buffer in buffers_of(module).items():
                if not (buffer is None or buffer.is_meta or buffer.is_inference()):
                    exits.callback(_restore_buffer, module, name, buffer, buffer._version, buffer.clone())
        model.eval()
        yield


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module itself is compiled; modules inside it do not count."""
    forward = vars(module).get("forward")  # an instance attribute after `model.forward = torch.compile(...)`
    return (
        hasattr(module, "_orig_mod")
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(forward, "_torchdynamo_orig_callable")
    )


@contextmanager
def uncompiled() -> Generator[None]:
    """Run compiled models uncompiled within the `with` block, in all threads, so that hooks on them are called.

    The switch is global to torch, so blocks that overlap share it: it is reset when the last block ends.
    """
    if "torch._dynamo" not in sys.modules:  # nothing is compiled
        yield
        return
    with _lock:
        if not _uncompiled:
            _stance.append(torch.compiler.set_stance("force_eager"))  # pyright: ignore[reportUnknownMemberType]
        _uncompiled.append(None)
    try:
        yield
    finally:
        with _lock:
            _uncompiled.pop()
            if not _uncompiled:
                _stance.pop().__exit__(None, None, None)


_lock = Lock()  # guards the two lists
_uncompiled = list[None]()  # one entry for each open block
# the context manager that the first block entered, which the last block exits
_stance = list[AbstractContextManager[None]]()


@contextmanager
def evaluating(*modules: nn.Module) -> Generator[None]:
    """Put modules in eval mode inside the `with` block.

    Such blocks may overlap, in one thread or several. Each module gets its mode back when the last block ends.
    """
    every = list(chain.from_iterable(map(nn.Module.modules, modules)))
    is_training = attrgetter("training")
    with _switching:
        # already in eval mode, and no open block would restore another mode: there is nothing to remember
        parts = every if _open or any(map(is_training, every)) else []
        _open.extend(parts[:1])
        for part in parts:
            _modes.setdefault(part, []).append(part.training)
        for module in modules if parts else ():
            module.eval()
    try:
        yield
    finally:
        with _switching:
            del _open[: len(parts[:1])]
            for part in parts:
                part.training = _modes[part].pop()  # the last block to end pops the mode that the first block pushed
            for part in filter(is_training, every if not parts else ()):
                part.training = False


@contextmanager
def preserve_training(model: nn.Module) -> Generator[None]:
    """Put a model in eval mode inside the `with` block; then restore its mode, and which parameters are trainable."""
    trainable = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        with evaluating(model):
            yield
    finally:
        for parameter, requires_grad in trainable:
            parameter.requires_grad_(requires_grad)


@contextmanager
def eval_mode(*modules: nn.Module) -> Generator[None]:
    """Put modules in eval mode and compute no gradients within the `with` block; then restore both."""
    with evaluating(*modules), torch.no_grad():
        yield


def evaluating_if(attributes: Sequence[Mapping[str, object]], model: nn.Module) -> AbstractContextManager[None]:
    """Return `evaluating(model)`; or a null context if the model is in eval mode and no `evaluating` block is open.

    Args:
        attributes: `vars(module)` of all modules of the model. Modes are looked up there, which is quick.
        model: The model.
    """
    # an open block may have put the model in eval mode for as long as it lasts
    return evaluating(model) if _open or any(map(_mode, attributes)) else nullcontext()


_mode: Callable[[Mapping[str, object]], object] = itemgetter("training")
_switching, _modes = Lock(), WeakKeyDictionary[nn.Module, list[bool]]()
_open: list[nn.Module] = []  # one entry for each open block that has modes to restore


def _restore_buffer(module: nn.Module, name: str, buffer: Tensor, version: int, value: Tensor) -> None:
    """Write `value` back into a module's buffer `name` if the buffer was changed in place since version `version`.

    The change is then noted for `changed_by_passes`.
    """
    if buffer._version != version:
        _changed_by_passes[type(module)].add(name)
        buffer.copy_(value)


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the dict in which a module itself holds its buffers."""
    return cast("dict[str, Tensor | None]", vars(module)["_buffers"])


_changed_by_passes: defaultdict[type[nn.Module], set[str]] = defaultdict(set)


def changed_by_passes(kind: type[nn.Module]) -> frozenset[str]:
    """Return the names of the attributes, submodules and buffers that passes change in modules of the class `kind`.

    Passes inside `preserve_model` have shown these changes.
    """
    return frozenset(_changed_by_passes.get(kind, ())) - {"training", "forward"}


def _is_other(before: object, now: object) -> bool:
    return now is not before and not (type(now) in _VALUES and now == before)


def _snapshot(module: nn.Module, keeps_values: Callable[[], bool]) -> Callable[[], None]:
    """Return a function that restores the present attributes of a module.

    The contents of dicts, sets and lists are restored in place, because handles of hooks refer to these objects. If
    `keeps_values()` is True at the restoration, numbers and flags keep their new values, except the mode. Changes are
    noted for `changed_by_passes`.
    """
    attributes = dict(module.__dict__)
    contents = {name: value.copy() for name, value in attributes.items() if type(value) in _CONTAINERS}

    def restore() -> None:
        values = {n: v for n, v in vars(module).items() if type(v) in _VALUES and n != "training"}
        for before, now in ((attributes, vars(module)), *((contents[part], attributes[part]) for part in _PARTS)):
            _changed_by_passes[type(module)].update(n for n, v in now.items() if _is_other(before.get(n), v))
        module.__dict__.clear()
        module.__dict__.update(attributes)
        if keeps_values():
            module.__dict__.update(values)
        for name, content in contents.items():
            container = attributes[name]
            container.clear()
            getattr(container, "extend" if type(content) is list else "update")(content)

    return restore


_CONTAINERS = frozenset[type]((dict, OrderedDict, set, list))
_VALUES = frozenset[type]((bool, int, float))
_PARTS = ("_modules", "_buffers")  # attributes of a module that hold its submodules and buffers
