"""The Helm chart: rendered by the real Helm, checked by Kubernetes' schemas and by the programs that it runs."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import jsonschema
import pytest
import yaml

from scheduler.policy import policy_from
from scripts.envoy import ENVOY
from services.cli import block
from services.placement.decision_time import DECIDE_S, schedule_s_of
from services.security.certificates import use_tls
from services.security.settings import NO_TLS
from tests.deploy.helm_chart import (
    CHART,
    HELM,
    LABELS,
    MATRIX,
    ROOT,
    TWO_PORTS,
    command_line,
    containers,
    helm,
    is_ours,
    merged,
    of_kind,
    pods,
    rendered,
)  # fmt: skip
from tests.services.kubernetes.api_server import PODS, POOLS, Cluster, allowed_by, api_server, pod, pool
from tests.services.kubernetes.custom_schemas import CUSTOM_KINDS, validate
from tests.services.kubernetes.test_discovery import following
from tests.services.security.authorities import Authority
from tests.services.waiting import run

pytestmark = pytest.mark.helm

KUBERNETES = "1.31"  # whose schemas are applied
GATEWAY_API = [name for name in MATRIX if name.startswith("gateway-api")]
SERVE = {
    "picker": "services.endpoint_picker.server.serve",
    "gateway": "services.gateway.server.serve",
    "scheduler": "services.scheduler_server.serve",
    "tagger": "services.tagger_server.server.serve",
    "predictor": "services.predictor_server.server.serve",
    "provisioner": "services.provisioner_server.server.serve",
}


@pytest.mark.parametrize("name", MATRIX)
def test_the_chart_passes_lint(name: str) -> None:
    """With warnings as errors."""
    done = helm("lint", "--strict", str(CHART), values=merged(LABELS, MATRIX[name]))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", MATRIX)
def test_objects_follow_their_schemas(name: str) -> None:
    """Those of Kubernetes strictly, without unknown fields; custom resources by the fields that are published."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="make helm installs it")
    items = rendered(name)
    names = [(item["kind"], item["metadata"]["name"]) for item in items]
    assert len(set(names)) == len(names)
    for item in items:
        if item["kind"] in CUSTOM_KINDS:
            validate(item)
        else:
            kubernetes_validate.validate(item, KUBERNETES, strict=True)
        assert item["metadata"]["namespace"] == "llm"


