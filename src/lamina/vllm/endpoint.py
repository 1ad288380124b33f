"""The endpoint plugin of vLLM: a route that says which readers and monitors a server runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, final

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from lamina.vllm.layout import KEY
from lamina.vllm.plugin import layout_of

if TYPE_CHECKING:
    from argparse import Namespace

    from starlette.datastructures import State

    from lamina.utils import JSON
    from lamina.vllm.engine_types import Configured
    from lamina.vllm.layout import Layout

ROUTE = "/v1/lamina"  # vLLM asks for its API key below /v1


@final
class ReadersEndpoint:
    """Adds `GET /v1/lamina` to a server that was started with a bank.

    vLLM makes an instance in each server whose environment variable VLLM_PLUGINS names "lamina", and calls its methods.
    Servers without a bank get no route.

    Attributes:
        name: Name of the plugin.
        required_tasks: A server must have one of these tasks of vLLM; they are the tasks of engines that run readers.
    """

    name = "lamina"
    required_tasks = ("generate", "embed", "classify", "token_embed", "token_classify", "embed&token_classify")

    def attach_router(self, app: FastAPI) -> None:
        """Add the route, if the server was started with a bank."""
        settings = getattr(app.state.args, "additional_config", None)
        if isinstance(settings, Mapping) and settings.get(KEY) is not None:
            app.add_api_route(ROUTE, _show_readers, methods=["GET"])

    async def init_state(self, engine_client: Configured, state: State, args: Namespace) -> None:  # noqa: ARG002
        """Store what the route returns in the server's `state`, if the server was started with a bank."""
        if (layout := layout_of(engine_client.vllm_config)) is not None:
            state.lamina = describe(layout)


async def _show_readers(request: Request) -> JSONResponse:
    """Answer `GET /v1/lamina` with the readers and monitors of the server."""
    return JSONResponse(request.app.state.lamina)


def describe(layout: Layout) -> dict[str, JSON]:
    """Return the readers and monitors of an engine as JSON-ready values.

    Returns:
        "readers": reader name -> its labels, its problem type, and the keys of its answers. "monitors": monitor name ->
        the names of its readers, and its threshold. "on_flag": what happens when a monitor flags a request.
    """
    readers: dict[str, JSON] = {
        name: {"labels": list(r.head.labels), "problem_type": r.head.problem_type, "answers": list(r.answer_keys)}
        for name, r in layout.readers.items()
    }
    monitors: dict[str, JSON] = {
        name: {"readers": list(monitor.readers), "threshold": monitor.threshold}
        for name, monitor in layout.monitors.items()
    }
    return {"readers": readers, "monitors": monitors, "on_flag": layout.on_flag}
