"""The routes of KServe's v2 protocol, with tensors as JSON or as binary data."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import HTTPException, Request, Response

from lamina.errors import ConfigError, check_known
from lamina.serve.json_body import JSONRequest, JSONRoute, parse_body
from lamina.serve.problems import wait_while_connected
from lamina.serve.responses import scores_whole_texts
from lamina.serve.schemas import InferRequest, InferTensor
from lamina.serve.uploads import Example
from lamina.utils import JSON, JSONObject

if TYPE_CHECKING:
    from fastapi import FastAPI
    from starlette.types import Receive, Scope

    from lamina.bank import ReaderBank
    from lamina.serve.scheduler import Scheduler, ServedBank

_HEADER = "inference-header-content-length"  # size of the JSON before binary data
_BINARY = {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}


class InferHTTPRequest(JSONRequest):
    """An inference request. Its body is always read as JSON, even if its tensors came as binary data."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        headers = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
        super().__init__({**scope, "headers": [*headers, (b"content-type", b"application/json")]}, receive)

    async def json(self) -> Any:  # noqa: ANN401
        """Return the value of the JSON; binary data that follow it become the `data` of their tensors.

        Without the header that gives the size of the JSON, the whole body is JSON. Raises the errors of `parse_body`,
        and HTTPException with status 422 in the cases of `_with_data`.
        """
        size = self.headers.get(_HEADER)
        return await super().json() if size is None else _with_data(await self.body(), size, self.app.state.max_depth)


class InferRoute(JSONRoute):
    """A route of FastAPI that gets its requests as `InferHTTPRequest`."""

    request_class = InferHTTPRequest


def _with_data(body: bytes, size: str, max_depth: int) -> object:
    """Return the value of a request's JSON, with the binary data behind it moved into its tensors.

    Only called if the header gives the size of the JSON; otherwise "binary_data_size" is ignored. The data of another
    datatype than BYTES become [], and the tensor is refused later.

    Args:
        body: JSON, followed by the binary data of its tensors in their order.
        size: Number of bytes of the JSON, as the client wrote it.
        max_depth: How deeply the JSON may be nested.

    Raises:
        HTTPException: With status 422 if the sizes do not fit the body, a tensor has both data and binary data, the
            binary data are not texts, the JSON is not an object with a list "inputs", or `parse_body` refuses it.
    """
    try:
        end = int(size)
        found = parse_body(body[:end], max_depth)
        for tensor in found["inputs"]:
            count = (tensor.get("parameters") or {}).get("binary_data_size")
            if count is None:
                continue
            if tensor.get("data"):
                raise HTTPException(422, "a tensor has both data and binary_data_size; one of them is needed")
            is_text = tensor["datatype"] == "BYTES"  # other datatypes are refused later, by name
            tensor["data"] = _strings(body[end : end + count], count) if is_text else []
            end += count
    except (ValueError, TypeError, KeyError, AttributeError, struct.error):
        rule = "the header gives the size of the JSON, and binary_data_size that of each tensor"
        raise HTTPException(422, f"the body does not fit {_HEADER}: {size}; {rule}") from None
    if end != len(body):
        raise HTTPException(422, f"the body has {len(body)} bytes, but its JSON and tensors have {end}")
    return found


def _strings(data: bytes, size: int) -> list[str]:
    """Return the texts of a BYTES tensor; each text follows its length in 4 bytes. Empty data has no texts.

    Raises:
        ValueError: If `data` does not have `size` bytes, or the last text is incomplete.
        HTTPException: With status 422 if a text is not UTF-8.
        struct.error: If a length is incomplete.
    """
    texts: list[str] = []
    at = 0
    while at < len(data):
        (length,) = struct.unpack_from("<I", data, at)
        try:
            texts.append(data[at + 4 : at + 4 + length].decode())
        except UnicodeDecodeError:
            raise HTTPException(422, f"text {len(texts)} of the binary data is not UTF-8") from None
        at += 4 + length
    if at != size or len(data) != size:
        raise ValueError("the lengths of the texts do not fit the size of the tensor")
    return texts


