"""`bank.listen` around `generate`: what is refused, why an output is missing, and that no hook stays behind."""

from __future__ import annotations

import copy
import functools
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tests.support.tiny import FAMILIES
from torch import Tensor
from transformers import GenerationMixin

from lamina.bank import Reader, ReaderBank, generation
from lamina.errors import ConfigError, UnknownNameError
from lamina.fusion.ada_layers import AdaLayers
from lamina.fusion.extra_layers import ExtraLayers
from lamina.fusion.mean import Mean
from lamina.fusion.scalar_mix import ScalarMix
from lamina.fusion.single_layer import SingleLayer
from lamina.heads.sequence_classification import SequenceClassification
from lamina.layers import tap

TWO = SequenceClassification(("a", "b"))
SHORT: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": 98}


def bank_of(name: str, stack: str | None = None, fusion: Any = None) -> ReaderBank:
    bank = ReaderBank(FAMILIES[name].known())
    bank.add("r", Reader(fusion or AdaLayers(dim=8), TWO, stack))
    return bank.eval()


def prompt(bank: ReaderBank, batch: int = 2, tokens: int = 5, seed: int = 0) -> dict[str, Tensor]:
    ids = torch.randint(5, 90, (batch, tokens), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def traces(model: torch.nn.Module) -> tuple[int, Any, set[str]]:
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())
    return hooks, GenerationMixin.generate, set(vars(model))


def test_an_encoder_has_no_decoder_to_read():
    bank = ReaderBank(FAMILIES["bert"].known())
    with pytest.raises(UnknownNameError, match="bank: unknown stack 'decoder'; known: main"):
        bank.add("r", Reader(AdaLayers(dim=8), TWO, "decoder"))


@pytest.mark.parametrize("name", ["bert", "gpt2", "bart"])
def test_a_model_that_writes_nothing_has_no_output(name: str):
    bank = bank_of(name)
    message = rf"bank\.listen: over is 'output', but {type(bank.model).__name__} has no head that generates text"
    with pytest.raises(ConfigError, match=message), bank.listen(over="output"):
        pass


def test_an_unknown_value_of_over_is_refused():
    bank: Any = bank_of("gpt2-CausalLM")
    message = "unknown over 'outputs'; known: prompt, output, both"
    with pytest.raises(UnknownNameError, match=message), bank.listen(over="outputs"):
        pass


def test_a_fusion_that_runs_along_with_the_blocks_is_refused():
    bank = bank_of("gpt2-CausalLM", fusion=ExtraLayers())
    message = "the fusion of reader 'r' runs along with the model's own blocks"
    with pytest.raises(ConfigError, match=message), bank.listen(over="both"):
        pass


class MeanOfFeedForward(Mean):
    site = "ffn"


@pytest.mark.parametrize("fusion", [MeanOfFeedForward(), ExtraLayers()])
@pytest.mark.parametrize("pieces", [{"prefill_chunk_size": 2}, {"cache_implementation": "static"}])
def test_a_fusion_inside_the_blocks_reads_no_prompt_in_pieces(fusion: Any, pieces: dict[str, Any]):
    bank = bank_of("gpt2-CausalLM", fusion=fusion)
    bank.add("other", Reader(SingleLayer(1), TWO)).eval()
    given, expected = prompt(bank), bank(**prompt(bank))["other"].logits
    plain = bank.model.generate(**given, **SHORT, **pieces)
    for names in (None, ["r"]):
        with bank.listen(names) as outputs:
            assert torch.equal(bank.model.generate(**given, **SHORT, **pieces), plain)
        with pytest.raises(ConfigError, match=r"bank\.listen: reader 'r' has no output: its fusion reads inside the"):
            outputs["r"]
        if names is None:
            assert torch.allclose(outputs["other"].logits, expected, atol=1e-5)
    with bank.listen() as outputs:  # in one pass
        bank.model.generate(**given, **SHORT)
    assert torch.allclose(outputs["r"].logits, bank(**given)["r"].logits, atol=1e-5)