@pytest.fixture
def accepted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Give a function that runs a command line up to where its server would start."""
    from services.provisioner_server.hooks import kubernetes

    served: list[str] = []
    for command, path in SERVE.items():
        if command in block.commands["serve"].commands:
            monkeypatch.setattr(path, lambda *_, command=command, **__: served.append(command))
    monkeypatch.setattr("services.warmup.warm_up", lambda: 0.0)
    monkeypatch.setattr("predictor.indicators.warm_indicators", lambda: None)
    monkeypatch.setattr(kubernetes, "cluster_configuration", lambda: None)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    profile = ROOT / "predictor" / "profiles" / "llama-3.1-8b-h100.json"

    def run_command(words: list[str]) -> str:
        words = [word.replace("/etc/block/profiles/mine.json", str(profile)) for word in words]
        for folder in ("/etc/block/certificate", "/etc/block/tls"):
            words = [word.replace(folder, str(tmp_path)) for word in words]
        block.main(args=words, standalone_mode=False)
        return served.pop()

    certificates = Authority(folder=tmp_path)
    certificates.issue("tls")
    yield run_command
    use_tls(NO_TLS)


@pytest.mark.parametrize("name", MATRIX)
def test_programs_accept_their_command_lines(name: str, accepted: Any) -> None:
    """Each is run with its arguments up to the start of its server, so also the values are checked."""
    commands = [command_line(one) for one in containers(rendered(name)) if is_ours(one)]
    assert commands
    for words in commands:
        assert accepted(words) == words[1]


def test_a_wrong_flag_would_be_noticed(accepted: Any) -> None:
    """The parser of the other tests refuses unknown flags and impossible settings."""
    with pytest.raises(click.NoSuchOption):
        accepted(["serve", "tagger", "--prot=1"])
    with pytest.raises(ValueError, match="pool_name"):
        accepted(["serve", "scheduler", "--instances-from=kubernetes"])


def test_every_command_is_in_the_matrix() -> None:
    """No part is left out of the checks above."""
    seen = {command_line(one)[1] for name in MATRIX for one in containers(rendered(name)) if is_ours(one)}
    assert seen == set(SERVE)


@pytest.mark.parametrize("name", MATRIX)
def test_parts_find_each_other(name: str) -> None:
    """Selectors match the labels of pods, and each address in a command line is a port of a Service and of its pods."""
    items = rendered(name)
    templates, services = pods(items), of_kind(items, "Service")
    labels = [template["metadata"]["labels"] for template in templates.values()]
    selected = [
        *services.values(),
        *of_kind(items, "PodDisruptionBudget").values(),
        *of_kind(items, "NetworkPolicy").values(),
    ]
    for item in selected:
        selector = item["spec"].get("selector", item["spec"].get("podSelector"))
        selector = selector.get("matchLabels", selector)
        found = [one for one in labels if selector.items() <= one.items()]
        assert found or selector == {"app": "vllm"}, (item["kind"], item["metadata"]["name"])
        assert all(one["app.kubernetes.io/component"] == found[0]["app.kubernetes.io/component"] or "app" in selector
                   for one in found)  # fmt: skip
    for container in containers(items):
        for word in container.get("args", []):
            for host, port in re.findall(r"=([a-z][-.a-z0-9]*):(\d+)$", word) if is_ours(container) else ():
                service = services[host.rpartition(".")[2]]
                (target,) = (one["targetPort"] for one in service["spec"]["ports"] if one["port"] == int(port))
                selector = service["spec"]["selector"].items()
                open_ports = {
                    one["name"]: one["containerPort"]
                    for template in templates.values() if selector <= template["metadata"]["labels"].items()
                    for behind in template["spec"]["containers"] for one in behind["ports"]
                }  # fmt: skip
                assert target in open_ports
    for pool_name, item in of_kind(items, "InferencePool").items():
        picker = item["spec"]["endpointPickerRef"]
        assert picker["port"]["number"] in [one["port"] for one in services[picker["name"]]["spec"]["ports"]]
        assert any(f"--pool-name={pool_name}" in one.get("args", []) for one in containers(items))


@pytest.mark.parametrize("name", MATRIX)
def test_flags_say_the_ports_that_containers_open(name: str) -> None:
    """What a program listens on is what its container declares and its probes ask."""
    for container in containers(rendered(name)):
        ports = {one["containerPort"] for one in container["ports"]} if "ports" in container else set()
        if not is_ours(container):
            continue
        listens = {
            int(number) for flag, number in re.findall(r"--([a-z-]*port)=(\d+)", " ".join(container["args"]))
            if flag in ("port", "health-port", "metrics-port", "proxy-port")
        }  # fmt: skip
        assert listens == ports
        by_name = {one["name"]: one["containerPort"] for one in container["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            for how in container.get(probe, {}).values():
                if isinstance(how, dict):
                    assert by_name.get(how["port"], how["port"]) in ports


@pytest.mark.parametrize("name", MATRIX)
def test_pods_have_the_time_that_their_programs_take_to_stop(name: str) -> None:
    """Kubernetes waits for longer than the pause before SIGTERM and the drain together."""
    for template in pods(rendered(name)).values():
        for container in template["spec"]["containers"]:
            pause_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
            drains = re.findall(r"--(?:drain-s|shutdown-timeout)=(\d+)", " ".join(container["args"]))
            drain_s = int(drains[-1]) if drains else 30 if is_ours(container) else 0
            assert pause_s + drain_s < template["spec"]["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("name", MATRIX)
def test_containers_of_ours_can_do_little(name: str) -> None:
    """They are not root, except beside a root's engine, write to no image, and gain no rights."""
    for workload, template in pods(rendered(name)).items():
        spec = template["spec"]
        for container in [*spec["containers"], *spec["initContainers"]]:
            if container["name"] == "vllm":
                continue
            context = {**spec["securityContext"], **container["securityContext"]}
            assert context["readOnlyRootFilesystem"]
            assert not context["allowPrivilegeEscalation"]
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["seccompProfile"] == {"type": "RuntimeDefault"}
            if "engine" not in workload:
                assert context["runAsNonRoot"]
                assert context["runAsUser"] == 65532
            assert container["resources"]["limits"]["memory"]
            mounted = {one["name"] for one in container["volumeMounts"]}
            assert mounted <= {one["name"] for one in spec["volumes"]}
        if spec["automountServiceAccountToken"]:
            assert spec["serviceAccountName"] != "default"


