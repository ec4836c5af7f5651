"""Instances from pods, and objectives from InferenceObjectives: labels, annotations, ports."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import pytest

from scheduler.objectives import SHED
from services.instances.instance import Instance
from services.kubernetes.pods import instances_of, objective_from_resource, pod_from, pool_from, reason_for_none
from tests.services.kubernetes.api_server import pod, pool


def instances(item: dict[str, Any], ports: tuple[int, ...] = (8000,)) -> tuple[Instance, ...]:
    """The instances of a pod."""
    return instances_of(pod_from(item), ports, 50052)


def test_a_ready_pod_is_an_instance() -> None:
    """Its name is that of the pod; the sidecar is in the same pod."""
    assert instances(pod("vllm-0", "10.0.0.7")) == (
        Instance(instance_id="vllm-0", engine_url="http://10.0.0.7:8000", sidecar_address="10.0.0.7:50052"),
    )
    (one,) = instances(pod("vllm-0", "fd00::7"))
    assert (one.engine_url, one.sidecar_address) == ("http://[fd00::7]:8000", "[fd00::7]:50052")


@pytest.mark.parametrize(
    "item",
    [
        pod("a", "10.0.0.7", ready=False),
        pod("a", ""),
        pod("a", "", deleted=True),
        {**pod("a", "10.0.0.7"), "status": {}},
        pod("a", "10.0.0.7", labels={"llm-d.ai/role": "encode"}),
    ],
)
def test_a_pod_that_cannot_serve_is_none(item: dict[str, Any]) -> None:
    """It is not ready, has no address, or only encodes."""
    assert instances(item) == ()


@pytest.mark.parametrize("ready", [True, False])
@pytest.mark.parametrize(("drain_s", "deadline_s"), [(None, 100.0), ("10", 10.0), ("300", 100.0)])
def test_a_pod_that_is_being_deleted_drains(ready: bool, drain_s: str | None, deadline_s: float) -> None:
    """Its requests leave 20 s before it is killed, or when its annotation says so; not later."""
    annotations = {} if drain_s is None else {"block-serving/drain-s": drain_s}
    (one,) = instances(pod("a", "10.0.0.7", ready=ready, deleted=True, annotations=annotations))
    deleted_s = datetime(2026, 11, 1, tzinfo=UTC).timestamp()
    assert one.state == "draining"
    assert one.drain is not None
    assert (one.drain.deadline_unix_s - deleted_s, one.drain.migrate) == (deadline_s, True)


def test_a_pod_without_a_grace_period_drains_at_once() -> None:
    """It may be killed at any moment."""
    item = pod("a", "10.0.0.7", deleted=True)
    item["metadata"]["deletionGracePeriodSeconds"] = 0
    (one,) = instances(item)
    assert one.drain is not None
    assert one.drain.deadline_unix_s == datetime(2026, 11, 1, 0, 2, tzinfo=UTC).timestamp()


def test_a_container_without_ports_may_listen_on_any() -> None:
    """Kubernetes does not ask containers to declare theirs; a sidecar that does says nothing of the engine's."""
    item = pod("a", "10.0.0.7", ports=())
    assert [one.engine_url for one in instances(item)] == ["http://10.0.0.7:8000"]
    with pytest.raises(ValueError, match="the pod has none of them, but 8000,50052"):
        instances(pod("a", "10.0.0.7"), (8001,))


def test_each_port_is_an_instance() -> None:
    """A rank is the place of its port in the pool, also where an annotation leaves other ports out."""
    item = pod("vllm-0", "10.0.0.7", ports=(8000, 8001, 8002))
    found = instances(item, (8000, 8001, 8002))
    assert [(one.instance_id, one.engine_url) for one in found] == [
        (f"vllm-0-rank-{rank}", f"http://10.0.0.7:800{rank}") for rank in range(3)
    ]
    for name in ("llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports"):
        item["metadata"]["annotations"] = {name: "8000, 8002"}
        assert [one.instance_id for one in instances(item, (8000, 8001, 8002))] == ["vllm-0-rank-0", "vllm-0-rank-2"]


@pytest.mark.parametrize(
    ("label", "role"),
    [
        ("prefill", "prefill"), ("decode", "decode"), ("prefill-decode", "both"), ("both", "both"),
        ("encode-prefill", "prefill"), ("encode-prefill-decode", "both"),
    ],
)  # fmt: skip
def test_roles_are_those_of_the_label(label: str, role: str) -> None:
    """All of llm-d's words are understood."""
    (one,) = instances(pod("a", "10.0.0.7", labels={"llm-d.ai/role": label}))
    assert one.role == role


def test_labels_and_annotations_say_the_rest() -> None:
    """A tier and its bound, models, and a sidecar elsewhere."""
    (one,) = instances(
        pod(
            "a", "10.0.0.7", labels={"block-serving/tier": "fast"},
            annotations={
                "block-serving/tier-tpot-ms": "20", "block-serving/tier-closed": "true",
                "block-serving/models": "m1, m2", "block-serving/sidecar": "node-3:7000",
            },
        )
    )  # fmt: skip
    assert (one.tier, one.tier_tpot_s, one.tier_closed) == ("fast", 0.02, True)
    assert (one.models, one.sidecar_address) == (("m1", "m2"), "node-3:7000")
    (other,) = instances(pod("b", "10.0.0.8", annotations={"block-serving/sidecar": "7001"}))
    assert (other.sidecar_address, other.tier_tpot_s) == ("10.0.0.8:7001", math.inf)


