"""Caches between jobs: what is kept, who sees it, what can't get out; here in the store itself."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from forgeyard_executor.cache_copy import STORED
from forgeyard_executor.cache_store import CacheName
from forgeyard_executor.caches import CacheStore, Left, cache_requests, make_mountpoints
from forgeyard_model.cache import CacheMode, CacheReport, CacheRequest
from forgeyard_model.config import Space
from forgeyard_model.errors import InvalidRequest
from forgeyard_model.plan import JobUser

pytestmark = pytest.mark.kernel
BASE = 1_000_000
MIB = 1 << 20
HOUR = 3600.0
RO, RW = CacheMode.RO, CacheMode.RW
Fill = Callable[[Path], object]


@pytest.fixture
def store(state_dir: Path) -> CacheStore:
    """An empty store."""
    return CacheStore(state_dir / "caches", size_cap=8 * MIB, total_cap=64 * MIB)


def owned(path: Path, uid: int = 1000) -> None:
    """Make everything below `path` the job's."""
    for one in (path, *path.rglob("*")):
        os.chown(one, BASE + uid, BASE + uid, follow_symlinks=False)


def attempt(
    store: CacheStore,
    fill: Fill | None = None,
    *,
    key: str = "k",
    mode: CacheMode = RW,
    tenant: str = "",
    trusted: bool = True,
    uid: int = 1000,
    owner: bool = True,
) -> tuple[CacheReport, dict[str, str]]:
    """One attempt as an executor makes it, its view a plain copy: what came of it, and what the job saw at first."""
    (lease,) = store.open((CacheRequest(key, "/c", mode),), tenant=tenant, trusted=trusted)
    try:
        seen = contents(Path(lease.lower))
        if fill is None:
            return lease.report("not asked"), seen
        with tempfile.TemporaryDirectory(dir=store.snapshots.root) as name:
            view = Path(name) / "view"
            view.mkdir()
            fill(view)
            if owner:
                owned(view, uid)
            return lease.commit(Left(view, view), uid_base=BASE, uid_count=65536, job=(uid, uid)), seen
    finally:
        lease.close()


def contents(top: Path) -> dict[str, str]:
    """Files below `top` and their texts."""
    return {str(path.relative_to(top)): path.read_text() for path in top.rglob("*") if path.is_file()}


def tree(store: CacheStore, name: CacheName) -> Path:
    """The files of the current snapshot."""
    snapshot = store.snapshots.current(name)
    assert snapshot is not None
    snapshot.close()
    return snapshot.tree


def write(name: str = "a", text: str = "1") -> Fill:
    """A job that writes one file."""

    def fill(view: Path) -> None:
        (view / name).write_text(text)

    return fill


def left_over(store: CacheStore) -> list[str]:
    """What lies in partial/, and snapshots that are not current."""
    entries = [path for entry in store.snapshots.entries.iterdir() for path in entry.iterdir()]
    old = [path.name for path in entries if path.is_dir() and not path.is_symlink()]
    current = [str(path.readlink()) for path in entries if path.name == "current"]
    return sorted(set(old) - set(current)) + [path.name for path in store.snapshots.partial.iterdir()]


def test_what_a_job_leaves_the_next_one_sees(store: CacheStore) -> None:
    """Miss, then hit; the last to save wins whole, and one older snapshot is not kept."""
    first, seen = attempt(store, write("a", "1"))
    assert (first.hit, first.saved, seen) == (False, True, {})
    second, seen = attempt(store, write("b", "2"))
    assert (second.hit, second.saved, seen) == (True, True, {"a": "1"})
    assert attempt(store)[1] == {"b": "2"}
    assert left_over(store) == []
    assert str(second) == "cache k: hit, saved"


