"""The web application: its routes, and the responses to errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException as StarletteHTTPException

from lamina.data.encode import length_limit
from lamina.errors import ConfigError, DataError, LaminaError, LayerIndexError, StoreError, UnknownNameError
from lamina.layers.fingerprints import fingerprint_of, fingerprint_of_tensors
from lamina.layers.types import tokenizer_of
from lamina.monitors import Cascade
from lamina.serve import responses
from lamina.serve.generation.generator import TextGenerator
from lamina.serve.generation.prompts import generates_text
from lamina.serve.generation.routes import add_generation
from lamina.serve.json_body import JSONRoute
from lamina.serve.kserve import add_kserve
from lamina.serve.middleware import Aliases, RequestGuard, path_of
from lamina.serve.problems import problem_body, wait_while_connected, wrong_place
from lamina.serve.reload import Reloader, add_reader_routes
from lamina.serve.scheduler import ClosedError, OverloadedError, Scheduler
from lamina.serve.schemas import EmbedRequest, ExplainRequest, ModerationRequest, OpenAIProblem, PredictRequest, Problem
from lamina.serve.settings import Settings
from lamina.serve.telemetry import RequestRecorder, ServerMetrics
from lamina.serve.uploads import Example, TooLargeError, medium_of, readers_of
from lamina.serve.web_page import add_page, default_examples, default_title, learnt_pairs
from lamina.serve.workers import EmbedWorker, Prediction, TooLongError
from lamina.tasks import kind_of
from lamina.utils import JSON, check_types

if TYPE_CHECKING:
    from concurrent.futures import Future

    from lamina.bank import ReaderBank
    from lamina.monitors.cascade import AnyMonitor
    from lamina.serve.scheduler import ServedBank

# Errors -> HTTP status and `error_type`; the first entry that an error is an instance of counts.
_STATUS: dict[tuple[type[Exception], ...], tuple[int, str]] = {
    (TooLongError,): (413, "TooLong"),
    (TooLargeError,): (413, "Validation"),
    (OverloadedError,): (429, "Overloaded"),
    (ClosedError,): (503, "Unhealthy"),
    (ConfigError, DataError, LayerIndexError, StoreError, UnknownNameError): (422, "Validation"),
    (LaminaError,): (424, "Backend"),
}
_PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problem, "description": text}
    for status, text in {
        401: "The key is missing or wrong",
        403: "The server was started without the key that this path needs",
        404: "Nothing of that name exists",
        408: "The body did not arrive in time",
        413: "Too many texts, or texts that are too long",
        415: "The body is compressed",
        422: "The request is not valid",
        424: "The model could not answer",
        429: "Too many requests are waiting",
        503: "The server is shutting down, or took too long",
    }.items()
}
_OPENAI_PROBLEMS = {status: {**response, "model": OpenAIProblem} for status, response in _PROBLEMS.items()}
_RETRY_S = "1"  # seconds after which a client may send a request again that found the server busy
# Starlette's words for requests that no route answers -> ours
_NO_ROUTE = {
    "Not Found": "nothing is served at this path; GET /openapi.json lists the paths",
    "Method Not Allowed": "this path does not answer this method; GET /openapi.json lists the methods",
}
_FILE = 'or a file as {"image": Base64} or {"audio": Base64}'
# Path -> what its `inputs` may be. pydantic's own message names only the first of the forms that do not fit.
_RULES = {
    "/predict": f"a text, a list of texts or of pairs [[a, b], [c, d]], {_FILE}, or a list of files",
    "/explain": f"a text, a pair [a, b], {_FILE}",
}
_NO_LIMITS = {"backend", "api_key", "admin_key", "cors_allow_origin", "title", "examples"}  # other settings
# Bank -> reader name -> hash of the reader's weights, and stack name -> fingerprint of the base model's stack.
# Hashing reads all weights, and none of them changes while the bank is served.
_HASHES: WeakKeyDictionary[ServedBank, tuple[dict[str, str], dict[str, str]]] = WeakKeyDictionary()


@check_types("create_app")
def create_app(
    bank: ReaderBank,
    settings: Settings | None = None,
    *,
    name: str = "bank",
    source: str | None = None,
    readers_root: Path | None = None,
    page: bool = True,
) -> FastAPI:
    """Return the web application that answers requests with a bank, and start its scheduler's threads.

    The application's `state` has `scheduler`, `generator` and `reloader`. The first two are closed when the application
    ends.

    Args:
        bank: The readers and their model, with a processor. The bank is put into evaluation mode.
        settings: Limits, keys, and the texts of the web page. None: the defaults.
        name: Name of the bank for clients.
        source: Folder or hub id from which `app.state.reloader.reload()` loads the bank again. None: it is refused.
        readers_root: Folder of the banks whose readers may be added while the server runs. None: none may be added.
        page: Whether `/` is a page for trying the readers in a browser.

    Raises:
        ConfigError: If the bank has no reader, or an argument has a wrong type.
        LaminaError: If the backend is "onnx" or "int8" and cannot answer for the bank.
    """
    settings = settings or Settings.of()
    metrics = ServerMetrics(
        lambda: scheduler.unanswered, lambda: generator.running, lambda: generator.drift.evidence(scheduler.bank)
    )

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
        responses=_PROBLEMS,
        docs_url=None,  # FastAPI's own pages would load scripts from another site
        redoc_url=None,
        # FastAPI's own spans and logs, since 0.165, hold paths, queries and the messages of errors, which may be texts
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.scheduler, app.state.generator = scheduler, generator
    app.state.reloader = reloader = Reloader(scheduler, source, readers_root)
    app.state.max_depth, app.router.route_class = settings.max_depth, JSONRoute
    app.add_middleware(RequestGuard, settings=settings)
    if settings.cors_allow_origin:
        origins = list(settings.cors_allow_origin)
        app.add_middleware(CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(RequestRecorder, metrics=metrics)
    app.add_middleware(Aliases, root=lambda: "/generate" if generates_text(scheduler.bank) else "/predict")
    _add_problems(app)
    _add_health(app, scheduler, metrics, name)
    _add_tei(app, scheduler)
    _add_openai(app, scheduler, name)
    add_kserve(app, scheduler, name)
    add_reader_routes(app, reloader, scheduler)
    add_generation(app, scheduler, generator, name)
    if page:
        add_page(app)
    return app


def _add_problems(app: FastAPI) -> None:
    """Make `app` answer errors with JSON bodies, in the shape that clients of each path expect; see `problem_body`.

    Responses with status 429 or 503 tell clients to try again after a second.
    """

    def problem(request: Request, status: int, error: str, error_type: str, param: str | None = None) -> JSONResponse:
        body = problem_body(path_of(request.scope), error, error_type, param)
        return JSONResponse(body, status, {"retry-after": _RETRY_S} if status in (429, 503) else None)

    @app.exception_handler(RequestValidationError)
    async def _(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            told = f"the body is not JSON, from character {first['loc'][-1]} on; a JSON object in UTF-8 is needed"
            return problem(request, 422, told, "Validation")
        where, why = wrong_place(error.errors(), error.body)
        if not where:
            rule = "a JSON object is needed, sent as Content-Type: application/json"
            return problem(request, 422, f"the body: {rule}", "Validation")
        path = path_of(request.scope)
        if path in _RULES and first["loc"][1:] == ("inputs", "str"):  # it fits none of the forms
            where, why = "inputs", f"{_RULES[path]} is needed"
        why += _meant(where, error.body) if path in _RULES else ""
        return problem(request, 422, f"{where}: {why}", "Validation", where)

    @app.exception_handler(LaminaError)
    async def _(request: Request, error: LaminaError) -> JSONResponse:
        status, error_type = next(known for kinds, known in _STATUS.items() if isinstance(error, kinds))
        return problem(request, status, str(error), error_type)

    @app.exception_handler(StarletteHTTPException)
    async def _(request: Request, error: StarletteHTTPException) -> JSONResponse:
        if error.status_code == 400:
            return problem(request, 422, "the body cannot be read; JSON in UTF-8 is needed", "Validation")
        names = {404: "NotFound", 405: "NotAllowed", 503: "Unhealthy"}
        detail = _NO_ROUTE.get(str(error.detail), str(error.detail))
        response = problem(request, error.status_code, detail, names.get(error.status_code, "Validation"))
        response.headers.update(error.headers or {})
        return response


def _meant(where: str, body: object) -> str:
    """Return ". Did you mean ...?" if a body has "readers" for "tasks" or "text" for "inputs"; "" otherwise.

    `where` is the key of `body` that is wrong or missing.
    """
    wrong, right = {"readers": ("readers", "tasks"), "inputs": ("text", "inputs")}.get(where, ("", ""))
    is_wrong = isinstance(body, dict) and wrong in body and right not in body
    return f". Did you mean '{right}' in place of '{wrong}'?" if is_wrong else ""


def _add_health(app: FastAPI, scheduler: Scheduler, metrics: ServerMetrics, name: str) -> None:
    """Add the routes about the server itself: health, `/info` and `/metrics`; `name` is the bank's name in `/info`."""

    @app.get("/health")
    @app.get("/v2/health/ready")
    async def ready() -> dict[str, str | bool]:
        """Return status 200 if requests are accepted, and 503 if the server is shutting down or has failed."""
        if not scheduler.is_open:
            raise HTTPException(503, "the server accepts no requests: it is shutting down or has failed")
        return {"status": "ready", "ready": True}

    @app.get("/v2/health/live")
    async def live() -> dict[str, str | bool]:
        """Return status 200 as long as the process answers at all."""
        return {"status": "live", "live": True}

    @app.get("/info")
    async def info() -> dict[str, JSON]:
        """Return facts about the bank, its model, its tasks, monitors and stacks, and all limits of the server.

        A task has, among others, its labels, layers and number of parameters.
        """
        return await run_in_threadpool(info_of, scheduler.served, scheduler.settings, name, scheduler.engine.name)

    @app.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def prometheus(request: Request) -> Response:
        """Return times and counts of requests and batches, in the format of Prometheus that the client accepts."""
        text, content_type = metrics.text(request.headers.get("accept", ""))
        return Response(text, headers={"content-type": content_type})


