# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false, reportOptionalIterable=false
# pyright: reportOptionalSubscript=false, reportOperatorIssue=false, reportReturnType=false, reportAssignmentType=false

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fastapi.testclient import TestClient
from pydantic import ValidationError
from tests.support.serving import moderating
from tests.support.stored import tiny_bank, tiny_model, tiny_tokenizer

import lamina
from lamina.bank import Reader, ReaderBank
from lamina.errors import ConfigError
from lamina.fusion.mean import Mean
from lamina.heads.sequence_classification import SequenceClassification
from lamina.serve import Settings, create_app
from lamina.serve.responses import categories_of, moderation

TEXT = "the film is good ."
JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def bank() -> ReaderBank:
    return tiny_bank()


@pytest.fixture(scope="module")
def client(bank: ReaderBank) -> Iterator[TestClient]:
    with TestClient(create_app(bank, Settings.of(max_client_batch_size=4, payload_limit=4000))) as client:
        yield client


def test_a_model_is_no_bank():
    call: Any = create_app
    with pytest.raises(ConfigError, match=r"create_app: bank is a \w+; it must be a ReaderBank"):
        call(tiny_model())


def asked(client: TestClient, path: str, body: Any, status: int = 200) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


def test_every_task_is_answered_as_predict_answers(client: TestClient, bank: ReaderBank):
    (said,) = lamina.predict(bank, [TEXT])
    found = asked(client, "/predict", {"inputs": TEXT})
    assert {one["label"]: one["score"] for one in found["mood"]} == pytest.approx(said["mood"]["probabilities"])
    assert found["mood"][0]["score"] > found["mood"][1]["score"]
    assert found["who"] == said["who"]


def test_a_batch_has_an_answer_per_text_and_a_single_task_name_gives_its_answer_alone(client: TestClient):
    both = asked(client, "/predict", {"inputs": [[TEXT], ["bad"]], "tasks": "mood"})
    alone = [asked(client, "/predict", {"inputs": text, "tasks": ["mood"]})["mood"] for text in (TEXT, "bad")]
    assert [[one["label"] for one in row] for row in both] == [[one["label"] for one in row] for row in alone]
    for row, own in zip(both, alone, strict=True):
        assert [one["score"] for one in row] == pytest.approx([one["score"] for one in own], abs=1e-5)


def labels(ranked: Any) -> dict[str, float]:
    return {one["label"]: one["score"] for one in ranked}


def test_a_pair_in_a_list_is_a_pair(client: TestClient, bank: ReaderBank):
    (said,) = lamina.predict(bank, [(TEXT, "bad")])
    (found,) = asked(client, "/predict", {"inputs": [[TEXT, "bad"]], "tasks": "mood"})
    assert labels(found) == pytest.approx(said["mood"]["probabilities"])


@pytest.mark.parametrize("texts", [["bad"], [TEXT, "bad"], [TEXT, "bad", "the film"]])
def test_a_flat_list_is_a_batch_for_readers_that_learnt_no_pairs(client: TestClient, texts: list[str]):
    found = asked(client, "/predict", {"inputs": texts, "tasks": "mood"})
    alone = [asked(client, "/predict", {"inputs": text, "tasks": "mood"}) for text in texts]
    assert [labels(one) for one in found] == [pytest.approx(labels(one), abs=1e-5) for one in alone]


def test_two_texts_are_a_pair_for_readers_that_learnt_pairs():
    paired = tiny_bank()
    paired["mood"].info["pair"] = True
    (said,) = lamina.predict(paired, [(TEXT, "bad")], readers=["mood"])
    with TestClient(create_app(paired)) as client:
        pair = asked(client, "/predict", {"inputs": [TEXT, "bad"], "tasks": "mood"})
        assert labels(pair) == pytest.approx(said["mood"]["probabilities"])
        assert len(asked(client, "/predict", {"inputs": [TEXT, "bad", "a"], "tasks": "mood"})) == 3
        assert len(asked(client, "/predict", {"inputs": [TEXT, "bad"], "tasks": "who"})) == 2
        told = asked(client, "/predict", {"inputs": [TEXT, "bad"]}, 422)["error"]
        assert "'mood' was trained on pairs, and 'who' was not. Send [[a, b]] for a pair, or [[a], [b]]" in told


