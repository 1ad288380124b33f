"""Generation over HTTP as clients see it: events are read as lines of bytes."""

# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportOptionalIterable=false
# pyright: reportOptionalSubscript=false, reportOperatorIssue=false, reportReturnType=false

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from queue import Queue
from threading import Thread
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from tests.support.finetuned import t5, t5_tokenizer
from tests.support.portions import one_in
from tests.support.stored import tiny_bank
from tests.support.writing import CHAT, PROMPT, TAGS, events, writing_bank
from tokenizers import processors

from lamina.bank import Reader, ReaderBank
from lamina.errors import ConfigError
from lamina.fusion.ada_layers import AdaLayers
from lamina.fusion.mean import Mean
from lamina.heads.sequence_classification import SequenceClassification
from lamina.serve import Settings, create_app
from lamina.serve.generation.generator import TextGenerator
from lamina.serve.generation.prompts import GenerationRequest, encode_prompt
from lamina.serve.generation.routes import Events, Items, generate_events
from lamina.serve.generation.stream import GenerationEnd, TokenEvent
from lamina.serve.scheduler import Scheduler
from lamina.serve.workers import TOKENIZER_LOCK

DRAWN = {"max_new_tokens": 12, "temperature": 1.5, "top_p": 0.95, "top_k": 20, "seed": 7}


@pytest.fixture(scope="module")
def bank() -> ReaderBank:
    return writing_bank()


@pytest.fixture(scope="module")
def client(bank: ReaderBank) -> Iterator[TestClient]:
    with TestClient(create_app(bank, Settings.of(max_total_tokens=30))) as client:
        yield client


def written(client: TestClient, inputs: str = PROMPT, path: str = "/generate", **body: Any) -> Any:
    """Request a text and return its events if it is streamed, else the body of the response."""
    given = {"inputs": inputs} if path == "/generate" else {"messages": CHAT}
    response = client.post(path, json={**given, **body})
    assert response.status_code == 200, response.text
    if body.get("stream"):
        assert response.headers["content-type"].startswith("text/event-stream")
        return events(response.content)
    return response.json()


def alone(bank: ReaderBank, prompt: str = PROMPT, seed: int | None = None, **options: Any) -> tuple[list[int], int]:
    """Return the ids of prompt and text from the model alone, and the number of ids of the prompt."""
    ids = bank.processor(prompt, return_tensors="pt")["input_ids"]
    if seed is not None:
        torch.manual_seed(seed)
    more = {"pad_token_id": bank.model.generation_config.eos_token_id, **options}
    model: Any = bank.model
    return model.generate(ids, attention_mask=torch.ones_like(ids), **more)[0].tolist(), ids.shape[1]


def test_a_stream_has_the_text_of_the_model_alone_and_the_scores_of_one_plain_pass(
    client: TestClient, bank: ReaderBank
):
    told = written(client, parameters={"max_new_tokens": 9}, stream=True)
    ids, prompt = alone(bank, max_new_tokens=9)
    assert [event["token"]["id"] for event in told] == ids[prompt:]
    assert [event["index"] for event in told] == [*range(1, 10)]
    with torch.no_grad():
        plain = bank(input_ids=torch.tensor([ids[:-1]]))
    probabilities = plain["odd"].logits[0, prompt:].softmax(-1)
    assert len(probabilities) == 8
    for event, row in zip(told[:-1], probabilities, strict=True):
        assert event["scores"]["odd"] == pytest.approx({"fine": float(row[0]), "odd": float(row[1])}, abs=1e-5)
        assert set(event["scores"]) == {"odd", "mood"}
        assert sum(event["scores"]["mood"].values()) == pytest.approx(1)
    assert (told[-1]["scores"], told[-1]["monitors"]) == (None, None)
    topic = dict(zip(("war", "art"), plain["topic"].logits[0].softmax(-1).tolist(), strict=True))
    answer = {one["label"]: one["score"] for one in told[-1]["details"]["answers"]["topic"]}
    assert answer == pytest.approx(topic, abs=1e-5)


