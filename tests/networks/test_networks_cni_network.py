"""A chain of CNI plugins: results passed on, everything taken back on failure, DEL with what ADD used."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cni_plugins import RESULT, PluginBox, error

from forgeyard_host.netns import NetNamespace, new_namespace
from forgeyard_model.errors import InvalidRequest, SandboxError, SandboxErrorKind
from forgeyard_networks.cni.attachment import Attachment
from forgeyard_networks.cni.cache import Cache
from forgeyard_networks.cni.config import Conflist, conflist_of
from forgeyard_networks.cni.network import CniNetwork
from forgeyard_networks.cni.reconcile import Reconciled, reconcile

pytestmark = pytest.mark.kernel


class Office:
    """A network of fake plugins `one` and `two`, with directories of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.box = PluginBox(root)
        self.box.write("one")
        self.box.write("two")

    def config(self, **change: Any) -> Conflist:
        """The conflist, with changes."""
        plugins = [{"type": "one"}, {"type": "two", "capabilities": {"portMappings": True}}]
        return conflist_of({"cniVersion": "1.0.0", "name": "office", "plugins": plugins} | change, "office.conflist")

    def network(self, state: str = "state", **change: Any) -> CniNetwork:
        """As an executor with that state directory opens it."""
        cache, claims = str(self.root / state), str(self.root / "claims")
        return CniNetwork(self.config(**change), [str(self.box.dir)], cache, claims_dir=claims, seconds=20)

    def cache(self, state: str = "state") -> Cache:
        """What that executor keeps."""
        return Cache(str(self.root / state))

    async def reconcile(self, *valid: str, state: str = "state", **change: Any) -> Reconciled:
        """As an executor does at its start."""
        return await reconcile(
            valid,
            networks=[self.config(**change)],
            dirs=[str(self.box.dir)],
            cache_dir=str(self.root / state),
            claims_dir=str(self.root / "claims"),
        )


@pytest.fixture
def office(tmp_path: Path) -> Office:
    """The network of the test."""
    return Office(tmp_path)


@pytest.fixture(scope="module")
def job() -> Iterator[NetNamespace]:
    """A namespace; none of these plugins changes it."""
    with contextlib.closing(new_namespace()) as made:
        yield made


def test_each_plugin_gets_the_result_of_the_one_before(office: Office, job: NetNamespace) -> None:
    """The last result is what the caller gets, and what CHECK and DEL are given; DEL runs in reverse."""
    changed = json.loads(RESULT) | {"ips": [{"address": "10.9.9.9/24"}]}
    office.box.write("two", ADD=f"echo '{json.dumps(changed)}'")

    async def main() -> None:
        network = office.network()
        ports = {"portMappings": [{"hostPort": 1, "containerPort": 2, "protocol": "tcp"}]}
        result = await network.add("fy-1", job.path, args={"K": "V"}, runtime_config=ports)
        assert [str(address) for address in result.ipv4] == ["10.9.9.9/24"]
        assert await network.check("fy-1")
        await network.delete("fy-1")

    asyncio.run(main())
    calls = office.box.calls()
    assert office.box.commands() == ["ADD one", "ADD two", "CHECK one", "CHECK two", "DEL two", "DEL one"]
    assert "prevResult" not in calls[0].stdin
    assert calls[1].stdin["prevResult"] == json.loads(RESULT)
    assert all(call.stdin["prevResult"] == changed for call in calls[2:])
    assert all(("runtimeConfig" in call.stdin) == (call.plugin == "two") for call in calls)
    assert all(call.env["CNI_ARGS"] == "K=V" and call.env["CNI_NETNS"] == job.path for call in calls)
    assert office.cache().entries() == []
    assert os.listdir(office.root / "claims") == os.listdir(office.root / "state") == []


def test_a_failed_add_takes_the_whole_chain_back(office: Office, job: NetNamespace) -> None:
    """The caller sees the error of ADD; DEL has the result so far, so that plugins in the middle find their things."""
    office.box.write("two", ADD=error(11, "full"), DEL=error(99, "also broken"))

    async def main() -> None:
        network = office.network()
        with pytest.raises(SandboxError, match="code 11: full") as caught:
            await network.add("fy-1", job.path)
        assert any("also broken" in note for note in caught.value.__notes__)
        assert len(network.pending()) == 1
        office.box.write("two", ADD=error(11, "full"))
        assert (await office.reconcile()).deleted == (Attachment("office", "fy-1", "eth0"),)
        with pytest.raises(SandboxError) as clean:
            await network.add("fy-1", job.path)
        assert not hasattr(clean.value, "__notes__")
        assert network.pending() == []

    asyncio.run(main())
    failed = ["ADD one", "ADD two", "DEL two", "DEL one"]
    assert office.box.commands() == [*failed, "DEL two", "DEL one", *failed]
    assert office.box.calls()[3].stdin["prevResult"] == json.loads(RESULT)
    assert os.listdir(office.root / "claims") == os.listdir(office.root / "state") == []


