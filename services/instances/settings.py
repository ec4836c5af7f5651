"""The settings that say where the list of instances comes from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from services.instances.instance import instance_from_flag
from services.instances.sources import FromFile, InstanceSource, Listed, source_from_name
from services.kubernetes.settings import KUBERNETES, KubernetesSettings
from services.settings import Nested, Option

BY_HTTP = "http"  # the value of --instances-from for those that are registered by HTTP alone


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceSourceSettings:
    """Where the list of instances comes from: flags, a file, a DNS name or Kubernetes."""

    listed: Annotated[
        tuple[str, ...],
        Option(
            "An instance: its id, the URL of its engine and host:port of its sidecar; names of its models, "
            "role=prefill or role=decode, tier=NAME with tier_tpot_ms=MS, and rank=R for a data-parallel rank of an "
            "engine that serves several at this URL may follow after further commas. Repeatable; in the environment "
            "variable, instances are separated by spaces.",
            name="instance",
            metavar="ID=ENGINE_URL,SIDECAR",
        ),
    ] = ()
    instances_file: Annotated[
        str, Option("TOML or JSON file with a list `instances`; it is read again when it changes.", metavar="FILE")
    ] = ""
    instances_dns: Annotated[
        str,
        Option(
            "DNS name; each of its addresses is an instance with the id ADDRESS:ENGINE_PORT.",
            metavar="NAME:ENGINE_PORT:SIDECAR_PORT",
        ),
    ] = ""
    instances_from: Annotated[
        str | None,
        Option(
            "Where else the instances come from: kubernetes follows the ready pods of an InferencePool (--pool-name), "
            "or those that have labels (--endpoint-selector); http starts with none, and waits for those that are "
            "registered at the port for operators (--metrics-port).",
            choices=(KUBERNETES, BY_HTTP),
            unset="the flags above",
        ),
    ] = None
    kubernetes: Annotated[KubernetesSettings, Nested()] = field(default_factory=KubernetesSettings)
    poll_s: Annotated[float, "Interval at which the file or the DNS name is checked for changes, in seconds."] = 1.0

    def __post_init__(self) -> None:
        """Refuse several sources, or none."""
        if not 0 < self.poll_s < 1e6:
            raise ValueError(f"poll_s: must be a time above 0, not {self.poll_s}")
        sources = (self.listed, self.instances_file, self.instances_dns, self.instances_from)
        if [bool(source) for source in sources].count(True) != 1:
            raise ValueError(
                "instances: give one of --instance, --instances-file, --instances-dns and --instances-from"
            )
        if self.instances_from == KUBERNETES:
            self.kubernetes.require_complete()
        elif self.kubernetes != KubernetesSettings():
            raise ValueError("instances_from: must be kubernetes, as the settings of kubernetes need it")

    def source(self) -> InstanceSource:
        """Make the source."""
        if self.instances_file:
            return FromFile(self.instances_file)
        if self.instances_dns:
            return source_from_name(self.instances_dns)
        if self.instances_from == KUBERNETES:
            from services.kubernetes.source import FromKubernetes

            return FromKubernetes(self.kubernetes)
        return Listed([instance_from_flag(text) for text in self.listed])
