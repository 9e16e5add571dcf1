"""The skeleton of the host rootfs, built from made-up hosts and from this one."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from forgeyard_model.errors import SandboxError
from forgeyard_model.plan import RootfsBind
from forgeyard_process_shim import hostroot_rules as rules
from forgeyard_process_shim.hostroot import EXTRA_WRITABLE, HostRootfs, hosts_file
from forgeyard_process_shim.hostroot_rules import Refusal
from forgeyard_process_shim.hostroot_tree import FIXED_TIME, Kind, read

CERTIFICATE = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"


def put(host: Path, path: str, content: str = "", mode: int = 0o644) -> Path:
    """Write a file of the made-up host."""
    file = host / path.lstrip("/")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)
    file.chmod(mode)
    return file


def point(host: Path, path: str, target: str) -> None:
    """Make a link of the made-up host."""
    link = host / path.lstrip("/")
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A merged-/usr host with the usual things in /etc, and some that a job must not get."""
    root = tmp_path / "host"
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / "usr" / name).mkdir(parents=True)
        point(root, name, f"usr/{name}")
    put(root, "/usr/bin/sh", "#!", 0o755)
    put(root, "/usr/bin/mawk", "#!", 0o755)
    point(root, "/usr/bin/awk", "/etc/alternatives/awk")
    point(root, "/etc/alternatives/awk", "/usr/bin/mawk")
    put(root, "/etc/ld.so.cache", "cache")
    put(root, "/etc/ssl/openssl.cnf", "[req]\n")
    put(root, "/etc/ssl/certs/root.pem", CERTIFICATE)
    put(root, "/etc/shadow", "root:secret", 0o640)
    put(root, "/etc/passwd", "alice:x:1001:1001::/home/alice:/bin/sh\n")
    put(root, "/etc/group", "alice:x:1001:\n")
    put(root, "/etc/ssl/private/site.key", "key", 0o644)
    put(root, "/usr/local/bin/site-tool", "#!", 0o755)
    put(root, "/opt/vendor/bin/tool", "#!", 0o755)
    return root


def built(host: Path, *, cache: str = "cache", local: bool = False, opt: bool = False) -> HostRootfs:
    """A host rootfs whose cache lies beside the made-up host."""
    return HostRootfs(host.parent / cache, local=local, opt=opt, host_root=host)


def skeleton(rootfs: HostRootfs) -> Path:
    """Where it lies."""
    return Path(rootfs.plan().lowers[0])


def reasons(rootfs: HostRootfs) -> dict[str, Refusal]:
    """What was left out, by path."""
    return {item.path: item.reason for item in rootfs.skipped()}


def test_links_of_usr_bring_their_part_of_etc(host: Path) -> None:
    """A program that is a link through /etc/alternatives works; the host's accounts are not copied."""
    etc = skeleton(built(host)) / "etc"

    assert (etc / "alternatives/awk").readlink() == Path("/usr/bin/mawk")
    assert (etc / "ssl/certs/root.pem").read_text() == CERTIFICATE
    assert not (etc / "shadow").exists()
    assert "alice" not in (etc / "passwd").read_text() + (etc / "group").read_text()
    assert "forgeyard:x:1000:1000:" in (etc / "passwd").read_text()


def test_top_level_links_are_the_hosts(host: Path) -> None:
    """A merged host gets the same links, and no bind but /usr and the cover of /usr/local."""
    rootfs = built(host)
    root = skeleton(rootfs)

    assert {name: str((root / name).readlink()) for name in ("bin", "sbin", "lib", "lib64")} == {
        "bin": "usr/bin",
        "sbin": "usr/sbin",
        "lib": "usr/lib",
        "lib64": "usr/lib64",
    }
    assert not (root / "lib32").exists()
    assert rootfs.plan().binds == (
        RootfsBind(f"{host}/usr", "/usr"),
        RootfsBind(f"{root}-covers/usr/local", "/usr/local"),
    )


