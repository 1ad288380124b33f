"""The same application as replicas on Ray Serve, on this machine or many."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from fastapi import FastAPI

from lamina.errors import ConfigError, MissingExtraError, first_line
from lamina.prediction.ray_workers import LOCAL, connected
from lamina.serve.application import create_app
from lamina.serve.settings import Settings
from lamina.store import load, load_bank
from lamina.store.models import writing_class
from lamina.utils import check_range

APPLICATION = "lamina"  # its name on a cluster; under this name it is replaced, a replica after the other
_QUIET = {"log_level": "WARNING", "enable_access_log": False}
_BUSY = 0.7  # the share of what one replica may hold that has another one start


@dataclass(frozen=True)
class Replicas:
    """How many processes answer.

    Args:
        least: Replicas that are there at any time.
        most: Up to how many there are while requests wait; None: no more than `least`.
        cpus: Of each.
        gpus: Of each.
    """

    least: int = 1
    most: int | None = None
    cpus: float = 1.0
    gpus: float = 0.0

    def __post_init__(self) -> None:
        check_range("serve", "replicas", self.least, 1)
        check_range("serve", "max_replicas", self.most, self.least)


@contextmanager
def deployed(
    build: Callable[[], FastAPI], settings: Settings, replicas: Replicas, *, address: str, host: str, port: int
) -> Iterator[None]:
    """Have replicas on Ray Serve answer at a port, each with an application of its own.

    On a cluster that runs already they stay when this ends, and those of before are replaced one after the other while
    the rest answer. A replica that dies is started anew.

    Args:
        build: Makes the application, in each replica; it is sent there, and what it holds.
        settings: The limits of each replica.
        replicas: How many.
        address: "local": a cluster that is started here and ends with this; "auto": the one that runs here; HOST:PORT.
        host: Where every node of the cluster listens.
        port: The same.

    Raises:
        MissingExtraError: If Ray Serve is not installed.
        ConfigError: If no cluster answers, or the replicas do not start.
    """
    serve, deployment = _ray_serve(), _deployment(build, settings, replicas)
    with connected(_ray(), address, "serve"):
        _check_room(replicas)
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        serve.start(http_options={"host": host, "port": port}, logging_config=_QUIET)
        try:
            serve.run(deployment.bind(), name=APPLICATION, route_prefix="/")
        except RuntimeError as error:
            raise ConfigError(
                f"serve: the replicas did not start ({first_line(error)}). Ray's logs say why."
            ) from error
        try:
            yield
        finally:
            if address == LOCAL:
                serve.shutdown()


def application(args: Mapping[str, Any]) -> Any:
    """An application for Ray Serve's own configuration, as `import_path: lamina.serve.cluster:application`.

    Args:
        args: `bank`, a folder or hub id that every node can read; `model`, its base if that is not the one that the
            bank names; and limits as of `Settings`. The key is the environment's LAMINA_API_KEY. How many replicas
            there are is told under `deployments`, for the deployment `bank`.

    Raises:
        ConfigError: If there is no `bank`, or a limit cannot be.
    """
    known = dict(args)
    bank, model = known.pop("bank", None), known.pop("model", None)
    if not isinstance(bank, str):
        raise ConfigError("serve: args has no bank; give its folder, or its id on the hub.")
    for key in ("api_key", "admin_key"):
        if key in known:
            rule = "the key of those who ask is the environment's LAMINA_API_KEY, and a replica is not changed alone"
            raise ConfigError(f"serve: args has {key}; {rule}.")
    settings = Settings.of(**known)

    def build() -> FastAPI:
        base, processor = (None, None) if model is None else load(model, writing_class(model))
        served = load_bank(bank, base, processor, writes=True).to("cuda" if torch.cuda.is_available() else "cpu")
        own = settings.model_copy(update={"api_key": os.environ.get("LAMINA_API_KEY") or None})
        return create_app(served, own, name=Path(bank).resolve().name)

    return _deployment(build, settings, Replicas()).bind()


def _deployment(build: Callable[[], FastAPI], settings: Settings, replicas: Replicas) -> Any:
    """What Ray Serve calls a deployment: the application, and how many of it."""

    def made() -> FastAPI:  # a plain function, which Ray Serve calls in the replica
        return build()

    serve = _ray_serve()
    many: dict[str, Any] = {"num_replicas": replicas.least}
    if replicas.most is not None:
        busy = max(1, int(_BUSY * settings.max_concurrent_requests))
        scaling = {"min_replicas": replicas.least, "max_replicas": replicas.most, "target_ongoing_requests": busy}
        many = {"autoscaling_config": scaling}
    return serve.deployment(
        serve.ingress(made)(),
        name="bank",
        logging_config=_QUIET,
        max_ongoing_requests=settings.max_concurrent_requests,
        graceful_shutdown_timeout_s=settings.shutdown_timeout,
        ray_actor_options={"num_cpus": replicas.cpus, "num_gpus": replicas.gpus},
        **many,
    )


def _ray_serve() -> Any:
    try:
        from ray import serve
    except ImportError as error:
        raise MissingExtraError.of(error, op="serve", extra="ray") from error
    return serve


def _ray() -> Any:
    import ray

    return ray


def _check_room(replicas: Replicas) -> None:
    """Raise ConfigError unless the cluster has what the replicas take; else Ray would wait for it for ever."""
    have: dict[str, float] = _ray().cluster_resources()
    for what, each in (("CPU", replicas.cpus), ("GPU", replicas.gpus)):
        if each * replicas.least > have.get(what, 0.0):
            came = f"{replicas.least} replicas with {each:g} {what} each were asked for"
            raise ConfigError(f"serve: {came}; the cluster has {have.get(what, 0.0):g}. Take fewer, or --replica-cpus.")
