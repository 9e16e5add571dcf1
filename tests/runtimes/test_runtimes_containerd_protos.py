"""The checked-in descriptors and stubs are what the proto files say, and the wire is containerd's."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet

from forgeyard_runtimes.containerd import build_protos, calls, messages
from forgeyard_runtimes.proto_build import DESCRIPTORS, Generated

MADE_WITH = "1.85"
"""The release of grpcio-tools that the stubs were last made with; the text of stubs differs between releases."""


@pytest.fixture(scope="module")
def made() -> Generated:
    """Made now, by the compiler that is installed."""
    pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed: the generated files are not compared")
    return build_protos.FOLDER.generate()


def test_descriptors_are_those_of_the_proto_files(made: Generated) -> None:
    """Every name, number and type: also with another release of the compiler, which may write bytes in other ways."""
    kept = FileDescriptorSet.FromString((build_protos.FOLDER.kept / DESCRIPTORS).read_bytes())
    assert FileDescriptorSet.FromString(made.descriptors) == kept


def test_generated_files_are_checked_in(made: Generated) -> None:
    """To the byte, with the release that made them."""
    if not (found := version("grpcio-tools")).startswith(f"{MADE_WITH}."):
        pytest.skip(f"stubs were made with grpcio-tools {MADE_WITH}, here is {found}: their text is NOT compared")
    assert made.differences(build_protos.FOLDER.kept) == ()


def test_a_difference_is_found(made: Generated, tmp_path: Path) -> None:
    """What is missing, changed, or of no proto file any more is named, and written anew."""
    made.write(tmp_path)
    assert made.differences(tmp_path) == ()
    (tmp_path / "tasks_pb2.pyi").write_text("")
    (tmp_path / "old_pb2.pyi").write_text("")
    (tmp_path / "types_pb2.pyi").unlink()
    assert made.differences(tmp_path) == ("old_pb2.pyi", "tasks_pb2.pyi", "types_pb2.pyi")
    made.write(tmp_path)
    assert made.differences(tmp_path) == ()


def test_calls_have_paths_and_messages() -> None:
    """Every entry of the table names a service below containerd's own package."""
    table = [value for value in vars(calls).values() if isinstance(value, calls.Call)]
    assert len(table) > 25
    assert len({call.path for call in table}) == len(table)
    for call in table:
        assert call.path.startswith("/containerd.services.")
        assert call.question.DESCRIPTOR.full_name.rpartition(".")[0] in (
            call.service.rpartition(".")[0],
            "google.protobuf",
        )


@pytest.mark.parametrize(
    ("message", "wire"),
    [
        (messages.tasks.KillRequest(container_id="a", signal=9, all=True), b"\x0a\x01a\x18\x09\x20\x01"),
        (messages.tasks.ExecProcessRequest(container_id="a", exec_id="x"), b"\x0a\x01a\x3a\x01x"),
        (messages.runc.Options(binary_name="crun"), b"\x32\x04crun"),
        (messages.any_of("t", b"v"), b"\x0a\x01t\x12\x01v"),
        (messages.content.WriteContentRequest(action=messages.content.COMMIT, ref="r"), b"\x08\x02\x12\x01r"),
        (messages.snapshots.CommitSnapshotRequest(name="n", key="k"), b"\x12\x01n\x1a\x01k"),
    ],
)
def test_the_wire_is_containerds(message: object, wire: bytes) -> None:
    """Field numbers that, wrong, a daemon would read as something else."""
    assert message.SerializeToString() == wire  # type: ignore[attr-defined]  # any message


BESIDE_ANOTHER = """
from google.protobuf import descriptor_pb2, descriptor_pool
file = descriptor_pb2.FileDescriptorProto(name="theirs.proto", package="containerd.services.tasks.v1", syntax="proto3")
file.message_type.add(name="KillRequest")
descriptor_pool.Default().Add(file)
from forgeyard_runtimes.containerd.messages import tasks
print(tasks.KillRequest(container_id="a").container_id)
"""


def test_another_client_in_the_process_does_no_harm() -> None:
    """Names that somebody else has registered, in another shape, do not meet ours."""
    argv = [sys.executable, "-c", BESIDE_ANOTHER]
    done = subprocess.run(argv, env={"PYTHONPATH": ":".join(sys.path)}, capture_output=True, text=True, timeout=30)
    assert done.stdout == "a\n", done.stderr