def test_a_job_that_was_not_to_be_saved_changes_nothing(store: CacheStore) -> None:
    """Without a commit, with an empty one, and in ro, what is kept stays."""
    attempt(store, write())
    report, _ = attempt(store, lambda _: None)
    assert (report.saved, report.why) == (False, "nothing was changed")
    report, seen = attempt(store, write("evil"), mode=RO)
    assert (report.hit, report.saved, seen) == (True, False, {"a": "1"})
    assert attempt(store)[1] == {"a": "1"}


def test_tenants_and_keys_never_meet(store: CacheStore) -> None:
    """Neither another tenant's cache, nor a key made to look like a path or like another's directory."""
    attempt(store, write(text="mine"), tenant="t")
    keys = ["k/../k", "../k", "/", "K", "k ", '"],["', "t"]
    for key in keys:
        attempt(store, write(text=key), key=key, tenant="t")
    assert attempt(store, tenant="t")[1] == {"a": "mine"}
    assert all(attempt(store, key=key, tenant="t")[1] == {"a": key} for key in keys)
    assert attempt(store, tenant="")[1] == attempt(store, tenant="T")[1] == {}
    names = [path.name for path in store.snapshots.entries.iterdir()]
    assert len(names) == len(keys) + 1
    assert all(len(name) == 64 and name.isalnum() for name in names)


def test_an_untrusted_job_reads_and_never_writes_what_is_shared(store: CacheStore) -> None:
    """It sees the trusted snapshot; without one its own, which no trusted job ever sees."""
    report, _ = attempt(store, write(text="fork"), trusted=False)
    assert report.saved
    assert attempt(store, trusted=False)[1] == {"a": "fork"}
    assert attempt(store)[1] == {}
    attempt(store, write(text="main"))
    report, seen = attempt(store, write(text="poison"), trusted=False)
    assert (report.hit, report.saved, seen) == (True, False, {"a": "main"})
    assert "untrusted" in report.why
    assert attempt(store)[1] == attempt(store, trusted=False)[1] == {"a": "main"}


def test_owners_modes_times_and_links_are_kept(store: CacheStore) -> None:
    """Ids are those inside the sandbox, the job's own a fixed one; holes stay holes, hard links one file."""

    def fill(view: Path) -> None:
        (view / "tool").write_text("x")
        (view / "tool").chmod(0o755)
        os.utime(view / "tool", ns=(5, 1_234_567_890_123_456_789))
        (view / "same").hardlink_to(view / "tool")
        (view / "away").symlink_to("/etc/shadow")
        with (view / "holes").open("wb") as file:
            file.truncate(1 << 30)
            file.seek(1 << 20)
            file.write(b"data")
        (view / "deep" / "er").mkdir(parents=True)
        (view / "closed").mkdir(mode=0o500)
        owned(view, 7)
        os.chown(view / "deep", BASE, BASE + 65535)
        os.chown(view / "closed", 0, 99_999_999)
        os.chown(view / "deep" / "er", BASE + STORED, BASE + STORED)

    assert attempt(store, fill, uid=7, owner=False)[0].saved
    top = tree(store, CacheName("", True, "k"))
    info = (top / "tool").lstat()
    assert (info.st_uid, info.st_gid, stat.S_IMODE(info.st_mode)) == (STORED, STORED, 0o755)
    assert info.st_mtime_ns == 1_234_567_890_123_456_789
    assert (top / "same").samefile(top / "tool")
    assert os.readlink(top / "away") == "/etc/shadow"
    holes = (top / "holes").stat()
    assert (holes.st_size, holes.st_blocks < 100) == (1 << 30, True)
    assert [(top / name).stat().st_uid for name in ("deep", "closed", "deep/er", ".")] == [0, STORED, 7, STORED]
    assert (top / "deep").stat().st_gid == 65535
    assert stat.S_IMODE((top / "closed").stat().st_mode) == 0o500


