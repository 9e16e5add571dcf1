"""TCP is for callers with a certificate, each of whom sees its own attempts alone."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
import trustme
from served import JOB, table_over, within

from forgeyard_api.client import RemoteExecutor
from forgeyard_api.client.calls import OPTIONS
from forgeyard_api.serve.checks import Checks
from forgeyard_api.serve.service import ExecutorService, handlers
from forgeyard_api.serve.tls import FIRST_UID, Certificates, owner_of
from forgeyard_executor.testing import FakeExecutor, FakeRun
from forgeyard_model.config_serve import TlsConfig
from forgeyard_model.errors import ExecutorError


def free_port() -> int:
    """One that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@asynccontextmanager
async def serving_tls(state: Path, authority: trustme.CA) -> AsyncIterator[str]:
    """A server that trusts `authority`; its address."""
    own = authority.issue_cert("127.0.0.1")
    own.private_key_pem.write_to_path(state / "key.pem")
    for number, blob in enumerate(own.cert_chain_pems):
        blob.write_to_path(state / "cert.pem", append=number > 0)
    authority.cert_pem.write_to_path(state / "ca.pem")
    address = f"127.0.0.1:{free_port()}"
    certificates = Certificates(
        TlsConfig(address, str(state / "cert.pem"), str(state / "key.pem"), str(state / "ca.pem"))
    )
    async with table_over(state, FakeExecutor(lambda _: FakeRun(holds=True))) as table:
        server = grpc.aio.server(options=OPTIONS)
        service = ExecutorService(table, Checks(None), "1")
        server.add_generic_rpc_handlers((handlers("Executor", service, certificates.caller_of),))
        server.add_secure_port(address, certificates.credentials())
        await server.start()
        try:
            yield address
        finally:
            await server.stop(grace=None)


def credentials(trusted: trustme.CA, issuer: trustme.CA | None = None, name: str = "") -> grpc.ChannelCredentials:
    """Of a client that trusts `trusted`, with a certificate of `issuer` in that name; None: with none."""
    if issuer is None:
        return grpc.ssl_channel_credentials(trusted.cert_pem.bytes())
    cert = issuer.issue_cert(f"{name}.example.org", common_name=name)
    chain = b"".join(blob.bytes() for blob in cert.cert_chain_pems)
    return grpc.ssl_channel_credentials(trusted.cert_pem.bytes(), cert.private_key_pem.bytes(), chain)


def test_each_certificate_sees_its_own(tmp_path: Path) -> None:
    """The same attempt's name of two clients is two attempts."""

    async def body() -> None:
        authority = trustme.CA()
        async with serving_tls(tmp_path, authority) as address:
            hers, his = (credentials(authority, authority, name) for name in ("alice", "bob"))
            async with (
                RemoteExecutor.connect(address, credentials=hers) as alice,
                RemoteExecutor.connect(address, credentials=his) as bob,
                alice.run(JOB, attempt_id="same"),
            ):
                assert await bob.sandboxes() == ()
                async with bob.run(JOB, attempt_id="same"):
                    (seen,) = await alice.sandboxes()
                    assert seen.owner == str(owner_of(b"alice"))

    within(body())


def test_without_a_certificate_of_ours_nobody_gets_in(tmp_path: Path) -> None:
    """None at all, or one of another authority: the connection is refused before any call."""

    async def body() -> None:
        authority = trustme.CA()
        async with serving_tls(tmp_path, authority) as address:
            for wrong in (credentials(authority), credentials(authority, trustme.CA(), "alice")):
                async with RemoteExecutor.connect(address, credentials=wrong, reconnect=0.0) as remote:
                    with pytest.raises(ExecutorError) as caught:
                        await remote.capabilities()
                    assert caught.value.reason in ("server_unavailable", "call_deadline")

    within(body())


def test_owners_are_no_uids() -> None:
    """No certificate can be taken for a user of this host, and each name is another owner."""
    names = [f"name-{number}".encode() for number in range(1000)]
    assert min(owner_of(name) for name in names) >= FIRST_UID
    assert len({owner_of(name) for name in names}) == len(names)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """With the cure."""
    missing = str(tmp_path / "no.pem")
    with pytest.raises(ExecutorError, match=r"no\.pem can't be read.*serve\.tls"):
        Certificates(TlsConfig("127.0.0.1:1", missing, missing, missing)).credentials()
