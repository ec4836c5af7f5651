"""Discovery against a stand-in of the API server: pods come and go, watches break, tokens rotate, permissions lack."""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.instances.instance import Instances
from services.instances.settings import InstanceSourceSettings
from services.instances.sources import watch
from services.kubernetes import api, reflector
from services.kubernetes.settings import KubernetesSettings
from services.kubernetes.source import FromKubernetes
from services.objectives import ObjectiveTable
from tests.services.kubernetes.api_server import OBJECTIVES, PODS, POOLS, Cluster, api_server, pod, pool
from tests.services.waiting import bound, run, until


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test needs long ones."""
    monkeypatch.setattr(reflector, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(reflector, "LONGEST_PAUSE_S", 0.05)


class Following:
    """A source that is followed as a server does it, with all lists that it reported."""

    def __init__(self, source: FromKubernetes) -> None:
        """Nothing is reported yet."""
        self.source = source
        self.lists: list[Instances] = []

    @property
    def names(self) -> list[str] | None:
        """The instances now; None where none were ever reported."""
        return [one.instance_id for one in self.lists[-1]] if self.lists else None

    async def until(self, *names: str) -> None:
        """Wait for exactly these instances."""
        await until(lambda: self.names == list(names), what=f"{names}, not {self.names}")

    async def until_problem(self, text: str) -> None:
        """Wait until readiness says no, for this reason."""
        await until(lambda: text in self.source.problem(), what=f"{text!r} in {self.source.problem()!r}")


@asynccontextmanager
async def following(url: str, **settings: Any) -> AsyncIterator[Following]:
    """Follow the pool `chat`, or what the settings say."""
    if "endpoint_selector" not in settings:
        settings = {"pool_name": "chat", **settings}
    values = KubernetesSettings(pool_namespace="llm", kubernetes_api=url, **settings)
    source = InstanceSourceSettings(instances_from="kubernetes", kubernetes=values).source()
    found = Following(source)
    task = asyncio.create_task(watch(source, 1.0, found.lists.append))
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.wait([task])
        await source.close()


def cluster(*pods: dict[str, Any], **values: Any) -> Cluster:
    """A cluster with a pool and some pods."""
    made = Cluster(**values)
    made.put(POOLS, pool())
    for one in pods:
        made.put(PODS, one)
    return made


def test_pods_are_instances_while_they_are_ready() -> None:
    """They come, become ready, stop being so, drain while they are deleted; none is ever reported before it is ready."""

    async def test() -> None:
        kube = cluster(pod("a", "10.0.0.1"), pod("never", "10.0.0.9", ready=False))
        kube.put(PODS, pod("other", "10.0.0.8", labels={"app": "database"}))
        with api_server(kube) as url:
            async with following(url) as found:
                await found.until("a")
                kube.put(PODS, pod("b", "", ready=False))
                kube.put(PODS, pod("b", "10.0.0.2", ready=True))
                await found.until("a", "b")
                kube.put(PODS, pod("a", "10.0.0.1", ready=False))
                await found.until("b")
                kube.put(PODS, pod("a", "10.0.0.1", ready=True))
                await found.until("a", "b")
                kube.put(PODS, pod("b", "10.0.0.2", deleted=True))
                await until(lambda: [one.state for one in found.lists[-1]] == ["ready", "draining"])
                kube.delete(PODS, "b")
                await found.until("a")
                kube.put(PODS, pod("a", "10.0.0.7"))  # by another pod of the same name
                await until(lambda: found.lists[-1][0].engine_url == "http://10.0.0.7:8000")
                kube.put(PODS, pod("a", "10.0.0.7", labels={"app": "database"}))
                await found.until_problem("1 of 1 pods that match app=vllm are not ready: never is not ready")
                assert found.names == []
                assert not {one.instance_id for seen in found.lists for one in seen} & {"never", "other"}
                assert kube.count("list", PODS) == 1

    run(test)


def test_ports_and_selectors_of_the_pool_are_followed() -> None:
    """Each port is an instance; other labels are other pods; without the pool there are none."""

    async def test() -> None:
        kube = cluster(pod("a", "10.0.0.1", ports=(8000, 8001)), pod("b", "10.0.0.2", labels={"app": "new"}))
        with api_server(kube) as url:
            async with following(url) as found:
                await found.until("a")
                kube.put(POOLS, pool(ports=(8000, 8001)))
                await found.until("a-rank-0", "a-rank-1")
                kube.put(POOLS, pool(labels={"app": "new"}))
                await found.until("b")
                kube.delete(POOLS, "chat")
                await found.until()
                assert found.source.problem() == "InferencePool llm/chat does not exist, or is invalid"
                kube.put(POOLS, pool())
                await found.until("a")
                assert found.source.problem() == ""

    run(test)


def test_a_selector_needs_no_pool() -> None:
    """Clusters without the custom resources can be followed by labels and ports; nothing else is asked for."""

    async def test() -> None:
        kube = Cluster()
        del kube.collections[POOLS], kube.collections[OBJECTIVES]
        kube.put(PODS, pod("a", "10.0.0.1"))
        with api_server(kube) as url:
            async with following(url, endpoint_selector="app=vllm", endpoint_target_ports=("8000",)) as found:
                await found.until("a")
                assert {path for _, path, _ in kube.calls} == {PODS}

    run(test)


def test_a_version_that_is_gone_is_listed_again() -> None:
    """Status 410 in a watch costs one list; what was missed meanwhile is there."""

    async def test() -> None:
        kube = cluster(pod("a", "10.0.0.1"))
        with api_server(kube) as url:
            async with following(url) as found:
                await found.until("a")
                with kube.changed:  # one step for the watch
                    kube.put(PODS, pod("b", "10.0.0.2"))
                    kube.delete(PODS, "a")
                    kube.compact()
                await found.until("b")
                assert kube.count("list", PODS) == 2
                assert found.source.problem() == ""

    run(test)


def test_versions_that_are_always_gone_are_no_storm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists that succeed do not shorten the pauses: their number grows by the logarithm of time."""
    pauses: list[float] = []

    async def slept(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) >= 8:
            raise asyncio.CancelledError

    async def test() -> None:
        kube = cluster(failing={("watch", "pods"): 410})
        monkeypatch.setattr(reflector, "FIRST_PAUSE_S", 0.5)
        monkeypatch.setattr(reflector, "LONGEST_PAUSE_S", 15.0)
        monkeypatch.setattr(reflector.random, "random", lambda: 0.0)
        with api_server(kube) as url:
            settings = KubernetesSettings(kubernetes_api=url, pool_name="chat")
            resource = api.Resource(plural="pods", namespace="llm")
            client = api.KubernetesApi(api.api_address(settings))
            one = reflector.Reflector(client, resource, dict, lambda: None)
            with monkeypatch.context() as patched:
                patched.setattr(reflector.asyncio, "sleep", slept)
                with pytest.raises(asyncio.CancelledError):
                    await one.run()
            client.close()

    run(test)
    assert pauses == [0.0, 1.0, 2.0, 4.0, 8.0, 15.0, 15.0, 15.0]


