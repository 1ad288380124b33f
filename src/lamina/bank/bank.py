"""The bank: readers that share one model and so one pass."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Self, cast, final

import torch
from torch import Tensor, nn

from lamina.bank.generation_states import Over
from lamina.bank.listening import check_over, listening, unheard
from lamina.bank.monitoring import Monitoring, monitor_names
from lamina.bank.reader import BankOutput, Reader, ReaderModule, ReaderOutput
from lamina.bank.saving import Saving
from lamina.bank.stack_pass import StackPass, States, attach, recording
from lamina.errors import ConfigError, NotFiniteError, UnknownNameError
from lamina.heads.base import ReadTask
from lamina.layers import LayerStack, stacks
from lamina.layers.adapters import check_no_adapters
from lamina.layers.devices import main_device
from lamina.layers.discovery import pick_stack
from lamina.layers.hooks import StopForward
from lamina.layers.layer_guard import LayerGuard, mark_as_read
from lamina.layers.nan_checks import first_non_finite
from lamina.layers.preserve import evaluating
from lamina.layers.towers import run_stacks, tower_for
from lamina.layers.wrappers import is_compiled, uncompiled, unwrapped

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")  # a reader's name is also the name of its folder


@final
class ReaderBank(nn.Module, Monitoring, Saving):
    """The readers that share one frozen model, trained and run in one pass of it.

    The model is not a submodule: `bank.parameters()` and `bank.state_dict()` concern the readers only. A copy of a bank
    (`copy.deepcopy`, pickle) reads a copy of the model.

    Args:
        model: Any `transformers.PreTrainedModel`, head included. It is frozen and put in eval mode. Of a
            compiled or DataParallel model the one inside is read, uncompiled.
        processor: Its tokenizer; needed to train on texts and to predict from them.
        train_base: Fine-tune the model along with the readers: it is not frozen, and follows the bank's mode. The main
            job then changes; parameters that were frozen before stay so, and ConfigError is raised if all were, or if
            the model carries adapters (PEFT), which could not be saved with it.
    """

    def __init__(self, model: PreTrainedModel, processor: Any = None, *, train_base: bool = False) -> None:
        super().__init__()
        model = unwrapped(model)
        if train_base and not any(parameter.requires_grad for parameter in model.parameters()):
            came = "train_base is set, but every parameter of the model is frozen"
            raise ConfigError(f"bank: {came}; some must be trainable. Call model.requires_grad_(True) first.")
        if weight := first_non_finite(model.named_parameters()):
            what = f"the model's weight '{weight}' holds NaN or infinity; what is read off it would be no number"
            raise NotFiniteError(f"bank: {what}.", name=weight)
        if train_base:
            check_no_adapters(model, "bank: train_base is set")
        model = model.eval() if train_base else model.eval().requires_grad_(False)
        self._model = (model,)  # in a tuple, so that nn.Module does not register it
        self.train_base = self.own_base = train_base  # a base of its own is saved with the bank
        self.processor = processor
        self.readers = nn.ModuleDict()
        self.info: dict[str, Any] = {}
        self._found: tuple[dict[str, LayerStack], LayerGuard] | None = None
        mark_as_read(model, self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        mark_as_read(self.model, self)

    def extra_repr(self) -> str:
        """What is read, for the print of its modules."""
        return f"{type(self.model).__name__} '{self.model.name_or_path}'"

    @property
    def model(self) -> PreTrainedModel:
        """The model that is read."""
        return self._model[0]

    @property
    def device(self) -> torch.device:
        """Where the model's parameters are; of offloaded ones, where it runs."""
        return main_device(self.model)

    @property
    def stacks(self) -> dict[str, LayerStack]:
        """The model's stacks, found once; ConfigError if its layers were edited since."""
        if self._found is None:
            by_name = stacks(self.model)
            self._found = by_name, LayerGuard(self.model, by_name)
        self._found[1].check(self.model, "bank")
        return self._found[0]

    def add(self, name: str, reader: Reader | ReadTask) -> ReaderModule:
        """Attach a reader; returns the trainable module, which is also at `bank[name]`.

        Args:
            name: Of letters, digits, `_` and `-`; it is also that of the reader's folder when saved.
            reader: The reader; of a `lamina.Task` its `Reader.default`.

        Raises:
            ConfigError: If the name is taken or not allowed, the reader's settings do not fit the model, or nothing
                was chosen for tasks of that kind.
        """
        self._check_new("bank.add", name)
        if not isinstance(reader, Reader):
            if not isinstance(reader, ReadTask):
                what = "a lamina.Reader is needed, or a lamina.Task for its default reader"
                raise ConfigError(f"bank.add: got {type(reader).__name__}; {what}.")
            reader = Reader.default(reader)
        stack = pick_stack(self.stacks, reader.stack or tower_for(self.stacks, reader.head.inputs), op="bank")
        module = ReaderModule(reader, stack, self.model).to(self.device).train(self.training)
        self.readers[_key(name)] = module
        return module

    def _check_new(self, op: str, name: str) -> None:
        if not isinstance(name, str) or not NAME.fullmatch(name):  # pyright: ignore[reportUnnecessaryIsInstance]
            form = "letters, digits, '_' and '-', beginning with a letter or digit"
            raise ConfigError(f"{op}: '{name}' cannot be a reader's name; it is also a folder. Use {form}.")
        if name in self:
            raise ConfigError(f"{op}: there is a reader '{name}' already. Remove it first, or choose another name.")

    def update(self, other: ReaderBank, readers: Sequence[str] | None = None) -> None:
        """Take readers of another bank on the same model, with their weights; those of the same names are replaced.

        The two banks then share these modules, and their monitors, which follow a reader that one of them renames.
        `ReaderBank.from_pretrained(folder, bank.model)` gives such a bank.

        Args:
            other: Where they come from.
            readers: Names of readers of `other`; None: all.

        Raises:
            UnknownNameError: If `other` has no such reader.
            ConfigError: If `other` reads another model, or readers that stay and readers that come keep monitors of one
                name.
        """
        names = other._known("bank.update", readers)
        if other.model is not self.model:
            rule = "both banks must read one model. Load it with ReaderBank.from_pretrained(folder, bank.model)"
            raise ConfigError(f"bank.update: the other bank reads a {type(other.model).__name__} of its own; {rule}.")
        kept = {monitor for name in self if name not in names for monitor in monitor_names(self[name])}
        for name in names:
            if both := kept.intersection(monitor_names(other[name])):
                came = f"reader '{name}' keeps a monitor '{both.pop()}', and so does one that stays"
                raise ConfigError(f"bank.update: {came}. Drop one of them with bank.drop_monitor.")
        for name in names:
            self.readers[_key(name)] = other[name].train(self.training)

    def remove(self, name: str) -> None:
        """Detach a reader; UnknownNameError if there is none of that name."""
        self._known("bank.remove", [name])
        del self.readers[_key(name)]

    def rename(self, name: str, to: str) -> None:
        """Give a reader another name; UnknownNameError if it is not there, ConfigError if `to` is taken or no name."""
        self._known("bank.rename", [name])
        self._check_new("bank.rename", to)
        self.readers = nn.ModuleDict({_key(to if known == name else known): self[known] for known in self})
        self._rename_in_monitors(name, to)

    def __getitem__(self, name: str) -> ReaderModule:
        self._known("bank", [name])
        return cast("ReaderModule", self.readers[_key(name)])

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and _key(name) in self.readers

    def __iter__(self) -> Iterator[str]:
        return (key.removesuffix(_APART) for key in self.readers)

    def __len__(self) -> int:
        return len(self.readers)

    def _known(self, op: str, names: Iterable[str] | None) -> list[str]:
        """Names of readers, None: of all; UnknownNameError if one is not there."""
        names = list(self if names is None else names)
        for name in names:
            if name not in self:
                raise UnknownNameError(op=op, got=name, known=self, what="reader")
        return names

    def train(self, mode: bool = True) -> Self:
        """Set the readers' mode; the model's too where it is trained, while a frozen one stays in eval mode."""
        if self.train_base:
            self.model.train(mode)
        return super().train(mode)

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Move the readers, and the model along with them (its dtype is left alone)."""
        device = torch.empty(0, device=self.device).to(*args, **kwargs).device
        if device != self.device:
            self.model.to(device)  # pyright: ignore[reportArgumentType]
        return super().to(*args, **kwargs)

    def cuda(self, device: int | torch.device | None = None) -> Self:
        """Move the readers and the model to a GPU, by default the current one."""
        return self.to(torch.device("cuda", device) if isinstance(device, int) else device or torch.device("cuda"))

    def cpu(self) -> Self:
        """Move the readers and the model to the CPU."""
        return self.to(torch.device("cpu"))

    def forward(
        self,
        *,
        labels: Mapping[str, Tensor] | None = None,
        readers: Sequence[str] | None = None,
        main: bool = False,
        **batch: Any,
    ) -> BankOutput:
        """Run the model once and every reader on it.

        Args:
            labels: Reader name -> labels (see the heads' `loss`); readers without any get no loss.
            readers: Which readers to run; None: all.
            main: Whether the model's own output is wanted; if not, its forward ends after the last layer needed.
            **batch: What the model is called with.

        Raises:
            UnknownNameError: If a name is not in the bank.
            ConfigError: If there is no reader to run, labels do not fit, the batch's attention mask does not say which
                tokens are real, or the model's layers were edited since they were found.
        """
        labels = {} if labels is None else labels
        passes, stop = self._start(readers, labels), StopForward()
        with (
            attach(passes, batch, None if main else stop),
            torch.set_grad_enabled(self._grad and self.train_base),
            self._uncompiled(),
            unheard(),
        ):
            wanted = [] if main else [stack_pass.stack for stack_pass in passes]
            output = run_stacks(self.model, wanted, batch, stop)
        return self._finish(passes, labels, readers, main=output)

    def read_states(
        self,
        states: Mapping[str, Mapping[int, Tensor]],
        batch: Mapping[str, Any],
        *,
        readers: Sequence[str] | None = None,
        labels: Mapping[str, Tensor] | None = None,
    ) -> BankOutput:
        """Run readers on what `record_states` gave for a batch, in place of a run of the model; see `forward`.

        Raises:
            ConfigError: If a layer is missing, or a reader needs more of the model's pass than its states.
        """
        labels = {} if labels is None else labels
        passes = self._start(readers, labels)
        for stack_pass in passes:
            stack, given = stack_pass.stack, states.get(stack_pass.stack.name, {})
            stack_pass.begin(batch)
            for name, reader in stack_pass.readers.items():
                if reader.config.fusion.needs_block_inputs:
                    reason = "needs more of the model's pass than its states; call the bank itself"
                    raise ConfigError(f"bank.read_states: reader '{name}' {reason}.")
            for layer in stack_pass.layers:
                if layer not in given:
                    came = f"no state of layer {layer} of the stack '{stack.name}' came"
                    needed = ", ".join(map(str, stack_pass.layers))
                    raise ConfigError(f"bank.read_states: {came}; the readers need the layers {needed}.")
                stack_pass.on_state(layer, given[layer])
        return self._finish(passes, labels, readers)

    def record_states(self, layers: Mapping[str, Sequence[int]], batch: Mapping[str, Any]) -> States:
        """Run the model up to the last of stack -> layers; returns stack -> layer -> state `[batch, tokens, width]`."""
        wanted = {pick_stack(self.stacks, name, op="bank"): chosen for name, chosen in layers.items()}
        stop = StopForward()
        with recording(wanted, stop) as states, torch.no_grad(), self._uncompiled(), unheard():
            run_stacks(self.model, wanted, batch, stop)
        return states

    @property
    def _grad(self) -> bool:
        """Whether a pass keeps gradients."""
        return torch.is_grad_enabled() and self.training

    def _uncompiled(self) -> AbstractContextManager[None]:
        """Has a pass run without compiled code, which may not know of hooks."""
        compiled = is_compiled(self.model) or (self._found is not None and self._found[1].compiled)
        return uncompiled() if compiled else nullcontext()

    def _start(self, readers: Sequence[str] | None, labels: Mapping[str, Tensor]) -> list[StackPass]:
        """Check what was asked for, and begin a pass over each stack that is read."""
        names = self._known("bank", readers)
        if not isinstance(labels, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            what = "a mapping of readers' names to their labels is needed"
            raise ConfigError(f"bank: labels are a {type(labels).__name__}; {what}.")
        self._known("bank", labels)
        if unread := [name for name in labels if name not in names]:
            raise ConfigError(f"bank: labels for '{unread[0]}', which is not among `readers`.")
        if not names:
            raise ConfigError("bank: there is no reader to run. Call bank.add(name, Reader(...)) first.")
        for name in names:
            if self[name].training:
                self[name].seed_dropout(self.device)
        return self._passes(names, grad=self._grad)

    def _passes(self, names: Sequence[str], *, grad: bool) -> list[StackPass]:
        used = {stack: {name: self[name] for name in names if self[name].stack == stack} for stack in self.stacks}
        model, own = self.model, {self.stacks[name]: members for name, members in used.items() if members}
        return [StackPass(model, stack, members, grad=grad, processor=self.processor) for stack, members in own.items()]

    def _finish(
        self, passes: list[StackPass], labels: Mapping[str, Tensor], readers: Sequence[str] | None, main: Any = None
    ) -> BankOutput:
        """Logits and losses, in the order of the readers that were asked for."""
        outputs: dict[str, ReaderOutput] = {}
        for stack_pass in passes:
            outputs |= stack_pass.finish(labels)
        out = BankOutput({name: outputs[name] for name in (self if readers is None else readers)}, main=main)
        with torch.set_grad_enabled(self._grad):
            for name, target in labels.items():
                out[name].loss = self[name].loss(out[name].logits, target)
            losses = [output.loss for output in out.readers.values() if output.loss is not None]
            out.loss = torch.stack(losses).sum() if losses else None
        return out

    @contextmanager
    def listen(self, readers: Sequence[str] | None = None, over: Over = "prompt") -> Iterator[BankOutput]:
        """Read from the main job's own passes: `model(...)` and `model.generate(...)` run as if nobody listened.

        Each reader hears the first pass over its stack, or, in what is `over` an output, the first call of `generate`;
        `heard.clear()` makes it ready for the next. What is heard is what the bank would say of the same text in one
        plain pass. Passes are heard in the thread or task that listens, and in tasks and `asyncio.to_thread` calls it
        starts; those that a bank itself runs are not. Meanwhile the readers are in eval mode.

        In generation the readers of a decoder take the states of each step as it runs: those whose fusion is
        token-wise keep one vector of features per token, the others (`Routing`, `Head2Toe`, `PooledLayers`, positions)
        the states of their layers. What belongs to which sequence is told by `generate` itself: its sequences, its end
        tokens, and of beams its `beam_indices`, which say for each step in which row the winner was; a state depends on
        the tokens before it alone, and a row's cache is that of its own beam. The tokens that were read are compared to
        those that came out. A sequence's last token is read by no step, so nothing is heard of it. There is one row per
        sequence that is returned; rows that ended early are masked from there (a sequence that ended at once has no
        answer over its output: NaN). Sampling, beams, unequal prompts, several return sequences, pieces of a prompt
        (`prefill_chunk_size`) and assisted decoding are followed.

        Args:
            readers: Which readers listen; None: all. UnknownNameError if one is not in the bank.
            over: What the readers of a decoder hear in `generate`: "prompt" (in one pass, a row per beam or sample, as
                the model reads it), "output", the tokens that are written, or "both". Readers of an encoder hear its
                pass in any case.

        Yields:
            One output per reader that heard a pass, filled while the model runs; `heard[name].tokens` has the ids that
            belong to the columns of a generated text.

        Raises:
            ConfigError: If the model does not generate, a reader's fusion must run along with the base's own pass
                (`ExtraLayers`), or the bank listens to a generation already. While `generate` runs, if it decodes in a
                way whose states cannot be told apart; at `heard[name]`, if that reader heard nothing, with the reason.
        """
        names = self._known("bank.listen", readers)
        with evaluating(self, *([self.model] if self.train_base else [])):  # before passes take the readers as they are
            passes = self._passes(names, grad=False)
            check_over(self.model, passes, over)
            with listening(self.model, passes, over) as heard:
                yield heard


_APART = ":"  # no name has it


def _key(name: str) -> str:
    """A reader's key in `nn.ModuleDict`, which refuses the names of its own attributes, such as "type"."""
    return name + _APART if name == "training" or hasattr(nn.ModuleDict, name) else name
