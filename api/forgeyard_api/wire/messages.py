"""Message classes of the API, and the paths of its calls. Importing this imports protobuf."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from forgeyard_runtimes.proto_messages import MessagePool

_FILES: Final = MessagePool(Path(__file__).parent / "stubs/descriptors.binpb", "forgeyard/executor/v1")

if TYPE_CHECKING:
    from forgeyard_api.wire.stubs import capabilities_pb2 as capabilities
    from forgeyard_api.wire.stubs import common_pb2 as common
    from forgeyard_api.wire.stubs import executor_pb2 as executor
    from forgeyard_api.wire.stubs import job_pb2 as job
    from forgeyard_api.wire.stubs import result_pb2 as result
else:
    capabilities = _FILES.file("capabilities")
    common = _FILES.file("common")
    executor = _FILES.file("executor")
    job = _FILES.file("job")
    result = _FILES.file("result")

__all__ = ["API_VERSION", "Method", "capabilities", "common", "executor", "job", "methods", "result"]

PACKAGE: Final = "forgeyard.executor.v1"
API_VERSION: Final = "1.0"
"""Major: the package's v1. Minor: grows with each field or call that is added."""


@dataclass(frozen=True, slots=True)
class Method:
    """One call. streams: its answers come one after the other."""

    service: str
    name: str
    question: Any
    answer: Any
    streams: bool

    @property
    def path(self) -> str:
        """As HTTP/2 has it."""
        return f"/{self.service}/{self.name}"


def methods(service: str) -> tuple[Method, ...]:
    """The calls of a service of the API: Executor or Images."""
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