def test_unmerged_host_binds_each_directory(host: Path) -> None:
    """Where /lib is a directory of its own it is bound like /usr, and its links into /etc count."""
    (host / "lib").unlink()
    point(host, "/lib/cpp", "/etc/alternatives/cpp")
    point(host, "/etc/alternatives/cpp", "/usr/bin/mawk")

    rootfs = built(host)

    assert RootfsBind(f"{host}/lib", "/lib") in rootfs.plan().binds
    assert (skeleton(rootfs) / "lib").is_dir()
    assert (skeleton(rootfs) / "etc/alternatives/cpp").is_symlink()


@pytest.mark.parametrize(
    ("path", "content", "mode", "reason"),
    [
        ("/etc/pki/tls/site.pem", CERTIFICATE, 0o640, Refusal.NOT_WORLD_READABLE),
        ("/etc/pki/tls/site.pem", "-----BEGIN RSA PRIVATE KEY-----\n", 0o644, Refusal.LOOKS_SECRET),
        (
            "/etc/python3/mirror.cfg",
            "index = https://bob:hunter2@pypi.example.org/simple\n",
            0o644,
            Refusal.LOOKS_SECRET,
        ),
        ("/etc/java-21/registry-credentials", "x", 0o644, Refusal.LOOKS_SECRET),
        ("/etc/maven/settings.xml", "<settings/>", 0o644, Refusal.NEVER),
        ("/etc/pki/entitlement/1.pem", CERTIFICATE, 0o644, Refusal.NEVER),
        ("/etc/python3/PIP.CONF", "x", 0o644, Refusal.LOOKS_SECRET),
    ],
)
def test_planted_secret_is_left_out(host: Path, path: str, content: str, mode: int, reason: Refusal) -> None:
    """Inside a wanted directory, a closed, secret-named or secret-holding file is skipped and reported."""
    put(host, path, content, mode)
    rootfs = built(host)

    assert not (skeleton(rootfs) / path.lstrip("/")).exists()
    found = {found: why for found, why in reasons(rootfs).items() if path.startswith(found)}
    assert list(found.values()) == [reason]


def test_link_of_usr_to_a_never_path_brings_nothing(host: Path) -> None:
    """A link in /usr names what a program wants, not what it may have: shadow, keys and apt stay out."""
    put(host, "/etc/apt/auth.conf", "machine x", 0o644)
    for number, target in enumerate(("/etc/shadow", "/etc/ssl/private", "/etc/apt", "/etc/ssl/private/site.key")):
        point(host, f"/usr/lib/want{number}", target)

    rootfs = built(host)

    etc = skeleton(rootfs) / "etc"
    assert not any((etc / name).exists() for name in ("shadow", "apt", "ssl/private"))
    assert {"/etc/shadow", "/etc/apt", "/etc/ssl/private"} <= reasons(rootfs).keys()


def test_closed_directory_hides_open_files_in_it(host: Path) -> None:
    """A world-readable file below a 0700 directory is no more public than the directory."""
    put(host, "/etc/perl/inner/open.cfg", "x")
    (host / "etc/perl/inner").chmod(0o700)
    point(host, "/usr/lib/perl-config", "/etc/perl/inner/open.cfg")

    assert not (skeleton(built(host)) / "etc/perl/inner").exists()


def test_links_that_leave_are_dropped(host: Path) -> None:
    """A link in /etc to /var or to an unapproved /opt is not copied, nor is a link to such a link."""
    put(host, "/var/lib/thing/conf", "x")
    point(host, "/etc/alternatives/thing", "/var/lib/thing/conf")
    point(host, "/etc/alternatives/thing2", "/etc/alternatives/thing")
    point(host, "/etc/alternatives/vendor", "/opt/vendor/bin/tool")
    point(host, "/etc/alternatives/site", "/usr/local/bin/site-tool")

    rootfs = built(host)

    assert sorted(os.listdir(skeleton(rootfs) / "etc/alternatives")) == ["awk"]
    assert reasons(rootfs)["/etc/alternatives/thing2"] is Refusal.LEADS_OUT
    approved = built(host, local=True, opt=True)
    assert sorted(os.listdir(skeleton(approved) / "etc/alternatives")) == ["awk", "site", "vendor"]


