from __future__ import annotations

import os
import struct
import sys
import zlib
from base64 import encodebytes
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from tests.support.file_banks import PNG, WAV, hearing, in_base64, seeing
from tests.support.pictures import encoded, picture
from tests.support.sounds import sound_bytes, tone
from tests.support.stored import tiny_bank
from tests.support.towers import joint_processor, two_towers

import lamina
from lamina.bank import Reader, ReaderBank
from lamina.fusion.mean import Mean
from lamina.heads.sequence_classification import ImageClassification, SequenceClassification
from lamina.serve import create_app


@pytest.fixture(scope="module")
def images() -> Iterator[TestClient]:
    with TestClient(create_app(seeing())) as client:
        yield client


@pytest.fixture(scope="module")
def sounds() -> Iterator[TestClient]:
    with TestClient(create_app(hearing())) as client:
        yield client


def asked(client: TestClient, inputs: Any, status: int = 200, path: str = "/predict", **more: Any) -> Any:
    response = client.post(path, json={"inputs": inputs, **more})
    assert response.status_code == status, response.text
    return response.json()


def scores(ranked: Any) -> dict[str, float]:
    return {one["label"]: one["score"] for one in ranked}


def bomb(side: int) -> bytes:
    """Return a PNG of a few bytes whose header claims `side` times `side` pixels."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"0")) + chunk(b"IEND", b"")


def test_an_image_is_answered_as_predict_answers(images: TestClient):
    first, second = lamina.predict(seeing(), [PNG, encoded(picture(200))])
    assert scores(asked(images, {"image": in_base64(PNG)})) == pytest.approx(first["animal"]["probabilities"])
    both = asked(images, [{"image": in_base64(data)} for data in (PNG, encoded(picture(200)))], tasks=["animal"])
    assert [scores(one["animal"]) for one in both] == [
        pytest.approx(said["animal"]["probabilities"], abs=1e-5) for said in (first, second)
    ]


def test_base64_may_be_divided_into_lines(images: TestClient):
    lines = encodebytes(PNG).decode()
    assert "\n" in lines.strip()
    for text in (lines, lines.replace("\n", "\r\n")):
        assert asked(images, {"image": text}) == asked(images, {"image": in_base64(PNG)})


def test_readers_of_images_take_the_function_that_is_theirs(images: TestClient):
    image, softmax = {"image": in_base64(PNG)}, {"function_to_apply": "softmax"}
    assert asked(images, image, parameters=softmax) == asked(images, image)
    error = asked(images, image, 422, parameters={"function_to_apply": "sigmoid"})["error"]
    assert "scores of 'animal' are by softmax" in error


def test_an_audio_clip_is_answered_as_predict_answers(sounds: TestClient):
    (said,) = lamina.predict(hearing(), [WAV])
    assert scores(asked(sounds, {"audio": in_base64(WAV)})) == pytest.approx(said["pitch"]["probabilities"])
    long = in_base64(sound_bytes(tone(seconds=31)))
    assert "file 0 is longer" in asked(sounds, {"audio": long}, 413)["error"]
    assert asked(sounds, {"audio": long}, truncate=True)


def test_an_image_can_be_explained(images: TestClient):
    found = asked(images, {"image": in_base64(PNG)}, path="/explain")
    animal = found["tasks"]["animal"]
    assert (animal["layers"], animal["tokens"], animal["contributions"]) == ([0, 1, 2], None, None)
    assert sum(animal["importance"]) == pytest.approx(1, abs=1e-5)
    assert found["seconds"]["with_readers"] > 0


def test_a_text_is_never_used_as_a_path(images: TestClient, sounds: TestClient, tmp_path: Path):
    file = tmp_path / "image.png"
    file.write_bytes(PNG)
    for inputs in (str(file), [str(file)], [[str(file)]]):
        assert asked(images, inputs, 422)["error"] == "serve: got text for 'animal', which reads image."
        assert "which reads audio" in asked(sounds, inputs, 422)["error"]
    assert asked(images, {"path": str(file)}, 422)["error_type"] == "Validation"
    assert asked(images, str(file), 422, path="/explain")
    for path, body in (("/embed", {"inputs": str(file)}), ("/v1/moderations", {"input": str(file)})):
        assert images.post(path, json=body).status_code == 422
    tensor = {"name": "text", "shape": [1], "datatype": "BYTES", "data": [str(file)]}
    assert images.post("/v2/models/animal/infer", json={"inputs": [tensor]}).status_code == 422


@pytest.mark.parametrize(
    ("inputs", "status", "error"),
    [
        ({"image": "?"}, 422, "serve: image is not Base64. Send the bytes of a file, encoded as Base64."),
        ({"image": in_base64(b"text")}, 422, "no image format known"),
        ({"image": ""}, 422, "no image format known"),
        ({"image": in_base64(PNG[:60])}, 422, "cannot be decoded"),
        ({"image": in_base64(bomb(8193))}, 422, "at most 67,108,864 are read"),
        (
            [{"image": in_base64(bomb(8192))}] * 2,
            413,
            "the files have 134,217,728 pixels in all; 67,108,864 are allowed",
        ),
        ({"audio": in_base64(WAV)}, 422, "got audio for 'animal', which reads image"),
        ({"image": in_base64(PNG), "audio": in_base64(WAV)}, 422, 'as {"image": Base64} or {"audio"'),
        ([{"image": in_base64(PNG)}, {"audio": in_base64(WAV)}], 422, "inputs are of several kinds"),
    ],
)
def test_bad_files_are_refused(images: TestClient, inputs: Any, status: int, error: str):
    assert error in asked(images, inputs, status)["error"]


def test_a_bank_for_texts_refuses_files():
    with TestClient(create_app(tiny_bank())) as client:
        said = asked(client, {"image": in_base64(PNG)}, 422)["error"]
        assert said == "serve: got image for 'mood', which reads text."
        tasks = client.get("/info").json()["tasks"]
    assert {task["reads"] for task in tasks.values()} == {"text"}


def test_truncated_audio_is_refused(sounds: TestClient):
    said = asked(sounds, {"audio": in_base64(b"RIFF....WAVE")}, 422)["error"]
    assert "file 0 is cut off after 12 of" in said


def test_no_file_of_a_request_is_written_to_disk(images: TestClient, sounds: TestClient):
    written: list[Any] = []
    watching = True

    def note(event: str, args: tuple[Any, ...]) -> None:
        if watching and event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR):
            written.append(args[0])

    sys.addaudithook(note)  # which stays for good, so it is told when to stop
    with TestClient(create_app(tiny_bank())) as texts:
        asked(texts, "the film is good .")
        asked(texts, "the film is good .", path="/explain")
    asked(images, {"image": in_base64(PNG)})
    asked(sounds, {"audio": in_base64(WAV)})
    with suppress(FileNotFoundError):
        Path("/nowhere/at/all").write_text("")
    watching = False
    assert written == ["/nowhere/at/all"]


def test_a_bank_with_readers_of_texts_and_images_answers_by_those_that_fit():
    bank = ReaderBank(two_towers(), joint_processor())
    bank.add("topic", Reader(Mean(), SequenceClassification(("war", "art"))))
    bank.add("shade", Reader(Mean(), ImageClassification(("light", "dark"))))
    with TestClient(create_app(bank.eval())) as client:
        (text,), (image,) = (
            lamina.predict(bank, [x], readers=[y]) for x, y in (("good film", "topic"), (PNG, "shade"))
        )
        found = asked(client, "good film", path="/predict")
        assert {task: scores(said) for task, said in found.items()} == {
            "topic": pytest.approx(text["topic"]["probabilities"])
        }
        found = asked(client, {"image": in_base64(PNG)})
        assert {task: scores(said) for task, said in found.items()} == {
            "shade": pytest.approx(image["shade"]["probabilities"])
        }
        assert "got image for 'topic'" in asked(client, {"image": in_base64(PNG)}, 422, tasks=["topic"])["error"]
        assert list(asked(client, "good film", path="/explain")["tasks"]) == ["topic"]
