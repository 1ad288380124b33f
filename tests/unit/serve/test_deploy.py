"""The files in deploy/ are linted, and the options and fields that they name exist."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from fastapi import FastAPI
from ray.serve.schema import ServeDeploySchema

from lamina.cli.command_line import build
from lamina.errors import ConfigError, LaminaError
from lamina.serve import Settings
from lamina.serve.cluster import Replicas, _deployment, application

DEPLOY = Path(__file__).parents[3] / "deploy"
PLAIN = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
PODS = yaml.safe_load((DEPLOY / "rayservice.yaml").read_text())["spec"]["rayClusterConfig"]


def test_the_dockerfile_is_linted():
    linter = shutil.which("hadolint", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    assert linter is not None
    found = subprocess.run([linter, DEPLOY / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "")


def test_the_image_runs_an_existing_command_with_existing_options():
    text = (DEPLOY / "Dockerfile").read_text()
    entry, arguments = (re.search(rf"^{word} (.*)$", text, re.M)[1] for word in ("ENTRYPOINT", "CMD"))  # pyright: ignore
    assert yaml.safe_load(entry) == ["lamina", "serve"]
    options = {option for parameter in build().commands["serve"].params for option in parameter.opts}  # pyright: ignore
    assert set(re.findall(r"--[a-z-]+", arguments)) <= options


@pytest.mark.parametrize(
    "resource", [*yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())], ids=lambda r: r["kind"]
)
def test_the_manifest_fits_the_schemas_of_kubernetes(resource: Any):
    kubernetes_validate.validate(resource, "1.37", strict=True)


@pytest.mark.parametrize("group", [PODS["headGroupSpec"], *PODS["workerGroupSpecs"]])
def test_the_pods_of_kuberay_fit_the_schemas_of_kubernetes(group: Any):
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **group["template"]}
    kubernetes_validate.validate(pod, "1.37", strict=True)


def test_the_configuration_of_ray_serve_fits_its_schema():
    text = yaml.safe_load((DEPLOY / "rayservice.yaml").read_text())["spec"]["serveConfigV2"]
    config = ServeDeploySchema.model_validate(yaml.safe_load(text))
    (one,) = config.applications
    module, _, name = (one.import_path or "").partition(":")
    assert getattr(import_module(module), name) is application
    made = application(one.args)
    assert [deployment.name for deployment in one.deployments] == [made._bound_deployment.name]


def test_arguments_of_an_application_are_checked():
    with pytest.raises(ConfigError, match="args has no bank"):
        application({"max_batch_tokens": 5})
    with pytest.raises(LaminaError, match="max_batch_tokens"):
        application({"bank": "x", "max_batch_tokens": 0})
    for key in ("api_key", "admin_key"):
        with pytest.raises(ConfigError, match=f"args has {key}; .*LAMINA_API_KEY"):
            application({"bank": "x", key: "sesame"})


def test_the_number_of_replicas_and_what_each_needs_reach_ray():
    fixed = _deployment(FastAPI, Settings(), Replicas(2, cpus=0.5))
    assert (fixed.num_replicas, fixed.ray_actor_options["num_cpus"]) == (2, 0.5)  # pyright: ignore
    scaling = _deployment(FastAPI, Settings(), Replicas(1, 3))._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (1, 3)  # pyright: ignore


@pytest.mark.parametrize("resources", [{"cpus": -1}, {"gpus": -0.5}, {"cpus": float("nan")}, {"gpus": float("inf")}])
def test_what_a_replica_needs_is_a_finite_number_from_zero_on(resources: dict[str, float]):
    (name,) = resources
    with pytest.raises(ConfigError, match=f"serve: replica_{name} is .*; it must be at least 0"):
        Replicas(**resources)  # pyright: ignore[reportArgumentType]
    assert Replicas(cpus=0).cpus == 0