@pytest.mark.parametrize("garbage", ["true", "echo hello", 'echo \'{"ips":[{"address":"x"}]}\''])
def test_a_result_that_is_none_fails_the_add(office: Office, job: NetNamespace, garbage: str) -> None:
    """It never becomes a prevResult."""
    office.box.write("one", ADD=garbage)
    with pytest.raises(SandboxError) as caught:
        asyncio.run(office.network().add("fy-1", job.path))
    assert caught.value.reason == "cni_plugin_garbage"
    assert office.box.commands() == ["ADD one", "DEL two", "DEL one"]
    assert "prevResult" not in office.box.calls()[1].stdin


def test_a_cancelled_add_is_taken_back_before_the_caller_goes_on(office: Office, job: NetNamespace) -> None:
    """Also when it is cancelled twice."""
    fifo = office.root / "started"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    office.box.write("two", ADD=f"echo x > {fifo}; sleep 1000", DEL=f"echo x > {fifo}")

    async def main() -> None:
        loop = asyncio.get_running_loop()
        seen: asyncio.Queue[bytes] = asyncio.Queue()
        loop.add_reader(reader, lambda: seen.put_nowait(os.read(reader, 10)))
        task = asyncio.ensure_future(office.network().add("fy-1", job.path))
        while await seen.get() != b"x\n":
            pass
        task.cancel()
        while await seen.get() != b"x\n":
            pass
        task.cancel()
        loop.remove_reader(reader)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    os.close(reader)
    assert office.box.commands() == ["ADD one", "ADD two", "DEL two", "DEL one"]
    assert office.cache().entries() == []


def test_del_uses_what_add_used(office: Office, job: NetNamespace) -> None:
    """The operator's edit, or the conflist's end, changes nothing for what is attached."""

    async def main() -> None:
        await office.network(marker="old").add("fy-1", job.path)
        office.box.write("three")
        edited = office.network(plugins=[{"type": "three"}])
        assert await edited.check("fy-1")
        await edited.delete("fy-1")

    asyncio.run(main())
    assert office.box.commands()[2:] == ["CHECK one", "CHECK two", "DEL two", "DEL one"]


def test_the_same_attachment_is_not_added_twice(office: Office, job: NetNamespace) -> None:
    """Neither by this executor nor by another; the first one stays."""

    async def main() -> None:
        network = office.network()
        await network.add("fy-1", job.path)
        for other in (network, office.network(), office.network("elsewhere")):
            with pytest.raises(SandboxError) as caught:
                await other.add("fy-1", job.path)
            assert caught.value.reason == "cni_already_attached"
        network.close()
        with pytest.raises(SandboxError):
            await network.add("fy-1", job.path)
        assert await network.check("fy-1")
        await network.add("fy-1", job.path, "eth1")

    asyncio.run(main())


def test_nothing_is_run_for_what_can_not_work(office: Office, job: NetNamespace) -> None:
    """No namespace, a bad name, a capability that nobody has, a check of what is not there."""
    empty = office.root / "empty"
    empty.touch()

    async def main() -> None:
        network = office.network()
        for path in (str(empty), "/absent", str(empty / "x"), "/proc/self/fd"):
            with pytest.raises(SandboxError, match="no network namespace"):
                await network.add("fy-1", path)
        with pytest.raises(InvalidRequest, match="bandwidth"):
            await network.add("fy-1", job.path, runtime_config={"bandwidth": {}})
        with pytest.raises(InvalidRequest):
            await network.add("fy 1", job.path)
        with pytest.raises(SandboxError, match="is not on network"):
            await network.check("fy-1")
        await network.delete("fy-1")

    asyncio.run(main())
    assert office.box.calls() == []


def test_a_check_that_is_ruled_out_runs_nothing(office: Office, job: NetNamespace) -> None:
    """By disableCheck, or by a version that has no CHECK; such a DEL has no prevResult either."""

    async def main() -> None:
        for name, change in (("fy-1", {"disableCheck": "true"}), ("fy-2", {"cniVersion": "0.3.1"})):
            network = office.network(**change)
            await network.add(name, job.path)
            assert not await network.check(name)
            await network.delete(name)

    asyncio.run(main())
    assert not any(call.command == "CHECK" for call in office.box.calls())
    assert "prevResult" in office.box.calls()[2].stdin
    assert "prevResult" not in office.box.calls()[-1].stdin


def test_a_crash_in_the_middle_of_an_add_is_found(office: Office, job: NetNamespace) -> None:
    """The entry is there before the first plugin runs; the namespace's path may be another's afterwards."""
    script = f"""
import asyncio, os, sys
sys.path.insert(0, {str(Path(__file__).parent.parent / "support")!r})
from forgeyard_host.netns import new_namespace
from forgeyard_networks.cni.config import conflist_of
from forgeyard_networks.cni.network import CniNetwork
raw = {dict(office.config().raw)!r}
network = CniNetwork(conflist_of(raw, "f"), [{str(office.box.dir)!r}], {str(office.root / "state")!r},
    claims_dir={str(office.root / "claims")!r})
namespace = new_namespace()
asyncio.run(network.add("fy-1", namespace.path))
"""
    office.box.write("one", ADD=f"kill -9 $PPID; echo '{RESULT}'")

    async def main() -> None:
        crashed = await asyncio.create_subprocess_exec(sys.executable, "-c", script)
        assert await crashed.wait() == -9
        assert office.network().pending() == [Attachment("office", "fy-1", "eth0")]
        assert (await office.reconcile("fy-1")).deleted == ()
        found = await office.reconcile()
        assert found == Reconciled((Attachment("office", "fy-1", "eth0"),), (), ())

    asyncio.run(main())
    assert [call.env["CNI_NETNS"] for call in office.box.calls() if call.command == "DEL"] == ["", ""]
    assert office.network().pending() == []
    assert os.listdir(office.root / "claims") == []