def test_watches_that_break_go_on_where_they_were() -> None:
    """A cut in the middle of a line loses nothing, and nothing is listed again."""

    async def test() -> None:
        kube = cluster(pod("a", "10.0.0.1"))
        with api_server(kube) as url:
            async with following(url) as found:
                await found.until("a")
                kube.set(drop_watches_after=700)  # between one and two events
                for number in range(5):
                    kube.put(PODS, pod(f"p{number}", f"10.0.1.{number}"))
                kube.delete(PODS, "a")
                await found.until(*(f"p{number}" for number in range(5)))
                assert kube.count("list", PODS) == 1
                assert kube.count("watch", PODS) > 2

    run(test)


def test_slow_watches_are_read_piece_by_piece() -> None:
    """Lines that come in small pieces are put together."""

    async def test() -> None:
        kube = cluster(pod("a", "10.0.0.1"), piece_bytes=7)
        with api_server(kube) as url:
            async with following(url) as found:
                await found.until("a")
                kube.put(PODS, pod("b", "10.0.0.2"))
                kube.put(PODS, pod("a", "10.0.0.1", ready=False))
                await found.until("b")
                assert kube.count("list", PODS) == 1

    run(test)


def test_a_watch_that_says_nothing_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that died shows nothing: after a while another watch goes on from the last version."""
    monkeypatch.setattr(reflector, "QUIET_S", 0.1)

    async def test() -> None:
        kube = cluster(pod("a", "10.0.0.1"))
        with api_server(kube) as url:
            async with following(url) as found:
                await found.until("a")
                await until(lambda: kube.count("watch", PODS) >= 3)
                assert kube.count("list", PODS) == 1
                assert (found.names, found.source.problem()) == (["a"], "")
                kube.put(PODS, pod("b", "10.0.0.2"))
                await found.until("a", "b")

    run(test)


def test_bookmarks_keep_the_version_young() -> None:
    """After one, a watch may start again although the history before it is gone."""

    async def test() -> None:
        kube = cluster(pod("a", "10.0.0.1"))
        with api_server(kube) as url:
            async with following(url) as found:
                await found.until("a")
                for _ in range(10):
                    kube.put(POOLS, pool())
                marked = kube.version
                kube.set(bookmarks=1)
                await until(lambda: any(
                    one._version == str(marked) for one in (found.source._pods,) if one is not None
                ))  # fmt: skip
                watches = kube.count("watch", PODS)
                kube.set(oldest=marked, drop_watches_after=0)
                kube.put(PODS, pod("b", "10.0.0.2"))
                await until(lambda: kube.count("watch", PODS) > watches)
                kube.set(drop_watches_after=None)
                await found.until("a", "b")
                assert kube.count("list", PODS) == 1

    run(test)


def test_long_lists_come_in_pages() -> None:
    """A page that expires begins the list again, and nothing of the first try is reported."""

    async def test() -> None:
        kube = cluster(*(pod(f"p{number}", f"10.0.1.{number}") for number in range(7)), page_items=2)
        with api_server(kube) as url:
            async with following(url) as found:
                await found.until(*(f"p{number}" for number in range(7)))
                assert kube.count("list", PODS) == 4
                kube.set(failing={("watch", "pods"): 410})
                kube.compact()
                await until(lambda: kube.count("list", PODS) >= 12)
                kube.set(failing={})
                kube.delete(PODS, "p3")
                await found.until(*(f"p{number}" for number in range(7) if number != 3))
                assert all(len(seen) >= 6 for seen in found.lists)

    run(test)


def test_the_last_list_stays_while_the_api_server_is_away(caplog: pytest.LogCaptureFixture) -> None:
    """Readiness stays, too; after a restart what changed meanwhile is found."""
    caplog.set_level(logging.WARNING)

    async def test() -> None:
        kube = cluster(pod("a", "10.0.0.1"))
        with api_server(kube) as url:
            async with following(url) as found:
                await found.until("a")
                kube.set(failing={("watch", "pods"): 500, ("list", "pods"): 500}, drop_watches_after=0)
                kube.put(PODS, pod("b", "10.0.0.2"))
                await until(lambda: "cannot watch pods in namespace llm: status 500" in logged(caplog))
                assert found.names == ["a"]
                assert found.source.problem() == ""
                kube.set(failing={}, drop_watches_after=None)
                await found.until("a", "b")

    run(test)


def logged(caplog: pytest.LogCaptureFixture) -> str:
    """All reasons in the log."""
    return "\n".join(str(getattr(record, "fields", {}).get("reason", "")) for record in caplog.records)


def test_a_restart_of_the_api_server_is_survived() -> None:
    """Connections are refused for a while; the server then knows nothing of earlier versions."""

    async def test() -> None:
        kube = cluster(pod("a", "10.0.0.1"))
        async with AsyncExitStack() as stack:
            with api_server(kube) as url:
                found = await stack.enter_async_context(following(url))
                await found.until("a")
            await until(lambda: found.source._pods is not None and "cannot be reached" in found.source._pods.problem)
            assert (found.names, found.source.problem()) == (["a"], "")
            kube.compact()
            kube.put(PODS, pod("c", "10.0.0.3"))
            server = await bound(lambda: stack.enter_context(api_server(kube, port=int(url.rpartition(":")[2]))))
            assert server == url
            await found.until("a", "c")

    run(test)


def test_a_token_is_read_again_when_it_rotates(tmp_path: Path) -> None:
    """The old one is refused from then on; calls with the new one succeed without a restart."""

    async def test() -> None:
        file = tmp_path / "token"
        first, second = "one", "two"
        file.write_text(f"{first}\n")
        kube = cluster(pod("a", "10.0.0.1"), token=first)
        with api_server(kube) as url:
            async with following(url, kubernetes_token_file=str(file)) as found:
                await found.until("a")
                kube.set(token=second, drop_watches_after=0)
                kube.put(PODS, pod("b", "10.0.0.2"))
                await until(lambda: found.source._pods is not None and "status 401" in found.source._pods.problem)
                kube.set(drop_watches_after=None)
                file.write_text(f"{second}\n")
                await found.until("a", "b")

    run(test)


@pytest.mark.parametrize(
    ("allowed", "named"),
    [
        (set(), "cannot list inferencepools.inference.networking.k8s.io in namespace llm: status 403: Forbidden"),
        (
            {("list", "inferencepools.inference.networking.k8s.io")},
            "cannot watch inferencepools.inference.networking.k8s.io in namespace llm: status 403: Forbidden",
        ),
        (
            {(verb, "inferencepools.inference.networking.k8s.io") for verb in ("list", "watch")},
            "cannot list pods in namespace llm: status 403: Forbidden",
        ),
    ],
)
def test_a_missing_permission_is_named(
    allowed: set[tuple[str, str]], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has verb and resource, readiness says no, and permissions that come later are used."""
    caplog.set_level(logging.WARNING)

    async def test() -> None:
        kube = cluster(pod("a", "10.0.0.1"), allowed=allowed)
        with api_server(kube) as url:
            async with following(url) as found:
                await until(lambda: named in logged(caplog), what=f"{named} in {logged(caplog)}")
                if len(allowed) != 1:
                    await found.until_problem(named)
                    assert found.names is None
                kube.set(allowed=None)
                await found.until("a")
                assert found.source.problem() == ""

    run(test)