def test_single_texts_and_pairs_may_be_mixed(client: TestClient):
    found = asked(client, "/predict", {"inputs": [[TEXT], [TEXT, "bad"], "bad"], "tasks": "mood"})
    alone = [asked(client, "/predict", {"inputs": [one], "tasks": "mood"})[0] for one in (TEXT, [TEXT, "bad"], "bad")]
    assert [labels(one) for one in found] == [pytest.approx(labels(one), abs=1e-5) for one in alone]


HABITS = {
    "/predict": {
        "inputs": TEXT,
        "truncate": None,
        "truncation_direction": "Right",
        "raw_scores": None,
        "tasks": "mood",
    },
    "/embed": {"inputs": TEXT, "truncate": None, "normalize": None, "prompt_name": None, "dimensions": None},
    "/explain": {"inputs": TEXT, "truncate": None, "truncation_direction": "right", "tasks": ["mood"]},
}


@pytest.mark.parametrize("path", HABITS)
def test_keys_that_clients_send_by_habit_change_nothing(client: TestClient, path: str):
    plain = {key: value for key, value in HABITS[path].items() if key in ("inputs", "tasks")}
    found, expected = asked(client, path, HABITS[path]), asked(client, path, plain)
    if path == "/explain":  # times differ
        found, expected = found["tasks"], expected["tasks"]
    assert found == expected


@pytest.mark.parametrize(
    ("path", "key", "value"),
    [("/embed", "prompt_name", "query"), ("/embed", "dimensions", 8)],
)
def test_keys_that_are_not_supported_are_refused_by_name(client: TestClient, path: str, key: str, value: Any):
    assert asked(client, path, {"inputs": TEXT, key: value}, 422)["error"].startswith(f"{key}: this is not supported")


@pytest.mark.parametrize(
    ("path", "name"),
    [("/predict", "tasks"), ("/predict", "\ud800"), ("/v1/moderations", "model"), ("/v2/models/mood/infer", "id")],
)
def test_a_lone_surrogate_that_a_response_repeats_is_no_fault(client: TestClient, path: str, name: str):
    tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a \udfff"]}
    asked = {"/predict": {"inputs": "a"}, "/v1/moderations": {"input": "a"}}.get(path, {"inputs": [tensor]})
    response = client.post(path, content=json.dumps({**asked, name: "\udfff"}), headers=JSON)
    assert response.status_code == (200 if name == "id" else 422)
    assert name == "model" or "\ufffd" in response.text


@pytest.mark.parametrize("sent", [{"shape": [True]}, {"shape": ["1"]}, {"shape": [1.0]}])
def test_shapes_are_whole_numbers(client: TestClient, sent: Any):
    tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a"], **sent}
    assert "inputs.0.shape.0" in asked(client, "/v2/models/mood/infer", {"inputs": [tensor]}, 422)["error"]


def test_parameters_of_pipelines_are_heeded(client: TestClient):
    every = asked(client, "/predict", {"inputs": TEXT, "tasks": "mood"})

    def found(status: int = 200, **parameters: Any) -> Any:
        return asked(client, "/predict", {"inputs": TEXT, "tasks": "mood", "parameters": parameters}, status)

    assert found(top_k=1, function_to_apply="softmax") == every[:1]
    assert found(top_k=None, function_to_apply=None) == every
    assert found(function_to_apply="none") == asked(
        client, "/predict", {"inputs": TEXT, "tasks": "mood", "raw_scores": True}
    )
    assert "scores of 'mood' are by softmax" in found(422, function_to_apply="sigmoid")["error"]
    assert "Extra inputs" in found(422, topk=1)["error"]


