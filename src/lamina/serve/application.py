"""The web application: its routes, and the responses to errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, TypeVar

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException as StarletteHTTPException

from lamina.errors import (
    BaseMismatchError,
    ConfigError,
    DataError,
    LaminaError,
    LayerIndexError,
    NotFiniteError,
    OutOfMemoryError,
    StoreError,
    UnknownNameError,
)
from lamina.serve import responses
from lamina.serve.disconnects import wait_while_connected
from lamina.serve.generation.generator import TextGenerator
from lamina.serve.generation.routes import add_generation
from lamina.serve.info import info_of
from lamina.serve.lengths import TooLongError
from lamina.serve.middleware import RequestGuard
from lamina.serve.prometheus import RequestMetrics, ServerMetrics
from lamina.serve.reload import Reloader, add_reader_routes
from lamina.serve.scheduler import ClosedError, OverloadedError, Scheduler, ServedBank
from lamina.serve.schemas import EmbedRequest, ExplainRequest, InferRequest, ModerationRequest, PredictRequest, Problem
from lamina.serve.settings import Settings
from lamina.serve.uploads import Example, TooLargeError
from lamina.serve.web_page import add_page
from lamina.serve.workers import EmbedWorker
from lamina.utils import JSON

if TYPE_CHECKING:
    from concurrent.futures import Future

    from lamina.bank import ReaderBank

AnswerT = TypeVar("AnswerT")

# Error -> HTTP status and `error_type`; the first entry that an error is an instance of counts.
_STATUS: dict[type[Exception], tuple[int, str]] = {
    TooLongError: (413, "Validation"),
    TooLargeError: (413, "Validation"),
    DataError: (422, "Validation"),
    OverloadedError: (429, "Overloaded"),
    ClosedError: (503, "Unhealthy"),
    UnknownNameError: (422, "Validation"),
    LayerIndexError: (422, "Validation"),
    ConfigError: (422, "Validation"),
    BaseMismatchError: (422, "Validation"),
    StoreError: (422, "Validation"),
    NotFiniteError: (424, "Backend"),
    OutOfMemoryError: (424, "Backend"),
    LaminaError: (424, "Backend"),
}


class _Response(TypedDict):
    """Documentation of one status in the OpenAPI schema: model of the body, and meaning of the status."""

    model: type[Problem]
    description: str


_PROBLEMS: dict[int, _Response] = {
    status: {"model": Problem, "description": text}
    for status, text in {
        401: "The key is missing or wrong",
        403: "The server was started without the key that this path needs",
        404: "Nothing of that name exists",
        408: "The body did not arrive in time",
        413: "Too many texts, or texts that are too long",
        422: "The request is not valid",
        424: "The model could not answer",
        429: "Too many requests are waiting",
        503: "The server is shutting down, or took too long",
    }.items()
}
_FILE = 'or a file as {"image": Base64} or {"audio": Base64}'
# Path -> what its `inputs` may be. pydantic's own message names only the first of the forms that do not fit.
_RULES = {
    "/predict": f"a text, a pair [a, b], a list of lists of one text or two, {_FILE}, or a list of files",
    "/explain": f"a text, a pair [a, b], {_FILE}",
}


def create_app(
    bank: ReaderBank,
    settings: Settings | None = None,
    *,
    name: str = "bank",
    source: str | None = None,
    readers_root: Path | None = None,
    page: bool = True,
) -> FastAPI:
    """Return the web application that answers requests with a bank, and start the threads of its scheduler.

    The application's `state` has `scheduler`, `generator` and `reloader`. They are closed when the application ends.

    Args:
        bank: The readers and their model, with a processor. The bank is put into evaluation mode.
        settings: Limits, keys, and the texts of the page. None: the defaults.
        name: Name of the bank for clients of the KServe routes and of the page.
        source: Folder or hub id that the bank was loaded from; `app.state.reloader.reload()` loads it again.
        readers_root: Folder of the banks whose readers may be added while the server runs. None: none may be added.
        page: Whether `/` is a page for trying the readers in a browser.

    Raises:
        ConfigError: If the bank has no reader.
    """
    settings = settings or Settings.of()
    metrics = ServerMetrics(lambda: scheduler.unanswered, lambda: generator.running)
    scheduler = Scheduler(bank, settings, metrics.count_batch)
    generator = TextGenerator(scheduler, metrics.count_generation)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(generator.close)
        await asyncio.to_thread(scheduler.close)

    app = FastAPI(
        title="Lamina",
        summary="The answers of all readers of a bank, from one pass of its model.",
        lifespan=lifespan,
        responses={status: {**response} for status, response in _PROBLEMS.items()},
        docs_url=None,  # FastAPI's own pages would load scripts from another site
        redoc_url=None,
    )
    app.state.scheduler, app.state.generator = scheduler, generator
    app.state.reloader = reloader = Reloader(scheduler, source, readers_root)
    app.add_middleware(RequestGuard, settings=settings)
    if settings.cors_allow_origin:
        origins = list(settings.cors_allow_origin)
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(RequestMetrics, metrics=metrics)
    _add_problems(app)
    _add_health(app, scheduler, metrics, name)
    _add_tei(app, scheduler)
    _add_moderations(app, scheduler)
    _add_kserve(app, scheduler, name)
    add_reader_routes(app, reloader, scheduler)
    add_generation(app, scheduler, generator, name)
    if page:
        add_page(app)
    return app


def _add_problems(app: FastAPI) -> None:
    """Add handlers that answer errors as text-embeddings-inference does: `{"error": ..., "error_type": ...}`."""

    def problem(status: int, error: str, error_type: str) -> JSONResponse:
        return JSONResponse({"error": error, "error_type": error_type}, status)

    @app.exception_handler(RequestValidationError)
    async def _(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            rule = "a JSON object in UTF-8 is needed"
            return problem(422, f"the body is not JSON, from character {first['loc'][-1]} on; {rule}", "Validation")
        where = ".".join(str(part) for part in first["loc"][1:])
        if not where:
            rule = "a JSON object is needed, sent as Content-Type: application/json"
            return problem(422, f"the body: {rule}", "Validation")
        if where == "inputs.str" and request.url.path in _RULES:
            return problem(422, f"inputs: {_RULES[request.url.path]} is needed", "Validation")
        return problem(422, f"{where}: {first['msg']}", "Validation")

    @app.exception_handler(LaminaError)
    async def _(_request: Request, error: LaminaError) -> JSONResponse:
        status, error_type = next(known for kind, known in _STATUS.items() if isinstance(error, kind))
        return problem(status, str(error), error_type)

    @app.exception_handler(StarletteHTTPException)
    async def _(_request: Request, error: StarletteHTTPException) -> JSONResponse:
        if error.status_code == 400:
            return problem(422, "the body cannot be read; JSON in UTF-8 is needed", "Validation")
        names = {404: "NotFound", 405: "NotAllowed", 503: "Unhealthy"}
        response = problem(error.status_code, str(error.detail), names.get(error.status_code, "Validation"))
        response.headers.update(error.headers or {})
        return response


def _add_health(app: FastAPI, scheduler: Scheduler, metrics: ServerMetrics, name: str) -> None:
    """Add the routes about the server itself: health, `/info` and `/metrics`."""

    @app.get("/health")
    @app.get("/v2/health/ready")
    async def ready() -> dict[str, str]:
        """Return status 200 if requests are accepted, and 503 if the server is shutting down or has failed."""
        if not scheduler.is_open:
            raise HTTPException(503, "the server accepts no requests: it is shutting down or has failed")
        return {"status": "ready"}

    @app.get("/v2/health/live")
    async def live() -> dict[str, str]:
        """Return status 200 as long as the process answers at all."""
        return {"status": "live"}

    @app.get("/info")
    async def info() -> dict[str, JSON]:
        """Return the tasks with their labels, layers and parameters, and all limits of the server."""
        return await run_in_threadpool(info_of, scheduler.served, scheduler.settings, name)

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def prometheus() -> Response:
        """Return times and counts of requests and batches, in the format of Prometheus."""
        return Response(metrics.text(), media_type="text/plain; version=0.0.4")


def _add_tei(app: FastAPI, scheduler: Scheduler) -> None:
    """Add the routes in the shapes of text-embeddings-inference: `/predict`, `/explain` and `/embed`."""

    @app.post("/predict")
    async def predict(body: PredictRequest, request: Request) -> object:
        """Return the answers of the readers about one text, pair or file, or about each of several.

        Classes come best first, as in text-embeddings-inference. With several tasks the answer is an object with a key
        for each task. With one reader, or one name as `tasks`, it is the answer of that task.
        """
        texts, is_single = responses.examples_of(body.inputs)
        _check_count(scheduler, texts)
        only_task = body.tasks if isinstance(body.tasks, str) else None
        tasks = [only_task] if only_task is not None else body.tasks
        bank = scheduler.bank  # read once: another bank may be served before the answer comes
        future = scheduler.ask(texts, tasks, raw=body.raw_scores, truncate=body.truncate, bank=bank)
        if tasks is None and len(bank) == 1:
            only_task = next(iter(bank))
        answers = [responses.tei(answer, only_task) for answer in await _answer(scheduler, future, request)]
        return answers[0] if is_single else answers

    @app.post("/explain")
    async def explain(body: ExplainRequest, request: Request) -> dict[str, object]:
        """Return the layers that each reader's answer comes from, and the tokens, where the reader's fusion can tell.

        "seconds" is the time of a pass over this text alone, up to the highest layer that is read, without and with the
        readers. If a text is read in several windows, the first window is explained.
        """
        (text,), _ = responses.examples_of(body.inputs)
        future = scheduler.explain(text, body.tasks, truncate=body.truncate)
        (explanation,) = await _answer(scheduler, future, request)
        return {**explanation}

    @app.post("/embed")
    async def embed(body: EmbedRequest, request: Request) -> list[list[float]]:
        """Return a vector for each text: the mean of one layer's state over the tokens of the text."""
        texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
        _check_count(scheduler, texts)

        bank = scheduler.bank

        def make() -> EmbedWorker:
            return EmbedWorker(bank, body.layer, normalize=body.normalize)

        future = scheduler.submit(texts, (bank, body.layer, body.normalize), make, body.truncate)
        return await _answer(scheduler, future, request)


