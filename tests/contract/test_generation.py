"""Law 13: outputs while generating equal those of one plain pass over the text, and the text is the same."""

from __future__ import annotations

import copy
import functools
import itertools
import zlib
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers
from tests.support.portions import one_in
from tests.support.tiny import FAMILIES, WRITERS
from torch import Tensor

from lamina.bank import BankOutput, Reader, ReaderBank
from lamina.bank.generation_states import GenerationStates
from lamina.fusion.ada_layers import AdaLayers
from lamina.fusion.dwatt import DWAtt
from lamina.fusion.gated import Gated
from lamina.fusion.pooled_layers import PooledLayers
from lamina.fusion.routing import Routing
from lamina.heads.sequence_classification import SequenceClassification
from lamina.heads.token_classification import TokenClassification

TWO = ("a", "b")
READERS = {
    "tokens": (AdaLayers(dim=8), TokenClassification(TWO, encoder_layers=0)),
    "mixed": (AdaLayers(dim=8), TokenClassification(TWO, feedforward=16)),
    "text": (AdaLayers(dim=8, layers="2-"), SequenceClassification(TWO)),
    "mean": (DWAtt(), SequenceClassification(TWO, pooling="mean")),
    "gated": (Gated(hidden=4), SequenceClassification(TWO, pooling="mean")),
    "counted": (AdaLayers(dim=8, positions=True), SequenceClassification(TWO)),
    "routed": (Routing(dim=2, size=8, vectors=4), SequenceClassification(TWO, pooling="first", linear=False)),
    "pooled": (PooledLayers(dim=8), SequenceClassification(TWO, pooling="first")),
}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "no cache": {"use_cache": False},
    "sampled beams": {"num_beams": 3, "do_sample": True},
    "beams, no cache": {"num_beams": 3, "use_cache": False},
}
CASES = [(name, mode) for name in WRITERS for mode in [*MODES][: 6 if name in ("gpt2", "bart") else 4]]


@functools.cache
def bank_of(name: str) -> ReaderBank:
    """A generating model, and readers of all kinds of its decoder; of an encoder-decoder one of the encoder, too.

    In double precision, so that what differs differs by more than rounding, which is not the same on all machines.
    """
    family = FAMILIES[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(name.encode()))
        model = getattr(transformers, WRITERS[name]).from_config(family.config()).eval().double()
    bank = ReaderBank(model)
    with torch.no_grad():
        for parameter in model.parameters():  # as large as trained ones, so that the tokens before a token count
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.1)
    for seed, (key, parts) in enumerate(READERS.items()):
        bank.add(key, Reader(*parts, family.stacks[-1], seed=seed))
    if "encoder" in bank.stacks:
        bank.add("encoder", Reader(AdaLayers(dim=8), SequenceClassification(TWO), "encoder"))
    return bank.eval().double()


def prompt_of(name: str, batch: int = 3) -> dict[str, Tensor]:
    """Unequal prompts; those of decoders are padded on the left."""
    bank = bank_of(name)
    inputs = FAMILIES[name].inputs(bank.model, batch=batch, tokens=8, seed=4)
    inputs.pop("decoder_input_ids", None)
    inputs = {key: value.double() if value.is_floating_point() else value for key, value in inputs.items()}
    return {key: value.flip(1) for key, value in inputs.items()} if "main" in bank.stacks else inputs


def generate(name: str, inputs: Mapping[str, Tensor], **options: Any) -> Any:
    torch.manual_seed(3)
    return bank_of(name).model.generate(
        **inputs, **{"max_new_tokens": 7, "do_sample": False, "pad_token_id": 0, "repetition_penalty": 3.0, **options}
    )


def ends_of(name: str, inputs: Mapping[str, Tensor], **options: Any) -> list[int]:
    """Tokens that end some texts early, the others not or elsewhere, by what a run writes that knows no end."""
    if "num_beams" in options:
        return list(range(5, 45))  # any of many: a single one is avoided
    free = generate(name, inputs, eos_token_id=98, **options)[:, -7:]
    places = {token: [[*row[:6].tolist(), token].index(token) for row in free] for token in free.unique().tolist()}
    return [max(places, key=lambda token: (len({*places[token]}) > 1, min(places[token])))]


def prompt_alone(name: str, inputs: Mapping[str, Tensor], row: int) -> Tensor:
    bank = bank_of(name)
    if "main" in bank.stacks:
        return inputs["input_ids"][row][inputs["attention_mask"][row].bool()]
    return torch.tensor([bank.model.generation_config.decoder_start_token_id])


def plain(name: str, inputs: Mapping[str, Tensor], row: int, text: Tensor, begin: int) -> BankOutput:
    """What readers say of one text alone, in one pass, from a token on."""
    bank = bank_of(name)
    stack = FAMILIES[name].stacks[-1]
    ids = "decoder_input_ids" if stack == "decoder" else "input_ids"
    batch = {key: value[row : row + 1] for key, value in inputs.items()} if stack == "decoder" else {}
    layers = sorted({layer for key in READERS for layer in bank[key].layers})
    states = bank.record_states({stack: layers}, {**batch, ids: text[None]})
    cut = {stack: {layer: state[:, begin:] for layer, state in states[stack].items()}}
    return bank.read_states(cut, {ids: text[None, begin:]}, readers=list(READERS))