def test_link_through_a_linked_directory_survives(host: Path) -> None:
    """/etc/ssl/certs may itself be a link into /etc/pki, and /usr may point through it."""
    put(host, "/etc/pki/tls/certs/bundle.crt", CERTIFICATE)
    (host / "etc/ssl/certs/root.pem").unlink()
    (host / "etc/ssl/certs").rmdir()
    point(host, "/etc/ssl/certs", "../pki/tls/certs")
    point(host, "/usr/lib/cert.pem", "/etc/ssl/certs/bundle.crt")
    point(host, "/etc/pki/cert.pem", "/etc/ssl/certs/bundle.crt")

    etc = skeleton(built(host)) / "etc"

    assert (etc / "ssl/certs/bundle.crt").read_text() == CERTIFICATE
    assert (etc / "pki/cert.pem").is_symlink()


def test_organisations_own_ca_is_copied(host: Path) -> None:
    """A CA that was put in /usr/local/share/ca-certificates works in jobs although /usr/local is not shown."""
    put(host, "/usr/local/share/ca-certificates/corp.crt", CERTIFICATE)
    point(host, "/etc/ssl/certs/corp.pem", "/usr/local/share/ca-certificates/corp.crt")
    point(host, "/etc/ssl/certs/1234abcd.0", "corp.pem")

    certs = skeleton(built(host)) / "etc/ssl/certs"

    assert (certs / "1234abcd.0").read_text() == CERTIFICATE


def test_site_configuration_below_usr_is_covered(host: Path) -> None:
    """/usr/etc/npmrc and /usr/pip.conf hold tokens of the site; the rest of /usr/etc stays visible."""
    put(host, "/usr/etc/npmrc", "//registry/:_authToken=abc")
    put(host, "/usr/etc/vendor.conf", "fine")
    put(host, "/usr/pip.conf", "[global]")

    rootfs = built(host)

    root = skeleton(rootfs)
    covers = {bind.destination: bind.source for bind in rootfs.plan().binds}
    assert covers["/usr/etc"] == f"{root}-covers/usr/etc"
    assert os.listdir(covers["/usr/etc"]) == ["vendor.conf"]
    assert covers["/usr/pip.conf"] == f"{root}-covers/usr/pip.conf"
    assert Path(covers["/usr/pip.conf"]).read_bytes() == b""


def test_local_and_opt_are_approvals_of_their_own(host: Path) -> None:
    """Each is shown only when it is approved; the three answers are three different roots."""
    plans = [built(host, local=local, opt=opt).plan() for local, opt in ((False, False), (True, False), (False, True))]

    shown = [{bind.destination for bind in plan.binds if bind.source.startswith(f"{host}/")} for plan in plans]
    assert shown == [{"/usr"}, {"/usr", "/usr/local"}, {"/usr", "/opt"}]
    assert len({plan.identity for plan in plans}) == 3


def test_approved_link_to_a_private_place_is_refused(host: Path) -> None:
    """Approving /opt does not approve /home because an administrator linked one to the other."""
    (host / "home/alice").mkdir(parents=True)
    (host / "opt").rename(host / "opt.old")
    point(host, "/opt", "/home/alice")

    with pytest.raises(SandboxError) as caught:
        built(host, opt=True).plan()

    assert caught.value.reason == "approved_path_leads_out"


def test_local_as_a_link_out_of_usr_shows_nothing(host: Path) -> None:
    """On an image-based host /usr/local leads to /var: absent by nature, bound at its real place when approved."""
    (host / "var").mkdir()
    (host / "usr/local").rename(host / "var/usrlocal")
    point(host, "/usr/local", "../var/usrlocal")

    assert [bind.destination for bind in built(host).plan().binds] == ["/usr"]
    approved = built(host, local=True)
    assert RootfsBind(f"{host}/var/usrlocal", "/var/usrlocal") in approved.plan().binds
    assert (skeleton(approved) / "var/usrlocal").is_dir()


def test_host_without_usr_is_refused(tmp_path: Path) -> None:
    """There is nothing to run there, and the error says what to do instead."""
    (tmp_path / "etc").mkdir()

    with pytest.raises(SandboxError, match="run the job in an image"):
        HostRootfs(tmp_path / "cache", host_root=tmp_path).plan()