def test_a_reader_of_numbers_has_no_function_of_scores():
    bank = tiny_bank()
    bank.add("stars", Reader(Mean(), SequenceClassification(("stars",), problem_type="regression")))
    with TestClient(create_app(bank)) as client:
        body = {"inputs": TEXT, "tasks": "stars"}
        plain = asked(client, "/predict", body)
        for function in ("softmax", "sigmoid"):
            parameters = {"function_to_apply": function}
            assert asked(client, "/predict", {**body, "parameters": parameters}) == plain


def test_the_root_answers_as_predict(client: TestClient):
    assert asked(client, "/", {"inputs": TEXT}) == asked(client, "/predict", {"inputs": TEXT})
    with TestClient(create_app(tiny_bank(), Settings.of(api_key="sesame"))) as locked:
        assert locked.post("/", json={"inputs": "a"}).status_code == 401
        assert locked.get("/").status_code == 200


@pytest.mark.parametrize(
    "path", ["/health", "/v2/health/live", "/v2/health/ready", "/metrics", "/info", "/", "/v1/models"]
)
def test_head_is_answered_as_get_without_the_body(client: TestClient, path: str):
    head, get = client.head(path), client.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]
    assert client.head("/predict").status_code == 405


@pytest.mark.parametrize("path", ["/predict", "/v1/moderations", "/v2/models/mood/infer"])
def test_a_compressed_body_is_refused_by_name(client: TestClient, path: str):
    body = gzip.compress(b'{"inputs": "a"}')
    response = client.post(path, content=body, headers={"content-encoding": "gzip"})
    assert response.status_code == 415
    assert "the body has Content-Encoding gzip; send it uncompressed." in response.text


def test_errors_under_v1_have_openais_shape(client: TestClient):
    def error(method: str, path: str, **more: Any) -> tuple[int, Any]:
        response = client.request(method, path, **more)
        assert set(response.json()) == {"error"}
        return response.status_code, response.json()["error"]

    invalid = "invalid_request_error"
    assert error("POST", "/v1/moderations", json={"input": 3})[1]["type"] == invalid
    assert error("POST", "/v1/moderations", json={}) == (
        422,
        {"message": "input: Field required", "type": invalid, "param": "input", "code": None},
    )
    nowhere = "nothing is served at this path; GET /openapi.json lists the paths"
    assert error("GET", "/v1/none") == (404, {"message": nowhere, "type": invalid, "param": None, "code": None})
    assert error("POST", "/v1/moderations", json={"input": "a" * 4000})[0] == 413
    with TestClient(create_app(tiny_bank(), Settings.of(api_key="sesame"))) as locked:
        assert locked.get("/v1/models").json()["error"]["code"] == "invalid_api_key"
        assert set(locked.get("/info").json()) == {"error", "error_type"}


def test_raw_scores_are_logits(client: TestClient, bank: ReaderBank):
    found = asked(client, "/predict", {"inputs": TEXT, "raw_scores": True, "tasks": "mood"})
    with torch.no_grad():
        logits = bank(**tiny_tokenizer()(TEXT, return_tensors="pt"))["mood"].logits[0].tolist()
    assert {one["label"]: one["score"] for one in found} == pytest.approx(
        dict(zip(("bad", "good"), logits, strict=True))
    )


def test_a_bank_of_one_reader_answers_as_text_embeddings_inference():
    one = tiny_bank()
    one.remove("who")
    with TestClient(create_app(one)) as client:
        assert [set(row) for row in asked(client, "/predict", {"inputs": TEXT})] == [{"label", "score"}] * 2
        assert list(asked(client, "/predict", {"inputs": TEXT, "tasks": ["mood"]})) == ["mood"]


def test_predict_cuts_a_long_text_only_with_truncate(client: TestClient):
    text = "film " * 40
    found = asked(client, "/predict", {"inputs": text, "tasks": "mood"}, 413)
    assert found == {
        "error": "serve: text 0 has 42 tokens; at most 32 are read. Send truncate=true to cut it.",
        "error_type": "Validation",
    }
    assert asked(client, "/predict", {"inputs": text, "tasks": "mood", "truncate": True})


