"""`lamina serve`: serve the predictions of a bank over HTTP."""

from __future__ import annotations

import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Annotated

from typer import Option

from lamina.cli import shared_options as options
from lamina.errors import ConfigError, MissingExtraError, first_line
from lamina.utils import is_dir, parse_json

if TYPE_CHECKING:
    from fastapi import FastAPI

    from lamina.bank import ReaderBank
    from lamina.serve import Settings
    from lamina.serve.cluster import Replicas

_KEY = "Key that clients must send as Authorization: Bearer KEY. Default: $LAMINA_API_KEY, or no key is needed."
_ADMIN = (
    "Key that allows clients to change the readers while the server runs. Default: $LAMINA_ADMIN_KEY, or nobody may."
)
_ROOT = (
    "Folder of saved banks whose readers clients may add while the server runs. "
    "Needs --admin-key; nothing outside the folder is read."
)
_RAY = "Serve with replicas on Ray Serve: on this machine (local), on the running cluster (auto) or at HOST:PORT."
_PASSES = (
    "Number of passes of the model that run at once, each with OMP_NUM_THREADS threads. "
    "Default: as many as the CPU cores suffice for, or 1 on a GPU and with --ray."
)
_REQUESTS = "Maximum number of requests at a time; further requests are rejected."
_GENERATIONS = "Maximum number of texts that are generated at a time."
_TOTAL_TOKENS = "Maximum tokens of a prompt and its generated text together."
_HEADER_TIMEOUT = "Maximum time until the headers of a request have come, in seconds."
_MAX_REPLICAS = "With --ray: maximum number of replicas while requests wait. Default: --replicas."
_REQUEST_TOKENS = "Maximum tokens of all texts of a request together; a text that is cut counts as far as it is read."
_TITLE = "Title of the page. Default: the names of the bank and its model."
_EXAMPLE = 'Text that the page offers as an example, or a pair as ["A", "B"]; may be repeated. Default: three that fit.'
_ORIGIN = "Origin, such as https://example.org, whose web pages may send requests (CORS); may be repeated."


