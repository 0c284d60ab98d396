"""Board and alert rules: valid for Prometheus, and about series that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.core.deployment.config import ServingConfig
from tests.support.series import (
    MONITORING,
    alert_expressions,
    board_expressions,
    manifest_names,
    read_names,
)
from tests.support.without_triton import imported

#: A word that may be a key of serving.toml: not a series, nor a name in a path or a template.
SETTING = re.compile(r"(?<![\w./$])(?!spec_)[a-z]+(?:_[a-z]+)+\b(?!\.\w)")
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is missing (Debian: apt-get install prometheus)")


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run(
        [str(PROMTOOL), *map(str, arguments)], capture_output=True, text=True, timeout=60, check=False, cwd=MONITORING
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def declared() -> Iterator[set[str]]:
    """The names on the port of every family, and of the gateway's."""
    prometheus_client = pytest.importorskip("prometheus_client")
    from gateway.metrics import Metrics

    with imported("metrics") as metrics:
        families = (*metrics.REQUEST_FAMILIES, *metrics.DRAFT_FAMILIES, *metrics.ENGINE_FAMILIES)
        names = {name for family in families for name, _ in family.parts}
    lines = prometheus_client.generate_latest(Metrics().registry).decode().splitlines()
    kinds = dict(line.split()[2:4] for line in lines if line.startswith("# TYPE"))
    parts = {"histogram": ("_bucket", "_sum", "_count")}
    yield names | {name + part for name, kind in kinds.items() for part in parts.get(kind, ("",))}


def test_every_series_that_board_alerts_and_manifests_read_is_declared(declared: set[str]) -> None:
    assert len(alert_expressions()) == (MONITORING / "alerts.yml").read_text().count("expr:") > 10
    assert not read_names() - declared


def test_alerts_and_help_texts_name_settings_that_exist_and_load_alerts_name_some() -> None:
    alerts = (MONITORING / "alerts.yml").read_text(encoding="utf-8")
    described = dict(re.findall(r"- alert: (\w+)\n(?:.*\n)*?\s+description: \"(.*)\"", alerts))
    with imported("metrics") as metrics:
        families = (*metrics.REQUEST_FAMILIES, *metrics.DRAFT_FAMILIES, *metrics.ENGINE_FAMILIES)
        texts = [*described.values(), *(family.description for family in families)]
    named = {word for text in texts for word in SETTING.findall(text)}
    assert named - {"finished_reason"} <= set(ServingConfig.model_fields)
    by_settings = ("DrafterBreakerOpen", "DrafterLate", "QueueLong", "RequestsRefused", "FirstTokenSlow", "KVCacheFull")
    assert not [name for name in by_settings if not SETTING.findall(described[f"Spec{name}"])]


def test_the_autoscaler_reads_waiting_and_running() -> None:
    if not (MONITORING.parent / "k8s").exists():
        pytest.skip("there are no manifests")
    assert manifest_names() & {"spec_num_requests_waiting", "spec_num_requests_running"}


@needs_promtool
def test_prometheus_takes_the_configuration_and_the_rules() -> None:
    promtool("check", "config", "prometheus.yml")


@needs_promtool
def test_each_alert_fires_on_what_it_is_for_and_on_nothing_else() -> None:
    tested = (MONITORING / "alerts_test.yml").read_text(encoding="utf-8")
    alerts = [line.split()[-1] for line in (MONITORING / "alerts.yml").read_text().splitlines() if "- alert:" in line]
    assert not [name for name in alerts if f"alertname: {name}" not in tested]
    promtool("test", "rules", "alerts_test.yml")


@needs_promtool
def test_prometheus_reads_every_expression_of_the_board(tmp_path: Path) -> None:
    rules = [{"record": f"panel:{at}", "expr": text} for at, text in enumerate(board_expressions())]
    (tmp_path / "board.yml").write_text(json.dumps({"groups": [{"name": "board", "rules": rules}]}))
    promtool("check", "rules", tmp_path / "board.yml")