def test_nothing_dangerous_is_kept(store: CacheStore) -> None:
    """Devices, FIFOs and sockets, setuid bits, extended attributes: left out or taken off, and named."""

    def fill(view: Path) -> None:
        os.mkfifo(view / "fifo")
        os.mknod(view / "disk", 0o666 | stat.S_IFBLK, os.makedev(1, 0))
        with socket.socket(socket.AF_UNIX) as unix:
            unix.bind(str(view / "socket"))
        (view / "su").write_text("x")
        owned(view)
        (view / "su").chmod(0o6755)
        os.setxattr(view / "su", "user.note", b"1")
        os.setxattr(view / "su", "trusted.overlay.opaque", b"y")

    report, _ = attempt(store, fill, owner=False)
    top = tree(store, CacheName("", True, "k"))
    assert sorted(os.listdir(top)) == ["su"]
    assert stat.S_IMODE((top / "su").stat().st_mode) == 0o755
    assert os.listxattr(top / "su") == []
    assert sorted(note.partition(":")[0] for note in report.notes) == ["disk", "fifo", "socket", "su"]


def test_a_symlink_leads_nowhere(store: CacheStore, tmp_path: Path) -> None:
    """Neither saving nor removing follows one, whether in a file's place or a directory's."""
    (tmp_path / "secret").write_text("secret")

    def fill(view: Path) -> None:
        (view / "file").symlink_to(tmp_path / "secret")
        (view / "directory").symlink_to(tmp_path)

    attempt(store, fill)
    top = tree(store, CacheName("", True, "k"))
    assert os.readlink(top / "directory") == str(tmp_path)

    # The next job turns the link's name into a directory: the earlier snapshot is looked at beside it.
    def turn(view: Path) -> None:
        (view / "directory").mkdir()
        write("directory/secret", "new")(view)

    attempt(store, turn)
    assert contents(tree(store, CacheName("", True, "k"))) == {"directory/secret": "new"}
    store.prune(keep_bytes=0)
    assert (tmp_path / "secret").read_text() == "secret"


def test_a_cache_has_an_end(store: CacheStore) -> None:
    """More than its bytes is not saved, and leaves the earlier one and no rest; all of them have a bound as well."""
    attempt(store, write())
    report, _ = attempt(store, lambda view: (view / "big").write_bytes(b"x" * (9 * MIB)))
    assert (report.saved, "8 MiB" in report.why) == (False, True)
    assert attempt(store)[1] == {"a": "1"}
    assert left_over(store) == []
    store.total_cap = 3 * MIB + 1
    for key in ("x", "y", "z"):
        assert attempt(store, lambda view: (view / "m").write_bytes(b"x" * MIB), key=key)[0].saved
    attempt(store, key="k")
    assert attempt(store, lambda view: (view / "m").write_bytes(b"x" * MIB), key="w")[0].saved
    assert sorted(info.name.key for info in store.all()) == ["k", "w", "y", "z"]


def test_room_is_left_on_the_file_system(store: CacheStore) -> None:
    """Saving never takes what admission of the next job needs."""
    full = CacheStore(store.snapshots.root, size_cap=MIB, total_cap=MIB, keep_free=Space(share=1.0))
    report, _ = attempt(full, write())
    assert (report.saved, "0 MiB there is room for" in report.why) == (False, True)


def test_the_longest_unused_goes_first_and_never_one_in_use(store: CacheStore) -> None:
    """By last use, not by age; what a job holds stays whatever is asked for."""
    for key in ("a", "b", "c"):
        attempt(store, write(text=key * 1000), key=key)
    for age, key in enumerate(("b", "c", "a")):
        (info,) = (info for info in store.all() if info.name.key == key)
        os.utime(info.path / "entry.json", (1000 + age, 1000 + age))
    assert [info.name.key for info in store.all()] == ["b", "c", "a"]
    (lease,) = store.open((CacheRequest("b", "/c"),), tenant="", trusted=True)
    os.utime(store.snapshots.entries / lease.source.directory / "entry.json", (1, 1))
    assert store.prune(free_bytes=500).caches == 1
    assert [info.name.key for info in store.all()] == ["b", "a"]
    assert store.prune(unused_for=time.time() - 2000).caches == 1
    assert contents(Path(lease.lower)) == {"a": "b" * 1000}
    lease.close()
    assert store.prune(keep_bytes=0).caches == 1
    assert store.all() == ()