def serve(  # noqa: PLR0913
    bank: options.SavedArgument,
    host: Annotated[str, Option(help="Address to listen on; 0.0.0.0: all addresses of this machine.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0: any free port.")] = 8080,
    model: options.ModelOption = None,
    device: options.DeviceOption = "auto",
    backend: options.BackendOption = options.Backend.AUTO,
    max_batch_tokens: Annotated[int, Option(min=1, help="Maximum tokens per pass, padding included.")] = 16384,
    max_concurrent_passes: Annotated[int | None, Option(min=1, help=_PASSES)] = None,
    max_concurrent_requests: Annotated[int, Option(min=1, help=_REQUESTS)] = 512,
    max_concurrent_generations: Annotated[int, Option(min=1, help=_GENERATIONS)] = 4,
    max_total_tokens: Annotated[int, Option(min=2, help=_TOTAL_TOKENS)] = 4096,
    max_client_batch_size: Annotated[int, Option(min=1, help="Maximum texts per request.")] = 32,
    max_request_tokens: Annotated[int, Option(min=1, help=_REQUEST_TOKENS)] = 65536,
    payload_limit: Annotated[int, Option(min=1, help="Maximum size of a request in bytes.")] = 2_000_000,
    request_timeout: Annotated[float, Option(min=0.001, help="Maximum time of a request in seconds.")] = 60.0,
    header_timeout: Annotated[float, Option(min=0.001, help=_HEADER_TIMEOUT)] = 10.0,
    api_key: Annotated[str | None, Option(envvar="LAMINA_API_KEY", show_envvar=False, help=_KEY)] = None,
    admin_key: Annotated[str | None, Option(envvar="LAMINA_ADMIN_KEY", show_envvar=False, help=_ADMIN)] = None,
    readers_root: Annotated[Path | None, Option(metavar="FOLDER", help=_ROOT)] = None,
    cors_allow_origin: Annotated[list[str] | None, Option(metavar="ORIGIN", help=_ORIGIN)] = None,
    ray: Annotated[str | None, Option(metavar="local|auto|ADDRESS", help=_RAY)] = None,
    replicas: Annotated[int, Option(min=1, help="With --ray: number of replicas.")] = 1,
    max_replicas: Annotated[int | None, Option(min=1, help=_MAX_REPLICAS)] = None,
    replica_cpus: Annotated[float, Option(min=0.01, help="With --ray: CPU cores per replica.")] = 1.0,
    replica_gpus: Annotated[float, Option(min=0, help="With --ray: GPUs per replica; may be a fraction.")] = 0.0,
    page: Annotated[bool, Option("--page/--no-page", help="Serve a page for trying the readers at /.")] = True,
    title: Annotated[str | None, Option(help=_TITLE)] = None,
    example: Annotated[list[str] | None, Option(metavar="TEXT", help=_EXAMPLE)] = None,
) -> None:
    """Serve the readers of a bank over HTTP, all tasks in one pass of the model.

    The server answers the paths of text-embeddings-inference (/predict, /embed, /info, /health, /metrics), OpenAI's
    /v1/moderations and KServe's /v2. /generate and /v1/chat/completions generate text, with the readers' scores at
    every token. /openapi.json describes all of them. Without --ray, the signal SIGHUP reloads the bank from its folder.
    Wrong input ends with one sentence and exit code 2.
    """
    try:
        import uvicorn  # noqa: F401  a missing package must be found although modules that use it may be loaded

        from lamina.serve import Settings
        from lamina.serve.cluster import Replicas
        from lamina.serve.server import server_of
    except ModuleNotFoundError as error:
        raise MissingExtraError.of(error, op="serve", extra="serve") from error
    if readers_root is not None and not readers_root.is_dir():
        raise ConfigError(f"serve: --readers-root is {readers_root}, which is no folder.")
    if readers_root is not None and admin_key is None:
        raise ConfigError(
            "serve: --readers-root was given, but not --admin-key; without a key nobody may change the readers."
        )
    if not page and (title is not None or example):
        raise ConfigError("serve: --title and --example are for the page, and --no-page was given. Leave one out.")
    settings = Settings.of(
        backend=backend.value,
        max_batch_tokens=max_batch_tokens,
        max_concurrent_passes=max_concurrent_passes,
        max_concurrent_requests=max_concurrent_requests,
        max_concurrent_generations=max_concurrent_generations,
        max_total_tokens=max_total_tokens,
        max_client_batch_size=max_client_batch_size,
        max_request_tokens=max_request_tokens,
        payload_limit=payload_limit,
        request_timeout=request_timeout,
        header_timeout=header_timeout,
        api_key=api_key,
        admin_key=admin_key,
        cors_allow_origin=tuple(cors_allow_origin or ()),
        title=title,
        examples=None if example is None else tuple(_example(text) for text in example),
    )
    number = Replicas(replicas, max_replicas, replica_cpus, replica_gpus)
    if ray is None and number != Replicas():
        raise ConfigError("serve: options of replicas were given, but not --ray; replicas run on Ray Serve.")
    if ray is not None:
        if admin_key is not None or readers_root is not None:
            rule = "a change would reach only one replica. Run the command with the new bank to replace all of them"
            raise ConfigError(f"serve: --ray goes with neither --admin-key nor --readers-root; {rule}.")
        saved = str(Path(bank).resolve()) if is_dir(Path(bank)) else bank  # replicas have another current folder
        _opened(saved, model, device)  # an error in the bank is then raised here, not in the replicas
        if max_concurrent_passes is None:  # a replica does not know how many cores the others on its node use
            settings = settings.model_copy(update={"max_concurrent_passes": 1})
        _on_ray(partial(_application, saved, model, device, settings, page=page), settings, number, ray, (host, port))
        return
    with _listening(host, port) as listener:
        app = _application(bank, model, device, settings, source=bank, readers_root=readers_root, page=page)
        logging.getLogger("lamina.serve").setLevel(logging.INFO)  # a successful reload is logged at this level
        if hasattr(signal, "SIGHUP"):  # not on Windows
            signal.signal(signal.SIGHUP, lambda *_: Thread(target=app.state.reloader.try_reload, daemon=True).start())
        port = listener.getsockname()[1]
        hints = "a page to try them; " * page + "/openapi.json describes the requests"
        shown = f"[{host}]" if ":" in host else host  # an address of IPv6
        print(f"{', '.join(app.state.scheduler.bank)} at http://{shown}:{port} ({hints})", flush=True)
        gc.collect()
        gc.freeze()  # a full collection would look at all modules and the model, and hold every request meanwhile
        # uvicorn raises the signal again after its shutdown, which would end the process as if it had been killed
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        server_of(app, settings, host=host, port=port).run(sockets=[listener])


