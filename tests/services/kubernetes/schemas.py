"""OpenAPI schemas of the custom resources that discovery reads, written from the fields that their projects publish.

InferencePool v1 of gateway-api-inference-extension 1.5, InferenceObjective v1alpha2 of llm-d-router. Unknown fields
are refused, as `kubectl apply --validate=strict` does.
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
TARGET_PORT = {
    "type": "object", "required": ["number"], "additionalProperties": False, "properties": {"number": PORT},
}  # fmt: skip


def resource(api_version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    """Make the schema of a custom resource around that of its spec."""
    return {
        "type": "object", "required": ["apiVersion", "kind", "metadata", "spec"], "additionalProperties": False,
        "properties": {
            "apiVersion": {"const": api_version}, "kind": {"const": kind},
            "metadata": {"type": "object", "required": ["name"], "properties": {"name": DNS_NAME}},
            "spec": {"type": "object", "additionalProperties": False, **spec}, "status": {"type": "object"},
        },
    }  # fmt: skip


INFERENCE_POOL = resource(
    "inference.networking.k8s.io/v1", "InferencePool",
    {
        "required": ["selector", "targetPorts"],
        "properties": {
            "selector": {
                "type": "object", "required": ["matchLabels"], "additionalProperties": False,
                "properties": {"matchLabels": {
                    "type": "object", "minProperties": 1, "maxProperties": 64, "propertyNames": LABEL_NAME,
                    "additionalProperties": LABEL_VALUE,
                }},
            },
            "targetPorts": {"type": "array", "minItems": 1, "maxItems": 8, "uniqueItems": True, "items": TARGET_PORT},
            "appProtocol": {"enum": ["http", "kubernetes.io/h2c"]},
            "endpointPickerRef": {
                "type": "object", "required": ["name"], "additionalProperties": False,
                "properties": {
                    "group": GROUP, "kind": KIND, "name": DNS_NAME, "port": TARGET_PORT,
                    "failureMode": {"enum": ["FailOpen", "FailClose"]},
                },
                # a Service needs its port
                "if": {"not": {"required": ["kind"], "properties": {"kind": {"not": {"const": "Service"}}}}},
                "then": {"required": ["port"]},
            },
        },
    },
)  # fmt: skip

INFERENCE_OBJECTIVE = resource(
    "llm-d.ai/v1alpha2", "InferenceObjective",
    {
        "required": ["poolRef"],
        "properties": {
            "priority": {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1},
            "poolRef": {
                "type": "object", "required": ["name"], "additionalProperties": False,
                "properties": {"group": GROUP, "kind": KIND, "name": DNS_NAME},
            },
        },
    },
)  # fmt: skip

SCHEMAS = {"InferencePool": INFERENCE_POOL, "InferenceObjective": INFERENCE_OBJECTIVE}


def validate(item: dict[str, Any]) -> None:
    """Refuse a custom resource as its API server would; other kinds pass."""
    schema = SCHEMAS.get(item["kind"])
    if schema is not None:
        jsonschema.validate(item, schema)
