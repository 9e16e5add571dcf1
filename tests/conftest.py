"""Fixtures shared by every area: a state directory, a check for leaks, images and a registry.

Under ``CI=true`` a missing tool, or missing root, is a failure; elsewhere it is a skip that the summary shows.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from build import busybox_layout

from forgeyard_process_shim.hostroot import HostRootfs

if TYPE_CHECKING:
    from daemons import Containerd, Daemon, Dockerd, PodmanService
    from docker_registry import Registry

LEAK_WAIT = 5.0
"""Seconds that what a test started may take to go away: the kernel frees namespaces and cgroups in its own time."""

IMAGE_TIME = 600
"""Seconds that a test may take which may have to build its image first: the default is for tests alone."""
_REGISTRY = pytest.StashKey["RegistryProcess"]()
_DAEMONS = pytest.StashKey["DaemonHost"]()
DAEMON_TIME = 180
"""Seconds that a test may take which may have to start its daemon first, on a busy machine."""


def pytest_configure(config: pytest.Config) -> None:
    """Settings of hypothesis, where its plugin is loaded; the emulated guest of tests/guest can't afford the import."""
    if config.pluginmanager.hasplugin("hypothesispytest"):
        from hypothesis import HealthCheck, settings

        # A bound on time would make a loaded machine look like a bug; the blob makes a failure repeatable here.
        settings.register_profile(
            "forgeyard", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
        )
        settings.load_profile("forgeyard")


def in_ci() -> bool:
    """Whether missing things must fail."""
    return os.environ.get("CI", "").lower() in ("true", "1")


def unavailable(what: str) -> None:
    """Fail in CI, skip elsewhere: `what` is missing."""
    if in_ci():
        pytest.fail(f"{what}; CI must have it", pytrace=False)
    pytest.skip(what)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Kernel tests need root: mounts, cgroups, namespaces."""
    if item.get_closest_marker("kernel") and os.geteuid() != 0:
        unavailable("needs root (run as root, or with sudo)")
    for marker in item.iter_markers("daemon"):
        require_daemon(*marker.args)


def require_daemon(name: str) -> None:
    """Skip, or fail in CI, where the daemon called `name` can't be started."""
    from daemons import installed

    if os.geteuid() != 0 or not installed(name):
        unavailable(f"{name} is not installed, or this is not root (./dev setup installs what the tests use)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Time for the tests that come first where no image was built yet, and no daemon started."""
    for item in items:
        if item.get_closest_marker("daemon") and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(DAEMON_TIME))
    waiting = [item for item in items if "images" in fixtures_of(item) and item.get_closest_marker("timeout") is None]
    if waiting and not _all_built():
        for item in waiting:
            item.add_marker(pytest.mark.timeout(IMAGE_TIME))


def fixtures_of(item: pytest.Item) -> set[str]:
    """The names of the fixtures that a test uses, by way of others too."""
    return set(getattr(item, "fixturenames", ()))


def _all_built() -> bool:
    from image_catalog import SLOW, have

    return all(map(have, SLOW))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """xdist's controller: start the one registry of this run, and tell the workers where it is."""
    node.workerinput["registry"] = start_registry(node.config)
    node.workerinput["daemons"] = daemon_host(node.config)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Without workers: the same, if some test wants it. Before the tests, so that none of them seems to leave it."""
    wanted = any(fixtures_of(item) & {"registry", "images"} for item in session.items)
    if wanted and not hasattr(session.config, "workerinput"):
        start_registry(session.config)


def pytest_unconfigure(config: pytest.Config) -> None:
    """The registry and the daemons end with the run that started them."""
    if (process := config.stash.get(_REGISTRY, None)) is not None:
        process.stop()
    if (host := config.stash.get(_DAEMONS, None)) is not None:
        host.close()


def start_registry(config: pytest.Config) -> str:
    """Start the registry, once, without waiting for it: its directory, or nothing where it isn't installed."""
    from docker_registry import PROGRAM, RegistryProcess

    if shutil.which(PROGRAM) is None:
        return ""
    if config.stash.get(_REGISTRY, None) is None:
        config.stash[_REGISTRY] = RegistryProcess()
    return str(config.stash[_REGISTRY].directory)


def daemon_host(config: pytest.Config) -> str:
    """Where to ask for the daemons of this run. None of them is started by this."""
    from daemon_host import DaemonHost

    if config.stash.get(_DAEMONS, None) is None:
        config.stash[_DAEMONS] = DaemonHost()
    return config.stash[_DAEMONS].address


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Append this pass's counts to the file that ``./dev test`` adds up."""
    totals = os.environ.get("FORGEYARD_TEST_TOTALS")
    if totals is None or hasattr(terminalreporter.config, "workerinput"):
        # A worker of xdist reports its share to the controller, which counts it.
        return
    stats = {name: len(terminalreporter.stats.get(name, ())) for name in ("passed", "failed", "error", "skipped")}
    with Path(totals).open("a") as file:
        file.write(f"{stats['passed']} {stats['failed'] + stats['error']} {stats['skipped']}\n")