def _example(text: str) -> str | tuple[str, str]:
    """Return an --example as a pair if it is a JSON list of two strings, else the text unchanged."""
    try:
        match parse_json(text):
            case [str(first), str(second)]:
                return first, second
    except ValueError:
        pass  # an ordinary text
    return text


def _application(
    bank: str,
    model: str | None,
    device: str,
    settings: Settings,
    *,
    source: str | None = None,
    readers_root: Path | None = None,
    page: bool = True,
) -> FastAPI:
    """Load a saved bank (folder or hub id), and return the web application that serves it.

    `model` replaces the base model that the bank names, and the device "auto" is a GPU if there is one. The other
    arguments are those of `create_app`. Raises LaminaError if the bank cannot be loaded or served.
    """
    from lamina.serve import create_app

    return create_app(
        _opened(bank, model, device),
        settings,
        name=Path(bank).resolve().name,
        source=source,
        readers_root=readers_root,
        page=page,
    )


def _opened(bank: str, model: str | None, device: str) -> ReaderBank:
    """Load a bank and its model on a device; see `_application` for the arguments.

    Raises ConfigError if `bank` is a whole model, or the device cannot be used; other errors are those of `open_on`.
    """
    from lamina.bank import ReaderBank

    target = options.open_on(bank, base=model, device=device, writes=True)
    if not isinstance(target, ReaderBank):
        hint = "Add a reader to a ReaderBank of the model and save it."
        raise ConfigError(f"serve: {bank} is a whole model; only banks are served. {hint}")
    return target


def _on_ray(
    build: Callable[[], FastAPI], settings: Settings, replicas: Replicas, ray: str, address: tuple[str, int]
) -> None:
    """Deploy replicas of the application that `build` returns on Ray Serve, and print their address; see `deployed`.

    `ray` is the cluster: "local", "auto" or HOST:PORT. "local" starts a cluster that ends with this process, so the
    function waits for SIGTERM or SIGINT; otherwise it returns and the replicas stay. Raises ConfigError if the port of
    `address` is 0 or, with "local", is in use.
    """
    from lamina.prediction.ray_workers import LOCAL
    from lamina.serve.cluster import deployed

    host, port = address
    if port == 0:
        raise ConfigError("serve: port is 0; with --ray all nodes listen on one port. Name it with --port.")
    if ray == LOCAL:
        _listening(host, port).close()  # raises an error if the port is in use
    with deployed(build, settings, replicas, address=ray, host=host, port=port):
        print(f"{replicas.least} replicas at http://{host}:{port} (/openapi.json describes the requests)", flush=True)
        if ray == LOCAL:
            ended = Event()
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: ended.set())
            ended.wait()


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address. Port 0: any free port.

    Raises ConfigError if the address cannot be used.
    """
    listener = None
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except (OSError, UnicodeError) as error:  # a name that cannot be that of a host is a UnicodeError
        if listener is not None:
            listener.close()
        problem = f"cannot listen on {host}:{port} ({first_line(error)})"
        raise ConfigError(f"serve: {problem}. Give another --port or --host.") from None
    return listener
