"""The part of a bank that has to do with monitors: which it has, and running them while a text is written."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from queue import Full, Queue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from lamina.bank.listening import check_over, decodes, listening, unheard
from lamina.bank.stack_pass import attach
from lamina.bank.watching import Leaving, Step, Watch, checked_monitors, token_logits
from lamina.errors import ConfigError, UnknownNameError, convert_errors
from lamina.layers.causality import is_causal
from lamina.layers.hooks import StopForward, run_until_stopped
from lamina.layers.preserve import evaluating
from lamina.layers.wrappers import uncompiled, unwrapped
from lamina.monitors.cascade import AnyMonitor, Cascade, start
from lamina.monitors.monitor import Monitor
from lamina.utils import check_range

if TYPE_CHECKING:
    from lamina.bank.bank import ReaderBank
    from lamina.bank.reader import ReaderModule
    from lamina.bank.stack_pass import StackPass

KEY = "monitors"  # in a reader's `info`, with which they are saved; training it anew takes them away
Watched = Literal["output", "both"]


def monitor_names(reader: ReaderModule) -> list[str]:
    """The monitors that are kept with a reader."""
    return list(reader.info.get(KEY, {}))


class Monitoring:
    """What `ReaderBank` does with monitors."""

    @property
    def _bank(self) -> ReaderBank:
        return cast("ReaderBank", self)

    @property
    def _readers(self) -> dict[str, ReaderModule]:
        return {name: self._bank[name] for name in self._bank}

    @property
    def monitors(self) -> dict[str, AnyMonitor]:
        """The monitors that are kept with the readers of this bank, by name; they are saved and loaded with them."""
        monitors: dict[str, AnyMonitor] = {}
        for reader, module in self._readers.items():
            what = f"what is saved as the monitors of reader '{reader}' cannot be understood"
            with convert_errors(
                lambda reason, what=what: ConfigError(f"bank: {what} ({reason}). Calibrate them anew.")
            ):
                for name, value in module.info.get(KEY, {}).items():
                    monitors[name] = (Cascade if "first" in value else Monitor).from_dict(value)
        return monitors

    def keep_monitor(self, monitor: AnyMonitor) -> None:
        """Keep a monitor with its reader, in place of one of that name; an error if it does not fit the readers."""
        (name,) = checked_monitors("bank.keep_monitor", [monitor], {}, self._readers)
        if name in self.monitors:
            self.drop_monitor(name)
        info = self._bank[monitor.reader].info
        info[KEY] = {**info.get(KEY, {}), name: monitor.to_dict()}

    def drop_monitor(self, name: str) -> None:
        """Forget a monitor; UnknownNameError if there is none of that name."""
        if name not in self.monitors:
            raise UnknownNameError(op="bank.drop_monitor", got=name, known=self.monitors, what="monitor")
        for reader in self._readers.values():
            kept = {other: value for other, value in reader.info.pop(KEY, {}).items() if other != name}
            reader.info |= {KEY: kept} if kept else {}

    def _rename_in_monitors(self, name: str, to: str) -> None:
        """Have the monitors that are kept follow a reader to its new name."""
        saved = [value for reader in self._readers.values() for value in reader.info.get(KEY, {}).values()]
        for value in saved:
            for part in (value, value.get("first", {}), value.get("second", {})):
                if part.get("reader") == name:
                    part["reader"] = to

    @torch.no_grad()
    def monitor_scores(self, monitor: AnyMonitor, batch: Mapping[str, Any], mask: Tensor | None = None) -> Tensor:
        """The score of each text up to and including each token, in one plain pass of the model.

        Args:
            monitor: The monitor; its readers must be in the bank.
            batch: What the model is called with.
            mask: True at the tokens that count, `[batch, tokens]`; None: at all real ones.

        Returns:
            `[batch, tokens]` in float64, on the CPU; NaN before the first token that counts. Of a cascade -inf (its
            first monitor sees no danger) and inf (it is sure) at tokens at which the second was not asked.

        Raises:
            UnknownNameError, ConfigError: As of `watch`.
        """
        checked_monitors("bank.monitor_scores", [monitor], {}, self._readers)
        stop, base = StopForward(), [self._bank.model] if self._bank.train_base else []
        with evaluating(self._bank, *base):
            stack_pass = self._template("bank.monitor_scores", monitor.readers)
            with attach([stack_pass], batch, stop), uncompiled(), unheard():
                run_until_stopped(self._bank.model, batch, stop)
                logits = token_logits(stack_pass)
        real = torch.ones(next(iter(logits.values())).shape[:2], dtype=torch.bool)
        if mask is not None and mask.shape != real.shape:
            came = f"the mask is {list(mask.shape)} for texts of {list(real.shape)}"
            raise ConfigError(f"bank.monitor_scores: {came}; it must be [batch, tokens] as these.")
        for given in (stack_pass.mask, mask):
            real = real if given is None else real & given.cpu().bool()
        heads = {name: self._bank[name].config.head for name in monitor.readers}
        ((_, working),) = start({"": monitor}, heads)
        return working.add(lambda name, rows: logits[name][rows], real)[0]

    @contextmanager
    def watch(
        self,
        monitors: Sequence[AnyMonitor | str] | None = None,
        over: Watched = "output",
        *,
        stop: Sequence[str] | None = None,
        on_token: Callable[[Step], None] | None = None,
        every: int = 1,
    ) -> Iterator[Watch]:
        """Run monitors on what the model writes in calls of `generate`; what it writes is the same, bit for bit.

        Greedy search and sampling are watched, with several return sequences, unequal prompts, prompts in pieces,
        caches of any kind or none. Each call of `generate` is a new text. The scores are those of one plain pass over
        the text.

        Args:
            monitors: Monitors, or names of some that are kept with the bank; None: all of these.
            over: "output", the tokens that are written, or "both": the prompt is read as a part of the text, and may be
                what a text is flagged for.
            stop: Names of the monitors that `watch.stopping` heeds; None: all.
            on_token: Called with each new token's `Step`, once a step of the model has read it; what it raises ends the
                generation.
            every: How many tokens are read together; more cost less, and are told of, flagged and stopped later.

        Yields:
            The `Watch`, filled as the model writes.

        Raises:
            UnknownNameError: If a monitor, reader or label does not exist.
            ConfigError: If there is no monitor, or what a reader says of a token may depend on later ones: because of
                its fusion, its head, or the stack that it reads. While `generate` runs, if it decodes in a way whose
                tokens are not final while they are written (beams, drafts).
        """
        op = "bank.watch"
        chosen = checked_monitors(op, monitors, self.monitors, self._readers)
        check_range(op, "every", every, 1)
        if over not in ("output", "both"):
            raise UnknownNameError(op=op, got=over, known=("output", "both"), what="over")
        stop = (stop,) if isinstance(stop, str) else stop
        for name in stop or ():
            if name not in chosen:
                raise UnknownNameError(op=op, got=name, known=chosen, what="monitor")
        base = [self._bank.model] if self._bank.train_base else []
        with evaluating(self._bank, *base):  # before the pass is made, which takes the readers as they are
            template = self._template(op, list(dict.fromkeys(name for own in chosen.values() for name in own.readers)))
            check_over(self._bank.model, [template], over)
            watch = Watch(template, chosen, stop=stop, on_token=on_token, every=every)
            with listening(self._bank.model, [template], over, watch.begin):
                yield watch

    def _template(self, op: str, names: Sequence[str]) -> StackPass:
        """The pass that readers take part in; ConfigError if its states depend on later tokens."""
        passes = self._bank._passes(names, grad=False)
        for stack_pass in passes:
            stack, (first, *_) = stack_pass.stack, stack_pass.readers
            what = f"reader '{first}' reads the stack '{stack.name}'"
            if not decodes(stack_pass, self._bank.model):
                rule = "which does not read what is written. Use a reader of the stack that does"
                raise ConfigError(f"{op}: {what}, {rule}.")
            if not is_causal(self._bank.model, stack):
                rule = "whose states of a token change with later tokens; a text that is being written has none"
                raise ConfigError(f"{op}: {what}, {rule}. Use a causal language model.")
        return passes[0]

    def stream(
        self,
        model: nn.Module,
        inputs: Mapping[str, Any] | Tensor | str | Sequence[str],
        *,
        monitors: Sequence[AnyMonitor | str] | None = None,
        over: Watched = "output",
        stop: bool | Sequence[str] = False,
        every: int = 1,
        **options: Any,
    ) -> Iterator[Step]:
        """Write a text with `generate` and yield each new token with the monitors' scores, as they come.

        `generate` runs in a thread of its own, two tokens ahead at most. To leave the loop early ends it, and no hook
        stays.

        Args:
            model: The bank's model, or the part of it whose `generate` is to run.
            inputs: What a tokenizer gives for the prompts, or their ids `[batch, tokens]`, or a text or several, which
                the bank's processor turns into them.
            monitors: As of `watch`.
            over: As of `watch`.
            stop: Whether a sequence ends once a monitor has flagged it; or the names of the monitors that end it.
            every: As of `watch`.
            **options: Of `generate`, such as `max_new_tokens`, `do_sample` or `stopping_criteria`.

        Yields:
            One `Step` per new token.

        Raises:
            ConfigError: If the bank does not read `model`, texts are given and it has no processor, and as of `watch`.
        """
        model = unwrapped(model)
        if all(part is not model for part in self._bank.model.modules()):
            came = f"got a {type(model).__name__} that is not the bank's model or a part of it"
            raise ConfigError(f"bank.stream: {came}. Give bank.model.")
        given = self._prompts(inputs)
        heeded = None if isinstance(stop, bool) else stop
        criteria = list(options.pop("stopping_criteria", None) or ())

        def write(put: Callable[[Step], None], leave: Leaving) -> None:
            with self.watch(monitors, over, stop=heeded, on_token=put, every=every) as watch:
                also = [leave] if stop is False else [watch.stopping, leave]
                cast("Any", model).generate(**given, **options, stopping_criteria=[*criteria, *also])

        with self.watch(monitors, over, stop=heeded, every=every):
            pass  # what is wrong is told now, and not when the first token is asked for
        return _in_thread(write, self._bank.device.type)

    def _prompts(self, inputs: Mapping[str, Any] | Tensor | str | Sequence[str]) -> dict[str, Any]:
        """What `generate` takes for prompts."""
        if isinstance(inputs, Mapping):
            return dict(inputs)
        if isinstance(inputs, Tensor):
            return {"inputs": inputs}
        if self._bank.processor is None:
            came = "a text was given, and the bank has no processor to read it"
            raise ConfigError(f"bank.stream: {came}. Use ReaderBank(model, processor=...).")
        texts = [inputs] if isinstance(inputs, str) else list(inputs)
        padding: dict[str, Any] = {"padding": len(texts) > 1}
        if "main" in self._bank.stacks:
            padding["padding_side"] = "left"  # so that what is written follows the text
        encoded = self._bank.processor(texts, return_tensors="pt", **padding)
        known = ("input_ids", "attention_mask")
        return {key: encoded[key].to(self._bank.device) for key in known if key in encoded}


def _in_thread(write: Callable[[Callable[[Step], None], Leaving], None], device: str) -> Iterator[Step]:
    """What `write` puts, as it comes; it runs in a thread with the context and autocast of this one."""
    queue: Queue[Step | BaseException | None] = Queue(maxsize=1)
    left, context = Event(), contextvars.copy_context()
    precision = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def put(item: Step | BaseException | None) -> None:
        waiting = True
        while waiting and not left.is_set():
            with suppress(Full):
                queue.put(item, timeout=0.1)
                waiting = False

    def run() -> None:
        try:
            with torch.autocast(device, precision, enabled=precision is not None):
                write(put, Leaving(left))
        except BaseException as error:  # raised again where the steps are taken
            put(error)
        put(None)

    thread = Thread(target=context.run, args=(run,), name="lamina-stream", daemon=True)
    thread.start()
    try:
        while (item := queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        left.set()
        thread.join()