@pytest.mark.parametrize("state", ["export", "mirror"])
def test_engine_and_sidecar_share_what_they_need(state: str) -> None:
    """An exported state is in memory that both mount, readable for one user; a mirror needs nothing of vLLM's pod."""
    items = rendered("gateway-api, mirror" if state == "mirror" else "gateway-api, engines")
    template = pods(items)["chat-block-engine-chat"]
    by_name = {one["name"]: one for one in template["spec"]["containers"]}
    vllm, sidecar = by_name["vllm"], by_name["sidecar"]
    volumes = {one["name"]: one for one in template["spec"]["volumes"]}
    assert volumes["shared-memory"]["emptyDir"]["medium"] == "Memory"
    environment = {one["name"]: one.get("value") for one in vllm["env"]}
    assert template["metadata"]["labels"]["app"] == "vllm"
    if state == "mirror":
        assert "PYTHONPATH" not in environment
        assert "--host=127.0.0.1" in vllm["args"]
        assert sidecar["readinessProbe"]["httpGet"]["port"] == 8000  # the proxy has the port of the pool
        assert sidecar["securityContext"]["runAsUser"] == 65532
        return
    (plugin,) = (one for one in template["spec"]["initContainers"] if one["name"] == "vllm-plugin")
    (copied,) = (one["mountPath"] for one in plugin["volumeMounts"])
    assert plugin["command"][-1] == copied == environment["PYTHONPATH"]
    file = environment["BLOCK_STATE_FILE"]
    assert f"--state-file={file}" in sidecar["args"]
    for container in (vllm, sidecar):
        (folder,) = (one["mountPath"] for one in container["volumeMounts"] if one["name"] == "shared-memory")
        assert file.startswith(f"{folder}/")
    assert vllm["securityContext"]["runAsUser"] == sidecar["securityContext"]["runAsUser"]
    assert "readinessProbe" not in sidecar  # without a sidecar an engine still serves
    assert plugin["command"][2].removesuffix("/.") in (ROOT / "deploy" / "Dockerfile").read_text()


def test_ranks_have_the_ids_that_schedulers_expect() -> None:
    """The sidecar of several ranks names them as discovery does, with the files of vLLM's plug-in."""
    items = rendered("gateway-api, ranks")
    (sidecar,) = (one for one in containers(items) if one["name"] == "sidecar")
    engines = [
        word.removeprefix("--engine=") for word in command_line(sidecar, "chat-0") if word.startswith("--engine=")
    ]
    assert engines == [
        "chat-0-rank-0=/dev/shm/block/engine.state,http://127.0.0.1:8000",
        "chat-0-rank-1=/dev/shm/block/engine-dp1.state,http://127.0.0.1:8001",
    ]
    (vllm,) = (one for one in containers(items) if one["name"] == "vllm")
    monitor = of_kind(items, "PodMonitor")["chat-block-engines"]["spec"]["podMetricsEndpoints"]
    labels = [
        one["replacement"]
        for endpoint in monitor
        for one in endpoint["relabelings"]
        if one["targetLabel"] == "instance"
    ]
    assert labels == ["$1-rank-0", "$1-rank-1"]
    assert {"--data-parallel-size-local=2", "--data-parallel-multi-port-external-lb"} <= set(vllm["args"])


@pytest.mark.parametrize("name", [*GATEWAY_API[:1], "gateway"])
def test_roles_allow_what_discovery_needs_and_no_more(name: str) -> None:
    """Discovery works with the chart's Role; without any one of its permissions something is missing."""
    role = of_kind(rendered(name), "Role")["chat-block"]
    permissions = allowed_by(role)
    assert {permission[0] for permission in permissions} == {"list", "watch"}
    settings = {} if name != "gateway" else {"endpoint_selector": "app=vllm", "endpoint_target_ports": ("8000",)}

    async def test() -> None:
        kube = Cluster(allowed=permissions)
        kube.put(POOLS, pool())
        kube.put(PODS, pod("a", "10.0.0.1"))
        with api_server(kube) as url:
            async with following(url, **settings) as found:
                await found.until("a")
                kube.put(PODS, pod("b", "10.0.0.2"))
                await found.until("a", "b")
                used = {(verb, path.rpartition("/")[2]) for verb, path, _ in kube.calls}
                assert {(one[0], one[1].partition(".")[0]) for one in permissions} == used
                for reflector in (found.source._pools, found.source._pods, *found.source._objectives):
                    assert reflector is None or not reflector.problem

    run(test)


