"""Binds and overlays of an attempt on the real kernel: owners, flags, hostile sources, takedown."""

from __future__ import annotations

import os
import stat
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forgeyard_host import mounts
from forgeyard_host.host import Host
from forgeyard_host.ledger import Ledger
from forgeyard_host.operations import (
    BindRequest,
    IdMapKind,
    OverlayRequest,
    SandboxPlaced,
    SandboxSetup,
    ScratchDir,
)
from forgeyard_model.errors import SandboxError, SandboxErrorKind
from forgeyard_model.identity import SandboxId

pytestmark = pytest.mark.kernel

BASE = 2_000_000_000 + 65536 * 1900
Set = Callable[..., SandboxPlaced]


@pytest.fixture
def host(state_dir: Path) -> Iterator[Host]:
    """A Host on a state directory of its own."""
    made = Host(str(state_dir))
    yield made
    made.close()


@pytest.fixture
def set_up(host: Host, state_dir: Path) -> Iterator[Set]:
    """Calls Host.setup for a new attempt with the parts given, and takes everything down afterwards."""
    done: list[tuple[SandboxId, Ledger]] = []

    def call(*, uid_base: int | None = BASE, job: int = 1000, **parts: object) -> SandboxPlaced:
        sandbox = SandboxId.mint()
        ledger = Ledger.open(str(state_dir), sandbox, "test")
        done.append((sandbox, ledger))
        request = SandboxSetup(sandbox, host.directory_of(sandbox), uid_base, 65536, job, job, **parts)  # type: ignore[arg-type]  # the tests give what they mean to
        return host.setup(request, ledger)

    yield call
    for sandbox, ledger in done:
        host.teardown(host.directory_of(sandbox))
        ledger.close_and_remove()


def make(path: Path, *, uid: int = 0, gid: int = 0, mode: int = 0o755) -> Path:
    """A directory with a file `f` in it, both with that owner."""
    path.mkdir(parents=True)
    (path / "f").write_text("text")
    for each in (path, path / "f"):
        os.chown(each, uid, gid)
    path.chmod(mode)
    return path


def flags_of(mountpoint: str) -> set[str]:
    """The options of the mount at `mountpoint`."""
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        fields = line.split()
        if fields[4] == mountpoint:
            return set(fields[5].split(","))
    raise AssertionError(f"{mountpoint} is not mounted")