@pytest.mark.parametrize("status", [400, 403, 404])
def test_lists_replace_a_watch_that_is_refused(status: int, caplog: pytest.LogCaptureFixture) -> None:
    """No pod stays an instance that is no longer ready; the log says once what is refused."""
    caplog.set_level(logging.WARNING)

    async def test() -> None:
        kube = cluster(pod("a", "10.0.0.1"), pod("b", "10.0.0.2"), failing={("watch", "pods"): status})
        with api_server(kube) as url:
            async with following(url) as found:
                await found.until("a", "b")
                kube.put(PODS, pod("a", "10.0.0.1", ready=False))
                await found.until("b")
                kube.put(PODS, pod("a", "10.0.0.1"))
                await found.until("a", "b")
                assert logged(caplog).count("cannot watch pods in namespace llm") == 1
                kube.set(failing={})
                kube.delete(PODS, "b")
                await found.until("a")

    run(test)


def test_a_cluster_without_the_resource_is_named() -> None:
    """The custom resource may be installed later."""

    async def test() -> None:
        kube = cluster(pod("a", "10.0.0.1"))
        del kube.collections[POOLS], kube.collections[OBJECTIVES]
        with api_server(kube) as url:
            async with following(url) as found:
                await found.until_problem(
                    "cannot list inferencepools.inference.networking.k8s.io in namespace llm: status 404"
                )
                kube.collections[POOLS] = {}
                await found.until_problem("InferencePool llm/chat does not exist")
                kube.put(POOLS, pool())
                await found.until("a")

    run(test)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda kube: kube.delete(POOLS, "chat"), "InferencePool llm/chat does not exist"),
        (
            lambda kube: kube.put(POOLS, pool(labels={"app": "vlm"})),
            "InferencePool llm/chat has no instance: no pod in namespace llm matches app=vlm",
        ),
        (
            lambda kube: kube.put(POOLS, pool(ports=(8080,))),
            "InferencePool llm/chat has no instance: pod a: targetPorts 8080: the pod has none of them, but 8000,50052",
        ),
        (lambda kube: kube.set(silent=True), "did not send anything in time"),
    ],
)
def test_a_bad_configuration_says_what_is_wrong(
    change: Any, named: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Readiness says no, with the object; nothing crashes, and the list comes when it is put right."""
    monkeypatch.setattr(api, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(api.KubernetesApi.__init__, "__kwdefaults__", {"timeout_s": 0.2})
    caplog.set_level(logging.WARNING)

    async def test() -> None:
        kube = cluster(pod("a", "10.0.0.1"))
        change(kube)
        with api_server(kube) as url:
            async with following(url) as found:
                await found.until_problem(named)
                assert not found.names
                await until(lambda: named in logged(caplog))
                kube.set(silent=False)
                kube.put(POOLS, pool())
                await found.until("a")

    run(test)


def test_objectives_come_from_the_cluster() -> None:
    """By name, of this pool only; a file's table has precedence; they change while a server runs."""

    async def test() -> None:
        kube = cluster(pod("a", "10.0.0.1"))
        gold = {"metadata": {"name": "gold"}, "spec": {"poolRef": {"name": "chat"}, "priority": 10}}
        kube.put(OBJECTIVES, gold)
        kube.put(OBJECTIVES, {"metadata": {"name": "else"}, "spec": {"poolRef": {"name": "other"}}})
        with api_server(kube) as url:
            async with following(url) as found:
                table = ObjectiveTable(also=found.source.objectives)
                await until(lambda: set(found.source.objectives()) == {"gold"})
                assert table.named("gold", "x-block-objective").priority == -10
                with pytest.raises(ValueError, match="x-block-objective: 'golden' is no known objective"):
                    table.named("golden", "x-block-objective")
                gold["spec"]["priority"] = -1
                kube.put(OBJECTIVES, gold)
                await until(lambda: table.named("gold", "objective").is_best_effort)
                kube.delete(OBJECTIVES, "gold")
                await until(lambda: not found.source.objectives())

    run(test)


@pytest.mark.parametrize("seed", range(3))
def test_any_sequence_of_changes_and_faults_ends_in_the_right_list(seed: int) -> None:
    """Pods change while watches are cut and history is forgotten; what was never ready is never reported."""

    async def test() -> None:
        draw = random.Random(seed)
        kube = cluster()
        ready: dict[str, bool] = {}
        ever: set[str] = set()
        with api_server(kube) as url:
            async with following(url) as found:
                for step in range(120):
                    name = f"p{draw.randrange(12)}"
                    kind = draw.random()
                    if kind < 0.1:
                        kube.compact()
                    elif kind < 0.2:
                        kube.set(drop_watches_after=draw.choice([None, 0, 900, 5000]))
                    elif kind < 0.35 and name in ready:
                        kube.delete(PODS, name)
                        del ready[name]
                    else:
                        ready[name] = draw.random() < 0.5 and name != "p0"
                        kube.put(PODS, pod(name, f"10.0.0.{step}", ready=ready[name]))
                        ever |= {name} if ready[name] else set()
                    if draw.random() < 0.2:
                        await asyncio.sleep(0)
                kube.set(drop_watches_after=None)
                kube.put(PODS, pod("last", "10.0.0.254"))
                await found.until("last", *sorted(name for name, is_ready in ready.items() if is_ready))
                assert {one.instance_id for seen in found.lists for one in seen} <= ever | {"last"}

    run(test)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_the_api_server_is_known_by_its_certificate(tmp_path: Path) -> None:
    """A certificate that the file does not have is refused; one that it has later is accepted without a restart."""

    def certificate(name: str) -> tuple[Path, Path]:
        key, cert = tmp_path / f"{name}.key", tmp_path / f"{name}.crt"
        subprocess.run(
            [shutil.which("openssl"), "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
             "-keyout", key, "-out", cert, "-subj", "/CN=kube", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "9"],
            check=True, capture_output=True,
        )  # fmt: skip
        return key, cert

    async def test() -> None:
        key, cert = certificate("server")
        _, other = certificate("other")
        trusted = tmp_path / "ca.crt"
        shutil.copy(other, trusted)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(cert, key)
        kube = cluster(pod("a", "10.0.0.1"))
        with api_server(kube, tls) as url:
            async with following(url, kubernetes_ca_file=str(trusted)) as found:
                await found.until_problem("certificate")
                shutil.copy(cert, trusted)
                await found.until("a")

    run(test)
