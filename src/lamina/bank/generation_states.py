"""What a decoder stack reads in one call of `generate`, step by step, and what readers make of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import ChainMap, defaultdict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, final

import torch
from torch import Tensor
from torch.nn import functional as F

from lamina.bank.generation import GenerateCall
from lamina.bank.reader import ReaderOutput
from lamina.bank.stack_pass import StackPass, check_layers_seen, past_tokens, refuse_pairs, run_heads
from lamina.errors import ConfigError
from lamina.layers.hooks import arguments, is_token_mask, token_mask

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

Over = Literal["prompt", "output", "both"]
_TOGETHER = 16  # states of as many tokens wait for each other: a fusion reads them in one go


class Columns(NamedTuple):
    """Some positions that were read, for who follows a text as it is written."""

    first: int  # position of the first
    prompt: int  # positions of the prompt
    tokens: Int[Tensor, "rows columns"]
    real: Bool[Tensor, "rows columns"]  # of the prompt; what was written since is taken to be real
    states: Mapping[int, Tensor]  # layer -> [rows, columns, width]


class Follower(ABC):
    """Who follows a text as it is written."""

    every: int  # how many tokens are handed on at a time

    @abstractmethod
    def read(self, columns: Columns) -> None:
        """Take the next tokens."""

    @abstractmethod
    def end(self, new: Int[Tensor, "sequences tokens"]) -> None:
        """The text is written; `new` is what `generate` returned of it."""


@final
class GenerationStates:
    """The states of one call of `generate` over one stack, handed to the readers as they come.

    A text has positions, and each pass reads one or more of them: the whole prompt, a piece of it, the next token, or
    the drafts of an assistant, of which those that were not accepted are read again, so that the last reading counts.
    Readers whose fusion is token-wise keep features, one vector per token and row; the others keep states. Which rows
    belong to which sequence is known when the call ends; see `GenerateCall`. With a `follower` nothing is kept: it is
    handed the states of so many tokens as they come, whatever rows end up where.
    """

    def __init__(self, template: StackPass, call: GenerateCall, over: Over, follower: Follower | None = None) -> None:
        self.call, self.over, self._template, self._follower = call, over, template, follower
        self._together = _TOGETHER if follower is None else follower.every
        self._skipped = call.prompt_width()[0] if over == "output" else 0  # positions that no reader wants
        self._token_wise = {name: r for name, r in template.readers.items() if r.fusion.is_token_wise()}
        self._whole = {name: r for name, r in template.readers.items() if name not in self._token_wise}
        self._read = self._past = 0  # positions that were read, and those that the cache of a pass holds
        self._standing: list[int] = []  # for each of them after those skipped, which of the columns below it is
        self._columns = 0  # that were taken, drafts included
        self._ids: list[Tensor] = []  # [rows, columns]; -1 where the pass was given no ids
        self._masks: list[Tensor] = []  # [rows, columns]
        self._waiting: dict[int, list[Tensor]] = defaultdict(list)  # layer -> states [rows, columns, width]
        self._features: dict[str, list[Tensor]] = defaultdict(list)  # reader -> [rows, columns, dim]
        self._states: dict[int, list[Tensor]] = defaultdict(list)  # layer -> states, for readers of whole texts
        self._given: tuple[Mapping[str, Any], tuple[object, ...], Mapping[str, object]] = {}, (), {}
        self._seen: list[int] = []
        self._fresh = 0  # columns that the present pass adds
        self._prompt = 0  # positions of the prompt, as far as is known

    def start(self, batch: Mapping[str, Any], args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """A pass begins; `batch` is what the modules around the stack were called with, the rest what the stack was."""
        self._seen, self._given = [], (batch, args, kwargs)
        if self.call.assisted or not self._read:  # before the first block adds to the cache
            self._past = past_tokens(inputs_of(self._template, batch, args, kwargs))

    def on_state(self, layer: int, state: Tensor) -> None:
        """Take one state `[rows, tokens, width]` of the present pass."""
        if not self._seen:
            self._place(state)
        self._seen.append(layer)
        check_layers_seen("bank", self._template.stack, self._template.layers[: len(self._seen)], self._seen)
        if self._fresh:
            self._waiting[layer].append(state[:, state.shape[1] - self._fresh :])
        waiting = sum(part.shape[1] for part in self._waiting[layer]) if layer == self._template.layers[-1] else 0
        if waiting and waiting >= self._together:
            self._digest()

    def end(self) -> None:
        """A pass ends; ConfigError if a layer did not run."""
        check_layers_seen("bank", self._template.stack, self._template.layers, self._seen)

    def _place(self, state: Tensor) -> None:
        """Find the positions that a pass reads, and note their tokens."""
        batch = inputs_of(self._template, *self._given)
        rows, count = state.shape[:2]
        if "past_key_values" not in batch and self._read < count:
            count -= self._read  # without a cache every pass reads all anew
        elif self.call.assisted or not self._read:
            if self._past > self._read:
                came = f"generate goes on from a cache of {self._past} tokens, whose states are not computed again"
                raise ConfigError(f"bank.listen: {came}. Generate without it, or listen to none.")
            self._read = self._past
        if not self._read:
            self._prompt = max(count, self.call.prompt_width()[0])
        begin, self._read = self._read, self._read + count
        self._fresh = fresh = min(count, max(0, self._read - self._skipped))
        del self._standing[max(0, begin - self._skipped) :]
        self._standing += range(self._columns, self._columns + fresh)
        self._columns += fresh
        if fresh:
            key = "decoder_input_ids" if self._template.stack.name == "decoder" else "input_ids"
            ids = batch.get(key)
            if not isinstance(ids, Tensor) or ids.shape[1] < fresh:
                refuse_pairs(self._whole, key)
                ids = state.new_full((rows, fresh), -1, dtype=torch.long)
            self._ids.append(ids[:, -fresh:])
            self._masks.append(self._real(state, begin + count - fresh, fresh))

    def _real(self, state: Tensor, begin: int, fresh: int) -> Tensor:
        """True at real tokens among positions from `begin`; what was written since the prompt is taken to be real."""
        batch, args, kwargs = self._given
        stack, every = self._template.stack, state.new_ones(state.shape[0], fresh, dtype=torch.bool)
        if begin >= self.call.prompt_width()[0] + 1:
            return every
        mask = batch.get("decoder_attention_mask" if stack.name == "decoder" else "attention_mask")
        if not is_token_mask(mask):  # none, or one that generate made for a cache of fixed size
            own = None if mask is None else self.call.mask(stack.name, len(state))
            mask = token_mask(stack, batch, args, kwargs) if own is None else own
        given = every[:, :0] if mask is None else mask[:, begin : begin + fresh].to(state.device).bool()
        return F.pad(given, (0, fresh - given.shape[1]), value=True)

    def _digest(self) -> None:
        """Let the readers read the states that wait."""
        columns = {layer: torch.cat(parts, dim=1) for layer, parts in self._waiting.items() if parts}
        self._waiting.clear()
        if not columns:
            return
        if self._follower is not None:
            self._hand_on(self._follower, columns)
            return
        if self._token_wise:
            stack_pass = self._template.again(self._token_wise)
            for layer in stack_pass.layers:
                stack_pass.on_state(layer, columns[layer])
            for name, features in stack_pass.features().items():
                self._features[name].append(features)
        for layer in {layer for reader in self._whole.values() for layer in reader.layers} & columns.keys():
            self._states[layer].append(columns[layer])

    def _hand_on(self, follower: Follower, states: Mapping[int, Tensor]) -> None:
        """Let the follower have the columns that were read since the last time."""
        tokens, real = torch.cat(self._ids, dim=1), torch.cat(self._masks, dim=1)
        self._ids.clear()
        self._masks.clear()
        first = self._skipped + self._columns - tokens.shape[1]
        follower.read(Columns(first, self._prompt, tokens, real, states))

    def finish(self, sequences: Int[Tensor, "sequences tokens"], rows: Tensor | None) -> dict[str, ReaderOutput] | str:
        """What each reader says of each sequence, or why nothing can be said."""
        self._digest()
        prompt, shown = self.call.prompt_width(sequences)
        if self._follower is not None:
            self._follower.end(sequences[:, shown:])
            return {}
        new = sequences[:, shown:]
        read = self.call.tokens_read(new, rows)
        first = prompt if self.over == "output" else 0
        last = prompt if self.over == "prompt" else prompt + max(0, int(read.max()))
        if last == first:
            return "generate wrote one token, and no step reads the last"
        if last > self._skipped + len(self._standing):
            return "the stack read fewer tokens than generate returned"
        gather = self._gather(new, rows, prompt, range(first, last))
        tokens = gather(self._ids)
        position = torch.arange(first, last, device=new.device)
        written = (position >= prompt) & (position < prompt + read.unsqueeze(1))
        count = last - max(first, prompt)
        own = written[:, last - first - count :]
        if bool(((tokens[:, last - first - count :] != new[:, :count]) & own).any()):
            return "the tokens that the stack read are not those that generate returned"
        real = torch.where(position < prompt, gather(self._masks), written)
        return self._answers(gather, real, tokens)

    def _gather(
        self, new: Tensor, rows: Tensor | None, prompt: int, positions: range
    ) -> Callable[[list[Tensor]], Tensor]:
        """What picks each sequence's own out of `[rows, columns, ...]` taken pass by pass."""
        steps = [max(0, position - prompt + 1) for position in positions]
        path = torch.arange(len(new)).unsqueeze(1) if rows is None else rows.cpu().clamp(min=0)[:, steps]
        columns = torch.tensor([self._standing[position - self._skipped] for position in positions])

        def gather(parts: list[Tensor]) -> Tensor:
            whole = torch.cat(parts, dim=1)
            return whole[path.to(whole.device), columns.to(whole.device)]

        return gather

    def _answers(
        self, gather: Callable[[list[Tensor]], Tensor], real: Bool[Tensor, "sequences tokens"], tokens: Tensor
    ) -> dict[str, ReaderOutput]:
        some = real.any(1)
        mask = real.clone()
        mask[:, 0] |= ~some  # heads need a token
        features = {name: gather(parts) for name, parts in self._features.items()}
        if self._whole:
            stack_pass = self._template.again(self._whole)
            key = "decoder_" if stack_pass.stack.name == "decoder" else ""
            stack_pass.begin({f"{key}attention_mask": mask, f"{key}input_ids": tokens})
            for layer in stack_pass.layers:
                stack_pass.on_state(layer, gather(self._states.pop(layer)))
            features |= stack_pass.features()
        outputs = run_heads(self._template.readers, features, mask, {}, grad=False)
        for output in outputs.values():
            none = ~some.to(output.logits.device).view(-1, *[1] * (output.logits.ndim - 1))
            output.logits, output.mask, output.tokens = output.logits.masked_fill(none, torch.nan), real, tokens
        return outputs


def inputs_of(
    stack_pass: StackPass, batch: Mapping[str, Any], args: tuple[object, ...], kwargs: Mapping[str, object]
) -> Mapping[str, Any]:
    """What a pass is given, the arguments of the model before those of the stack."""
    own = arguments(stack_pass.stack.scope, args, kwargs)
    return ChainMap(dict(batch), {name: value for name, value in own.items() if value is not None})
