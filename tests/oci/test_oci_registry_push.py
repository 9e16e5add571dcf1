"""Pushing, to a registry of our own and to the real one: streamed, exact, and only where it is meant to go."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import signal
import socket
import ssl
import subprocess
import tempfile
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import pytest
import trustme
from bad_registry import BadRegistry, Behaviour, Call, drop, reply, sha256, with_headers
from registry_clients import Counting, client, image, pull_blob

from forgeyard_model.errors import ExecutorError, ForgeyardError, SandboxError
from forgeyard_oci.image_manifest import DOCKER_MANIFEST, OCI_MANIFEST
from forgeyard_oci.registry.client import RegistryClient

DATA = random.Random(4).randbytes(200_000)
DIGEST = sha256(DATA)


@pytest.fixture
def registry() -> Iterator[BadRegistry]:
    """An empty registry."""
    with BadRegistry() as server:
        yield server


@pytest.fixture
def pusher(tmp_path: Path) -> Iterator[RegistryClient]:
    """A client with no patience."""
    made = client(tmp_path)
    yield made
    made.close()


def source() -> BinaryIO:
    """The blob's file."""
    return io.BytesIO(DATA)


def ignore(sent: int) -> None:
    """Progress nobody looks at."""


def push(pusher: RegistryClient, registry: BadRegistry, opened: Callable[[], BinaryIO] = source) -> bool:
    """Push DATA."""
    return pusher.push_blob(image(registry.host), DIGEST, len(DATA), opened, Counting(), ignore)


def methods(registry: BadRegistry) -> list[str]:
    """The methods of all requests so far."""
    return [seen.method for seen in registry.requests]


