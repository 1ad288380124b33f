"""Where a generated text ends: `generate` says it, by its stopping criteria, and token ids do not."""

from __future__ import annotations

import contextvars
import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.portions import one_in
from tests.support.tiny import FAMILIES
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    PreTrainedModel,
    RwkvConfig,
    RwkvForCausalLM,
    XLMConfig,
    XLMWithLMHeadModel,
)

from lamina.bank import Reader, ReaderBank
from lamina.errors import ConfigError
from lamina.fusion.ada_layers import AdaLayers
from lamina.heads.token_classification import TokenClassification
from lamina.monitors import LastScore, Monitor

FLAG = Monitor("flag", "odd", LastScore())
PROMPT = torch.tensor([[5, 6, 7]])
END, PAD = 98, 0


class Write(LogitsProcessor):
    """Makes `generate` write the given texts, one per row."""

    def __init__(self, *texts: list[int], prompt: int = 3) -> None:
        self.texts, self.prompt = texts, prompt

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        chosen = torch.tensor([text[input_ids.shape[1] - self.prompt] for text in self.texts])
        return torch.full_like(scores, -1e9).scatter_(1, chosen.unsqueeze(1), 0.0)


def bank_of(model: PreTrainedModel | None = None) -> ReaderBank:
    bank = ReaderBank(FAMILIES["gpt2-CausalLM"].known() if model is None else model)
    bank.add("flag", Reader(AdaLayers(dim=8), TokenClassification(("fine", "odd"), encoder_layers=0)))
    return bank.eval()


def model_of(bank: ReaderBank) -> Any:
    return bank.model


def write(bank: ReaderBank, *texts: list[int], **options: Any) -> Tensor:
    prompts = PROMPT.expand(len(texts), -1)
    options = {"pad_token_id": PAD, "eos_token_id": END} | options
    return model_of(bank).generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        max_new_tokens=len(texts[0]),
        do_sample=False,
        logits_processor=[Write(*texts)],
        **options,
    )


def ends_with(*last: int) -> Callable[..., Tensor]:
    """A stopping criterion: the sequences whose newest token is one of these end."""
    return lambda ids, _scores, **_more: torch.isin(ids[:, -1], torch.tensor(last))


# what is written, the options, and the number of tokens of each text, its end included
TEXTS: dict[str, tuple[list[list[int]], dict[str, Any], list[int]]] = {
    "padding is a word": ([[5, 0, 0, 8, 0, 0], [5, 6, END, 0, 0, 0]], {}, [6, 3]),
    "a word beside a criterion": ([[5, 0, 7, 8, 9, 10]] * 2, {"stopping_criteria": [ends_with(50)]}, [6, 6]),
    "no end token": ([[5, END, 7, 8, 9, 10]] * 2, {"eos_token_id": None}, [6, 6]),
    "no end token, and a criterion": ([[5, 6, 7, 8], [5, 6, 7, 8]], {"eos_token_id": None}, [4, 4]),
    "another end token": ([[5, END, 7, 50, 9, 10]] * 2, {"eos_token_id": 50, "pad_token_id": END}, [4, 4]),
    "several end tokens": ([[5, 6, 9, 8, 9, 10], [5, END, 7, 8, 9, 10]], {"eos_token_id": [END, 9]}, [3, 2]),
    "the end is the padding": ([[5, 6, END, 8, 9, 10], [5, 6, 7, 8, 9, 10]], {"pad_token_id": END}, [3, 6]),
    "a criterion ends one": (
        [[5, 6, 7, 8, 9, 10], [5, 50, 7, 8, 9, 10]],
        {"stopping_criteria": [ends_with(50)]},
        [6, 2],
    ),
    "the end at once": ([[END, 6, 2, 8, 9, 10], [5, 6, 7, 8, 9, 10]], {}, [1, 6]),
    # without an end token `generate` does not pad: an ended sequence goes on until all have ended
    "nothing pads": (
        [[5, 50, 7, 8, 9, 10], [5, 6, 7, 50, 9, 10]],
        {"eos_token_id": None, "stopping_criteria": [ends_with(50)]},
        [4, 4],
    ),
}


@pytest.mark.parametrize("name", one_in(3, TEXTS))
def test_a_text_ends_where_generate_ends_it(name: str):
    texts, options, lengths = TEXTS[name]
    bank = bank_of()
    with bank.listen(over="output") as outputs, bank_of(bank.model).watch([FLAG], over="output") as watch:
        text = write(bank, *texts, **options)
    assert [sum(bool(step.real[row]) for step in watch.steps) for row in range(len(texts))] == lengths
    read = outputs["flag"]
    for row, length in enumerate(lengths):
        assert read.mask[row].sum() == length - 1
        alone = torch.cat([PROMPT, text[row : row + 1, 3 : 2 + length]], dim=1)
        expected = bank(input_ids=alone)["flag"].logits[0, 3:]
        assert torch.allclose(read.logits[row, : length - 1], expected, atol=1e-5)
        scores = torch.stack([step.scores["flag"][row] for step in watch.steps])[: length - 1]
        assert torch.allclose(scores, bank_of(bank.model).monitor_scores(FLAG, {"input_ids": alone})[0, 3:], atol=1e-5)


