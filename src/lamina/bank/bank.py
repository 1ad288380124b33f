"""The bank: readers that share one model and so one pass."""

from __future__ import annotations

import re
import weakref
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Self, final

import torch
from torch import Tensor, nn

from lamina.bank.reader import BankOutput, Reader, ReaderModule, ReaderOutput
from lamina.bank.saving import SavedBank
from lamina.bank.streaming import Keeper, StackPass, mask_of
from lamina.errors import ConfigError, UnknownNameError
from lamina.layers import default_stack, stacks, watch

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from transformers import PreTrainedModel

    from lamina.layers import LayerStack

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")  # a reader's name is also the name of its folder


_LIVE: weakref.WeakSet[ReaderBank] = weakref.WeakSet()  # so that an edit can tell that readers tap its model


def is_held(model: nn.Module) -> bool:
    """Whether a bank reads this model, or one around or inside it."""
    inside = set(model.modules())
    return any(bank.model in inside or model in set(bank.model.modules()) for bank in _LIVE)


class _PassComplete(BaseException):
    """Raised inside the model's forward once every needed layer was read."""


@final
class ReaderBank(nn.Module, SavedBank):
    """The readers that share one frozen model, trained and run in one pass of it.

    The model is not a submodule: `bank.parameters()` and `bank.state_dict()` concern the readers only.

    Args:
        model: Any `transformers.PreTrainedModel`, head included. It is frozen and put in eval mode.
        processor: Its tokenizer; needed to train on texts and to predict from them.
        train_base: Fine-tune the model along with the readers: it is not frozen, and follows the bank's mode. The main
            job then changes; parameters that were frozen before stay so.

    Raises:
        ConfigError: If the model is to be trained and none of its parameters can be.
    """

    def __init__(self, model: PreTrainedModel, processor: Any = None, *, train_base: bool = False) -> None:
        super().__init__()
        if train_base and not any(parameter.requires_grad for parameter in model.parameters()):
            raise ConfigError(
                "bank: train_base is set, but every parameter of the model is frozen; some must be trainable. "
                "Call model.requires_grad_(True) first, or leave train_base out."
            )
        model = model.eval() if train_base else model.eval().requires_grad_(False)
        self._model = (model,)  # in a tuple, so that nn.Module does not register it
        self.train_base = self.own_base = train_base  # a base of its own is saved with the bank
        self.processor = processor
        self.readers: nn.ModuleDict = nn.ModuleDict()
        self.info: dict[str, Any] = {}
        self._stacks: dict[str, LayerStack] | None = None
        _LIVE.add(self)

    @property
    def model(self) -> PreTrainedModel:
        """The model that is read."""
        return self._model[0]

    @property
    def device(self) -> torch.device:
        """Where the model's parameters are."""
        return next(self.model.parameters()).device

    @property
    def stacks(self) -> dict[str, LayerStack]:
        """The model's stacks, found once: to change the model's layers, take the bank off first."""
        if self._stacks is None:
            self._stacks = stacks(self.model)
        return self._stacks

    def add(self, name: str, reader: Reader) -> ReaderModule:
        """Attach a reader.

        Args:
            name: Letters, digits, `_` and `-`; also the name of its folder when saved.
            reader: What to attach.

        Returns:
            The trainable module, also at `bank[name]`.

        Raises:
            ConfigError: If the name is taken or cannot be one, or the reader's settings do not fit the model.
        """
        self._check_new("bank.add", name)
        stack = default_stack(self.model, reader.stack)
        module = ReaderModule(reader, stack, self.model).to(self.device).train(self.training)
        self.readers._modules[name] = module  # not through attributes: those forbid names such as "type"
        return module

    def _check_new(self, op: str, name: str) -> None:
        if not NAME.fullmatch(name):
            raise ConfigError(
                f"{op}: '{name}' cannot be a reader's name; it is also a folder. "
                "Use letters, digits, '_' and '-', beginning with a letter or digit."
            )
        if name in self:
            raise ConfigError(f"{op}: there is a reader '{name}' already. Remove it first, or choose another name.")

    def remove(self, name: str) -> None:
        """Detach a reader."""
        self._known("bank.remove", [name])
        del self.readers._modules[name]

    def rename(self, name: str, to: str) -> None:
        """Give a reader another name.

        Raises:
            UnknownNameError: If there is no reader `name`.
            ConfigError: If `to` is taken or cannot be a name.
        """
        self._known("bank.rename", [name])
        self._check_new("bank.rename", to)
        modules = self.readers._modules
        self.readers._modules = {to if key == name else key: module for key, module in modules.items()}

    def __getitem__(self, name: str) -> ReaderModule:
        self._known("bank", [name])
        return self.readers._modules[name]  # pyright: ignore[reportReturnType]

    def __contains__(self, name: object) -> bool:
        return name in self.readers._modules

    def __iter__(self) -> Iterator[str]:
        return iter(self.readers._modules)

    def __len__(self) -> int:
        return len(self.readers._modules)

    def _known(self, op: str, names: Sequence[str]) -> None:
        for name in names:
            if name not in self:
                raise UnknownNameError(op=op, got=name, known=self, what="reader")

    def train(self, mode: bool = True) -> Self:
        """Set the readers' mode; the model's too where it is trained, while a frozen one stays in eval mode."""
        if self.train_base:
            self.model.train(mode)
        return super().train(mode)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move the readers, and the model along with them (its dtype is left alone)."""
        device, *_ = torch._C._nn._parse_to(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        if device is not None:
            self.model.to(device)  # pyright: ignore[reportArgumentType]
        return super().to(*args, **kwargs)

    def forward(
        self,
        *,
        labels: Mapping[str, Tensor] | None = None,
        readers: Sequence[str] | None = None,
        main: bool = False,
        states: Mapping[str, Mapping[int, Tensor]] | None = None,
        keep: Mapping[str, Sequence[int]] | None = None,
        shares: Mapping[str, float] | None = None,
        **batch: Any,
    ) -> BankOutput:
        """Run the model once and every reader on it.

        Args:
            labels: Reader name -> labels (see the heads' `loss`); readers without any get no loss.
            readers: Which readers to run; None: all.
            main: Whether the model's own output is wanted; if not, its forward ends after the last layer needed.
            states: Stack -> layer -> state `[batch, tokens, width]`, to be read in place of a run of the model.
            keep: Stack -> layers whose states are wanted in the output.
            shares: Reader name -> share of a batch's labels that are here, where several processes have a part each.
            **batch: What the model is called with.

        Returns:
            One output per reader; `.loss` is the sum of their losses, or None without labels.

        Raises:
            UnknownNameError: If a name is not in the bank.
            ConfigError: If there is no reader to run, or `states` are given and more than they hold is needed.
        """
        names = list(self if readers is None else readers)
        labels = labels or {}
        self._known("bank", [*names, *labels])
        if unread := [name for name in labels if name not in names]:
            raise ConfigError(
                f"bank: labels for '{unread[0]}', which is not among `readers`. Add it there, or drop them."
            )
        if not names and not keep:
            raise ConfigError("bank: there is no reader to run. Call bank.add(name, Reader(...)) first.")
        grad = torch.is_grad_enabled() and self.training
        self._begin(names)
        passes = self._passes(names, grad=grad)
        masks: dict[str, Tensor | None] = {}
        out = BankOutput()
        if states is not None:
            self._read(passes, masks, batch, states, names)
        else:
            kept = [Keeper(self._stack(name), layers) for name, layers in (keep or {}).items()]
            out.main = self._run(passes, kept, masks, batch, main=main, grad=grad and self.train_base)
            out.states = {one.stack.name: one.states for one in kept}
        for stack_pass in passes:
            mask = masks.get(stack_pass.stack.name)
            for name, (logits, real) in stack_pass.finish(mask, self.model, labels).items():
                out.readers[name] = ReaderOutput(logits, real)
        out.readers = {name: out.readers[name] for name in names}
        with torch.set_grad_enabled(grad):
            self._add_losses(out, labels, shares or {})
        return out

    def _begin(self, names: Sequence[str]) -> None:
        for name in names:
            if self[name].training:
                self[name].begin(self.device)

    def _passes(self, names: Sequence[str], *, grad: bool) -> list[StackPass]:
        found = self.stacks
        used = {name: {n: self[n] for n in names if self[n].stack == name} for name in found}
        return [StackPass(found[name], readers, grad=grad) for name, readers in used.items() if readers]

    def _stack(self, name: str) -> LayerStack:
        if name not in self.stacks:
            raise UnknownNameError(op="bank", got=name, known=self.stacks, what="stack")
        return self.stacks[name]

    def _read(
        self,
        passes: Sequence[StackPass],
        masks: dict[str, Tensor | None],
        batch: Mapping[str, Any],
        states: Mapping[str, Mapping[int, Tensor]],
        names: Sequence[str],
    ) -> None:
        """Feed the readers states that were computed before."""
        for name in names:
            if self[name].config.fusion.follows:
                raise ConfigError(
                    f"bank: reader '{name}' needs more of the model's pass than its states. Leave `states` out."
                )
        for one in passes:
            given = states.get(one.stack.name, {})
            for layer in one.layers:
                if layer not in given:
                    raise ConfigError(
                        f"bank: no state of layer {layer} of the stack '{one.stack.name}' was given; the readers need "
                        f"the layers {', '.join(map(str, one.layers))}. Give them all, or leave `states` out."
                    )
                one.take(layer, given[layer])
            masks[one.stack.name] = mask_of(one.stack, batch, (), {})

    def _run(
        self,
        passes: Sequence[StackPass],
        kept: Sequence[Keeper],
        masks: dict[str, Tensor | None],
        batch: Mapping[str, Any],
        *,
        main: bool,
        grad: bool,
    ) -> Any:
        left = len(passes) + len(kept)

        def take(one: StackPass | Keeper, layer: int, state: Tensor) -> None:
            nonlocal left
            if one.take(layer, state):
                left -= 1
                if left == 0 and not main:
                    raise _PassComplete

        def start(stack_pass: StackPass, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            masks[stack_pass.stack.name] = mask_of(stack_pass.stack, batch, args, kwargs)

        with ExitStack() as hooks, torch.set_grad_enabled(grad):
            for one in kept:
                hooks.enter_context(watch(one.stack, one.layers, lambda layer, state, one=one: take(one, layer, state)))
            for one in passes:
                hooks.enter_context(one.follow())
                hooks.enter_context(
                    watch(
                        one.stack,
                        one.layers,
                        lambda layer, state, one=one: take(one, layer, state),
                        lambda args, kwargs, one=one: start(one, args, kwargs),
                    )
                )
            try:
                return self.model(**batch)
            except _PassComplete:
                return None

    def _add_losses(self, out: BankOutput, labels: Mapping[str, Tensor], shares: Mapping[str, float]) -> None:
        for name, target in labels.items():
            out.readers[name].loss = self[name].loss(out.readers[name].logits, target, share=shares.get(name, 1.0))
        losses = [one.loss for one in out.readers.values() if one.loss is not None]
        out.loss = torch.stack(losses).sum() if losses else None

    @contextmanager
    def listen(self, readers: Sequence[str] | None = None) -> Iterator[dict[str, ReaderOutput]]:
        """Read from the main job's own passes: `model(...)` and `model.generate(...)` run as if nobody listened.

        Each reader hears the first pass over its stack (in generation: the text that is read, not the steps that
        follow); `heard.clear()` makes it ready for the next.

        Args:
            readers: Which readers listen; None: all.

        Yields:
            Reader name -> output, filled while the model runs.
        """
        names = list(self if readers is None else readers)
        self._known("bank.listen", names)
        heard: dict[str, ReaderOutput] = {}
        was_training = self.training
        self.eval()
        try:
            with ExitStack() as hooks:
                for one in self._passes(names, grad=False):
                    ear = _Ear(self, one, heard)
                    hooks.enter_context(one.follow())
                    hooks.enter_context(watch(one.stack, one.layers, ear.take, ear.start))
                yield heard
        finally:
            self.train(was_training)


class _Ear:
    """Listens to one stack: a fresh pass whenever the readers have heard nothing yet."""

    def __init__(self, bank: ReaderBank, first: StackPass, heard: dict[str, ReaderOutput]) -> None:
        self._bank, self._first, self._heard = bank, first, heard
        self._now: StackPass | None = None
        self._mask: Tensor | None = None

    def start(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        names = list(self._first.readers)
        self._now = None
        if not any(name in self._heard for name in names):
            self._now = StackPass(self._first.stack, self._first.readers, grad=False)
            self._mask = mask_of(self._first.stack, {}, args, kwargs)

    def take(self, layer: int, state: Tensor) -> None:
        if self._now is not None and self._now.take(layer, state):
            outputs = self._now.finish(self._mask, self._bank.model)
            self._heard.update({name: ReaderOutput(*output) for name, output in outputs.items()})
            self._now = None