def test_a_blob_is_streamed(registry: BadRegistry, pusher: RegistryClient) -> None:
    """One PUT with its length and the digest, in pieces from the file; the location's own query stays as it was."""
    sizes: list[int] = []

    class Measured(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            sizes.append(size or 0)
            return super().read(size)

    assert push(pusher, registry, lambda: Measured(DATA)) is True
    assert registry.blobs[DIGEST] == DATA
    assert methods(registry) == ["HEAD", "POST", "PUT"]
    put = registry.requests[-1]
    assert put.headers["content-length"] == str(len(DATA))
    assert put.query == f"state=a%2Fb&digest={DIGEST}"
    assert max(sizes) <= 64 << 10


def test_a_blob_that_is_there_is_not_sent(registry: BadRegistry, pusher: RegistryClient) -> None:
    """HEAD says that it is there: nothing is opened, and nothing sent."""
    registry.add_blob(DATA)
    assert push(pusher, registry, lambda: pytest.fail("opened")) is False
    assert methods(registry) == ["HEAD"]


@pytest.mark.parametrize("behaviour", [reply(405), reply(403), reply(404), reply(500), drop])
def test_a_registry_that_refuses_head(registry: BadRegistry, pusher: RegistryClient, behaviour: Behaviour) -> None:
    """HEAD that fails in whatever way means: upload."""
    registry.on("/blobs/", behaviour, method="HEAD")
    assert push(pusher, registry) is True
    assert registry.blobs[DIGEST] == DATA


def test_mounting(registry: BadRegistry, pusher: RegistryClient) -> None:
    """A blob of another repository is mounted; where the registry would rather not, it is uploaded."""
    registry.on("/blobs/sha256", reply(404), method="HEAD")
    ref = image(registry.host)
    registry.add_blob(DATA)
    mounted = pusher.push_blob(ref, DIGEST, len(DATA), source, Counting(), ignore, mount_from="team/base")
    assert mounted is False
    assert registry.requests[-1].query == f"mount={DIGEST}&from=team/base"
    del registry.blobs[DIGEST]
    assert pusher.push_blob(ref, DIGEST, len(DATA), source, Counting(), ignore, mount_from="team/base") is True
    assert registry.blobs[DIGEST] == DATA


@pytest.mark.parametrize("behaviour", [reply(500), reply(429), drop])
def test_an_upload_that_fails_starts_again(registry: BadRegistry, pusher: RegistryClient, behaviour: Behaviour) -> None:
    """A passing failure is met with a new upload, from the file's beginning."""
    registry.on("/uploads/", behaviour, times=2, method="PUT")
    assert push(pusher, registry) is True
    assert registry.blobs[DIGEST] == DATA
    assert methods(registry).count("POST") == 3


def test_a_token_that_ends_before_the_upload(registry: BadRegistry, tmp_path: Path) -> None:
    """401 to the PUT gets a new token, and the whole file again; the scope is push."""
    registry.tokens = {"first"}
    pusher = client(tmp_path)
    ended: list[bool] = []

    def end(call: Call) -> bool:
        if not ended:
            ended.append(True)
            call.registry.tokens = {"second"}
            call.answer = call.registry.answer(call.seen)
        return False

    registry.on("/uploads/one", end)
    assert push(pusher, registry) is True
    pusher.close()
    assert registry.blobs[DIGEST] == DATA
    assert registry.requests[-1].headers["authorization"] == "Bearer second"
    assert "repository%3Ateam%2Fapp%3Apull%2Cpush" in registry.seen("/token")[0].query


def test_an_upload_elsewhere_carries_no_credentials(registry: BadRegistry, tmp_path: Path) -> None:
    """A Location on another origin gets the blob, and no Authorization."""
    registry.basic = "me:pw"
    auths = {registry.host: {"auth": b64encode(b"me:pw").decode()}}
    pusher = client(tmp_path, DOCKER_AUTH_CONFIG=json.dumps({"auths": auths}))
    with BadRegistry() as storage:

        def elsewhere(call: Call) -> bool:
            if call.answer.status == 202:
                call.answer.headers["Location"] = f"{storage.url}/v2/x/blobs/uploads/two"
            return False

        registry.on("/uploads/", elsewhere, method="POST")
        assert push(pusher, registry) is True
        assert storage.blobs[DIGEST] == DATA
        assert "authorization" not in storage.requests[0].headers
    pusher.close()


@pytest.mark.parametrize(
    ("location", "reason"),
    [("", "registry_error"), ("ftp://x.example/", "unsafe_redirect"), ("http://a:b@localhost:1/", "unsafe_redirect")],
)
def test_an_upload_that_leads_nowhere(
    registry: BadRegistry, pusher: RegistryClient, location: str, reason: str
) -> None:
    """No Location, or one that is no place to send data to, is refused before anything is sent."""
    registry.on("/uploads/", reply(202, Location=location))
    with pytest.raises(ForgeyardError) as caught:
        push(pusher, registry)
    assert isinstance(caught.value, SandboxError | ExecutorError)
    assert caught.value.reason == reason
    assert "PUT" not in methods(registry)


def test_an_upload_from_https_to_http(registry: BadRegistry, tmp_path: Path) -> None:
    """A registry with TLS that wants the blob in plain HTTP gets nothing."""
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    with BadRegistry(tls=context) as secure:
        trust(tmp_path, secure.host, authority)
        secure.on("/uploads/", reply(202, Location=f"{registry.url}/v2/x/blobs/uploads/two"))
        pusher = client(tmp_path)
        with pytest.raises(SandboxError, match="plain http"):
            push(pusher, secure)
        pusher.close()
    assert registry.requests == []


def test_a_file_shorter_than_the_blob(registry: BadRegistry, pusher: RegistryClient) -> None:
    """A source that ends too early is told as that, and not tried again."""
    with pytest.raises(SandboxError) as caught:
        push(pusher, registry, lambda: io.BytesIO(DATA[:-1]))
    assert caught.value.reason == "truncated"
    assert registry.blobs == {}
    assert methods(registry).count("POST") == 1


def test_what_the_registry_stored_is_compared(registry: BadRegistry, pusher: RegistryClient) -> None:
    """A registry that says it stored something else is not believed to have the blob, or the manifest."""
    registry.on("/", with_headers(Docker_Content_Digest=sha256(b"other")), method="PUT")
    with pytest.raises(SandboxError) as caught:
        push(pusher, registry)
    assert caught.value.reason == "digest_mismatch"
    with pytest.raises(SandboxError) as caught:
        pusher.push_manifest(image(registry.host), "1", b"{}", OCI_MANIFEST, Counting())
    assert caught.value.reason == "digest_mismatch"


def test_a_registry_that_refuses_what_is_sent(registry: BadRegistry, pusher: RegistryClient) -> None:
    """A wrong digest is the registry's to find; its code is in the error."""
    with pytest.raises(ExecutorError, match="DIGEST_INVALID"):
        push(pusher, registry, lambda: io.BytesIO(bytes(len(DATA))))


def test_a_manifest_is_sent_byte_for_byte(registry: BadRegistry, pusher: RegistryClient) -> None:
    """Odd spacing and key order survive, under the manifest's own type; a digest that is not its own is refused."""
    data = b'{ "b": 1,\n\t"a":2 }\n'
    ref = image(registry.host)
    for which in ("1", sha256(data)):
        pusher.push_manifest(ref, which, data, DOCKER_MANIFEST, Counting())
        assert registry.manifests[which] == (DOCKER_MANIFEST, data)
    with pytest.raises(SandboxError):
        pusher.push_manifest(ref, sha256(b"other"), data, DOCKER_MANIFEST, Counting())


def test_mirrors_are_not_pushed_to(registry: BadRegistry, tmp_path: Path) -> None:
    """What is pushed goes to the place the name says."""
    with BadRegistry() as mirror:
        conf = tmp_path / "registries.conf"
        conf.write_text(
            f'[[registry]]\nlocation = "{registry.host}"\n[[registry.mirror]]\nlocation = "{mirror.host}"\n'
        )
        pusher = client(tmp_path, CONTAINERS_REGISTRIES_CONF=str(conf))
        push(pusher, registry)
        pusher.push_manifest(image(registry.host), "1", b"{}", OCI_MANIFEST, Counting())
        pusher.close()
        assert mirror.requests == []
    assert "1" in registry.manifests


# The real one

PASSWORD = "correct horse"
# bcrypt of PASSWORD, which is the one form the registry reads.
HTPASSWD = "me:$2y$05$abcdefghijklmnopqrstuuHNbAKRhpaujgo33bRWs.NLUTJO3lOy2\n"


@dataclass(frozen=True)
class Real:
    """A docker-registry that runs."""

    host: str


def trust(root: Path, host: str, authority: trustme.CA) -> None:
    """Put `authority` into certs.d for `host`."""
    directory = root / "etc/containers/certs.d" / host
    directory.mkdir(parents=True)
    authority.cert_pem.write_to_path(str(directory / "ca.crt"))


def free_port() -> int:
    """A port of the loopback that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def running(program: str, directory: Path, more: dict[str, object]) -> Iterator[Real]:
    """A docker-registry on a free port, until the end of the block."""
    port = free_port()
    http = {"addr": f"127.0.0.1:{port}", **{key: more[key] for key in more if key == "tls"}}
    config = {
        "version": 0.1,
        "log": {"level": "error"},
        "storage": {"filesystem": {"rootdirectory": str(directory / "data")}},
        "http": http,
        **{key: more[key] for key in more if key == "auth"},
    }
    # JSON is YAML.
    (directory / "config.yml").write_text(json.dumps(config))
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen([program, "serve", str(directory / "config.yml")], stdout=log, stderr=log)
    try:
        wait_until_it_listens(process, port)
        yield Real(f"localhost:{port}")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


def wait_until_it_listens(process: subprocess.Popen[bytes], port: int) -> None:
    """Until something accepts connections."""
    deadline = time.monotonic() + 20
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            assert process.poll() is None, "docker-registry ended"
            assert time.monotonic() < deadline
        else:
            return


@pytest.fixture
def program(require_tool: Callable[[str], str]) -> str:
    """The registry's program."""
    return require_tool("docker-registry")


def there_and_back(worker: RegistryClient, host: str) -> None:
    """Push an image and pull it again, by tag and by digest."""
    ref, budget = image(host, "team/real/app"), Counting()
    config = b'{"architecture":"amd64","os":"linux","rootfs":{"type":"layers","diff_ids":[]}}'
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": OCI_MANIFEST,
            "config": descriptor("application/vnd.oci.image.config.v1+json", config),
            "layers": [descriptor("application/vnd.oci.image.layer.v1.tar", DATA)],
        },
        indent=3,
    ).encode()
    for data in (config, DATA):
        told: list[int] = []

        def opened(data: bytes = data) -> BinaryIO:
            return io.BytesIO(data)

        assert worker.push_blob(ref, sha256(data), len(data), opened, budget, told.append) is True
        assert told[-1] == len(data)
        assert worker.push_blob(ref, sha256(data), len(data), opened, budget, told.append) is False
    worker.push_manifest(ref, "1", manifest, OCI_MANIFEST, budget)
    other = image(host, "team/other")
    assert worker.push_blob(other, DIGEST, len(DATA), source, budget, ignore, mount_from=ref.repository) is False
    for which in ("1", sha256(manifest)):
        got = worker.manifest(ref, which, budget)
        assert (got.data, got.media_type, got.digest) == (manifest, OCI_MANIFEST, sha256(manifest))
    assert pull_blob(worker, ref, DIGEST, len(DATA)) == DATA
    assert pull_blob(worker, ref, DIGEST, len(DATA), there=DATA[:70_000]) == DATA
    assert pull_blob(worker, other, DIGEST, len(DATA)) == DATA
    with pytest.raises(SandboxError) as caught:
        worker.manifest(ref, "none", budget)
    assert caught.value.reason == "not_found"
    assert budget.waits == []