@pytest.fixture(scope="session")
def require_tool() -> Callable[[str], str]:
    """``require_tool("runc")``: its path, or a skip (a failure in CI) when it is not installed."""

    def find(name: str) -> str:
        path = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin")
        if path is None:
            unavailable(f"{name} is not installed (./dev setup installs what the tests use)")
        return path or ""

    return find


@pytest.fixture
def state_dir() -> Iterator[Path]:
    """An executor's state directory with a short path, gone after the test.

    tmp_path will not do: it is 0700 all the way, and a runtime with a user namespace has to walk through every
    ancestor of the root as somebody else. A mount left below it fails the test.
    """
    path = Path(tempfile.mkdtemp(prefix="fy-", dir="/var/tmp"))
    path.chmod(0o711)
    yield path
    left = mounts_below(path)
    for target in reversed(left):
        # One clean-up that must not raise: the assertion below says what was left, this keeps rmtree off it.
        os.system(f"umount -l '{target}'")
    shutil.rmtree(path)
    assert not left, f"still mounted below the state directory: {left}"


def mounts_below(path: Path) -> list[str]:
    """Mount points at or below `path`, outermost first."""
    lines = Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
    points = (line.split()[4].replace("\\040", " ") for line in lines)
    return [point for point in points if point == str(path) or point.startswith(f"{path}/")]


@dataclass(frozen=True, slots=True)
class HostState:
    """What a sandbox could leave behind. Each a counter of readable names, so that a difference explains itself."""

    processes: Counter[str]
    mounts: Counter[str]
    cgroups: Counter[str]
    namespaces: Counter[str]
    fds: Counter[str]

    def beyond(self, before: HostState) -> dict[str, list[str]]:
        """What is here now and was not in `before`."""
        extra = {name: getattr(self, name) - getattr(before, name) for name in HostState.__slots__}
        return {name: sorted(counter.elements()) for name, counter in extra.items() if counter}


class Leaks:
    """Compares the host with what it was; see the `leaks` fixture."""

    def __init__(self, state_dir: Path, *, host_wide: bool) -> None:
        self.state_dir = state_dir
        self.host_wide = host_wide
        self.before = self.look()

    def look(self) -> HostState:
        """The host as it is now."""
        pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
        return HostState(
            processes=Counter(filter(None, map(self._process, pids))),
            mounts=Counter(mounts_below(self.state_dir)),
            cgroups=Counter(_cgroups() if self.host_wide else ()),
            namespaces=Counter(_net_namespaces(pids) if self.host_wide else ()),
            fds=Counter(_own_fds()),
        )

    def assert_none(self, wait: float = LEAK_WAIT) -> None:
        """Nothing is left that was not there before, within `wait` seconds."""
        deadline = time.monotonic() + wait
        while extra := self.look().beyond(self.before):
            assert time.monotonic() < deadline, f"left behind: {extra}"
            # Nothing announces that the kernel has finished with a namespace or a cgroup.
            time.sleep(0.02)

    def _process(self, pid: int) -> str:
        """``PID COMMAND`` when the process belongs to this test; empty otherwise."""
        if pid == os.getpid():
            return ""
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            mounts = Path(f"/proc/{pid}/mountinfo").read_text(errors="surrogateescape")
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return ""
        ours = parent == os.getpid() or self.state_dir.name in command or self._is_inside(mounts)
        return f"{pid} {command}" if ours else ""

    def _is_inside(self, mountinfo: str) -> bool:
        """Whether this is a sandbox's mount table: something of the state directory, mounted somewhere else."""
        columns = (line.split()[3:5] for line in mountinfo.splitlines())
        return any(self.state_dir.name in root and self.state_dir.name not in point for root, point in columns)


def _cgroups() -> Iterator[str]:
    """Cgroup directories of any executor of ours, in every hierarchy."""
    for root, directories, _ in os.walk("/sys/fs/cgroup"):
        for name in directories:
            if "forgeyard" in root or "forgeyard" in name:
                yield f"{root}/{name}"


def _net_namespaces(pids: list[int]) -> set[str]:
    """The network namespaces that any process is in."""
    return set(filter(None, (_link(f"/proc/{pid}/ns/net") for pid in pids)))


def _link(path: str) -> str:
    """Where a link of /proc points; empty when the process is gone."""
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _own_fds() -> Iterator[str]:
    """What each descriptor of this process is, without the numbers of pipes and sockets."""
    for fd in os.listdir("/proc/self/fd"):
        target = _link(f"/proc/self/fd/{fd}")
        if target and not target.startswith("/proc/"):
            yield target.partition(":[")[0]


@pytest.fixture
def leaks(state_dir: Path, request: pytest.FixtureRequest) -> Iterator[Leaks]:
    """Fails the test that leaves a process, mount, cgroup, network namespace or descriptor behind.

    Checked at the end of the test, and by ``leaks.assert_none()`` wherever a test wants it. Namespaces and cgroups
    do not say whose they are, so they are counted only in tests marked `exclusive`, which run alone.
    """
    watch = Leaks(state_dir, host_wide=request.node.get_closest_marker("exclusive") is not None)
    yield watch
    watch.assert_none()


