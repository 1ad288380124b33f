# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportOptionalIterable=false
# pyright: reportOptionalSubscript=false, reportOperatorIssue=false, reportReturnType=false, reportAssignmentType=false

"""The server as the packages that people use see it: openai, tritonclient, huggingface_hub, prometheus_client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import huggingface_hub.constants
import numpy as np
import openai
import pytest
import tritonclient.http as triton
from huggingface_hub import InferenceClient
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as metrics
from tests.support.portions import one_in
from tests.support.serving import moderating, served
from tests.support.writing import CHAT, writing_bank
from tritonclient.utils import InferenceServerException

import lamina
from lamina.bank import ReaderBank

TEXTS = ["the film is good .", "bad \u00e9"]


@pytest.fixture(scope="module")
def bank() -> ReaderBank:
    return moderating()


@pytest.fixture(scope="module")
def address(bank: ReaderBank) -> Iterator[str]:
    with served(bank) as address:
        yield address


@pytest.fixture(scope="module")
def writer() -> Iterator[str]:
    with served(writing_bank()) as address:
        yield address


@pytest.fixture(autouse=True)
def _local_servers_are_no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface_hub refuses every address while it is offline; the guard of all tests keeps it on this machine."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)


def client_of(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)


@pytest.mark.long
def test_openai_sends_a_reply_back_in_the_second_turn(writer: str):
    chat = client_of(writer).chat.completions
    options: Any = {"model": "tiny", "max_tokens": 4, "temperature": 0}
    reply = chat.create(messages=CHAT, **options).choices[0].message
    plain = {"role": "assistant", "content": reply.content}
    answers = [
        chat.create(messages=[*CHAT, sent, *CHAT], **options).choices[0].message.content
        for sent in (reply, reply.model_dump(), {**plain, "refusal": None, "tool_calls": [], "annotations": []}, plain)
    ]
    assert answers == answers[-1:] * 4


def test_openai_options_of_every_day_are_accepted(writer: str):
    chat = client_of(writer).chat.completions
    parts: Any = [
        {"role": "user", "content": [{"type": "text", "text": "the film "}, {"type": "text", "text": "is good"}]}
    ]
    options: Any = {
        "user": "me",
        "seed": 3,
        "n": 1,
        "logprobs": False,
        "tools": [],
        "frequency_penalty": 0.0,
        "stop": None,
    }
    asked: Any = {"model": "tiny", "temperature": 1, "max_completion_tokens": 3, **options}
    whole = chat.create(messages=parts, **asked)
    chunks = list(chat.create(messages=CHAT, stream=True, stream_options={"include_usage": True}, **asked))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert (text, chunks[-1].usage) == (whole.choices[0].message.content, whole.usage)


BAD = [
    ({"n": 2}, 422, "n", None, "n: this is not supported here. Leave it out."),
    ({"reasoning_effort": "low"}, 422, "reasoning_effort", None, "reasoning_effort: this is not supported here."),
    ({"extra_body": {"min_p": 0.1}}, 422, "min_p", None, "min_p: Extra inputs are not permitted"),
    ({"messages": [{"role": "assistant"}]}, 422, "messages.0", None, "messages.0: a message needs a content"),
    ({"messages": [{"role": "user", "content": "film " * 99}]}, 413, None, "context_length_exceeded", "the prompt has"),
    ({"max_tokens": 99}, 422, None, None, "serve: 99 tokens are to be generated"),
]


@pytest.mark.parametrize(("wrong", "status", "param", "code", "message"), one_in(3, BAD))
def test_openai_errors_have_their_fields(writer: str, wrong: Any, status: int, param: Any, code: Any, message: str):
    with pytest.raises(openai.APIStatusError) as raised:
        client_of(writer).chat.completions.create(**{"model": "tiny", "messages": CHAT, **wrong})
    error = raised.value
    assert (error.status_code, error.type, error.param, error.code) == (status, "invalid_request_error", param, code)
    assert message in error.body["message"]


def test_openai_lists_the_bank_as_its_model(writer: str):
    models = client_of(writer).models
    assert [model.id for model in models.list()] == ["tiny"]
    assert models.retrieve("tiny").owned_by == "lamina"
    with pytest.raises(openai.NotFoundError, match="there is no model 'gpt'; 'tiny' is served"):
        models.retrieve("gpt")


def test_openai_moderates_texts_and_parts(address: str):
    moderations = client_of(address).moderations
    one, two = (moderations.create(input=sent) for sent in (TEXTS[0], TEXTS))
    parts = moderations.create(input=[{"type": "text", "text": TEXTS[0]}])
    assert (len(one.results), len(two.results)) == (1, 2)
    assert parts.results == one.results
    assert (one.model, moderations.create(input="a", model="mine").model) == ("tiny", "mine")


def infer(address: str, model: str, *, binary: bool, outputs: Any = None, **more: Any) -> Any:
    tensor = triton.InferInput("text", [2], "BYTES")
    tensor.set_data_from_numpy(np.array(TEXTS, dtype=object), binary_data=binary)
    with triton.InferenceServerClient(address.removeprefix("http://")) as client:
        return client.infer(model, [tensor], outputs=outputs, **more)


def test_triton_asks_what_is_served(address: str):
    with triton.InferenceServerClient(address.removeprefix("http://")) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("mood")
        assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
        assert client.get_model_metadata("mood")["outputs"][0]["name"] == "mood"


@pytest.mark.parametrize("binary", [False, True])
def test_triton_sends_and_gets_tensors_as_json_or_binary(address: str, bank: ReaderBank, binary: bool):
    """It sends no Content-Type. Without outputs it asks for all of them as binary data."""
    said = lamina.predict(bank, TEXTS)
    result = infer(address, "tiny", binary=binary)
    assert [output["name"] for output in result.get_response()["outputs"]] == list(bank)
    assert "id" not in result.get_response()
    probabilities = [list(one["mood"]["probabilities"].values()) for one in said]
    np.testing.assert_allclose(result.as_numpy("mood"), probabilities, atol=1e-5)
    spans = [[span["label"] for span in json.loads(cell)] for cell in result.as_numpy("who")]
    assert spans == [[span["label"] for span in one["who"]] for one in said]


@pytest.mark.parametrize("binary", [False, True])
def test_triton_gets_the_outputs_that_it_asks_for(address: str, bank: ReaderBank, binary: bool):
    asked = [triton.InferRequestedOutput(name, binary_data=binary) for name in ("who", "mood")]
    response = infer(address, "tiny", binary=True, outputs=asked, request_id="7").get_response()
    assert ([output["name"] for output in response["outputs"]], response["id"]) == (["who", "mood"], "7")
    assert all(("data" in output) != binary for output in response["outputs"])
    with pytest.raises(InferenceServerException, match="unknown output 'moo'; known: mood"):
        infer(address, "mood", binary=True, outputs=[triton.InferRequestedOutput("moo")])
    with pytest.raises(InferenceServerException, match=r"outputs.0.parameters.classification: Extra inputs"):
        infer(address, "mood", binary=True, outputs=[triton.InferRequestedOutput("mood", class_count=1)])
    with pytest.raises(InferenceServerException, match="the body has Content-Encoding gzip"):
        infer(address, "mood", binary=True, request_compression_algorithm="gzip")


def packed(tensor: dict[str, Any], data: bytes, size: int | None = None) -> tuple[bytes, dict[str, str]]:
    head = json.dumps({"inputs": [{"name": "text", "datatype": "BYTES", **tensor}]}).encode()
    return head + data, {"inference-header-content-length": str(len(head) if size is None else size)}


BROKEN = {
    "a size that is too large": packed({"shape": [1], "parameters": {"binary_data_size": 6}}, b"\1\0\0\0a"),
    "data that are left": packed({"shape": [1], "parameters": {"binary_data_size": 5}}, b"\1\0\0\0ab"),
    "a text that is too short": packed({"shape": [1], "parameters": {"binary_data_size": 5}}, b"\2\0\0\0a"),
    "no UTF-8": packed({"shape": [1], "parameters": {"binary_data_size": 5}}, b"\1\0\0\0\xff"),
    "a negative size": packed({"shape": [1], "parameters": {"binary_data_size": -1}}, b""),
    "half of the JSON": packed({"shape": [1], "data": ["a"]}, b"", 10),
    "a shape of another size": packed({"shape": [2], "parameters": {"binary_data_size": 5}}, b"\1\0\0\0a"),
    "data twice": packed({"shape": [1], "data": ["b"], "parameters": {"binary_data_size": 5}}, b"\1\0\0\0a"),
    "no data": packed({"shape": [1]}, b""),
}


@pytest.mark.parametrize("name", BROKEN)
def test_binary_data_that_do_not_fit_are_refused(address: str, name: str):
    body, headers = BROKEN[name]
    response = httpx.post(f"{address}/v2/models/mood/infer", content=body, headers=headers)
    assert response.status_code == 422, response.text


def test_binary_data_of_another_kind_are_refused_by_what_they_are(address: str):
    refused = {
        "FP32": (np.ones(2, np.float32), r"inputs\.0\.datatype: Input should be 'BYTES'"),
        "BYTES": (np.array(["a", b"\xe9"], dtype=object), "text 1 of the binary data is not UTF-8"),
    }
    with triton.InferenceServerClient(address.removeprefix("http://")) as client:
        for datatype, (data, message) in refused.items():
            tensor = triton.InferInput("text", [2], datatype)
            tensor.set_data_from_numpy(data, binary_data=True)
            with pytest.raises(InferenceServerException, match=message):
                client.infer("mood", [tensor])


def test_binary_data_full_of_brackets_are_a_text(address: str):
    text = b"[" * 20
    body, headers = packed(
        {"shape": [1, 1], "parameters": {"binary_data_size": 24}}, len(text).to_bytes(4, "little") + text
    )
    response = httpx.post(f"{address}/v2/models/mood/infer", content=body, headers=headers)
    assert response.json()["outputs"][0]["shape"] == [1, 2]


def test_inference_clients_read_texts_and_embed_them(address: str):
    vector = InferenceClient(f"{address}/embed").feature_extraction(
        TEXTS[0], normalize=True, truncate=True, truncation_direction="right"
    )
    assert vector.shape == (1, 32)
    body = {"inputs": TEXTS, "parameters": {"top_k": 1}}
    assert httpx.post(address, json=body).json() == httpx.post(f"{address}/predict", json=body).json()


@pytest.mark.parametrize("path", ["", "/generate"])
def test_inference_clients_generate_text(writer: str, path: str):
    client = InferenceClient(f"{writer}{path}")
    text = client.text_generation("the film", max_new_tokens=3)
    whole = client.text_generation("the film", max_new_tokens=3, details=True, return_full_text=True)
    assert whole.generated_text == f"the film{text}"
    assert "".join(client.text_generation("the film", max_new_tokens=3, stream=True)) == text
    *_, last = client.text_generation("the film", max_new_tokens=3, stream=True, details=True, return_full_text=True)
    assert (last.generated_text, last.details.generated_tokens) == (whole.generated_text, 3)


def test_text_generation_inference_streams_at_a_path_of_its_own(writer: str):
    body = {
        "inputs": "the film",
        "parameters": {"max_new_tokens": 2, "watermark": False, "truncate": None, "best_of": 1},
    }
    response = httpx.post(f"{writer}/generate_stream", json=body)
    assert response.text.count("data:") == 2
    refused = httpx.post(f"{writer}/generate", json={"inputs": "a", "parameters": {"best_of": 2}})
    assert refused.json()["error"] == "parameters.best_of: this is not supported here. Leave it out."


def test_inference_clients_chat(writer: str):
    reply = InferenceClient(writer).chat_completion(CHAT, max_tokens=3, temperature=0).choices[0]
    assert (reply.finish_reason, reply.message.role) == ("length", "assistant")


def test_prometheus_reads_the_metrics_in_both_of_its_formats(address: str):
    plain = httpx.get(f"{address}/metrics")
    asked = httpx.get(f"{address}/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert asked.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    names = [{family.name for family in parse(found.text)} for parse, found in ((metrics, plain), (openmetrics, asked))]
    assert names[0] >= names[1] >= {"lamina_requests", "lamina_inference_seconds"}
