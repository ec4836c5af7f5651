"""Schemas of custom resources that discovery reads and the chart has, written from the fields that are published.

InferencePool v1 of gateway-api-inference-extension 1.5, InferenceObjective v1alpha2 of llm-d-router, HTTPRoute v1 of
the Gateway API, and the monitors of the Prometheus operator. Unknown fields are refused, as strict validation does.
"""

from __future__ import annotations

from typing import Any

import jsonschema

DNS_NAME = {"type": "string", "minLength": 1, "maxLength": 253}
GROUP = {
    "type": "string", "maxLength": 253,
    "pattern": r"^$|^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
}  # fmt: skip
KIND = {"type": "string", "minLength": 1, "maxLength": 63, "pattern": r"^[a-zA-Z]([-a-zA-Z0-9]*[a-zA-Z0-9])?$"}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
LABEL_NAME = {"type": "string", "pattern": r"^([a-z0-9.-]{1,253}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$"}
LABEL_VALUE = {"type": "string", "maxLength": 63, "pattern": r"^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$"}
LABELS = {"type": "object", "minProperties": 1, "maxProperties": 64, "propertyNames": LABEL_NAME,
          "additionalProperties": LABEL_VALUE}  # fmt: skip
DURATION = {"type": "string", "pattern": r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"}


def table(required: list[str], **properties: Any) -> dict[str, Any]:
    """Make the schema of an object without further fields."""
    return {"type": "object", "required": required, "additionalProperties": False, "properties": properties}


def rows(items: dict[str, Any], **limits: Any) -> dict[str, Any]:
    """Make the schema of a list."""
    return {"type": "array", "items": items, **limits}


def resource(api_version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Make the schema of a custom resource around that of its spec."""
    metadata = {"type": "object", "required": ["name"], "properties": {"name": DNS_NAME}}
    return table(
        ["apiVersion", "kind", "metadata", "spec"],
        apiVersion={"const": api_version}, kind={"const": kind}, metadata=metadata, spec=spec, status={"type": "object"},
    )  # fmt: skip


REFERENCE = table(["name"], group=GROUP, kind=KIND, name=DNS_NAME)
TARGET_PORT = table(["number"], number=PORT)
PICKER = table(
    ["name"], group=GROUP, kind=KIND, name=DNS_NAME, port=TARGET_PORT, failureMode={"enum": ["FailOpen", "FailClose"]}
)
IS_SERVICE = {"not": {"required": ["kind"], "properties": {"kind": {"not": {"const": "Service"}}}}}
INFERENCE_POOL = table(
    ["selector", "targetPorts"],
    selector=table(["matchLabels"], matchLabels=LABELS),
    targetPorts=rows(TARGET_PORT, minItems=1, maxItems=8, uniqueItems=True),
    appProtocol={"enum": ["http", "kubernetes.io/h2c"]},
    endpointPickerRef={**PICKER, "if": IS_SERVICE, "then": {"required": ["port"]}},
)
INT32 = {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1}
INFERENCE_OBJECTIVE = table(["poolRef"], priority=INT32, poolRef=REFERENCE)
PATH_MATCH = table([], type={"enum": ["Exact", "PathPrefix", "RegularExpression"]}, value={"type": "string"})
HTTP_ROUTE = table(
    [],
    parentRefs=rows(table(["name"], group=GROUP, kind=KIND, name=DNS_NAME, namespace=DNS_NAME), maxItems=32),
    hostnames=rows(DNS_NAME, maxItems=16),
    rules=rows(
        table(
            [],
            matches=rows(table([], path=PATH_MATCH), maxItems=64),
            backendRefs=rows(table(["name"], group=GROUP, kind=KIND, name=DNS_NAME, port=PORT), maxItems=16),
            timeouts=table([], request=DURATION, backendRequest=DURATION),
        ),
        maxItems=16,
    ),
)
TEXT = {"type": "string"}
RELABELING = table([], sourceLabels=rows(TEXT), targetLabel=TEXT, replacement=TEXT, regex=TEXT, action=TEXT)
KEY_OF_SECRET = table(["key"], name=TEXT, key=TEXT, optional={"type": "boolean"})
SECRET_OR_MAP = table([], secret=KEY_OF_SECRET, configMap=KEY_OF_SECRET)
TLS_CONFIG = table(
    [], ca=SECRET_OR_MAP, cert=SECRET_OR_MAP, keySecret=KEY_OF_SECRET, serverName=TEXT,
    insecureSkipVerify={"type": "boolean"},
)  # fmt: skip
ENDPOINT = table(
    ["port"], honorLabels={"type": "boolean"}, port=TEXT, path=TEXT, interval=DURATION, relabelings=rows(RELABELING),
    scheme={"enum": ["http", "https"]}, tlsConfig=TLS_CONFIG,
)  # fmt: skip
ENDPOINTS = rows(ENDPOINT, minItems=1)
TEXTS = {"type": "object", "additionalProperties": TEXT}
ALERT = {
    **table(["expr"], alert=TEXT, record=TEXT, expr=TEXT, labels=TEXTS, annotations=TEXTS, keep_firing_for=DURATION)
}
ALERT["properties"]["for"] = DURATION
RULES = rows(table(["name", "rules"], name=TEXT, interval=DURATION, rules=rows(ALERT)), minItems=1)
NAMESPACES = table([], matchNames=rows(DNS_NAME), any={"type": "boolean"})
SELECTOR = table([], matchLabels=LABELS)
TARGET = table(["group", "kind", "name"], group=GROUP, kind=KIND, name=DNS_NAME)
ANY = {"type": "object"}
SCHEMAS = {
    "InferencePool": resource("inference.networking.k8s.io/v1", "InferencePool", INFERENCE_POOL),
    "InferenceObjective": resource("llm-d.ai/v1alpha2", "InferenceObjective", INFERENCE_OBJECTIVE),
    "HTTPRoute": resource("gateway.networking.k8s.io/v1", "HTTPRoute", HTTP_ROUTE),
    "ServiceMonitor": resource(
        "monitoring.coreos.com/v1", "ServiceMonitor",
        table(["selector", "endpoints"], selector=SELECTOR, endpoints=ENDPOINTS, namespaceSelector=NAMESPACES),
    ),
    "PodMonitor": resource(
        "monitoring.coreos.com/v1", "PodMonitor",
        table(["selector", "podMetricsEndpoints"], selector=SELECTOR, podMetricsEndpoints=ENDPOINTS, namespaceSelector=NAMESPACES),
    ),
    "PrometheusRule": resource("monitoring.coreos.com/v1", "PrometheusRule", table(["groups"], groups=RULES)),
    "DestinationRule": resource(
        "networking.istio.io/v1", "DestinationRule", table(["host"], host=DNS_NAME, trafficPolicy=ANY)
    ),
    "HealthCheckPolicy": resource(
        "networking.gke.io/v1", "HealthCheckPolicy", table(["targetRef", "default"], targetRef=TARGET, default=ANY)
    ),
    "GCPBackendPolicy": resource(
        "networking.gke.io/v1", "GCPBackendPolicy", table(["targetRef", "default"], targetRef=TARGET, default=ANY)
    ),
}  # fmt: skip
CUSTOM_KINDS = frozenset(SCHEMAS)


def validate(item: dict[str, Any]) -> None:
    """Refuse a custom resource as its API server would; other kinds pass."""
    schema = SCHEMAS.get(item["kind"])
    if schema is not None:
        jsonschema.validate(item, schema)