def infer_response(found: Mapping[str, object], outputs: Sequence[JSONObject], binary: Sequence[str]) -> object:
    """Return the response to an inference request: the output tensors, and `found`, the other keys of the response.

    It is a dict; but if `binary` names outputs, a `Response` in which these follow the JSON as bytes.
    """
    if not binary:
        return {**found, "outputs": outputs}
    data: list[bytes] = []
    shown: list[JSONObject] = []
    for output in outputs:
        if output["name"] not in binary:
            shown.append(output)
            continue
        data.append(packed(output))
        about = {key: output[key] for key in ("name", "datatype", "shape")}
        shown.append({**about, "parameters": {"binary_data_size": len(data[-1])}})
    head = json.dumps({**found, "outputs": shown}).encode()
    return Response(b"".join([head, *data]), media_type="application/octet-stream", headers={_HEADER: str(len(head))})


def packed(output: JSONObject) -> bytes:
    """Return a tensor's data as bytes: 4 per number; a text is its length in 4 bytes, then its UTF-8 bytes.

    Numbers and lengths are little-endian.
    """
    data = output["data"]
    if output["datatype"] == "FP32":
        return struct.pack(f"<{len(data)}f", *data)
    texts = [str(text).encode() for text in data]
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def kserve_metadata(bank: ReaderBank, model: str, tasks: Sequence[str], version: str) -> dict[str, JSON]:
    """Return KServe's description of a model: name, version, input, and an output for each of the readers `tasks`.

    Inputs and outputs have a name, a datatype and a shape, in which -1 stands for any number of rows; an output also
    has the labels of its columns.
    """
    outputs: list[JSON] = []
    for task in tasks:
        head = bank[task].config.head
        is_scored = scores_whole_texts(head)
        outputs.append(
            {
                "name": task,
                "datatype": "FP32" if is_scored else "BYTES",
                "shape": [-1, len(head.labels)] if is_scored else [-1],
                "parameters": {"labels": list(head.labels)},
            }
        )
    inputs = [{"name": "text", "datatype": "BYTES", "shape": [-1]}]
    return {"name": model, "versions": [version], "platform": "lamina", "inputs": inputs, "outputs": outputs}


def kserve_texts(tensor: InferTensor) -> list[Example]:
    """Return the texts of a tensor `[rows]` or `[rows, 1]`, or the pairs of a tensor `[rows, 2]`.

    For either shape, the data may be flat or nested by row. Raises ConfigError if the data are not strings, there is no
    row, the shape is not one of these, or the data do not fit it.
    """
    rows = [part if isinstance(part, list) else [part] for part in tensor.data]
    cells = [cell for row in rows for cell in row]
    columns, texts = math.prod(tensor.shape[1:]) if tensor.shape else 0, list[str]()
    for number, cell in enumerate(cells):
        if not isinstance(cell, str):
            came = f"cell {number} of the data is not a text ({type(cell).__name__})"
            raise ConfigError(f"serve: {came}; texts are needed.")
        texts.append(cell)
    is_nested = len(tensor.shape) == 2 and any(isinstance(part, list) for part in tensor.data)
    is_torn = is_nested and any(len(row) != columns for row in rows)
    if math.prod(tensor.shape) != len(cells) or columns not in (1, 2) or not cells or is_torn:
        came = f"the shape is {tensor.shape} for {len(cells)} cells{' in other rows' if is_torn else ''}"
        rule = "texts [rows], texts [rows, 1] or pairs [rows, 2] are accepted, with at least one row"
        raise ConfigError(f"serve: {came}; {rule}.")
    if columns == 1:
        return [*texts]
    return [(texts[row], texts[row + 1]) for row in range(0, len(texts), 2)]


