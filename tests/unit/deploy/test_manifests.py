"""The Kubernetes manifests: each is valid, and says of the programs in it what their code says (docs/kubernetes.md)."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tomllib
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from build.trtllm.llm_api import load_llm_spec, speculative_config
from build.trtllm.spec import EngineSpec
from build.trtllm.versions import LLM_DEFAULT, find_llm_release
from gateway.settings import Settings as GatewaySettings
from launcher.drain import main as drain
from launcher.server import _EXIT_LIMIT_S
from launcher.settings import LauncherSettings, Ports
from launcher.triton_process import _KILL_AFTER_S
from orchestrator.core.deployment.config import ServingConfig, load_config
from tests.support.without_triton import imported
from tests.unit.deploy.manifests import (
    CUSTOM,
    FOLDERS,
    K8S,
    OVERLAYS,
    ROOT,
    Manifest,
    at,
    containers,
    environment,
    of_kind,
    pods,
    rendered,
    servers,
)

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
KUBERNETES = "1.32"
ALL = pytest.mark.parametrize("name", FOLDERS)
EACH_OVERLAY = pytest.mark.parametrize("name", OVERLAYS)


# Schemas


def check_schema(manifest: Manifest) -> None:
    """Raise ValidationError for what Kubernetes' schema, or the one in tests/data/k8s, does not allow."""
    if manifest["kind"] not in CUSTOM:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
        return
    schema = CUSTOM[manifest["kind"]]
    assert manifest["apiVersion"] == schema["apiVersion"]
    jsonschema.validate(manifest["spec"], schema["spec"])