def test_other_routes_cut_a_long_text_only_with_truncate(client: TestClient):
    tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["film " * 40]}
    assert (
        "42 tokens; at most 32 are read" in asked(client, "/v2/models/mood/infer", {"inputs": [tensor]}, 413)["error"]
    )
    assert asked(client, "/v2/models/mood/infer", {"inputs": [tensor], "parameters": {"truncate": True}})["outputs"]
    with TestClient(create_app(moderating())) as other:
        long = {"input": "film " * 40}
        assert "42 tokens; at most 32 are read" in asked(other, "/v1/moderations", long, 413)["error"]["message"]
        assert asked(other, "/v1/moderations", {**long, "truncate": True})["results"]


def test_every_route_refuses_to_cut_on_the_other_side(client: TestClient):
    tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "data": [TEXT]}
    left = {"truncate": True, "truncation_direction": "Left"}
    for path in ("/predict", "/explain", "/embed"):
        assert "they cut on the right" in asked(client, path, {"inputs": TEXT, **left}, 422)["error"]
        assert asked(client, path, {"inputs": TEXT, "truncation_direction": "Left"})  # nothing is cut
    assert "they cut" in asked(client, "/v2/models/mood/infer", {"inputs": [tensor], "parameters": left}, 422)["error"]
    with TestClient(create_app(moderating())) as other:
        assert "they cut" in asked(other, "/v1/moderations", {"input": TEXT, **left}, 422)["error"]["message"]


def test_a_body_that_is_not_json_is_refused(client: TestClient):
    response = client.post("/predict", content=b'{"inputs": x}', headers={"content-type": "application/json"})
    assert response.status_code == 422
    assert response.json()["error"] == "the body is not JSON, from character 11 on; a JSON object in UTF-8 is needed"


@pytest.mark.parametrize(("size", "status"), [(4000, 200), (4001, 413)])
def test_a_body_may_have_exactly_payload_limit_bytes(client: TestClient, size: int, status: int):
    body = json.dumps({"inputs": TEXT}).encode().ljust(size)
    found = client.post("/predict", content=body, headers={"content-type": "application/json"})
    assert found.status_code == status


@pytest.mark.parametrize("layer", [0, 2, -1])
def test_embeddings_are_the_mean_of_a_layer(client: TestClient, bank: ReaderBank, layer: int):
    (found,) = asked(client, "/embed", {"inputs": TEXT, "layer": layer})
    with torch.no_grad():
        states = bank.model(**tiny_tokenizer()(TEXT, return_tensors="pt"), output_hidden_states=True).hidden_states
    mean = states[layer][0].mean(0)
    assert found == pytest.approx((mean / mean.norm()).tolist(), abs=1e-6)
    (raw,) = asked(client, "/embed", {"inputs": [TEXT], "layer": layer, "normalize": False})
    assert raw == pytest.approx(mean.tolist(), abs=1e-6)


def test_embeddings_of_texts_of_different_lengths_equal_those_of_each_text_alone(client: TestClient):
    texts = [TEXT, "bad", "the film is very good and not slow ."]
    alone = [asked(client, "/embed", {"inputs": text})[0] for text in texts]
    assert asked(client, "/embed", {"inputs": texts}) == [pytest.approx(vector, abs=1e-5) for vector in alone]


def loud(bias: float) -> ReaderBank:
    """Return a bank in half precision, whose embeddings are about as large as `bias`."""
    model = tiny_model()
    torch.nn.init.constant_(model.get_parameter("embeddings.LayerNorm.bias"), bias)
    return tiny_bank(model.half())


def test_embeddings_in_half_precision_do_not_overflow():
    """The sum of twenty times 4000 is beyond the range of half precision, though the mean is not."""
    with TestClient(create_app(loud(4000.0), Settings.of())) as client:
        (found,) = asked(client, "/embed", {"inputs": "good " * 18, "layer": 0, "normalize": False})
    assert found == pytest.approx([4000.0] * len(found), abs=8)


