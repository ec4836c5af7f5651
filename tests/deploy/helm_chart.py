"""Renders the Helm chart with the real Helm, and finds what is in it."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "block"
HELM = ROOT / ".venv-helm" / "helm"  # make helm
LABELS = {"router": {"modelServers": {"matchLabels": {"app": "vllm"}}}}

Values = dict[str, Any]
Item = dict[str, Any]


def merged(*parts: Values) -> Values:
    """Merge values as Helm does: maps by key, everything else by the last."""
    result: Values = {}
    for part in parts:
        for key, value in part.items():
            old = result.get(key)
            result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return result


ENGINE = {"name": "chat", "model": "m/tiny", "profile": "llama-3.1-8b-h100"}
PART = {
    "replicas": 3, "podAnnotations": {"team": "a"}, "nodeSelector": {"disk": "ssd"},
    "tolerations": [{"key": "gpu", "operator": "Exists"}], "env": [{"name": "MALLOC_ARENA_MAX", "value": "2"}],
    "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
}  # fmt: skip
TWO_PORTS = {"router": {"modelServers": {"targetPorts": [{"number": 8000}, {"number": 8001}]}}}
OBJECTIVES = '[[objective]]\nname = "chat"\nttft_slo_s = 0.5\n'
MATRIX: dict[str, Values] = {
    "gateway-api": {},
    "gateway-api, all": {
        "router": {
            "inferencePool": {"failureMode": "FailClose", "appProtocol": "http", "name": "llama"},
            "inferenceObjectives": [
                {"name": "gold", "priority": 10, "annotations": {"block-serving/ttft-slo-s": "0.5"}}, {"name": "plain"},
            ],
            "epp": {**PART, "certSecret": "cert", "flags": {"log-format": "text", "schedule-s": 2.5}},
            "monitoring": {"prometheus": {"enabled": True, "extraLabels": {"release": "prometheus"}, "rules": True},
                           "dashboards": {"enabled": True}},
        },
        "httpRoute": {"create": True, "inferenceGatewayName": "gw", "inferenceGatewayNamespace": "infra",
                      "hostnames": ["llm.example.org"]},
        "objectives": OBJECTIVES, "commonLabels": {"team": "serving"}, "imagePullSecrets": [{"name": "pull"}],
        "image": {"registry": "registry.example.org", "digest": "sha256:" + "0" * 64}, "logLevel": "debug",
        "networkPolicy": {"engines": True, "monitoringNamespace": "monitoring"},
    },
    "gateway-api, istio, own pool": {"provider": {"name": "istio"}, "router": {"inferencePool": {"create": False}}},
    "gateway-api, gke, plaintext": {"provider": {"name": "gke"}, "router": {"epp": {"secureServing": False}}},
    "gateway-api, engines": {
        "engines": [
            {**ENGINE, "replicas": 2, "tier": "fast", "args": ["--max-model-len=4096"],
             "env": [{"name": "HF_HOME", "value": "/models"}], "resources": {"limits": {"nvidia.com/gpu": 1}},
             "volumes": [{"name": "models", "emptyDir": {}}], "volumeMounts": [{"name": "models", "mountPath": "/models"}]},
            {**ENGINE, "name": "long", "profile": "mine", "runAsUser": 2000, "sidecarFlags": {"poll-ms": 1}},
        ],
        "profiles": {"mine": "{}"}, "router": {"monitoring": {"prometheus": {"enabled": True}}},
        "networkPolicy": {"engines": True},
    },
    "gateway-api, ranks": merged(
        TWO_PORTS, {"engines": [ENGINE], "router": {"monitoring": {"prometheus": {"enabled": True}}}}
    ),
    "gateway-api, roles": {"engines": [{**ENGINE, "name": "p", "role": "prefill"}, {**ENGINE, "name": "d", "role": "decode"}]},
    "gateway-api, mirror": {"engines": [{**ENGINE, "state": "mirror"}]},
    "standalone": {"mode": "standalone"},
    "standalone, original destination": {
        "mode": "standalone",
        "router": {"proxy": {"configuration": "original_dst", "port": 8080}, "epp": {"secureServing": False}},
    },
    "standalone, ranks, fails closed": merged(
        TWO_PORTS, {"mode": "standalone", "router": {"proxy": {"failOpen": False, "messageTimeout": "300s"}}}
    ),
    "gateway": {"mode": "gateway"},
    "gateway, schedulers": {
        "mode": "gateway", "scheduler": {**PART, "enabled": True, "policy": "linear: lambda = 0.3"},
        "gateway": {**PART, "apiKeySecret": "keys", "service": {"type": "LoadBalancer", "port": 8080}},
        "objectives": OBJECTIVES, "router": {"monitoring": {"prometheus": {"enabled": True}}},
    },
    "gateway, provisioner": {
        "mode": "gateway", "engines": [ENGINE],
        "provisioner": {**PART, "enabled": True, "target": "deployment/chat-block-engine-chat", "maxInstances": 8,
                        "flags": {"rule": "headroom", "shrink": False}},
        "tagger": {**PART, "flags": {"log-level": "warning"}},
    },
    "gateway, tls": {
        "mode": "gateway", "engines": [ENGINE], "tls": {"enabled": True, "secretName": "block-tls", "engines": True},
        "scheduler": {"enabled": True}, "gateway": {"apiKeySecret": "keys"},
        "router": {"monitoring": {"prometheus": {"enabled": True}}},
        "provisioner": {"enabled": True, "target": "deployment/chat-block-engine-chat"},
    },
    "gateway, tls without keys": {"mode": "gateway", "tls": {"enabled": True, "secretName": "block-tls"}},
    "gateway-api, tls": {
        "engines": [{**ENGINE, "state": "mirror"}],
        "tls": {"enabled": True, "secretName": "block-tls", "peers": ["*.llm.svc"], "serverName": "block.llm.svc"},
        "router": {"epp": {"certSecret": "cert"}, "monitoring": {"prometheus": {"enabled": True}}},
    },
    "gateway, little": {
        "mode": "gateway", "tagger": {"enabled": False}, "networkPolicy": {"enabled": False},
        "podDisruptionBudget": {"enabled": False}, "serviceAccount": {"create": False, "name": "given"},
        "rbac": {"create": False}, "fullnameOverride": "llm", "provisioner": {
            "enabled": True, "target": "statefulset/e", "persistentVolumeClaim": "journal"},
    },
}  # fmt: skip


def need_helm() -> None:
    """Skip where Helm is not installed."""
    if not HELM.is_file():
        pytest.skip("Helm is not installed: make helm")


def helm(*arguments: str, values: Values | None = None) -> subprocess.CompletedProcess[str]:
    """Run Helm; values come by standard input."""
    need_helm()
    flags = [] if values is None else ["--values", "-"]
    return subprocess.run(
        [HELM, *arguments, *flags], input=None if values is None else json.dumps(values), capture_output=True,
        text=True, check=False, timeout=120,
    )  # fmt: skip


@functools.cache
def _rendered(text: str) -> tuple[Item, ...]:
    done = helm("template", "chat", str(CHART), "--namespace", "llm", values=json.loads(text))
    assert done.returncode == 0, done.stderr
    return tuple(item for item in yaml.safe_load_all(done.stdout) if item)


def rendered(name: str) -> tuple[Item, ...]:
    """Render the chart with the values of a name in the matrix."""
    return _rendered(json.dumps(merged(LABELS, MATRIX[name])))


def of_kind(items: tuple[Item, ...], kind: str) -> dict[str, Item]:
    """Return the objects of a kind by name."""
    return {item["metadata"]["name"]: item for item in items if item["kind"] == kind}


def pods(items: tuple[Item, ...]) -> dict[str, Item]:
    """Return all pod templates by the names of their workloads."""
    return {
        item["metadata"]["name"]: item["spec"]["template"]
        for item in items if item["kind"] in ("Deployment", "StatefulSet")
    }  # fmt: skip


def containers(items: tuple[Item, ...]) -> Iterator[Item]:
    """Yield the containers of all pods, without those that start them."""
    for template in pods(items).values():
        yield from template["spec"]["containers"]


def is_ours(container: Item) -> bool:
    """Whether a container has the image of Block."""
    return "block-serving" in container["image"]


def command_line(container: Item, pod_name: str = "chat-0") -> list[str]:
    """Return the arguments of a container as Kubernetes expands them."""
    return [word.replace("$(POD_NAME)", pod_name) for word in container["args"]]
