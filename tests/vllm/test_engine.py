"""Readers inside the real engine of vLLM: answers equal those of the bank, whatever the engine does with a request."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="`make test-vllm` runs these tests in an environment of their own")

from benchmarks.vllm_engines import CLOSE, as_inputs, dividing, engine, watchdog
from engines import END, bank_scores, greedy_texts, largest_difference, make_bank, make_model, prompts_of
from vllm.config import VllmConfig
from vllm.sampling_params import BeamSearchParams

from lamina import load, save, truncate_
from lamina.errors import BaseMismatchError, ConfigError, StoreError
from lamina.vllm import plugin
from vllm import SamplingParams

# 24 requests of up to 190 tokens do not fit into 12 blocks of 32, so requests are preempted and computed again
IN_PIECES = {"max_num_batched_tokens": 16, "num_gpu_blocks_override": 12, "disable_log_stats": False}
Folders = tuple[Path, Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    folder = tmp_path_factory.mktemp("engine")
    make_model(folder / "model")
    make_bank(folder / "model", folder / "bank")
    return folder / "model", folder / "bank"


@pytest.fixture(scope="module")
def compiled(folders: Folders) -> Iterator[Any]:
    """A compiled engine in a process of its own, with a cache that is too small for all requests."""
    with engine(*folders, **IN_PIECES) as llm:
        yield llm


@pytest.fixture(scope="module")
def watched(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, float]]:
    """An eager engine whose monitor flags some of the texts in `greedy_texts`, and the monitor's threshold."""
    prompts = prompts_of(12)
    scores = bank_scores(*folders, prompts, greedy_texts(folders[0], prompts, 24))
    threshold = dividing([max(row) for row in scores], range(2, 11))
    bank = tmp_path_factory.mktemp("watched")
    make_bank(folders[0], bank, watchdog("query", threshold))
    with engine(folders[0], bank, in_process=True, enforce_eager=True) as llm:
        yield llm, threshold


def greedy(count: int) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=1 + 7 * number % 40, temperature=0.0) for number in range(count)]


def test_answers_are_those_of_the_bank(folders: Folders, compiled: Any):
    prompts = prompts_of(24)
    texts: list[list[list[int]]] = []
    for _cache in ("cold", "warm"):
        outputs = compiled.generate(as_inputs(prompts), greedy(24), use_tqdm=False)
        assert largest_difference(*folders, prompts, [output.outputs[0] for output in outputs]) < CLOSE
        cached = sum(output.num_cached_tokens for output in outputs)
        assert cached > 0
        preempted = {metric.name: metric for metric in compiled.get_metrics()}["vllm:num_preemptions"]
        assert preempted.value > 0
        assert all(output.lamina is output.outputs[0].lamina for output in outputs)
        texts.append([list(output.outputs[0].token_ids) for output in outputs])
    assert texts[0] == texts[1]


def test_answers_of_an_eager_engine_are_those_of_the_bank(folders: Folders, watched: tuple[Any, float]):
    prompts = prompts_of(24)
    for _cache in ("cold", "warm"):
        outputs = watched[0].generate(as_inputs(prompts), greedy(24), use_tqdm=False)
        assert largest_difference(*folders, prompts, [output.outputs[0] for output in outputs]) < CLOSE


def test_sequences_of_one_prompt_have_answers_of_their_own(folders: Folders, compiled: Any):
    prompt = prompts_of(2)[0]
    sampling = SamplingParams(n=3, max_tokens=12, temperature=2.0)  # a seed ends the engine for CPUs
    (output,) = compiled.generate(as_inputs([prompt]), sampling, use_tqdm=False)
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    assert largest_difference(*folders, [prompt] * 3, output.outputs) < CLOSE


def test_a_stop_string_and_an_end_token_end_the_scores(folders: Folders, compiled: Any):
    prompt = prompts_of(2)[0]
    (plain,) = compiled.generate(as_inputs([prompt]), SamplingParams(max_tokens=10, temperature=0.0), use_tqdm=False)
    third = plain.outputs[0].token_ids[3]
    for stop in ({"stop": [f"w{third}"]}, {"stop_token_ids": [third]}):
        sampling = SamplingParams(max_tokens=10, temperature=0.0, **stop)
        (output,) = compiled.generate(as_inputs([prompt]), sampling, use_tqdm=False)
        assert output.outputs[0].finish_reason == "stop"
        assert largest_difference(*folders, [prompt], output.outputs) < CLOSE


