"""Readers inside vLLM: are the scores right, what do they cost, and does a flag end its request in time.

    .venv-vllm/bin/python benchmarks/vllm_readers.py [--part NAME] [--small] [--repeats 5] [--json]

`make test-vllm` makes the environment. The model is a Llama with 116 million random weights, in float32; `--small`
takes 7 million, and fewer requests. The bank has four readers of tokens (AdaLayers with 16 features per layer; one
labels tokens) and four of whole prompts (PooledLayers with 64 features).

scores: mixed requests in eager and compiled engines, with whole prompts and with steps of at most 16 tokens, a cold and
a warm prefix cache, and a cache that holds all requests or so few that some are preempted. `difference` is the largest
one between a probability and the bank's own, over prompt, output and both; `wrong` counts answers that are missing,
have another number of tokens, or differ by more than 1e-4; `other tokens` counts requests whose output is not that of
an engine without a bank.

speed: engines in processes of their own, timed in turn on the same prompts without a prefix cache. `throughput` is the
median of the ratios of neighbouring runs to the bare compiled engine, for 16 requests at once; `between tokens` is the
same of the time per token of one request alone. Beside readers: forward hooks that copy each block's output in an eager
engine, which is the least that vllm-lens does, and vLLM-Hook in its eager mode; and the bare engine with a second pass
of transformers over each text. `extract_hidden_states` of vLLM writes all states to files; it is only tried, since it
needs a GPU.

flags: 32 requests at once, one of which a monitor flags. `in time` counts tries in which it ended with the token after
the flagged one, as "content_filter" and with the monitor's name; `others identical` those in which the other 31 are
token by token what an engine without a bank gives.

memory: what the readers keep beside each token of the cache, and what the cache itself takes, in bytes.
"""

# vLLM is not installed where types are checked: it needs another transformers.
# pyright: reportMissingImports=false
from __future__ import annotations

import argparse
import logging
import os
import random
import re
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
import vllm_engines
from common import report
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from vllm_engines import Ids, Reference, as_inputs, dividing, mixed_prompts, save_tokenizer, scatter, watchdog

from lamina import AdaLayers, PooledLayers, Reader, ReaderBank, SequenceClassification, TokenClassification, load
from lamina.demo.timing import ratio

LABELS = ("no", "yes")
BARE, TWICE = "bare, compiled", "bare, second pass"
engine = partial(vllm_engines.engine, max_model_len=256, disable_log_stats=False)


class Size(NamedTuple):
    """Sizes of the model and of the work."""

    depth: int
    width: int
    words: int
    requests: int
    tries: int
    tokens: int


LARGE = Size(depth=12, width=768, words=8000, requests=200, tries=100, tokens=64)
SMALL = Size(depth=4, width=256, words=8000, requests=24, tries=8, tokens=16)


def make(folder: Path, size: Size) -> None:
    """Save a random Llama with a tokenizer in `folder / "model"`, and a bank in `folder / "bank"`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size.words,
        hidden_size=size.width,
        intermediate_size=4 * size.width,
        num_hidden_layers=size.depth,
        num_attention_heads=size.width // 64,
        num_key_value_heads=size.width // 192 or 1,
        max_position_embeddings=512,
    )
    LlamaForCausalLM(config).eval().save_pretrained(folder / "model")
    save_tokenizer(folder / "model", size.words)
    make_bank(folder, None)


def make_bank(folder: Path, threshold: float | None) -> Path:
    """Save a bank with eight readers, and with a monitor if a threshold is given; return its folder."""
    bank = ReaderBank(*load(folder / "model"))
    query, first = (SequenceClassification(LABELS, pooling=pooling) for pooling in ("query", "first"))
    for number in range(3):
        bank.add(f"query{number}", Reader(AdaLayers(dim=16), query, seed=number))
    bank.add("tags", Reader(AdaLayers(dim=16), TokenClassification(LABELS, encoder_layers=0), seed=3))
    for number in range(4):
        bank.add(f"whole{number}", Reader(PooledLayers(dim=64), first, seed=number))
    scatter(bank, 0.1)
    if threshold is not None:
        bank.keep_monitor(watchdog("query0", threshold))
    place = folder / ("bank" if threshold is None else "watched")
    bank.eval().save_pretrained(place)
    return place


def generate(llm: Any, prompts: Sequence[Ids], tokens: Sequence[int]) -> list[Any]:
    """Return the `CompletionOutput` of each prompt, decoded greedily up to its number of tokens."""
    from vllm import SamplingParams

    sampling = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in tokens]
    return [output.outputs[0] for output in llm.generate(as_inputs(prompts), sampling, use_tqdm=False)]


# Scores


def preemptions(llm: Any) -> int:
    """Return how often an engine has preempted a request since its start."""
    return int(sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"))


def scores(folder: Path, size: Size) -> list[dict[str, Any]]:
    """Compare the answers of engines in different modes with the bank's own."""
    prompts, rows = mixed_prompts(size.requests, range(size.words)), []
    tokens = [1 + 7 * number % 24 for number in range(len(prompts))]
    reference = Reference(folder / "model", folder / "bank")
    for mode, eager in (("eager", True), ("compiled", False)):
        for prefill, step in (("whole", 2048), ("16 tokens", 16)):
            options: dict[str, Any] = {"enforce_eager": eager, "max_num_batched_tokens": step, "in_process": True}
            with engine(folder / "model", None, **options) as llm:
                bare = [list(completion.token_ids) for completion in generate(llm, prompts, tokens)]
            # 9 blocks are the fewest that hold one request of the longest length; 16 requests need up to 80
            for cache, blocks in (("large", None), ("small", 9)):
                with engine(folder / "model", folder / "bank", **options, num_gpu_blocks_override=blocks) as llm:
                    for prefix in ("cold", "warm"):
                        before = preemptions(llm)
                        completions = generate(llm, prompts, tokens)
                        row: dict[str, Any] = {"mode": mode, "prefill": prefill, "cache": cache, "prefix": prefix}
                        checks = [reference.compare(*pair) for pair in zip(prompts, completions, strict=True)]
                        outputs = [list(completion.token_ids) for completion in completions]
                        row["requests"] = len(prompts)
                        row["preempted"] = preemptions(llm) - before
                        row["difference"] = f"{max(worst for worst, _ in checks):.1e}"
                        row["wrong"] = sum(wrong for _, wrong in checks)
                        row["other tokens"] = sum(a != b for a, b in zip(outputs, bare, strict=True))
                        rows.append(row)
    return rows