@pytest.mark.parametrize(
    ("item", "named"),
    [
        (pod("a", "1.2.3.4", ports=(9000,)), "targetPorts 8000: the pod has none of them, but 9000,50052"),
        (pod("a", "1.2.3.4", labels={"llm-d.ai/role": "cook"}), "llm-d.ai/role: 'cook'"),
        (pod("a", "1.2.3.4", annotations={"llm-d.ai/active-ports": "8001"}), "active-ports: '8001' is no port"),
        (pod("a", "1.2.3.4", annotations={"block-serving/sidecar": "there"}), "sidecar_address: 'there'"),
        (pod("a", "1.2.3.4", annotations={"block-serving/tier-tpot-ms": "fast"}), "tier-tpot-ms: 'fast'"),
    ],
)
def test_a_pod_that_contradicts_itself_is_refused_by_field(item: dict[str, Any], named: str) -> None:
    """The error names the label, the annotation or the ports."""
    with pytest.raises(ValueError, match=named):
        instances(item)


def test_ports_need_no_declaration() -> None:
    """Container ports are informative in Kubernetes, so a pod without any is no contradiction."""
    item = pod("a", "10.0.0.7")
    for container in item["spec"]["containers"]:
        del container["ports"]
    assert len(instances(item)) == 1


def test_a_pool_names_labels_and_ports() -> None:
    """Without either it is refused."""
    found = pool_from(pool("chat", (8000, 8001), {"app": "vllm", "size": "8b"}))
    assert (found.name, found.ports, found.labels) == ("chat", (8000, 8001), {"app": "vllm", "size": "8b"})
    for spec, named in (({}, "matchLabels"), ({"selector": {"matchLabels": {"a": "b"}}}, "targetPorts")):
        with pytest.raises(ValueError, match=named):
            pool_from({"metadata": {"name": "chat"}, "spec": spec})


def objective(priority: int | None, pool_name: str = "chat", **annotations: str) -> dict[str, Any]:
    """An InferenceObjective."""
    spec: dict[str, Any] = {"poolRef": {"name": pool_name}}
    if priority is not None:
        spec["priority"] = priority
    notes = {f"block-serving/{name.replace('_', '-')}": text for name, text in annotations.items()}
    return {"metadata": {"name": "gold", "annotations": notes}, "spec": spec}


def test_a_higher_priority_of_an_objective_is_a_lower_number_of_ours() -> None:
    """Unset is 0; a negative one may be shed, and is best effort; all of them stay within 32 bits."""
    for given, ours in ((10, -10), (None, 0), (0, 0), (-3, 3), (2**31 - 1, 1 - 2**31), (-(2**31), 2**31 - 1)):
        found = objective_from_resource(objective(given), "chat")
        assert found is not None
        assert (found.name, found.priority, found.is_best_effort) == ("gold", ours, (given or 0) < 0)
        assert (found.when_late == SHED) == ((given or 0) < 0)
    assert objective_from_resource(objective(1, "other"), "chat") is None


def test_annotations_of_an_objective_give_targets() -> None:
    """They have the names of the table's fields."""
    found = objective_from_resource(
        objective(5, ttft_slo_s="0.5", tpot_slo_s="0.05", weight="2", when_late="demote"), "chat"
    )
    assert found is not None
    assert (found.slo.ttft_s, found.slo.tpot_s, found.weight, found.when_late) == (0.5, 0.05, 2.0, "demote")
    with pytest.raises(ValueError, match="block-serving/weight: 'much' is no number"):
        objective_from_resource(objective(5, weight="much"), "chat")


def test_the_reason_for_no_instance_names_what_to_look_at() -> None:
    """No pod, or pods that are not ready."""
    assert reason_for_none([], "app=vllm", "llm") == "no pod in namespace llm matches app=vllm"
    pods = [pod_from(pod("b", "1.2.3.4", deleted=True)), pod_from(pod("a", "", ready=False))]
    assert "2 of 2 pods that match app=vllm are not ready: a is not ready" in reason_for_none(pods, "app=vllm", "llm")


def test_one_port_may_serve_several_ranks() -> None:
    """Each is an instance that requests name; with a port for each rank there is nothing to name."""
    item = pod("vllm-0", "10.0.0.7", annotations={"block-serving/data-parallel-size": "3"})
    found = instances(item, (8000,))
    assert [(one.instance_id, one.data_parallel_rank) for one in found] == [
        (f"vllm-0-rank-{rank}", rank) for rank in range(3)
    ]
    assert {one.engine_url for one in found} == {"http://10.0.0.7:8000"}
    assert [one.data_parallel_rank for one in instances(pod("vllm-0", "10.0.0.7"), (8000, 8001))] == [None, None]
    with pytest.raises(ValueError, match="data-parallel-size: goes with one port, and the pool has 2"):
        instances(item, (8000, 8001))
    for text in ("0", "four", "257", "-1"):
        with pytest.raises(ValueError, match="data-parallel-size: must be a whole number from 1 to 256"):
            instances(pod("vllm-0", "10.0.0.7", annotations={"block-serving/data-parallel-size": text}), (8000,))