def test_monitors_have_the_scores_of_bank_stream(client: TestClient, bank: ReaderBank):
    told = written(client, parameters={"max_new_tokens": 9}, stream=True)
    steps = list(bank.stream(bank.model, PROMPT, max_new_tokens=9, pad_token_id=0))
    for event, step in zip(told[:-1], steps[:-1], strict=True):
        own = {name: float(score[0]) for name, score in step.scores.items()}
        assert event["monitors"] == pytest.approx(own, abs=1e-5)
        assert event["flagged"] == [name for name, flag in step.flagged.items() if bool(flag[0])]


def test_pieces_of_a_stream_joined_are_the_text(client: TestClient, bank: ReaderBank):
    told = written(client, parameters={"max_new_tokens": 9}, stream=True)
    ids, _ = alone(bank, max_new_tokens=9)
    text = "".join(event["token"]["text"] for event in told if not event["token"]["special"])
    assert PROMPT + text == bank.processor.decode(ids, skip_special_tokens=True)
    assert told[-1]["generated_text"] == text
    assert all(event["generated_text"] is None and event["details"] is None for event in told[:-1])
    details = told[-1]["details"]
    assert (details["finish_reason"], details["generated_tokens"], details["input_length"]) == ("length", 9, 4)
    assert details["seed"] is None


def test_a_whole_response_equals_the_stream(client: TestClient):
    told = written(client, parameters=DRAWN, stream=True)
    whole = written(client, parameters=DRAWN)
    assert whole["generated_text"] == told[-1]["generated_text"]
    tokens = whole["details"].pop("tokens")
    assert whole["details"].pop("prefill") == []
    assert whole["details"] == told[-1]["details"]
    keys = ("scores", "monitors", "flagged")
    assert tokens == [{**event["token"], **{key: event[key] for key in keys}} for event in told]
    assert set(written(client, parameters={**DRAWN, "details": False})) == {"generated_text"}


def test_an_event_is_one_line_for_every_client(client: TestClient):
    """Some clients end a line at each of these characters."""
    options = {"max_new_tokens": 1, "return_full_text": True}
    told = {"inputs": "the film\u2028is\x85good", "parameters": options, "stream": True}
    (line,) = client.post("/generate", json=told).text.rstrip("\n").splitlines()
    assert json.loads(line.removeprefix("data: "))["generated_text"].startswith(told["inputs"])


def test_sampled_text_equals_that_of_the_model_alone(client: TestClient, bank: ReaderBank):
    options = {name: value for name, value in DRAWN.items() if name != "seed"}
    ids, prompt = alone(bank, seed=7, do_sample=True, **options)
    details = written(client, parameters=DRAWN)["details"]
    assert [token["id"] for token in details["tokens"]] == ids[prompt:]
    assert details["seed"] == 7
    greedy, _ = alone(bank, max_new_tokens=12)
    assert ids != greedy


def test_a_chosen_seed_is_returned_and_reproduces_the_text(client: TestClient):
    free = {**DRAWN, "seed": None}
    first, second = (written(client, parameters=free) for _ in range(2))
    assert first["details"]["seed"] != second["details"]["seed"]
    again = written(client, parameters={**DRAWN, "seed": first["details"]["seed"]})
    assert again["generated_text"] == first["generated_text"]


def test_the_global_random_generator_of_torch_is_not_used(client: TestClient):
    before = torch.get_rng_state()
    written(client, parameters=DRAWN)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("parameters", "sampled"),
    [({}, False), ({"do_sample": True}, True), ({"temperature": 0}, False), ({"top_k": 3, "do_sample": False}, True)],
)
def test_sampling_is_requested_or_implied(client: TestClient, parameters: dict[str, Any], sampled: bool):
    details = written(client, parameters={"max_new_tokens": 2, **parameters})["details"]
    assert (details["seed"] is not None) is sampled


@pytest.mark.parametrize("at", [0, 3])
def test_an_end_token_ends_a_text(at: int):
    own = writing_bank()
    with TestClient(create_app(own)) as client:
        ids = [token["id"] for token in written(client, parameters=DRAWN)["details"]["tokens"]]
        own.model.generation_config.eos_token_id = ids[at]
        details = written(client, parameters=DRAWN)["details"]
    assert (details["finish_reason"], details["generated_tokens"]) == ("eos_token", ids.index(ids[at]) + 1)
    assert [token["id"] for token in details["tokens"]] == ids[: ids.index(ids[at]) + 1]