def decode_by_hand(model: Any, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
    """Two steps of greedy decoding with a cache."""
    out = model(input_ids, use_cache=True)
    newest = out.logits[:, -1:].argmax(-1)
    return model(newest, past_key_values=out.past_key_values).logits


def decode_without_cache(model: Any, input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
    """Two steps of greedy decoding, each of which reads the whole text."""
    newest = model(input_ids, use_cache=False).logits[:, -1:].argmax(-1)
    return model(torch.cat([input_ids, newest], dim=1), use_cache=False).logits


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"custom_generate": lambda *_, **__: None}, "custom_generate=.* which decodes by its own loop"),
        ({"guidance_scale": 1.5}, "guidance_scale=1.5, which runs the model on a second prompt"),
        ({"token_healing": True}, "token_healing=True, which writes a text before"),
        ({"assistant_early_exit": 1}, "assistant_early_exit=1, which drafts with the lower layers"),
        ({"cache_implementation": "paged"}, "cache_implementation='paged', which puts several texts"),
    ],
)
def test_ways_to_decode_whose_states_would_be_wrong_are_refused(options: dict[str, Any], message: str):
    bank = bank_of("gpt2-CausalLM")
    before = traces(bank.model)
    with pytest.raises(ConfigError, match=message), bank.listen(over="both") as outputs:
        bank.model.generate(**prompt(bank), **SHORT, **options)
    assert len(outputs) == 0
    assert traces(bank.model) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"guidance_scale": 1.5}, "guidance_scale=1.5, which runs the model on a second prompt"),
        ({"token_healing": True, "tokenizer": object()}, "token_healing=True, which writes a text before"),
        ({"custom_generate": decode_by_hand}, "custom_generate=.* which decodes by its own loop"),
        ({"custom_generate": decode_without_cache}, "custom_generate=.* which decodes by its own loop"),
    ],
)
def test_they_are_refused_where_generate_was_bound_before(options: dict[str, Any], message: str):
    bank = bank_of("gpt2-CausalLM")
    generate = functools.partial(bank.model.generate, **SHORT)
    before = traces(bank.model)
    with pytest.raises(ConfigError, match=message), bank.listen(over="both") as outputs:
        generate(**prompt(bank, 1), **options)
    assert len(outputs) == 0
    assert traces(bank.model) == before


@pytest.mark.parametrize("is_bound", [True, False])
def test_token_healing_is_refused_when_only_the_prompt_is_read(is_bound: bool):
    bank = bank_of("gpt2-CausalLM")
    generate = functools.partial(bank.model.generate, **SHORT) if is_bound else None
    options = {**prompt(bank, 1), "token_healing": True, "tokenizer": object()}
    with pytest.raises(ConfigError, match="token_healing=True, which writes a text before"), bank.listen():
        (generate or functools.partial(bank.model.generate, **SHORT))(**options)


def test_a_model_that_drafts_for_itself_is_refused():
    bank = bank_of("gpt2-CausalLM")
    with pytest.raises(ConfigError, match="the model drafts for itself"), bank.listen(over="output"):
        bank.model.generate(**prompt(bank, 1), **SHORT, assistant_model=bank.model)


@pytest.mark.parametrize("over", ["both", "output", "prompt"])
@torch.no_grad()
def test_a_cache_that_holds_a_text_already_is_refused(over: Any):
    bank = bank_of("gpt2-CausalLM")
    batch = prompt(bank, 1)
    first = bank.model.generate(**batch, **SHORT, return_dict_in_generate=True)
    more = {"input_ids": first.sequences, "past_key_values": first.past_key_values}
    with pytest.raises(ConfigError, match="generate continues from a cache of 8 tokens"), bank.listen(over=over):
        bank.model.generate(**more, attention_mask=torch.ones_like(first.sequences), **SHORT)


def test_padding_behind_a_prompt_in_pieces_is_masked():
    bank = bank_of("gpt2-CausalLM")
    given = prompt(bank)
    given["attention_mask"][1, -1] = 0
    masks = []
    for pieces in ({}, {"prefill_chunk_size": 2}):
        with bank.listen(over="both") as outputs:
            bank.model.generate(**given, **SHORT, **pieces)
        masks.append(outputs["r"].mask)
    assert torch.equal(*masks)
    assert masks[0][:, :5].tolist() == given["attention_mask"].bool().tolist()


@pytest.mark.parametrize("pieces", [{"prefill_chunk_size": 2}, {"cache_implementation": "static"}])
def test_each_beam_has_a_row_of_the_prompt_however_it_is_read(pieces: dict[str, Any]):
    bank, rows = bank_of("gpt2-CausalLM"), []
    for options in ({}, pieces):
        with bank.listen() as outputs:
            bank.model.generate(**prompt(bank), **SHORT, num_beams=2, **options)
        rows.append(outputs["r"].logits)
    assert torch.allclose(*rows, atol=1e-5)