def kserve_output(bank: ReaderBank, task: str, predictions: Sequence[JSON]) -> JSONObject:
    """Return a task's tensor, with a row for each of its predictions about texts: its name, datatype, shape and data.

    The data is flat, row by row. Scores have the datatype "FP32" and a column per label (one for a regression).
    Predictions without scores, such as spans, become JSON texts of the datatype "BYTES". Without predictions, the
    tensor is of "BYTES" and empty.
    """
    rows = [prediction for prediction in predictions if isinstance(prediction, dict)]
    if rows and "probabilities" in rows[0]:
        numbers = [row["probabilities"][label] for row in rows for label in bank[task].config.head.labels]
    elif rows and "value" in rows[0]:
        numbers = [row["value"] for row in rows]
    else:
        texts = [json.dumps(prediction) for prediction in predictions]
        return {"name": task, "datatype": "BYTES", "shape": [len(texts)], "data": texts}
    return {"name": task, "datatype": "FP32", "shape": [len(rows), len(numbers) // len(rows)], "data": numbers}


def add_kserve(app: FastAPI, scheduler: Scheduler, name: str) -> None:
    """Add the routes of KServe's v2 protocol. The bank is a model called `name`, and each reader is a model too."""

    def look_up(model: str, version: str | None) -> tuple[ServedBank, list[str] | None, str]:
        """Return what is served, the names of a model's readers (None: all), and the version of the model.

        Raises HTTPException with status 404 if there is no such model, or `version` names another than the present one.
        """
        served = scheduler.served
        if model != name and model not in served.bank:
            known = ", ".join([name, *served.bank])
            raise HTTPException(404, f"there is no model '{model}'; known models: {known}")
        current = str(served.number if model == name else served.versions[model])
        if version not in (None, current):
            raise HTTPException(404, f"there is no version '{version}' of model '{model}'; {current} is served")
        return served, None if model == name else [model], current

    @app.get("/v2")
    async def server() -> dict[str, JSON]:
        """Return the name and the protocol version of this server."""
        return {"name": "lamina", "version": "2", "extensions": ["binary_tensor_data"]}

    @app.get("/v2/models/{model}")
    @app.get("/v2/models/{model}/versions/{version}")
    async def metadata(model: str, version: str | None = None) -> Mapping[str, object]:
        """Describe the inputs and outputs of a reader, or of all readers if the name is the bank's.

        Status 404 if there is no such model, or `version` is given and not the present one.
        """
        served, tasks, current = look_up(model, version)
        return kserve_metadata(served.bank, model, tasks or [*served.bank], current)

    @app.get("/v2/models/{model}/ready")
    @app.get("/v2/models/{model}/versions/{version}/ready")
    async def model_ready(model: str, version: str | None = None) -> dict[str, str | bool]:
        """Return whether the model accepts requests; status 404 if there is no such model or version."""
        look_up(model, version)
        return {"name": model, "ready": scheduler.is_open}

    async def infer(model: str, body: InferRequest, request: Request, version: str | None = None) -> object:
        """Return a tensor per task for a tensor of texts: scores `[rows, labels]`, or JSON `[rows]` (such as spans).

        Tasks come in the order of `outputs`, by default of the bank. Status 404 if there is no such model or version.
        """
        served, tasks, current = look_up(model, version)
        asked = list(dict.fromkeys(output.name for output in body.outputs)) or tasks
        check_known("serve", asked or (), tasks or served.bank, "output")
        texts = kserve_texts(body.inputs[0])
        scheduler.check_count(texts)
        future = scheduler.ask(texts, asked, truncate=body.parameters.cuts, bank=served.bank)
        answers = await wait_while_connected(request, future, scheduler.settings.request_timeout)
        order = asked or [*answers[0]]
        outputs = [kserve_output(served.bank, task, [answer[task] for answer in answers]) for task in order]
        found = {"model_name": model, "model_version": current, **({} if body.id is None else {"id": body.id})}
        return infer_response(found, outputs, [task for task in order if body.is_binary(task)])

    for path in ("/v2/models/{model}/infer", "/v2/models/{model}/versions/{version}/infer"):
        app.router.add_api_route(
            path, infer, methods=["POST"], responses={200: _BINARY}, route_class_override=InferRoute
        )