def assert_as_in_one_pass(name: str, inputs: Mapping[str, Tensor], outputs: BankOutput, over: str) -> list[int]:
    """Compare each row of `outputs` to one plain pass over its text alone; return the number of tokens in each row."""
    first = outputs["tokens"]
    assert first.tokens is not None
    copies = len(first.mask) // len(next(iter(inputs.values())))
    lengths = []
    for row, mask in enumerate(first.mask):
        own = first.tokens[row][mask]
        lengths.append(len(own))
        if not len(own):
            assert all(outputs[key].logits[row].isnan().all() for key in READERS)
            continue
        before = torch.empty(0, dtype=torch.long)
        if over == "output":  # the prompt, whose states were not asked for
            before = prompt_alone(name, inputs, row // copies)
        expected = plain(name, inputs, row // copies, torch.cat([before, own]), len(before))
        for key in READERS:
            got = outputs[key].logits[row]
            got = got[mask] if got.ndim == 2 else got
            torch.testing.assert_close(got, expected[key].logits[0], rtol=0, atol=1e-6, msg=lambda m: f"{key}: {m}")  # noqa: B023
    return lengths


@pytest.mark.parametrize(("name", "mode"), one_in(14, CASES))
@torch.no_grad()
def test_outputs_equal_those_of_one_plain_pass(name: str, mode: str):
    inputs, bank, options = prompt_of(name), bank_of(name), MODES[mode]
    options = options | {"eos_token_id": ends_of(name, inputs, **options)}
    expected = generate(name, inputs, **options)
    for over in ("both", "output"):
        with bank.listen(over=over) as outputs:
            text = generate(name, inputs, **options)
        assert torch.equal(text, expected)
        assert set(outputs) == set(bank)
        lengths = assert_as_in_one_pass(name, inputs, outputs, over)
        assert len(lengths) == len(text)
        assert mode == "sampled beams" or len(set(lengths)) > 1
    if "encoder" in bank:
        alone = bank(**inputs, decoder_input_ids=torch.full((3, 1), 3), readers=["encoder"])
        got = outputs["encoder"].logits
        copies = alone["encoder"].logits.repeat_interleave(len(got) // 3, 0)  # Whisper reads a sound once per sequence
        torch.testing.assert_close(got, copies, rtol=0, atol=1e-6)


@torch.no_grad()
def test_a_prompt_in_pieces_is_read_whole():
    inputs, bank = prompt_of("llama"), bank_of("llama")
    options = {"prefill_chunk_size": 3, "eos_token_id": ends_of("llama", inputs)}
    expected = generate("llama", inputs, **options)
    with bank.listen(over="both") as outputs:
        assert torch.equal(generate("llama", inputs, **options), expected)
    assert_as_in_one_pass("llama", inputs, outputs, "both")
    with bank.listen() as prompt:
        generate("llama", inputs, **options)
    once = bank(**inputs, position_ids=(inputs["attention_mask"].cumsum(1) - 1).clamp(min=0))
    for name in READERS:
        assert torch.equal(prompt[name].mask, inputs["attention_mask"].bool())
        torch.testing.assert_close(prompt["text"].logits, once["text"].logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "mode"), one_in(3, itertools.product(("llama", "bart"), ("a model drafts", "the prompt is looked up")))
)
@torch.no_grad()
def test_rejected_drafts_are_not_part_of_the_outputs(name: str, mode: str):
    bank = bank_of(name)
    inputs = prompt_of(name, batch=1)
    assistant = copy.deepcopy(bank.model)
    for parameter in assistant.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2)), alpha=0.02)
    options: dict[str, Any] = {"max_new_tokens": 12, "eos_token_id": 98, "repetition_penalty": 1.0}
    drafts = {"assistant_model": assistant} if mode == "a model drafts" else {"prompt_lookup_num_tokens": 3}
    expected = generate(name, inputs, **options)
    counts: list[int] = []
    handle = bank.model.register_forward_pre_hook(
        lambda _, args, kwargs: counts.append(kwargs.get("decoder_input_ids", kwargs.get("input_ids")).shape[1]),
        with_kwargs=True,
    )
    for over in ("both", "output", "prompt"):
        with bank.listen(over=over) as outputs:
            assert torch.equal(generate(name, inputs, **options, **drafts), expected)
        if over == "prompt":
            assert outputs["tokens"].mask.shape[1] == expected.shape[1] - 12
        else:
            assert assert_as_in_one_pass(name, inputs, outputs, over)[0] == 11 + (over == "both") * (
                expected.shape[1] - 12
            )
    handle.remove()
    assert len(counts) > 3
    if mode == "a model drafts":
        assert sum(counts) > 3 * (expected.shape[1] - 1)  # some drafts were read and not taken


