"""`bank.watch` and `bank.stream`: flags, stopping, refusals, stored monitors, and that no hook stays behind."""

from __future__ import annotations

import contextvars
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from inspect import unwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.bytes_tokenizer import BYTES, bytes_tokenizer
from tests.support.stored import tiny_tokenizer
from tests.support.tiny import FAMILIES
from tokenizers import processors
from torch import Tensor
from transformers import (
    BertConfig,
    BertLMHeadModel,
    FalconConfig,
    FalconForCausalLM,
    GenerationMixin,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from lamina.bank import Reader, ReaderBank, prompt_inputs, watching
from lamina.bank.monitoring import token_logits
from lamina.bank.step import Step
from lamina.errors import ConfigError, NotFiniteError, UnknownNameError
from lamina.fusion.ada_layers import AdaLayers
from lamina.fusion.mean import Mean
from lamina.fusion.pooled_layers import PooledLayers
from lamina.fusion.single_layer import SingleLayer
from lamina.heads.sequence_classification import SequenceClassification
from lamina.heads.token_classification import TokenClassification
from lamina.monitors import Cascade, DriftSketch, LastScore, MeanScore, Monitor, ReplyFacts, RollingMax

TOKENS = TokenClassification(("fine", "odd"), encoder_layers=0)
SHORT: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": 98}
SHORT |= {"repetition_penalty": 3.0}
FLAG = Monitor("flag", "odd", LastScore())


class ImagesFirst:
    """A processor that takes images first, as LLaVA's does."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def __call__(self, images: Any, text: Any = None, **_: Any) -> Any:
        raise TypeError("no image was given")


def bank_of(name: str = "gpt2-CausalLM", stack: str | None = None) -> ReaderBank:
    bank = ReaderBank(FAMILIES[name].known())
    bank.add("flag", Reader(AdaLayers(dim=8), TOKENS, stack))
    bank.add("cheap", Reader(SingleLayer(1), TOKENS, stack, seed=1))
    return bank.eval()


def prompt(batch: int = 3, tokens: int = 5, seed: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(5, 90, (batch, tokens), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def traces(bank: ReaderBank) -> tuple[int, Any, set[str], bool]:
    modules = [*bank.model.modules()]
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules)
    return hooks, GenerationMixin.generate, set(vars(bank.model)), any(module.training for module in modules)


def scores_of(steps: list[Step], name: str = "flag") -> Tensor:
    return torch.stack([step.scores[name] for step in steps], dim=1)


def middle_score(bank: ReaderBank) -> float:
    """A threshold that two of three texts reach."""
    scores = scores_of(list(bank.stream(bank.model, prompt(), monitors=[FLAG], **SHORT)))
    return sorted(scores[:, :-1].amax(1).tolist())[1]


def test_a_text_is_flagged_at_the_first_token_that_reaches_the_threshold():
    bank = bank_of()
    plain = bank.model.generate(**prompt(), **SHORT)
    threshold = middle_score(bank)
    with bank.watch([Monitor("flag", "odd", LastScore(), threshold=threshold)]) as watch:
        assert torch.equal(bank.model.generate(**prompt(), **SHORT), plain)
    scores = scores_of(watch.steps)[:, :-1]
    hits = [[at for at, score in enumerate(row) if score >= threshold] for row in scores.tolist()]
    assert watch.flagged_at == {"flag": [own[0] if own else None for own in hits]}
    assert any(hits)
    for step in watch.steps:
        expected = [bool(own) and own[0] <= step.index for own in hits]
        assert step.flagged["flag"].tolist() == expected
    assert torch.equal(torch.stack([step.tokens for step in watch.steps], 1), plain[:, 5:])


def test_a_monitor_without_a_threshold_flags_nothing():
    bank = bank_of()
    with bank.watch([FLAG]) as watch:
        bank.model.generate(**prompt(), **SHORT)
    assert watch.flagged_at == {"flag": [None] * 3}


def test_a_flagged_sequence_stops_alone_and_its_text_is_the_same_before():
    bank = bank_of()
    plain = bank.model.generate(**prompt(), **SHORT)
    monitor = Monitor("flag", "odd", LastScore(), threshold=middle_score(bank))
    before = traces(bank)
    with bank.watch([monitor]) as watch:
        stopped = bank.model.generate(**prompt(), **SHORT, stopping_criteria=[watch.stopping])
    places = watch.flagged_at["flag"]
    assert None in places
    assert any(place is not None and place < 6 for place in places)
    for row, place in enumerate(places):
        kept = 8 if place is None else min(8, place + 2)  # the flagged token, and the one that was chosen meanwhile
        assert torch.equal(stopped[row, 5 : 5 + kept], plain[row, 5 : 5 + kept])
        assert bool((stopped[row, 5 + kept :] == 0).all())
        assert sum(bool(step.real[row]) for step in watch.steps) == kept
    assert traces(bank) == before


def test_padding_before_a_prompt_ends_no_sequence():
    bank, given = bank_of(), prompt()
    given["input_ids"][0, :2] = given["attention_mask"][0, :2] = 0

    def never(ids: Tensor, _scores: Any, **_more: Any) -> Tensor:
        return torch.zeros(len(ids), dtype=torch.bool)

    with bank.watch([FLAG], over="both") as watch:
        bank.model.generate(**given, **SHORT, stopping_criteria=[never])
    assert [step.real.tolist() for step in watch.steps] == [[True] * 3] * 8


def test_only_the_named_monitors_stop_a_sequence():
    bank = bank_of()
    both = [Monitor("flag", "odd", threshold=0.0), Monitor("flag", "odd", threshold=1.0, name="never")]
    counts = {}
    for stop in (False, True, None, ["flag"], ["never"], "flag", {"never"}, {"flag": both[0]}):
        counts[str(stop)[:8]] = len(list(bank.stream(bank.model, prompt(), monitors=both, stop=stop, **SHORT)))
    assert list(counts.values()) == [8, 2, 2, 2, 8, 2, 8, 2]


def test_monitors_in_a_dict_need_not_be_stored_and_come_before_stored_ones():
    bank = bank_of()
    with bank.watch({"flag": FLAG}) as watch:
        bank.model.generate(**prompt(), **SHORT)
    assert set(watch.steps[-1].scores) == {"flag"}
    bank.keep_monitor(replace(FLAG, threshold=1.0))
    with bank.watch({"flag": replace(FLAG, threshold=0.0)}) as watch:
        bank.model.generate(**prompt(), **SHORT)
    assert watch.flagged_at == {"flag": [0, 0, 0]}


def test_stored_monitors_may_come_in_a_dict_or_a_set():
    bank = bank_of()
    bank.keep_monitor(FLAG)
    for monitors in (bank.monitors, {"flag"}, {FLAG}, bank.monitors.keys()):
        with bank.watch(monitors, stop=bank.monitors) as watch:
            bank.model.generate(**prompt(), **SHORT, stopping_criteria=[watch.stopping])
        assert [*watch.flagged_at] == ["flag"]
    rule = "monitors is 3; it must be a list or a set or a dict or a Monitor or a Cascade or a text or None"
    with pytest.raises(ConfigError, match=rule):
        bank.watch(3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match=r"monitors\[0\] is 3; it must be a Monitor or a Cascade or a text"):
        bank.watch([3])  # pyright: ignore[reportArgumentType]


def test_a_prompt_may_be_flagged_and_stops_after_one_token():
    bank = bank_of()
    with bank.watch([Monitor("flag", "odd", threshold=0.0)], over="both") as watch:
        text = bank.model.generate(**prompt(), **SHORT, stopping_criteria=[watch.stopping])
    assert text.shape[1] == 6
    assert watch.flagged_at == {"flag": [-5] * 3}
    assert len(watch.steps) == 1


def test_on_token_is_called_as_each_token_is_read():
    bank = bank_of()
    calls: list[tuple[int, int]] = []
    runs: list[int] = []
    with bank.watch([FLAG], on_token=lambda step: calls.append((step.index, len(runs)))):
        handle = bank.model.register_forward_hook(lambda *_: runs.append(1))
        bank.model.generate(**prompt(), **SHORT)
    handle.remove()
    # within the step that reads the token; the last token is not read
    assert calls == [(at, at + 1) for at in range(7)] + [(7, 8)]


def test_reading_several_tokens_at_a_time_gives_the_same_scores():
    bank = bank_of()
    one, three = (list(bank.stream(bank.model, prompt(), monitors=[FLAG], every=n, **SHORT)) for n in (1, 3))
    torch.testing.assert_close(scores_of(three), scores_of(one), rtol=0, atol=1e-6)


def test_leaving_a_stream_ends_generation_and_leaves_nothing():
    bank = bank_of()
    before, threads, runs = traces(bank), threading.active_count(), []
    handle = bank.model.register_forward_hook(lambda *_: runs.append(1))
    stream = bank.stream(bank.model, prompt(), monitors=[FLAG], **{**SHORT, "max_new_tokens": 50})
    next(stream)
    during = traces(bank)
    stream.close()  # pyright: ignore[reportAttributeAccessIssue]
    handle.remove()
    assert during[0] > before[0]
    assert traces(bank) == before
    assert threading.active_count() == threads
    assert len(runs) < 8
    for step in bank.stream(bank.model, prompt(), monitors=[FLAG], **SHORT):
        if step.index == 1:
            break
    del step
    gc.collect()
    assert traces(bank) == before
    assert threading.active_count() == threads


def test_an_error_in_the_thread_is_raised_to_the_caller():
    bank = bank_of()
    before = traces(bank)

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("from a criterion")

    with pytest.raises(RuntimeError, match="from a criterion"):
        list(bank.stream(bank.model, prompt(), monitors=[FLAG], stopping_criteria=[fail], **SHORT))
    assert traces(bank) == before


def test_texts_are_prompts_too():
    bank = bank_of()
    with pytest.raises(ConfigError, match=r"bank\.stream: a text was given, and the bank has no processor"):
        bank.stream(bank.model, "the film", monitors=[FLAG])
    bank.processor = tiny_tokenizer()
    ids = torch.tensor([[2, 4, 6, 3], [0, 2, 5, 3]])  # padded on the left
    given = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    expected = list(bank.stream(bank.model, given, monitors=[FLAG], **SHORT))
    got = list(bank.stream(bank.model, ["the film", "a"], monitors=[FLAG], **SHORT))
    assert torch.equal(scores_of(got), scores_of(expected))
    (one, *_) = bank.stream(bank.model, "the film", monitors=[FLAG], **SHORT)
    assert one.tokens.tolist() == expected[0].tokens[:1].tolist()


def test_a_processor_that_takes_images_first_reads_texts_with_its_tokenizer():
    bank = bank_of()
    bank.processor = tokenizer = tiny_tokenizer()
    expected = [step.tokens.tolist() for step in bank.stream(bank.model, "the film", monitors=[FLAG], **SHORT)]
    bank.processor = ImagesFirst(tokenizer)  # pyright: ignore[reportAttributeAccessIssue]
    got = [step.tokens.tolist() for step in bank.stream(bank.model, "the film", monitors=[FLAG], **SHORT)]
    assert got == expected
    bank.processor = ImagesFirst(None)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ConfigError, match="the bank has no processor with a tokenizer"):
        bank.stream(bank.model, "the film", monitors=[FLAG])


@pytest.mark.parametrize("empty", [torch.zeros(1, 0).long(), "", ["the", ""], [], ()])
def test_an_empty_prompt_is_refused(empty: Any):
    bank = bank_of()
    bank.processor = bytes_tokenizer()
    bank.processor.pad_token = "<end>"
    message = r"bank\.stream: (the|a) prompt has no token; each|bank\.stream: there is no prompt; at least one"
    prompts = [empty, {"input_ids": empty}] if isinstance(empty, Tensor) else [empty]
    for one in prompts:
        with pytest.raises(ConfigError, match=message):
            bank.stream(bank.model, one, monitors=[FLAG])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"input_ids": [[3, 7]], "attention_mask": [[1, 1]]}, r'input_ids is of type list; .*return_tensors="pt"'),
        ({"input_ids": torch.tensor([3, 7])}, r"input_ids has shape \[2\] and type torch.int64; .*Give ids\[None\]"),
        (torch.tensor([3, 7]), r"inputs has shape \[2\] and type torch.int64; .* tensor of integers \[batch, tokens\]"),
    ],
)
def test_prompts_in_a_form_that_generate_does_not_take_are_refused(given: Any, message: str):
    bank = bank_of()
    with pytest.raises(ConfigError, match=rf"^bank\.stream: {message}"):
        bank.stream(bank.model, given, monitors=[FLAG])


def test_a_decoder_does_not_read_the_end_that_its_tokenizer_puts_after_a_prompt():
    bank, written = bank_of(), []
    bank.processor = tiny_tokenizer()
    for ends in (False, True):
        if ends:
            template = processors.TemplateProcessing("$A [SEP]", None, special_tokens=[("[SEP]", 3)])
            bank.processor.backend_tokenizer.post_processor = template
            bank.processor.eos_token = "[SEP]"
        else:
            bank.processor.backend_tokenizer.post_processor = processors.Sequence([])
        written.append([step.tokens.tolist() for step in bank.stream(bank.model, "the film", monitors=[FLAG], **SHORT)])
    assert written[0] == written[1]


def test_a_prompt_that_is_longer_than_the_position_table_is_refused():
    bank = ReaderBank(GPT2LMHeadModel(GPT2Config(vocab_size=99, n_embd=16, n_layer=1, n_head=2, n_positions=20)))
    bank.add("flag", Reader(AdaLayers(dim=8), TOKENS))
    for given in (prompt(1, 21)["input_ids"], prompt(2, 21)):
        with pytest.raises(ConfigError, match="a prompt has 21 tokens; the model reads at most 20"):
            bank.stream(bank.model, given, monitors=[FLAG])
    padded = prompt(1, 23)
    padded["attention_mask"][:, :3] = 0
    ids = padded["input_ids"]
    assert len(list(bank.stream(bank.model, padded, monitors=[FLAG], max_new_tokens=1))) == 1
    mask = padded["attention_mask"]
    assert len(list(bank.stream(bank.model, ids, monitors=[FLAG], attention_mask=mask, max_new_tokens=1))) == 1
    with pytest.raises(ConfigError, match=r"bank\.stream: a GPT2Block writes no text. Give bank\.model"):
        bank.stream(bank.model.transformer.h[0], ids, monitors=[FLAG])


def test_models_without_a_table_of_one_length_read_longer_prompts():
    settings: dict[str, Any] = {"vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    rotary = LlamaConfig(**settings, intermediate_size=16, max_position_embeddings=20)
    for model in (
        LlamaForCausalLM(rotary),
        FalconForCausalLM(
            FalconConfig(**settings, alibi=True, max_position_embeddings=20, new_decoder_architecture=False)
        ),
    ):
        bank = ReaderBank(model)
        bank.add("flag", Reader(AdaLayers(dim=8), TOKENS))
        assert list(bank.stream(bank.model, prompt(2, 21), monitors=[FLAG], **SHORT))


def test_texts_end_at_strings_with_the_banks_tokenizer():
    bank = ReaderBank(GPT2LMHeadModel(GPT2Config(vocab_size=257, n_embd=16, n_layer=1, n_head=2)), BYTES)
    bank.add("flag", Reader(AdaLayers(dim=8), TOKENS))
    whole = [step.text for step in bank.stream(bank.model, "the film", monitors=[FLAG], **SHORT)]
    stops = next(sign for text in whole for sign in text if sign.isascii())
    cut = list(bank.stream(bank.model, "the film", monitors=[FLAG], stop_strings=stops, **SHORT))
    assert len(cut) < len(whole)
    options: dict[str, Any] = {"stop_strings": stops, "tokenizer": bank.processor}
    assert len(list(bank.stream(bank.model, "the film", monitors=[FLAG], **options, **SHORT))) == len(cut)


def test_prompts_that_are_no_texts_are_named_with_their_type_and_pairs_are_read():
    bank = bank_of()
    bank.processor = tiny_tokenizer()
    encode: Any = unwrap(prompt_inputs.encode_prompts)  # without the type checks of the tests
    for given, named in (
        (["a", None], "1 is of type NoneType"),
        ([1, 2], "0 is of type int"),
        ([[1, 2, 3]], "0 is of type list"),
        ([("a", None)], "0 is of type tuple"),
        ([["a"]], "0 is of type list"),
    ):
        with pytest.raises(ConfigError, match=rf"bank\.stream: prompt {named}; a text, or a pair of texts, is needed"):
            encode(bank, given)
    for given, named in ((None, "NoneType"), (5, "int")):
        with pytest.raises(
            ConfigError, match=rf"the prompts are of type {named}; a text, texts, token ids or a mapping"
        ):
            encode(bank, given)
    ids = torch.tensor([bank.processor("the", "film")["input_ids"]])
    expected = list(bank.stream(bank.model, ids, monitors=[FLAG], **SHORT))
    got = list(bank.stream(bank.model, [("the", "film")], monitors=[FLAG], **SHORT))
    assert torch.equal(scores_of(got), scores_of(expected))


def test_steps_have_text_floats_and_flags_as_plain_values():
    bank = bank_of()
    bank.processor = tokenizer = tiny_tokenizer()
    monitors = [Monitor("flag", "odd", LastScore(), threshold=0.0), Monitor("cheap", "odd")]
    steps = list(bank.stream(bank.model, "the film", monitors=monitors, **SHORT))
    ids = torch.stack([step.tokens for step in steps], 1)[0].tolist()
    prompt_ids = tokenizer("the film")["input_ids"]
    whole, before = (tokenizer.decode(part, skip_special_tokens=True) for part in (prompt_ids + ids, prompt_ids))
    assert before + "".join(step.text for step in steps) == whole
    assert [step.token_id for step in steps] == ids
    assert steps[-1].flags == ["flag"]
    assert {name: type(score) for name, score in steps[0].score.items()} == {"flag": float, "cheap": float}
    assert steps[3].score["cheap"] == steps[3].scores["cheap"].item()


def test_several_sequences_have_a_text_each_and_an_incomplete_character_comes_at_the_end():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=257, n_embd=16, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=256)
    bank = ReaderBank(GPT2LMHeadModel(config), processor=BYTES)
    bank.add("flag", Reader(AdaLayers(dim=8), TOKENS))
    bank.eval()
    both = list(bank.stream(bank.model, prompt(2), monitors=[FLAG], **SHORT))
    text = bank.model.generate(**prompt(2), **SHORT)
    for row in (0, 1):
        pieces = [step.sequence(row).text for step in both]
        new = BYTES.decode(text[row, 5:])
        assert "".join(pieces) == new
        assert len(new) > 2
    with pytest.raises(ConfigError, match=r"step\.text: the step has 2 sequences\. Use step\.sequence\(0\)\.text"):
        both[0].text  # noqa: B018
    with pytest.raises(ConfigError, match=r"step\.sequence: 2 does not exist; the step has 2 sequences"):
        both[0].sequence(2)


def test_without_a_tokenizer_or_a_receiver_nothing_is_decoded():
    bank = bank_of()
    (step, *_) = bank.stream(bank.model, prompt(1), monitors=[FLAG], **SHORT)
    with pytest.raises(ConfigError, match=r"step\.text: the tokens were not decoded"):
        step.text  # noqa: B018
    bank.processor = tiny_tokenizer()
    with bank.watch([FLAG]) as watch:
        bank.model.generate(**prompt(1), **SHORT)
    assert watch.steps[0].texts is None


def test_callbacks_and_stops_of_threads_that_share_a_watch_do_not_mix():
    bank = bank_of()
    monitor = Monitor("flag", "odd", LastScore(), threshold=middle_score(bank))
    prompts = [{key: value[row : row + 1] for key, value in prompt().items()} for row in range(3)]
    heard: dict[int, list[Step]] = {}

    def note(step: Step) -> None:
        heard.setdefault(threading.get_ident(), []).append(step)

    def write(own: dict[str, Tensor], watch: Any, begin: threading.Barrier | None) -> tuple[int, Any, Tensor]:
        if begin is not None:
            begin.wait()
        text = bank.model.generate(**own, **SHORT, stopping_criteria=[watch.stopping])
        return threading.get_ident(), watch.flagged_at["flag"], text

    alone = []
    for own in prompts:
        with bank.watch([monitor]) as watch:
            alone.append(write(own, watch, None))
    with bank.watch([monitor], on_token=note) as watch, ThreadPoolExecutor(3) as pool:
        begin = threading.Barrier(3)
        contexts = [contextvars.copy_context() for _ in prompts]
        runs = [pool.submit(own.run, write, one, watch, begin) for own, one in zip(contexts, prompts, strict=True)]
        together = [run.result() for run in runs]
    assert len({flagged[0] is None for _, flagged, _ in alone}) == 2
    for (_, flagged, text), (thread, got_flagged, got_text) in zip(alone, together, strict=True):
        assert got_flagged == flagged
        assert torch.equal(got_text, text)
        assert [step.token_id for step in heard[thread]] == text[0, 5:].tolist()


def test_a_prompt_of_embeddings_and_one_of_a_decoder_are_no_part_of_the_output():
    bank, given = bank_of(), prompt(2)
    expected = list(bank.stream(bank.model, given, monitors=[FLAG], **SHORT))
    embedded = {"inputs_embeds": bank.model.get_input_embeddings()(given["input_ids"])}
    options = {**SHORT, "repetition_penalty": 1.0}
    plain = list(bank.stream(bank.model, given, monitors=[FLAG], **options))
    got = list(bank.stream(bank.model, embedded, monitors=[FLAG], **options))
    torch.testing.assert_close(scores_of(got), scores_of(plain), rtol=0, atol=1e-6)
    assert len(expected) == 8
    writer = bank_of("bart-Seq2SeqLM", "decoder")
    start = {**prompt(2), "decoder_input_ids": torch.tensor([[7, 9]] * 2)}  # `generate` puts a start token before
    text = writer.model.generate(**start, **SHORT)
    steps = list(writer.stream(writer.model, start, monitors=[FLAG], **SHORT))
    assert torch.equal(torch.stack([step.tokens for step in steps], 1), text[:, 3:])
    both = list(writer.stream(writer.model, start, monitors=[FLAG], over="both", **SHORT))
    torch.testing.assert_close(scores_of(steps), scores_of(both), rtol=0, atol=1e-6)  # LastScore forgets the prompt


def test_a_prompt_that_is_read_in_pieces_is_watched():
    bank = ReaderBank(FAMILIES["llama-CausalLM"].known())
    bank.add("flag", Reader(AdaLayers(dim=8), TOKENS))
    bank.eval()
    smooth = Monitor("flag", "odd", MeanScore())
    for over in ("output", "both"):
        whole = list(bank.stream(bank.model, prompt(), monitors=[smooth], over=over, **SHORT))
        pieces = list(bank.stream(bank.model, prompt(), monitors=[smooth], over=over, prefill_chunk_size=2, **SHORT))
        torch.testing.assert_close(scores_of(pieces), scores_of(whole), rtol=0, atol=1e-6)


def test_a_stream_inherits_autocast_from_the_caller():
    bank = bank_of()
    with torch.autocast("cpu", torch.bfloat16):
        got = scores_of(list(bank.stream(bank.model, prompt(), monitors=[FLAG], **SHORT)))
        with bank.watch([FLAG]) as watch:
            bank.model.generate(**prompt(), **SHORT)
    assert torch.equal(got, scores_of(watch.steps))
    assert not torch.equal(got, scores_of(list(bank.stream(bank.model, prompt(), monitors=[FLAG], **SHORT))))


def test_sampling_is_the_same_with_a_stream():
    bank = bank_of()
    options = {**SHORT, "do_sample": True, "num_return_sequences": 2}
    torch.manual_seed(5)
    plain = bank.model.generate(**prompt(), **options)
    torch.manual_seed(5)
    steps = list(bank.stream(bank.model, prompt()["input_ids"], monitors=[FLAG], **options))
    assert torch.equal(torch.stack([step.tokens for step in steps], 1), plain[:, 5:])


@pytest.mark.parametrize("texts", [["a", "longer text"], ["ab", "c", "def"], ["one \ud800 half", "\udfff"]])
def test_several_texts_are_streamed_by_a_tokenizer_without_padding(texts: list[str]):
    tokenizer: Any = bytes_tokenizer()
    tokenizer.pad_token = None
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=BYTES.vocab_size + 1))
    bank = ReaderBank(model, processor=tokenizer)
    bank.add("flag", Reader(AdaLayers(dim=8), TOKENS))
    options: dict[str, Any] = {"monitors": [FLAG], "max_new_tokens": 4, "pad_token_id": 0, "eos_token_id": None}
    options |= {"do_sample": False}
    together = torch.stack([step.tokens for step in bank.eval().stream(model, texts, **options)])
    for row, text in enumerate(texts):
        alone = [int(step.tokens[0]) for step in bank.stream(model, text, **options)]
        assert together[:, row].tolist() == alone


def test_streams_of_several_threads_do_not_mix():
    bank = bank_of()
    prompts = [prompt(2, 5, seed) for seed in range(4)]
    alone = [scores_of(list(bank.stream(bank.model, own, monitors=[FLAG], **SHORT))) for own in prompts]
    with ThreadPoolExecutor(4) as pool:
        streams = pool.map(lambda own: list(bank.stream(bank.model, own, monitors=[FLAG], **SHORT)), prompts)
        together = [scores_of(steps) for steps in streams]
    for got, expected in zip(together, alone, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-6, equal_nan=True)


@torch.no_grad()
def test_scores_of_whole_texts_drop_nothing_while_the_model_is_trained():
    model = FAMILIES["gpt2-CausalLM"].known()
    bank = ReaderBank(model, train_base=True)
    bank.add("flag", Reader(AdaLayers(dim=8), TOKENS))
    expected = bank.eval().monitor_scores(FLAG, prompt())
    assert torch.equal(bank.train().monitor_scores(FLAG, prompt()), expected)
    assert model.training


def test_the_second_of_a_cascade_runs_where_the_first_is_unsure():
    bank = bank_of()
    cheap = scores_of(
        list(bank.stream(bank.model, prompt(), monitors=[Monitor("cheap", "odd", LastScore())], **SHORT)), "cheap"
    )
    low = float(cheap[:, :-1].median())
    both = Cascade(
        Monitor("cheap", "odd", LastScore(), threshold=low), Monitor("flag", "odd", MeanScore(), threshold=0.0)
    )
    rows: list[int] = []

    def counted(stack_pass: Any, *args: Any) -> Any:
        logits = token_logits(stack_pass, *args)
        rows.append(logits["flag"].shape[:2].numel() if "flag" in logits else 0)
        return logits

    with pytest.MonkeyPatch.context() as patch, bank.watch([both]) as watch:
        patch.setattr("lamina.bank.monitoring.token_logits", counted)
        bank.model.generate(**prompt(), **SHORT)
    unsure = int((cheap[:, :-1] >= low).sum())
    assert sum(rows) == unsure < 21
    assert watch.asked == {"flag": unsure / 21}
    flags = [place is not None for place in watch.flagged_at["flag"]]
    assert flags == (cheap[:, :-1] >= low).any(1).tolist()


def test_two_readers_cannot_have_monitors_of_one_name():
    bank = bank_of()
    other = ReaderBank(bank.model)
    other.add("later", Reader(SingleLayer(1), TOKENS))
    for one, reader in ((bank, "flag"), (other, "later")):
        one.keep_monitor(Monitor(reader, "odd", name="one"))
    with pytest.raises(ConfigError, match=r"reader 'flag' has a monitor 'one', and so does one that stays"):
        other.update(bank)
    assert list(other) == ["later"]
    other.drop_monitor("one")
    other.update(bank)
    assert other.monitors == bank.monitors != {}


def test_monitors_of_one_name_in_a_shared_reader_are_named_and_can_be_dropped():
    bank = bank_of()
    other = ReaderBank(bank.model)
    other.add("later", Reader(SingleLayer(1), TOKENS))
    other.update(bank)
    other.keep_monitor(Monitor("later", "odd", name="one"))
    bank.keep_monitor(Monitor("flag", "odd", name="one"))
    with pytest.raises(ConfigError, match=r"reader 'flag' cannot be read \(another reader has a monitor 'one' too\)"):
        _ = other.monitors
    other.drop_monitor("one")
    assert "one" not in other.monitors


def test_monitors_are_kept_saved_loaded_renamed_and_dropped(tmp_path: Path):
    bank = bank_of()
    first = Monitor("cheap", "odd", RollingMax(3), threshold=0.4)
    bank.keep_monitor(first)
    bank.keep_monitor(Cascade(first, Monitor("flag", "odd", threshold=0.7), name="both"))
    bank.save_pretrained(tmp_path / "bank")
    again = ReaderBank.from_pretrained(tmp_path / "bank", bank.model)
    assert again.monitors == bank.monitors
    assert set(again.monitors) == {"cheap", "both"}
    with again.watch() as watch:
        again.model.generate(**prompt(), **SHORT)
    assert set(watch.flagged_at) == {"cheap", "both"}
    with again.watch(first) as watch:  # one monitor, without a list
        again.model.generate(**prompt(), **SHORT)
    assert set(watch.flagged_at) == {"cheap"}
    steps = again.stream(again.model, prompt(), monitors="both", **SHORT)
    assert {name for step in steps for name in step.scores} == {"both"}
    again.keep_monitor(Monitor("flag", "odd", name="cheap"))  # of that name, with another reader
    assert again.monitors["cheap"].reader == "flag"
    again.drop_monitor("cheap")
    again.drop_monitor("both")
    assert again.monitors == {}
    assert "monitors" not in again["flag"].info
    again.save_pretrained(tmp_path / "plain")
    assert ReaderBank.from_pretrained(tmp_path / "plain", bank.model).monitors == {}
    with pytest.raises(UnknownNameError, match=r"bank\.drop_monitor: unknown monitor 'cheap'; known: none"):
        again.drop_monitor("cheap")


@pytest.mark.parametrize("saved", [{"m": {"flag": ["odd"]}}, {"m": 3}, ["m"]])
def test_saved_monitors_that_cannot_be_understood_are_named(saved: Any):
    bank = bank_of()
    bank["cheap"].info = {"monitors": saved}
    bank.keep_monitor(FLAG)
    with pytest.raises(ConfigError, match="the monitors that are saved with reader 'cheap' cannot be read"):
        _ = bank.monitors
    bank.drop_monitor("flag")
    assert bank["cheap"].info == {"monitors": saved}
    assert not bank["flag"].monitors


def test_a_monitor_follows_a_reader_that_is_renamed():
    bank = bank_of()
    bank.keep_monitor(Monitor("cheap", "odd", threshold=0.4, name="m"))
    bank.keep_monitor(Cascade(Monitor("cheap", "odd", threshold=0.4), Monitor("flag", "odd"), name="both"))
    bank.rename("cheap", "small")
    assert bank.monitors["m"].readers == ("small",)
    assert bank.monitors["both"].readers == ("small", "flag")


def test_a_monitor_has_the_name_that_its_reader_has_in_each_bank():
    bank = bank_of()
    bank.keep_monitor(Monitor("flag", "odd", threshold=0.4, name="m"))
    bank.keep_monitor(Cascade(Monitor("cheap", "odd", threshold=0.4), Monitor("flag", "odd"), name="both"))
    other = ReaderBank(bank.model)
    other.update(bank)
    other.rename("flag", "big")
    assert {name: monitor.readers for name, monitor in other.monitors.items()} == {
        "m": ("big",),
        "both": ("cheap", "big"),
    }
    assert {name: monitor.readers for name, monitor in bank.monitors.items()} == {
        "m": ("flag",),
        "both": ("cheap", "flag"),
    }
    bank.add("big", Reader(AdaLayers(dim=8), TOKENS))
    bank["flag"].drop_cascades_of(["big"])  # as training the reader "big" does
    assert [*bank.monitors] == ["m", "both"]


def test_a_cascade_without_its_first_reader_is_named():
    bank = bank_of()
    bank.keep_monitor(Cascade(Monitor("cheap", "odd", threshold=0.4), Monitor("flag", "odd"), name="both"))
    bank.remove("cheap")
    with pytest.raises(UnknownNameError, match="unknown reader 'cheap'"), bank.watch():
        pass


class MeanOfFeedForward(Mean):
    site = "ffn"


def test_a_reader_inside_the_blocks_scores_whole_texts_only():
    bank, monitor = bank_of(), Monitor("inside", "odd", LastScore())
    message = r"bank\.{}: reader 'inside' reads inside the model's blocks, which is not possible while the model writes"
    with pytest.raises(ConfigError, match=message.format("add")):
        bank.add("inside", Reader(MeanOfFeedForward(), TOKENS), watch=True)
    assert "inside" not in bank
    bank.add("inside", Reader(MeanOfFeedForward(), TOKENS)).eval()
    bank.keep_monitor(monitor)
    for over in ("output", "both"):
        with pytest.raises(ConfigError, match=message.format("watch")), bank.watch([monitor], over):
            pass
    with pytest.raises(ConfigError, match=message.format("watch")):
        bank.stream(bank.model, prompt())
    expected = bank(**prompt())["inside"].logits.softmax(-1)[..., 1]
    assert torch.allclose(bank.monitor_scores(monitor, prompt()).float(), expected, atol=1e-5)


REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"monitors": []}, ConfigError, r"bank\.watch: there is no monitor"),
    ({}, ConfigError, r"bank\.watch: there is no monitor"),
    ({"monitors": ["m"]}, UnknownNameError, "unknown monitor 'm'"),
    ({"monitors": [Monitor("other", "odd")]}, UnknownNameError, "unknown reader 'other'; known: flag, cheap"),
    ({"monitors": [Monitor("flag", "even")]}, UnknownNameError, "monitor 'flag': unknown label 'even'"),
    ({"monitors": [FLAG, FLAG]}, ConfigError, "two monitors are called 'flag'"),
    ({"monitors": [FLAG], "over": "prompt"}, UnknownNameError, "unknown over 'prompt'; known: output, both"),
    ({"monitors": [FLAG], "every": 0}, ConfigError, "every is 0; it must be at least 1"),
    ({"monitors": [FLAG], "stop": ["other"]}, UnknownNameError, "unknown monitor 'other'; known: flag"),
]


@pytest.mark.parametrize(("given", "error", "message"), REFUSED)
def test_what_cannot_be_watched_is_refused_before_anything_runs(given: Any, error: type[Exception], message: str):
    bank = bank_of()
    with pytest.raises(error, match=message), bank.watch(**given):
        pass
    with pytest.raises(error, match=message):
        bank.stream(bank.model, prompt(), **given)


@pytest.mark.parametrize(
    ("reader", "message"),
    [
        (
            Reader(AdaLayers(dim=8, positions=True), TOKENS),
            r"reader 'r' has a fusion \(AdaLayers\) that looks at other",
        ),
        (
            Reader(PooledLayers(dim=8), SequenceClassification(("a", "odd"), pooling="first")),
            r"has a fusion \(PooledLayers\) that looks at other tokens, later ones too",
        ),
        (Reader(Mean(), TokenClassification(("a", "odd"), feedforward=8)), r"has a head \(TokenClassification\) that"),
        (Reader(Mean(), SequenceClassification(("a", "odd"))), r"has a head \(SequenceClassification\) that looks"),
    ],
)
def test_a_reader_that_looks_at_later_tokens_is_refused(reader: Reader, message: str):
    bank = bank_of()
    bank.add("r", reader)
    with (
        pytest.raises(ConfigError, match=message + r"(.|\n)*Use a token-wise fusion"),
        bank.watch([Monitor("r", "odd")]),
    ):
        pass


def test_a_head_that_weighs_tokens_tells_how_much():
    bank = bank_of()
    bank.add("r", Reader(Mean(), SequenceClassification(("a", "odd"), pooling="query")))
    bank["r"].head.token_map = lambda: None  # as a head of a third party that does not override it
    message = r"head of reader 'r' \(Seq.*\) weighs tokens, so its token_map gives 3 outputs, .*; it is None"
    with pytest.raises(ConfigError, match=message), bank.watch([Monitor("r", "odd")]):
        pass


def test_a_model_whose_tokens_see_later_ones_is_refused():
    config = BertConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    bank = ReaderBank(BertLMHeadModel(config))
    bank.add("flag", Reader(Mean(), TOKENS))
    message = "reader 'flag' reads the stack 'main', whose states of a token change with later tokens"
    with pytest.raises(ConfigError, match=message), bank.watch([FLAG]):
        pass
    config.is_decoder = True
    causal = ReaderBank(BertLMHeadModel(config))
    causal.add("flag", Reader(Mean(), TOKENS))
    with causal.watch([FLAG]):
        pass


def test_an_encoder_and_a_model_that_does_not_write_are_refused():
    message = "reader 'flag' reads the stack 'encoder', which does not read the generated text"
    with pytest.raises(ConfigError, match=message), bank_of("bart-Seq2SeqLM", "encoder").watch([FLAG]):
        pass
    message = "reads the stack 'main', which does not read the generated text. .*head='causal_lm'; from_pretrained"
    with pytest.raises(ConfigError, match=message), bank_of("gpt2").watch([FLAG]):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "num_beams=2; only at its end is it known which beam wins"),
        ({"prompt_lookup_num_tokens": 2}, "generate is called with drafts, which are read before it is known"),
        ({"guidance_scale": 1.5}, "guidance_scale=1.5, which runs the model on a second prompt"),
    ],
)
def test_ways_to_decode_whose_tokens_are_not_final_are_refused(options: dict[str, Any], message: str):
    bank = bank_of()
    before = traces(bank)
    with pytest.raises(ConfigError, match=message), bank.watch([FLAG]):
        bank.model.generate(**prompt(1), **SHORT, **options)
    with pytest.raises(ConfigError, match=message):
        list(bank.stream(bank.model, prompt(1), monitors=[FLAG], **SHORT, **options))
    assert traces(bank) == before


def test_listening_around_a_watch_reads_the_main_job_only():
    bank = bank_of()
    bank.add("text", Reader(Mean(), SequenceClassification(("a", "b"))))
    with bank.listen(["text"]) as outputs:
        with bank.watch([FLAG]) as watch:  # which tries the model the first time
            assert len(outputs) == 0
            bank.model.generate(**prompt(), **SHORT)
        stepwise = scores_of(watch.steps)
    torch.testing.assert_close(outputs["text"].logits, bank(**prompt(), readers=["text"])["text"].logits)
    streamed = list(bank.stream(bank.model, prompt(), monitors=[FLAG], **SHORT))
    assert torch.equal(scores_of(streamed), stepwise)


def test_another_model_is_refused():
    bank, other = bank_of(), bank_of()
    with pytest.raises(ConfigError, match=r"bank\.stream: got a GPT2LMHeadModel that is not the bank's model"):
        bank.stream(other.model, prompt(), monitors=[FLAG])


def test_a_watch_without_a_text_is_an_error():
    with bank_of().watch([FLAG]) as watch, pytest.raises(ConfigError, match=r"bank\.watch: no text was written yet"):
        _ = watch.steps


def test_whole_replies_are_passed_on_to_the_tests_of_drift():
    bank = bank_of()
    with bank.watch([FLAG]) as watch:
        text = bank.model.generate(**prompt(), **SHORT)
    sketch = DriftSketch.of([ReplyFacts(0.5, 7, torch.zeros(8)) for _ in range(50)])
    monitor = replace(FLAG, sketch=sketch)
    facts: list[ReplyFacts] = []
    test = monitor.watch_drift()
    heard = test.add
    object.__setattr__(test, "add", lambda reply: (facts.append(reply), heard(reply))[1])
    for over in ("plain", "every"):
        facts.clear()
        options = {"every": 3} if over == "every" else {}
        list(bank.stream(bank.model, prompt(), monitors=[monitor], drift={"flag": test}, **options, **SHORT))
        assert [fact.length for fact in facts] == [7] * 3  # the last token is not read
        highest = scores_of(watch.steps)[:, :-1].amax(1)
        assert [fact.score for fact in facts] == pytest.approx(highest.tolist(), abs=1e-6)
    mask = torch.ones_like(text)
    mask[:, :5] = 0
    states = bank.model(text, output_hidden_states=True).hidden_states
    fusion = bank["flag"].fusion
    features = fusion(torch.stack([states[layer] for layer in bank["flag"].layers]), torch.ones_like(text).bool())
    for fact, own in zip(facts, features[:, 5:-1].mean(1), strict=True):
        assert fact.features is not None
        torch.testing.assert_close(fact.features, own, rtol=0, atol=1e-5)
    assert test.replies == 6


def test_drift_is_not_tested_on_replies_that_a_flag_cuts_short():
    bank = bank_of()
    monitor = replace(FLAG, threshold=0.5, sketch=DriftSketch.of([ReplyFacts(0.5, 7)]))
    tests = {"flag": monitor.watch_drift()}
    with pytest.raises(ConfigError, match=r"bank\.watch: drift is tested on whole replies"):
        bank.stream(bank.model, prompt(), monitors=[monitor], drift=tests, stop=True)
    with bank.watch([monitor], drift=tests) as watch, pytest.raises(ConfigError, match=r"bank\.watch: drift is tested"):
        bank.model.generate(**prompt(), **SHORT, stopping_criteria=[watch.stopping])
    with (
        pytest.raises(UnknownNameError, match=r"unknown monitor 'flags'"),
        bank.watch([monitor], drift={"flags": tests["flag"]}),
    ):
        pass


@pytest.mark.parametrize("leaves", [True, False])
def test_drift_is_not_tested_on_a_reply_whose_stream_is_left(leaves: bool):
    monitor = replace(FLAG, sketch=DriftSketch.of([ReplyFacts(0.5, 7)]))
    test, bank = monitor.watch_drift(), bank_of()
    stream = bank.stream(bank.model, prompt(1), monitors=[monitor], drift={"flag": test}, **SHORT)
    for _step in stream:
        if leaves:
            break
    stream.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert test.replies == (0 if leaves else 1)


def test_drift_is_not_tested_on_a_reply_without_a_score():
    monitor = replace(FLAG, sketch=DriftSketch.of([ReplyFacts(0.5, 7)]))
    test, bank = monitor.watch_drift(), bank_of()
    with torch.no_grad():
        for parameter in bank["flag"].parameters():
            parameter.fill_(torch.nan)
    with pytest.raises(NotFiniteError, match=r"bank\.watch: monitor 'flag' of reader 'flag' gives NaN for text 0"):
        list(bank.stream(bank.model, prompt(1), monitors=[monitor], drift={"flag": test}, **SHORT))
    assert test.replies == 0


def test_what_a_sketch_does_not_have_is_not_tested_for_drift():
    monitor = replace(FLAG, sketch=DriftSketch.of([ReplyFacts(0.5, 7)]))
    cascade = Cascade(replace(FLAG, reader="cheap", name="low", threshold=0.1), FLAG)
    refused: list[tuple[Any, str, str]] = [
        (monitor, "both", r"bank\.watch: drift is tested on replies, and over='both' adds the prompt to them"),
        (cascade, "output", r"bank\.watch: 'flag' is a cascade, which has no sketch"),
    ]
    for watched, over, message in refused:
        with (
            pytest.raises(ConfigError, match=message),
            bank_of().watch([watched], over, drift={"flag": monitor.watch_drift()}),  # pyright: ignore[reportArgumentType]
        ):
            pass


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_features_of_padding_are_not_in_the_facts_of_a_reply(bad: float):
    sketch = DriftSketch.of([ReplyFacts(0.5, 7, torch.zeros(1)) for _ in range(50)])
    facts: list[ReplyFacts] = []
    test, real = replace(FLAG, sketch=sketch).watch_drift(), torch.tensor([[False, True]])
    object.__setattr__(test, "add", facts.append)
    replies = watching._RepliesSoFar({"flag": test}, {"flag": "reader"})
    replies.on_features(real, {"reader": torch.tensor([[[bad], [3.0]]])})
    replies.on_scores({"flag": torch.tensor([[bad, 0.5]])}, real)
    replies.on_end()
    (fact,) = facts
    assert fact.features is not None
    assert (fact.score, fact.length, fact.features.tolist()) == (0.5, 1, [3.0])