def _add_moderations(app: FastAPI, scheduler: Scheduler) -> None:
    """Add the route in the shape of OpenAI's moderations."""

    @app.post("/v1/moderations")
    async def moderations(body: ModerationRequest, request: Request) -> dict[str, object]:
        """Return whether each text is flagged, by every yes/no task of the bank, in the shape of OpenAI's endpoint."""
        texts = [body.input] if isinstance(body.input, str) else body.input
        _check_count(scheduler, texts)
        bank = scheduler.bank
        categories = responses.categories_of(bank)
        future = scheduler.ask(texts, [*categories], truncate=body.truncate, bank=bank)
        scores = [responses.category_scores(answer, categories) for answer in await _answer(scheduler, future, request)]
        return {**responses.moderation(scores, body.model or "lamina")}


def _add_kserve(app: FastAPI, scheduler: Scheduler, name: str) -> None:
    """Add the routes of KServe's v2 protocol: the bank is a model called `name`, and each reader is a model too."""

    def look_up(model: str, version: str | None) -> tuple[ServedBank, list[str] | None, str]:
        """Return the served bank, the names of the readers of a model (None: all), and the model's version.

        Raises:
            HTTPException: With status 404 if there is no such model, or no such version of the model.
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
        return {"name": "lamina", "version": "2", "extensions": []}

    @app.get("/v2/models/{model}")
    @app.get("/v2/models/{model}/versions/{version}")
    async def metadata(model: str, version: str | None = None) -> dict[str, object]:
        """Return the inputs and outputs of a reader; under the bank's name, those of all readers."""
        served, tasks, current = look_up(model, version)
        return {**responses.kserve_metadata(served.bank, model, tasks, current)}

    @app.get("/v2/models/{model}/ready")
    @app.get("/v2/models/{model}/versions/{version}/ready")
    async def model_ready(model: str, version: str | None = None) -> dict[str, str | bool]:
        """Return whether the model accepts requests; status 404 if it does not exist."""
        look_up(model, version)
        return {"name": model, "ready": scheduler.is_open}

    @app.post("/v2/models/{model}/infer")
    @app.post("/v2/models/{model}/versions/{version}/infer")
    async def infer(model: str, body: InferRequest, request: Request, version: str | None = None) -> dict[str, object]:
        """Return a tensor per task for a tensor of texts: scores `[rows, labels]`, or JSON `[rows]` for spans."""
        served, tasks, current = look_up(model, version)
        texts = responses.kserve_texts(body.inputs[0])
        _check_count(scheduler, texts)
        future = scheduler.ask(texts, tasks, truncate=body.parameters.truncate, bank=served.bank)
        answers = await _answer(scheduler, future, request)
        outputs = responses.kserve_outputs(served.bank, answers)
        return {"model_name": model, "model_version": current, "id": body.id, "outputs": outputs}


def _check_count(scheduler: Scheduler, texts: Sequence[Example]) -> None:
    """Raise TooLongError if a request has more texts than `max_client_batch_size`."""
    limit = scheduler.settings.max_client_batch_size
    if len(texts) > limit:
        raise TooLongError(f"serve: {len(texts)} texts came in one request; at most {limit} are accepted.")


async def _answer(scheduler: Scheduler, future: Future[list[AnswerT]], request: Request) -> list[AnswerT]:
    """Wait for the answers to a request and return them, one per text; cancel `future` if the client disconnects.

    Raises:
        HTTPException: With status 499 if the client disconnects, 503 after `request_timeout` seconds.
        LaminaError: If the request fails.
    """
    return await wait_while_connected(request, asyncio.wrap_future(future), scheduler.settings.request_timeout)
