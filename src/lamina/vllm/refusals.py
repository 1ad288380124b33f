"""Refuse engines that readers do not support, and warn about those that were never tried."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from lamina.errors import ConfigError

if TYPE_CHECKING:
    from lamina.vllm.engine_types import EngineConfig
    from lamina.vllm.layout import Layout

logger = logging.getLogger("vllm.lamina")  # vLLM shows what is logged under its own name
TRIED = ("0.32.0",)  # versions of vLLM with which the tests have run


def check_engine(config: EngineConfig) -> None:
    """Raise ConfigError if an engine runs its model in a way that readers do not support.

    Args:
        config: The config of the engine.
    """
    model, parallel = config.model_config, config.parallel_config
    shards = max(parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size)
    pooler, stored = model.pooler_config, getattr(model.hf_config, "quantization_config", None)
    refused = {
        "speculative decoding": config.speculative_config is not None,
        "LoRA": config.lora_config is not None,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": shards > 1,
        "micro-batches (enable_dbo)": parallel.use_ubatching,
        "a KV connector": config.kv_transfer_config is not None,
        "quantisation that the checkpoint does not have": model.quantization is not None and stored is None,
        "long texts in chunks (enable_chunked_processing)": bool(pooler and pooler.enable_chunked_processing),
    }
    if used := [name for name, uses in refused.items() if uses]:
        raise ConfigError(f"vllm: the engine uses {used[0]}, with which readers do not run. Start it without.")


def warn_untried(layout: Layout, version: str, dtype: str) -> None:
    """Log a warning for a vLLM version that was never tried, or if states have another data type than the bank's.

    Args:
        layout: The engine's readers.
        version: Version of vLLM.
        dtype: Data type in which the engine computes, such as "bfloat16".
    """
    if version not in TRIED:
        logger.warning("lamina: vLLM %s was not tried with readers; versions that were: %s.", version, ", ".join(TRIED))
    trained = layout.manifest.base.dtype
    if dtype != trained:
        effect = "so answers differ a little from the bank's, and thresholds of monitors fit other scores"
        logger.warning("lamina: the engine computes in %s and the bank was trained on %s, %s.", dtype, trained, effect)
