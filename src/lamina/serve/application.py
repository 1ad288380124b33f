"""The application: what may be asked over HTTP, and how it is answered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from lamina.serve.middleware import RequestGuard
from lamina.serve.prometheus import RequestMetrics, ServerMetrics
from lamina.serve.reload import Reloader, add_reader_routes
from lamina.serve.scheduler import ClosedError, OverloadedError, Scheduler, ServedBank
from lamina.serve.schemas import EmbedRequest, ExplainRequest, InferRequest, ModerationRequest, PredictRequest, Problem
from lamina.serve.settings import Settings
from lamina.serve.uploads import TooLargeError
from lamina.serve.web_page import add_page
from lamina.serve.workers import EmbedWorker, TooLongError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from lamina.bank import ReaderBank

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
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": text}
    for status, text in {
        401: "The key is missing or wrong",
        403: "The server was started without the key that this needs",
        404: "There is nothing of that name",
        408: "The body did not come in time",
        413: "Too many texts, or too long",
        422: "The request does not fit",
        424: "The model could not answer",
        429: "Too many requests wait",
        503: "The server is about to end, or took too long",
    }.items()
}

_FILE = 'or a file as {"image": Base64} or {"audio": Base64}'
_RULES = {  # what inputs are; pydantic would name the first of the forms that did not fit
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
    """Make the application that answers for a bank.

    Args:
        bank: The readers and their model, with a processor.
        settings: The limits.
        name: Of the bank, as a model of KServe's.
        source: Folder or hub id that the bank was loaded from, for `app.state.reloader.reload()`.
        readers_root: The folder under which readers may be taken from while the server runs.
        page: Whether there is a page to try it at `/`.

    Raises:
        ConfigError: If the bank has no reader.
    """
    settings = settings or Settings.of()
    figures = ServerMetrics(lambda: scheduler.unanswered, lambda: writer.running)
    scheduler = Scheduler(bank, settings, figures.tell)
    writer = TextGenerator(scheduler, figures.wrote)

    @asynccontextmanager
    async def life(_app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(writer.close)
        await asyncio.to_thread(scheduler.close)

    pages: Any = {"docs_url": None, "redoc_url": None}  # they would fetch scripts from elsewhere
    app = FastAPI(title="Lamina", summary="Every answer off one pass.", lifespan=life, responses=_PROBLEMS, **pages)
    app.state.scheduler, app.state.writer = scheduler, writer
    app.state.reloader = live = Reloader(scheduler, source, readers_root)
    app.add_middleware(RequestGuard, settings=settings)
    if settings.cors_allow_origin:
        origins = list(settings.cors_allow_origin)
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(RequestMetrics, figures=figures)
    _add_problems(app)
    _add_health(app, scheduler, figures, name)
    _add_tei(app, scheduler)
    _add_moderations(app, scheduler)
    _add_kserve(app, scheduler, name)
    add_reader_routes(app, live, scheduler)
    add_generation(app, scheduler, writer, name)
    if page:
        add_page(app)
    return app


def _add_problems(app: FastAPI) -> None:
    """Say what is wrong as text-embeddings-inference does."""

    def problem(status: int, error: str, error_type: str) -> JSONResponse:
        return JSONResponse({"error": error, "error_type": error_type}, status)

    @app.exception_handler(RequestValidationError)
    async def _(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            rule = "a JSON object in UTF-8 is needed"
            return problem(422, f"the body is no JSON, from character {first['loc'][-1]} on; {rule}", "Validation")
        where = ".".join(str(part) for part in first["loc"][1:])
        if not where:
            rule = "a JSON object is needed, sent as Content-Type: application/json"
            return problem(422, f"the body: {rule}", "Validation")
        if where == "inputs.str" and request.url.path in _RULES:
            return problem(422, f"inputs: {_RULES[request.url.path]} is needed", "Validation")
        return problem(422, f"{where}: {first['msg']}", "Validation")

    @app.exception_handler(LaminaError)
    async def _(_request: Request, error: LaminaError) -> JSONResponse:
        kind = next(kind for kind in _STATUS if isinstance(error, kind))
        return problem(_STATUS[kind][0], str(error), _STATUS[kind][1])

    @app.exception_handler(StarletteHTTPException)
    async def _(_request: Request, error: StarletteHTTPException) -> JSONResponse:
        if error.status_code == 400:
            return problem(422, "the body cannot be read; JSON in UTF-8 is needed", "Validation")
        names = {404: "NotFound", 405: "NotAllowed", 503: "Unhealthy"}
        response = problem(error.status_code, str(error.detail), names.get(error.status_code, "Validation"))
        response.headers.update(error.headers or {})
        return response


def _add_health(app: FastAPI, scheduler: Scheduler, figures: ServerMetrics, name: str) -> None:
    @app.get("/health")
    @app.get("/v2/health/ready")
    async def ready() -> dict[str, str]:
        """Whether requests are accepted."""
        if not scheduler.is_open:
            raise HTTPException(503, "the server does not accept requests")
        return {"status": "ready"}

    @app.get("/v2/health/live")
    async def live() -> dict[str, str]:
        """Whether the process answers at all."""
        return {"status": "live"}

    @app.get("/info")
    async def info() -> dict[str, Any]:
        """The tasks with their labels, layers and parameters, and all limits."""
        return await run_in_threadpool(info_of, scheduler.served, scheduler.settings, name)

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Times and counts, for Prometheus."""
        return Response(figures.text(), media_type="text/plain; version=0.0.4")


