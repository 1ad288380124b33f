"""Readers behind the OpenAI-compatible server of vLLM, started as a user starts it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm", reason="`make test-vllm` runs these tests in an environment of their own")

import engines
import httpx
from benchmarks.vllm_engines import CLOSE, dividing, watchdog
from engines import READERS, bank_scores, greedy_texts, largest_difference, make_bank, make_model, prompts_of

LENGTH = 24  # tokens of each output
ROUTES = ("/v1/completions", "/v1/chat/completions")


class Server(NamedTuple):
    """A running server.

    Attributes:
        client: Sends requests to it.
        folders: Folder of the model, folder of the bank.
        clean: Prompts whose greedy outputs the monitor does not flag.
        flagged: Prompts whose greedy outputs it flags, with the outputs as they would be without it.
        places: For each flagged prompt, the index in the output of the token that is flagged.
    """

    client: httpx.Client
    folders: tuple[Path, Path]
    clean: list[list[int]]
    flagged: list[tuple[list[int], list[int]]]
    places: list[int]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("http")
    make_model(folder / "model")
    make_bank(folder / "model", folder / "plain")
    prompts = prompts_of(8)[:-1]
    texts = greedy_texts(folder / "model", prompts, LENGTH)
    scores = bank_scores(folder / "model", folder / "plain", prompts, texts)
    threshold = dividing([max(row) for row in scores], range(2, 6))
    make_bank(folder / "model", folder / "bank", watchdog("query", threshold))
    flagged = [index for index, row in enumerate(scores) if max(row) >= threshold]
    options = ["--enforce-eager", "--block-size", "32", "--max-model-len", "320", "--max-num-seqs", "16"]
    with engines.server(folder / "model", folder / "bank", folder / "log", *options, plugins="lamina") as client:
        yield Server(
            client,
            (folder / "model", folder / "bank"),
            [prompt for index, prompt in enumerate(prompts) if index not in flagged],
            [(prompts[index], texts[index]) for index in flagged],
            [next(place for place, score in enumerate(scores[index]) if score >= threshold) for index in flagged],
        )


def body(route: str, prompt: list[int], **fields: Any) -> dict[str, Any]:
    """Return a request for the greedy output of a prompt; the words of the tokenizer are w3, w4, ..."""
    text = " ".join(f"w{token}" for token in prompt)
    content = {"prompt": text} if route == ROUTES[0] else {"messages": [{"role": "user", "content": text}]}
    common = {"model": "tiny", "max_tokens": LENGTH, "temperature": 0.0}
    return {**content, **common, "ignore_eos": True, "skip_special_tokens": False, **fields}


def post(server: Server, route: str, prompt: list[int], **fields: Any) -> dict[str, Any]:
    response = server.client.post(route, json=body(route, prompt, **fields))
    assert response.status_code == 200, response.text
    return response.json()


def stream(server: Server, route: str, prompt: list[int], **fields: Any) -> list[dict[str, Any]]:
    """Return the choices in the chunks of a stream."""
    choices: list[dict[str, Any]] = []
    with server.client.stream("POST", route, json=body(route, prompt, stream=True, **fields)) as response:
        lines = [line for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    for line in lines[:-1]:
        choices.extend(json.loads(line.removeprefix("data: "))["choices"])
    return choices


def words(choice: dict[str, Any]) -> list[int]:
    """Return the tokens in the text of a choice, or of a chunk."""
    text = choice.get("text") or choice.get("delta", choice.get("message", {})).get("content") or ""
    return [int(word.removeprefix("w")) for word in text.split()]


@pytest.mark.parametrize("route", ROUTES)
def test_responses_have_the_answers_of_the_bank(server: Server, route: str):
    for prompt in server.clean:
        response = post(server, route, prompt)
        (choice,) = response["choices"]
        assert len(words(choice)) == LENGTH
        completion = SimpleNamespace(token_ids=words(choice), lamina=choice["lamina"])
        assert largest_difference(*server.folders, [prompt], [completion]) < CLOSE
        assert list(choice["lamina"]) == [*READERS, "monitors"]
        assert choice["lamina"]["monitors"]["watchdog"]["flagged_at"] is None
        assert response["lamina"] == choice["lamina"]


def test_a_route_says_which_readers_and_monitors_there_are(server: Server):
    said = server.client.get("/v1/lamina").json()
    assert list(said["readers"]) == list(READERS)
    assert said["monitors"]["watchdog"]["readers"] == ["query"]
    assert said["on_flag"] == "end"
    (choice,) = post(server, ROUTES[0], server.clean[0])["choices"]
    assert {name: reader["answers"] for name, reader in said["readers"].items()} == {
        name: list(answers) for name, answers in choice["lamina"].items() if name != "monitors"
    }


def test_a_batch_of_chats_has_answers_of_their_own(server: Server):
    (flagged, text), place = server.flagged[0], server.places[0]
    prompts = [server.clean[0], flagged]
    chats = [body(ROUTES[1], prompt)["messages"] for prompt in prompts]
    batch = f"{ROUTES[1]}/batch"
    response = server.client.post(batch, json=body(ROUTES[1], []) | {"messages": chats}).json()
    choices = [SimpleNamespace(token_ids=words(choice), lamina=choice["lamina"]) for choice in response["choices"]]
    assert largest_difference(*server.folders, prompts, choices) < CLOSE
    assert choices[1].token_ids == text[: place + 2]
    assert [choice["finish_reason"] for choice in response["choices"]] == ["length", "content_filter"]
    wrong = body(ROUTES[1], []) | {"messages": chats, "vllm_xargs": {"lamina": ["men"]}}
    assert server.client.post(batch, json=wrong).status_code == 422


def test_choices_of_several_prompts_have_answers_of_their_own(server: Server):
    texts = [" ".join(f"w{token}" for token in prompt) for prompt in server.clean[:2]]
    request = body(ROUTES[0], [], n=2, temperature=2.0, max_tokens=6) | {"prompt": texts}
    response = server.client.post(ROUTES[0], json=request).json()
    assert [choice["index"] for choice in response["choices"]] == [0, 1, 2, 3]
    prompts = [prompt for prompt in server.clean[:2] for _ in range(2)]
    choices = [SimpleNamespace(token_ids=words(choice), lamina=choice["lamina"]) for choice in response["choices"]]
    assert largest_difference(*server.folders, prompts, choices) < CLOSE


@pytest.mark.parametrize("route", ROUTES)
def test_streams_have_scores_beside_their_tokens(server: Server, route: str):
    prompt = server.clean[0]
    whole = post(server, route, prompt)["choices"][0]
    choices = stream(server, route, prompt)
    assert [token for choice in choices for token in words(choice)] == words(whole)
    scores: list[list[float]] = []
    tokens = 0
    for choice in choices[:-1]:
        tokens += len(words(choice))
        if "lamina" in choice:
            scores += choice["lamina"]["tags"]["tokens"]
            assert len(scores) == len(prompt) + max(tokens, 1) - 1
    first, of_prompt = choices[0]["lamina"]["whole"]["prompt"], whole["lamina"]["whole"]["prompt"]
    assert first["probabilities"] == pytest.approx(of_prompt["probabilities"], abs=CLOSE)
    last = choices[-1]
    assert last["finish_reason"] == "length"
    assert len(scores) + len(last["lamina"]["tags"]["tokens"]) == len(prompt) + LENGTH - 1
    assert last["lamina"]["mean"]["both"]["probabilities"] == pytest.approx(
        whole["lamina"]["mean"]["both"]["probabilities"], abs=CLOSE
    )


def test_sequences_of_a_stream_keep_their_scores(server: Server):
    prompt = server.clean[1]
    choices = stream(server, ROUTES[0], prompt, n=3, temperature=2.0, max_tokens=6)
    for index in range(3):
        own = [choice for choice in choices if choice["index"] == index]
        ids = [token for choice in own for token in words(choice)]
        rows = [row for choice in own for row in choice["lamina"]["tags"]["tokens"]]
        ended = {**own[-1]["lamina"], "tags": {"tokens": rows}}
        completion = SimpleNamespace(token_ids=ids, lamina=ended)
        assert largest_difference(*server.folders, [prompt], [completion]) < CLOSE


@pytest.mark.parametrize("route", ROUTES)
def test_a_flag_ends_a_response(server: Server, route: str):
    for (prompt, text), place in zip(server.flagged, server.places, strict=True):
        for choices in (post(server, route, prompt)["choices"], stream(server, route, prompt)):
            assert [token for choice in choices for token in words(choice)] == text[: place + 2]
            assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("content_filter", "watchdog")
            assert choices[-1]["lamina"]["monitors"]["watchdog"]["flagged_at"] == place


@pytest.mark.parametrize("route", ROUTES)
def test_a_request_that_cannot_be_answered_gets_422_and_the_server_goes_on(server: Server, route: str):
    prompt = server.clean[0]
    wrong = {
        "unknown reader 'men'; known: query, mean, last, tags, whole, cut": {"vllm_xargs": {"lamina": ["men"]}},
        "must be a list of readers' names": {"vllm_xargs": {"lamina": "mean"}},
        "uses beam search": {"use_beam_search": True},
    }
    for message, fields in wrong.items():
        for streamed in (False, True):
            response = server.client.post(route, json=body(route, prompt, stream=streamed, **fields))
            assert response.status_code == 422
            assert message in response.json()["error"]["message"]
    (choice,) = post(server, route, prompt, vllm_xargs={"lamina": ["mean"]})["choices"]
    assert list(choice["lamina"]) == ["mean", "monitors"]


def test_a_request_for_an_adapter_is_refused(server: Server):
    response = server.client.post(ROUTES[0], json=body(ROUTES[0], server.clean[0], model="adapter"))
    assert response.status_code == 404
    assert "adapter" in response.json()["error"]["message"]


def test_a_client_that_hangs_up_leaves_the_others_alone(server: Server):
    prompt = server.clean[0]
    request = body(ROUTES[0], prompt, stream=True, max_tokens=150)
    with server.client.stream("POST", ROUTES[0], json=request) as response:
        next(response.iter_lines())
    end = time.monotonic() + 30
    while "vllm:num_requests_running" not in (metrics := server.client.get("/metrics").text) or any(
        line.startswith("vllm:num_requests_running") and not line.endswith(" 0.0") for line in metrics.splitlines()
    ):
        assert time.monotonic() < end, "the request of a client that hung up goes on"
        time.sleep(0.2)
    (choice,) = post(server, ROUTES[0], prompt)["choices"]
    completion = SimpleNamespace(token_ids=words(choice), lamina=choice["lamina"])
    assert largest_difference(*server.folders, [prompt], [completion]) < CLOSE


def test_routes_without_the_field_end_a_flagged_text_too(server: Server):
    (prompt, text), place = server.flagged[0], server.places[0]
    said = " ".join(f"w{token}" for token in prompt)
    common = {"model": "tiny", "temperature": 0.0}
    messages = {**common, "messages": [{"role": "user", "content": said}], "max_tokens": LENGTH}
    answer = server.client.post("/v1/messages", json=messages).json()
    response = server.client.post("/v1/responses", json={**common, "input": said, "max_output_tokens": LENGTH}).json()
    streamed = server.client.post("/v1/messages", json={**messages, "stream": True}).text
    assert (answer["stop_reason"], streamed.count('"stop_reason":"refusal"')) == ("refusal", 1)
    messages["messages"][0]["content"] = " ".join(f"w{token}" for token in server.clean[0])
    assert server.client.post("/v1/messages", json=messages).json()["stop_reason"] == "max_tokens"
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "content_filter"})
    assert response["lamina"]["monitors"]["watchdog"]["flagged_at"] == place
    wrong = {"model": "tiny", "input": said, "vllm_xargs": {"lamina": ["men"]}}
    refused = server.client.post("/v1/responses", json=wrong)
    assert (refused.status_code, "unknown reader 'men'" in refused.text) == (422, True)
    for written in (answer["content"][0]["text"], response["output"][0]["content"][0]["text"]):
        assert words({"text": written}) == text[: place + 2]
