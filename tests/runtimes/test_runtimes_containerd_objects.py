"""What is kept at containerd beside containers: images, snapshots, leases; and how what is left there is swept."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from build import BUSYBOX, LayoutWriter, busybox_layers, machine
from containerd_jobs import (
    ROOTFS,
    assert_empty,
    bare,
    bare_place,
    ctr,
    own_daemon,
    runtime_at,
    settings_for,
)
from daemons import Containerd

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_runtimes.containerd import calls
from forgeyard_runtimes.containerd.images import ContainerdImages, image_name, lowers_of
from forgeyard_runtimes.containerd.messages import leases, snapshots, types
from forgeyard_runtimes.containerd.runtime import ContainerdRuntime
from forgeyard_runtimes.containerd.settings import ContainerdSettings
from forgeyard_runtimes.containerd.translate import container_record
from forgeyard_runtimes.contract import ContainerStatus
from forgeyard_runtimes.labels import owner_labels

pytestmark = [pytest.mark.kernel, pytest.mark.daemon("containerd")]

daemon = pytest.fixture(scope="module")(own_daemon)
place = pytest.fixture(bare_place)


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A layout with one busybox image of several layers, and its manifest's digest."""
    assert BUSYBOX is not None
    path = tmp_path_factory.mktemp("layout") / "busybox"
    path.mkdir()
    writer = LayoutWriter(path)
    made = writer.image(busybox_layers(BUSYBOX), {}, architecture=machine())
    writer.finish({**made, "annotations": {"org.opencontainers.image.ref.name": "latest"}})
    return path, str(made["digest"])


def test_an_image_is_unpacked_by_the_snapshotter(daemon: Containerd, image: tuple[Path, str]) -> None:
    """Blobs go in by digest and come back as directories of the snapshotter, topmost first."""
    layout, manifest = image

    async def main() -> None:
        async with runtime_at(daemon) as runtime:
            images = ContainerdImages(runtime.client, settings_for(daemon))
            plan = await images.unpacked(replace(ROOTFS, identity=manifest), "sandbox-1", layout)
            assert len(plan.lowers) == len(json.loads(blob(layout, manifest))["layers"])
            assert all(Path(lower).is_dir() for lower in plan.lowers)
            assert any((Path(lower) / "bin/busybox").exists() for lower in plan.lowers)
            assert image_name(manifest) in ctr(daemon, "images", "list", "-q")
            await images.release("sandbox-1")
            await images.release("sandbox-1")
            await images.remove(manifest)
            await images.remove(manifest)
            assert not any(Path(lower).exists() for lower in plan.lowers)

    asyncio.run(main())
    assert ctr(daemon, "leases", "list", "-q") == ""
    assert ctr(daemon, "snapshots", "list").splitlines()[1:] == []


def test_the_collector_takes_nothing_that_a_job_uses(daemon: Containerd, image: tuple[Path, str]) -> None:
    """The image is deleted and the collector run: the layers stay until the sandbox is released."""
    layout, manifest = image

    async def main() -> None:
        async with runtime_at(daemon) as runtime:
            images = ContainerdImages(runtime.client, settings_for(daemon))
            plan = await images.unpacked(replace(ROOTFS, identity=manifest), "sandbox-1", layout)
            await asyncio.to_thread(ctr, daemon, "images", "delete", "--sync", image_name(manifest))
            assert all(Path(lower).is_dir() for lower in plan.lowers)
            # Somebody else's job comes now: what is there is used, what is gone is sent again.
            other = await images.unpacked(replace(ROOTFS, identity=manifest), "sandbox-2", layout)
            assert other.lowers == plan.lowers
            await images.release("sandbox-1")
            await images.release("sandbox-2")
            await images.remove(manifest)
            await collected(runtime)
            assert not any(Path(lower).exists() for lower in plan.lowers)

    asyncio.run(main())


async def collected(runtime: ContainerdRuntime) -> None:
    """Have the daemon's collector run to its end."""
    await runtime.client.call(calls.LEASE_CREATE, leases.CreateRequest(id="collect"))
    await runtime.client.call(calls.LEASE_DELETE, leases.DeleteRequest(id="collect", sync=True))


def test_two_jobs_may_bring_the_same_image(daemon: Containerd, image: tuple[Path, str]) -> None:
    """At the same time: both get the same layers."""
    layout, manifest = image

    async def main() -> None:
        async with runtime_at(daemon) as runtime:
            images = ContainerdImages(runtime.client, settings_for(daemon))
            names = [f"sandbox-{number}" for number in range(4)]
            plans = await asyncio.gather(
                *(images.unpacked(replace(ROOTFS, identity=manifest), name, layout) for name in names)
            )
            assert len({plan.lowers for plan in plans}) == 1
            for name in names:
                await images.release(name)
            await images.remove(manifest)

    asyncio.run(main())


def test_a_blob_that_is_not_what_it_says(daemon: Containerd, image: tuple[Path, str], tmp_path: Path) -> None:
    """The daemon compares what it gets with the digest; a damaged layer is refused, and holds nothing afterwards."""
    layout, manifest = tmp_path / "layout", image[1]
    shutil.copytree(image[0], layout)
    layer = json.loads(blob(layout, manifest))["layers"][0]["digest"]
    path = layout / "blobs" / layer.replace(":", "/")
    path.write_bytes(path.read_bytes()[:-1] + b"?")

    async def main() -> None:
        async with runtime_at(daemon) as runtime:
            images = ContainerdImages(runtime.client, settings_for(daemon))
            with pytest.raises(ExecutorError) as caught:
                await images.unpacked(replace(ROOTFS, identity=manifest), "sandbox-1", layout)
            assert caught.value.kind is ExecutorErrorKind.INTERNAL
            await images.release("sandbox-1")

    asyncio.run(main())
    assert ctr(daemon, "leases", "list", "-q") == ""


