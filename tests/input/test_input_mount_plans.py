"""What is asked of `host`, asked wrongly: refused by a SandboxError, with nothing left mounted or made."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forgeyard_host.host import Host
from forgeyard_host.ledger import Ledger
from forgeyard_host.operations import BindRequest, IdMapKind, OverlayRequest, SandboxSetup, ScratchDir
from forgeyard_model.errors import SandboxError, SandboxErrorKind
from forgeyard_model.identity import SandboxId

pytestmark = pytest.mark.kernel

BASE = 2_000_000_000 + 65536 * 1901
SOURCES = ["GOOD", "GOOD/f", "GOOD/../canary", "LINK", "LINK/f", "GOOD\0", "GOOD\0/../canary", "relative", "", "/"]
SOURCES += ["//", "GOOD/.", "/absent", "/" + "a" * 300, "/" + "a/" * 3000, "\ud800", "/\ud800", "\udcff", "/dev/null"]
NAMES = st.sampled_from(
    ["source", "a", "b", "rootfs", ".", "..", "../x", "a/b", "", ".hidden", "a\0", "a\n", "ü", "x" * 300]
)
NUMBERS = st.sampled_from([0, 1, -1, 1000, 65535, 65536, 1 << 31, 1 << 32, 1 << 64, -(1 << 64)])
BINDS = st.lists(
    st.builds(BindRequest, NAMES, st.sampled_from(SOURCES), st.sampled_from(list(IdMapKind)), st.booleans()), max_size=2
)
OVERLAYS = st.lists(
    st.builds(
        OverlayRequest,
        NAMES,
        st.lists(st.sampled_from(SOURCES), max_size=2).map(tuple),
        st.sampled_from(list(IdMapKind)),
        NAMES,
    ),
    max_size=2,
)
SCRATCH = st.lists(st.builds(ScratchDir, NAMES, NAMES, NUMBERS, NUMBERS, NUMBERS), max_size=2)
Make = Callable[..., SandboxSetup]


@pytest.fixture
def host(state_dir: Path) -> Iterator[Host]:
    """A Host on a state directory of its own, beside trees that requests may name."""
    for name in ("good", "canary"):
        (state_dir / "trees" / name).mkdir(parents=True)
        (state_dir / "trees" / name / "f").write_text(name)
    (state_dir / "trees" / "link").symlink_to("canary")
    made = Host(str(state_dir / "state"))
    yield made
    made.close()


def real(source: str, state: Path) -> str:
    """A source of SOURCES as a path of this test."""
    trees = state / "trees"
    return source.replace("GOOD", f"{trees}/good").replace("LINK", f"{trees}/link")


def set_up_and_down(host: Host, state: Path, **parts: object) -> str:
    """One attempt, from its ledger to its last trace; returns the reason of its refusal, or "" when it was made."""
    sandbox = SandboxId.mint()
    values: dict[str, object] = {"uid_base": BASE, "uid_count": 65536, "job_uid": 1000, "job_gid": 1000} | parts
    ledger = Ledger.open(host.state_root, sandbox, "test")
    directory = host.directory_of(sandbox)
    try:
        placed = host.setup(SandboxSetup(sandbox, directory, **values), ledger)  # type: ignore[arg-type]  # the tests give what they mean to
        for path in placed.sources.values():
            assert path.startswith(directory)
            if os.path.isdir(path) and os.path.exists(f"{path}/f"):
                assert Path(path, "f").read_text() == "good"
    except SandboxError as error:
        return f"{error.reason} in several lines" if "\n" in str(error) else error.reason
    finally:
        host.teardown(directory)
        ledger.close_and_remove()
        assert not os.path.exists(directory)
        assert f"{state}/state/sandboxes" not in Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    return ""


@settings(max_examples=150, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(binds=BINDS, overlays=OVERLAYS, scratch=SCRATCH, job=NUMBERS, size=NUMBERS | st.just(1 << 20))
def test_any_setup_is_made_or_refused(
    host: Host,
    state_dir: Path,
    binds: list[BindRequest],
    overlays: list[OverlayRequest],
    scratch: list[ScratchDir],
    job: int,
    size: int,
) -> None:
    """A plan of hostile names, sources, ids and modes: a SandboxError or mounts of what was named, and no trace."""
    set_up_and_down(
        host,
        state_dir,
        binds=tuple(BindRequest(b.slot, real(b.source, state_dir), b.idmap, b.read_only) for b in binds),
        overlays=tuple(
            OverlayRequest(o.slot, tuple(real(lower, state_dir) for lower in o.lowers), o.idmap, o.upper)
            for o in overlays
        ),
        scratch=tuple(scratch),
        job_uid=job,
        files_size=size,
    )


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("GOOD\0", "nul_in_path"),
        ("GOOD\0/../canary", "relative_path"),
        ("GOOD/../canary", "relative_path"),
        ("relative", "relative_path"),
        ("", "relative_path"),
        ("LINK", "symlink_in_path"),
        ("LINK/f", "symlink_in_path"),
        ("/absent", "source_missing"),
        ("/" + "a" * 300, "source_not_usable"),
        ("/\ud800", "source_not_usable"),
    ],
    ids=lambda text: repr(text)[:30],
)
def test_sources_that_are_none(host: Host, state_dir: Path, source: str, reason: str) -> None:
    """A path that the kernel would read otherwise than it was checked, or that leads elsewhere."""
    for parts in (
        {"binds": (BindRequest("s", real(source, state_dir), IdMapKind.SHIFT),)},
        {"overlays": (OverlayRequest("s", (real(source, state_dir),), IdMapKind.SHIFT, "u"),)},
    ):
        assert set_up_and_down(host, state_dir, **parts) == reason


@pytest.mark.parametrize("limit", [-1, 0, 1, 1 << 62, 1 << 64])
def test_disks_of_no_possible_size(host: Host, state_dir: Path, limit: int) -> None:
    """A limit that can't be enforced is an error, not a disk of some other size."""
    reason = set_up_and_down(host, state_dir, disk_limit=limit)
    assert reason == ("no_bounded_disk" if limit == 1 << 62 else "bad_disk_limit")


@pytest.mark.parametrize(
    ("base", "count"), [(0, 65536), (-1, 65536), (1000, 1), (BASE, 0), (BASE, -1), (BASE, 1 << 40)]
)
def test_ids_that_are_not_ours_to_give(host: Host, state_dir: Path, base: int, count: int) -> None:
    """A range that holds the host's own ids, or none, is refused whoever asks."""
    assert set_up_and_down(host, state_dir, uid_base=base, uid_count=count) == "uid_range_outside_block"


def test_the_directory_is_the_attempts_own(host: Host, state_dir: Path) -> None:
    """Nothing is set up, and nothing removed, anywhere else."""
    sandbox = SandboxId.mint()
    ledger = Ledger.open(host.state_root, sandbox, "test")
    try:
        for directory in (f"{state_dir}/trees/good", host.directory_of(sandbox) + "/..", "", "relative", "/"):
            with pytest.raises(SandboxError) as caught:
                host.setup(SandboxSetup(sandbox, directory, BASE, 65536, 1000, 1000), ledger)
            assert caught.value.kind is SandboxErrorKind.INVALID_FILESYSTEM_PLAN
            with pytest.raises(SandboxError):
                host.teardown(directory)
    finally:
        ledger.close_and_remove()
    assert (state_dir / "trees" / "good" / "f").read_text() == "good"