@pytest.mark.parametrize(
    ("path", "what"), [("/embed", "layer 0 of a text is NaN"), ("/explain", "a layer's contribution is NaN")]
)
def test_states_that_are_not_finite_are_an_error(path: str, what: str):
    bank = tiny_bank()
    bank.model.get_submodule("embeddings").register_forward_hook(lambda *given: given[-1] * float("nan"))
    with TestClient(create_app(bank, Settings.of())) as client:
        body = {"inputs": TEXT} | ({"layer": 0} if path == "/embed" else {})
        assert what in asked(client, path, body, 424)["error"]


def test_moderation_flags_by_yes_no_tasks():
    bank = moderating()
    (said,) = lamina.predict(bank, [TEXT])
    with TestClient(create_app(bank)) as client:
        found = asked(client, "/v1/moderations", {"input": [TEXT, "bad"], "model": "mine"})
    assert found["model"] == "mine"
    first = found["results"][0]
    assert first["category_scores"] == pytest.approx(
        {
            "toxic": said["toxic"]["probabilities"]["yes"],
            **{f"topics/{label}": score for label, score in said["topics"]["probabilities"].items()},
        },
        abs=1e-5,
    )
    assert first["categories"] == {name: score >= 0.5 for name, score in first["category_scores"].items()}
    assert first["flagged"] == any(first["categories"].values())
    assert len(found["results"]) == 2


def test_moderation_needs_a_task_that_flags(client: TestClient):
    told = asked(client, "/v1/moderations", {"input": "a"}, 422)["error"]["message"]
    assert "no task of this bank flags texts" in told


def test_a_task_with_two_yes_labels_flags_nothing():
    bank = moderating()
    bank.add("either", Reader(Mean(), SequenceClassification(("spam", "toxic"))))
    assert categories_of(bank) == {"toxic": ("yes",), "topics": ("war", "sex")}


def test_moderation_flags_from_a_score_of_one_half():
    answer = {"toxic": {"probabilities": {"no": 0.5, "yes": 0.5}}, "spam": {"probabilities": {"no": 0.51, "yes": 0.49}}}
    (result,) = moderation([answer], {"toxic": ("yes",), "spam": ("yes",)}, "mine")["results"]
    assert (result["flagged"], result["categories"]) == (True, {"toxic": True, "spam": False})


def test_kserve_returns_a_tensor_per_task(client: TestClient, bank: ReaderBank):
    said = lamina.predict(bank, [TEXT, "bad"])
    tensor = {"name": "text", "shape": [2], "datatype": "BYTES", "data": [TEXT, "bad"]}
    found = asked(client, "/v2/models/bank/infer", {"id": "7", "inputs": [tensor]})
    mood, who = found["outputs"]
    assert (found["id"], mood["name"], mood["shape"], who["datatype"]) == ("7", "mood", [2, 2], "BYTES")
    assert mood["data"] == pytest.approx([p for one in said for p in one["mood"]["probabilities"].values()], abs=1e-5)
    assert [[span["label"] for span in json.loads(cell)] for cell in who["data"]] == [
        [span["label"] for span in one["who"]] for one in said
    ]
    alone = asked(client, "/v2/models/mood/infer", {"inputs": [tensor]})
    assert [output["name"] for output in alone["outputs"]] == ["mood"]
    assert client.get("/v2/models/mood").json()["outputs"][0]["parameters"] == {"labels": ["bad", "good"]}
    assert client.get("/v2/models/mood/ready").json() == {"name": "mood", "ready": True}


def test_kserve_accepts_pairs(client: TestClient):
    tensor = {"name": "text", "shape": [1, 2], "datatype": "BYTES", "data": [[TEXT, "bad"]]}
    found = asked(client, "/v2/models/mood/infer", {"inputs": [tensor]})["outputs"][0]
    (pair,) = asked(client, "/predict", {"inputs": [[TEXT, "bad"]], "tasks": "mood"})
    assert sorted(found["data"]) == pytest.approx(sorted(one["score"] for one in pair))


