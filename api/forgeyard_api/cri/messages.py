"""Message classes of the Container Runtime Interface, and its calls. Importing this imports protobuf."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from forgeyard_api.wire.messages import Method
from forgeyard_runtimes.proto_messages import MessagePool

_FILES: Final = MessagePool(Path(__file__).parent / "stubs/descriptors.binpb", "protos")

if TYPE_CHECKING:
    from forgeyard_api.cri.stubs import api_pb2 as cri
else:
    cri = _FILES.file("api")

__all__ = ["PACKAGE", "cri", "methods"]

PACKAGE: Final = "runtime.v1"


def methods(service: str) -> tuple[Method, ...]:
    """The calls that we answer of RuntimeService or ImageService."""
    found = _FILES.service(f"{PACKAGE}.{service}")
    return tuple(
        Method(
            service=found.full_name,
            name=method.name,
            question=_FILES.message(method.input_type.full_name),
            answer=_FILES.message(method.output_type.full_name),
            streams=method.server_streaming,
        )
        for method in found.methods
    )