@ALL
def test_every_manifest_is_valid(name: str) -> None:
    for manifest in rendered(name):
        check_schema(manifest)
    for _, pod in pods(name):
        metadata = {"name": "pod", **pod["metadata"]}
        check_schema({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": pod["spec"]})


@EACH_OVERLAY
def test_every_reference_is_to_something_that_is_there(name: str) -> None:
    made = {
        "configMap": set(of_kind(name, "ConfigMap")),
        "persistentVolumeClaim": set(of_kind(name, "PersistentVolumeClaim")),
    }
    for where, pod in pods(name):
        volumes = {volume["name"] for volume in pod["spec"].get("volumes", [])}
        for volume in pod["spec"].get("volumes", []):
            for kind, names in made.items():
                if kind in volume:
                    key = "name" if kind == "configMap" else "claimName"
                    assert volume[kind][key] in names, f"{where}: {volume}"
        for container in containers(pod):
            mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
            assert mounted <= volumes, f"{where}: {mounted - volumes}"


@EACH_OVERLAY
def test_services_budgets_and_monitors_select_pods_and_ports_that_are_there(name: str) -> None:
    found = [
        (pod["metadata"]["labels"], {port["name"] for c in containers(pod) for port in c.get("ports", [])})
        for _, pod in pods(name)
    ]
    wanted = [(each["spec"]["selector"], [p["targetPort"] for p in each["spec"]["ports"]]) for each in services(name)]
    wanted += [(at(each, "spec.selector.matchLabels"), []) for each in of_kind(name, "PodDisruptionBudget").values()]
    for monitor in of_kind(name, "PodMonitor").values():
        ports = [endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]]
        wanted.append((at(monitor, "spec.selector.matchLabels"), ports))
    assert wanted
    for labels, ports in wanted:
        selected = [names for pod_labels, names in found if labels.items() <= pod_labels.items()]
        assert selected and all(set(ports) <= names for names in selected), (labels, ports)


def services(name: str) -> list[Manifest]:
    return list(of_kind(name, "Service").values())


# Security


@ALL
def test_every_container_runs_without_privileges(name: str) -> None:
    for where, pod in pods(name):
        of_pod = pod["spec"].get("securityContext", {})
        for container in containers(pod):
            context = {**of_pod, **container["securityContext"]}
            assert context["runAsNonRoot"] and context["runAsUser"] == 1000, where
            assert context["readOnlyRootFilesystem"] and context["allowPrivilegeEscalation"] is False, where
            assert context["capabilities"] == {"drop": ["ALL"]}, where
            assert context["seccompProfile"] == {"type": "RuntimeDefault"}, where
            assert not pod["spec"].get("hostNetwork") and not pod["spec"].get("automountServiceAccountToken"), where


@EACH_OVERLAY
def test_only_the_gateway_is_public(name: str) -> None:
    policies = of_kind(name, "NetworkPolicy")
    assert policies["default-deny"]["spec"] == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    public = [
        policy for policy, manifest in policies.items()
        if any("from" not in rule for rule in manifest["spec"].get("ingress", []))
    ]  # fmt: skip
    assert public == ["gateway"]
    to_server = policies["server"]["spec"]["ingress"]
    assert {port["port"] for rule in to_server for port in rule["ports"]} == {"http", "grpc", "metrics"}
    callers = {str(rule["from"]) for rule in to_server for port in rule["ports"] if port["port"] == "grpc"}
    assert len(callers) == 2 and all("podSelector" in caller for caller in callers)
    assert all(service["spec"].get("type", "ClusterIP") == "ClusterIP" for service in services(name))


@EACH_OVERLAY
def test_only_the_demo_may_run_without_api_keys(name: str) -> None:
    (gateway,) = at(of_kind(name, "Deployment")["gateway"], "spec.template.spec.containers")
    (keys,) = [each for each in gateway["env"] if each["name"] == "GATEWAY_API_KEYS"]
    secret = keys["valueFrom"]["secretKeyRef"]
    assert (secret["name"], secret["key"]) == ("gateway-api-keys", "keys")
    assert secret.get("optional", False) is (name == "cpu-demo")


# What the programs say


@ALL
def test_ports_of_servers_are_those_of_the_launcher(name: str) -> None:
    found = list(servers(name))
    assert found
    for where, _, container in found:
        variables = environment(container)
        settings = LauncherSettings.from_environment({**variables, "SPECSERVE_HOST": "0.0.0.0"})
        ports = settings.ports()
        named = {port["name"]: port["containerPort"] for port in container["ports"]}
        named = {"grpc" if name == "h2c" else name: port for name, port in named.items()}
        assert named.items() <= vars(ports).items(), where
        assert name == "kserve" or ports == Ports()


@ALL
def test_variables_are_settings_that_the_programs_know(name: str) -> None:
    programs = {"SERVING_": ServingConfig, "GATEWAY_": GatewaySettings, "SPECSERVE_": LauncherSettings}
    others = {"TMPDIR", "HOME", "HF_HOME", "PLAN", "GPUS"}
    for where, pod in pods(name):
        for container in containers(pod):
            for variable in (each["name"] for each in container.get("env", [])):
                prefix, _, key = variable.partition("_")
                program = programs.get(f"{prefix}_")
                known = key.lower() in program.model_fields if program else variable in others
                assert known, f"{where}: {variable}"


@ALL
def test_probes_ask_the_launcher_as_long_as_loading_may_take(name: str) -> None:
    handler = (ROOT / "launcher/health.py").read_text()
    for where, _, container in servers(name):
        variables = LauncherSettings.from_environment(environment(container))
        ports = {port["name"]: port["containerPort"] for port in container["ports"]} | {8003: Ports().health}
        for probe, path in (("startupProbe", "/ready"), ("readinessProbe", "/ready"), ("livenessProbe", "/live")):
            asked = container[probe]["httpGet"]
            assert (asked["path"], ports[asked["port"]]) == (path, Ports().health), where
            assert f'"{path}"' in handler
            assert container[probe]["timeoutSeconds"] > 5, where  # Triton gets five seconds to answer the launcher
        startup = container["startupProbe"]
        assert startup["periodSeconds"] * startup["failureThreshold"] >= variables.ready_limit_s + 60, where


@ALL
def test_a_drain_fits_into_the_grace_period(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for where, pod, container in servers(name):
        if name == "kserve":
            (service,) = of_kind(name, "InferenceService").values()
            grace_s = at(service, "spec.predictor.terminationGracePeriodSeconds")
        else:
            grace_s = pod["spec"]["terminationGracePeriodSeconds"]
        shell, flag, hook = container["lifecycle"]["preStop"]["exec"]["command"]
        pattern = r"sleep (\d+) && exec /opt/venv/bin/python -m launcher\.drain --limit-s (\d+)"
        words = re.fullmatch(pattern, hook)
        assert (shell, flag) == ("/bin/sh", "-c") and words, where
        stop_limit_s = LauncherSettings.from_environment(environment(container)).stop_limit_s
        needed_s = int(words[1]) + int(words[2]) + stop_limit_s + _EXIT_LIMIT_S + _KILL_AFTER_S
        assert needed_s < grace_s, where
    monkeypatch.setenv("SPECSERVE_HEALTH_PORT", "1")
    assert drain(["--limit-s", "90"]) == 2  # the command knows the flag; no launcher answers


@EACH_OVERLAY
def test_gateways_ask_every_replica_and_stop_in_time(name: str) -> None:
    gateway = at(of_kind(name, "Deployment")["gateway"], "spec.template.spec")
    (container,) = gateway["containers"]
    variables = environment(container)
    service = re.fullmatch(r"dns://([\w-]+):(\d+)", variables["GATEWAY_REPLICAS"])
    assert service
    headless = of_kind(name, "Service")[service[1]]["spec"]
    assert headless["clusterIP"] == "None"
    assert [port["port"] for port in headless["ports"]] == [int(service[2])] == [Ports().grpc]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    metrics_port = int(variables["GATEWAY_METRICS_PORT"])
    assert ports == {"http": GatewaySettings.model_fields["port"].default, "metrics": metrics_port}
    app = (ROOT / "gateway/app.py").read_text()
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert f'@app.api_route("{container[probe]["httpGet"]["path"]}", methods=READ)' in app
    sleep_s = int(container["lifecycle"]["preStop"]["exec"]["command"][-1].split()[-1])
    assert sleep_s + int(variables["GATEWAY_STOP_LIMIT_S"]) < gateway["terminationGracePeriodSeconds"]


@EACH_OVERLAY
def test_deployment_files_load_and_lie_on_mounted_volumes(name: str, tmp_path: Path) -> None:
    (configs,) = [each for key, each in of_kind(name, "ConfigMap").items() if key.startswith("serving-")]
    (tmp_path / "serving.toml").write_text(configs["data"]["serving.toml"])
    for where, _, container in servers(name):
        config = load_config(tmp_path / "serving.toml", environment(container))
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        assert "/config" in mounts and "/dev/shm" in mounts and "/tmp" in mounts
        for path in (config.target, config.draft, config.eagle, config.ngram_tables):
            assert not path or any(path.startswith(f"{mount}/") for mount in mounts), f"{where}: {path}"
        gpus = at(container, "resources.limits").get("nvidia.com/gpu", 0)
        assert (config.device == "cuda") is (gpus > 0)


@ALL
def test_images_are_those_that_the_makefile_builds(name: str) -> None:
    built = set(re.findall(r"--tag (specserve[\w-]*):", (ROOT / "Makefile").read_text()))
    for where, pod in pods(name):
        for container in containers(pod):
            image, _, tag = container["image"].partition(":")
            if image.startswith("nvcr.io/"):
                assert container["image"] == find_llm_release(LLM_DEFAULT).image, where
                continue
            assert image in built and tag == VERSION, f"{where}: {container['image']}"


# Scaling


@pytest.mark.parametrize("name", [name for name in OVERLAYS if name != "cpu-demo"])
def test_autoscaler_reads_gauges_that_the_server_shows_and_the_adapter_passes_on(name: str) -> None:
    with imported("metrics") as metrics_of_triton:
        gauges = {family.name for family in metrics_of_triton.REQUEST_FAMILIES if family.kind == "gauge"}
    (rule,) = yaml.safe_load((K8S / "components/monitoring/adapter-rules.yaml").read_text())["rules"]["custom"]
    pattern = re.search(r'__name__=~"([^"]+)"', rule["seriesQuery"])
    assert pattern
    scaler = of_kind(name, "HorizontalPodAutoscaler")["server"]["spec"]
    metrics = [at(metric, "pods.metric.name") for metric in scaler["metrics"]]
    assert metrics and set(metrics) <= gauges
    assert all(re.fullmatch(pattern[1], metric) for metric in metrics)
    target = scaler["scaleTargetRef"]
    scaled = of_kind(name, target["kind"])[target["name"]]
    assert scaled["apiVersion"] == target["apiVersion"]
    assert "replicas" not in scaled["spec"], "each `kubectl apply` would undo what the autoscaler has set"
    running = next(m for m in scaler["metrics"] if at(m, "pods.metric.name") == "spec_num_requests_running")
    assert int(at(running, "pods.target.averageValue")) < ServingConfig.model_fields["max_running"].default


# Engines


@pytest.mark.parametrize("name", [name for name in OVERLAYS if (FOLDERS[name] / "plan.yaml").exists()])
def test_engines_are_keyed_by_the_hash_of_their_plan(name: str) -> None:
    text = (FOLDERS[name] / "engines.toml").read_bytes()
    plan = hashlib.sha256(text).hexdigest()[:10]
    assert of_kind(name, "ConfigMap")["plan"]["data"]["hash"] == plan, "engines.toml has changed: set plan.yaml anew"
    spec = EngineSpec.model_validate(tomllib.loads(text.decode()))
    (job,) = of_kind(name, "Job").values()
    assert job["metadata"]["name"] == f"engines-{plan}"
    (builder,) = at(job, "spec.template.spec.containers")
    for where, pod, container in servers(name):
        assert environment(container)["SERVING_TARGET"] == f"/engines/{plan}/engines/target", where
        drafted = f"/engines/{plan}/engines/draft" if spec.method == "draft_model" else None
        assert environment(container).get("SERVING_DRAFT") == drafted, where
        (waiting,) = pod["spec"]["initContainers"]
        assert environment(waiting)["PLAN"] == environment(builder)["PLAN"] == plan
    assert "build.trtllm build /config/engines.toml" in builder["command"][-1]
    assert environment(builder)["HF_HOME"].startswith("/tmp/"), "the volume of the models is read-only"
    policy = at(of_kind(name, "NetworkPolicy")["engines"], "spec")
    assert policy["podSelector"]["matchLabels"].items() <= at(job, "spec.template.metadata.labels").items()
    assert {port["port"] for rule in policy["egress"] for port in rule["ports"]} == {53}
    assert spec.calib_dataset.startswith("/models/"), "nothing is fetched from a hub"
    gpus = [at(container, "resources.limits")["nvidia.com/gpu"] for _, _, container in servers(name)]
    nodes = [at(each, "spec.leaderWorkerTemplate.size") for each in of_kind(name, "LeaderWorkerSet").values()] or [1]
    assert [gpus[0] * nodes[0]] == [spec.num_gpus]


@pytest.mark.parametrize("plan", ["right", "wrong"])
def test_job_checks_the_hash_of_its_plan_before_it_builds(plan: str, tmp_path: Path) -> None:
    (job,) = of_kind("gpu-trtllm", "Job").values()
    (builder,) = at(job, "spec.template.spec.containers")
    file = tmp_path / "engines.toml"
    file.write_bytes((FOLDERS["gpu-trtllm"] / "engines.toml").read_bytes())
    script = builder["command"][-1].replace("/config/engines.toml", str(file)).replace("/engines/$PLAN", str(tmp_path))
    script = script.replace("/opt/venv/bin/python -m build.trtllm", "echo built")
    digits = environment(builder)["PLAN"] if plan == "right" else "0123456789"
    ran = subprocess.run(["/bin/sh", "-c", script], env={**os.environ, "PLAN": digits}, capture_output=True, text=True)
    assert ran.returncode == (0 if plan == "right" else 2), ran.stderr
    assert ("built" in ran.stdout, "engines.toml has changed" in ran.stderr) == (plan == "right", plan == "wrong")
    assert (tmp_path / "complete").exists() is (plan == "right")


def test_llm_api_has_the_release_and_the_method_that_its_files_name() -> None:
    name = "gpu-llm-api"
    spec = load_llm_spec(FOLDERS[name] / "engines.toml")
    ((_, pod, container),) = servers(name)
    (configs,) = [each for key, each in of_kind(name, "ConfigMap").items() if key.startswith("serving-")]
    served = tomllib.loads(configs["data"]["serving.toml"])
    assert (served["engine"], served["default_speculation"]) == ("llm_api", spec.method)
    assert speculative_config(spec)["decoding_type"] == "Eagle3" and spec.trtllm_version == LLM_DEFAULT
    (folder,) = pod["spec"]["initContainers"]
    assert f"--out {served['target']} > /llm/serve.sh" in folder["command"][-1]
    (engine,) = [each for each in pod["spec"]["containers"] if each["name"] != container["name"]]
    assert engine["command"] == ["/bin/sh", "/llm/serve.sh"]
    address = ServingConfig(target="/llm/target").llm_api_address
    assert [f"127.0.0.1:{port['containerPort']}" for port in engine["ports"]] == [address]
    assert at(engine, "resources.limits")["nvidia.com/gpu"] == spec.num_gpus