def as_uid(uid: int, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run a command as a host uid that has no account."""
    return subprocess.run(argv, user=uid, group=uid, extra_groups=[], capture_output=True, text=True, check=False)


def owners(path: str) -> tuple[int, int]:
    """uid and gid."""
    info = os.stat(path)
    return info.st_uid, info.st_gid


def test_shift_moves_every_id_by_the_base(set_up: Set, state_dir: Path) -> None:
    """SHIFT shows id k on disk as base+k, which is id k in the sandbox."""
    source = make(state_dir / "src", uid=33, gid=44)

    placed = set_up(binds=(BindRequest("s", str(source), IdMapKind.SHIFT),))

    assert owners(placed.sources["s"] + "/f") == (BASE + 33, BASE + 44)
    assert owners(str(source / "f")) == (33, 44)
    assert placed.notes == ()


@pytest.mark.parametrize("owner", [0, 1000, 4242, 70000])
def test_owner_gives_the_source_to_the_job(set_up: Set, state_dir: Path, owner: int) -> None:
    """OWNER shows whoever owns the source as the job's user, also one beyond the range."""
    source = make(state_dir / "src", uid=owner, gid=owner)
    (source / "other").write_text("")
    os.chown(source / "other", 7, 7)

    placed = set_up(binds=(BindRequest("s", str(source), IdMapKind.OWNER, read_only=False),))

    assert owners(placed.sources["s"]) == (BASE + 1000, BASE + 1000)
    assert owners(placed.sources["s"] + "/other") == (BASE + 7, BASE + 7)


def test_owner_swaps_so_that_two_never_become_one(set_up: Set, state_dir: Path) -> None:
    """With OWNER a file of the job's own number on disk does not also appear as the job's."""
    source = make(state_dir / "src", uid=0)
    (source / "thousand").write_text("")
    os.chown(source / "thousand", 1000, 1000)

    placed = set_up(binds=(BindRequest("s", str(source), IdMapKind.OWNER),))

    assert owners(placed.sources["s"] + "/thousand") == (BASE, BASE)


def test_writing_through_owner_keeps_the_owner_on_disk(set_up: Set, state_dir: Path) -> None:
    """What the job writes through an OWNER bind belongs to the source's owner on disk."""
    source = make(state_dir / "src", uid=4242, gid=4242)
    placed = set_up(binds=(BindRequest("s", str(source), IdMapKind.OWNER, read_only=False),))

    ran = as_uid(BASE + 1000, "touch", placed.sources["s"] + "/new")

    assert ran.returncode == 0, ran.stderr
    assert owners(str(source / "new")) == (4242, 4242)


def test_without_a_user_namespace_only_owner_and_job_change_places(set_up: Set, state_dir: Path) -> None:
    """uid_base None: ids are as on disk, but what belongs to the one who handed it in belongs to the job."""
    source, root = make(state_dir / "src", uid=33, gid=33), make(state_dir / "root", uid=33, gid=33)

    placed = set_up(
        uid_base=None,
        binds=(BindRequest("s", str(source), IdMapKind.OWNER), BindRequest("r", str(root), IdMapKind.SHIFT)),
        scratch=(ScratchDir("w", "w", 0o700, 12, 13),),
    )

    assert owners(placed.sources["s"]) == (1000, 1000)
    assert owners(placed.sources["r"]) == (33, 33)
    assert owners(placed.sources["w"]) == (12, 13)


def test_a_filesystem_without_id_maps_is_noted(set_up: Set) -> None:
    """Where the kernel refuses a map (proc does) the bind is plain, and a note says so."""
    placed = set_up(binds=(BindRequest("s", "/proc/sys/kernel", IdMapKind.SHIFT),))

    assert owners(placed.sources["s"]) == (0, 0)
    assert placed.notes == ("files of /proc/sys/kernel appear owned by nobody: its filesystem can't be ID-mapped",)


def test_read_only_holds_for_root(set_up: Set, state_dir: Path) -> None:
    """A read-only bind refuses even the host's root; its source stays writable outside."""
    source = make(state_dir / "src")
    placed = set_up(binds=(BindRequest("s", str(source), IdMapKind.NONE),))

    with pytest.raises(OSError, match="Read-only"):
        Path(placed.sources["s"], "new").write_text("")
    (source / "new").write_text("")


def test_binds_carry_nosuid_nodev_and_noexec_as_asked(set_up: Set, state_dir: Path) -> None:
    """Every bind is nosuid and nodev; executable=False adds noexec; a writable one is not ro."""
    source = make(state_dir / "src")
    placed = set_up(
        binds=(
            BindRequest("a", str(source), IdMapKind.SHIFT),
            BindRequest("b", str(source), IdMapKind.SHIFT, read_only=False, executable=False),
        )
    )

    assert {"ro", "nosuid", "nodev"} <= flags_of(placed.sources["a"])
    assert "noexec" not in flags_of(placed.sources["a"])
    assert {"rw", "nosuid", "nodev", "noexec"} <= flags_of(placed.sources["b"])


def test_a_file_can_be_bound(set_up: Set, state_dir: Path) -> None:
    """A slot whose source is a file gets a file, and required_directory refuses it where one was wanted."""
    source = make(state_dir / "src") / "f"
    placed = set_up(binds=(BindRequest("s", str(source), IdMapKind.SHIFT, required_directory=False),))

    assert Path(placed.sources["s"]).read_text() == "text"
    with pytest.raises(SandboxError) as caught:
        set_up(binds=(BindRequest("s", str(source), IdMapKind.SHIFT, required_directory=True),))
    assert caught.value.reason == "wrong_kind_of_source"


@pytest.mark.parametrize("part", ["last", "middle"])
def test_a_symlink_in_a_source_is_refused(set_up: Set, state_dir: Path, part: str) -> None:
    """A symlink anywhere in a source's path is a typed error; nothing behind it is mounted."""
    make(state_dir / "real" / "inner")
    (state_dir / "link").symlink_to(state_dir / "real" / ("inner" if part == "last" else ""))
    source = state_dir / "link" / ("" if part == "last" else "inner")

    with pytest.raises(SandboxError) as caught:
        set_up(binds=(BindRequest("s", str(source), IdMapKind.SHIFT),))

    assert caught.value.kind is SandboxErrorKind.INVALID_FILESYSTEM_PLAN
    assert caught.value.reason == "symlink_in_path"


def test_a_source_swapped_meanwhile_is_never_followed(state_dir: Path, set_up: Set) -> None:
    """While a directory and a symlink change places over and over, a bind shows the directory or fails."""
    secret = make(state_dir / "secret")
    (secret / "f").write_text("secret")
    good, bad, spot = make(state_dir / "good"), state_dir / "bad", state_dir / "spot"
    bad.symlink_to(secret)
    good.rename(spot)
    stop = threading.Event()
    exchange = mounts.syscalls._LIBC.renameat2

    def swap() -> None:
        while not stop.is_set():
            exchange(-100, os.fsencode(spot), -100, os.fsencode(bad), 2)  # RENAME_EXCHANGE

    thread = threading.Thread(target=swap)
    thread.start()
    seen, refusals = set(), set()
    try:
        for _ in range(30):
            try:
                placed = set_up(binds=(BindRequest("s", str(spot), IdMapKind.NONE),))
            except SandboxError as error:
                refusals.add(error.reason)
            else:
                seen.add(Path(placed.sources["s"], "f").read_text())
    finally:
        stop.set()
        thread.join()

    assert seen <= {"text"}
    assert refusals <= {"symlink_in_path"}


def test_overlay_shows_lowers_mapped_and_discards_writes(set_up: Set, state_dir: Path) -> None:
    """The merged tree has the upper layer's files first, owners shifted, and a write leaves the lowers alone."""
    top, bottom = make(state_dir / "top", uid=5), make(state_dir / "bottom", uid=6)
    (top / "f").write_text("top")
    (bottom / "deep").mkdir()
    (bottom / "deep" / "file").write_text("x")
    placed = set_up(overlays=(OverlayRequest("o", (str(top), str(bottom)), IdMapKind.SHIFT, "up"),))
    merged = Path(placed.sources["o"])

    assert (merged / "f").read_text() == "top"
    assert owners(str(merged)) == (BASE + 5, BASE + 0)
    (merged / "f").write_text("written")
    (merged / "deep").rename(merged / "moved")
    assert (top / "f").read_text() == "top"
    assert (bottom / "deep" / "file").read_text() == "x"
    assert (merged / "moved" / "file").read_text() == "x"
    assert {"nosuid", "nodev"} <= flags_of(str(merged))


@pytest.mark.parametrize(("kind", "owner"), [(IdMapKind.SHIFT, 33), (IdMapKind.OWNER, 1000)])
def test_overlay_root_looks_like_the_lower(set_up: Set, state_dir: Path, kind: IdMapKind, owner: int) -> None:
    """The merged root has the mode of the topmost lower and its owner as the sandbox sees it."""
    lower = make(state_dir / "low", uid=33, gid=33, mode=0o2775)

    placed = set_up(overlays=(OverlayRequest("o", (str(lower),), kind, "up"),))

    assert owners(placed.sources["o"]) == (BASE + owner, BASE + owner)
    assert stat.S_IMODE(os.stat(placed.sources["o"]).st_mode) == 0o2775


def test_the_job_can_change_files_of_a_copied_source(set_up: Set, state_dir: Path) -> None:
    """A cow view with OWNER lets the job overwrite the caller's files; the caller's stay as they are."""
    lower = make(state_dir / "low", uid=4242, gid=4242)
    placed = set_up(overlays=(OverlayRequest("o", (str(lower),), IdMapKind.OWNER, "up"),))

    ran = as_uid(BASE + 1000, "sh", "-c", f"echo new > {placed.sources['o']}/f")

    assert ran.returncode == 0, ran.stderr
    assert (lower / "f").read_text() == "text"


def test_many_layers_with_hostile_names(set_up: Set, state_dir: Path) -> None:
    """A hundred and fifty layers whose paths hold ':' ',' '\\' and spaces stack without one being lost."""
    lowers = []
    for number in range(150):
        path = state_dir / f"layer: {number}, with \\ in it and a name long enough to fill a page of options"
        path.mkdir()
        (path / f"file{number}").write_text("")
        lowers.append(str(path))

    placed = set_up(overlays=(OverlayRequest("o", tuple(lowers), IdMapKind.SHIFT, "up"),))

    assert sorted(os.listdir(placed.sources["o"])) == sorted(f"file{number}" for number in range(150))


def test_the_old_overlay_call_refuses_what_it_would_cut(state_dir: Path) -> None:
    """On kernels that take all layers in one string, more than a page is an error and not a shorter stack."""
    fd = os.open(state_dir, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="one page"):
            mounts.overlay_in_one_string(fd, "o", [f".0.{number}" for number in range(400)], "/proc/self/fd/3/up")
    finally:
        os.close(fd)


def test_the_old_overlay_call_works(state_dir: Path) -> None:
    """The call for kernels before 6.5 mounts the same stack."""
    for name in ("mnt/.0.0", "mnt/.0.1", "mnt/o", "scratch/up/upper", "scratch/up/work"):
        (state_dir / name).mkdir(parents=True)
    (state_dir / "mnt/.0.1/low").write_text("")
    mnt, scratch = (os.open(state_dir / name, os.O_RDONLY) for name in ("mnt", "scratch"))
    try:
        mounts.overlay_in_one_string(mnt, "o", [".0.0", ".0.1"], f"/proc/self/fd/{scratch}/up")
        assert os.listdir(state_dir / "mnt/o") == ["low"]
    finally:
        mounts.unmount_all(str(state_dir / "mnt/o"))
        os.close(mnt)
        os.close(scratch)


def test_scratch_has_owner_and_mode_in_spite_of_the_umask(set_up: Set) -> None:
    """Scratch directories get exactly the mode asked for and an owner inside the attempt's range."""
    old = os.umask(0o077)
    try:
        placed = set_up(scratch=(ScratchDir("t", "tmp", 0o1777, 0, 0), ScratchDir("h", "home", 0o755, 1000, 1001)))
    finally:
        os.umask(old)

    assert stat.S_IMODE(os.stat(placed.sources["t"]).st_mode) == 0o1777
    assert owners(placed.sources["t"]) == (BASE, BASE)
    assert owners(placed.sources["h"]) == (BASE + 1000, BASE + 1001)
    assert as_uid(BASE + 1000, "touch", placed.sources["h"] + "/x").returncode == 0


def test_mounts_do_not_spread(set_up: Set, state_dir: Path) -> None:
    """The tmpfs that holds the mountpoints is private, so nothing is passed on to other mount namespaces."""
    placed = set_up(binds=(BindRequest("s", str(make(state_dir / "src")), IdMapKind.SHIFT),))
    lines = [
        line
        for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines()
        if "/mnt" in line.split()[4]
    ]
    ours = [line for line in lines if line.split()[4].startswith(os.path.dirname(placed.sources["s"]))]

    assert len(ours) == 2
    assert not [line for line in ours if "shared:" in line or "master:" in line]


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ({"uid_base": 100_000}, "uid_range_outside_block"),
        ({"uid_base": BASE + 65536 * 148 - 1}, "uid_range_outside_block"),
        ({"job": 65536}, "job_outside_range"),
        ({"binds": (BindRequest("../x", "/usr", IdMapKind.NONE),)}, "bad_name"),
        ({"scratch": (ScratchDir("a", "../../x", 0o700, 0, 0),)}, "bad_name"),
        ({"scratch": (ScratchDir("a", "x", 0o700, 0, 0), ScratchDir("a", "y", 0o700, 0, 0))}, "double_name"),
        ({"scratch": (ScratchDir("a", "x", 0o700, 65536, 0),)}, "owner_outside_range"),
        ({"binds": (BindRequest("s", "usr", IdMapKind.NONE),)}, "relative_path"),
        ({"binds": (BindRequest("s", "/no/such", IdMapKind.NONE),)}, "source_missing"),
        ({"overlays": (OverlayRequest("o", (), IdMapKind.NONE, "u"),)}, "no_layers"),
    ],
)
def test_untrue_requests_are_refused(set_up: Set, parts: dict[str, object], reason: str) -> None:
    """What a request claims is checked against this host again, with a reason for programs."""
    with pytest.raises(SandboxError) as caught:
        set_up(**parts)

    assert caught.value.reason == reason
    assert caught.value.kind is SandboxErrorKind.INVALID_FILESYSTEM_PLAN


