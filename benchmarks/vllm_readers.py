"""Readers inside vLLM: are the scores right, what do they cost, and does a flag end its request in time.

    .venv-vllm/bin/python benchmarks/vllm_readers.py [--part NAME] [--small] [--repeats 10] [--readers-only]
        [--prefix-cache]

`make test-vllm` makes the environment. The model is a Llama with 116 million random weights, in float32; `--small`
takes 7 million, and fewer requests. The bank has four readers of tokens (AdaLayers with 16 features per layer; one
labels tokens) and four of whole prompts (PooledLayers with 64 features).

scores: mixed requests in eager and compiled engines, with whole prompts and with steps of at most 16 tokens, a cold and
a warm prefix cache, and a cache that holds all requests or so few that some are preempted. `difference` is the largest
one between a probability and the bank's own, over prompt, output and both; `wrong` counts answers that are missing,
have another number of tokens, or differ by more than 1e-4; `other tokens` counts requests whose output is not that of
an engine without a bank.

speed: two engines in one process and one thread, without a prefix cache, answer the same requests: the bare compiled
engine and another. They compute one step each in turn. `processor` counts the time in which the process computes, which
other programs on the machine change less, and `wall` all time. `throughput` is the ratio of the bare engine's time to
the other's for 16 requests at once, with prompts and outputs of 32 tokens; `prompts` is that for the step that reads
the prompts. `between tokens` is the ratio of the other's time to the bare engine's for the tokens after the first one,
of one request alone. Each is the median over the repeats, with an interval that has the true median with at least 95 %
confidence. `--readers-only` measures the compiled engine with readers only. `--prefix-cache` gives every engine a
prefix cache, in which no prompt is yet; readers then keep and pool what they read of outputs. Otherwise, beside it:
eager engines; forward hooks that copy each block's output, which is the least that vllm-lens does, and vLLM-Hook when
eager; and the bare engine with a second pass of transformers over each text. `extract_hidden_states` of vLLM writes all
states to files; it is only tried, since it needs a GPU.

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
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from math import comb
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import numpy as np
import torch
import vllm_engines
from common import report
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from vllm_engines import Ids, Reference, as_inputs, dividing, mixed_prompts, save_tokenizer, scatter, watchdog

from lamina import AdaLayers, PooledLayers, Reader, ReaderBank, SequenceClassification, TokenClassification, load

LABELS = ("no", "yes")
BARE = "bare, compiled"
engine = partial(vllm_engines.engine, max_model_len=256, disable_log_stats=False)


class Size(NamedTuple):
    """Sizes of the model and of the work."""

    depth: int
    width: int
    words: int
    requests: int
    tries: int
    tokens: int


LARGE = Size(depth=12, width=768, words=8000, requests=200, tries=100, tokens=32)
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


class Batch:
    """Requests that an engine has begun to answer.

    Args:
        llm: The engine.
        prompts: The prompts.
        tokens: Number of tokens of each output.

    Attributes:
        seconds: Time of the step that reads the prompts, and of all later steps; by columns processor and wall time.
    """

    def __init__(self, llm: Any, prompts: Sequence[Ids], tokens: int) -> None:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        self._engine, self.seconds, self._begun = llm.llm_engine, np.zeros((2, 2)), 0
        final = {"ignore_eos": True, "output_kind": RequestOutputKind.FINAL_ONLY}
        self._sampling = SamplingParams(max_tokens=tokens, temperature=0.0, **final)
        self._prompts, self.completions = as_inputs(prompts), list[Any]()

    def step(self) -> bool:
        """Compute a step; return whether another one is needed."""
        start = np.array([time.process_time(), time.perf_counter()])
        if not self._begun:
            for number, prompt in enumerate(self._prompts):
                self._engine.add_request(str(number), prompt, self._sampling)
        self.completions += [output.outputs[0] for output in self._engine.step()]
        self.seconds[self._begun] += np.array([time.process_time(), time.perf_counter()]) - start
        self._begun = 1
        return self._engine.has_unfinished_requests()


def in_steps(engines: Sequence[Any], prompts: Sequence[Ids], tokens: int) -> list[Batch]:
    """Let engines answer the same requests, each one step after the other."""
    batches = [Batch(llm, prompts, tokens) for llm in engines]
    going_on = True
    while going_on:
        going_on, *others = [batch.step() for batch in batches]
        if any(other != going_on for other in others):
            raise SystemExit("the engines need different numbers of steps")
    return batches


def speed(folder: Path, size: Size, repeats: int, *, readers_only: bool, prefix_cache: bool) -> list[dict[str, Any]]:
    """Compare other engines with the bare one, for 16 requests at once and for one alone."""
    readers: dict[str, Any] = {"bank": folder / "bank"}
    eager: dict[str, Any] = {"enforce_eager": True}
    variants: dict[str, dict[str, Any]] = {
        "8 readers, compiled": readers,
        "bare, eager": {"bank": None, **eager},
        "8 readers, eager": {**readers, **eager},
        "hooks, eager": {"bank": None, **eager, "worker_extension_cls": "vllm_readers.Hooks"},
    }
    draw, rows = random.Random(0), list[dict[str, Any]]()
    works = [[[draw.randrange(size.words) for _ in range(size.tokens)] for _ in range(count)] for count in (16, 1)]
    common: dict[str, Any] = {"enable_prefix_caching": prefix_cache, "in_process": True}
    for name in list(variants)[: 1 if readers_only else None]:
        with (
            engine(folder / "model", None, **common) as bare,
            engine(folder / "model", **common, **variants[name]) as other,
        ):
            if name.startswith("hooks"):
                other.collective_rpc("add_hooks")
            in_steps([bare, other], works[0], 4)
            measured = [[in_steps([bare, other], work, size.tokens) for work in works] for _ in range(repeats)]
        # axes: repeats, works, engines, phases, clocks
        seconds = np.array([[[batch.seconds for batch in batches] for batches in turn] for turn in measured])
        rows = rows or _speed_rows(BARE, seconds[:, :, [0, 0]], size)
        rows += _speed_rows(name, seconds, size)
        if not readers_only and name == "8 readers, compiled":
            rows += _speed_rows("bare, second pass", _with_second_pass(folder, works, measured, seconds), size)
    if readers_only:
        return rows
    tried = {**dict.fromkeys(rows[0], ""), "engine": f"extract_hidden_states {_try_extraction(folder, size)}"}
    return [*rows, tried]


def _with_second_pass(
    folder: Path, works: Sequence[list[Ids]], measured: list[list[list[Batch]]], seconds: np.ndarray
) -> np.ndarray:
    """Return the `seconds` of the bare engine, and those with a second pass over its texts in the other's place."""
    bank = ReaderBank.from_pretrained(folder / "bank", load(folder / "model")[0])
    seconds = seconds[:, :, [0, 0]].copy()
    for turn, batches in enumerate(measured):
        for number, work in enumerate(works):
            start = np.array([time.process_time(), time.perf_counter()])
            second_pass(bank, work, batches[number][0].completions)
            seconds[turn, number, 1, 1] += np.array([time.process_time(), time.perf_counter()]) - start
    return seconds