def test_an_entry_of_another_namespace_under_the_same_path_is_not_entered(office: Office, job: NetNamespace) -> None:
    """A number of a descriptor comes again; the namespace behind it is compared."""

    async def main() -> None:
        place = office.root / "ns"
        place.symlink_to(job.path)
        network = office.network()
        await network.add("fy-1", str(place))
        with contextlib.closing(new_namespace()) as other:
            place.unlink()
            place.symlink_to(other.path)
            await network.delete("fy-1")

    asyncio.run(main())
    assert [call.env["CNI_NETNS"] for call in office.box.calls()][2:] == ["", ""]


def test_del_goes_on_behind_a_plugin_that_fails_and_can_be_repeated(office: Office, job: NetNamespace) -> None:
    """All problems in one error; the entry stays until all went well."""
    office.box.write("two", DEL=error(99, "stuck"))

    async def main() -> None:
        network = office.network()
        await network.add("fy-1", job.path)
        with pytest.raises(SandboxError, match="stuck") as caught:
            await network.delete("fy-1")
        assert caught.value.kind is SandboxErrorKind.CLEANUP_FAILED
        assert len((await office.reconcile()).problems) == 1
        office.box.write("two")
        await network.delete("fy-1")
        await network.delete("fy-1")

    asyncio.run(main())
    assert office.box.commands()[2:] == ["DEL two", "DEL one"] * 3


def test_a_living_executors_attachments_are_left_alone(office: Office, job: NetNamespace) -> None:
    """Whatever a second executor, with this state directory or another, thinks is valid."""

    async def main() -> None:
        network = office.network()
        await network.add("fy-1", job.path)
        assert await office.reconcile() == Reconciled((), (), ())
        network.close()
        assert len((await office.reconcile()).deleted) == 1

    asyncio.run(main())


def test_an_entry_that_can_not_be_read_is_taken_back_with_todays_configuration(
    office: Office, job: NetNamespace
) -> None:
    """Of a network that is not configured any more it is a problem that shows."""

    async def main() -> None:
        network = office.network()
        await network.add("fy-1", job.path)
        network.close()
        for key in ("office:fy-1:eth0", "gone:fy-2:eth0"):
            (office.root / "state" / key).write_text("")
        found = await office.reconcile()
        assert found.deleted == (Attachment("office", "fy-1", "eth0"),)
        assert "gone" in found.problems[0]

    asyncio.run(main())


def test_status_and_gc_are_for_plugins_of_version_1_1(office: Office, job: NetNamespace) -> None:
    """GC gets what is attached, other executors' too; disableGC is heeded; older ones are asked nothing."""
    both = ("1.0.0", "1.1.0")
    new = {"cniVersions": ["1.0.0", "1.1.0"]}
    office.box.write("one", versions=both, STATUS=error(50, "no daemon"))
    office.box.write("two", versions=both)

    async def main() -> None:
        await office.network().status()
        with pytest.raises(SandboxError, match="no daemon") as caught:
            await office.network(**new).status()
        assert caught.value.reason == "cni_not_ready"
        here, there = office.network(**new), office.network("other", **new)
        await here.add("fy-1", job.path)
        await there.add("fy-2", job.path, "net1")
        assert (await office.reconcile(**new)).problems == ()
        await office.reconcile(**new, disableGC=True)
        await office.reconcile()

    asyncio.run(main())
    collected = [call for call in office.box.calls() if call.command == "GC"]
    assert [call.plugin for call in collected] == ["one", "two"]
    attached = [{"containerID": "fy-1", "ifname": "eth0"}, {"containerID": "fy-2", "ifname": "net1"}]
    assert all(call.stdin["cni.dev/valid-attachments"] == attached for call in collected)
    assert all(call.stdin["cniVersion"] == "1.1.0" for call in collected)


def test_a_missing_plugin_shows_in_the_status(office: Office) -> None:
    """Before any job needs it."""
    with pytest.raises(SandboxError) as caught:
        asyncio.run(office.network(plugins=[{"type": "one", "ipam": {"type": "absent"}}]).status())
    assert caught.value.reason == "cni_plugin_missing"


def test_a_full_disk_fails_the_add_before_any_plugin(office: Office, job: NetNamespace) -> None:
    """What can't be written down is not done."""
    (office.root / "state").write_text("a file where the directory should be")
    with pytest.raises(SandboxError) as caught:
        asyncio.run(office.network().add("fy-1", job.path))
    assert caught.value.reason == "cni_cache"
    assert office.box.calls() == []
    assert os.listdir(office.root / "claims") == []