def test_only_an_attempt_directory_is_set_up_or_removed(host: Host, state_dir: Path) -> None:
    """A directory that is not <state>/sandboxes/<ulid> is neither filled nor removed."""
    sandbox = SandboxId.mint()
    ledger = Ledger.open(str(state_dir), sandbox, "test")
    victim = make(state_dir / "victim")

    for directory in (str(victim), f"{state_dir}/sandboxes/../victim", f"{state_dir}/sandboxes/{sandbox}/.."):
        with pytest.raises(SandboxError, match="directory"):
            host.setup(SandboxSetup(sandbox, directory, None, 1, 0, 0), ledger)
        with pytest.raises(SandboxError, match="directory"):
            host.teardown(directory)
    assert (victim / "f").exists()
    ledger.close_and_remove()


def test_a_closed_state_directory_is_named(tmp_path: Path) -> None:
    """A state directory that a mapped uid can't walk to is refused before the runtime fails on it."""
    tmp_path.chmod(0o700)
    host, sandbox = Host(str(tmp_path / "state")), SandboxId.mint()
    ledger = Ledger.open(host.state_root, sandbox, "test")

    with pytest.raises(SandboxError) as caught:
        host.setup(SandboxSetup(sandbox, host.directory_of(sandbox), BASE, 65536, 0, 0), ledger)

    assert caught.value.reason == "state_directory_closed"
    ledger.close_and_remove()
    host.close()


