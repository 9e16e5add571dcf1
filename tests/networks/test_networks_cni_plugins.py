"""CNI plugins as programs: found, executed, bounded, their errors told."""

from __future__ import annotations

import asyncio
import os
import select
import time
from pathlib import Path

import pytest
from cni_plugins import PluginBox, error

from forgeyard_model.errors import SandboxError, SandboxErrorKind
from forgeyard_networks.cni.attachment import Attachment
from forgeyard_networks.cni.config import conflist_of
from forgeyard_networks.cni.execute import OUTPUT_LIMIT
from forgeyard_networks.cni.plugins import Call, Plugins, plugin_dirs

AT = Attachment("office", "fy-1", "eth0")


@pytest.fixture
def box(tmp_path: Path) -> PluginBox:
    """Plugins of the test."""
    return PluginBox(tmp_path)


def failure(box: PluginBox, add: str, seconds: float = 30) -> SandboxError:
    """What an ADD of a plugin that does `add` raises."""
    box.write("p", ADD=add)
    call = Call.of("ADD", AT, "/ns", {})
    with pytest.raises(SandboxError) as caught:
        asyncio.run(Plugins((str(box.dir),), seconds).run("p", call, {"name": "office"}))
    assert caught.value.kind is SandboxErrorKind.NETWORK_SETUP_FAILED
    return caught.value


def test_a_plugin_gets_the_protocol_and_nothing_else(box: PluginBox) -> None:
    """The six variables, a PATH, the document; nothing of our own environment."""
    box.write("p")
    os.environ["SECRET_OF_THE_TEST"] = "x"
    try:
        call = Call.of("ADD", AT, "/run/ns", {"K": "V"})
        asyncio.run(Plugins((str(box.dir), "/other")).run("p", call, {"name": "office"}))
    finally:
        del os.environ["SECRET_OF_THE_TEST"]
    (called,) = box.calls()
    assert called.stdin == {"name": "office"}
    assert {key: value for key, value in called.env.items() if key.startswith("CNI_")} == {
        "CNI_COMMAND": "ADD",
        "CNI_CONTAINERID": "fy-1",
        "CNI_NETNS": "/run/ns",
        "CNI_IFNAME": "eth0",
        "CNI_ARGS": "K=V",
        "CNI_PATH": f"{box.dir}:/other",
    }
    assert set(called.env) - {"PWD", "OLDPWD", "_", "SHLVL"} <= {"PATH", *(k for k in called.env if k[:4] == "CNI_")}


def all_dead(reader: int) -> bool:
    """Whether nobody holds the writing end of the pipe any more, which every process of the plugin did."""
    poller = select.poll()
    poller.register(reader, select.POLLIN)
    return bool(poller.poll(10_000)[0][1] & select.POLLHUP)


@pytest.mark.parametrize(
    ("code", "reason"),
    [(1, "cni_version"), (7, "cni_config"), (11, "cni_try_again"), (50, "cni_not_ready"), (999, "cni_plugin_failed")],
)
def test_the_plugins_error_names_plugin_network_and_code(box: PluginBox, code: int, reason: str) -> None:
    """With its message, its details and a reason for programs."""
    found = failure(box, error(code, "no room"))
    assert found.reason == reason
    assert "plugin p (ADD of network office)" in found.brief
    assert f"code {code}: no room" in found.brief
    assert found.details == "more"


@pytest.mark.parametrize(
    ("add", "words"),
    [
        ("echo oops >&2; exit 3", "exit 3"),
        ('echo \'{"code":"x"}\'; exit 1', "exit 1"),
        ("kill -9 $$", "signal 9"),
        ("echo hello", "something else than a JSON object"),
        ("echo '[1]'", "something else than a JSON object"),
        ("printf '\\377\\376'", "something else than a JSON object"),
    ],
)
def test_a_plugin_that_speaks_no_cni_is_told_so(box: PluginBox, add: str, words: str) -> None:
    """Whatever it printed and however it ended, in one printable line."""
    found = failure(box, add)
    assert words in found.brief
    assert str(found).isprintable()