# Chats


def ending(bank: ReaderBank) -> ReaderBank:
    """Let the bank's tokenizer put its end token after every text."""
    end = bank.processor.eos_token
    template = processors.TemplateProcessing(f"$A {end}", None, [(end, bank.processor.eos_token_id)])
    bank.processor.backend_tokenizer.post_processor = template
    return bank


def test_a_prompt_does_not_end_with_the_token_that_the_tokenizer_puts_after_it(bank: ReaderBank):
    """A chat has the end tokens that its template writes, and an encoder needs its own."""
    other = ending(writing_bank())
    assert other.processor(PROMPT)["input_ids"][-1] == other.processor.eos_token_id
    for prompt in (PROMPT, CHAT, f"{PROMPT} <end>"):
        expected, got = (encode_prompt(one, prompt, 30) for one in (bank, other))
        assert {key: value.tolist() for key, value in got.items()} == {
            key: own.tolist() for key, own in expected.items()
        }
    with pytest.raises(ConfigError, match=r"serve: the prompt is empty; at least one token of text is needed\."):
        encode_prompt(other, "", 30)
    ids, mask = encode_prompt(ReaderBank(t5(), t5_tokenizer()), "the film", 30).values()
    assert (ids[0, -1], mask.shape) == (t5_tokenizer().eos_token_id, (1, 3))


def test_a_chat_is_answered_in_openais_shape(client: TestClient, bank: ReaderBank):
    prompt = bank.processor.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    ids, width = alone(bank, prompt, max_new_tokens=7)
    text = bank.processor.decode(ids[width:])
    whole = written(client, path="/v1/chat/completions", max_tokens=7, model="mine", user="me")
    assert (whole["object"], whole["model"]) == ("chat.completion", "mine")
    (choice,) = whole["choices"]
    assert (choice["message"]["role"], choice["message"]["content"].strip()) == ("assistant", text.strip())
    assert choice["finish_reason"] == "length"
    assert whole["usage"] == {"prompt_tokens": width, "completion_tokens": 7, "total_tokens": width + 7}
    assert [token["id"] for token in whole["tokens"]] == ids[width:]


def test_a_chat_is_streamed_in_openais_shape(client: TestClient):
    asked = {"path": "/v1/chat/completions", "max_completion_tokens": 7}
    whole = written(client, **asked)
    usage = {"include_usage": True}
    *chunks, last, done = written(client, **asked, stream=True, stream_options=usage)
    assert done == "[DONE]"
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert len({chunk["id"] for chunk in [*chunks, last]}) == 1
    assert {chunk["object"] for chunk in [*chunks, last]} == {"chat.completion.chunk"}
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(one["delta"].get("content", "") for one in choices) == whole["choices"][0]["message"]["content"]
    assert [one["finish_reason"] for one in choices] == [None] * (len(choices) - 1) + ["length"]
    keys = ("scores", "monitors", "flagged")
    told = [{**chunk["token"], **{key: chunk[key] for key in keys}} for chunk in chunks if "token" in chunk]
    assert told == whole["tokens"]
    assert chunks[-1]["details"] == whole["details"]
    assert "usage" not in written(client, **asked, stream=True)[-2]


def test_parts_of_a_message_are_joined(client: TestClient):
    parts = [{"type": "text", "text": "the film "}, {"type": "text", "text": "is good"}]
    asked = {"path": "/v1/chat/completions", "max_tokens": 5}
    one, other = (written(client, **asked, messages=[{"role": "user", "content": c}]) for c in (PROMPT, parts))
    assert one["choices"] == other["choices"]


def test_a_chat_without_a_chat_template_is_refused():
    with TestClient(create_app(writing_bank(template=None))) as client:
        response = client.post("/v1/chat/completions", json={"messages": CHAT})
    assert response.status_code == 422
    assert "the tokenizer of this bank has no chat template" in response.json()["error"]["message"]