def infer(shape: list[int], data: list[Any]) -> dict[str, Any]:
    return {"inputs": [{"name": "t", "shape": shape, "datatype": "BYTES", "data": data}]}


PROBLEMS = {
    "another task": ("/predict", {"inputs": "a", "tasks": ["nope"]}, 422, "unknown task 'nope'; known: mood, who"),
    "no task": ("/predict", {"inputs": "a", "tasks": []}, 422, "tasks is empty"),
    "no text": ("/predict", {"inputs": []}, 422, "inputs: a text, a list"),
    "a number": ("/predict", {"inputs": 3}, 422, "inputs: a text, a list"),
    "a triple": ("/predict", {"inputs": [["a", "b", "c"]]}, 422, "inputs: a text, a list of texts or of pairs"),
    "mixed": ("/predict", {"inputs": ["a", {"image": "YQ=="}]}, 422, "inputs are of several kinds"),
    "unknown key": ("/predict", {"inputs": "a", "trunc": True}, 422, "trunc: Extra inputs"),
    "readers": ("/predict", {"inputs": "a", "readers": ["mood"]}, 422, "Did you mean 'tasks' in place of 'readers'?"),
    "text": ("/explain", {"text": "a"}, 422, "inputs: Field required. Did you mean 'inputs' in place of 'text'?"),
    "many texts": ("/predict", {"inputs": [["a"]] * 5}, 413, "5 texts came in one request; at most 4 are accepted"),
    "many bytes": (
        "/predict",
        {"inputs": "a" * 4000},
        413,
        "the body is larger than 4000 bytes, the most that is accepted",
    ),
    "deep": ("/predict", {"inputs": [[[[[[[["a"]]]]]]]]}, 422, "the body is nested too deeply; at most 8 levels"),
    "no layer": ("/embed", {"inputs": "a", "layer": 9}, 422, "layer 9 does not exist; the model has 4 layers"),
    "no model": ("/v2/models/x/infer", {"inputs": []}, 422, "inputs"),
    "other model": ("/v2/models/x/infer", infer([1], ["a"]), 404, "no model 'x'; known models: bank, mood, who"),
    "shape": ("/v2/models/bank/infer", infer([3], ["a"]), 422, "the shape is [3] for 1 cells;"),
    "no shape": ("/v2/models/bank/infer", infer([], ["a"]), 422, "the shape is [] for 1 cells;"),
    "torn pairs": (
        "/v2/models/bank/infer",
        infer([2, 2], [["a", "b", "c"], ["d"]]),
        422,
        "the shape is [2, 2] for 4 cells in other rows;",
    ),
    "torn texts": ("/v2/models/bank/infer", infer([2, 1], [["a", "b"]]), 422, "[2, 1] for 2 cells in other rows;"),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_bad_request_is_refused_with_the_reason(client: TestClient, name: str):
    path, body, status, part = PROBLEMS[name]
    found = asked(client, path, body, status)
    assert part in found["error"]
    assert set(found) == {"error", "error_type"}


@pytest.mark.parametrize("body", [b"", b"{", b'{"inputs": "\xff"}', b'{"inputs": NaN}', b"[" * 9, b'{"inputs":'])
def test_malformed_bodies_are_refused(client: TestClient, body: bytes):
    response = client.post("/predict", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 422
    assert set(response.json()) == {"error", "error_type"}


def test_a_body_with_another_content_type_is_refused(client: TestClient):
    response = client.post("/predict", content=b'{"inputs": "a"}', headers={"content-type": "text/plain"})
    told = "the body: a JSON object is needed, sent as Content-Type: application/json"
    assert (response.status_code, response.json()["error"]) == (422, told)


@pytest.mark.parametrize("text", ["", " ", "\ud800", "\x00", "a" * 3000])
def test_unusual_texts_are_accepted(client: TestClient, text: str):
    body = json.dumps({"inputs": text, "truncate": True}).encode()
    assert client.post("/predict", content=body, headers={"content-type": "application/json"}).status_code == 200


def test_requests_need_the_key():
    with TestClient(create_app(tiny_bank(), Settings.of(api_key="sesame"))) as client:
        for headers in ({}, {"authorization": "Bearer other"}, {"authorization": "sesame"}):
            response = client.post("/predict", json={"inputs": "a"}, headers=headers)
            assert response.status_code == 401
            assert response.json()["error_type"] == "Unauthorized"
        for scheme in ("bearer", "Bearer"):  # the name of a scheme has no case
            key = {"authorization": f"{scheme} sesame"}
            assert client.post("/predict", json={"inputs": "a"}, headers=key).status_code == 200
        assert client.get("/info").status_code == 401
        assert client.get("/health").status_code == 200
        assert "sesame" not in client.get("/info", headers=key).text


def test_responses_have_security_headers(client: TestClient):
    assert client.get("/info").headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize("origin", ["https://a.example/", "a.example", "https://*.a.example"])
def test_origins_are_checked_however_settings_are_made(origin: str):
    with pytest.raises(ValidationError, match="an origin is a scheme and a host in lower case"):
        Settings(cors_allow_origin=("*", origin))
    with pytest.raises(ConfigError, match=f"cors_allow_origin is {re.escape(repr(origin))}; an origin is a scheme"):
        Settings.of(cors_allow_origin=("*", origin))


def test_cors_allows_the_given_origins_only():
    with TestClient(
        create_app(tiny_bank(), Settings.of(cors_allow_origin=("https://a.example",), api_key="k"))
    ) as client:
        asks = {"origin": "https://a.example", "access-control-request-method": "POST"}
        assert client.options("/predict", headers=asks).headers["access-control-allow-origin"] == "https://a.example"
        refused = client.post("/predict", json={"inputs": "a"}, headers={"origin": "https://a.example"})
        assert (refused.status_code, "access-control-allow-origin" in refused.headers) == (401, True)
        other = {**asks, "origin": "https://b.example"}
        assert "access-control-allow-origin" not in client.options("/predict", headers=other).headers


def test_info_names_tasks_and_limits(client: TestClient):
    info = client.get("/info").json()
    assert info["tasks"]["mood"]["labels"] == ["bad", "good"]
    assert info["tasks"]["who"]["layers"] == [1, 3]
    assert [info["tasks"]["mood"][key] for key in ("pairs", "max_length")] == [None, info["max_input_length"]]
    assert (info["max_client_batch_size"], info["stacks"]) == (4, {"main": {"layers": 4, "width": 32}})


def test_metrics_count_requests_and_batches(bank: ReaderBank):
    with TestClient(create_app(bank)) as client:
        client.post("/predict", json={"inputs": [["a"], ["b"]], "tasks": ["mood"]})
        client.get("/made/up/by/a/client")
        figures = client.get("/metrics").text
    assert 'lamina_answers_total{task="mood"} 2.0' in figures
    assert 'lamina_requests_total{path="/predict",status="200"} 1.0' in figures
    assert 'lamina_requests_total{path="other",status="404"} 1.0' in figures
    assert "lamina_inference_seconds_count 1.0" in figures


@pytest.mark.parametrize("accept", ["text/plain;version=x", "application/openmetrics-text; version=latest, */*"])
def test_metrics_in_a_version_that_is_no_number_are_plain(client: TestClient, accept: str):
    response = client.get("/metrics", headers={"accept": accept})
    assert (response.status_code, response.headers["content-type"].split(";")[0]) == (200, "text/plain")


def test_a_bank_without_readers_is_refused():
    empty = tiny_bank()
    empty.remove("mood")
    empty.remove("who")
    with pytest.raises(ConfigError, match=r"serve: the bank has no reader; at least one is needed"):
        create_app(empty)


def test_settings_are_checked():
    with pytest.raises(ConfigError, match=r"serve: max_batch_tokens is 0; input should be greater than or equal to 1"):
        Settings.of(max_batch_tokens=0)