def test_a_plugin_that_prints_without_end_stops_at_the_bound(box: PluginBox) -> None:
    """Its writes fail; we hold no more than the bound."""
    found = failure(box, "yes; exit 0")
    assert f"more than {OUTPUT_LIMIT}" in found.brief
    assert len(str(found)) < 2000


def test_a_slow_plugin_is_killed_with_its_children(box: PluginBox, tmp_path: Path) -> None:
    """The whole process group, at the timeout."""
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    before = time.monotonic()
    found = failure(box, f"exec 3> {fifo}; sleep 1000 & sleep 1000", seconds=0.5)
    assert found.reason == "cni_plugin_timeout"
    assert time.monotonic() - before < 20
    assert all_dead(reader)
    os.close(reader)


def test_cancelling_kills_the_plugin(box: PluginBox, tmp_path: Path) -> None:
    """Nothing goes on for a caller that has left."""
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    box.write("p", ADD=f"exec 3> {fifo}; echo started >&3; sleep 1000")

    async def main() -> None:
        task = asyncio.ensure_future(Plugins((str(box.dir),)).run("p", Call.of("ADD", AT, "/ns", {}), {}))
        started = asyncio.Event()
        asyncio.get_running_loop().add_reader(reader, started.set)
        await started.wait()
        asyncio.get_running_loop().remove_reader(reader)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert os.read(reader, 100) == b"started\n"
    assert all_dead(reader)
    os.close(reader)


def test_a_plugin_is_found_by_name_in_order(box: PluginBox, tmp_path: Path) -> None:
    """No way out of the directories; a file that can't be executed is none."""
    box.write("p")
    first = tmp_path / "first"
    first.mkdir()
    (first / "p").write_text("not executable")
    plugins = Plugins((str(first), str(box.dir)))
    assert plugins.find("p") == str(box.dir / "p")
    for name in ("absent", "../plugins/p", "..", ""):
        with pytest.raises(SandboxError) as caught:
            plugins.find(name)
        assert caught.value.reason == "cni_plugin_missing"
    assert plugin_dirs({"CNI_PATH": "/a:relative:/usr/lib/cni"}) == ("/a", "/usr/lib/cni", "/opt/cni/bin")


def test_versions_are_asked_once_and_only_where_there_is_a_choice(box: PluginBox) -> None:
    """The newest that the configuration and every plugin have; the one for addresses counts too."""
    box.write("p", versions=("0.4.0", "1.0.0", "1.1.0"))
    box.write("addresses", versions=("0.3.1", "0.4.0", "1.0.0"))
    plugins = Plugins((str(box.dir),))
    raw = {"name": "n", "cniVersion": "0.4.0", "plugins": [{"type": "p", "ipam": {"type": "addresses"}}]}

    async def main() -> tuple[str, str]:
        one = await plugins.negotiate(conflist_of(raw, "f"))
        assert box.calls() == []
        many = conflist_of(raw | {"cniVersions": ["1.0.0", "1.1.0"]}, "f")
        await plugins.negotiate(many)
        return one.version, (await plugins.negotiate(many)).version

    assert asyncio.run(main()) == ("0.4.0", "1.0.0")
    assert box.commands() == ["VERSION p", "VERSION addresses"]
    with pytest.raises(SandboxError, match="no version in common"):
        asyncio.run(plugins.negotiate(conflist_of(raw | {"cniVersion": "0.3.0", "cniVersions": ["1.1.0"]}, "f")))


@pytest.mark.parametrize("printed", ["{}", '{"supportedVersions":["x"]}', '{"supportedVersions":"1.0.0"}', ""])
def test_garbage_for_a_version_is_an_error(box: PluginBox, printed: str) -> None:
    """It is not read as any version."""
    box.write("p", VERSION=f"echo '{printed}'")
    with pytest.raises(SandboxError, match="does not say which versions"):
        asyncio.run(Plugins((str(box.dir),)).versions("p"))