@torch.no_grad()
def test_a_hand_written_decoding_loop_is_refused():
    bank = bank_of("gpt2-CausalLM")
    batch = prompt(bank)
    with bank.listen(over="both") as outputs:
        out = bank.model(**batch, use_cache=True)
        assert torch.equal(outputs["r"].logits, bank(**batch)["r"].logits)
        outputs.clear()
        with pytest.raises(ConfigError, match="no pass has run since its outputs were cleared"):
            outputs["r"]
        with pytest.raises(ConfigError, match="a pass continues from a cache of tokens outside generate"):
            bank.model(input_ids=batch["input_ids"][:, :1], past_key_values=out.past_key_values)


@torch.no_grad()
def test_a_missing_output_says_why():
    bank, other = bank_of("gpt2-CausalLM"), bank_of("gpt2-CausalLM")
    batch = prompt(bank)
    with bank.listen(over="output") as outputs:
        with pytest.raises(ConfigError, match=r"reader 'r' has no output: no pass of the stack 'main' ran"):
            outputs["r"]
        other.model.generate(**batch, **SHORT)
        assert "r" not in outputs
        bank.model(**batch)
        with pytest.raises(ConfigError, match="has no output: the model was called, which writes no output"):
            outputs["r"]
        bank.model.generate(**batch, **{**SHORT, "max_new_tokens": 1})
        with pytest.raises(ConfigError, match="has no output: generate wrote one token, and no step reads the last"):
            outputs["r"]
        bank.model.generate(**batch, **SHORT)
        assert outputs["r"].mask.shape == (2, 3)
    with bank.listen() as outputs:
        pass
    with pytest.raises(ConfigError, match=r"no pass of the stack 'main' ran in this context(.|\n)*copy_context"):
        outputs["r"]
    with pytest.raises(UnknownNameError, match="unknown reader 's'"):
        outputs["s"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:, :-2], None),
        (lambda text: text.roll(1, 1), "the tokens that the stack read are not those that generate returned"),
        (lambda text: torch.cat([text, text], dim=1), "the stack read fewer tokens than generate returned"),
    ],
)
@torch.no_grad()
def test_the_tokens_read_are_compared_to_those_returned(change: Callable[[Tensor], Tensor], message: str | None):
    bank = bank_of("gpt2-CausalLM")
    sample = GenerationMixin._sample

    def changed(*args: Any, **kwargs: Any) -> Tensor:
        return change(sample(*args, **kwargs))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GenerationMixin, "_sample", changed)
        with bank.listen(over="output") as outputs:
            bank.model.generate(**prompt(bank), **SHORT)
    if message is None:
        assert outputs["r"].mask.shape == (2, 1)
    else:
        with pytest.raises(ConfigError, match=f"has no output: {message}"):
            outputs["r"]


def test_a_transformers_without_a_decoding_method_is_not_listened_to(monkeypatch: pytest.MonkeyPatch):
    bank = bank_of("gpt2-CausalLM")
    monkeypatch.delattr(GenerationMixin, "load_custom_generate", raising=False)  # other versions lack it
    with bank.listen():
        bank.model.generate(**prompt(bank), **SHORT)
    monkeypatch.delattr(GenerationMixin, "_beam_search")
    with pytest.raises(AttributeError, match="_beam_search"), bank.listen():
        pass
    assert not generation._open


def test_a_reader_listens_once_at_a_time():
    """The same readers hear a text once; those of another bank hear it as well."""
    bank = bank_of("gpt2-CausalLM")
    other = ReaderBank(bank.model)
    other.add("r", Reader(AdaLayers(dim=8), TWO)).eval()
    before = traces(bank.model)
    for outer_over, over in (("both", "prompt"), ("both", "output"), ("prompt", "prompt")):
        twice = pytest.raises(ConfigError, match="reader 'r' is listening already; a reader reads a pass once")
        with twice, bank.listen(over=outer_over), bank.listen(over=over):
            pass
        assert traces(bank.model) == before
    renamed = ReaderBank(bank.model)
    renamed.update(bank)
    renamed.rename("r", "s")
    with pytest.raises(ConfigError, match="reader 's' is listening already"), bank.listen(), renamed.listen():
        pass
    with bank.listen(over="both") as outer, other.listen(over="both") as inner:
        bank.model.generate(**prompt(bank), **SHORT)
    assert torch.equal(outer["r"].logits, inner["r"].logits)
    assert traces(bank.model) == before