@pytest.fixture(scope="session")
def shared_state() -> Iterator[Path]:
    """A state directory that tests of jobs share, so that the host rootfs is put together once a session."""
    path = Path(tempfile.mkdtemp(prefix="fy-shared-", dir="/var/tmp"))
    path.chmod(0o711)
    yield path
    left = mounts_below(path)
    assert not left, f"still mounted below the state directory: {left}"
    shutil.rmtree(path)


@pytest.fixture
def warm_rootfs(shared_state: Path, state_dir: Path) -> None:
    """Give `state_dir` the host rootfs that `shared_state` has."""
    HostRootfs(shared_state / "rootfs").plan()
    shutil.copytree(shared_state / "rootfs", state_dir / "rootfs", symlinks=True)


@pytest.fixture
def tree() -> Iterator[Path]:
    """A small source tree that belongs to somebody who is neither root nor the job."""
    path = Path(tempfile.mkdtemp(prefix="fy-tree-", dir="/var/tmp"))
    (path / "f").write_text("original\n")
    for part in (path, path / "f"):
        os.chown(part, 4242, 4242)
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def busybox_image(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A pinned reference to an image made of busybox, without a registry."""
    path, digest = busybox_layout(tmp_path_factory.mktemp("images"))
    return f"oci:{path}@{digest}"


@pytest.fixture(scope="session")
def registry(request: pytest.FixtureRequest, require_tool: Callable[[str], str]) -> Registry:
    """The docker-registry of this test run: ``registry.push(layout, tag, name)`` gives a pinned reference to it."""
    from docker_registry import PROGRAM, Registry

    require_tool(PROGRAM)
    workerinput = getattr(request.config, "workerinput", None)
    return Registry(Path(workerinput["registry"] if workerinput else start_registry(request.config)))


class Images:
    """The images of tests/images/image_catalog.py, built when they are asked for; see the `images` fixture."""

    def __init__(self, registry: Callable[[], Registry]) -> None:
        self._registry = registry

    def built(self, name: str) -> tuple[Path, str]:
        """The layout of an image and its digest. A skip, or a failure in CI, where it can't be built."""
        from image_catalog import CannotBuildError, image

        try:
            return image(name)
        except (CannotBuildError, FileNotFoundError) as error:
            unavailable(str(error))
            raise

    def layout(self, name: str) -> Path:
        """The directory of the image's layout. It is shared and kept: look, don't touch."""
        return self.built(name)[0]

    def digest(self, name: str) -> str:
        """The digest of the image's manifest or index."""
        return self.built(name)[1]

    def local(self, name: str) -> str:
        """``oci:PATH@DIGEST``."""
        path, digest = self.built(name)
        return f"oci:{path}@{digest}"

    def reference(self, name: str, tag: str = "latest") -> str:
        """``localhost:PORT/NAME@DIGEST``, pushed once in a test run; it is there as NAME:TAG too."""
        return self._registry().push_once(self.layout(name), tag, name)


@pytest.fixture(scope="session")
def images(request: pytest.FixtureRequest) -> Images:
    """Real images: ``images.layout("postgres")``, ``images.reference("postgres")``. Nothing is built before that."""
    return Images(lambda: request.getfixturevalue("registry"))


@pytest.fixture(params=["host", "image"])
def root(request: pytest.FixtureRequest) -> dict[str, str]:
    """The two modes, as arguments of Job."""
    if request.param == "host":
        return {"rootfs": "host"}
    return {"image": request.getfixturevalue("busybox_image")}


def daemon(request: pytest.FixtureRequest, name: str) -> Daemon:
    """The daemon of this test run called `name`, running: use it, don't stop it."""
    from daemon_host import ask

    require_daemon(name)
    workerinput = getattr(request.config, "workerinput", None)
    return ask(workerinput["daemons"] if workerinput else daemon_host(request.config), name)


@pytest.fixture(scope="session")
def containerd(request: pytest.FixtureRequest) -> Containerd:
    """The private containerd of this run: ``containerd.address``, ``containerd.ctr("images", "ls")``."""
    return daemon(request, "containerd")  # type: ignore[return-value]  # the class that the name stands for


@pytest.fixture(scope="session")
def dockerd(request: pytest.FixtureRequest) -> Dockerd:
    """The private dockerd of this run, on a containerd of its own: ``dockerd.address``, ``dockerd.docker("ps")``."""
    return daemon(request, "dockerd")  # type: ignore[return-value]  # as above


@pytest.fixture(scope="session")
def podman_service(request: pytest.FixtureRequest) -> PodmanService:
    """The private podman service of this run: ``podman_service.address``, ``podman_service.podman("ps")``."""
    return daemon(request, "podman")  # type: ignore[return-value]  # as above