def _add_tei(app: FastAPI, scheduler: Scheduler) -> None:
    """Add the routes in the shapes of text-embeddings-inference: `/predict`, `/explain` and `/embed`."""
    timeout_s = scheduler.settings.request_timeout

    @app.post("/predict")
    async def predict(body: PredictRequest, request: Request) -> object:
        """Return the answers of the readers about one text, pair or file, or the list of answers about a list of them.

        Classes come best first, as in text-embeddings-inference. An answer is an object with a key for each task. But
        if `tasks` is one name, not in a list, or is left out and the bank has one reader, only that task's value comes.
        """
        only_task = body.tasks if isinstance(body.tasks, str) else None
        tasks = [only_task] if only_task is not None else body.tasks
        bank, options = scheduler.bank, body.parameters  # another bank may be served before the answer comes
        texts, is_single = responses.examples_of(body.inputs, lambda: responses.reads_pairs(bank, tasks))
        scheduler.check_count(texts)
        if options.function_to_apply is not None:
            responses.check_function(bank, readers_of(bank, tasks, texts), options.function_to_apply)
        raw = body.raw_scores or options.function_to_apply == "none"
        ask = partial(scheduler.ask, tasks=tasks, raw=raw, truncate=body.cuts, bank=bank)
        if tasks is None and len(bank) == 1:
            only_task = next(iter(bank))
        found = await _predictions(scheduler, ask, texts, request)
        answers = [responses.tei(answer, only_task, options.top_k) for answer in found]
        return answers[0] if is_single else answers

    @app.post("/explain")
    async def explain(body: ExplainRequest, request: Request) -> Mapping[str, object]:
        """Return for each task the share of each layer in its fusion, and of each layer and token in its answer.

        Shares that cannot be computed are null. "seconds" has two times of a pass over this text alone, up to the
        highest layer that is read: without the readers, and with them. Only the first window of a text is explained.
        """
        (text,), _ = responses.examples_of([body.inputs] if isinstance(body.inputs, list) else body.inputs, bool)
        future = scheduler.explain(text, body.tasks, truncate=body.cuts)
        (explanation,) = await wait_while_connected(request, future, timeout_s)
        return explanation

    @app.post("/embed")
    async def embed(body: EmbedRequest, request: Request) -> list[list[float]]:
        """Return a vector for each text: the mean of one layer's state over the text's tokens; see `EmbedRequest`."""
        texts = [body.inputs] if isinstance(body.inputs, str) else body.inputs
        scheduler.check_count(texts)
        bank, layer, normalize = key = scheduler.bank, body.layer, body.normalize
        make = partial(EmbedWorker, bank, layer, normalize=normalize)
        future = scheduler.submit(texts, key, make, body.cuts)
        return await wait_while_connected(request, future, timeout_s)