def test_the_provisioner_may_do_what_its_hook_does() -> None:
    """It scales one object and its pods, and holds one Lease; nobody else may change anything."""
    items = rendered("gateway, provisioner")
    role = of_kind(items, "Role")["chat-block-provisioner"]
    assert allowed_by(role) == {
        ("get", "deployments.apps", "chat-block-engine-chat"),
        ("get", "deployments/scale.apps", "chat-block-engine-chat"), ("update", "deployments/scale.apps", "chat-block-engine-chat"),
        ("list", "pods"), ("watch", "pods"), ("patch", "pods"), ("delete", "pods"),
        ("create", "leases.coordination.k8s.io"),
        ("get", "leases.coordination.k8s.io", "chat-block-provisioner"),
        ("update", "leases.coordination.k8s.io", "chat-block-provisioner"),
    }  # fmt: skip
    accounts = {name: one["spec"].get("serviceAccountName") for name, one in pods(items).items()}
    assert [name for name, account in accounts.items() if account == "chat-block-provisioner"] == [
        "chat-block-provisioner"
    ]
    (binding,) = (one for name, one in of_kind(items, "RoleBinding").items() if name == "chat-block-provisioner")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "chat-block-provisioner", "namespace": "llm"}]
    assert "chat-block-engine-chat" in of_kind(items, "Deployment")


@pytest.mark.parametrize("name", [name for name in MATRIX if name.startswith("standalone")])
def test_envoy_has_the_addresses_of_the_release(name: str) -> None:
    """Its configuration is one of deploy/envoy, with the picker's port, its TLS, and the engines' Service."""
    items = rendered(name)
    values = merged(yaml.safe_load((CHART / "values.yaml").read_text()), LABELS, MATRIX[name])
    router = values["router"]
    config = yaml.safe_load(of_kind(items, "ConfigMap")["chat-block-envoy"]["data"]["envoy.yaml"])
    shipped = yaml.safe_load((ROOT / "deploy" / "envoy" / f"{router['proxy']['configuration']}.yaml").read_text())
    clusters = {one["name"]: one for one in config["static_resources"]["clusters"]}
    assert set(clusters) == {one["name"] for one in shipped["static_resources"]["clusters"]}
    assert ("transport_socket" in clusters["picker"]) == router["epp"]["secureServing"]
    text = json.dumps(config)
    assert f'"port_value": {router["epp"]["extProcPort"]}' in json.dumps(clusters["picker"])
    assert f'"port_value": {router["proxy"]["port"]}' in json.dumps(config["static_resources"]["listeners"])
    assert json.loads(re.search(r'"message_timeout": ("[^"]+")', text)[1]) == router["proxy"]["messageTimeout"]
    fails_open = '"failure_mode_allow": true' in text
    by_dns = router["proxy"]["configuration"] == "override_host"
    assert fails_open == (router["proxy"]["failOpen"] and by_dns)
    endpoints = re.findall(r'"address": "([^"]+svc[^"]+)", "port_value": (\d+)', text)
    expected = [
        ("chat-block-engines.llm.svc.cluster.local", str(one["number"]))
        for one in router["modelServers"]["targetPorts"]
    ]
    assert endpoints == (expected if by_dns else [])
    assert ("chat-block-engines" in of_kind(items, "Service")) == by_dns
    limits = any("--max-endpoints=1" in one.get("args", []) for one in containers(items))
    assert limits != by_dns


def test_gateways_wait_as_long_as_the_schedulers_policy_holds_requests() -> None:
    """They do not know this policy; the time is the one that a gateway with this policy would have."""
    for policy, given in (("block", []), ("slo: long = 0", ["75"]), ("polyserve", ["75"]), ("hold", ["12.5"])):
        values = {"mode": "gateway", "scheduler": {"enabled": True, "policy": policy}}
        done = helm("template", "chat", str(CHART), values=merged(LABELS, values))
        assert re.findall(r"--schedule-s=(\S+)", done.stdout) == given, done.stderr
        assert schedule_s_of(policy_from(policy)) == float(given[0] if given else DECIDE_S)