def test_a_chat_template_that_fails_is_an_error():
    with TestClient(create_app(writing_bank(template="{{ raise_exception('no users here') }}"))) as client:
        response = client.post("/v1/chat/completions", json={"messages": CHAT})
    assert response.status_code == 422
    assert "serve: the chat template fails" in response.json()["error"]["message"]


# What ends a text


def test_a_stop_string_ends_a_text(client: TestClient):
    text = written(client, parameters=DRAWN)["generated_text"]
    words = text.split(" ")
    stop = f"{words[4][-1]} {words[5]}"  # over two tokens
    told = written(client, parameters={**DRAWN, "stop": ["nothing", stop]}, stream=True)
    assert told[-1]["details"]["finish_reason"] == "stop_sequence"
    assert told[-1]["generated_text"] == text[: text.index(stop) + len(stop)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_ends_before_a_stop_string(client: TestClient, stream: bool):
    asked = {"path": "/v1/chat/completions", "max_tokens": 20, "temperature": 1.5, "seed": 3}
    text = written(client, **asked)["choices"][0]["message"]["content"]
    words = text.split(" ")
    stop = f"{words[4][-1]} {words[5]} {words[6][:1]}"  # from within a token to within another
    found = written(client, **asked, stop=stop, stream=stream)
    if stream:
        choices = [chunk["choices"][0] for chunk in found[:-1]]
        shown, reason = "".join(one["delta"].get("content", "") for one in choices), choices[-1]["finish_reason"]
    else:
        shown, reason = found["choices"][0]["message"]["content"], found["choices"][0]["finish_reason"]
    assert (shown, reason) == (text[: text.index(stop)], "stop")


def test_a_flag_ends_a_text_only_on_request(client: TestClient, bank: ReaderBank):
    free = written(client, parameters={"max_new_tokens": 20})["details"]
    at = free["flagged_at"]["smooth"]
    assert 1 <= at < 18
    assert free["finish_reason"] == "length"
    assert [bool(token["flagged"]) for token in free["tokens"]] == [number + 1 >= at for number in range(20)]
    for stop in (True, ["smooth"]):
        ended = written(client, parameters={"max_new_tokens": 20}, stop_on_flag=stop)["details"]
        assert (ended["finish_reason"], ended["flagged_at"]) == ("flag", {"smooth": at})
        ids = [token["id"] for token in ended["tokens"]]
        assert ids == [token["id"] for token in free["tokens"]][: at + 1]  # one was chosen meanwhile


def test_a_flag_that_ends_a_chat_has_openais_finish_reason(client: TestClient):
    whole = written(client, path="/v1/chat/completions", max_tokens=20, stop_on_flag=True)
    chunks = written(client, path="/v1/chat/completions", max_tokens=20, stop_on_flag=True, stream=True)
    assert whole["choices"][0]["finish_reason"] == "content_filter"
    assert chunks[-2]["choices"][0]["finish_reason"] == "content_filter"
    assert list(whole["details"]["flagged_at"]) == ["smooth"]


# Tasks


def test_only_named_tasks_take_part(client: TestClient):
    told = written(client, parameters={"max_new_tokens": 3}, tasks=["mood"])["details"]
    assert (list(told["tokens"][0]["scores"]), list(told["tokens"][0]["monitors"])) == (["mood"], ["quiet"])
    assert told["answers"] == {}
    late = written(client, parameters={"max_new_tokens": 3}, tasks=["topic"])["details"]
    assert (list(late["answers"]), late["tokens"][0]["scores"]) == (["topic"], None)


def test_a_text_is_streamed_if_no_reader_takes_part(bank: ReaderBank):
    own = writing_bank()
    own.remove("odd")
    own.remove("mood")
    with TestClient(create_app(own)) as client:
        told = written(client, parameters={"max_new_tokens": 4}, stream=True)
    ids, prompt = alone(own, max_new_tokens=4)
    assert [event["token"]["id"] for event in told] == ids[prompt:]
    assert {event["scores"] for event in told} == {None}


def test_readers_of_an_encoder_answer_at_the_end():
    bank = ReaderBank(t5(), t5_tokenizer())
    bank.add("article", Reader(Mean(), SequenceClassification(("bad", "good"), pooling="mean"), "encoder"))
    bank.add("odd", Reader(AdaLayers(dim=8), TAGS, "decoder"))
    prompt = bank.processor("the film is good .", return_tensors="pt")
    given = {key: prompt[key] for key in ("input_ids", "attention_mask")}
    model: Any = bank.model
    model.generation_config.suppress_tokens = bank.processor.all_special_ids  # these have no scores
    ids = model.generate(**given, max_new_tokens=6)[0].tolist()
    with TestClient(create_app(bank)) as client:
        told = written(client, "the film is good .", parameters={"max_new_tokens": 6}, stream=True)
        refused = client.post("/generate", json={"inputs": "a", "tasks": ["article"], "stream": True})
    assert [event["token"]["id"] for event in told] == ids[1:]
    with torch.no_grad():
        plain = bank(**given, decoder_input_ids=torch.tensor([ids[:-1]]))
    odd = [event["scores"]["odd"]["odd"] for event in told[:-1]]
    assert odd == pytest.approx(plain["odd"].logits[0, 1:].softmax(-1)[:, 1].tolist(), abs=1e-5)
    answer = {one["label"]: one["score"] for one in told[-1]["details"]["answers"]["article"]}
    scores = plain["article"].logits[0].softmax(-1).tolist()
    assert answer == pytest.approx(dict(zip(("bad", "good"), scores, strict=True)), abs=1e-5)
    assert refused.status_code == 422
    assert "reads the stack 'encoder', which does not read the generated text" in refused.json()["error"]


# Wrong requests

WRONG = {
    "no text": ({"inputs": ""}, 422, "the prompt is empty"),
    "long": (
        {"inputs": "film " * 40},
        413,
        "the prompt has 40 tokens; together with the generated text at most 30 are accepted",
    ),
    "no room": (
        {"inputs": "film " * 20, "parameters": {"max_new_tokens": 11}},
        422,
        "11 tokens are to be generated after a prompt of 20; there is room for 10",
    ),
    "another task": ({"inputs": "a", "tasks": ["odds"]}, 422, "unknown task 'odds'; known: odd, mood, topic"),
    "late": (
        {"inputs": "a", "tasks": ["topic"], "stream": True},
        422,
        "task 'topic' gives no scores token by token: reader 'topic' has a fusion (PooledLayers)",
    ),
    "another monitor": ({"inputs": "a", "stop_on_flag": ["smoth"]}, 422, "unknown monitor 'smoth'"),
    "no threshold": ({"inputs": "a", "stop_on_flag": ["quiet"]}, 422, "no monitor can raise a flag"),
    "no monitor": ({"inputs": "a", "stop_on_flag": True, "tasks": ["topic"]}, 422, "no monitor can raise a flag"),
    "cold": ({"inputs": "a", "parameters": {"temperature": -1}}, 422, "parameters.temperature: Input should be"),
    "top_p": ({"inputs": "a", "parameters": {"top_p": 0}}, 422, "parameters.top_p"),
    "top_k": ({"inputs": "a", "parameters": {"top_k": 0}}, 422, "parameters.top_k"),
    "nothing": ({"inputs": "a", "parameters": {"max_new_tokens": 0}}, 422, "parameters.max_new_tokens"),
    "empty stop": ({"inputs": "a", "parameters": {"stop": [""]}}, 422, "parameters.stop.0"),
    "many stops": ({"inputs": "a", "parameters": {"stop": ["a"] * 5}}, 422, "parameters.stop"),
    "seed": ({"inputs": "a", "parameters": {"seed": 2**64}}, 422, "parameters.seed"),
    "unsupported": ({"inputs": "a", "parameters": {"watermark": True}}, 422, "parameters.watermark: this is not"),
    "unknown": ({"inputs": "a", "parameters": {"water": True}}, 422, "parameters.water: Extra inputs"),
    **{
        f"chat {name}": ({"messages": CHAT, name: value}, 422, f"{name}: this is not supported here. Leave it out.")
        for name, value in {
            "n": 2,
            "tools": [{"type": "function"}],
            "top_logprobs": False,
            "tool_choice": "required",
            "logprobs": True,
            "response_format": {"type": "json_object"},
            "presence_penalty": 0.5,
        }.items()
    },
    "no message": ({"messages": []}, 422, "messages"),
    "role": ({"messages": [{"role": "robot", "content": "a"}]}, 422, "messages.0.role"),
    "image": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 422, "messages.0.content"),
    "chat unknown": ({"messages": CHAT, "best_of": 2}, 422, "best_of: Extra inputs"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_bad_request_is_refused_before_anything_is_generated(client: TestClient, name: str):
    body, status, part = WRONG[name]
    response = client.post("/generate" if "inputs" in body else "/v1/chat/completions", json=body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert part in (error if "inputs" in body else error["message"])


HABITS = {"n": 1, "tools": [], "logprobs": False, "response_format": {"type": "text"}, "frequency_penalty": 0.0}


def test_options_that_change_nothing_are_accepted(client: TestClient):
    asked = {"path": "/v1/chat/completions", "max_tokens": 4}
    plain = written(client, **asked)["choices"]
    assert written(client, **asked, **HABITS, user="u", metadata={}, store=False, temperature=None)["choices"] == plain


def test_a_model_that_does_not_generate_text_is_an_error():
    with TestClient(create_app(tiny_bank())) as client:
        for path, body in (("/generate", {"inputs": "a"}), ("/v1/chat/completions", {"messages": CHAT})):
            response = client.post(path, json=body)
            assert response.status_code == 422
            assert "the model of this bank, a BertModel, does not generate text. Use /predict." in response.text
        assert {"/generate", "/v1/chat/completions"} <= set(client.get("/openapi.json").json()["paths"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/generate", "/v1/chat/completions"])
def test_a_score_that_is_no_number_is_an_error_of_its_request(path: str, stream: bool):
    bank = writing_bank()
    body = {"inputs": PROMPT} if path == "/generate" else {"messages": CHAT}
    body |= {"stream": stream, "tasks": ["mood"]}
    with TestClient(create_app(bank, Settings.of(max_total_tokens=30))) as client:
        output = bank["mood"].head.output
        right = output.bias.detach().clone()
        torch.nn.init.constant_(output.bias, torch.nan)
        response = client.post(path, json=body)
        assert response.status_code == 424
        assert "serve: label 'bad' of task 'mood' gives NaN for the generated text" in response.text
        assert client.post("/generate", json={"inputs": PROMPT, "tasks": ["odd"]}).status_code == 200
        with torch.no_grad():
            output.bias.copy_(right)
        assert client.post(path, json=body).status_code == 200


def test_a_thread_that_cannot_start_is_an_overload(monkeypatch: pytest.MonkeyPatch):
    with TestClient(create_app(writing_bank(), Settings.of(max_concurrent_generations=1))) as client:
        with monkeypatch.context() as patch:
            patch.setattr(Thread, "start", lambda _: (_ for _ in ()).throw(RuntimeError("can't start new thread")))
            response = client.post("/generate", json={"inputs": "the film"})
        assert (response.status_code, response.json()["error_type"]) == (429, "Overloaded")
        assert response.headers["retry-after"] == "1"
        assert client.post("/generate", json={"inputs": "the film"}).status_code == 200


def test_info_tells_whether_text_can_be_generated(client: TestClient):
    info = client.get("/info").json()
    assert (info["writes_text"], info["max_total_tokens"], info["max_concurrent_generations"]) == (True, 30, 4)
    with TestClient(create_app(tiny_bank())) as other:
        assert other.get("/info").json()["writes_text"] is False


@pytest.mark.parametrize("stream", [True, False])
def test_lone_surrogates_are_accepted(client: TestClient, stream: bool):
    options = {"max_new_tokens": 2, "return_full_text": True}
    chat = {"messages": [{"role": "user", "content": "film \ud800"}], "model": "\udc00", "max_tokens": 2}
    for path, body in (("/generate", {"inputs": "\ud800", "parameters": options}), ("/v1/chat/completions", chat)):
        sent = json.dumps({**body, "stream": stream})
        response = client.post(path, content=sent, headers={"content-type": "application/json"})
        replaced = "\\ufffd" if stream else "\ufffd"  # events are ASCII
        assert (response.status_code, replaced in response.text) == (200, True)


def test_a_text_is_counted_before_its_end_is_sent(bank: ReaderBank):
    parts: Queue[tuple[Any, int, int]] = Queue()
    told: list[int] = []
    scheduler = Scheduler(bank, Settings.of(shutdown_timeout=5))
    generator = TextGenerator(scheduler, lambda _first, _each, tokens: told.append(tokens))
    generator.begin(
        GenerationRequest(PROMPT, max_new_tokens=3), lambda part: parts.put((part, sum(told), generator.running))
    )
    seen = [parts.get(timeout=10) for _ in range(4)]
    scheduler.close()
    assert [counted for _, counted, _ in seen] == [0, 0, 0, 3]
    assert isinstance(seen[-1][0], GenerationEnd)
    assert seen[-1][2] == 0


@pytest.mark.parametrize("events", [0, 2])
def test_of_a_text_whose_client_leaves_the_tokens_with_events_are_counted(bank: ReaderBank, events: int):
    begun: Queue[Any] = Queue()
    told: list[Any] = []
    scheduler = Scheduler(bank, Settings.of(shutdown_timeout=5))
    generator = TextGenerator(scheduler, lambda *times: told.append(times))

    def put(part: Any) -> None:
        if isinstance(part, TokenEvent) and part.index == events:
            begun.get(timeout=10).leave()

    with TOKENIZER_LOCK:  # the thread waits for it before the first token
        generation = generator.begin(GenerationRequest(PROMPT, max_new_tokens=6), put)
        begun.put(generation)
        if not events:
            generation.leave()
    generation.join(10)
    scheduler.close()
    assert [tokens for _, _, tokens in told] == ([events] if events else [])
    assert all(first > 0 and following > 0 for first, following, _ in told)


@pytest.mark.parametrize("error", [ZeroDivisionError, ValueError, RuntimeError])
def test_a_text_ends_even_if_counting_fails(bank: ReaderBank, error: type[Exception], caplog: pytest.LogCaptureFixture):
    def fail(*_: Any) -> None:
        raise error("a metric")

    parts: Queue[Any] = Queue()
    scheduler = Scheduler(bank, Settings.of(shutdown_timeout=5))
    TextGenerator(scheduler, fail).begin(GenerationRequest(PROMPT, max_new_tokens=1), parts.put)
    seen = [parts.get(timeout=10) for _ in range(2)]
    scheduler.close()
    assert isinstance(seen[-1], GenerationEnd)
    assert "a text could not be counted" in caplog.text


@pytest.mark.long
@pytest.mark.parametrize("version", one_in(2, ["2.3", "2.4"]))
def test_a_client_that_reads_nothing_is_given_up(bank: ReaderBank, version: str, caplog: pytest.LogCaptureFixture):
    """What a server sends waits while the client's buffers are full; the text must not be held for that long."""
    scheduler = Scheduler(bank, Settings.of(shutdown_timeout=5))
    generator = TextGenerator(scheduler)
    sent: list[Any] = []

    async def stalled(message: Any) -> None:
        sent.append(message["type"])
        await asyncio.sleep(0 if len(sent) < 3 else 3600)

    async def stays() -> Any:
        await asyncio.sleep(3600)

    async def serve() -> None:
        items = Items(generator, GenerationRequest(PROMPT, max_new_tokens=20, stream=True), 1.0)
        response = Events(items, await items.next(), generate_events(), "/generate")
        await response({"type": "http", "asgi": {"spec_version": version}}, stays, stalled)

    asyncio.run(asyncio.wait_for(serve(), 10))
    generator.close()
    scheduler.close()
    assert sent == ["http.response.start", "http.response.body", "http.response.body"]
    assert generator.running == 0
    (told,) = [record.getMessage() for record in caplog.records]
    assert told == "serve: a client read nothing of its stream for 1 s, so it was closed"
