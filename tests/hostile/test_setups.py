"""Ways in which people run their models: read as they run, or refused with the reason. The table is in the docs."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate import cpu_offload, disk_offload
from tests.support.portions import one_in, set_apart
from tests.support.tiny import FAMILIES
from tests.support.training import reader, tiny_bank, tiny_model, tiny_tokenizer, yes_no
from torch import Tensor, nn
from transformers import BertModel, BitsAndBytesConfig, LlamaConfig, LlamaModel

import lamina
from lamina import Reader, ReaderBank, evaluate, fit, predict_file
from lamina.errors import BaseMismatchError, ConfigError, UnsupportedModelError
from lamina.fusion.ada_layers import AdaLayers
from lamina.fusion.pooled_layers import PooledLayers
from lamina.heads.sequence_classification import SequenceClassification
from lamina.heads.token_classification import TokenClassification
from lamina.layers import stacks
from lamina.layers.fingerprints import fingerprint
from lamina.layers.hooks import _open
from lamina.layers.preserve import is_compiled

pytestmark = pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")

TWO = ("a", "b")
GPT2, BART = "gpt2-CausalLM", "bart-Seq2SeqLM"
FAMILY = ["bert", GPT2, BART]
SHORT: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("whole", [False, True])
def test_a_model_without_weights_is_refused(whole: bool, tmp_path: Path):
    task, tokenizer = yes_no(), tiny_tokenizer()
    with torch.device("meta"):
        model: Any = (transformers.BertForSequenceClassification if whole else BertModel)(tiny_model().config)
    target: Any = model if whole else ReaderBank(model, tokenizer)
    if not whole:
        target.add("a", reader(task))
    tasks: Any = task if whole else {"a": task}
    options: Any = {"processor": tokenizer} if whole else {}
    for op, run in (
        ("fit", lambda: fit(target, tasks, epochs=1, **options)),
        ("evaluate", lambda: evaluate(target, tasks, **options)),
        ("predict", lambda: lamina.predict(target, ["a text"], **options)),
        ("save", lambda: lamina.save(model, tmp_path)),
    ):
        with pytest.raises(ConfigError, match=f"{op}: the model has no weights, only an architecture"):
            run()
    assert not any(tmp_path.iterdir())


def bank_on(model: Any, stack: str | None = None) -> ReaderBank:
    bank = ReaderBank(model)
    bank.add("tokens", Reader(AdaLayers(dim=8), TokenClassification(TWO, encoder_layers=0), stack))
    bank.add("text", Reader(PooledLayers(dim=8), SequenceClassification(TWO, pooling="first"), stack))
    return bank.eval()


def hooks_of(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def prompt_of(name: str, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """What `generate` gets; those of a decoder are padded on the left."""
    if name == BART:
        return {key: value for key, value in inputs.items() if not key.startswith("decoder")}
    return {key: value.flip(1) for key, value in inputs.items()}


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(one[name].logits, other[name].logits) for name in one) and set(one) == set(other)


@torch.no_grad()
def assert_read_as_it_runs(name: str, model: Any) -> ReaderBank:
    """A bank's pass, a tap, and listening around a forward and around `generate`, by the model's own answers."""
    inputs = FAMILIES[name].inputs(model, tokens=7)
    inside = getattr(model, "_orig_mod", model)
    bank, plain = bank_on(model), inside(**inputs, output_hidden_states=True)
    hooks = hooks_of(inside)  # those of transformers among them, which it adds on being asked for hidden states
    hidden = plain.encoder_hidden_states if name == BART else plain.hidden_states
    out = bank(**inputs, main=True)
    assert torch.equal(out.main[0], plain[0])
    assert all(out[reader].logits.isfinite().all() and out[reader].logits.dtype == torch.float32 for reader in bank)
    with lamina.tap(model) as states:
        assert torch.equal(model(**inputs)[0], plain[0])
    assert [torch.equal(states[layer], state) for layer, state in enumerate(hidden)] == [True] * len(hidden)
    with bank.listen() as heard:
        assert torch.equal(model(**inputs)[0], plain[0])
    assert same(heard, out)
    if name != "bert":
        text = model.generate(**prompt_of(name, inputs), **SHORT)
        with bank.listen(over="both") as heard:
            assert torch.equal(model.generate(**prompt_of(name, inputs), **SHORT), text)
        assert set(heard) == set(bank)
    assert hooks_of(inside) == hooks
    return bank


# Compiled


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="aot_eager")


def compiled_in_place(model: Any) -> Any:
    model.compile(backend="eager")
    return model


def compiled_forward(model: Any) -> Any:
    model.forward = torch.compile(model.forward, backend="eager")
    return model


COMPILED = [("bert", compiled_forward), (GPT2, compiled), (GPT2, compiled_in_place), (BART, compiled)]


@pytest.mark.parametrize(("name", "wrap"), one_in(len(COMPILED), COMPILED, 1))
def test_a_compiled_model(name: str, wrap: Callable[[Any], Any]):
    model = wrap(FAMILIES[name].build())
    assert is_compiled(model)
    assert_read_as_it_runs(name, model)


@pytest.mark.long
@pytest.mark.parametrize("wrap", set_apart([compiled_forward, compiled_in_place], compiled_in_place))
@torch.no_grad()
def test_a_pass_compiles_nothing(wrap: Callable[[Any], Any]):
    runs: list[int] = []

    def counted(graph: Any, _inputs: Any) -> Any:
        runs.append(1)
        return graph.forward

    model: Any = FAMILIES["bert"].build()
    if wrap is compiled_forward:
        model.forward = torch.compile(model.forward, backend=counted)
    else:
        model.compile(backend=counted)
    bank, inputs = bank_on(model), FAMILIES["bert"].inputs(model)
    bank(**inputs)
    with bank.listen(), lamina.tap(model):
        model(**inputs)
    assert runs == []
    model(**inputs)
    assert runs != []


@pytest.mark.full
@torch.no_grad()
def test_code_by_inductor_rounds_otherwise_and_is_left_alone():
    """While it is heard the model runs uncompiled: bit for bit as that does, within rounding as the compiled one."""
    plain: Any = FAMILIES[GPT2].build()
    inputs, model = FAMILIES[GPT2].inputs(plain), torch.compile(plain)
    expected, fast = plain(**inputs)[0], model(**inputs)[0]
    with bank_on(model).listen():
        assert torch.equal(model(**inputs)[0], expected)
    torch.testing.assert_close(fast, expected, rtol=0, atol=1e-5)
    assert torch.equal(model(**inputs)[0], fast)


# Half precision, attention, quantised


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", one_in(2, FAMILY))
def test_half_precision(name: str, dtype: torch.dtype):
    assert_read_as_it_runs(name, FAMILIES[name].build().to(dtype))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", one_in(2, FAMILY, 1))
def test_implementations_of_attention(name: str, attention: str):
    model = FAMILIES[name].known()
    model.set_attn_implementation(attention)
    assert model.config._attn_implementation == attention
    assert_read_as_it_runs(name, model)


def dynamic(model: Any) -> Any:
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


@pytest.mark.parametrize("name", one_in(3, FAMILY))
def test_dynamic_quantisation(name: str):
    assert_read_as_it_runs(name, dynamic(FAMILIES[name].build()))


@torch.no_grad()
def test_dynamic_quantisation_has_a_scale_per_batch():
    """It is the model that lets neighbours count, and readers read it as it runs."""
    model = dynamic(FAMILIES["bert"].build())
    inputs = FAMILIES["bert"].inputs(model, batch=4)
    bank = bank_on(model)
    apart = bank(**{key: value[:1] for key, value in inputs.items()})["text"].logits - bank(**inputs)["text"].logits[:1]
    assert 0 < apart.abs().max() < 1e-2


@pytest.mark.parametrize("settings", [{"quant_method": "bitsandbytes"}, BitsAndBytesConfig(load_in_8bit=True)])
def test_bitsandbytes_is_refused(settings: Any):
    model = FAMILIES[GPT2].build()
    model.config.quantization_config = settings
    for use in (stacks, bank_on, lambda own: lamina.tap(own).__enter__()):
        with pytest.raises(UnsupportedModelError, match=r"packed by bitsandbytes, .* Load it in bfloat16"):
            use(model)


# Offloaded


def to_memory(model: Any, _folder: Path) -> Any:
    return cpu_offload(model, execution_device=torch.device("cpu"))


def to_disk(model: Any, folder: Path) -> Any:
    return disk_offload(model, str(folder / "off"), execution_device=torch.device("cpu"))


def mapped(places: dict[str, str]) -> Callable[[Any, Path], Any]:
    def load(model: Any, folder: Path) -> Any:
        model.save_pretrained(folder / "model")
        kind = getattr(transformers, type(model).__name__)
        return kind.from_pretrained(folder / "model", device_map=places, offload_folder=folder / "off").eval()

    return load


BLOCKS = {"encoder.layer.0": "cpu", "encoder.layer.1": "disk", "encoder.layer.2": "disk"}
OFFLOADED = {
    "cpu map": ("bert", mapped({"": "cpu"})),
    "some blocks": ("bert", mapped({"embeddings": "cpu", "pooler": "cpu", **BLOCKS})),
    "all on disk": (GPT2, mapped({"": "disk"})),
    "memory": (BART, to_memory),
    "tied on disk": (BART, to_disk),
}


@pytest.mark.parametrize("case", set_apart(OFFLOADED, "cpu map", "all on disk", "memory"))
def test_offloaded_weights(case: str, tmp_path: Path):
    name, load = OFFLOADED[case]
    whole = FAMILIES[name].build()
    model = load(copy.deepcopy(whole), tmp_path)
    assert case == "cpu map" or any(parameter.is_meta for parameter in model.parameters())
    bank = assert_read_as_it_runs(name, model)
    assert bank.device == torch.device("cpu")
    for stack in bank.stacks:
        assert fingerprint(model, stack) == fingerprint(whole, stack)
    bank.save_pretrained(tmp_path / "bank")
    assert len(ReaderBank.from_pretrained(tmp_path / "bank", whole)) == 2
    other = load(FAMILIES[name].build().apply(_moved), tmp_path / "other")
    with pytest.raises(BaseMismatchError, match="fingerprint was"):
        ReaderBank.from_pretrained(tmp_path / "bank", other)


@pytest.mark.parametrize("load", one_in(2, [to_memory, to_disk], 1))
def test_readers_of_offloaded_weights_learn_and_answer(load: Callable[[Any, Path], Any], tmp_path: Path):
    task, source = yes_no(), tmp_path / "in.txt"
    source.write_text("".join(f"{text}\n" for text in task.split("validation").texts))
    found = []
    for offload in (lambda model, _: model, load):
        bank = tiny_bank({"mood": reader(task)}, offload(tiny_model(), tmp_path))
        fit(bank, {"mood": task}, epochs=2, progress=False)
        predict_file(bank, source, tmp_path / "out.jsonl", progress=False, resume=False)
        found.append((evaluate(bank, {"mood": task}), (tmp_path / "out.jsonl").read_text()))
    assert found[0] == found[1]


@torch.no_grad()
def _moved(module: nn.Module) -> None:
    if isinstance(module, nn.LayerNorm):
        module.weight += 0.1


# PEFT's own models


TARGETS = {"bert": ["query", "value"], GPT2: ["c_attn"], BART: ["q_proj"]}


def lora(name: str) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=TARGETS[name], init_lora_weights=False)
    return peft.get_peft_model(FAMILIES[name].build(), config).eval()


@pytest.mark.parametrize("name", one_in(3, FAMILY))
def test_an_adapter_that_is_on(name: str, tmp_path: Path):
    model = lora(name)
    bank = assert_read_as_it_runs(name, model)
    bank.save_pretrained(tmp_path)
    inside = model.get_base_model()
    for own in (model, inside):
        assert len(ReaderBank.from_pretrained(tmp_path, own)) == 2
    with pytest.raises(BaseMismatchError, match="fingerprint was"):
        ReaderBank.from_pretrained(tmp_path, FAMILIES[name].build())
    with pytest.raises(BaseMismatchError, match="fingerprint was"), model.disable_adapter():
        ReaderBank.from_pretrained(tmp_path, model)


@pytest.mark.parametrize("name", one_in(3, FAMILY, 1))
@torch.no_grad()
def test_an_adapter_that_is_off_or_merged(name: str, tmp_path: Path):
    model, plain = lora(name), FAMILIES[name].build()
    inputs, bank = FAMILIES[name].inputs(plain), bank_on(model)
    on = bank(**inputs)
    with model.disable_adapter():
        with pytest.raises(ConfigError, match="it computed with the adapters default, and does with none now"):
            bank(**inputs)
        off = bank_on(model)
        assert same(off(**inputs), bank_on(plain)(**inputs))
        off.save_pretrained(tmp_path / "off")
        assert len(ReaderBank.from_pretrained(tmp_path / "off", plain)) == 2
    model.merge_adapter()
    with pytest.raises(ConfigError, match="the adapters default, which are merged into its weights now"):
        bank(**inputs)
    model.unmerge_adapter()
    merged = bank_on(model.merge_and_unload())(**inputs)
    for name in on:
        torch.testing.assert_close(merged[name].logits, on[name].logits, rtol=0, atol=1e-5)


def test_a_learned_prompt_is_refused():
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(FAMILIES[GPT2].build(), config)
    with pytest.raises(UnsupportedModelError, match=r"adapter \(PEFT\) is not supported; it learns a prompt"):
        bank_on(model)


# Gradient checkpointing


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", one_in(3, FAMILY))
def test_gradients_of_a_base_that_is_trained_along_are_the_same_with_checkpointing(name: str, reentrant: bool):
    labels = torch.tensor([0, 1, 1])
    gradients: list[dict[str, Tensor | None]] = []
    for checkpointing in (False, True):
        model = without_dropout(FAMILIES[name].known())
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        bank = ReaderBank(model, train_base=True)
        fusions = {"ada": AdaLayers(dim=8, dropout=0.0), "pooled": PooledLayers(dim=8, dropout=0.0)}
        for key, fusion in fusions.items():
            bank.add(key, Reader(fusion, SequenceClassification(TWO, dropout=0.0, pooling="first")))
        bank.train()(**FAMILIES[name].inputs(model, batch=3), labels=dict.fromkeys(fusions, labels)).loss.backward()
        parameters = [*model.named_parameters(), *bank.named_parameters()]
        gradients.append({key: parameter.grad for key, parameter in parameters})
    plain, checkpointed = gradients
    assert [key for key, grad in plain.items() if grad is not None] == [
        key for key, grad in checkpointed.items() if grad is not None
    ]
    assert sum(grad is not None for grad in plain.values()) > 30
    for key, grad in plain.items():
        if grad is not None:
            torch.testing.assert_close(checkpointed[key], grad, rtol=0, atol=1e-6, msg=key)


def without_dropout(model: Any) -> Any:
    for module in model.modules():
        for key in ("p", "dropout", "attention_dropout", "activation_dropout"):
            if isinstance(getattr(module, key, None), float):
                setattr(module, key, 0.0)
    return model


# What transformers captures itself


def llama(**settings: Any) -> Any:
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    return LlamaModel(LlamaConfig(num_hidden_layers=3, **sizes, **settings)).eval()


@pytest.mark.parametrize("chosen", [[1, 3], [0], [-1, 2]])
@torch.no_grad()
def test_taps_are_the_layers_that_transformers_captures(chosen: list[int]):
    """`output_hidden_states=[...]`: transformers 5.23, pull request 48081."""
    for model in (llama(), FAMILIES["bert"].known(), FAMILIES["gpt2"].known()):
        inputs = {"input_ids": torch.randint(5, 90, (2, 7), generator=torch.Generator().manual_seed(0))}
        with lamina.tap(model, layers=chosen) as states:
            captured = model(**inputs, output_hidden_states=chosen).hidden_states
        assert [layer for layer, state in enumerate(captured) if state is not None] == sorted(states)
        assert all(torch.equal(captured[layer], state) for layer, state in states.items())


@torch.no_grad()
def test_the_last_state_is_before_the_last_norm_where_the_config_unties_it():
    """`config.tie_last_hidden_states`: transformers 5.23, pull request 48087; it may change at any time."""
    model = llama()
    inputs = {"input_ids": torch.tensor([[5, 6, 7]])}
    last, marks = [], []
    for tie in (None, False, True, False):
        model.config.tie_last_hidden_states = tie
        with lamina.tap(model) as states:
            hidden = model(**inputs, output_hidden_states=True).hidden_states
        assert all(torch.equal(states[layer], state) for layer, state in enumerate(hidden))
        last.append(states[3])
        marks.append(fingerprint(model, "main"))
    assert torch.equal(last[0], last[2])
    assert torch.equal(last[1], last[3])
    assert torch.equal(model.norm(last[1]), last[0])
    assert marks[0] == marks[2] != marks[1] == marks[3]  # the norm's weights count, or do not


# Threads, ends, silence


def test_two_requests_at_once_never_mix():
    bank, family = bank_on(FAMILIES[GPT2].known()), FAMILIES[GPT2]
    prompts = [prompt_of(GPT2, family.inputs(bank.model, tokens=tokens, seed=tokens)) for tokens in (5, 8)]
    together = threading.Barrier(2)

    def answer(number: int, *, wait: bool) -> list[Tensor]:
        with torch.no_grad(), bank.listen(over="both") as heard:
            if wait:
                together.wait()
            text = bank.model.generate(**prompts[number], **SHORT)
            if wait:
                together.wait()
        return [text, *(heard[name].logits for name in bank)]

    alone = [answer(number, wait=False) for number in range(2)]
    hooks = hooks_of(bank.model)
    for _ in range(3):
        with ThreadPoolExecutor(2) as pool:
            got = list(pool.map(lambda number: answer(number, wait=True), range(2)))
        for mine, expected in zip(got, alone, strict=True):
            assert all(map(torch.equal, mine, expected))
    assert hooks_of(bank.model) == hooks


@pytest.mark.parametrize("error", one_in(4, [ZeroDivisionError, KeyboardInterrupt, SystemExit, GeneratorExit], 1))
@pytest.mark.parametrize("where", ["around", "inside"])
def test_leaving_by_an_error_leaves_no_hook(error: type[BaseException], where: str):
    bank, family = bank_on(FAMILIES[BART].known()), FAMILIES[BART]
    inputs = family.inputs(bank.model)
    before = hooks_of(bank.model), _open.get(), transformers.GenerationMixin.generate
    for context in (bank.listen, lambda: bank.listen(over="both"), lambda: lamina.tap(bank.model, stack="decoder")):

        @torch.no_grad()
        def run(context: Any = context) -> None:
            with context():
                if where == "inside":
                    bank.model(**inputs, past_key_values=_Raising(error))
                bank.model(**inputs)
                raise error

        with pytest.raises(error):
            run()
        assert (hooks_of(bank.model), _open.get(), transformers.GenerationMixin.generate) == before
    with torch.no_grad(), bank.listen() as heard:
        bank.model(**inputs)
    assert set(heard) == {"tokens", "text"}


class _Raising:
    """A cache whose use fails, while a pass over the decoder runs."""

    def __init__(self, error: type[BaseException]) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        raise self._error


def test_a_task_may_listen_after_the_context_that_it_was_made_in_has_ended():
    """Contexts of tasks are copies: what listened when one was made listens no longer."""
    import asyncio

    bank, family = bank_on(FAMILIES[GPT2].known()), FAMILIES[GPT2]
    prompt = prompt_of(GPT2, family.inputs(bank.model))

    async def work(ended: asyncio.Event) -> int:
        await ended.wait()
        with bank.listen(over="output") as heard:
            bank.model.generate(**prompt, **SHORT)
        return len(heard)

    async def every() -> int:
        ended = asyncio.Event()
        with bank.listen(over="output"):
            task = asyncio.create_task(work(ended))
            await asyncio.sleep(0)
        ended.set()
        return await task

    assert asyncio.run(every()) == 2


@torch.no_grad()
def test_a_call_that_never_reached_the_stack_says_so():
    bank, family = bank_on(FAMILIES[BART].known(), "decoder"), FAMILIES[BART]
    inputs = prompt_of(BART, family.inputs(bank.model))
    with bank.listen() as heard, lamina.tap(bank.model, [1], stack="decoder") as states:
        bank.model.get_encoder()(**inputs)
    with pytest.raises(ConfigError, match="reader 'text' has no output: no pass of the stack 'decoder' ran"):
        heard["text"]
    with pytest.raises(ConfigError, match="tap: layer 1 was not seen; no pass of the stack 'decoder' has reached it"):
        states[1]
    with pytest.raises(ConfigError, match="tap: layer 2 is not tapped; the tapped layers are 1"):
        states[2]
    assert 1 not in states
    assert states.get(1) is None