def test_dashboards_and_rules_are_those_of_the_repository() -> None:
    """Each dashboard is a ConfigMap, and all rules are in one object; jobs have the names that they ask for."""
    items = rendered("gateway-api, all")
    shipped = {path.name: json.loads(path.read_text()) for path in (ROOT / "deploy/grafana/dashboards").glob("*.json")}
    found = {
        name: json.loads(text)
        for item in of_kind(items, "ConfigMap").values() if "grafana_dashboard" in item["metadata"]["labels"]
        for name, text in item["data"].items()
    }  # fmt: skip
    assert found == shipped
    (rules,) = of_kind(items, "PrometheusRule").values()
    texts = [(ROOT / "deploy" / "prometheus" / f"{name}.yml").read_text() for name in ("recording", "alerts")]
    assert rules["spec"]["groups"] == [group for text in texts for group in yaml.safe_load(text)["groups"]]
    scraped = yaml.safe_load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    parts = {
        f"block-{template['metadata']['labels']['app.kubernetes.io/component']}"
        for name in MATRIX for workload, template in pods(rendered(name)).items() if "engine-" not in workload
    }  # fmt: skip
    engines = of_kind(rendered("gateway-api, engines"), "PodMonitor")["chat-block-engines"]
    jobs = {one["relabelings"][0]["replacement"] for one in engines["spec"]["podMetricsEndpoints"]}
    assert {one["job_name"] for one in scraped} <= parts | jobs