def test_a_request_asks_for_readers_by_name(compiled: Any):
    ask = {"extra_args": {"lamina": ["mean", "whole"]}}
    (output,) = compiled.generate(as_inputs([[3, 4, 5]]), SamplingParams(max_tokens=2, **ask), use_tqdm=False)
    assert list(output.lamina) == ["mean", "whole"]
    wrong = SamplingParams(max_tokens=2, extra_args={"lamina": ["men"]})
    with pytest.raises(ValueError, match="unknown reader 'men'; known: query, mean, last, tags, whole, cut"):
        compiled.generate(as_inputs([[3, 4, 5]]), wrong, use_tqdm=False)
    (after,) = compiled.generate(as_inputs([[3, 4, 5]]), SamplingParams(max_tokens=2), use_tqdm=False)
    assert len(after.lamina) == 6
    with pytest.raises(ConfigError, match="readers do not run with beam search"):
        compiled.beam_search(as_inputs([[3, 4, 5]]), BeamSearchParams(beam_width=2, max_tokens=2))


def test_a_monitor_ends_one_request_and_leaves_the_others(folders: Folders, watched: tuple[Any, float]):
    llm, threshold = watched
    prompts = prompts_of(12)
    texts = greedy_texts(folders[0], prompts, 24)
    scores = bank_scores(*folders, prompts, texts)
    sampling = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    outputs = llm.generate(as_inputs(prompts), sampling, use_tqdm=False)
    for ids, row, output in zip(texts, scores, outputs, strict=True):
        completion = output.outputs[0]
        place = next((index for index, score in enumerate(row) if score >= threshold), None)
        assert completion.lamina.monitors["watchdog"].flagged_at == place
        if place is None:
            assert list(completion.token_ids) == ids
            assert completion.finish_reason == "length"
        else:  # the token after the one that was flagged was chosen in the same step
            assert list(completion.token_ids) == ids[: place + 2]
            assert completion.text.split() == [f"w{token}" for token in ids[: place + 2]]
            assert (completion.finish_reason, completion.stop_reason) == ("content_filter", "watchdog")
    assert 2 <= sum(output.outputs[0].finish_reason == "content_filter" for output in outputs) <= 10


def test_an_engine_without_a_bank_is_left_as_it_is(folders: Folders):
    with engine(folders[0], None, in_process=True, enforce_eager=True) as llm:
        (output,) = llm.generate(as_inputs([[3, 4, END - 1]]), SamplingParams(max_tokens=2), use_tqdm=False)
        core = llm.llm_engine.engine_core.engine_core
        runner = core.model_executor.driver_worker.worker.model_runner
        changed = [llm.llm_engine.output_processor, llm.llm_engine.input_processor, core.scheduler, runner]
    assert not hasattr(output, "lamina")
    for hooked in changed:
        assert not {name for name, value in vars(hooked).items() if "lamina" in getattr(value, "__module__", "")}


def test_what_cannot_work_is_refused_before_the_engine_starts(folders: Folders, tmp_path: Path):
    model, processor = load(folders[0])
    truncate_(model, 3)
    save(model, tmp_path / "other", processor)
    with pytest.raises(BaseMismatchError, match="layers"), engine(tmp_path / "other", folders[1]):
        pass
    with pytest.raises(StoreError, match="no bank"), engine(folders[0], tmp_path / "nowhere"):
        pass
    with pytest.raises(ConfigError, match="the engine uses LoRA"), engine(*folders, enable_lora=True):
        pass
    with (
        pytest.raises(ConfigError, match="the engine uses speculative decoding"),
        engine(*folders, speculative_config={"method": "ngram", "num_speculative_tokens": 2}),
    ):
        pass
    with (
        pytest.raises(ConfigError, match="the engine uses pipeline parallelism"),
        engine(*folders, pipeline_parallel_size=2),
    ):
        pass


def test_a_version_without_what_the_hooks_need_refuses_readers_only(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(VllmConfig, "__post_init__", VllmConfig.__post_init__)  # put back at the end
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.cpu_model_runner", None)
    plugin.register()
    VllmConfig()
    with pytest.raises(ValueError, match=r"cannot run in vLLM .* \(ModuleNotFoundError.*tried: 0\.32\.0"):
        VllmConfig(additional_config={"lamina": {"bank": "folder"}})


def test_compiled_code_is_kept_under_the_layers_that_it_returns():
    """A bank that replaces another in its folder may read other layers; code kept for the old ones returns those."""
    bank = {"lamina": {"bank": "folder"}}
    settings = [bank, bank | {"lamina_layers": [0]}, bank | {"lamina_layers": [2]}]
    assert len({VllmConfig(additional_config=setting).compute_hash() for setting in settings}) == 3