def _add_openai(app: FastAPI, scheduler: Scheduler, name: str) -> None:
    """Add the routes in the shapes of OpenAI's moderations and models; the only model is the bank, called `name`."""
    model = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "lamina"}

    @app.post("/v1/moderations", responses=_OPENAI_PROBLEMS)
    async def moderations(body: ModerationRequest, request: Request) -> Mapping[str, object]:
        """Return by which yes/no or multi-label tasks each text is flagged, in the shape of OpenAI's endpoint.

        Status 422 if the bank has no such task.
        """
        texts = body.texts()
        scheduler.check_count(texts)
        bank = scheduler.bank
        categories = responses.categories_of(bank)
        future = scheduler.ask(texts, [*categories], truncate=body.cuts, bank=bank)
        answers = await wait_while_connected(request, future, scheduler.settings.request_timeout)
        return responses.moderation(answers, categories, body.model or name)

    @app.get("/v1/models", responses=_OPENAI_PROBLEMS)
    async def models() -> dict[str, object]:
        """Return the list of models, which has the bank as its only entry."""
        return {"object": "list", "data": [model]}

    @app.get("/v1/models/{model_id}", responses=_OPENAI_PROBLEMS)
    async def one_model(model_id: str) -> dict[str, object]:
        """Return the entry of the bank in the list of models; status 404 for another name."""
        if model_id != name:
            raise HTTPException(404, f"there is no model '{model_id}'; '{name}' is served")
        return {**model}