@pytest.mark.parametrize("name", ["sidecar-export", "sidecar-mirror"])
def test_patches_of_other_charts_deployments_are_valid(name: str, accepted: Any, tmp_path: Path) -> None:
    """As the real kubectl applies them: the objects are valid, keep what they had, and the sidecar accepts its flags."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="make helm installs it")
    mount = {"name": "models", "mountPath": "/models"}
    vllm = {
        "name": "vllm", "image": "vllm/vllm-openai:v0.32.0", "args": ["--model=m"], "volumeMounts": [mount],
        "env": [{"name": "HF_HOME", "value": "/models"}], "ports": [{"containerPort": 8000}],
    }  # fmt: skip
    spec = {
        "initContainers": [{"name": "model", "image": "busybox", "volumeMounts": [mount]}], "containers": [vllm],
        "volumes": [{"name": "models", "emptyDir": {}}],
    }  # fmt: skip
    item = {
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "vllm"},
        "spec": {"selector": {"matchLabels": {"app": "vllm"}},
                 "template": {"metadata": {"labels": {"app": "vllm"}}, "spec": spec}},
    }  # fmt: skip
    file, patch = tmp_path / "deployment.json", ROOT / "deploy" / "kubernetes" / f"{name}.yaml"
    file.write_text(json.dumps(item))
    done = subprocess.run(
        [HELM.with_name("kubectl"), "patch", "--local", "-f", file, "--patch-file", patch, "-o", "json"],
        capture_output=True, text=True, check=False, timeout=60, env={"HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    patched = json.loads(done.stdout)
    kubernetes_validate.validate(patched, KUBERNETES, strict=True)
    spec = patched["spec"]["template"]["spec"]
    volumes = {one["name"] for one in spec["volumes"]}
    assert "models" in volumes
    for container in [*spec["containers"], *spec["initContainers"]]:
        assert {one["name"] for one in container["volumeMounts"]} <= volumes
    parts = {one["name"]: one for one in spec["containers"]}
    assert mount in parts["vllm"]["volumeMounts"]
    sidecar, environment = parts["block-sidecar"], {one["name"]: one["value"] for one in parts["vllm"]["env"]}
    assert accepted(command_line(sidecar)) == "predictor"
    assert {one["containerPort"] for one in sidecar["ports"]} >= {50052, 9091}
    if name == "sidecar-export":
        assert f"--state-file={environment['BLOCK_STATE_FILE']}" in sidecar["args"]
        assert environment["HF_HOME"] == "/models"
    else:
        assert {name: value for name, value in parts["vllm"].items() if value} == vllm


def test_envoy_accepts_its_configuration(tmp_path: Path) -> None:
    """The real one, where it is installed (make envoy), by its own validation."""
    if not ENVOY.exists():
        pytest.skip("Envoy is not installed: make envoy")
    for name in (name for name in MATRIX if name.startswith("standalone")):
        file = tmp_path / "envoy.yaml"
        file.write_text(of_kind(rendered(name), "ConfigMap")["chat-block-envoy"]["data"]["envoy.yaml"])
        done = subprocess.run([ENVOY, "--mode", "validate", "-c", file], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({}, "router.modelServers.matchLabels: is missing"),
        ({"mode": "ingress"}, "mode"),
        ({"router": {"epp": {"replica": 2}}}, "replica"),
        ({"router": {"modelServers": {"targetPorts": [{"number": 0}]}}}, "number"),
        ({"image": {"digest": "sha256:12"}}, "digest"),
        (merged(LABELS, {"mode": "gateway", "httpRoute": {"create": True}}), "httpRoute.create: needs mode gateway-api"),
        (merged(LABELS, {"httpRoute": {"create": True}}), "httpRoute.inferenceGatewayName: is missing"),
        (merged(LABELS, {"scheduler": {"enabled": True}}), "scheduler.enabled: needs mode gateway"),
        (merged(LABELS, {"provisioner": {"enabled": True}}), "provisioner.target: is missing"),
        (merged(LABELS, {"provisioner": {"enabled": True, "target": "pod/x"}}), "target"),
        (merged(LABELS, {"mode": "standalone", "router": {"inferenceObjectives": [{"name": "a"}]}}), "need mode gateway-api"),
        (merged(LABELS, {"engines": [{"name": "a"}]}), "model"),
        (merged(LABELS, {"tls": {"enabled": True}}), "tls.secretName: is missing"),
        (merged(LABELS, {"mode": "gateway", "tls": {"engines": True}}), "tls.engines: needs tls.enabled"),
        (
            merged(LABELS, {"tls": {"enabled": True, "secretName": "a", "engines": True}}),
            "tls.engines: needs mode gateway",
        ),
        (
            merged(LABELS, {"mode": "gateway", "tls": {"enabled": True, "secretName": "a", "engines": True}},
                   {"engines": [{"name": "a", "model": "m", "profile": "p", "state": "mirror"}]}),
            "tls.engines: is not for engine a",
        ),
        (merged(LABELS, {"preStopSeconds": 0}), "preStopSeconds"),  # Kubernetes 1.30 refuses such a pod
        (
            merged(LABELS, TWO_PORTS,
                   {"engines": [{"name": "a", "model": "m", "profile": "p", "state": "mirror"}]}),
            "a mirrored engine has one port",
        ),
        (
            merged(LABELS, {"router": {"modelServers": {"targetPorts": [{"number": 8000}, {"number": 8002}]}}},
                   {"engines": [{"name": "a", "model": "m", "profile": "p"}]}),
            "vLLM gives its ranks consecutive ports",
        ),
    ],
)  # fmt: skip
def test_bad_values_are_refused_by_name(values: dict[str, Any], named: str) -> None:
    """By the schema of the values, or by a message of the chart."""
    done = helm("template", "chat", str(CHART), values=values)
    assert done.returncode != 0
    assert named in done.stderr


def test_texts_that_look_like_numbers_stay_texts() -> None:
    """Names and labels are texts for Kubernetes; flags have whole numbers as programs read them."""
    values = {
        "router": {"epp": {"flags": {"seed": 12345678, "deadline-margin-s": 0.25}, "certSecret": "7"}},
        "engines": [{"name": "a", "model": "m", "profile": "p", "tier": "1"}], "nameOverride": "12",
    }  # fmt: skip
    done = helm("template", "34", str(CHART), values=merged(LABELS, values))
    assert done.returncode == 0, done.stderr
    items = list(filter(None, yaml.safe_load_all(done.stdout)))
    picker, engine = (of_kind(items, "Deployment")[f"34-12-{part}"] for part in ("picker", "engine-a"))
    labels = engine["spec"]["template"]["metadata"]["labels"]
    assert all(isinstance(value, str) for value in labels.values()), labels
    assert labels["block-serving/tier"] == "1"
    (pool_name,) = of_kind(items, "InferencePool")
    assert pool_name == "34"
    volumes = picker["spec"]["template"]["spec"]["volumes"]
    assert {"name": "certificate", "secret": {"secretName": "7"}} in volumes
    (own,) = picker["spec"]["template"]["spec"]["containers"]
    assert {"--seed=12345678", "--deadline-margin-s=0.25"} <= set(own["args"])


def test_no_value_is_there_twice() -> None:
    """Of two values of one name, Helm reads the last one."""

    def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs), [name for name, _ in pairs]
        return dict(pairs)

    json.loads((CHART / "values.schema.json").read_text(), object_pairs_hook=distinct)
    node = yaml.compose((CHART / "values.yaml").read_text())
    nodes = [node]
    while nodes:
        node = nodes.pop()
        if isinstance(node, yaml.MappingNode):
            distinct([(key.value, value) for key, value in node.value])
            nodes += [value for _, value in node.value]


def test_the_values_in_the_manual_render() -> None:
    """The example of docs/kubernetes.md is valid, and makes what the page says."""
    (text,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "kubernetes.md").read_text(), re.DOTALL)
    done = helm("template", "chat", str(CHART), values=yaml.safe_load(text))
    assert done.returncode == 0, done.stderr
    kinds = {item["kind"] for item in yaml.safe_load_all(done.stdout) if item}
    assert kinds >= {"InferencePool", "InferenceObjective", "HTTPRoute", "Deployment", "PodDisruptionBudget"}


def test_values_that_are_said_to_be_the_same_exist() -> None:
    """The table of llm-d's values in docs/migrate.md names values of this chart."""
    rows = re.findall(
        r"^\| (`(?:router|httpRoute|provider)\..*?) \| the same",
        (ROOT / "docs" / "migrate.md").read_text(),
        re.MULTILINE,
    )
    assert len(rows) > 5
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for row in rows:
        parent: list[str] = []
        for name in re.findall(r"`([\w.]+)`", row):
            path = name.split(".") if not name.startswith(".") else [*parent, *name[1:].split(".")]
            parent = path[:-1] if not name.startswith(".") else parent
            found: Any = values
            for key in path:
                if key != "image" or "image" in found:
                    found = found[key]