def test_same_host_gives_the_same_digest(host: Path) -> None:
    """Two caches, two builds, different umasks: one identity."""
    first = built(host).plan()
    before = os.umask(0o077)
    try:
        second = built(host, cache="other").plan()
    finally:
        os.umask(before)

    assert first.identity == second.identity
    assert dict(read(Path(first.lowers[0]))) == dict(read(Path(second.lowers[0])))


@pytest.mark.parametrize("change", ["content", "new file", "new link in usr", "mode"])
def test_changed_host_gives_a_new_skeleton_and_leaves_the_old(host: Path, change: str) -> None:
    """The next open notices; what jobs of the first one use is not touched."""
    put(host, "/etc/groff/site.tmac", "x")
    old = skeleton(built(host))
    before = dict(read(old))
    if change == "content":
        put(host, "/etc/ld.so.cache", "other")
    elif change == "new file":
        put(host, "/etc/ssl/certs/new.pem", CERTIFICATE)
    elif change == "new link in usr":
        point(host, "/usr/lib/groff", "/etc/groff")
    else:
        (host / "etc/ld.so.cache").chmod(0o600)

    new = skeleton(built(host))

    assert new != old
    assert dict(read(old)) == before


def test_unchanged_host_is_not_read_again(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second open of the same host walks no tree; a second plan() of one object looks at nothing."""
    put(host, "/etc/maven/settings.xml", "<settings/>")
    later = host.stat().st_ctime_ns + 10**12
    with monkeypatch.context() as patch:  # the made-up host is milliseconds old: let the build be much later
        patch.setattr("forgeyard_process_shim.hostroot_assemble.time.time_ns", lambda: later)
        first = built(host).plan()

    def walked(*_: object) -> None:
        pytest.fail("the host was walked again")

    monkeypatch.setattr("forgeyard_process_shim.hostroot_assemble.scan_usr", walked)
    second = built(host)

    assert second.plan() == first
    assert second.plan() is second.plan()
    assert reasons(second) == {"/etc/maven/settings.xml": Refusal.NEVER}


def test_torn_record_is_rebuilt(host: Path) -> None:
    """A record that makes no sense costs a build, not an error."""
    first = built(host).plan()
    (record,) = (host.parent / "cache").glob("*.json")
    record.write_text(record.read_text()[:40])

    assert built(host).plan() == first
    assert json.loads(record.read_text())["digest"] == first.identity.removeprefix("sha256:")


def test_many_builders_make_one_skeleton(host: Path) -> None:
    """Processes that start at once agree; no draft stays, nor one of a killed builder before them."""
    cache = host.parent / "cache"
    put(cache, ".building-dead/etc/x")
    program = (
        "import sys; from pathlib import Path; from forgeyard_process_shim.hostroot import HostRootfs;"
        "print(HostRootfs(Path(sys.argv[1]), host_root=Path(sys.argv[2])).plan().identity)"
    )
    argv = [sys.executable, "-c", program, str(cache), str(host)]
    builders = [subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    identities = [builder.communicate(timeout=30)[0].strip() for builder in builders]

    assert len(set(identities)) == 1
    assert sorted(path.name for path in cache.iterdir() if path.suffix != ".json") == sorted(
        [".lock", identities[0].removeprefix("sha256:")]
    )


def test_unwritable_cache_is_our_error(host: Path) -> None:
    """A cache that cannot be made is a typed error with the path in it."""
    put(host.parent, "file", "x")

    with pytest.raises(SandboxError) as caught:
        HostRootfs(host.parent / "file" / "cache", host_root=host).plan()

    assert caught.value.reason == "host_rootfs_not_built"
    assert "file/cache" in caught.value.details


def test_too_much_configuration_is_refused(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound holds in sum; one file over its own bound is skipped."""
    monkeypatch.setattr("forgeyard_process_shim.hostroot_etc.MAX_FILE", 1000)
    put(host, "/etc/fonts/huge.conf", "x" * 1001)
    assert reasons(built(host))["/etc/fonts/huge.conf"] is Refusal.TOO_LARGE

    monkeypatch.setattr("forgeyard_process_shim.hostroot_etc.MAX_TOTAL", 100)
    put(host, "/etc/fonts/many.conf", "y" * 101)
    with pytest.raises(SandboxError) as caught:
        built(host, cache="other").plan()
    assert caught.value.reason == "host_config_too_large"


def test_special_file_is_not_opened(host: Path) -> None:
    """A FIFO in a wanted directory neither hangs the build nor appears."""
    (host / "etc/fonts").mkdir()
    os.mkfifo(host / "etc/fonts/pipe", 0o644)

    assert reasons(built(host))["/etc/fonts/pipe"] is Refusal.SPECIAL_FILE


def test_names_that_are_not_utf8(host: Path) -> None:
    """A file name is bytes: it is copied and recorded as it is."""
    odd = os.fsdecode(b"caf\xe9.pem")
    put(host, f"/etc/ssl/certs/{odd}", CERTIFICATE)
    point(host, f"/usr/lib/{odd}", f"/etc/ssl/certs/{odd}")

    assert (skeleton(built(host)) / "etc/ssl/certs" / odd).exists()
    assert built(host).plan() == built(host).plan()


def test_dangling_names_what_a_job_lacks(host: Path) -> None:
    """A link of /usr to something the host has in /var is listed; one that is dead on the host too is not."""
    put(host, "/var/lib/texmf/ls-R", "x")
    point(host, "/usr/share/texmf", "/var/lib/texmf")
    point(host, "/usr/share/dead", "/var/lib/nothing")
    point(host, "/usr/share/null", "/dev/null")

    assert built(host).dangling() == ("/usr/share/texmf -> /var/lib/texmf",)


def test_mountpoints_and_modes(host: Path) -> None:
    """Every place the bundle mounts onto is there, with the mode that a tmpfs would take over."""
    root = skeleton(built(host))
    modes = {path: entry.mode for path, entry in read(root) if entry.kind is Kind.DIRECTORY}

    places = "/proc /sys /sys/fs/cgroup /dev /run /work/source /work/build /work/output /work/tmp /toolchains"
    assert {*places.split(), *EXTRA_WRITABLE, "/home/forgeyard", "/.forgeyard", "/usr", "/opt"} <= modes.keys()
    assert {path for path, mode in modes.items() if mode & 0o1000} == {"/tmp", "/var/tmp"}
    assert not (root / "root").exists()
    assert os.listdir(root / "home") == ["forgeyard"]
    assert sorted(os.listdir(root / "var")) == ["run", "tmp"]


def test_times_and_owner_are_fixed(host: Path) -> None:
    """Nothing of the building process shows: one time, the builder's uid (root's in production)."""
    root = skeleton(built(host))

    for path in (root, *root.rglob("*")):
        status = path.lstat()
        assert (status.st_mtime, status.st_uid, status.st_gid) == (FIXED_TIME, os.getuid(), os.getgid()), path


def test_hosts_file_names_the_sandbox() -> None:
    """An attempt's own hosts file has its name; the shared one has none."""
    assert "127.0.1.1 fy-abc\n" in hosts_file("fy-abc")
    assert "127.0.1.1" not in hosts_file()


def test_nothing_of_this_hosts_etc_breaks_the_rules(tmp_path: Path) -> None:
    """Each file of the real skeleton's /etc is synthetic, or is judged again and found open and harmless."""
    rootfs = HostRootfs(tmp_path / "cache")
    own = {"passwd", "group", "nsswitch.conf", "hosts", "resolv.conf", "machine-id", "shells", "host.conf"}
    own |= {"mtab", "hostname"}
    entries = {path: entry for path, entry in read(skeleton(rootfs)) if path.startswith("/etc/")}

    assert len(entries) > len(own)
    for path, entry in entries.items():
        name = path.removeprefix("/etc/")
        if name in own:
            continue
        assert rules.refusal(name) is None, path
        assert entry.mode in (0o755, 0o644) or entry.kind is Kind.LINK, path
        if entry.kind is Kind.FILE:
            assert Path(path).stat().st_mode & stat.S_IROTH, path
            assert not rules.smells_of_secret(entry.data), path
    assert entries["/etc/resolv.conf"].data == entries["/etc/machine-id"].data == b""