@pytest.mark.parametrize(("name", "batch"), [("llama", 3), ("qwen2", 1), ("gemma3_text", 1)])
@pytest.mark.parametrize("over", ["prompt", "both"])
@torch.no_grad()
def test_states_with_a_static_cache_are_read(over: Any, name: str, batch: int):
    """A prompt alone has no padding: `generate` then has no mask, and makes the model one in a form of its own."""
    inputs, bank = prompt_of(name, batch), bank_of(name)
    expected = generate(name, inputs, cache_implementation="static", disable_compile=True)
    with bank.listen(over=over) as outputs:
        assert torch.equal(generate(name, inputs, cache_implementation="static", disable_compile=True), expected)
    assert_as_in_one_pass(name, inputs, outputs, over)


@pytest.mark.parametrize("options", [{}, {"num_beams": 2}])
@torch.no_grad()
def test_what_generate_is_asked_to_return_comes_back(options: dict[str, Any]):
    inputs, bank = prompt_of("gpt2"), bank_of("gpt2")
    asked = {**options, "return_dict_in_generate": True, "output_hidden_states": True, "output_scores": True}
    expected = generate("gpt2", inputs, **asked)
    config = transformers.GenerationConfig(
        max_new_tokens=7, do_sample=False, pad_token_id=0, eos_token_id=98, **options
    )
    with bank.listen(over="both"):
        output = generate("gpt2", inputs, **asked)
        text = bank.model.generate(inputs["input_ids"], config, attention_mask=inputs["attention_mask"])
    assert type(output) is type(expected)
    assert output.keys() == expected.keys()
    assert torch.equal(output.sequences, expected.sequences)
    assert all(map(torch.equal, output.scores, expected.scores))
    assert isinstance(text, Tensor)
    assert not config.return_dict_in_generate
    assert torch.equal(text, bank.model.generate(inputs["input_ids"], config, attention_mask=inputs["attention_mask"]))


@torch.no_grad()
def test_a_prompt_of_embeddings_and_one_of_a_decoder_are_read():
    inputs, bank = prompt_of("llama", batch=1), bank_of("llama")
    expected = generate("llama", inputs)
    embedded = {"inputs_embeds": bank.model.get_input_embeddings()(inputs["input_ids"])}
    with bank.listen(over="both") as outputs:
        text = generate("llama", embedded)
    assert torch.equal(text, expected[:, -text.shape[1] :])
    states = plain("llama", inputs, 0, expected[0, :-1], 0)
    for name in READERS:
        torch.testing.assert_close(outputs[name].logits, states[name].logits, rtol=0, atol=1e-6)
    sound, speech = bank_of("bart"), prompt_of("bart")
    for given in (torch.tensor([[3, 7, 9]] * 3), torch.tensor([[7, 9]] * 3)):  # with the start token, and without
        with sound.listen(over="output") as outputs:
            text = generate("bart", speech, decoder_input_ids=given)
        assert torch.equal(outputs["tokens"].tokens, text[:, 3:-1])
        with sound.listen(over="both") as whole:
            generate("bart", speech, decoder_input_ids=given)
        assert_as_in_one_pass("bart", speech, whole, "both")
        torch.testing.assert_close(outputs["tokens"].logits, whole["tokens"].logits[:, 3:], rtol=0, atol=1e-6)


@torch.no_grad()
def test_the_next_text_is_read_after_a_clear():
    inputs, bank = prompt_of("gpt2"), bank_of("gpt2")
    other = {key: value[:1] for key, value in inputs.items()}
    with bank.listen(over="both") as outputs:
        generate("gpt2", inputs)
        first = outputs["text"].logits
        generate("gpt2", other)
        assert outputs["text"].logits is first
        outputs.clear()
        generate("gpt2", other)
        assert_as_in_one_pass("gpt2", other, outputs, "both")
        assert len(outputs["text"].logits) == 1


@torch.no_grad()
def test_a_token_wise_reader_holds_features_and_the_states_of_a_few_tokens():
    bank, inputs = bank_of("gpt2"), prompt_of("gpt2")
    held: list[tuple[int, int]] = []
    texts: list[GenerationStates] = []
    begin = GenerationStates.on_start

    def start(text: GenerationStates, *given: Any) -> None:
        texts.append(text)
        waiting, features = list(text._waiting.values()), text._features["tokens"]
        held.append((max([0, *map(len, waiting)]), sum(part.shape[1] for part in features)))
        begin(text, *given)

    with pytest.MonkeyPatch.context() as patch, bank.listen(["tokens", "text"], over="both") as outputs:
        patch.setattr(GenerationStates, "on_start", start)
        generate("gpt2", inputs, max_new_tokens=50, eos_token_id=98)
    assert outputs["tokens"].mask.shape[1] == 57
    assert len(set(texts)) == 1
    assert not texts[0]._states
    assert max(waiting for waiting, _ in held) == 15
    assert held[-1][1] == 3 * 16  # of the 57 that were read
