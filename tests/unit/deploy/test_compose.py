"""docker/compose.yaml: what it starts is what the images and the programs are (docs/docker.md)."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from gateway.settings import Settings as GatewaySettings
from launcher.server import _EXIT_LIMIT_S
from launcher.settings import LauncherSettings, Ports
from launcher.triton_process import _KILL_AFTER_S
from orchestrator.core.deployment.config import ServingConfig
from tests.unit.deploy.manifests import ROOT

DOCKER = ROOT / "docker"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_runs_confined_from_a_pinned_image_over_files_that_are_there(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] and service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"])
    for volume in service.get("volumes", []):
        source = volume.partition(":")[0]
        assert not source.startswith(".") or (DOCKER / source).exists(), source
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


def test_variables_are_settings_and_the_gateway_asks_the_server() -> None:
    variables = {key: str(value) for key, value in SERVICES["server"]["environment"].items()}
    launcher = LauncherSettings.from_environment({k: v for k, v in variables.items() if not k.startswith("SERVING_")})
    assert all(
        key.removeprefix("SERVING_").lower() in ServingConfig.model_fields
        for key in variables
        if key.startswith("SERVING_")
    )
    assert launcher.ports() == Ports()
    keys = {key.removeprefix("GATEWAY_").lower() for key in SERVICES["gateway"]["environment"]}
    assert keys <= GatewaySettings.model_fields.keys()
    assert SERVICES["gateway"]["environment"]["GATEWAY_REPLICAS"] == f"dns://server:{Ports().grpc}"
    assert SERVICES["gateway"]["ports"] == [f"127.0.0.1:{port}:{port}" for port in (9000,)]
    assert GatewaySettings.model_fields["port"].default == 9000


def test_services_have_the_time_that_their_requests_get() -> None:
    stop_limit_s = int(SERVICES["server"]["environment"]["SPECSERVE_STOP_LIMIT_S"])
    assert seconds("server") > stop_limit_s + _EXIT_LIMIT_S + _KILL_AFTER_S
    assert seconds("gateway") > int(SERVICES["gateway"]["environment"]["GATEWAY_STOP_LIMIT_S"])


def seconds(name: str) -> int:
    return int(SERVICES[name]["stop_grace_period"].removesuffix("s"))


def test_prometheus_scrapes_the_services_by_their_names_and_ports() -> None:
    file = yaml.safe_load((DOCKER / "monitoring/prometheus.yml").read_text())
    targets = {target for job in file["scrape_configs"] for each in job["static_configs"] for target in each["targets"]}
    metrics_port = SERVICES["gateway"]["environment"]["GATEWAY_METRICS_PORT"]
    assert targets == {f"server:{Ports().metrics}", f"gateway:{metrics_port}"}
