"""The worker's side: read the hidden states of each engine step, and score every token for every reader.

A step is one forward pass of the engine over tokens of several requests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NotRequired, Protocol, TypedDict, cast, final

import numpy as np
import torch
from torch import Tensor, nn

from lamina.bank import ReaderBank, ReaderModule
from lamina.bank.monitoring import check_token_wise, token_logits, token_maps
from lamina.bank.stack_pass import StackPass
from lamina.errors import ConfigError
from lamina.layers.causality import is_causal
from lamina.store.load_model import load
from lamina.vllm.layout import check_engine, logger
from lamina.vllm.pooled import PendingTokens, PooledReaders
from lamina.vllm.taps import tap

if TYPE_CHECKING:
    from jaxtyping import Float

    from lamina.layers import LayerStack
    from lamina.vllm.engine_types import BlockTable, CacheConfig, Runner
    from lamina.vllm.layout import Layout

# Maximum bytes of states that wait for readers of whole prompts: a few tokens of a cache block cost as much as all.
WAITING_BYTES = 1 << 24
ATTRIBUTE = "lamina_scores"  # attribute of a `ModelRunnerOutput` that holds request id -> StepScores


class StepScores(NamedTuple):
    """The scores of one request from one engine step.

    Attributes:
        first: Position in the text, from 0, of the first token that has scores here.
        tokens: Scores of consecutive tokens: matrix of float32 in the layout's columns, as bytes, one row per token.
        prompt: Logits of the readers that pool whole prompts, float32 as bytes, if this step ended the prompt; else
            None.
    """

    first: int
    tokens: bytes
    prompt: bytes | None


class Message(TypedDict):
    """What the scheduler sends to the frontend with new tokens of a request.

    Attributes:
        scores: The fields of `StepScores`, for one or several steps.
        monitors: Monitor name -> the fields of its `Verdict`; left out if there are no monitors.
        ended_by: Name of the monitor that ends the request; left out if none does.
    """

    scores: list[tuple[int, bytes, bytes | None]]
    monitors: NotRequired[dict[str, tuple[float, int | None]]]
    ended_by: NotRequired[str]


class StepReaders(Protocol):
    """The readers of a bank in one engine, as `install` runs them at each step.

    `method` is the runner's method whose output carries the scores.
    """

    method: ClassVar[str]

    def read_step(self, *args: Any) -> dict[str, StepScores]:
        """Return request id -> scores for the step just computed; `args` are the arguments of the runner's method."""
        ...


def install(runner: Runner, layout: Layout, kind: Callable[[Layout, Runner], StepReaders]) -> None:
    """Make a model runner of vLLM run readers on each step; called after its model was loaded.

    With tensor parallelism, only the first worker runs them. Raises ConfigError if the engine has settings with which
    the readers' answers would be wrong or missing, BaseMismatchError if the bank was trained on another model, and
    another LaminaError if either cannot be loaded.

    Args:
        runner: The model runner.
        layout: The readers to run.
        kind: `EngineReaders` for an engine that generates text, or `TextReaders` for a pooling model.
    """
    check_engine(runner.vllm_config)
    readers = kind(layout, runner)
    original, parallel = getattr(runner, readers.method), runner.vllm_config.parallel_config
    answers = parallel.rank % parallel.tensor_parallel_size == 0  # workers that share the weights have equal states

    def run_and_score(*args: object, **kwargs: object) -> object:
        scores = readers.read_step(*args) if answers else {}
        output = original(*args, **kwargs)
        setattr(getattr(output, "_model_runner_output", output), ATTRIBUTE, scores)
        return output

    setattr(runner, readers.method, run_and_score)