def _speed_rows(name: str, seconds: np.ndarray, size: Size) -> list[dict[str, Any]]:
    """Return the rows of an engine, one per clock, from the seconds `[repeats, works, engines, phases, clocks]`."""
    rows: list[dict[str, Any]] = []
    for number, clock in enumerate(("processor", "wall")):
        (many, one), own = np.moveaxis(seconds[..., number], 1, 0), np.median(seconds[:, :, 1, :, number], axis=0)
        rows.append(
            {
                "engine": name,
                "clock": clock,
                "ms/prompt token": 1000 * own[0, 0] / (16 * size.tokens),
                "ms/token of 16": 1000 * own[0, 1] / (16 * size.tokens),
                "ms/token of 1": 1000 * own[1, 1] / size.tokens,
                "prompts": _median(many[:, 0, 0] / many[:, 1, 0]),
                "throughput": _median(many[:, 0].sum(-1) / many[:, 1].sum(-1)),
                "between tokens": _median(one[:, 1, 1] / one[:, 0, 1]),
            }
        )
    return rows


def _median(ratios: np.ndarray) -> str:
    """Return the median of ratios, and their shortest interval that has the true median in 95 %; all if below six."""
    count, out = len(ratios), 0  # ratios left out at each end; each lies below the true median half of the time
    while 2 * sum(comb(count, below) for below in range(out + 2)) <= 0.05 * 2**count:
        out += 1
    ordered = np.sort(ratios)
    return f"{np.median(ratios):.3f} [{ordered[out]:.3f}, {ordered[-1 - out]:.3f}]"


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
    parser.add_argument("--repeats", type=int, default=10, help="turns of the part speed (default %(default)s)")
    parser.add_argument("--readers-only", action="store_true", help="part speed: measure no other ways to read")
    parser.add_argument("--prefix-cache", action="store_true", help="part speed: engines with a prefix cache")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    return parser.parse_args()


def main() -> None:
    """Run the parts that were asked for, and print a table for each."""
    arguments = options()
    torch.set_num_threads(1)
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    size = SMALL if arguments.small else LARGE
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder, size)
        parts = {
            "scores": lambda: scores(folder, size),
            "speed": lambda: speed(
                folder,
                size,
                arguments.repeats,
                readers_only=arguments.readers_only,
                prefix_cache=arguments.prefix_cache,
            ),
            "flags": lambda: flags(folder, size),
            "memory": lambda: memory(folder, size),
        }
        for part in arguments.part or parts:
            report(parts[part](), as_json=arguments.json)


if __name__ == "__main__":
    main()