def test_teardown_twice_and_of_nothing(set_up: Set, host: Host, state_dir: Path) -> None:
    """Teardown leaves nothing, and a second one, or one of an attempt that never was, is no error."""
    source = make(state_dir / "src")
    placed = set_up(
        binds=(BindRequest("s", str(source), IdMapKind.SHIFT, read_only=False),),
        overlays=(OverlayRequest("o", (str(source),), IdMapKind.SHIFT, "up"),),
    )
    directory = os.path.dirname(placed.scratch)

    host.teardown(directory)
    host.teardown(directory)
    host.teardown(host.directory_of(SandboxId.mint()))

    assert os.listdir(state_dir / "sandboxes") == []
    assert (source / "f").read_text() == "text"
    assert directory not in Path("/proc/self/mountinfo").read_text(errors="surrogateescape")


def test_teardown_after_the_holder_was_killed(set_up: Set, host: Host, state_dir: Path) -> None:
    """Mounts kept busy by a process, then left by its kill -9, come down all the same."""
    placed = set_up(overlays=(OverlayRequest("o", (str(make(state_dir / "low")),), IdMapKind.SHIFT, "up"),))
    with subprocess.Popen(
        ["sh", "-c", "exec 3>busy; echo; exec cat"],
        cwd=placed.sources["o"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()

        host.teardown(os.path.dirname(placed.scratch))
        holder.kill()

    assert not os.path.exists(os.path.dirname(placed.scratch))


def test_setups_in_several_threads(set_up: Set, state_dir: Path) -> None:
    """Eight setups at once each get their own mounts."""
    source = make(state_dir / "src", uid=3)
    results: list[SandboxPlaced] = []

    def one(number: int) -> None:
        base = BASE + 65536 * number
        results.append(set_up(uid_base=base, binds=(BindRequest("s", str(source), IdMapKind.SHIFT),)))
        assert owners(results[-1].sources["s"]) is not None

    threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sorted(owners(placed.sources["s"])[0] for placed in results) == [BASE + 65536 * n + 3 for n in range(8)]
