"""TCP for callers with a certificate alone. Off unless configured: a Unix socket needs no keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import grpc

from forgeyard_api.serve.attempt_types import Caller
from forgeyard_model.config_serve import TlsConfig
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind

FIRST_UID: Final = 1 << 32
"""Callers over TCP have no uid on this host. Each certificate's name gets a number that no uid can be."""


class Certificates:
    """Names of clients' certificates, as owners of attempts."""

    def __init__(self, config: TlsConfig) -> None:
        self.address = config.address
        self._config = config

    def credentials(self) -> grpc.ServerCredentials:
        """What gRPC needs to demand a certificate of each client.

        :raises ExecutorError: IO_FAILED, by the file that can't be read.
        """
        config = self._config
        return grpc.ssl_server_credentials(
            [(_read(config.key), _read(config.certificate))],
            root_certificates=_read(config.client_ca),
            require_client_auth=True,
        )

    def caller_of(self, context: Any) -> Caller:
        """Whose certificate a call came with.

        :raises ExecutorError: UNSUPPORTED, not_allowed, for one without a name.
        """
        names = context.auth_context().get("x509_common_name") or ()
        if not names or not names[0]:
            raise ExecutorError(
                ExecutorErrorKind.UNSUPPORTED,
                "not_allowed",
                "the client's certificate has no common name",
                resolution="issue one whose subject says whose it is",
            )
        return Caller(uid=owner_of(names[0]), gid=0, pid=0, connection=context.peer())


def owner_of(name: bytes) -> int:
    """The owner's number of a certificate's name: the same for the same name, on every start of every server."""
    from hashlib import sha256

    return FIRST_UID + int.from_bytes(sha256(name).digest()[:6], "big")


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ExecutorError(
            ExecutorErrorKind.IO_FAILED,
            "tls_file",
            f"{path} can't be read",
            details=error.strerror or str(error),
            resolution="mend the table serve.tls of the configuration",
        ) from error
