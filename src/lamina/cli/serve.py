"""`lamina serve`: a bank's answers over HTTP."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from lamina.cli import options
from lamina.errors import ConfigError, MissingExtraError

_KEY = "Ask for this key, as Authorization: Bearer KEY; by default the environment's LAMINA_API_KEY, or none."
_ORIGIN = "Let pages of this origin ask; once per origin."


def serve(  # noqa: PLR0913
    bank: options.SavedArgument,
    host: Annotated[str, Option(help="Address to listen at; 0.0.0.0 is every one of this machine.")] = "127.0.0.1",
    port: Annotated[int, Option(min=0, max=65535, help="0 takes one that is free.")] = 8080,
    model: options.ModelOption = None,
    device: options.DeviceOption = "auto",
    max_batch_tokens: Annotated[int, Option(min=1, help="Tokens of a pass, padding included.")] = 16384,
    max_concurrent_requests: Annotated[int, Option(min=1, help="Requests that may wait.")] = 512,
    max_concurrent_generations: Annotated[int, Option(min=1, help="Texts that are written at once.")] = 4,
    max_total_tokens: Annotated[int, Option(min=2, help="Tokens of a prompt and of what is written after it.")] = 4096,
    max_client_batch_size: Annotated[int, Option(min=1, help="Texts of a request.")] = 32,
    payload_limit: Annotated[int, Option(min=1, help="Bytes of a request.")] = 2_000_000,
    request_timeout: Annotated[float, Option(min=0.001, help="Seconds that a request may take.")] = 60.0,
    api_key: Annotated[str | None, Option(envvar="LAMINA_API_KEY", show_envvar=False, help=_KEY)] = None,
    cors_allow_origin: Annotated[list[str] | None, Option(metavar="ORIGIN", help=_ORIGIN)] = None,
) -> None:
    """Answer over HTTP with the readers of a bank: every task off one pass.

    The paths are those of text-embeddings-inference (/predict, /embed, /info, /health, /metrics), OpenAI's
    /v1/moderations and KServe's /v2; /generate and /v1/chat/completions write text with scores at every token.
    /openapi.json describes them.
    """
    try:
        import uvicorn

        from lamina.serve import Settings, create_app
        from lamina.serve.server import Server
    except ModuleNotFoundError as error:
        raise MissingExtraError.of(error, op="serve", extra="serve") from error
    from lamina.bank import ReaderBank

    settings = Settings.of(
        max_batch_tokens=max_batch_tokens,
        max_concurrent_requests=max_concurrent_requests,
        max_concurrent_generations=max_concurrent_generations,
        max_total_tokens=max_total_tokens,
        max_client_batch_size=max_client_batch_size,
        payload_limit=payload_limit,
        request_timeout=request_timeout,
        api_key=api_key,
        cors_allow_origin=tuple(cors_allow_origin or ()),
    )
    with _listening(host, port) as listener:
        target = options.open_saved(bank, base=model, device=device, writes=True)
        if not isinstance(target, ReaderBank):
            raise ConfigError(f"serve: {bank} is a whole model; a bank is served. Add a reader to one and save it.")
        app = create_app(target, settings, name=Path(bank).name)
        port = listener.getsockname()[1]
        print(f"{', '.join(target)} at http://{host}:{port} (/openapi.json says how to ask)", flush=True)
        more: Any = {"log_level": "warning", "access_log": False, "server_header": False}
        more["timeout_graceful_shutdown"] = int(settings.shutdown_timeout)
        Server(uvicorn.Config(app, host=host, port=port, **more)).run(sockets=[listener])


def _listening(host: str, port: int) -> socket.socket:
    """Take the address before anything is loaded."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        came = f"{host}:{port} cannot be listened at ({error.strerror or error})"
        raise ConfigError(f"serve: {came}. Give another --port or --host.") from None
    return listener