def test_no_hook_stays_behind():
    bank = bank_of("bart-Seq2SeqLM", "decoder")
    before = traces(bank.model)
    with bank.listen(over="both"):
        bank.model.generate(**prompt(bank), **SHORT, num_beams=2)
        assert traces(bank.model) != before
    assert traces(bank.model) == before
    with pytest.raises(IndexError), bank.listen(over="both"):
        bank.model.generate(input_ids=torch.tensor([[10**6]]), **SHORT)
    assert traces(bank.model) == before
    stop = ZeroDivisionError()

    def criterion(*_: Any, **__: Any) -> Any:
        raise stop

    with bank.listen(over="both") as outputs:
        with pytest.raises(ZeroDivisionError):
            bank.model.generate(**prompt(bank), **SHORT, stopping_criteria=[criterion])
        assert len(outputs) == 0
        text = bank.model.generate(**prompt(bank), **SHORT)  # the next is outputs
        assert torch.equal(outputs["r"].tokens, text[:, :-1])
    assert traces(bank.model) == before


def test_each_thread_reads_its_own_text():
    """Threads that listen, threads that only generate, and one context that ends while others go on."""
    bank = bank_of("gpt2-CausalLM")
    options = [{}, {"num_beams": 2}]
    jobs = [(prompt(bank, 2, 4 + number, number), options[number % 2]) for number in range(6)]

    def texts(number: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        batch, more = jobs[number % 6]
        if number % 3 == 2:
            return bank.model.generate(**batch, **SHORT, **more), None, None
        with bank.listen(over="both") as outputs, tap(bank.model):
            text = bank.model.generate(**batch, **SHORT, **more)
        return text, outputs["r"].logits, outputs["r"].tokens

    before, alone = traces(bank.model), [texts(number) for number in range(6)]
    with ThreadPoolExecutor(4) as pool:
        for number, got in enumerate(pool.map(texts, range(24))):
            for value, expected in zip(got, alone[number % 6], strict=True):
                assert value is expected is None or torch.equal(value, expected)
    assert traces(bank.model) == before


def test_a_thread_that_only_generates_is_not_read():
    bank = bank_of("gpt2-CausalLM")
    with bank.listen(over="both") as outputs:
        thread = threading.Thread(target=bank.model.generate, kwargs={**prompt(bank), **SHORT})
        thread.start()
        thread.join()
        assert len(outputs) == 0


def test_a_bank_in_train_mode_does_not_change_what_is_sampled():
    bank = bank_of("gpt2-CausalLM", fusion=ScalarMix(layer_dropout=0.5)).train()
    options = {**SHORT, "do_sample": True}

    def drawn() -> Tensor:
        torch.manual_seed(5)
        return bank.model.generate(**prompt(bank), **options)

    plain = drawn()
    with bank.listen(over="both") as outputs:
        assert torch.equal(drawn(), plain)
    assert bank.training
    with bank.eval().listen(over="both") as again:
        drawn()
    assert torch.equal(outputs["r"].logits, again["r"].logits)


@torch.no_grad()
def test_padding_of_a_shifted_input_is_masked():
    bank = bank_of("bart", stack="decoder", fusion=Mean())
    whole = prompt(bank, batch=1)
    padded = {name: torch.nn.functional.pad(value, (0, 3)) for name, value in whole.items()}
    padded["input_ids"] = padded["input_ids"].masked_fill(padded["attention_mask"] == 0, bank.model.config.pad_token_id)
    assert torch.allclose(bank(**padded)["r"].logits, bank(**whole)["r"].logits, atol=1e-5)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda bank: pickle.loads(pickle.dumps(bank))])
def test_a_bank_is_copied_or_pickled_while_another_pass_reads_it(copied: Any):
    bank = bank_of("gpt2-CausalLM")
    with bank.listen(over="prompt") as outputs:
        other = copied(bank)
        assert not any(
            hooks for module in other.model.modules() for hooks in (module._forward_hooks, module._forward_pre_hooks)
        )
        other.model(**prompt(other))
        assert len(outputs) == 0
        bank.model(**prompt(bank))
    assert torch.equal(other(**prompt(other))["r"].logits, outputs["r"].logits)