def test_a_reader_keeps_its_snapshot(store: CacheStore) -> None:
    """While others save, what a job was shown stays as it was; it goes with its last reader."""
    attempt(store, write(text="old"))
    (lease,) = store.open((CacheRequest("k", "/c", RO),), tenant="", trusted=True)
    attempt(store, write(text="new"))
    assert contents(Path(lease.lower)) == {"a": "old"}
    assert attempt(store)[1] == {"a": "new"}
    assert len(left_over(store)) == 1
    lease.close()
    assert left_over(store) == []


def test_what_was_not_touched_is_not_copied(store: CacheStore) -> None:
    """A job's change costs what it changed: the rest is the same files on disk. Real overlay, as a job has it."""
    attempt(store, lambda view: [write(name, name * 10)(view) for name in ("keep", "change", "remove")])
    before = tree(store, CacheName("", True, "k"))
    numbers = {name: (before / name).stat().st_ino for name in ("keep", "change")}
    (lease,) = store.open((CacheRequest("k", "/c"),), tenant="", trusted=True)
    work = store.snapshots.root / "overlay"
    for name in ("upper", "work", "view"):
        (work / name).mkdir(parents=True)
    options = f"lowerdir={lease.lower},upperdir={work}/upper,workdir={work}/work,redirect_dir=on"
    subprocess.run(["mount", "-t", "overlay", "none", "-o", options, str(work / "view")], check=True)
    try:
        times = (before / "change").stat()
        (work / "view" / "change").write_text("x" * len("change" * 10))
        os.utime(work / "view" / "change", ns=(times.st_atime_ns, times.st_mtime_ns))  # hides nothing
        (work / "view" / "remove").unlink()
        # Ids of this view are those on disk, so the range starts at 0.
        report = lease.commit(Left(work / "view", work / "upper"), uid_base=0, uid_count=65536, job=(STORED, STORED))
    finally:
        subprocess.run(["umount", str(work / "view")], check=True)
        lease.close()
    after = tree(store, CacheName("", True, "k"))
    assert (report.saved, report.bytes > 0) == (True, True)
    assert contents(after) == {"keep": "keep" * 10, "change": "x" * len("change" * 10)}
    assert (after / "keep").stat().st_ino == numbers["keep"]
    assert (after / "change").stat().st_ino != numbers["change"]


def test_many_at_once_each_see_one_whole_snapshot(store: CacheStore) -> None:
    """Readers, savers and collectors in several threads: never a mix of two, never an error, nothing left."""
    problems: list[str] = []

    def five(text: str) -> Fill:
        return lambda view: [write(f"f{n}", text)(view) for n in range(5)]

    def work(number: int) -> None:
        for turn in range(6):
            report, seen = attempt(store, five(f"{number}.{turn}"))
            if len(set(seen.values())) > 1 or len(seen) not in (0, 5) or not report.saved:
                problems.append(f"{report} {seen}")
            if number == 0:
                store.prune(free_bytes=1)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    store.prune(keep_bytes=1 << 40)
    assert left_over(store) == []


_KILLED = """
import os, signal, sys
from pathlib import Path
from forgeyard_executor import cache_store
from forgeyard_executor.caches import CacheStore, Left
from forgeyard_model.cache import CacheRequest
real = getattr(cache_store, sys.argv[2])
def die(*args):
    os.kill(os.getpid(), signal.SIGKILL)
setattr(cache_store, sys.argv[2], die)
store = CacheStore(Path(sys.argv[1]), size_cap=1 << 20, total_cap=1 << 20)
(lease,) = store.open((CacheRequest("k", "/c"),), tenant="", trusted=True)
lease.commit(Left(Path(sys.argv[3]), Path(sys.argv[3])), uid_base=0, uid_count=65536, job=(0, 0))
"""