async def _predictions(
    scheduler: Scheduler,
    ask: Callable[[Sequence[Example]], Future[list[Prediction]]],
    examples: Sequence[Example],
    request: Request,
) -> list[Prediction]:
    """Return the answers about the examples of a request, in their order.

    `ask` queues examples and returns a future of their answers. It is called once for single texts or files and once
    for pairs, which cannot share a batch; if one of the calls fails, the other is cancelled. Raises the errors of `ask`
    and of the answers, and HTTPException with status 499 if the client disconnects or 503 if the answers come too late.
    """
    pairs = [row for row, example in enumerate(examples) if isinstance(example, tuple)]
    singles = [row for row, example in enumerate(examples) if not isinstance(example, tuple)]
    parts = [rows for rows in (singles, pairs) if rows]
    futures: list[Future[list[Prediction]]] = []
    try:
        futures.extend(ask([examples[row] for row in rows]) for rows in parts)
    except LaminaError:
        for future in futures:
            future.cancel()
        raise
    waiting = asyncio.gather(*map(asyncio.wrap_future, futures))
    answered = await wait_while_connected(request, waiting, scheduler.settings.request_timeout)
    answers = dict(zip(chain.from_iterable(parts), chain.from_iterable(answered), strict=True))
    return [answers[row] for row in range(len(examples))]


