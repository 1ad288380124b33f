"""Run replicas of the application on Ray Serve, on one machine or many."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from fastapi import FastAPI

from lamina.errors import ConfigError, MissingExtraError, first_line
from lamina.prediction.ray_workers import LOCAL, connected, import_ray
from lamina.serve.application import create_app
from lamina.serve.settings import Settings
from lamina.store import load, load_bank
from lamina.store.models import writing_class
from lamina.utils import JSON, check_range

if TYPE_CHECKING:
    from types import ModuleType

    from ray.serve import Application, Deployment

APPLICATION = "lamina"  # name on the cluster; deploying under it again replaces the replicas one after the other
_QUIET = {"log_level": "WARNING", "enable_access_log": False}
_BUSY = 0.7  # another replica starts once each holds this share of its `max_concurrent_requests`


@dataclass(frozen=True)
class Replicas:
    """The number of replicas of the application, and the CPUs and GPUs of each; see `deployed`.

    Raises ConfigError if `least` is below 1, `most` is below `least`, or `cpus` or `gpus` is negative, infinite or NaN.

    Attributes:
        least: Minimum number of replicas.
        most: Maximum number of replicas; another one starts once each holds 70 % of its `max_concurrent_requests`.
            None: `least` replicas run all the time.
        cpus: CPU cores per replica; may be a fraction.
        gpus: GPUs per replica; may be a fraction.
    """

    least: int = 1
    most: int | None = None
    cpus: float = 1.0
    gpus: float = 0.0

    def __post_init__(self) -> None:
        check_range("serve", "replicas", self.least, 1)
        check_range("serve", "max_replicas", self.most, self.least)
        check_range("serve", "replica_cpus", self.cpus, 0, math.inf, open_high=True)
        check_range("serve", "replica_gpus", self.gpus, 0, math.inf, open_high=True)


@contextmanager
def deployed(
    build: Callable[[], FastAPI], settings: Settings, replicas: Replicas, *, address: str, host: str, port: int
) -> Iterator[None]:
    """Deploy replicas of an application on Ray Serve, which answer requests inside the `with` block.

    Ray restarts a replica that dies. On a cluster that was running already, the replicas stay after the block. Replicas
    of an earlier deployment there are replaced one by one, while the others answer. Raises MissingExtraError if Ray
    Serve is not installed, and ConfigError if the cluster cannot be reached or has too few CPUs or GPUs, or the
    replicas do not start.

    Args:
        build: Function that returns the application; it is pickled, sent to each replica and called there.
        settings: The application's settings. Ray uses `max_concurrent_requests` and `shutdown_timeout`, per replica.
        replicas: The number of replicas, and what each needs.
        address: "local" starts a cluster on the machine of this process, which ends with the block; "auto" uses the
            cluster that is running on this machine already; otherwise HOST:PORT of a cluster.
        host: Address at which every node of the cluster listens.
        port: Port at which every node of the cluster listens.
    """
    serve, deployment = _ray_serve(), _deployment(build, settings, replicas)
    with connected(import_ray("serve"), address, "serve"):
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


def application(args: Mapping[str, JSON]) -> Application:
    """Return the application for a configuration file of Ray Serve: `import_path: lamina.serve.cluster:application`.

    That file sets the number of replicas under `deployments`, for the deployment `bank`. A replica runs one pass at a
    time, unless `max_concurrent_passes` is set. Raises ConfigError if `bank` is missing, `api_key` or `admin_key` is
    among `args`, or a value is not allowed; MissingExtraError if Ray Serve is not installed.

    Args:
        args: The file's `args`: `bank`, the folder or hub id of a bank that every node can read; optionally `model`, a
            base model to use instead of the one that the bank names; and any fields of `Settings` except the keys. Each
            replica reads the API key from the environment variable LAMINA_API_KEY.
    """
    values = dict(args)
    bank, model = values.pop("bank", None), values.pop("model", None)
    if not isinstance(bank, str):
        raise ConfigError("serve: args has no bank; give its folder, or its id on the hub.")
    for key in ("api_key", "admin_key"):
        if key in values:
            rule = "set the API key as LAMINA_API_KEY in the environment of the replicas, which have no admin key"
            raise ConfigError(f"serve: args has {key}; {rule}.")
    if not isinstance(model, str | None):
        raise ConfigError(f"serve: args has model {model!r}; give its folder, or its id on the hub.")
    settings = Settings.of(**{"max_concurrent_passes": 1, **values})

    def build() -> FastAPI:
        base, processor = (None, None) if model is None else load(model, writing_class(model))
        served = load_bank(bank, base, processor, writes=True).to("cuda" if torch.cuda.is_available() else "cpu")
        with_key = settings.model_copy(update={"api_key": os.environ.get("LAMINA_API_KEY") or None})
        return create_app(served, with_key, name=Path(bank).resolve().name)

    return _deployment(build, settings, Replicas()).bind()


def _deployment(build: Callable[[], FastAPI], settings: Settings, replicas: Replicas) -> Deployment:
    """Return a Ray Serve deployment of the application that `build` returns; `build` is called in each replica.

    `settings` limit the requests of each replica, and `replicas` says how many there are and what each needs. Raises
    MissingExtraError if Ray Serve is not installed.
    """

    def build_in_replica() -> FastAPI:  # Ray Serve accepts a plain function only, and `build` may be a partial
        return build()

    serve = _ray_serve()
    count: dict[str, int | dict[str, int]] = {"num_replicas": replicas.least}
    if replicas.most is not None:
        busy = max(1, int(_BUSY * settings.max_concurrent_requests))
        scaling = {"min_replicas": replicas.least, "max_replicas": replicas.most, "target_ongoing_requests": busy}
        count = {"autoscaling_config": scaling}
    return serve.deployment(
        serve.ingress(build_in_replica)(),
        name="bank",
        logging_config=_QUIET,
        max_ongoing_requests=settings.max_concurrent_requests,
        graceful_shutdown_timeout_s=settings.shutdown_timeout,
        ray_actor_options={"num_cpus": replicas.cpus, "num_gpus": replicas.gpus},
        **count,
    )


def _ray_serve() -> ModuleType:
    """Return the module `ray.serve`; raise MissingExtraError if it is not installed."""
    try:
        from ray import serve
    except ImportError as error:
        raise MissingExtraError.of(error, op="serve", extra="ray") from error
    return serve


def _check_room(replicas: Replicas) -> None:
    """Raise ConfigError if the cluster has too few CPUs or GPUs for `replicas.least`; Ray would wait forever."""
    available: dict[str, float] = import_ray("serve").cluster_resources()
    for resource, needed in (("CPU", replicas.cpus), ("GPU", replicas.gpus)):
        if needed * replicas.least > (total := available.get(resource, 0.0)):
            came = f"{replicas.least} replicas need {needed:g} {resource} each"
            hint = f"Use fewer replicas, or lower --replica-{resource.lower()}s"
            raise ConfigError(f"serve: {came}; the cluster has {total:g} in all. {hint}.")
