"""Parts of the picker by themselves: names of models, endpoints, lists with names of hosts."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.envoy.v3 import external_processor_pb2 as wire
from services.endpoint_picker.endpoints import ResolvedSource, address_of, endpoint_of
from services.endpoint_picker.messages import body_chunks, subset_in
from services.endpoint_picker.model_names import ModelNames
from services.instances.instance import Instance, Instances
from tests.services.waiting import run

TEXTS = st.text(alphabet='model": \\ti\nny{}é', max_size=12)
ONE = Instance(instance_id="a", engine_url="http://localhost:8001", sidecar_address="127.0.0.1:1")


@given(
    texts=st.lists(TEXTS, max_size=4),
    of_client=TEXTS,
    spaced=st.booleans(),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_names_are_replaced_however_a_response_is_cut(
    texts: list[str], of_client: str, cuts: list[int], *, spaced: bool
) -> None:
    """Texts stay as they are, whatever they contain; nothing is lost or held back at the end."""
    separators = (", ", ": ") if spaced else (",", ":")

    def written(name: str) -> bytes:
        events = [{"text": text, "model": name} for text in texts]
        return b"".join(b"data: " + json.dumps(one, separators=separators).encode() + b"\n\n" for one in events)

    names = ModelNames(of_client=of_client, of_engine="tiny")
    whole = written("tiny")
    places = sorted({0, len(whole), *(cut % (len(whole) + 1) for cut in cuts)})
    told = b"".join(names.replaced(whole[start:stop], end=False) for start, stop in itertools.pairwise(places))
    assert told + names.replaced(b"", end=True) == written(of_client)


def test_a_name_is_not_held_back_for_ever() -> None:
    """What can no longer be the name of the model is passed on."""
    names = ModelNames(of_client="mine", of_engine="tiny")
    assert names.replaced(b'{"model": "ti', end=False) == b"{"
    assert names.replaced(b'me", "x": 1}', end=False) == b'"model": "time", "x": 1}'
    long = b'"model": "' + 2000 * b"x"
    assert names.replaced(long, end=False) == long


@given(body=st.binary(max_size=200_000), end=st.booleans())
def test_a_body_in_pieces_is_the_body(body: bytes, *, end: bool) -> None:
    """No piece is too large, and only the last one ends it."""
    pieces = [one.body_mutation.streamed_response for one in body_chunks(body, end=end)]
    assert b"".join(piece.body for piece in pieces) == body
    assert all(len(piece.body) <= 62_000 for piece in pieces)
    assert [piece.end_of_stream for piece in pieces] == [False] * (len(pieces) - 1) + [end]


@pytest.mark.parametrize(
    ("url", "endpoint", "address"),
    [
        ("http://10.0.0.7:8000", "10.0.0.7:8000", "10.0.0.7"),
        ("http://10.0.0.7", "10.0.0.7:80", "10.0.0.7"),
        ("http://[fd00::7]:8000", "[fd00::7]:8000", "[fd00::7]"),
    ],
)
def test_endpoints_of_engines(url: str, endpoint: str, address: str) -> None:
    """As proxies write them; an IPv6 address is in brackets."""
    assert endpoint_of(url) == endpoint
    assert address_of(endpoint) == address_of(address) == address


def test_there_is_a_subset_only_where_the_proxy_gives_one() -> None:
    """An empty one is not the same as none."""
    metadata = wire.Metadata()
    assert subset_in(metadata) is None
    fields = metadata.filter_metadata["envoy.lb.subset_hint"].fields
    assert subset_in(metadata) is None
    fields["x-gateway-destination-endpoint-subset"].string_value = ""
    assert subset_in(metadata) == frozenset()


class Lists:
    """A source that returns one list after the other."""

    def __init__(self, *lists: Instances | None) -> None:
        """Take the lists."""
        self._lists = list(lists)

    async def poll(self) -> Instances | None:
        """Return the next one."""
        return self._lists.pop(0)


def test_names_of_hosts_are_resolved() -> None:
    """An instance gets an address; a list that has not changed is not reported again."""

    async def test() -> None:
        source = ResolvedSource(Lists((ONE,), None, (ONE,), ()))
        (found,) = await source.poll() or ()
        assert found.engine_url in ("http://127.0.0.1:8001", "http://[::1]:8001")
        assert (found.instance_id, found.sidecar_address) == ("a", "127.0.0.1:1")
        assert await source.poll() is None
        assert await source.poll() is None
        assert await source.poll() == ()

    run(test)


@pytest.mark.parametrize("url", ["http://no-such-host.invalid:8001", "http://127.0.0.1:8001/v1"])
def test_engines_that_a_proxy_cannot_reach_are_refused(url: str) -> None:
    """The error names the field."""

    async def test() -> None:
        bad = Instance(instance_id="a", engine_url=url, sidecar_address="127.0.0.1:1")
        with pytest.raises(ValueError, match="engine_url"):
            await ResolvedSource(Lists((bad,))).poll()

    run(test)
