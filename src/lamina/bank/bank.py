"""`ReaderBank`: readers that share one model, so that one forward pass serves them all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from lamina.bank import monitoring, watching
from lamina.bank.generation_states import Over
from lamina.bank.listening import check_over, listening
from lamina.bank.prompt_inputs import Prompts
from lamina.bank.reader import WATCHES, BankOutput, Reader, ReaderModule, warn_of_untrained
from lamina.bank.reader_collection import ReaderCollection
from lamina.bank.recorded_base import check_needs_states, check_reads_recorded, check_recorded_base
from lamina.bank.stack_pass import Inputs
from lamina.bank.step import Step
from lamina.bank.watching import Watch, Watched
from lamina.errors import ConfigError
from lamina.heads.base import ReadTask
from lamina.layers.discovery import pick_stack
from lamina.layers.preserve import evaluating
from lamina.layers.recorded import RecordedModel
from lamina.layers.stack import tower_for
from lamina.monitors.cascade import AnyMonitor
from lamina.monitors.reply_drift import DriftWatcher
from lamina.registry import provider
from lamina.utils import check_types

if TYPE_CHECKING:
    from huggingface_hub import ModelCard
    from transformers import PreTrainedModel

    from lamina.layers.types import Processor


@final
class ReaderBank(ReaderCollection):
    """Readers that share one model: one forward pass of the model computes the outputs of all of them.

    By default the model is not changed: it is frozen, stays in eval mode, and its own results are bit-identical with
    and without readers. The model is not a submodule, so `bank.parameters()` and `bank.state_dict()` hold the readers'
    tensors only. A copy of a bank (`copy.deepcopy`, pickle) contains a copy of the model.

    A bank behaves like a mapping: `bank[name]` is the `ReaderModule` of a reader, and iterating yields the names. The
    arguments are attributes of the same names.

    Example:
        ```python
        model, tokenizer = lamina.load("minilm")
        bank = ReaderBank(model, processor=tokenizer)
        bank.add("sentiment", Reader(AdaLayers(dim=64), SequenceClassification(("negative", "positive"))))
        batch = tokenizer(["A fine film."], return_tensors="pt")
        bank(**batch)["sentiment"].logits  # [batch, classes]
        ```

    Args:
        model: Any `transformers.PreTrainedModel`, with or without a head. It is frozen and put in eval mode. If it is
            compiled or in DataParallel, the plain model inside is used.
        processor: The model's tokenizer or processor. Training on texts and predicting from them need it.
        train_base: Fine-tune the model together with the readers. The model is then not frozen, `bank.train()` and
            `bank.eval()` set its mode too, and its own outputs change. It starts in eval mode, without dropout: call
            `bank.train()` to train it by hand. Parameters that were frozen stay frozen.
        saves_base: Save the model's weights with the bank. None: only if `train_base` is set.
        info: JSON-ready facts about the bank, which are saved with it.

    Attributes:
        folder: Local folder from which the bank was loaded. None: it was not loaded.

    Raises:
        ConfigError: If an argument has the wrong type; if `train_base` is set and all parameters are frozen, or the
            model has adapters (PEFT); if the tokenizer has ids beyond the embedding table; if layers that were inserted
            into the model have been lost.
        NotFiniteError: If a weight of the model holds NaN or infinity.
    """

    # Recorded states

    @classmethod
    @check_types("bank.from_states")
    def from_states(cls, folder: str | PathLike[str]) -> ReaderBank:
        """Return a bank on recorded hidden states instead of a model. It has no readers yet.

        Its readers are trained by `fit` on a `Task.from_states`. To read texts, the bank needs the model: see `attach`.

        Args:
            folder: Folder of the states, with `states.json`.

        Raises:
            StoreError: If there is no manifest, it is damaged or contradicts itself.
            UnknownNameError: If the manifest has an unknown key.
        """
        return provider("storage").bank_of_states(folder)

    def attach(self, model: PreTrainedModel, processor: Processor | None = None) -> ReaderBank:
        """Return a new bank in eval mode on the model itself, with this bank's readers.

        This bank must come from `from_states`. The two banks share the readers, which are put in eval mode and moved to
        the model's device: training them in one bank changes them in the other.

        Args:
            model: The model whose states were recorded. If the states' manifest has no fingerprint of its weights, only
                depth and width are checked, with a warning.
            processor: The model's tokenizer or processor. None: the new bank has none.

        Raises:
            ConfigError: If this bank has a model already, `model` is not a model, or `processor` does not fit it.
            NotFiniteError: If a weight of `model` holds NaN or infinity.
            UnsupportedModelError: If the layers of `model` cannot be found.
            BaseMismatchError: If `model` does not have the recorded stack, or its depth, width or fingerprint differs.
        """
        if not isinstance(self.model, RecordedModel):
            what = f"it reads a {type(self.model).__name__} already"
            raise ConfigError(f"bank.attach: {what}; only banks from recorded states have no model.")
        bank = ReaderBank(model, processor, info=self.info)
        check_recorded_base("bank.attach", bank.stacks, bank.model, self.model.facts)
        bank.readers.update(dict(self.readers.items()))
        return bank.to(bank.device).eval()

    # The model's own passes

    @contextmanager
    def listen(self, readers: Collection[str] | None = None, over: Over = "prompt") -> Iterator[BankOutput]:
        """Let readers read the forward passes of `model(...)` and `model.generate(...)` calls inside the `with` block.

        The model computes nothing twice, and its results are bit-identical to those without readers. The outputs equal
        those of `bank(...)` on the same text.

        Example:
            ```python
            with bank.listen(over="output") as outputs:
                model.generate(**batch, max_new_tokens=20)
            outputs["sentiment"].logits  # [sequences, classes]
            ```

        A reader has one output: that of the first pass over its stack. With `over="output"` or "both", readers of a
        decoder read the whole first call of `generate` instead. Call `outputs.clear()` before the next pass or text.
        Passes that a bank runs itself are ignored. Passes are read in the thread or asyncio task that entered the
        `with` block, and in tasks and `asyncio.to_thread` calls that it starts. Start other threads with
        `contextvars.copy_context().run` as their target. The readers are in eval mode inside the `with` block; with
        `train_base`, so is the model.

        The output for a generated text has one row per returned sequence. The model does not read the last token of a
        sequence, so readers do not either. After the end of a sequence the mask is False; a sequence that ended at once
        has NaN logits for its output. Sampling, beam search, padded prompts, several return sequences, prompts in
        pieces (`prefill_chunk_size`) and assisted decoding are supported. A fusion that reads inside the blocks
        (`ExtraLayers`) needs the whole prompt in one pass: its reader has no output for a prompt in pieces, with
        assisted decoding, or with a cache that holds tokens already or has a fixed size.

        Args:
            readers: Names of the readers. None: all.
            over: Which part of a generated text the readers of a decoder read: "prompt" (one row per beam or sample, as
                the model reads it), "output" (the new tokens) or "both". With "output" they read no `model(...)` call.
                Readers of an encoder read the encoder's pass, whatever `over` is.

        Yields:
            The outputs, filled while the model is called. `outputs[name].tokens` has the ids of a generated text.

        Raises:
            UnknownNameError: If a reader is not in the bank, or `over` is none of the three values.
            ConfigError: If the frozen model has changed, or a reader is already used by an enclosing `listen`. Unless
                `over` is "prompt", also if the model generates no text or decodes by its own loop, or a fusion reads
                inside the blocks. Calls inside the `with` block raise it too: `generate`, if its way of decoding does
                not tell which states belong to which text; `model(...)` with a cache of earlier tokens, unless `over`
                is "prompt" (all outputs are then dropped); and `outputs[name]`, if that reader read no pass or no
                token, or its fusion needs the prompt in one pass.
        """
        chosen = self.select(readers, "bank.listen")
        # eval mode first: a pass looks at the mode of its readers when it is built
        with evaluating(self, *([self.model] if self.train_base else [])):
            passes = self.passes(chosen, grad=False)
            check_over(self.model, passes, over)
            with listening(self, passes, over) as outputs:
                yield outputs

    # Monitors

    @property
    def monitors(self) -> dict[str, AnyMonitor]:
        """Name -> monitor that is saved with a reader. ConfigError if one cannot be read or two have one name."""
        return monitoring.stored_monitors(self.select(None, "bank"))

    @check_types("bank.keep_monitor")
    def keep_monitor(self, monitor: AnyMonitor) -> None:
        """Store a monitor with its reader, to be saved with the bank; replace a stored monitor of the same name.

        A cascade is stored with its second reader. Training one of its readers again removes the monitor, and so does
        replacing one with `update`.

        Raises:
            UnknownNameError: If the bank does not have the reader, or the reader does not have the label.
            ConfigError: If the monitor does not fit its reader's head, or the reader looks at other tokens.
        """
        monitoring.store_monitor(self.select(None, "bank"), monitor)

    def drop_monitor(self, name: str) -> None:
        """Remove a stored monitor; raise UnknownNameError if no monitor has this name."""
        monitoring.drop_monitor(self.select(None, "bank"), name)

    @torch.no_grad()
    @check_types("bank.add")
    def add(self, name: str, reader: Reader | ReadTask, *, watch: bool = False) -> ReaderModule:
        """Build a reader and add it to the bank. Return its trainable module, also available as `bank[name]`.

        The module is on the model's device and in the mode of the bank. A cascade whose first reader had this name and
        was removed before is removed too, with a warning.

        Args:
            name: 1 to 100 letters, digits, `_` and `-`, beginning with a letter or digit. It is also the name of the
                reader's folder when the bank is saved.
            reader: The reader's settings; for a `lamina.Task`, its recommended reader (`Reader.default`) is used.
            watch: Whether a monitor will use the reader. If so, a task gets a reader that does not look ahead, a reader
                that cannot score a text while it is written is refused now, before training, and `from_pretrained`
                loads the model with its language model head.

        Raises:
            ConfigError: If the name is taken or not allowed, `reader` is neither settings nor a task, the settings do
                not fit the model, or tasks of that kind have no recommended reader. With `watch`, if the reader's
                scores of a token depend on later tokens, its fusion reads inside the model's blocks, the model does
                not write text from left to right, or the frozen model has changed.
            LayerIndexError: If the reader selects a layer that the model does not have.
            UnknownNameError: If the reader names a stack that the model does not have.
            UnsupportedModelError: If the model's layers cannot be found.
        """
        self._check_new_name("bank.add", name)
        if not isinstance(reader, Reader):
            if not isinstance(reader, ReadTask):
                what = "a lamina.Reader is needed, or a lamina.Task for its default reader"
                raise ConfigError(f"bank.add: got {type(reader).__name__}; {what}.")
            reader = Reader.default(reader, watch=watch)
        stack = pick_stack(self.stacks, reader.stack or tower_for(self.stacks, reader.head.inputs), op="bank")
        if isinstance(self.model, RecordedModel):
            check_needs_states("bank.add", reader)
        module = ReaderModule(reader, stack, self.model)
        if reader.weights is None and not module.head.borrowed_tensors():
            module.first_hash = module.weights_hash()
        module.to(self.device).train(self.training)
        if isinstance(self.model, RecordedModel):
            check_reads_recorded("bank.add", name, module, self.model.facts)
        if watch:
            monitoring.check_token_wise("bank.add", name, module)
            monitoring.check_reads_stepwise("bank.add", {name: module})
            monitoring.causal_pass(self, "bank.add", {name: module})
            module.info[WATCHES] = True
        self._put("bank.add", {name: module})
        return module

    @check_types("bank.monitor_scores")
    def monitor_scores(self, monitor: AnyMonitor, batch: Inputs, mask: Tensor | None = None) -> Tensor:
        """Return a monitor's score of each text up to each token, from one plain pass of the model.

        Args:
            monitor: The monitor; its readers must be in the bank.
            batch: Keyword arguments for the model, such as `input_ids`.
            mask: `[batch, tokens]`, True at the tokens to score. None: all tokens but the special tokens of the bank's
                tokenizer, as in `watch`. Padding is never scored.

        Returns:
            `[batch, tokens]` in float64, on the CPU. Tokens that are not scored repeat the score before them, NaN at
            the start. A cascade's score is inf where its first monitor is sure, and -inf at tokens that are not scored
            or where the first monitor is below its threshold.

        Raises:
            UnknownNameError: If a reader or label does not exist.
            ConfigError: If the monitor does not fit its reader's head; if the reader's logits of a token depend on
                later tokens, or its stack is not the one that writes text; if the frozen model has changed, the batch
                is empty, or a mask has a different shape than the texts.
            NotFiniteError: If a score is NaN at a token that is scored.
        """
        return monitoring.scores_of_monitors(self, [monitor], batch, mask)[str(monitor.name)]

    @check_types("bank.watch")
    def watch(
        self,
        monitors: Collection[AnyMonitor | str] | Mapping[str, AnyMonitor] | AnyMonitor | str | None = None,
        over: Watched = "output",
        *,
        stop: Collection[str] | Mapping[str, AnyMonitor] | str | None = None,
        on_token: Callable[[Step], None] | None = None,
        every: int = 1,
        drift: Mapping[str, DriftWatcher] | None = None,
    ) -> AbstractContextManager[Watch]:
        """Return a context in which monitors score the text that `model.generate` writes, token by token.

        Monitors do not change the text, bit for bit. The scores equal the scores from one plain pass over the finished
        text. The special tokens of the bank's tokenizer are not scored, as in `calibrate`. Each call of `generate` is a
        new text. Greedy search and sampling are supported, with several return sequences, padded prompts, prompts in
        pieces, and any cache or none.

        Example:
            ```python
            with bank.watch([lamina.Monitor("safety", "unsafe", threshold=0.9)]) as watch:
                model.generate(**batch, stopping_criteria=[watch.stopping])
            watch.flagged_at  # {"safety": [17, None]}: each sequence's first flagged new token, from 0
            ```

        Args:
            monitors: One monitor or several (of a mapping, the values), or names of stored ones. None: all stored ones.
            over: "output": score the new tokens. "both": score the prompt too, which can then be flagged.
            stop: Names of the monitors (of a mapping, the keys) that let `watch.stopping` end a sequence. None: all.
            on_token: Called with the `Step` of each new token. An exception that it raises ends the generation.
            every: Number of tokens that are scored together. A larger number costs less, but steps, flags and stops are
                delayed by up to that many tokens.
            drift: Monitor name -> its drift test, from `monitor.watch_drift()`. The test receives each whole reply. It
                cannot be used with over="both", for a cascade, or together with `watch.stopping`. If a reply is cut
                off, call `watch.discard()` before `generate` returns.

        Returns:
            A context manager that yields the `Watch`, filled while the model generates. Entering it raises the errors.

        Raises:
            UnknownNameError: If a monitor, reader, label or value of `over` does not exist.
            ConfigError: If there is no monitor, two have one name, or one cannot be read or does not fit its reader's
                head; if `every` is below 1, or drift cannot be tested; if the frozen model has changed, does not write
                text from left to right, or decodes by its own loop; if a reader's logits of a token depend on later
                tokens, or its fusion reads inside the blocks. Also raised by `generate` for beam search and assisted
                decoding.
            NotFiniteError: By `generate`, if a score is NaN at a token that is scored, so that no flag could follow.
        """
        return watching.watch(self, monitors, over, stop=stop, on_token=on_token, every=every, drift=drift)

    @check_types("bank.stream")
    def stream(
        self,
        model: nn.Module,
        inputs: Prompts,
        *,
        monitors: Collection[AnyMonitor | str] | Mapping[str, AnyMonitor] | AnyMonitor | str | None = None,
        over: Watched = "output",
        stop: bool | Collection[str] | Mapping[str, AnyMonitor] | str | None = False,
        every: int = 1,
        drift: Mapping[str, DriftWatcher] | None = None,
        **options: Any,  # noqa: ANN401
    ) -> Iterator[Step]:
        """Generate a text, and yield each new token with the monitors' scores as soon as it is available.

        `generate` is called in another thread, when the first step is asked for. It is at most two tokens ahead of the
        caller. If the caller leaves the loop early, the generation ends.

        Args:
            model: The bank's model, or the part of it whose `generate` is called.
            inputs: One prompt or several, as text (tokenised by the bank's processor; in a list, also tuples of two
                texts), as token ids `[batch, tokens]`, or as the mapping that a tokenizer returns.
            monitors: One monitor or several, or names of stored ones. None: all stored ones.
            over: "output": score the new tokens. "both": score the prompt too.
            stop: Whether a flag of any monitor ends its sequence; or which monitors end it, as in `watch`.
            every: Number of tokens that are scored together, as in `watch`.
            drift: Monitor name -> its drift test, as in `watch`; not together with `stop`. A reply is left out if the
                caller leaves the loop before it is complete.
            **options: Options of `generate`, such as `max_new_tokens`, `do_sample` or `stopping_criteria`. With
                `stop_strings`, the bank's tokenizer is passed too.

        Yields:
            A `Step` for each new token, with all sequences in it. Wrong arguments raise at the call, before the first.

        Raises:
            UnknownNameError: If a monitor, reader, label or value of `over` does not exist.
            ConfigError: If `model` is not the bank's or writes no text, a prompt is empty or has more tokens than the
                model's learned position table, prompts are text and the bank has no tokenizer, or for any reason that
                `watch` names.
            NotFiniteError: Instead of a step, if a score is NaN at a token that is scored.
        """
        names = None if isinstance(stop, bool) else stop
        new_watch = partial(self.watch, monitors, over, stop=names, every=every, drift=drift)
        return watching.stream(self, model, inputs, new_watch, stop=stop is not False, options=options)

    # Storage

    @check_types("bank.save_pretrained")
    def save_pretrained(self, folder: str | PathLike[str], *, changed_base: bool = False) -> None:
        """Save readers, monitors, the processor, a manifest that names the model, and a model card to a folder.

        The model's weights are saved only if `saves_base` is set, as it is if the bank trains them. The manifest names
        the folder or hub id from which the model was loaded, or to which `lamina.save` wrote it. If Lamina has edited
        or trained the model since then, the manifest does not name it and a warning is logged: the model must then be
        passed to `from_pretrained`. Warnings also name readers that nothing has trained, and blocks that were changed
        by hand in a model that is not saved.

        A bank that is already in the folder is replaced; if an error occurs, it stays complete. Other files stay.

        Args:
            folder: Folder to write; created if it does not exist.
            changed_base: Save even if the model's weights or the processor have changed since the bank was made or
                loaded. The readers, here and in the folder, then belong to the changed ones, and refuse the old ones.

        Raises:
            StoreError: If the folder cannot be written or has files of the same names that no bank wrote, or an `info`
                holds a value that JSON cannot.
            NotFiniteError: If a weight holds NaN or infinity.
            ConfigError: If weights or settings of the frozen model have changed since the bank was made or loaded, or
                the processor since a reader was trained or loaded, and `changed_base` is not set. Also if a model that
                is saved with the bank has adapters or was changed by hand, a stored monitor cannot be read, or the
                class of a fusion or head is not registered.
        """
        provider("storage").save_bank(self, folder, changed_base=changed_base)
        warn_of_untrained("bank.save_pretrained", self.select(None, "bank.save_pretrained"))

    @classmethod
    def from_pretrained(
        cls,
        folder: str | PathLike[str],
        model: PreTrainedModel | None = None,
        processor: Processor | None = None,
        revision: str | None = None,
        readers: Collection[str] | str | None = None,
    ) -> ReaderBank:
        """Load a saved bank, or some of its readers, in eval mode.

        The model is frozen, even if it was trained with them.

        Example:
            ```python
            bank = ReaderBank.from_pretrained("out/bank")  # with the model that the bank names
            bank = ReaderBank.from_pretrained("user/bank", model=model)  # from the hub, onto a model in memory
            ```

        Args:
            folder: A local folder, or the id of a repository on the hub.
            model: The model on which the readers were trained. None: the model in the folder, or else the model that
                the manifest names, is loaded, with its language model head if the loaded readers have monitors or
                were added with `watch=True`. A bank on recorded states stays without a model.
            processor: Tokenizer or processor of the model. None: the one saved with the bank, or else with the model.
            revision: Branch, tag or commit of the repository on the hub. None: the main branch.
            readers: Names of the readers to load, or one name. None: all. Other readers are not downloaded.

        Raises:
            StoreError: If the folder or repository does not exist, the hub cannot be reached or refuses access, files
                are missing or damaged, or `model` is None and the manifest names no model.
            UnknownNameError: If the saved bank does not have a reader, a file has an unknown key, or a fusion or head
                is not registered.
            BaseMismatchError: If the readers were not trained on `model`, because its weights, settings or shape
                differ, or the processor makes other inputs.
            NotFiniteError: If a weight of the model holds NaN or infinity.
            ModelNotFoundError: If the model that the manifest names cannot be found.
            UnsupportedModelError: If transformers does not know the family of that model.
            ConfigError: If a local folder gets a `revision` other than "main", or `model` is not a model.
        """
        return provider("storage").load_bank(folder, model, processor, revision=revision, readers=readers)

    def push_to_hub(
        self,
        repo: str,
        *,
        message: str = "Save readers",
        branch: str | None = None,
        create_pr: bool = False,
        private: bool | None = None,
        token: str | None = None,
    ) -> str:
        """Save the bank to a repository on the hub in one commit, and return the address of the commit.

        The repository is created if it does not exist. The commit deletes readers, a base model and a processor that
        are not part of this bank; other files stay.

        Args:
            repo: Id of the repository, such as "user/bank".
            message: Message of the commit.
            branch: Branch to commit to, created if it does not exist. None: "main".
            create_pr: Open a pull request instead of committing to the branch.
            private: Whether a new repository is private. None: the default of the account.
            token: Access token. None: the one from `hf auth login` or HF_TOKEN.

        Raises:
            ConfigError: For the reasons that `save_pretrained` names.
            NotFiniteError: If a weight holds NaN or infinity.
            StoreError: If the hub refuses the commit or cannot be reached. After this or another error nothing is
                committed, but a new repository or branch may stay.
        """
        return provider("storage").push_bank(
            self, repo, message=message, branch=branch, create_pr=create_pr, private=private, token=token
        )

    def generate_model_card(self, title: str = "bank") -> ModelCard:
        """Return the model card that is saved with the bank; its example loads the folder or hub id `title`.

        Raises ConfigError if a stored monitor cannot be read.
        """
        return provider("storage").model_card(self, title)