@pytest.mark.parametrize("where", ["syncfs", "remove_tree"])
def test_a_killed_executor_leaves_a_whole_snapshot(store: CacheStore, where: str, tmp_path: Path) -> None:
    """Before the swap it is the old one, after it the new one; a sweep removes the rest."""
    attempt(store, write(text="old"))
    write(text="new")(tmp_path)
    died = subprocess.run(
        [sys.executable, "-c", _KILLED, str(store.snapshots.root), where, str(tmp_path)], check=False, timeout=60
    )
    # Nothing is removed in the one case: the old snapshot is still held by the process itself.
    assert died.returncode == (-signal.SIGKILL if where == "syncfs" else 0)
    assert attempt(store)[1] == {"a": "old" if where == "syncfs" else "new"}
    assert store.sweep() == (1 if where == "syncfs" else 0)
    attempt(store, write(text="newer"))
    assert left_over(store) == []


def test_a_damaged_entry_is_a_miss_and_goes(store: CacheStore) -> None:
    """Whatever lies there: no error for the job, and the collection takes it."""
    attempt(store, write())
    (info,) = store.all()
    (info.path / "current").unlink()
    (info.path / "entry.json").write_text("{")
    os.utime(info.path, (1, 1))
    assert attempt(store)[1] == {}
    assert store.prune(unused_for=HOUR).caches == 1
    assert list(store.snapshots.entries.iterdir()) == []


def test_the_store_is_closed_to_others(store: CacheStore) -> None:
    """What jobs left belongs to low ids of the host: nobody may walk in."""
    assert stat.S_IMODE(store.snapshots.root.stat().st_mode) == 0o700


def test_how_caches_are_shown(store: CacheStore) -> None:
    """ro is a read-only bind, rw a layer over the snapshot, or a plain directory where nothing is kept."""
    attempt(store, write())
    caches = (CacheRequest("k", "/a", RO), CacheRequest("k", "/b"), CacheRequest("new", "/d"))
    leases = store.open(caches, tenant="", trusted=True)
    parts = cache_requests(leases, JobUser(5, 6))
    assert [(bind.slot, bind.read_only, bind.source) for bind in parts.binds] == [("cache-0", True, leases[0].lower)]
    assert [(over.slot, over.lowers) for over in parts.overlays] == [("cache-1", (leases[1].lower,))]
    assert [(part.slot, part.uid, part.gid) for part in parts.scratch] == [("cache-2", 5, 6)]
    assert [(mount.destination, mount.read_only) for mount in parts.mounts] == [
        ("/a", True),
        ("/b", False),
        ("/d", False),
    ]
    for lease in leases:
        lease.close()


def test_places_inside_the_jobs_directories_are_its_own(tmp_path: Path) -> None:
    """Parents are made for the job's user, and through no symlink."""
    home = tmp_path / "home"
    home.mkdir()
    make_mountpoints(
        (CacheRequest("k", "/home/forgeyard/.cache/pip"), CacheRequest("l", "/opt/x")),
        {"/home/forgeyard": str(home)},
        (BASE, BASE + 1),
    )
    info = (home / ".cache").stat()
    assert (info.st_uid, info.st_gid, (home / ".cache/pip").is_dir()) == (BASE, BASE + 1, True)
    (home / "link").symlink_to("/etc")
    with pytest.raises(InvalidRequest, match="choose another path"):
        make_mountpoints((CacheRequest("k", "/home/forgeyard/link/x"),), {"/home/forgeyard": str(home)}, (0, 0))
    assert not Path("/etc/x").exists()


def test_the_key_stays_readable(store: CacheStore) -> None:
    """A person who looks at the directory finds whose it is."""
    attempt(store, write(), key="npm/main ü", tenant="team")
    labels = [json.loads((path / "entry.json").read_text()) for path in store.snapshots.entries.iterdir()]
    assert labels == [{"tenant": "team", "trusted": True, "key": "npm/main ü"}]