def test_a_snapshotter_without_directories_is_refused() -> None:
    """Only binds and overlays can be built upon."""
    overlay = types.Mount(type="overlay", source="overlay", options=["index=off", "lowerdir=/b:/a"])
    assert lowers_of([overlay], "overlayfs") == ("/b", "/a")
    assert lowers_of([types.Mount(type="bind", source="/a", options=["ro", "rbind"])], "native") == ("/a",)
    with pytest.raises(ExecutorError, match="devmapper"):
        lowers_of([types.Mount(type="ext4", source="/dev/dm-1")], "devmapper")


def blob(layout: Path, digest: str) -> bytes:
    """A blob's bytes."""
    return (layout / "blobs" / digest.replace(":", "/")).read_bytes()


def test_what_dead_executors_left_is_removed(daemon: Containerd, place: Path) -> None:
    """Containers, running or not, of sandboxes that are dead, go; those that live and those of others stay."""

    async def main() -> None:
        async with runtime_at(daemon) as runtime, runtime_at(daemon, "other") as other:
            dead, alive, foreign = (bare(place, name=f"fy-{name}") for name in ("dead", "alive", "foreign"))
            await dead.run(runtime)
            await alive.run(runtime)
            await foreign.run(other)
            stranger = bare(place, name="stranger")
            record = container_record(stranger.ref, stranger.bundle, settings_for(daemon))
            record.labels.clear()
            await runtime.client.call(calls.CONTAINER_CREATE, calls.CONTAINER_CREATE.question(container=record))
            report = await runtime.sweep(lambda sandbox: sandbox == "alive")
            assert report.removed == ("container fy-dead",)
            assert report.kept == ("container fy-alive",)
            assert report.failed == ()
            assert (await other.state(foreign.ref)).status is ContainerStatus.RUNNING
            assert (await runtime.state(stranger.ref)).status is ContainerStatus.CREATING
            assert (await runtime.sweep(lambda _: False)).removed == ("container fy-alive",)
            for made in (foreign, stranger):
                await runtime.remove(made.ref)

    asyncio.run(main())
    assert_empty(daemon)


def test_one_stuck_object_does_not_stop_the_sweep(daemon: Containerd, place: Path) -> None:
    """A snapshot that something stands on can't be removed: it is named, and all the rest is gone."""

    async def main() -> None:
        async with runtime_at(daemon) as runtime:
            settings = settings_for(daemon)
            left = bare(place, name="fy-left")
            await left.lay_down(runtime)
            await prepare(runtime, settings, "a-parent")
            commit = snapshots.CommitSnapshotRequest(
                snapshotter="overlayfs", name="stuck", key="a-parent", labels=rooted(settings)
            )
            await runtime.client.call(calls.SNAPSHOT_COMMIT, commit)
            await prepare(runtime, replace(settings, state="other"), "child", "stuck")
            await prepare(runtime, settings, "z-free")
            lease = leases.CreateRequest(id="held", labels=owner_labels(settings, "gone"))
            await runtime.client.call(calls.LEASE_CREATE, lease)
            report = await runtime.sweep(lambda _: False)
            assert set(report.removed) == {"container fy-left", "snapshot z-free", "lease held"}
            assert [name for name, _ in report.failed] == ["snapshot stuck"]
            assert "child" in report.failed[0][1]
            for key in ("child", "stuck"):
                await asyncio.to_thread(ctr, daemon, "snapshots", "remove", key)
            assert (await runtime.sweep(lambda _: False)).failed == ()

    asyncio.run(main())
    assert_empty(daemon)


def rooted(settings: ContainerdSettings) -> dict[str, str]:
    """Labels of something whose sandbox is gone, and that the daemon's collector leaves to us."""
    return {**owner_labels(settings, "gone"), "containerd.io/gc.root": "for the test"}


async def prepare(runtime: ContainerdRuntime, settings: ContainerdSettings, key: str, parent: str = "") -> None:
    """An active snapshot of a sandbox that is gone."""
    request = snapshots.PrepareSnapshotRequest(snapshotter="overlayfs", key=key, parent=parent, labels=rooted(settings))
    await runtime.client.call(calls.SNAPSHOT_PREPARE, request)


def test_another_boots_containers_are_dead(daemon: Containerd, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record that outlived the host is swept, whatever is said of its sandbox."""

    async def main() -> None:
        async with runtime_at(daemon) as runtime:
            monkeypatch.setattr("forgeyard_runtimes.labels.boot_id", lambda: "an-earlier-boot")
            await bare(place, name="fy-old").lay_down(runtime)
            assert (await runtime.sweep(lambda _: True)).removed == ("container fy-old",)

    asyncio.run(main())
    assert_empty(daemon)


def test_a_thousand_bytes_of_names_fit(daemon: Containerd, place: Path) -> None:
    """A deep state directory is no reason for a refusal: labels hold 4096 bytes."""
    deep = place
    while len(str(deep)) < 1000:
        deep /= "d" * 100
    deep.mkdir(parents=True)

    async def main() -> None:
        async with runtime_at(daemon) as runtime:
            made = bare(place)
            made = replace(made, ref=replace(made.ref, directory=deep))
            await made.lay_down(runtime)
            assert len(await runtime.list((deep,))) == 1
            await runtime.remove(made.ref)

    asyncio.run(main())