def info_of(served: ServedBank, settings: Settings, name: str, backend: str = "torch") -> dict[str, JSON]:
    """Return the public facts about a server: its bank, model, tasks and limits, without the API keys.

    "max_input_length" is the number of tokens that the model reads, and a task's "max_length" the number that its
    reader reads. A task's "pairs" tells whether its reader was trained on pairs of texts; None if that is not known.

    Args:
        served: The bank, with versions.
        settings: The server's settings.
        name: Name of the bank.
        backend: The backend that answers now: "torch", "onnx" or "int8".
    """
    bank = served.bank
    limit = length_limit(bank.model, bank.processor)
    return {
        "name": name,
        "title": settings.title or default_title(bank, name),
        "examples": default_examples(bank) if settings.examples is None else settings.examples,
        "version": version("lamina"),
        "bank_version": served.number,
        "model_type": bank.model.config.model_type,
        "dtype": str(bank.model.dtype).removeprefix("torch."),
        "device": bank.device.type,
        "max_input_length": limit,
        "writes_text": generates_text(bank),
        "chats": generates_text(bank) and bool(tokenizer_of(bank.processor).chat_template),
        "monitors": {key: _monitor_info(bank, monitor) for key, monitor in bank.monitors.items()},
        "stacks": {name: {"layers": stack.layers, "width": stack.width} for name, stack in bank.stacks.items()},
        "tasks": {task: _task_info(served, task, limit) for task in bank},
        "backend": backend,
        **settings.model_dump(exclude=_NO_LIMITS),
    }


def _task_info(served: ServedBank, task: str, limit: int) -> dict[str, JSON]:
    """Return what `/info` says about the reader `task`; `limit` is the model's maximum number of tokens."""
    reader, (weights, fingerprints) = served.bank[task], _hashes(served)
    head = reader.config.head
    return {
        "kind": head.kind,
        "problem_type": head.problem_type,
        "reads": medium_of(served.bank, task),
        "pairs": learnt_pairs(reader),
        "max_length": reader.info.get("max_length") or limit,
        "has_classes": kind_of(head.kind).has_classes,
        "labels": list(head.labels),
        "stack": reader.stack,
        "layers": list(reader.layers),
        "parameters": sum(parameter.numel() for parameter in reader.parameters()),
        "version": served.versions[task],
        "weights": weights[task],
        "metric": reader.info.get("metric"),
        "fingerprint": fingerprints[reader.stack],
    }


def _monitor_info(bank: ReaderBank, monitor: AnyMonitor) -> dict[str, JSON]:
    """Return what `/info` says about a saved monitor: readers, flagged labels, scale of scores, threshold and rates.

    Scores from 0 to 1 are "bounded". A cascade has the readers of both monitors, and all else from the second one. The
    threshold is None if there is none, and the rates are None if it was not calibrated.
    """
    own = monitor.second if isinstance(monitor, Cascade) else monitor
    rates = monitor.calibration
    problem = bank[monitor.reader].config.head.problem_type
    return {
        "readers": list(monitor.readers),
        "flag": list(own.flag),
        "scale": own.scale,
        "bounded": own.scale == "probability" and problem != "regression",
        "threshold": monitor.threshold,
        "false_positive_rate": rates and rates.false_positive_rate,
        "recall": rates and rates.recall,
    }


def _hashes(served: ServedBank) -> tuple[dict[str, str], dict[str, str]]:
    """Return reader name -> hash of its weights, and stack name -> fingerprint, for stacks that a reader reads.

    Both are computed once per served bank.
    """
    if served not in _HASHES:
        bank = served.bank
        weights = {task: fingerprint_of_tensors(bank[task].state_dict().items())[:16] for task in bank}
        stacks = dict.fromkeys(bank[task].stack for task in bank)
        _HASHES[served] = weights, {stack: fingerprint_of(bank.stacks[stack]) for stack in stacks}
    return _HASHES[served]