@final
class EngineReaders:
    """The readers of a bank in one engine that generates text, with their scores of every token in the engine's cache.

    Making it changes the model, which then returns the states of the layers that readers need, or has `Taps`. A token
    that the prefix cache provides is not computed again. Its scores are therefore stored under the number of its cache
    slot, where a later request that shares the token finds them. Readers of whole prompts store sums per cache block
    instead; see `pooled`. Raises ConfigError if a reader cannot run in such an engine, and BaseMismatchError if the
    bank was trained on another model.
    """

    method: ClassVar[str] = "sample_tokens"

    def __init__(self, layout: Layout, runner: Runner) -> None:
        self._layout, self._runner = layout, runner
        bank, stack = load_bank(layout, runner, _check_readers)
        readers = {name: bank[name].to(runner.device) for name in layout.readers}
        self._token_pass = StackPass(
            bank.model, stack, {name: readers[name] for name in layout.names(whole=False)}, grad=False
        )
        with torch.no_grad():
            self._maps = token_maps(self._token_pass.readers)
        self._whole = {name: readers[name] for name in layout.names(whole=True)}
        layers = sorted({layer for reader in readers.values() for layer in reader.layers})
        self._depth = stack.depth
        # The engine returns the last block's state before the final norm. Layer `depth` is the state after that norm,
        # which is the engine's own output. At least one layer must be asked for, or the engine returns its output
        # alone.
        self._layers = [layer for layer in layers if layer < self._depth] or [0]
        set_layers: Callable[[tuple[int, ...]], None] | None
        if (set_layers := getattr(runner.get_model(), "set_aux_hidden_state_layers", None)) is not None:
            self._taps = None
            runner.use_aux_hidden_state_outputs = True
            set_layers(tuple(self._layers))
            # vLLM stores compiled code under a hash of the settings, and the code returns the states of these layers
            runner.vllm_config.additional_config["lamina_layers"] = self._layers
        else:
            self._taps = tap(runner, stack)
        self._buffers: _Buffers | None = None  # made when the size of the cache is known
        self._sent: dict[str, int] = {}  # request id -> number of its tokens whose scores were sent
        self._answered: set[str] = set()  # requests whose prompt the readers of whole prompts have answered

    @torch.inference_mode()
    def read_step(self, *_args: object) -> dict[str, StepScores]:
        """Score the tokens of the step that the model has just computed; return request id -> scores to send.

        {} if the step had no tokens. If the prefix cache provided tokens of a request, the request's scores begin with
        these tokens' scores. Raises RuntimeError if the pass gave no states, and ConfigError if no layer keeps all
        tokens in the cache.
        """
        runner = self._runner
        if runner.execute_model_state is None:  # the step had no tokens
            return {}
        state, batch = runner.execute_model_state, runner.input_batch
        scheduled = [state.scheduler_output.num_scheduled_tokens[request] for request in batch.req_ids]
        ends = np.cumsum(scheduled)
        table = batch.block_table[cache_group(runner.kv_cache_config)]
        if self._buffers is None:
            self._buffers = _Buffers(self._layout, self._whole, runner, table.block_size)
        for new in state.scheduler_output.scheduled_new_reqs:  # its id may be that of an earlier request
            self._sent.pop(new.req_id, None)
            self._answered.discard(new.req_id)
        slots = torch.as_tensor(table.slot_mapping.gpu[: ends[-1]]).cpu().numpy()
        inner = state.aux_hidden_states if self._taps is None else self._taps.states(self._layers, int(ends[-1]))
        inner = zip(self._layers, inner, strict=True)
        states = {layer: part[: ends[-1]] for layer, part in (*inner, (self._depth, state.hidden_states))}
        rows = self._score(states)
        self._buffers.tokens[torch.from_numpy(slots)] = rows
        if self._whole:
            self._buffers.pending.push(states, slots, self._rows_to_pool(scheduled, ends))
        scores: dict[str, StepScores] = {}
        matrix, firsts = rows.numpy(), batch.num_computed_tokens_cpu[: len(scheduled)].tolist()
        for index, (request, end, first) in enumerate(zip(batch.req_ids, ends.tolist(), firsts, strict=True)):
            part, last = matrix[end - scheduled[index] : end], first + scheduled[index]
            if (sent := self._sent.get(request, 0)) < first:  # the tokens between come from the prefix cache
                part = np.concatenate([self._buffers.tokens[_slots_of(table, index, sent, first)].numpy(), part])
            self._sent[request] = last
            prompt = self._prompt_logits(request, table, index, last) if request not in self._answered else None
            scores[request] = StepScores(min(first, sent), part.tobytes(), prompt)
        if self._buffers.pending.nbytes >= WAITING_BYTES:
            self._buffers.pool()
        self._buffers.pending.keep()
        for request in self._sent.keys() - runner.requests.keys():  # a request may end in a step without tokens
            del self._sent[request]
            self._answered.discard(request)
        return scores

    def _rows_to_pool(self, scheduled: Sequence[int], ends: np.ndarray) -> np.ndarray | None:
        """Return the indices of a step's tokens that the readers of whole prompts need; None if they need all tokens.

        They need the tokens of prompts that have no answer yet. With a prefix cache they need all tokens, since an
        output can become the start of a later prompt. `scheduled` is each request's number of tokens, and `ends` the
        index after its last one.
        """
        if self._runner.vllm_config.cache_config.enable_prefix_caching:
            return None
        batch, requests = self._runner.input_batch, self._runner.requests
        if self._answered.issuperset(batch.req_ids):
            return np.empty(0, dtype=np.int64)
        prompts = np.array([requests[request].num_prompt_tokens for request in batch.req_ids])
        left = prompts - batch.num_computed_tokens_cpu[: len(prompts)]
        place = np.arange(ends[-1]) - np.repeat(ends - scheduled, scheduled)  # index of a token within its request
        return np.flatnonzero(place < np.repeat(left, scheduled))

    def _score(self, states: Mapping[int, Tensor]) -> Float[Tensor, "tokens columns"]:
        """Return the scores of a step's tokens, on the CPU; no columns if no reader scores tokens.

        `states` is layer -> states `[tokens, width]`.
        """
        if not self._token_pass.readers:
            return torch.empty(len(states[self._depth]), 0)
        stack_pass = self._token_pass.renewed()
        for layer in stack_pass.layers:
            stack_pass.on_state(layer, states[layer].unsqueeze(0))
        logits = token_logits(stack_pass, maps=self._maps)
        return torch.cat([logits[name][0] for name in stack_pass.readers], dim=-1)

    def _prompt_logits(self, request: str, table: BlockTable, row: int, last: int) -> bytes | None:
        """Return the logits of readers that pool whole prompts, as bytes; None before the prompt has ended.

        The result is None too if there are no such readers. Waiting tokens are pooled first, and the request is marked
        as answered. The request's cache blocks are in row `row` of `table`; `last` is the number of its tokens that the
        engine has read.
        """
        prompt = int(self._runner.requests[request].num_prompt_tokens)
        if not self._whole or self._buffers is None or last < prompt:
            return None
        self._answered.add(request)
        self._buffers.pool()
        count = -(-prompt // table.block_size)
        blocks = torch.from_numpy(table.block_table.np[row, :count].astype(np.int64)).to(self._runner.device)
        logits: dict[str, Tensor] = {}
        for group in self._buffers.pooled:
            logits |= group.logits(blocks)
        return torch.cat([logits[name] for name in self._whole]).numpy().tobytes()


@final
class _Buffers:
    """The scores and partial results that are stored beside the engine's cache. Making them logs their size.

    Attributes:
        tokens: Scores of the token in each cache slot, `[slots, columns]`, on the CPU.
        pooled: The readers that pool whole prompts, in groups that are computed together.
        pending: Tokens that `pooled` has not read yet.
    """

    def __init__(self, layout: Layout, whole: Mapping[str, ReaderModule], runner: Runner, block_size: int) -> None:
        config = runner.kv_cache_config
        slots = config.num_blocks * config.kv_cache_groups[cache_group(config)].kv_cache_spec.block_size
        self.tokens = torch.full((slots, layout.token_columns), torch.nan)
        groups: dict[object, dict[str, ReaderModule]] = defaultdict(dict)
        for name, reader in whole.items():
            groups[reader.layers, reader.fusion.group()][name] = reader
        self._device = runner.device
        self.pooled = [PooledReaders(group, slots // block_size, runner.device) for group in groups.values()]
        self.pending = PendingTokens(sorted({layer for group in self.pooled for layer in group.layers}), block_size)
        size = self.tokens.nbytes + sum(group.nbytes for group in self.pooled)
        logger.info("lamina: what readers keep beside the cache takes %.0f bytes per token of it.", size / slots)

    def pool(self) -> None:
        """Let the readers of whole prompts process the tokens in `pending`, which is empty afterwards."""
        if len(self.pending):
            states, segments = self.pending.take()
            for group in self.pooled:
                group.add(states, segments.to(self._device))


def cache_group(config: CacheConfig) -> int:
    """Return the index of the group of cache blocks that holds all tokens of a request, from the cache's config.

    Raises ConfigError if every layer has a sliding window or keeps no tokens, so that there is no such group.
    """
    for number, group in enumerate(config.kv_cache_groups):
        if type(group.kv_cache_spec).__name__ == "FullAttentionSpec":
            return number
    raise ConfigError("vllm: no layer of the model keeps all tokens in the cache, so readers cannot run beside it.")


def _slots_of(table: BlockTable, row: int, first: int, last: int) -> Tensor:
    positions = np.arange(first, last)
    blocks = table.block_table.np[row, positions // table.block_size].astype(np.int64)
    return torch.from_numpy(blocks * table.block_size + positions % table.block_size)


def load_bank(
    layout: Layout, runner: Runner, check: Callable[[ReaderBank, LayerStack, Layout], None]
) -> tuple[ReaderBank, LayerStack]:
    """Load the bank's readers, check that their base is the engine's model, and return the bank and the readers' stack.

    The model is loaded with transformers for the check, and its weights are freed afterwards. `check`, called with the
    bank, the stack and `layout`, raises an error if the readers cannot run. Raises ConfigError if they read several
    stacks, or one of them compares two texts or reads inside the blocks; and the errors of `lamina.load` and
    `ReaderBank.from_pretrained`, such as StoreError and BaseMismatchError.
    """
    config = runner.model_config
    model, processor = load(config.model, revision=config.revision, dtype=layout.manifest.base.dtype)
    names = list(layout.readers)
    bank = ReaderBank.from_pretrained(layout.folder, model, processor, readers=names)
    stacks = {bank[name].stack for name in names}
    if len(stacks) > 1:
        raise ConfigError(f"vllm: the readers read several stacks ({', '.join(sorted(stacks))}); an engine has one.")
    if pairs := [name for name in names if bank[name].config.fusion.reads_pairs]:
        raise ConfigError(f"vllm: reader '{pairs[0]}' tells two texts apart, which an engine does not. Leave it out.")
    if inside := [name for name in names if bank[name].config.fusion.reads_inside]:
        raise ConfigError(f"vllm: reader '{inside[0]}' reads inside blocks, where an engine does not. Leave it out.")
    stack = bank.stacks[stacks.pop()]
    check(bank, stack, layout)
    cast("nn.Module", bank.model).to("meta")
    return bank, stack


def _check_readers(bank: ReaderBank, stack: LayerStack, layout: Layout) -> None:
    """Raise ConfigError if a reader cannot read a text that is still being generated.

    That is so if the model is not causal, or a reader of tokens looks at other tokens.
    """
    if not is_causal(bank.model, stack):
        model = type(bank.model).__name__
        raise ConfigError(f"vllm: the states of {model} depend on later tokens; use a causal model.")
    for name, columns in layout.readers.items():
        if not columns.whole:
            check_token_wise("vllm", name, bank[name])
