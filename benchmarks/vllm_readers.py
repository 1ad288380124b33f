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
engine, which is the least that vllm-lens and vLLM-Hook do; and the bare engine with a second pass of transformers over
each text. `extract_hidden_states` of vLLM writes all states to files; it is only tried, since it needs a GPU.

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from common import report
from tokenizers import Tokenizer, models
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lamina import (
    AdaLayers,
    Monitor,
    PooledLayers,
    Reader,
    ReaderBank,
    SequenceClassification,
    TokenClassification,
    load,
)
from lamina.demo.timing import ratio
from lamina.monitors import RollingMax

CLOSE = 1e-4
BLOCK = 32  # tokens of a block of the cache; engines for CPUs take multiples of 32
LABELS = ("no", "yes")
BARE, TWICE = "bare, compiled", "bare, second pass"
Ids = list[int]


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
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(size.words)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder / "model")
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
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():  # far from the initial weights, at which all scores are alike
        for parameter in bank.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) / 10)
    if threshold is not None:
        bank.keep_monitor(Monitor("query0", flag="yes", aggregate=RollingMax(1), threshold=threshold, name="watchdog"))
    place = folder / ("bank" if threshold is None else "watched")
    bank.eval().save_pretrained(place)
    return place


@contextmanager
def engine(
    folder: Path, bank: Path | None, *, in_process: bool = True, on_flag: str = "end", **settings: Any
) -> Iterator[Any]:
    """Start an engine, with the readers of a bank if one is given, and stop it at the end."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(not in_process))
    from vllm.distributed import cleanup_dist_env_and_memory

    from vllm import LLM

    if bank is not None:
        settings["additional_config"] = {"lamina": {"bank": str(bank), "on_flag": on_flag}}
    defaults = {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 16, "block_size": BLOCK, "seed": 0}
    llm = LLM(str(folder / "model"), disable_log_stats=False, **{**defaults, **settings})
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        if in_process:
            cleanup_dist_env_and_memory()


def generate(llm: Any, prompts: Sequence[Ids], tokens: Sequence[int]) -> list[Any]:
    """Return the `CompletionOutput` of each prompt, decoded greedily up to its number of tokens."""
    from vllm import SamplingParams

    sampling = [SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True) for count in tokens]
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    return [output.outputs[0] for output in llm.generate(inputs, sampling, use_tqdm=False)]


def mixed_prompts(count: int, words: int, seed: int = 0, longest: int = 100) -> list[Ids]:
    """Return prompts of different lengths, many of which share a beginning."""
    draw = random.Random(seed)
    shared = [draw.randrange(words) for _ in range(longest)]
    lengths = [(draw.randrange(longest), draw.randrange(1, 30)) for _ in range(count)]
    return [shared[:begin] + [draw.randrange(words) for _ in range(end)] for begin, end in lengths]


# Scores


class Reference:
    """What the bank itself answers, by a plain pass of transformers over each text.

    Args:
        folder: Folder with "model" and "bank".
    """

    def __init__(self, folder: Path) -> None:
        self._bank = ReaderBank.from_pretrained(folder / "bank", load(folder / "model")[0])
        self._kept: dict[tuple[int, ...], dict[tuple[str, str], Tensor]] = {}

    def answers(self, prompt: Ids, output: Ids) -> dict[tuple[str, str], Tensor]:
        """Return (reader, part) -> probabilities. The last token of the output is in no part."""
        key = (len(prompt), *prompt, *output)
        if key not in self._kept:
            ids, length = torch.tensor([[*prompt, *output[:-1]]]), len(prompt)
            states = self._bank.record_states({"main": range(self._bank.stacks["main"].layers)}, {"input_ids": ids})
            parts = {"prompt": (0, length), "output": (length, ids.shape[1]), "both": (0, ids.shape[1])}
            self._kept[key] = {}
            for part, (first, last) in parts.items():
                if first == last:
                    continue
                kept = {"main": {layer: state[:, first:last] for layer, state in states["main"].items()}}
                batch = {"input_ids": ids[:, first:last], "attention_mask": torch.ones(1, last - first).long()}
                with torch.no_grad():
                    read = self._bank.read_states(kept, batch)
                self._kept[key] |= {(name, part): read[name].logits[0].softmax(-1) for name in self._bank}
        return self._kept[key]

    def compare(self, prompt: Ids, completion: Any) -> tuple[float, int]:
        """Return the largest difference of a request's answers from the bank's, and how many answers are wrong."""
        worst, wrong = 0.0, 0
        for (name, part), want in self.answers(prompt, list(completion.token_ids)).items():
            if name == "tags":
                if part != "both":
                    continue
                got = torch.tensor(completion.lamina[name]["tokens"])
            elif name.startswith("whole") and part != "prompt":
                continue
            else:
                answer = completion.lamina[name][part]
                got = torch.tensor([] if answer is None else list(answer["probabilities"].values()))
            if got.shape != want.shape or not torch.isfinite(got).all():
                wrong += 1
                continue
            difference = float((got - want).abs().max())
            worst, wrong = max(worst, difference), wrong + (difference > CLOSE)
        return worst, wrong


def preemptions(llm: Any) -> int:
    """Return how often an engine has preempted a request since its start."""
    return int(sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions"))


def scores(folder: Path, size: Size) -> list[dict[str, Any]]:
    """Compare the answers of engines in different modes with the bank's own."""
    prompts, rows = mixed_prompts(size.requests, size.words), []
    tokens = [1 + 7 * number % 24 for number in range(len(prompts))]
    reference = Reference(folder)
    for mode, eager in (("eager", True), ("compiled", False)):
        for prefill, step in (("whole", 2048), ("16 tokens", 16)):
            options: dict[str, Any] = {"enforce_eager": eager, "max_num_batched_tokens": step}
            with engine(folder, None, **options) as llm:
                bare = [list(completion.token_ids) for completion in generate(llm, prompts, tokens)]
            # 9 blocks are the fewest that hold one request of the longest length; 16 requests need up to 80
            for cache, blocks in (("large", None), ("small", 9)):
                with engine(folder, folder / "bank", **options, num_gpu_blocks_override=blocks) as llm:
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
            with engine(folder, in_process=False, enable_prefix_caching=False, **settings) as llm:
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
        with engine(folder, None, in_process=False, enable_prefix_caching=False, **settings) as llm:
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
    prompts = mixed_prompts(4 * at_once, size.words, seed=1, longest=40)
    counts = [tokens] * len(prompts)
    options: dict[str, Any] = {"max_num_seqs": at_once}
    with engine(folder, None, **options) as llm:
        bare = [list(completion.token_ids) for completion in generate(llm, prompts, counts)]
    with engine(folder, folder / "bank", **options) as llm:
        completions = generate(llm, prompts, counts)
    rows = [[row[1] for row in completion.lamina["query0"]["tokens"]] for completion in completions]
    outputs = [row[len(prompt) :] for row, prompt in zip(rows, prompts, strict=True)]
    threshold = _threshold([max(row) for row in outputs])
    over = {
        index: [place for place, score in enumerate(row) if score >= threshold] for index, row in enumerate(outputs)
    }
    flagged = {index: places[0] for index, places in over.items() if places}
    rest = [index for index in over if index not in flagged]
    draw, in_time, identical = random.Random(0), 0, 0
    with engine(folder, make_bank(folder, threshold), **options) as llm:
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


def _threshold(highest: list[float]) -> float:
    """Return a threshold in the widest gap between scores that a twentieth to a third of the texts exceed."""
    ordered = sorted(highest, reverse=True)
    places = range(max(1, len(ordered) // 20), len(ordered) // 3)
    place = max(places, key=lambda index: ordered[index - 1] - ordered[index])
    return (ordered[place - 1] + ordered[place]) / 2


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
    with engine(folder, folder / "bank", enforce_eager=True) as llm:
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