def test_a_config_of_the_call_counts_and_not_the_models():
    bank = bank_of()
    config = GenerationConfig(eos_token_id=50, pad_token_id=PAD, max_new_tokens=4, do_sample=False)
    with bank.listen(over="output") as outputs:
        model_of(bank).generate(PROMPT, generation_config=config, logits_processor=[Write([5, END, 50, 8])])
    assert outputs["flag"].mask.sum() == 2


@pytest.mark.parametrize("over", ["output", "both"])
def test_a_generate_that_was_bound_before_is_followed(over: Any):
    bank = bank_of()
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 4, "pad_token_id": PAD, "eos_token_id": END}
    bound = functools.partial(model_of(bank).generate, **options)
    with bank.listen(over=over) as expected:
        model_of(bank).generate(PROMPT, **options)
    with bank.listen(over=over) as outputs:
        bound(PROMPT)
    assert torch.equal(outputs["flag"].logits, expected["flag"].logits)
    with bank.watch([FLAG], over=over) as watch:
        bound(PROMPT, stopping_criteria=[watch.stopping])
    assert len(watch.steps) == 4
    with pytest.raises(ConfigError, match="num_beams=2; only at its end"), bank.watch([FLAG]):
        bound(PROMPT, num_beams=2)


def run_inside(model: Any, how: str) -> dict[str, Any]:
    """Options of `generate` with callbacks that run the model on another text, or generate with it, at every step."""

    def processor(ids: Tensor, scores: Tensor) -> Tensor:
        return scores + 0 * (model(ids[:, -1:]).logits[:, -1] if how == "a pass" else another(ids))

    def another(ids: Tensor) -> int:
        options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 2, "do_sample": False, "pad_token_id": PAD}
        return int(model.generate(ids, **options)[0, -1])

    def criterion(ids: Tensor, scores: Any, **_: Any) -> Tensor:
        processor(ids, torch.zeros(1))
        return torch.zeros(len(ids), dtype=torch.bool)

    return {"logits_processor": [processor], "stopping_criteria": [criterion]}


@pytest.mark.parametrize("how", ["a pass", "a text"])
@torch.no_grad()
def test_what_a_callback_runs_is_no_part_of_the_text(how: str):
    bank = bank_of()
    model = model_of(bank)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": PAD, "eos_token_id": END}
    options |= {"attention_mask": torch.ones_like(PROMPT), "repetition_penalty": 3.0}
    inside = run_inside(model, how)
    for beams in (1, 2):
        with bank.listen(over="both") as expected:
            text = model.generate(PROMPT, num_beams=beams, **options)
        with bank.listen(over="both") as outputs:
            assert torch.equal(model.generate(PROMPT, num_beams=beams, **options, **inside), text)
        torch.testing.assert_close(outputs["flag"].logits, expected["flag"].logits)
    with bank.watch([FLAG]) as plain:
        text = model.generate(PROMPT, **options)
    run = inside["logits_processor"][0]
    with bank.watch([FLAG], on_token=lambda step: run(step.tokens[None], torch.zeros(1))) as watch:
        assert torch.equal(model.generate(PROMPT, **options, **inside), text)
    scores = ([step.score["flag"] for step in own.steps] for own in (watch, plain))
    assert next(scores) == pytest.approx(next(scores))
    assert [step.token_id for step in watch.steps] == text[0, 3:].tolist()


@torch.no_grad()
def test_a_callback_listens_to_texts_of_its_own():
    bank, seen = bank_of(), list[int]()
    model = model_of(bank)
    others = [bank_of(copy.deepcopy(model)), bank_of(model)]
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": PAD, "attention_mask": torch.ones_like(PROMPT)}

    def inside(ids: Tensor, scores: Tensor) -> Tensor:
        for other in others:
            with other.listen(over="both") as outputs:
                model_of(other).generate(PROMPT, **options)
            seen.append(outputs["flag"].logits.shape[1])
        # an option that readers of the outer text could not follow
        model.generate(ids, guidance_scale=2.0, **{**options, "attention_mask": torch.ones_like(ids)})
        return scores

    with bank.listen(over="both") as expected:
        text = model.generate(PROMPT, **options)
    with bank.listen(over="both") as outputs:
        assert torch.equal(model.generate(PROMPT, logits_processor=[inside], **options), text)
    torch.testing.assert_close(outputs["flag"].logits, expected["flag"].logits)
    assert seen == [expected["flag"].logits.shape[1]] * 6