def test_the_schema_knows_every_value() -> None:
    """The chart's own values are valid, and the schema has no value that the chart has not."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    jsonschema.validate(values, schema)

    def missing(schema: dict[str, Any], values: Any, path: str = "") -> Iterator[str]:
        for name, inner in schema.get("properties", {}).items():
            if name not in values:
                yield f"{path}{name}"
            elif isinstance(values[name], dict):
                yield from missing(inner, values[name], f"{path}{name}.")

    assert list(missing(schema, values)) == ["global"]  # Helm adds it
    examples = re.findall(
        r"^# +(\w+):|^# - (\w+):", (CHART / "values.yaml").read_text().partition("\nengines: []")[2], re.MULTILINE
    )
    engine = set(schema["properties"]["engines"]["items"]["properties"])
    named = {first or second for first, second in examples} | {
        "tolerations",
        "affinity",
        "podAnnotations",
        "volumeMounts",
    }
    assert engine <= named


def test_a_package_has_the_linked_files(tmp_path: Path) -> None:
    """`helm package` follows the link to deploy/envoy."""
    done = helm("package", str(CHART), "--destination", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("*.tgz")
    done = helm("template", "chat", str(archive), values=merged(LABELS, MATRIX["standalone"]))
    assert done.returncode == 0, done.stderr
    assert "override_host" in done.stdout


def test_monitoring_is_that_of_prometheus_alone() -> None:
    """The chart has all rules that ship, all dashboards, and targets with the names of jobs that alerts know."""
    items = rendered("gateway-api, all")
    (rule,) = of_kind(items, "PrometheusRule").values()
    files = [
        yaml.safe_load((ROOT / "deploy/prometheus" / name).read_text()) for name in ("recording.yml", "alerts.yml")
    ]
    assert rule["spec"]["groups"] == [group for file in files for group in file["groups"]]
    contained = {name for item in of_kind(items, "ConfigMap").values() for name in item["data"]}
    assert contained >= {path.name for path in (ROOT / "deploy/grafana/dashboards").glob("*.json")}
    (services,) = of_kind(items, "ServiceMonitor").values()
    (pods_of_engines,) = of_kind(rendered("gateway-api, engines"), "PodMonitor").values()
    assert all(one["honorLabels"] for one in services["spec"]["endpoints"])
    jobs = [one["relabelings"][0]["replacement"] for one in pods_of_engines["spec"]["podMetricsEndpoints"]]
    assert jobs[0] == "block-sidecar"
    assert set(jobs[1:]) == {"vllm"}