# Speed


class CopyStates:
    """A forward hook that copies the output of a block, as a Python hook for hidden states has to do."""

    def __init__(self) -> None:
        self.state: Tensor | None = None

    def __call__(self, _module: nn.Module, _inputs: object, output: tuple[Tensor, Tensor]) -> None:
        """Copy the state, to which the engine adds the residual only in the next block."""
        self.state = output[0] + output[1]


class Hooks:
    """What an engine's worker gets from this file (`worker_extension_cls`), to copy the states of all blocks."""

    model_runner: Any

    def add_hooks(self) -> None:
        """Register a hook on each block of the model."""
        for block in self.model_runner.model.model.layers:
            block.register_forward_hook(CopyStates())


def extraction(size: Size, files: Path) -> dict[str, Any]:
    """Return the settings with which vLLM itself writes the states of all layers to files."""
    layers = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(range(size.depth))}}
    speculative = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": layers}
    extra = {"shared_storage_path": str(files)}
    transfer = {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer"}
    return {
        "speculative_config": speculative,
        "kv_transfer_config": {**transfer, "kv_connector_extra_config": extra},
    }


def second_pass(bank: ReaderBank, prompts: Sequence[Ids], completions: Sequence[Any]) -> None:
    """Compute the readers' answers with transformers, in one batch of the texts that an engine has written."""
    texts = [[*prompt, *completion.token_ids] for prompt, completion in zip(prompts, completions, strict=True)]
    ids = torch.zeros(len(texts), max(map(len, texts)), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, : len(text)], mask[row, : len(text)] = torch.tensor(text), 1
    with torch.no_grad():
        bank(input_ids=ids, attention_mask=mask)


def speed(folder: Path, size: Size, repeats: int) -> list[dict[str, Any]]:
    """Time engines in turn, 16 requests at once and one alone.

    Each turn starts each engine anew, since the workers of idle engines would take time from the one that is timed.
    """
    bank = ReaderBank.from_pretrained(folder / "bank", load(folder / "model")[0])
    hooks = {"enforce_eager": True, "worker_extension_cls": "vllm_readers.Hooks"}
    variants: dict[str, dict[str, Any]] = {
        BARE: {"bank": None},
        "8 readers, compiled": {"bank": folder / "bank"},
        "bare, eager": {"bank": None, "enforce_eager": True},
        "8 readers, eager": {"bank": folder / "bank", "enforce_eager": True},
        "hooks, eager": {"bank": None, **hooks},
    }
    draw = random.Random(0)
    works = {count: [[draw.randrange(size.words) for _ in range(64)] for _ in range(count)] for count in (16, 1)}
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
    for _ in range(repeats):
        for name, settings in variants.items():
            with engine(folder / "model", enable_prefix_caching=False, **settings) as llm:
                if name.startswith("hooks"):
                    llm.collective_rpc("add_hooks")
                for count, prompts in works.items():
                    generate(llm, prompts, [8] * count)
                    start = time.perf_counter()
                    completions = generate(llm, prompts, [size.tokens] * count)
                    seconds[name, count].append(time.perf_counter() - start)
                    if name == BARE:
                        second_pass(bank, prompts, completions)
                        seconds[TWICE, count].append(time.perf_counter() - start)
    rows = [_speed_row(seconds, name, size) for name in dict.fromkeys(name for name, _ in seconds)]
    tried = {**dict.fromkeys(rows[0], ""), "engine": f"extract_hidden_states {_try_extraction(folder, size)}"}
    return [*rows, tried]


def _try_extraction(folder: Path, size: Size) -> str:
    """Return whether an engine that extracts hidden states answers here; its files are copied on a stream of a GPU."""
    from vllm.v1.engine.exceptions import EngineDeadError

    settings = extraction(size, folder / "states")
    try:
        with engine(folder / "model", None, enable_prefix_caching=False, **settings) as llm:
            for _ in range(3):  # the files of a request are written after its answer
                generate(llm, [[1, 2, 3]], [4])
    except (EngineDeadError, RuntimeError) as error:
        return f"does not run here ({type(error).__name__})"
    return "runs here, and was not timed"


def _speed_row(seconds: Mapping[tuple[str, int], list[float]], name: str, size: Size) -> dict[str, Any]:
    """Return the row of an engine: tokens per second, milliseconds per token, and their ratios to the bare engine's."""
    many, one = (statistics.median(seconds[name, count]) for count in (16, 1))
    return {
        "engine": name,
        "tokens/s": 16 * size.tokens / many,
        "throughput": 1 / ratio(seconds, (name, 16), (BARE, 16)),
        "ms/token": 1000 * one / size.tokens,
        "between tokens": ratio(seconds, (name, 1), (BARE, 1)),
    }


# Flags


def flags(folder: Path, size: Size) -> list[dict[str, Any]]:
    """Let a monitor end one of 32 requests, and compare the others with an engine without a bank."""
    at_once, tokens = 32, 24
    prompts = mixed_prompts(4 * at_once, range(size.words), seed=1, longest=40)
    counts = [tokens] * len(prompts)
    options: dict[str, Any] = {"max_num_seqs": at_once, "in_process": True}
    with engine(folder / "model", None, **options) as llm:
        bare = [list(completion.token_ids) for completion in generate(llm, prompts, counts)]
    with engine(folder / "model", folder / "bank", **options) as llm:
        completions = generate(llm, prompts, counts)
    rows = [[row[1] for row in completion.lamina["query0"]["tokens"]] for completion in completions]
    outputs = [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]
    above = range(max(1, len(outputs) // 20), len(outputs) // 3)
    threshold = dividing([max(row) for row in outputs], above)
    over = {
        index: [place for place, score in enumerate(row) if score >= threshold] for index, row in enumerate(outputs)
    }
    flagged = {index: places[0] for index, places in over.items() if places}
    rest = [index for index in over if index not in flagged]
    draw, in_time, identical = random.Random(0), 0, 0
    with engine(folder / "model", make_bank(folder, threshold), **options) as llm:
        for _ in range(size.tries):
            one = draw.choice(list(flagged))
            chosen = [*draw.sample(rest, at_once - 1), one]
            draw.shuffle(chosen)
            results = dict(zip(chosen, generate(llm, [prompts[i] for i in chosen], [tokens] * at_once), strict=True))
            ended, place = results.pop(one), flagged[one]
            reasons = (ended.finish_reason, ended.stop_reason)
            # a text that is flagged with its last token but one has no token that could be saved
            want = ("content_filter", "watchdog") if place + 2 < tokens else reasons
            in_time += list(ended.token_ids) == bare[one][: place + 2] and reasons == want
            identical += all(list(result.token_ids) == bare[index] for index, result in results.items())
    row = {"tries": size.tries, "in time": in_time, "others identical": identical}
    return [{**row, "prompts": len(prompts), "flagged prompts": len(flagged), "threshold": threshold}]


class SizeLog(logging.Handler):
    """Keeps what the worker logs about the memory of the readers, in bytes per token of the cache."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.bytes: set[int] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the number in a message of the worker."""
        if match := re.search(r"takes (\d+) bytes per token", record.getMessage()):
            self.bytes.add(int(match[1]))


def memory(folder: Path, size: Size) -> list[dict[str, Any]]:
    """Return what eight readers keep beside each token of the cache, and what the cache itself takes."""
    import vllm.logger  # noqa: F401 (it sets up its loggers, and resets those below its own)

    log, logger = SizeLog(), logging.getLogger("vllm.lamina")
    logger.addHandler(log)
    logger.setLevel(logging.INFO)
    with engine(folder / "model", folder / "bank", in_process=True, enforce_eager=True) as llm:
        generate(llm, [[1, 2, 3]], [2])
    (kept,) = log.bytes
    cache = 2 * size.depth * (size.width // 192 or 1) * 64 * 4  # keys and values in float32
    return [{"readers": 8, "bytes per token": kept, "cache bytes per token": cache, "ratio": kept / cache}]


def options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = ("scores", "speed", "flags", "memory")
    parser.add_argument("--part", choices=parts, action="append", help="one part; may be repeated (default: all)")
    parser.add_argument("--small", action="store_true", help="a small model, and few requests")
    parser.add_argument("--repeats", type=int, default=5, help="turns of the part speed (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser.parse_args()


def main() -> None:
    """Run the parts that were asked for, and print a table for each."""
    arguments = options()
    size = SMALL if arguments.small else LARGE
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder, size)
        parts = {
            "scores": lambda: scores(folder, size),
            "speed": lambda: speed(folder, size, arguments.repeats),
            "flags": lambda: flags(folder, size),
            "memory": lambda: memory(folder, size),
        }
        for part in arguments.part or parts:
            report(parts[part](), as_json=arguments.json)


if __name__ == "__main__":
    main()