@torch.no_grad()
def test_what_a_streamer_runs_is_no_part_of_the_text():
    class Running:
        def put(self, value: Tensor) -> None:
            model(value.reshape(1, -1))

        def end(self) -> None:
            model(PROMPT)

    bank = bank_of()
    model = model_of(bank)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": PAD, "attention_mask": torch.ones_like(PROMPT)}
    with bank.listen(over="output") as expected:
        text = model.generate(PROMPT, **options)
    with bank.listen(over="output") as outputs:
        assert torch.equal(model.generate(PROMPT, streamer=Running(), **options), text)
    torch.testing.assert_close(outputs["flag"].logits, expected["flag"].logits)
    with bank.watch([FLAG]) as watch:
        assert torch.equal(model.generate(PROMPT, streamer=Running(), **options), text)
    assert [step.token_id for step in watch.steps] == text[0, 3:].tolist()


def test_a_thread_that_is_started_by_hand_is_refused_by_name():
    bank = bank_of()
    options: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": PAD}
    raised: list[ConfigError] = []

    def generate(**more: Any) -> None:
        try:
            model_of(bank).generate(PROMPT, **options, **more)
        except ConfigError as error:
            raised.append(error)

    def run(target: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        thread = threading.Thread(target=target, args=args, kwargs=kwargs)
        thread.start()
        thread.join()

    with bank.watch([FLAG]) as watch:
        run(generate, stopping_criteria=[watch.stopping])  # at its first token
        assert "contextvars.copy_context" in str(raised[0])
        with pytest.raises(ConfigError, match=r"a thread started by hand must run contextvars\.copy_context"):
            _ = watch.steps
        run(contextvars.copy_context().run, generate, stopping_criteria=[watch.stopping])
        assert len(watch.steps) == 3
        run(generate, stopping_criteria=[watch.stopping])  # and not stopped by the flags of another thread's text
        assert len(raised) == 2
    with bank.listen(over="output") as outputs:
        run(generate)
        with pytest.raises(ConfigError, match=r"contextvars\.copy_context"):
            outputs["flag"]
        run(contextvars.copy_context().run, generate)
        assert outputs["flag"].mask.sum() == 2


def test_a_model_that_reads_its_text_again_at_every_step_is_followed():
    bank = bank_of(OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=32)))
    with bank.listen(over="both") as outputs:
        text = (
            write(bank, [5, 6, 7, 8], [9, END, 3, 3], prompt=3) if False else write(bank, [5, 6, 7, 8], [9, END, 3, 3])
        )
    tokens = outputs["flag"].tokens
    assert tokens is not None
    assert torch.equal(tokens[0], text[0, :-1])
    assert outputs["flag"].mask.sum(1).tolist() == [6, 4]
    expected = bank(input_ids=text[:, :-1])["flag"].logits[0]
    assert torch.allclose(outputs["flag"].logits[0], expected, atol=1e-5)


def test_a_model_that_reads_more_than_the_text_is_refused_by_name():
    config = XLMConfig(vocab_size=99, emb_dim=32, n_layers=2, n_heads=4, causal=True, max_position_embeddings=32)
    bank = bank_of(XLMWithLMHeadModel(config))
    message = "XLMWithLMHeadModel computes states of 4 tokens where the text has 3"
    with pytest.raises(ConfigError, match=message), bank.listen(over="both"):
        model_of(bank).generate(PROMPT, max_new_tokens=3)


def test_a_model_whose_states_are_not_those_of_its_tokens_is_refused_by_name():
    """RWKV in transformers 5.23 mixes the rows of a batch, and returns a state of `rows` tokens for each."""
    bank = bank_of(RwkvForCausalLM(RwkvConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, rescale_every=0)))
    with bank.listen(over="both") as outputs:
        write(bank, [5, 6, 7, 8])
    assert outputs["flag"].mask.sum() == 6
    message = "RwkvForCausalLM computes states of 2 tokens where the text has 1"
    with pytest.raises(ConfigError, match=message), bank.listen(over="both"):
        write(bank, [5, 6, 7, 8], [5, 6, 7, 8])


def test_a_model_that_decodes_by_a_loop_of_its_own_is_refused_by_name():
    class OwnLoop(OpenAIGPTLMHeadModel):
        def _sample(self, *args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError

    bank = bank_of(OwnLoop(OpenAIGPTConfig(vocab_size=99, n_embd=32, n_layer=2, n_head=4)))
    with pytest.raises(ConfigError, match="OwnLoop decodes by its own loop"), bank.listen(over="output"):
        pass
