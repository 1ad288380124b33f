"""The attributes of vLLM's objects that readers use. vLLM is not installed where types are checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

Method: TypeAlias = Callable[..., object]  # a method of an object of vLLM, or a function that replaces it


class TextConfig(Protocol):
    """The size of a model: number of blocks and width of their states, from its `PretrainedConfig`."""

    num_hidden_layers: int
    hidden_size: int


class PoolerConfig(Protocol):
    """The settings with which an engine of a pooling model pools the tokens of a text."""

    enable_chunked_processing: bool | None


class ModelConfig(Protocol):
    """The settings of an engine's model, a `ModelConfig` of vLLM."""

    model: str
    revision: str | None
    tokenizer: str
    tokenizer_revision: str | None
    trust_remote_code: bool
    dtype: torch.dtype
    runner_type: str
    quantization: str | None
    hf_config: object
    hf_text_config: TextConfig
    pooler_config: PoolerConfig | None


class ParallelConfig(Protocol):
    """The settings of an engine's processes: `rank`, and the sizes of each kind of parallelism."""

    rank: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    prefill_context_parallel_size: int
    decode_context_parallel_size: int
    use_ubatching: bool


class CacheSettings(Protocol):
    """The user's settings for the key-value cache, such as `enable_prefix_caching`: vLLM's own `CacheConfig`."""

    enable_prefix_caching: bool


class EngineConfig(Protocol):
    """All settings of an engine, a `VllmConfig`; `additional_config` has those for Lamina."""

    cache_config: CacheSettings

    additional_config: dict[str, object]
    model_config: ModelConfig
    parallel_config: ParallelConfig
    speculative_config: object | None
    lora_config: object | None
    kv_transfer_config: object | None


class Configured(Protocol):
    """A part of an engine that holds the engine's config (`vllm_config`): a frontend, a scheduler or a model runner."""

    vllm_config: EngineConfig


class Route(Protocol):
    """The object of vLLM that serves a route of an OpenAI-compatible server; `engine_client` is its frontend."""

    engine_client: Configured


class CacheSpec(Protocol):
    """The `KVCacheSpec` of a group of layers. `block_size` is the number of tokens in a cache block."""

    block_size: int


class CacheGroup(Protocol):
    """A group of layers that share their cache blocks."""

    kv_cache_spec: CacheSpec


class CacheConfig(Protocol):
    """A `KVCacheConfig`: the number of cache blocks, and the groups of layers that share them."""

    num_blocks: int
    kv_cache_groups: Sequence[CacheGroup]


class Buffer(Protocol):
    """Numbers that are stored twice: on the device (`gpu`) and on the CPU (`np`)."""

    gpu: Tensor
    np: np.ndarray


class BlockTable(Protocol):
    """The cache blocks of the requests in a batch, one row per request (`block_table`), each of `block_size` tokens.

    `slot_mapping` has each token's cache slot.
    """

    block_size: int
    block_table: Buffer
    slot_mapping: Buffer


class InputBatch(Protocol):
    """The requests of a step, in the order of their rows.

    `token_ids_cpu` has their token ids, and `num_computed_tokens_cpu` how many of these were read before the step.
    """

    req_ids: Sequence[str]
    num_reqs: int
    block_table: Sequence[BlockTable]
    num_computed_tokens_cpu: np.ndarray
    token_ids_cpu: np.ndarray


class NewRequest(Protocol):
    """A request that begins in a step."""

    req_id: str


class ScheduledStep(Protocol):
    """A `SchedulerOutput`: how many tokens of each request the step computes, and which requests begin in it."""

    num_scheduled_tokens: Mapping[str, int]
    scheduled_new_reqs: Sequence[NewRequest]


class StepState(Protocol):
    """The hidden states of a step's pass, which a model runner keeps until the next tokens are chosen.

    `hidden_states` are those of the last layer, `aux_hidden_states` those of the layers that were asked for.
    """

    scheduler_output: ScheduledStep
    hidden_states: Tensor
    aux_hidden_states: Sequence[Tensor]


class Request(Protocol):
    """A request, in the scheduler or in the worker: the length of its prompt, and the ids of its output so far."""

    num_prompt_tokens: int
    output_token_ids: Sequence[int]


class Runner(Configured, Protocol):
    """The model runner of a worker (V1), a `GPUModelRunner` or `CPUModelRunner`.

    Its `input_batch` has the requests of the step. `query_start_loc` has the index of each request's first token among
    the step's tokens, and then their number. `execute_model_state` is None if the step had no tokens.
    """

    model_config: ModelConfig
    kv_cache_config: CacheConfig
    device: torch.device
    max_num_tokens: int
    requests: Mapping[str, Request]
    input_batch: InputBatch
    query_start_loc: Buffer
    execute_model_state: StepState | None
    use_aux_hidden_state_outputs: bool
    _dummy_run: Method

    def get_model(self) -> nn.Module:
        """Return the loaded model."""
        ...


class TokenOutput(Protocol):
    """An `EngineCoreOutput`: the new tokens of one request, which the scheduler sends to the frontend.

    `kv_transfer_params` is a free-form field, in which the readers' scores travel.
    """

    request_id: str
    finish_reason: object | None
    kv_transfer_params: dict[str, object] | None


class ClientOutputs(Protocol):
    """The outputs of a step that the scheduler sends to one client."""

    outputs: Sequence[TokenOutput]


class Scheduler(Configured, Protocol):
    """A scheduler of vLLM's V1 engine."""

    requests: Mapping[str, Request]
    update_from_output: Callable[[object, object], Mapping[int, ClientOutputs]]

    def finish_requests(self, request_ids: str, finished_status: object) -> object:
        """End the request with the id `request_ids`; `finished_status` says how it ended."""
        ...
