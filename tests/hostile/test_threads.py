"""Passes of different threads and tasks do not mix: law 11."""

from __future__ import annotations

import asyncio
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import Context
from typing import Any

import pytest
import torch
from tests.support.tiny import FAMILIES
from tests.support.training import names, reader, tiny_bank, yes_no

from lamina.bank import BankOutput, Reader, ReaderBank
from lamina.fusion.ada_layers import AdaLayers
from lamina.fusion.extra_layers import ExtraLayers
from lamina.fusion.gated import Gated
from lamina.fusion.mean import Mean
from lamina.fusion.single_layer import SingleLayer
from lamina.heads.sequence_classification import SequenceClassification
from lamina.layers import tap
from lamina.prediction import predict

THREADS = 8
TWO = SequenceClassification(("a", "b"))
FUSIONS = {"ada": AdaLayers(dim=8), "low": SingleLayer(1), "extra": ExtraLayers(), "gated": Gated(hidden=4)}

Job = Callable[[], list[torch.Tensor]]


@pytest.fixture(autouse=True)
def _eager_switching() -> Iterator[None]:
    """Threads take turns 500 times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def count_hooks(model: torch.nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def bank_of(family: str, stack: str | None = None, fusions: dict[str, Any] = FUSIONS) -> ReaderBank:
    bank = ReaderBank(FAMILIES[family].known())
    for seed, (name, fusion) in enumerate(fusions.items()):
        bank.add(name, Reader(fusion, TWO, stack, seed=seed))
    return bank.eval()


def tensors(out: BankOutput) -> list[torch.Tensor]:
    main = [] if out.main is None else [out.main[0]]
    return main + [tensor for name in sorted(out) for tensor in (out[name].logits, out[name].mask)]


def heard_by(bank: ReaderBank, run: Callable[[], Any], readers: list[str] | None = None) -> list[torch.Tensor]:
    with bank.listen(readers) as heard:
        own = run()
    return [own if isinstance(own, torch.Tensor) else own[0], *tensors(heard)]


def tapped(model: Any, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    with tap(model) as states:
        model(**batch)
    return list(states.values())


def recorded(bank: ReaderBank, batch: dict[str, torch.Tensor], **layers: list[int]) -> list[torch.Tensor]:
    states = bank.record_states(layers, batch)
    return [states[stack][layer] for stack in layers for layer in layers[stack]]


@functools.cache
def setting() -> tuple[list[ReaderBank], list[tuple[str, Job]]]:
    """Banks on a decoder (two banks on one model), on both stacks of an encoder-decoder, and what threads ask them."""
    one, both = bank_of("gpt2-CausalLM"), bank_of("bart-Seq2SeqLM", "encoder", {"ada": AdaLayers(dim=8)})
    other = ReaderBank(one.model).eval()
    other.add("mean", Reader(Mean(), TWO)).eval()
    both.add("late", Reader(AdaLayers(dim=8), TWO, "decoder")).eval()
    model, pairs = one.model, both.model
    jobs: list[tuple[str, Job]] = []
    for seed, tokens in ((1, 5), (2, 9)):
        batch = FAMILIES["gpt2-CausalLM"].inputs(model, batch=2, tokens=tokens, seed=seed)
        pair = FAMILIES["bart-Seq2SeqLM"].inputs(pairs, batch=2, tokens=tokens, seed=seed)
        text = {"input_ids": batch["input_ids"][:1], "attention_mask": batch["attention_mask"][:1]}
        options = {"max_new_tokens": 2, "min_new_tokens": 2, "do_sample": False, "pad_token_id": 0}
        jobs += jobs_of(one, other, batch, functools.partial(model.generate, **text, **options))
        jobs += [
            ("both stacks", lambda p=pair: tensors(both(**p))),
            ("both stacks, one reader", lambda p=pair: tensors(both(**p, readers=["ada"]))),
            ("both stacks, heard", lambda p=pair: heard_by(both, lambda: pairs(**p))),
            ("both stacks, model", lambda p=pair: [pairs(**p)[0]]),
        ]
    return [one, other, both], jobs


def jobs_of(
    one: ReaderBank, other: ReaderBank, batch: dict[str, torch.Tensor], generate: Callable[[], Any]
) -> list[tuple[str, Job]]:
    model = one.model
    return [
        ("bank", lambda: tensors(one(**batch))),
        ("bank, main", lambda: tensors(one(**batch, main=True))),
        ("bank, stopped", lambda: tensors(one(**batch, readers=["low"]))),
        ("bank, block inputs", lambda: tensors(one(**batch, readers=["extra", "gated"]))),
        ("another bank", lambda: tensors(other(**batch))),
        ("model", lambda: [model(**batch)[0]]),
        ("generate", lambda: [generate()]),
        ("listen", lambda: heard_by(one, lambda: model(**batch))),
        ("listen, generate", lambda: heard_by(one, generate, ["ada", "low"])),
        ("tap", lambda: tapped(model, batch)),
        ("record", lambda: recorded(one, batch, main=[0, 2])),
    ]


@functools.cache
def alone() -> list[list[torch.Tensor]]:
    with torch.no_grad():
        return [job() for _, job in setting()[1]]


def faults(numbers: range) -> list[str]:
    """Which of the calls `numbers` do not give what they give alone, and how they fail."""
    jobs, wrong = setting()[1], []
    with torch.no_grad():
        for number in numbers:
            name, job = jobs[number % len(jobs)]
            try:
                got, expected = job(), alone()[number % len(jobs)]
            except BaseException as error:  # a StopForward of another thread, too
                wrong.append(f"{name}: {type(error).__name__}: {error}")
                continue
            if len(got) != len(expected) or not all(map(torch.equal, got, expected)):
                wrong.append(name)
    return wrong


def numbers_of(worker: int, calls: int) -> range:
    return range(worker * 7, worker * 7 + calls)  # 7 and the count of jobs have no factor in common


@pytest.mark.parametrize("calls", [8, pytest.param(1000, marks=pytest.mark.full)])
def test_eight_threads_get_what_they_would_get_alone(calls: int):
    banks, expected = setting()[0], alone()
    hooks = [count_hooks(bank.model) for bank in banks]
    assert len(expected) == len(setting()[1])
    with ThreadPoolExecutor(THREADS) as pool:
        wrong = list(pool.map(faults, [numbers_of(worker, calls) for worker in range(THREADS)]))
    assert wrong == [[]] * THREADS
    assert [count_hooks(bank.model) for bank in banks] == hooks


@pytest.mark.parametrize("calls", [3, pytest.param(125, marks=pytest.mark.full)])
def test_eight_tasks_get_what_they_would_get_alone(calls: int):
    banks, _ = setting()[0], alone()
    hooks = [count_hooks(bank.model) for bank in banks]

    async def task(worker: int) -> list[str]:
        wrong = []
        for number in numbers_of(worker, calls):
            wrong += await asyncio.to_thread(faults, range(number, number + 1))
        return wrong

    async def every() -> list[list[str]]:
        return await asyncio.gather(*map(task, range(THREADS)))

    assert asyncio.run(every()) == [[]] * THREADS
    assert [count_hooks(bank.model) for bank in banks] == hooks


@torch.no_grad()
def test_tasks_that_listen_in_turn_hear_their_own_passes():
    """All on one thread: contexts that open in one order, run in another and close in a third."""
    bank, family = bank_of("bert"), FAMILIES["bert"]
    batches = [family.inputs(bank.model, tokens=tokens, seed=tokens) for tokens in range(4, 9)]
    expected = [tensors(bank(**batch)) for batch in batches]
    hooks = count_hooks(bank.model)

    async def listener(number: int) -> None:
        with bank.listen() as heard, tap(bank.model) as states:
            await asyncio.sleep(0)
            if number % 2:  # in a thread that gets the task's context
                await asyncio.to_thread(torch.no_grad()(bank.model), **batches[number])
            else:
                bank.model(**batches[number])
            for _ in range(5 - number):
                await asyncio.sleep(0.001)
                bank.model.embeddings(batches[0]["input_ids"])
        assert all(map(torch.equal, tensors(heard), expected[number]))
        assert {state.shape[1] for state in states.values()} == {number + 4}

    async def stranger() -> None:
        for batch, said in zip(batches, expected, strict=True):
            await asyncio.sleep(0)
            bank.model(**batch)
            assert all(map(torch.equal, tensors(bank(**batch)), said))

    async def every() -> None:
        await asyncio.gather(*map(listener, range(5)), stranger())

    asyncio.run(every())
    assert count_hooks(bank.model) == hooks


@torch.no_grad()
def test_passes_that_run_at_once_in_one_context_do_not_mix():
    """One `listen` and one `tap` around tasks that run the model together: each hears one pass, whole."""
    bank, family = bank_of("bert"), FAMILIES["bert"]
    batches = [family.inputs(bank.model, tokens=tokens, seed=tokens) for tokens in range(4, 12)]
    expected = [tensors(bank(**batch)) for batch in batches]

    async def every() -> BankOutput:
        with bank.listen() as heard, tap(bank.model) as states:
            run = torch.no_grad()(lambda batch: bank.model(**batch))
            await asyncio.gather(*(asyncio.to_thread(run, batch) for batch in batches))
        assert len({state.shape[1] for state in states.values()}) == 1
        return heard

    for _ in range(4):
        heard = asyncio.run(every())
        number = heard["ada"].mask.shape[1] - 4
        assert all(map(torch.equal, tensors(heard), expected[number]))


@torch.no_grad()
def test_a_thread_that_only_runs_the_model_is_not_heard():
    bank, family = bank_of("bert"), FAMILIES["bert"]
    batch = family.inputs(bank.model)
    with bank.listen() as heard:
        thread = threading.Thread(target=torch.no_grad()(bank.model), kwargs=batch)
        thread.start()
        thread.join()
        assert len(heard) == 0
        bank.model(**batch)
        assert set(heard) == set(FUSIONS)


@torch.no_grad()
def test_a_listener_that_ends_while_a_pass_runs_leaves_that_pass_alone():
    bank, family = bank_of("bert"), FAMILIES["bert"]
    batch = family.inputs(bank.model)
    expected = bank.model(**batch)[0]
    wrong, done = [], threading.Event()

    def run() -> None:
        with torch.no_grad():
            while not done.is_set():
                try:
                    wrong.extend([] if torch.equal(bank.model(**batch)[0], expected) else ["another answer"])
                except Exception as error:
                    wrong.append(repr(error))

    thread = threading.Thread(target=run)
    thread.start()
    for _ in range(40):
        with bank.listen(), tap(bank.model):
            pass
    done.set()
    thread.join()
    assert wrong == []


def test_modes_come_back_when_listeners_overlap():
    bank, family = bank_of("bert"), FAMILIES["bert"]
    bank.train()
    bank["low"].eval()
    before = [module.training for module in bank.modules()]
    batch = family.inputs(bank.model)
    expected = heard_by(bank, lambda: bank.model(**batch))
    first, second, other = bank.listen(), bank.listen(), Context()
    first.__enter__()
    heard = other.run(second.__enter__)
    first.__exit__(None, None, None)  # closed in the order in which they were opened, as threads may
    other.run(lambda: bank.model(**batch))
    assert all(map(torch.equal, tensors(heard), expected[1:]))
    assert not any(module.training for module in bank.modules())
    other.run(second.__exit__, None, None, None)
    assert [module.training for module in bank.modules()] == before


def test_what_layers_got_is_counted_for_every_thread():
    bank = bank_of("bert", fusions={"gated": Gated(hidden=4)})
    batch = FAMILIES["bert"].inputs(bank.model)
    with torch.no_grad():
        bank(**batch)
        once = bank["gated"].fusion.amounts.clone()
        bank.train().eval()

        def run(_: int) -> None:
            with torch.no_grad():
                bank(**batch)

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(run, range(40)))
    torch.testing.assert_close(bank["gated"].fusion.amounts, 40 * once, rtol=1e-4, atol=0)


@pytest.mark.parametrize("calls", [4, pytest.param(40, marks=pytest.mark.full)])
def test_threads_predict_what_they_would_alone(calls: int):
    """The bank is in training mode, as a new one is: a thread that is done first must not switch dropout on again."""
    tasks = {"mood": yes_no(), "who": names()}
    bank = tiny_bank({name: reader(task, dim=8, dropout=0.5) for name, task in tasks.items()}).train()
    texts = [["a good film", "anna went to paris ."], ["we like rome"], ["bad ."] * 3, ["ben and carla"]]
    expected = [predict(bank, few) for few in texts]

    def run(worker: int) -> list[int]:
        which = [(worker + call) % len(texts) for call in range(calls)]
        return [number for number in which if predict(bank, texts[number]) != expected[number]]

    with ThreadPoolExecutor(THREADS) as pool:
        assert list(pool.map(run, range(THREADS))) == [[]] * THREADS
    assert bank.training
