"""The readers of a bank as a mapping, the model that they share, and the passes that run both."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cached_property
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from lamina.bank.cascades import without_stale_cascades
from lamina.bank.reader import BankOutput, Info, ReaderModule, ReaderOutput
from lamina.bank.remap import check_blocks, check_untrained, fusion_after
from lamina.bank.stack_pass import Inputs, StackPass, States, attach, recording
from lamina.errors import ConfigError, NotFiniteError, check_known
from lamina.fusion.base import require_fed
from lamina.layers import LayerStack, stacks
from lamina.layers.adapters import check_no_adapters
from lamina.layers.base_facts import StackSettings
from lamina.layers.devices import main_device
from lamina.layers.discovery import pick_stack
from lamina.layers.fingerprints import fingerprint_of
from lamina.layers.hooks import CACHES, StopForward, drop_copied_hooks, holds_cache, run_stacks
from lamina.layers.layer_guard import LayerGuard, mark_as_read
from lamina.layers.nan_checks import first_non_finite
from lamina.layers.preserve import evaluating_if, is_compiled, uncompiled
from lamina.layers.types import token_rows, tokenizer_of
from lamina.layers.wrappers import checked_model
from lamina.registry import provider
from lamina.utils import check_type, check_types

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lamina.layers.selectors import Selector
    from lamina.layers.types import Processor

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")  # a reader's name is also the name of its folder


class ReaderCollection(nn.Module):
    """A model, the readers that were added to it, and the passes that run both; the base class of `ReaderBank`.

    See `ReaderBank` for the arguments and errors. The collection is a mapping: `collection[name]` is a `ReaderModule`.
    """

    instead_of_model: ClassVar = "It is a bank: give its model, bank.model"
    model: PreTrainedModel
    """The shared model."""

    @check_types("bank")
    def __init__(
        self,
        model: PreTrainedModel,
        processor: Processor | None = None,
        *,
        train_base: bool = False,
        saves_base: bool | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        model = checked_model(model, "bank")
        if train_base:
            check_no_adapters(model, "bank: train_base is set")
        if train_base and not any(parameter.requires_grad for parameter in model.parameters()):
            problem = "train_base is set, but every parameter of the model is frozen"
            raise ConfigError(f"bank: {problem}; some must be trainable. Call model.requires_grad_(True) first.")
        if weight := first_non_finite(model.named_parameters()):
            what = f"the model's weight '{weight}' holds NaN or infinity, so every output would be NaN"
            raise NotFiniteError(f"bank: {what}. Load the model again.", name=weight)
        provider("edits").check_inserted(model, "bank")
        model = model.eval() if train_base else model.eval().requires_grad_(False)
        vars(self)["model"] = model  # not by `setattr`, with which nn.Module would register it as a submodule
        self.train_base = train_base
        self.saves_base = train_base if saves_base is None else saves_base
        self.processor: Any = processor
        self.readers = nn.ModuleDict()
        self.info: Info = dict(info or {})
        self.folder: Path | None = None  # from which the bank was loaded; exports are kept there
        self._checked_ids: tuple[object, int] | None = None  # the tokenizer whose ids were checked, and its size
        self.check_ids("bank", processor)
        mark_as_read(model, self)

    def check_ids(self, op: str, processor: Processor | None) -> None:
        """Raise ConfigError, about `op`, if the tokenizer of `processor` has ids beyond the model's embedding table.

        Without a tokenizer or a table, nothing is checked. A tokenizer that was checked and has not grown since is not
        checked again.
        """
        tokenizer = tokenizer_of(processor)
        if not hasattr(tokenizer, "get_vocab") or self._checked_ids == (known := (tokenizer, len(tokenizer))):
            return
        rows = token_rows(self.model)
        token, highest = max((tokenizer.get_vocab() if rows else {}).items(), key=itemgetter(1), default=("", -1))
        if rows is not None and highest >= rows:
            raise ConfigError(
                f"{op}: the tokenizer has ids up to {highest} ('{token}'); the model's token table has {rows} rows, "
                f"0 to {rows - 1}. Use the model's own tokenizer, or make the bank after "
                f"model.resize_token_embeddings({highest + 1})."
            )
        self._checked_ids = known

    def __getstate__(self) -> dict[str, object]:
        if "_guard" in vars(self):
            with suppress(ConfigError):  # the model was edited: the copy raises it too
                self._guard.check(self.model, "bank")  # so that the guard knows all that has changed before the copy
        return {**vars(self), "_checked_ids": None}

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        drop_copied_hooks(self.model)
        mark_as_read(self.model, self)

    def __setattr__(self, name: str, value: object) -> None:
        # `nn.Module` would register another model as a submodule, and readers would go on to read the old one.
        if name != "model":
            super().__setattr__(name, cast("nn.Module", value))
        elif value is not self.model:
            problem = f"the readers belong to the bank's {type(self.model).__name__}, which cannot be replaced"
            raise ConfigError(f"bank: {problem}. Make a new bank, ReaderBank(model).")

    def __delattr__(self, name: str) -> None:
        if name == "model":
            raise AttributeError("bank: the model of a bank cannot be deleted. Delete the bank.")
        super().__delattr__(name)

    def extra_repr(self) -> str:
        """Return the class and name of the model, for `print(bank)`."""
        return f"{type(self.model).__name__} '{getattr(self.model, 'name_or_path', '')}'"

    @property
    def device(self) -> torch.device:
        """Device of the model's parameters; for offloaded weights, the device on which the model runs."""
        return main_device(self.model)

    @property
    def stacks(self) -> dict[str, LayerStack]:
        """The model's stacks by name, found on first access.

        Raises UnsupportedModelError if they cannot be found, and ConfigError if the model was edited or its blocks were
        replaced since then.
        """
        self._guard.check(self.model, "bank")
        return self._guard.stacks

    @cached_property
    def _guard(self) -> LayerGuard:
        """The guard that detects changes of the model. UnsupportedModelError if the model's stacks cannot be found."""
        return LayerGuard(self.model, stacks(self.model))

    # The frozen model

    def eval_pass(self) -> AbstractContextManager[None]:
        """Return a context in which a frozen model is in eval mode; afterwards the model has its old mode.

        A model that is trained with its readers keeps its mode throughout.
        """
        return nullcontext() if self.train_base else evaluating_if(self._guard.attributes, self.model)

    def change_of_base(self, names: Iterable[str] | None = None, *, full: bool = False) -> str | None:
        """Return how a frozen model has changed since the bank was made, as a phrase for a message.

        Raises ConfigError, with `full`, if blocks were replaced or the model was edited.

        Args:
            names: Names of the stacks to check. None: the stacks that readers read.
            full: Whether to read all weights. This also finds writes that torch does not count, such as those through
                `weight.data`: the weights are compared with the checksum from when the bank was last loaded, saved or
                trained.

        Returns:
            None if nothing has changed, if changed weights have their old values again, or if the model is trained with
            its readers.
        """
        if self.train_base:
            return None
        guard = self._guard
        if full:
            guard.check(self.model, "bank")
        for name in {self[reader].stack for reader in self} if names is None else names:
            weights = guard.weights[name]
            if change := weights.change():
                now = None if weights.fingerprint is None else fingerprint_of(stacks(self.model)[name])
                if now is None or weights.fingerprint != now:
                    return change
                weights.accept(self.model, now)
            if full:  # settings in lists and dicts that were changed in place
                guard.modules[name].look_again()
            if full and weights.is_rewritten():
                return f"the weights of the stack '{name}' have other values"
            if not guard.modules[name].is_same() and (change := guard.changed_modules(self.model, name)):
                return change
        return None

    def check_base(self, op: str, names: Iterable[str] | None = None, *, full: bool = False) -> None:
        """Raise ConfigError, about the operation `op`, if a frozen model has changed.

        See `change_of_base` for `names` and `full`.
        """
        if change := self.change_of_base(names, full=full):
            raise ConfigError(
                f"{op}: the model has changed since the bank was made: {change}. The readers belong to the old one: "
                "load it again, or make another bank on the model and call its update(bank)."
            )

    def seal_base(self, op: str) -> None:
        """Check all weights of the stacks that readers read, and store their checksum for the next check.

        Nothing is stored if the model is trained with its readers. Raises ConfigError, with `op` as the operation, if
        the frozen model has changed.
        """
        self.check_base(op, full=True)
        for name in {self[reader].stack for reader in self} if not self.train_base else ():
            self._guard.weights[name].seal()

    def settings_of_base(self) -> dict[str, StackSettings]:
        """Return stack name -> its settings other than weights, as they were at the start or the last `accept_base`."""
        return self._guard.facts

    def fingerprints_of_base(self) -> dict[str, str]:
        """Return stack name -> fingerprint of the weights on which its readers were trained, where it is known."""
        guards = self._guard.weights
        return {name: guard.fingerprint for name, guard in guards.items() if guard.fingerprint is not None}

    def accept_base(self, fingerprints: Mapping[str, str]) -> None:
        """Declare that the readers belong to the model as it is now, so that earlier changes no longer count.

        `fingerprints` is stack name -> fingerprint of the present weights.
        """
        by_name = stacks(self.model)
        for name in fingerprints.keys() & by_name.keys():
            self._guard.accept(self.model, by_name[name], fingerprints[name])

    # Readers

    def _check_new_name(self, op: str, name: str) -> None:
        """Raise ConfigError, about the operation `op`, if a name cannot be a reader's name, or is taken."""
        if not isinstance(name, str) or not NAME.fullmatch(name):  # pyright: ignore[reportUnnecessaryIsInstance]
            form = "letters, digits, '_' and '-', beginning with a letter or digit"
            raise ConfigError(f"{op}: '{name}' cannot be a reader's name; it is also a folder. Use {form}.")
        if name in self:
            raise ConfigError(f"{op}: there is a reader '{name}' already. Remove it first, or choose another name.")

    @check_types("bank.update")
    def update(self, other: ReaderCollection, readers: Collection[str] | str | None = None) -> None:
        """Add readers of another bank on the same model, with their weights. Readers of the same name are replaced.

        The two banks then share these modules, in the mode of this bank, and their monitors: training one bank changes
        the other. Each bank may rename a shared reader. A cascade of two shared readers finds its first reader by name:
        if one bank renames that reader, the other must rename it too to use the cascade.

        A cascade is removed, with a warning, if its first reader here has other weights than the one that it was
        calibrated with. Its second reader is then a copy that shares its modules with the other banks.

        Args:
            other: Bank whose readers are added.
            readers: Names of readers of `other`, or one name. None: all.

        Raises:
            UnknownNameError: If `other` does not have a reader.
            ConfigError: If `other` has another model, or a monitor of an added reader has the same name as a monitor
                that stays. Nothing is changed then.
        """
        coming = other.select(readers, "bank.update")
        if other.model is not self.model:
            rule = "both banks must read one model. Load it with ReaderBank.from_pretrained(folder, bank.model)"
            raise ConfigError(f"bank.update: the other bank reads another {type(other.model).__name__}; {rule}.")
        present = {monitor for name in self if name not in coming for monitor in self[name].monitors}
        for name, reader in coming.items():
            if both := present.intersection(reader.monitors):
                problem = f"reader '{name}' has a monitor '{both.pop()}', and so does one that stays"
                raise ConfigError(f"bank.update: {problem}. Drop one of them with bank.drop_monitor.")
        self._put("bank.update", coming, other.select(None, "bank.update"))

    def _put(self, op: str, coming: Mapping[str, ReaderModule], *others: Mapping[str, ReaderModule]) -> None:
        """Add or replace readers; `others` are all readers of the banks from which they come. See `update`."""
        before = self.select(None, op)
        for name, reader in without_stale_cascades(op, {**before, **coming}, [before, *others]).items():
            if reader is not before.get(name):
                self.readers[key_of(name)] = reader.train(self.training)

    def remove(self, name: str) -> None:
        """Remove a reader and the monitors stored with it; raise UnknownNameError if no reader has this name.

        A cascade stored with another reader stays, but raises UnknownNameError until this name is added again.
        """
        check_known("bank.remove", [name], self, "reader")
        del self.readers[key_of(name)]

    def rename(self, name: str, to: str) -> None:
        """Rename a reader, also in the monitors that use it. Its position among the readers stays.

        Raises:
            UnknownNameError: If there is no reader `name`.
            ConfigError: If `to` is taken or not allowed as a name.
        """
        check_known("bank.rename", [name], self, "reader")
        self._check_new_name("bank.rename", to)
        self.readers = nn.ModuleDict({key_of(to if known == name else known): self[known] for known in self})
        for reader in self.select(None, "bank.rename").values():
            reader.rename_in_monitors(name, to)

    def remap_(self) -> dict[str, tuple[int, ...]]:
        """Change the layer numbers of the readers in place, after blocks of the model were dropped, moved or repeated.

        All states that a reader reads must still exist, under any number. States below a cut still exist; if only
        identity copies were added, all states do. Either all readers are changed or none.

        Returns:
            Reader name -> the layers that it reads now.

        Raises:
            ConfigError: If a layer that a reader reads is gone or its values have changed, so that the reader has to be
                trained again; the message names both. Also if a fusion cannot read other layer numbers, an identity
                copy was trained, weights of the model were changed, blocks were changed other than by edits, or it is
                not known how the model was edited since the bank first looked at it.
        """
        hint = "Make a new bank on the edited model, and train its readers"
        by_name, edits = stacks(self.model), self._guard.edits_since(self.model) if "_guard" in vars(self) else None
        if edits is None:
            raise ConfigError(f"bank.remap_: how the model was edited since the bank was made is not known. {hint}.")
        before, readers = self._guard.stacks, self.select(None, "bank.remap_")
        for name in {reader.stack for reader in readers.values()}:
            check_blocks(before[name], by_name[name], edits)
            if change := self._guard.weights[name].change():
                problem = f"the model's weights have changed since the bank was made: {change}"
                raise ConfigError(f"bank.remap_: {problem}. {hint}.")
        check_untrained(dict(self.model.named_parameters()), edits)
        configs = {
            name: fusion_after(name, reader, before[reader.stack], by_name[reader.stack], edits, by_name)
            for name, reader in readers.items()
        }
        for name, reader in readers.items():
            reader.read_from(configs[name], by_name[reader.stack])
        self._guard = LayerGuard(self.model, by_name)
        return {name: reader.layers for name, reader in readers.items()}

    def __getitem__(self, name: str) -> ReaderModule:
        key = key_of(name) if isinstance(name, str) else ""  # pyright: ignore[reportUnnecessaryIsInstance]
        if key in self.readers:
            return cast("ReaderModule", self.readers[key])
        return self.select([name], "bank")[name]  # raises the error

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and key_of(name) in self.readers

    def __iter__(self) -> Iterator[str]:
        return (key.removesuffix(_SUFFIX) for key in self.readers)

    def __len__(self) -> int:
        return len(self.readers)

    def select(self, names: Iterable[str] | None, op: str) -> dict[str, ReaderModule]:
        """Return name -> module for the readers `names`, in that order, as a new dict. None: all; a string: one name.

        Raises:
            UnknownNameError: If the bank has no reader of a name. The message begins with `op`.
            ConfigError: If `names` is not a list or a set of names.
        """
        readers = {key.removesuffix(_SUFFIX): cast("ReaderModule", module) for key, module in self.readers.items()}
        if names is None:
            return readers
        if not isinstance(names, list):
            names = [names] if isinstance(names, str) else check_type(op, "readers", names, "Collection")
        try:
            return {name: readers[name] for name in names}
        except (KeyError, TypeError):
            check_known(op, map(str, names), readers, "reader")
            raise

    # Passes

    def forward(
        self,
        *,
        labels: Mapping[str, Tensor] | None = None,
        readers: Collection[str] | str | None = None,
        main: bool = False,
        **batch: Any,  # noqa: ANN401
    ) -> BankOutput:
        """Run the model once on a batch, and return the output of every reader.

        The forward of the model ends after the last layer that a reader needs, unless `main` is set or the batch has a
        cache (`past_key_values`), which all blocks must update for the caller's next pass. Gradients are recorded in
        training mode only, and through the model only with `train_base`. Each call in training mode counts in
        `ReaderModule.step`, which seeds dropout.

        Args:
            labels: Reader name -> labels, in the shape that the head's `loss` takes. Readers without labels get no
                loss.
            readers: Names of the readers to run. None: all.
            main: Run the model to its end and return its own output as `output.main`.
            **batch: Arguments of the model, such as `input_ids` and `attention_mask`, each `[batch, tokens]`. Without
                an input for it, a decoder reads the encoder's ids, shifted right; with `main`, the model decides.

        Returns:
            The outputs by reader name: `output[name].logits` and `.loss`; `output.loss` is the sum of the losses.

        Raises:
            UnknownNameError: If a name in `readers` or `labels` is not in the bank.
            ConfigError: If there is no reader to run, labels do not fit, the batch is empty or lacks an input, the mask
                does not say which tokens are padding, a reader of pairs has no fast tokenizer, or the frozen model has
                changed since the bank was made.
            UnsupportedModelError: If a fusion reads inside the blocks, and the place is not found in the model.
        """
        labels = {} if labels is None else labels
        stop = None if main or (not CACHES.isdisjoint(batch) and holds_cache(batch)) else StopForward()
        passes, names = self._start(readers, labels)
        wanted = [] if main else list(map(attrgetter("stack"), passes))
        with attach(passes, batch, stop), torch.set_grad_enabled(passes[0].grad and self.train_base):
            output = self._run(wanted, batch, stop)
        return self._finish(passes, labels, names, main=output if main else None)

    @check_types("bank.record_states")
    def record_states(self, layers: Mapping[str, Selector], batch: Inputs) -> States:
        """Run the model on a batch, without gradients and readers, and return the states of chosen layers.

        The forward ends after the last of these layers, or at the model's end if the batch has a cache. Raises
        ConfigError if the frozen model has changed, the batch is empty or the forward skips a layer, UnknownNameError
        for an unknown stack, and LayerIndexError for a layer that a stack does not have.

        Args:
            layers: Stack name -> layers to record, such as [2, 5], 2 or "top:2".
            batch: Keyword arguments for the model.

        Returns:
            Stack name -> layer -> state `[batch, tokens, width]`, not copied; pass it to `read_states`.
        """
        wanted = {pick_stack(self.stacks, name, op="bank"): chosen for name, chosen in layers.items()}
        stop = None if holds_cache(batch) else StopForward()
        self.check_base("bank", layers)
        with recording(wanted, stop) as states, torch.no_grad():
            self._run(list(wanted), batch, stop)
        return states

    @check_types("bank.read_states")
    def read_states(
        self,
        states: Mapping[str, Mapping[int, Tensor]],
        batch: Inputs,
        *,
        readers: Collection[str] | str | None = None,
        labels: Mapping[str, Tensor] | None = None,
    ) -> BankOutput:
        """Run readers on recorded states, without running the model.

        Args:
            states: Stack name -> layer -> state, as `record_states` returned them for this batch.
            batch: Keyword arguments for the model, which hold the attention mask of the states.
            readers: Names of the readers to run. None: all.
            labels: Reader name -> labels. Readers without labels get no loss.

        Returns:
            The outputs that `forward` would return, without `main`.

        Raises:
            UnknownNameError: If a name is not in the bank.
            ConfigError: If there is no reader to run, a layer is missing, a reader needs more than states, labels do
                not fit, or the model changed.
        """
        labels = {} if labels is None else labels
        passes, names = self._start(readers, labels)
        for stack_pass in passes:
            recorded = states.get(stack_pass.stack.name, {})
            stack_pass.begin(batch)
            for name, reader in stack_pass.readers.items():
                if reader.config.fusion.reads_inside:
                    reason = "needs more of the model's pass than its states; call the bank itself"
                    raise ConfigError(f"bank.read_states: reader '{name}' {reason}.")
            for layer in stack_pass.layers:
                if layer not in recorded:
                    problem = f"there is no state of layer {layer} of the stack '{stack_pass.stack.name}'"
                    needed = ", ".join(map(str, stack_pass.layers))
                    raise ConfigError(f"bank.read_states: {problem}; the readers need the layers {needed}.")
                stack_pass.on_state(layer, recorded[layer])
        return self._finish(passes, labels, names)

    def _run(self, wanted: Sequence[LayerStack], batch: Inputs, stop: StopForward | None) -> Any:  # noqa: ANN401
        """Run the model by `run_stacks`, with its arguments and result; a frozen model in eval mode.

        Compiled models run uncompiled.
        """
        compiled = is_compiled(self.model) or self._guard.compiled
        with uncompiled() if compiled else nullcontext(), self.eval_pass():
            return run_stacks(self.model, wanted, batch, stop)

    def _start(self, readers: Iterable[str] | None, labels: Mapping[str, Tensor]) -> tuple[list[StackPass], list[str]]:
        """Check a call; return a new `StackPass` per stack that `readers` (None: all) read, and the readers' names.

        Readers in training mode get new seeds for dropout. Labels are only allowed for readers that are run. Raises
        UnknownNameError if a reader does not exist, and ConfigError if labels are not a mapping of tensors or name a
        reader that is not run, there is no reader to run, or the frozen model has changed.
        """
        if not isinstance(labels, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            what = "a mapping of readers' names to their labels is needed"
            raise ConfigError(f"bank: labels are a {type(labels).__name__}; {what}.")
        chosen = self.select(readers, "bank")
        for name, target in labels.items():
            if name not in chosen:
                check_known("bank", [name], self, "reader")
                raise ConfigError(f"bank: labels for '{name}', which is not among `readers`.")
            if not isinstance(target, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ConfigError(f"bank: labels of '{name}' are a {type(target).__name__}; a tensor is needed.")
        if not chosen:
            raise ConfigError("bank: there is no reader to run. Call bank.add(name, Reader(...)) first.")
        for reader in chosen.values():
            if reader.training:
                reader.seed_dropout(self.device)
        grad = torch.is_grad_enabled() and self.training
        return self.passes(chosen, grad=grad), list(chosen)

    def passes(self, readers: Mapping[str, ReaderModule], *, grad: bool, traced: bool = False) -> list[StackPass]:
        """Return a new `StackPass` for each stack that these readers read, in the order of the model's stacks.

        Raises ConfigError if the frozen model has changed, and UnsupportedModelError as `StackPass` does.

        Args:
            readers: Reader name -> module, from `select`.
            grad: Whether the readers' computations keep gradients.
            traced: Whether the model is being traced for an export. A trace replaces the model's weights by other
                tensors, so the weights are not checked then.
        """
        by_stack: dict[str, dict[str, ReaderModule]] = {}
        for name, reader in readers.items():
            by_stack.setdefault(reader.stack, {})[name] = reader
        by_name = self.stacks
        if not traced:
            self.check_base("bank", by_stack)
        return [
            StackPass(self.model, stack, by_stack[name], grad=grad, processor=self.processor)
            for name, stack in by_name.items()
            if name in by_stack
        ]

    def _finish(
        self,
        passes: list[StackPass],
        labels: Mapping[str, Tensor],
        readers: Iterable[str],
        main: Any = None,  # noqa: ANN401
    ) -> BankOutput:
        """Run the heads of passes that have all their states, compute the losses, and return the outputs.

        `labels` is reader name -> labels; readers without labels have no loss. `readers` are the names of the readers,
        in the order of the outputs. `main` is the model's own output, or None. Raises ConfigError if a layer is missing
        or labels do not fit.
        """
        found: dict[str, ReaderOutput] = {}
        for stack_pass in passes:
            logits, real = stack_pass.finish(labels), require_fed(stack_pass.real)
            found |= {name: ReaderOutput(values, real) for name, values in logits.items()}
        outputs = {name: found[name] for name in readers}
        out = BankOutput(outputs, main=main)
        if labels:
            with torch.set_grad_enabled(passes[0].grad):
                for name, target in labels.items():
                    out[name].loss = self[name].loss(out[name].logits, target)
                out.loss = torch.stack([output.loss for output in outputs.values() if output.loss is not None]).sum()
        return out

    # Modes and devices

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the readers, and of the model if `train_base` is set; a frozen model stays in eval mode."""
        if self.train_base:
            self.model.train(mode)
        return super().train(mode)

    def to(self, *args: Any, **kwargs: Any) -> Self:  # noqa: ANN401
        """Move the readers as `nn.Module.to` does, and the model to the same device. The model keeps its dtype."""
        # a memory format is refused by a tensor without the axes that it orders
        target = {name: value for name, value in kwargs.items() if name != "memory_format"}
        device = torch.empty(0, device=self.device).to(*args, **target).device
        if device != self.device:
            self.model.to(device)  # pyright: ignore[reportArgumentType]
        return super().to(*args, **kwargs)

    def cuda(self, device: int | torch.device | None = None) -> Self:
        """Move the readers and the model to a GPU, by default the current one."""
        return self.to(torch.device("cuda", device) if isinstance(device, int) else device or torch.device("cuda"))

    def cpu(self) -> Self:
        """Move the readers and the model to the CPU."""
        return self.to(torch.device("cpu"))


_SUFFIX = ":"  # no reader's name contains it


def key_of(name: str) -> str:
    """Return a reader's key in an `nn.ModuleDict`: its name, with a suffix if `nn.ModuleDict` refuses that name.

    It refuses the names of its own attributes, such as "type".
    """
    return name + _SUFFIX if name == "training" or hasattr(nn.ModuleDict, name) else name