def _add_tei(app: FastAPI, scheduler: Scheduler) -> None:
    @app.post("/predict")
    async def predict(asked: PredictRequest, request: Request) -> Any:
        """What the readers say of one text or pair, or of each of several.

        Classes come best first, as text-embeddings-inference has them. With several tasks the answer is an object with
        a key for each; with one reader, or one name as `tasks`, it is that task's answer alone.
        """
        texts, is_single = responses.examples_of(asked.inputs)
        _check_count(scheduler, texts)
        alone = asked.tasks if isinstance(asked.tasks, str) else None
        tasks = [alone] if alone is not None else asked.tasks
        bank = scheduler.bank
        future = scheduler.ask(texts, tasks, raw=asked.raw_scores, truncate=asked.truncate, bank=bank)
        if alone is None and tasks is None and len(bank) == 1:
            alone = next(iter(bank))
        found = [responses.tei(answer, alone) for answer in await _answer(scheduler, future, request)]
        return found[0] if is_single else found

    @app.post("/explain")
    async def explain(asked: ExplainRequest, request: Request) -> dict[str, Any]:
        """What the readers took their answers from: layers, and their tokens where a reader's fusion can say.

        "seconds" are those of a pass of this text alone, up to the highest layer that is read, without and with the
        readers. Of a text in several windows it is the first.
        """
        (text,), _ = responses.examples_of(asked.inputs)
        (found,) = await _answer(scheduler, scheduler.explain(text, asked.tasks, truncate=asked.truncate), request)
        return found

    @app.post("/embed")
    async def embed(asked: EmbedRequest, request: Request) -> list[list[float]]:
        """The mean over the tokens of one layer's state, for each text."""
        texts = [asked.inputs] if isinstance(asked.inputs, str) else asked.inputs
        _check_count(scheduler, texts)

        bank = scheduler.bank

        def make() -> EmbedWorker:
            return EmbedWorker(bank, asked.layer, normalize=asked.normalize)

        future = scheduler.submit(texts, (bank, asked.layer, asked.normalize), make, asked.truncate)
        return await _answer(scheduler, future, request)


def _add_moderations(app: FastAPI, scheduler: Scheduler) -> None:
    @app.post("/v1/moderations")
    async def moderations(asked: ModerationRequest, request: Request) -> dict[str, Any]:
        """Whether each text is flagged, by every yes/no task of the bank, in the shape of OpenAI's endpoint."""
        texts = [asked.input] if isinstance(asked.input, str) else asked.input
        _check_count(scheduler, texts)
        bank = scheduler.bank
        categories = responses.categories_of(bank)
        found = await _answer(
            scheduler, scheduler.ask(texts, [*categories], truncate=asked.truncate, bank=bank), request
        )
        return responses.moderation([responses.flags(answer, categories) for answer in found], asked.model or "lamina")


def _add_kserve(app: FastAPI, scheduler: Scheduler, name: str) -> None:
    def found(model: str, version: str | None) -> tuple[ServedBank, list[str] | None, str]:
        """What is served, the readers of a model (None: all), and its version."""
        served = scheduler.served
        if model != name and model not in served.bank:
            known = ", ".join([name, *served.bank])
            raise HTTPException(404, f"there is no model '{model}'; there are {known}")
        now = str(served.number if model == name else served.versions[model])
        if version not in (None, now):
            raise HTTPException(404, f"there is no version '{version}' of model '{model}'; {now} is served")
        return served, None if model == name else [model], now

    @app.get("/v2")
    async def server() -> dict[str, Any]:
        """What this server is."""
        return {"name": "lamina", "version": "2", "extensions": []}

    @app.get("/v2/models/{model}")
    @app.get("/v2/models/{model}/versions/{version}")
    async def metadata(model: str, version: str | None = None) -> dict[str, Any]:
        """A reader's inputs and outputs; those of all under the bank's name."""
        served, tasks, now = found(model, version)
        return responses.kserve_metadata(served.bank, model, tasks, now)

    @app.get("/v2/models/{model}/ready")
    @app.get("/v2/models/{model}/versions/{version}/ready")
    async def model_ready(model: str, version: str | None = None) -> dict[str, Any]:
        """Whether it answers."""
        found(model, version)
        return {"name": model, "ready": scheduler.is_open}

    @app.post("/v2/models/{model}/infer")
    @app.post("/v2/models/{model}/versions/{version}/infer")
    async def infer(model: str, asked: InferRequest, request: Request, version: str | None = None) -> dict[str, Any]:
        """Scores for a tensor of texts: a tensor `[rows, labels]` for each task, of spans one of JSON `[rows]`."""
        served, tasks, now = found(model, version)
        texts = responses.kserve_texts(asked.inputs[0])
        _check_count(scheduler, texts)
        future = scheduler.ask(texts, tasks, truncate=asked.parameters.truncate, bank=served.bank)
        said = await _answer(scheduler, future, request)
        outputs = responses.kserve_outputs(served.bank, said)
        return {"model_name": model, "model_version": now, "id": asked.id, "outputs": outputs}


def _check_count(scheduler: Scheduler, texts: Sequence[Any]) -> None:
    most = scheduler.settings.max_client_batch_size
    if len(texts) > most:
        raise TooLongError(f"serve: {len(texts)} texts came in one request; {most} are taken.")


async def _answer(scheduler: Scheduler, future: Future[list[Any]], request: Request) -> list[Any]:
    return await wait_while_connected(request, asyncio.wrap_future(future), scheduler.settings.request_timeout)
