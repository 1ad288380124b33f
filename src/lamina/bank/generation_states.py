"""The hidden states of one call of `generate`: collect them step by step, then assign them to its sequences."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import ChainMap, defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple, final

import torch
from torch import Tensor
from torch.nn import functional as F

from lamina.bank.generation import GenerateCall, Generated
from lamina.bank.reader import ReaderOutput
from lamina.bank.stack_pass import Inputs, StackPass, check_layer_order, past_tokens, refuse_pairs, run_heads
from lamina.errors import ConfigError
from lamina.layers.hooks import arguments, is_token_mask, token_mask

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

Over = Literal["prompt", "output", "both"]
_BUFFERED = 16  # tokens that are collected before the fusions read them: one call for many tokens is faster


class TokenBlock(NamedTuple):
    """Consecutive tokens of a text that the model has read, in one pass or several, with their states.

    Attributes:
        first: Position of the first token in the text, from 0.
        prompt: Length of the prompt in tokens.
        tokens: Ids `[rows, columns]`; -1 where the model was called with embeddings.
        real: False at padding of the prompt; generated tokens all count as real.
        states: Layer -> states `[rows, columns, width]`.
    """

    first: int
    prompt: int
    tokens: Int[Tensor, "rows columns"]
    real: Bool[Tensor, "rows columns"]
    states: Mapping[int, Tensor]


class GenerationObserver(ABC):
    """Receives the tokens and states of a text while `generate` writes it. Subclasses set `every`: tokens per call."""

    every: int

    @abstractmethod
    def on_tokens(self, block: TokenBlock) -> None:
        """Process the next tokens (`block`): at least `every` since the last call, more if a pass read more (a prompt).

        Also called at the end of the text, with the tokens that are left.
        """

    @abstractmethod
    def on_end(self, new: Int[Tensor, "sequences tokens"]) -> None:
        """Finish the text. Called after `generate` has returned, with all new tokens of its sequences."""

    @abstractmethod
    def close(self) -> None:
        """Mark the text as finished. Called last, also if `generate` has failed."""


@final
class GenerationStates:
    """Collects the states of one call of `generate` over one decoder stack, and computes the readers' outputs.

    A text has positions 0, 1, ... Each forward pass reads one or more of them: the whole prompt, a piece of it, the
    next token, or the draft tokens of an assistant. Rejected drafts are read again, so the last pass that reads a
    position counts. Readers with a token-wise fusion need only their features, one vector per token and row; for other
    readers the states themselves are stored. Beam search decides at the end which row becomes which sequence, so only
    `finish` assigns them.

    Args:
        template: A pass over the stack with the readers; new passes are started from it.
        call: The call of `generate`.
        over: Which part of the text the readers read: "prompt", "output" or "both".
        observer: Receives the tokens as they are read. If it is set, nothing is stored, and `finish` returns {}.
    """

    def __init__(
        self, template: StackPass, call: GenerateCall, over: Over, observer: GenerationObserver | None = None
    ) -> None:
        self.call, self.over, self.template, self._observer = call, over, template, observer
        self._buffered = _BUFFERED if observer is None else observer.every
        self._skipped = call.prompt if over == "output" else 0  # positions at the start that no reader reads
        self._token_wise = {name: r for name, r in template.readers.items() if r.fusion.is_token_wise()}
        self._whole = {name: r for name, r in template.readers.items() if name not in self._token_wise}
        self._read = 0  # positions that the model has read
        self._passes = 0  # passes so far
        self._past = 0  # positions in the key-value cache at the start of the second pass (with drafts: of each pass)
        self._column_of: list[int] = []  # position - _skipped -> column of its last reading in the lists below
        self._columns = 0  # columns stored so far, rejected drafts included
        self._ids: list[Tensor] = []  # each [rows, columns]; -1 where a pass got no ids
        self._masks: list[Tensor] = []  # each [rows, columns]
        self._waiting: dict[int, list[Tensor]] = defaultdict(list)  # layer -> states that no fusion has read yet
        self._features: dict[str, list[Tensor]] = defaultdict(list)  # token-wise reader -> each [rows, columns, dim]
        self._states: dict[int, list[Tensor]] = defaultdict(list)  # layer -> states for the other readers
        # batch, args and kwargs of the present pass
        self._arguments: tuple[Inputs, tuple[object, ...], Mapping[str, object]] = {}, (), {}
        self._layers_seen: list[int] = []  # in the present pass
        self._fresh = 0  # columns that the present pass adds

    def on_start(self, batch: Inputs, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Begin a pass: store its arguments, and the length of the cache before the pass adds to it.

        Without an assistant, the length is read in the first two passes only.

        Args:
            batch: Arguments of the modules around the one that contains the stack.
            args: Positional arguments of the module that contains the stack.
            kwargs: Keyword arguments of that module.
        """
        self._layers_seen, self._arguments = [], (batch, args, kwargs)
        if self.call.assisted or self._passes < 2:
            self._past = past_tokens(inputs_of(self.template, batch, args, kwargs))
        self._passes += 1

    def on_state(self, layer: int, state: Tensor) -> None:
        """Store the state `[rows, tokens, width]` of a layer in this pass; see `_read_waiting` for what follows.

        A layer that no reader of the template needs is ignored. Raises ConfigError if a layer was skipped, or if it is
        not clear which tokens the pass reads (see `_place`).
        """
        needed = self.template.layers
        if layer not in needed:
            return
        if not self._layers_seen:
            self._place(state)
        self._layers_seen.append(layer)
        check_layer_order("bank", self.template.stack, needed[: len(self._layers_seen)], self._layers_seen)
        if self._fresh:
            self._waiting[layer].append(state[:, state.shape[1] - self._fresh :])
        waiting = sum(part.shape[1] for part in self._waiting[layer]) if layer == needed[-1] else 0
        if waiting and waiting >= self._buffered:
            self._read_waiting()

    def on_end(self) -> None:
        """End a pass; raise ConfigError if a layer was not computed."""
        check_layer_order("bank", self.template.stack, self.template.layers, self._layers_seen)

    def _place(self, state: Tensor) -> None:
        """Determine which positions of the text the current pass reads, and store their token ids and mask.

        `state` is the first state of the pass. Raises ConfigError if the pass has more or fewer states than tokens, if
        `generate` continues from a cache whose tokens this object has not seen, or if a reader compares two texts and
        the pass has no token ids.
        """
        key = "decoder_input_ids" if self.template.stack.name == "decoder" else "input_ids"
        ids = inputs_of(self.template, *self._arguments).get(key)
        rows, count = state.shape[:2]
        self._check_tokens(count, ids)
        if self._read and not self._past and not self.call.assisted and count > self._read:
            count -= self._read  # without a cache every pass reads the whole text again: only its end is new
        elif self.call.assisted or not self._read:
            if self._past > self._read:
                problem = f"generate continues from a cache of {self._past} tokens, whose states are not computed again"
                raise ConfigError(f"bank.listen: {problem}. Generate without that cache, or without listening.")
            self._read = self._past  # after rejected drafts the cache is shorter, and their positions are read again
        begin, self._read = self._read, self._read + count
        self._fresh = fresh = min(count, max(0, self._read - self._skipped))
        del self._column_of[max(0, begin - self._skipped) :]
        self._column_of += range(self._columns, self._columns + fresh)
        self._columns += fresh
        if fresh:
            if not isinstance(ids, Tensor):
                refuse_pairs(self._whole, key)
                ids = state.new_full((rows, fresh), -1, dtype=torch.long)
            self._ids.append(ids[:, -fresh:])
            self._masks.append(self._real(state, begin + count - fresh, fresh))

    def _check_tokens(self, count: int, ids: object) -> None:
        """Raise ConfigError if this pass does not have one state per token that it read.

        `count` is the number of tokens in the states. `ids` are the token ids `[rows, tokens]` that the model read. The
        first pass may read at most the prompt, unless an assistant drafts. If `ids` is no tensor (embeddings were
        read), nothing else is checked.
        """
        expected = ids.shape[1] if isinstance(ids, Tensor) else count
        if self._passes == 1 and not self.call.assisted:  # the first pass reads the prompt, or a piece of it
            expected = min(expected, self.call.prompt)
        if count != expected:
            name, hint = type(self.call.model).__name__, "Use over='prompt', or another model"
            problem = f"{name} computes states of {count} tokens where the text has {expected}"
            raise ConfigError(f"bank.listen: {problem}, so they cannot be assigned to the text. {hint}.")

    def _real(self, state: Tensor, begin: int, fresh: int) -> Tensor:
        """Return a mask `[rows, fresh]` of the positions from `begin` on, False at padding of the prompt.

        Generated tokens, and positions that the mask lacks, are True. `state` is any state of the pass.
        """
        batch, args, kwargs = self._arguments
        stack, all_real = self.template.stack, state.new_ones(state.shape[0], fresh, dtype=torch.bool)
        if begin >= self.call.prompt:
            return all_real
        mask = batch.get("decoder_attention_mask" if stack.name == "decoder" else "attention_mask")
        given = self.call.mask(stack.name)
        if mask is not None and not is_token_mask(mask) and (given is None or is_token_mask(given)):
            mask = given  # `generate` has prepared its mask from this one, or from none, for a cache of fixed size
        elif not is_token_mask(mask):
            mask = token_mask(stack, batch, args, kwargs)
        part = all_real[:, :0] if mask is None else mask[:, begin : begin + fresh].to(state.device).bool()
        return F.pad(part, (0, fresh - part.shape[1]), value=True)

    def _read_waiting(self) -> None:
        """Pass the collected states to the readers' fusions, or to the observer, and free them.

        It is called when 16 tokens, or the observer's `every`, are collected, and at the end of the text.
        """
        columns = {layer: torch.cat(parts, dim=1) for layer, parts in self._waiting.items() if parts}
        self._waiting.clear()
        if not columns:
            return
        if self._observer is not None:
            tokens, real = torch.cat(self._ids, dim=1), torch.cat(self._masks, dim=1)
            self._ids.clear()
            self._masks.clear()
            first = self._skipped + self._columns - tokens.shape[1]
            self._observer.on_tokens(TokenBlock(first, self.call.prompt, tokens, real, columns))
            return
        if self._token_wise:
            stack_pass = self.template.restart(self._token_wise)
            for layer in stack_pass.layers:
                stack_pass.on_state(layer, columns[layer])
            for name, features in stack_pass.features().items():
                self._features[name].append(features)
        for layer in {layer for reader in self._whole.values() for layer in reader.layers} & columns.keys():
            self._states[layer].append(columns[layer])

    def finish(self, result: Generated) -> dict[str, ReaderOutput] | str:
        """Return reader name -> output for the sequences in `result`; or a text that says why readers have none.

        If `over` is "prompt", the outputs are for the prompts, one row per beam or sample. The ids that the stack read
        are compared with the returned ones; if they differ, there are no outputs. With an observer, call its `on_end`
        and return {}.
        """
        self._read_waiting()
        if self.over == "prompt":  # one row per beam or sample, as where one pass reads the whole prompt
            result = result._replace(sequences=self.call.prompts, beam_indices=None)
        prompt, new = self.call.prompt, result.sequences[:, self.call.prompt_tokens :]
        if self._observer is not None:
            self._observer.on_end(new)
            return {}
        read = new.new_zeros(len(new)) if self.over == "prompt" else self.call.tokens_read(new, result.beam_indices)
        first = prompt if self.over == "output" else 0
        last = prompt + max(0, int(read.max()))
        if last == first:
            return "generate wrote one token, and no step reads the last"
        if last > self._skipped + len(self._column_of):
            return "the stack read fewer tokens than generate returned"
        gather = self._gather(len(new), result.beam_indices, prompt, range(first, last))
        tokens = gather(self._ids)
        position = torch.arange(first, last, device=new.device)
        written = (position >= prompt) & (position < prompt + read.unsqueeze(1))
        # compare the generated part: `count` columns at the end of `tokens`, at the start of `new`
        count = last - max(first, prompt)
        begin = last - first - count
        if bool(((tokens[:, begin:] != new[:, :count]) & written[:, begin:]).any()):
            return "the tokens that the stack read are not those that generate returned"
        real = torch.where(position < prompt, gather(self._masks), written)
        return self._outputs(gather, real, tokens)

    def _gather(
        self, sequences: int, beam_indices: Tensor | None, prompt: int, positions: range
    ) -> Callable[[list[Tensor]], Tensor]:
        """Return a function that concatenates a list of tensors `[rows, columns, ...]` along the columns.

        It returns the values at `positions` of each returned sequence, `[sequences, positions, ...]`. `beam_indices` is
        the row of each sequence at each step of a beam search, else None. `prompt` is the prompt's length in tokens.
        """
        # step 0 chose the token at position `prompt`, and step 1 read it: its beam index is that of step 1
        steps = [max(0, position - prompt + 1) for position in positions]
        if beam_indices is None:
            rows = torch.arange(sequences).unsqueeze(1)
        else:
            rows = beam_indices.cpu().clamp(min=0)[:, steps]  # -1 after the end, where the mask is False
        columns = torch.tensor([self._column_of[position - self._skipped] for position in positions])

        def gather(parts: list[Tensor]) -> Tensor:
            whole = torch.cat(parts, dim=1)
            return whole[rows.to(whole.device), columns.to(whole.device)]

        return gather

    def _outputs(
        self, gather: Callable[[list[Tensor]], Tensor], real: Bool[Tensor, "sequences tokens"], tokens: Tensor
    ) -> dict[str, ReaderOutput]:
        """Run the fusions that need whole texts, and all heads; return reader name -> output.

        `gather` picks the sequences from stored tensors (see `_gather`), `real` is True at their tokens, and `tokens`
        has their ids. Sequences without tokens have NaN logits. The stored states are used up: call it once.
        """
        has_tokens = real.any(1)
        mask = real.clone()
        mask[:, 0] |= ~has_tokens  # heads need a real token in every row
        features = {name: gather(parts) for name, parts in self._features.items()}
        if self._whole:
            stack_pass = self.template.restart(self._whole)
            key = "decoder_" if stack_pass.stack.name == "decoder" else ""
            stack_pass.begin({f"{key}attention_mask": mask, f"{key}input_ids": tokens})
            for layer in stack_pass.layers:
                stack_pass.on_state(layer, gather(self._states.pop(layer)))
            features |= stack_pass.features()
        outputs: dict[str, ReaderOutput] = {}
        by_stream = [([*features], [*features.values()])]
        logits = run_heads(self.template.readers, by_stream, mask, {}, grad=False)
        for name in self.template.readers:
            empty = ~has_tokens.to(logits[name].device).view(-1, *[1] * (logits[name].ndim - 1))
            outputs[name] = ReaderOutput(logits[name].masked_fill(empty, torch.nan), real, tokens=tokens)
        return outputs


def inputs_of(
    stack_pass: StackPass, batch: Inputs, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Mapping[str, object]:
    """Return all arguments of a pass over the stack of `stack_pass` by name.

    `args` and `kwargs` are the arguments of the module that contains the stack. `batch` has the arguments of the
    modules around it, which take precedence over arguments of the same name.
    """
    named = arguments(stack_pass.stack.scope, args, kwargs)
    return ChainMap(dict(batch), {name: value for name, value in named.items() if value is not None})