def descriptor(media_type: str, data: bytes) -> dict[str, object]:
    """Points to `data`."""
    return {"mediaType": media_type, "digest": sha256(data), "size": len(data)}


def test_the_real_registry_in_plain_http(program: str, tmp_path: Path) -> None:
    """On the loopback, without TLS and without a login."""
    with running(program, tmp_path, {}) as real:
        worker = client(tmp_path)
        there_and_back(worker, real.host)
        worker.close()


def test_the_real_registry_with_tls_and_a_password(program: str, tmp_path: Path) -> None:
    """With an authority of its own and basic authentication; without the password it is denied."""
    authority = trustme.CA()
    issued = authority.issue_cert("localhost")
    issued.private_key_pem.write_to_path(str(tmp_path / "key.pem"))
    issued.cert_chain_pems[0].write_to_path(str(tmp_path / "cert.pem"))
    (tmp_path / "htpasswd").write_text(HTPASSWD)
    more: dict[str, object] = {
        "tls": {"certificate": str(tmp_path / "cert.pem"), "key": str(tmp_path / "key.pem")},
        "auth": {"htpasswd": {"realm": "here", "path": str(tmp_path / "htpasswd")}},
    }
    with running(program, tmp_path, more) as real:
        trust(tmp_path, real.host, authority)
        stranger = client(tmp_path)
        with pytest.raises(SandboxError) as caught:
            stranger.manifest(image(real.host), "1", Counting())
        stranger.close()
        assert caught.value.reason == "auth_denied"
        auths = {real.host: {"auth": b64encode(f"me:{PASSWORD}".encode()).decode()}}
        worker = client(tmp_path, DOCKER_AUTH_CONFIG=json.dumps({"auths": auths}))
        there_and_back(worker, real.host)
        worker.close()


def test_large_blobs_need_no_memory(tmp_path: Path) -> None:
    """The digest of what is pulled is computed as it comes, in chunks that do not grow with the blob."""
    data = bytes(32 << 20)
    with BadRegistry() as server:
        digest = server.add_blob(data)
        puller, told = client(tmp_path), [0]
        with tempfile.TemporaryFile() as file:
            puller.blob(image(server.host), digest, len(data), file.fileno(), Counting(), told.append)
            assert os.fstat(file.fileno()).st_size == len(data)
        puller.close()
    assert max(after - before for before, after in pairwise(told)) <= 256 << 10
    assert digest == f"sha256:{hashlib.sha256(data).hexdigest()}"
