"""Our messages have the names, numbers and types of the public protocol, and the compiled file is that of the text."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from google.protobuf import text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet
from grpc_health.v1 import health_pb2
from tritonclient.grpc import model_config_pb2, service_pb2

from kestrel.integrations.grpc.messages import DESCRIPTORS
from kestrel.integrations.inference_protocol import BOOL, INPUTS, MODEL, OUTPUT

ROOT = Path(__file__).parents[2]
OURS = {file.name: file for file in FileDescriptorSet.FromString(DESCRIPTORS.read_bytes()).file}


def described(module: Any) -> FileDescriptorProto:
    proto = FileDescriptorProto()
    module.DESCRIPTOR.CopyToProto(proto)
    return proto


def fields_of(messages: Any, prefix: str = "") -> dict[str, tuple[Any, ...]]:
    """Every field by its full name: number, type, label and the type's name."""
    found: dict[str, tuple[Any, ...]] = {}
    for message in messages:
        name = f"{prefix}{message.name}"
        for field in message.field:
            found[f"{name}.{field.name}"] = (field.number, field.type, field.label, field.type_name)
        found |= fields_of(message.nested_type, f"{name}.")
    return found


def signature(method: Any) -> tuple[Any, ...]:
    return method.name, method.input_type, method.output_type, method.client_streaming, method.server_streaming


PUBLIC_FILES = [described(service_pb2), described(model_config_pb2)]


def test_every_field_is_one_of_the_public_protocol() -> None:
    public = {name: value for file in PUBLIC_FILES for name, value in fields_of(file.message_type).items()}
    ours = fields_of(OURS["inference.proto"].message_type)
    assert len(ours) > 60
    assert {name: public.get(name) for name in ours} == ours


def test_every_method_is_one_of_the_public_protocol() -> None:
    public = [signature(method) for method in PUBLIC_FILES[0].service[0].method]
    (service,) = OURS["inference.proto"].service
    assert f"{OURS['inference.proto'].package}.{service.name}" == "inference.GRPCInferenceService"
    assert [method.name for method in service.method if signature(method) not in public] == []
    assert len(service.method) == 10


def test_data_types_have_their_public_numbers() -> None:
    (ours,) = OURS["inference.proto"].enum_type
    assert {value.name: value.number for value in ours.value} == {
        value.name: model_config_pb2.DataType.Value(value.name) for value in ours.value
    }


def test_health_is_grpcs_own() -> None:
    public = described(health_pb2)
    assert fields_of(OURS["health.proto"].message_type).items() <= fields_of(public.message_type).items()
    (ours,), (theirs,) = OURS["health.proto"].service, public.service
    assert {signature(method) for method in ours.method} <= {signature(method) for method in theirs.method}
    assert OURS["health.proto"].message_type[1].enum_type[0].value == public.message_type[1].enum_type[0].value


def test_the_compiled_file_is_up_to_date(tmp_path: Path) -> None:
    compiled = tmp_path / "descriptors.binpb"
    command = [ROOT / "scripts" / "compile-protocol", compiled]
    subprocess.run(command, env={**os.environ, "PYTHON": sys.executable}, check=True)
    assert {file.name: file for file in FileDescriptorSet.FromString(compiled.read_bytes()).file} == OURS


def test_the_model_repository_declares_the_inputs_that_are_read() -> None:
    text = (ROOT / "triton" / "model_repository" / MODEL / "config.pbtxt").read_text(encoding="utf-8")
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    declared = {i.name: (model_config_pb2.DataType.Name(i.data_type), list(i.dims), i.optional) for i in config.input}
    read = {
        known.name: ("TYPE_BOOL" if known.datatype == BOOL else "TYPE_STRING", known.shape, True) for known in INPUTS
    }
    assert declared == read
    assert [output.name for output in config.output] == [OUTPUT]
    assert (config.name, config.max_batch_size, config.model_transaction_policy.decoupled) == (MODEL, 0, True)
