"""The wire format is stable, has the engine model's fields, and keeps unknown fields."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FileDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto, FieldDescriptorProto
from google.protobuf.message import Message

from predictor.config import EngineConfig
from predictor.forecast_result import Forecast
from predictor.lengths import Tag
from predictor.request import RequestFacts, Slo
from protos.block.v1 import common_pb2, predictor_pb2, provisioner_pb2, scheduler_pb2, tagger_pb2
from protos.envoy.v3 import external_processor_pb2

ROOT = Path(__file__).parents[2]
RECORDED = Path(__file__).with_name("field_numbers.txt")
FILES = (common_pb2, predictor_pb2, provisioner_pb2, scheduler_pb2, tagger_pb2)


def lines(file: FileDescriptor) -> Iterator[str]:
    """Yield all numbers that a file assigns."""
    for message in file.message_types_by_name.values():
        yield from message_lines(message)
    for enum in file.enum_types_by_name.values():
        yield from enum_lines(enum)
    for service in file.services_by_name.values():
        for method in service.methods:
            streams = ("stream " * method.client_streaming, "stream " * method.server_streaming)
            ends = (f"{streams[0]}{method.input_type.name}", f"{streams[1]}{method.output_type.name}")
            yield f"{service.full_name}/{method.name}: {ends[0]} -> {ends[1]}"


def message_lines(message: Descriptor) -> Iterator[str]:
    """The fields of a message, by number."""
    for field in sorted(message.fields, key=lambda field: field.number):
        of = field.message_type or field.enum_type
        kind = of.full_name if of is not None else scalar(field.type)
        how = "repeated " if field.is_repeated else "optional " if field.has_presence and of is None else ""
        yield f"{message.full_name} {field.number} = {field.name}: {how}{kind}"


def scalar(number: int) -> str:
    """A scalar type as .proto files spell it."""
    return FieldDescriptorProto.Type.Name(FieldDescriptorProto.Type.ValueType(number)).removeprefix("TYPE_").lower()


def enum_lines(enum: EnumDescriptor) -> Iterator[str]:
    """The values of an enum, by number."""
    for value in enum.values:
        yield f"{enum.full_name} {value.number} = {value.name}"


def test_assigned_numbers_are_stable() -> None:
    """No recorded number changes or disappears; new ones are added to the record deliberately."""
    now = [line for file in (*FILES, external_processor_pb2) for line in lines(file.DESCRIPTOR)]
    recorded = RECORDED.read_text().splitlines()
    missing = sorted(set(recorded) - set(now))
    assert not missing, f"these changed or went, which breaks whoever speaks the old wire: {missing}"
    new = [line for line in now if line not in recorded]
    assert not new, f"add to {RECORDED.name}, when they are final: {new}"


def test_every_message_has_room() -> None:
    """Each message and enum has reserved numbers for related additions."""
    without = [
        thing.full_name
        for file in FILES
        for table in (file.DESCRIPTOR.message_types_by_name, file.DESCRIPTOR.enum_types_by_name)
        for thing in table.values()
        if not has_reserved(thing)
    ]
    assert without == ["block.v1.TokenIds"]  # a list and nothing else


def has_reserved(thing: Descriptor | EnumDescriptor) -> bool:
    """Return whether a message or an enum has reserved numbers."""
    proto = DescriptorProto() if isinstance(thing, Descriptor) else EnumDescriptorProto()
    thing.CopyToProto(proto)  # type: ignore[arg-type]
    return len(proto.reserved_range) > 0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Forecast, common_pb2.Forecast),
        (Slo, common_pb2.Slo),
        (Tag, common_pb2.Tag),
        (RequestFacts, common_pb2.Request),
    ],
)
def test_the_wire_has_the_fields_of_the_engine_model(value: type, message: type[Message]) -> None:
    """Every field of the pure value has a field of the same name on the wire."""
    elsewhere = {"arrival_s", "transfer_s"}  # on an engine's clock, and known to engines alone
    assert {field.name for field in fields(value)} - elsewhere <= set(message.DESCRIPTOR.fields_by_name)


def test_engine_settings_have_the_configuration_s_names() -> None:
    """The settings on the wire have the names of the configuration."""
    names = set(common_pb2.EngineSettings.DESCRIPTOR.fields_by_name)
    assert names <= {field.name for field in fields(EngineConfig)}


def test_absence_survives_the_wire() -> None:
    """A number that is not there is not zero."""
    nothing = common_pb2.Indicators.FromString(common_pb2.Indicators(age_s=1.0).SerializeToString())
    zero = common_pb2.Indicators.FromString(common_pb2.Indicators(num_running=0).SerializeToString())
    assert not nothing.HasField("num_running")
    assert zero.HasField("num_running")


def test_a_delta_changes_only_its_fields() -> None:
    """Merging a delta into former indicators keeps other fields, and can set a number to zero."""
    before = common_pb2.Indicators(age_s=0.5, num_running=3, num_waiting=2)
    before.MergeFrom(common_pb2.Indicators(age_s=0.1, num_waiting=0))
    assert (before.age_s, before.num_running, before.num_waiting) == (0.1, 3, 0)
    assert before.HasField("num_waiting")


def test_unknown_fields_are_passed_on() -> None:
    """A receiver passes on a field that it does not know."""
    newer = common_pb2.Forecast(request_id="a", ttft_s=float("inf")).SerializeToString() + b"\xf8\x07\x2a"
    here = common_pb2.Forecast.FromString(newer)
    assert here.ttft_s == float("inf")
    assert here.SerializeToString() == newer


def test_generated_code_is_fresh() -> None:
    """The generated code is that of the .proto files."""
    command = [sys.executable, str(ROOT / "scripts" / "generate_protos.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
