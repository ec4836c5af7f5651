"""Settings of discovery in Kubernetes: which pods are instances, and how the API server is reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from services.instances.instance import is_port
from services.settings import PORTS, Option

KUBERNETES = "kubernetes"  # the value of --instances-from
MAX_PORTS = 8  # of an InferencePool


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesSettings:
    """An InferencePool, or a label selector with ports where there is no such object; names as in other pickers."""

    pool_name: Annotated[
        str, Option("kubernetes: name of the InferencePool whose ready pods are the instances.", metavar="NAME")
    ] = ""
    pool_namespace: Annotated[
        str,
        Option(
            "kubernetes: namespace of the InferencePool and of its pods.",
            metavar="NAME",
            unset="the namespace of this pod",
        ),
    ] = ""
    endpoint_selector: Annotated[
        str,
        Option(
            "kubernetes: labels of the instances' pods, in place of an InferencePool; goes with "
            "--endpoint-target-ports.",
            metavar="LABEL=VALUE,...",
        ),
    ] = ""
    endpoint_target_ports: Annotated[
        tuple[str, ...],
        Option(
            "kubernetes: ports of the engines in each pod, each an instance of its own. Repeatable.",
            metavar="PORT",
            separator=",",
        ),
    ] = ()
    pod_sidecar_port: Annotated[
        int, "kubernetes: port of the sidecar in each pod; the annotation block-serving/sidecar overrides it."
    ] = PORTS["predictor"]
    kubernetes_api: Annotated[
        str, Option("kubernetes: URL of the API server.", metavar="URL", unset="that of the cluster around this pod")
    ] = ""
    kubernetes_token_file: Annotated[
        str,
        Option(
            "kubernetes: file with the token for the API server; it is read for each call, as tokens rotate.",
            metavar="FILE",
            unset="that of the pod's service account",
        ),
    ] = ""
    kubernetes_ca_file: Annotated[
        str,
        Option(
            "kubernetes: certificates (PEM) that the API server's must be signed by.",
            metavar="FILE",
            unset="that of the pod's service account",
        ),
    ] = ""

    def require_complete(self) -> None:
        """Refuse settings that select no pods; ValueError names the field."""
        if bool(self.pool_name) == bool(self.endpoint_selector):
            raise ValueError("pool_name: give one of --pool-name and --endpoint-selector")
        if bool(self.endpoint_selector) != bool(self.endpoint_target_ports):
            raise ValueError("endpoint_target_ports: goes with --endpoint-selector, and only with it")
        _ = self.selector_labels, self.target_ports
        if not 0 < self.pod_sidecar_port < 65536:
            raise ValueError(f"pod_sidecar_port: must be a port, not {self.pod_sidecar_port}")

    @property
    def selector_labels(self) -> Mapping[str, str]:
        """The labels of `endpoint_selector`; ValueError where it is not a list of LABEL=VALUE."""
        labels: dict[str, str] = {}
        for part in self.endpoint_selector.split(",") if self.endpoint_selector else ():
            name, equals, value = (piece.strip() for piece in part.partition("="))
            if not (name and equals) or set(name + value) & set("=! ()"):
                raise ValueError(f"endpoint_selector: {self.endpoint_selector!r} must be LABEL=VALUE,LABEL=VALUE")
            labels[name] = value
        return labels

    @property
    def target_ports(self) -> tuple[int, ...]:
        """The ports of `endpoint_target_ports`; ValueError where one is no port."""
        ports = []
        for text in self.endpoint_target_ports:
            if not is_port(text):
                raise ValueError(f"endpoint_target_ports: {text!r} is no port")
            ports.append(int(text))
        if len(ports) > MAX_PORTS or len(set(ports)) < len(ports):
            raise ValueError(f"endpoint_target_ports: must be at most {MAX_PORTS} ports, each named once")
        return tuple(ports)
