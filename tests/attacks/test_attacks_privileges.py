"""Privileges that a file would give: set-user-id programs of the host, and what a hostile image brings along."""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path

import pytest
from attacks import HostFacts
from build import BUSYBOX, Entry, LayoutWriter, busybox_layers, symlink, tar
from jobs import run, sh

from forgeyard_executor import Job, Outcome

pytestmark = pytest.mark.kernel

# security.capability of revision 2, effective: almost every capability; no byte above 0x7f, which tar would widen.
ALL_CAPABILITIES = bytes.fromhex("010000027f7f7f7f000000007f00000000000000").decode("latin-1")
EMPTY_SETS = b"CapPrm:0000000000000000 CapEff:0000000000000000 CapBnd:0000000000000000"
SETS = "sed -n 's/^\\(Cap\\(Prm\\|Eff\\|Bnd\\):\\)[[:space:]]*/\\1/p' /proc/self/status"

SETUID_TOOLS = {
    "su": "su root -c id </dev/null",
    "mount": "mount -t tmpfs none /tmp",
    "umount": "umount /proc",
    "passwd": "passwd -d root </dev/null",
    "chsh": "chsh -s /bin/false root </dev/null",
    "newgrp": "newgrp root </dev/null && [ $(id -g) = 0 ]",
    "sudo": "sudo -n id",
    "pkexec": "pkexec id </dev/null",
    "fusermount": "fusermount3 -u /proc || fusermount -u /proc",
    "unshare": "unshare -Ur true",
    "nsenter": "nsenter -t 1 -m true",
    "chroot": "chroot /usr true",
    "mknod": "mknod /tmp/disk b 8 0",
    "insmod": "modprobe dummy",
    "hostname": "hostname attacked",
    "date": "date -s 2001-01-01",
    "reboot": "reboot -f",
    "setcap": "cp /bin/cat /tmp/c && setcap cap_sys_admin+ep /tmp/c",
    "docker": "docker ps",
    "at": "echo true | at now",
    "crontab": "echo '* * * * * true' | crontab -",
    "runc": "runc --root /tmp/r run x",
}


@pytest.fixture(scope="module")
def tried(shared_state: Path) -> tuple[dict[str, str], HostFacts, HostFacts]:
    """All tools in one sandbox on the host's programs; the host before and after."""
    before = HostFacts.look()
    path = "PATH=/usr/local/sbin:/usr/sbin:/sbin:$PATH"
    lines = [
        f"({path}; {text}) >/dev/null 2>&1 && echo '{name} done' || echo '{name} refused'"
        for name, text in SETUID_TOOLS.items()
    ]
    result, out, _ = run(shared_state, Job(rootfs="host", steps=(sh("\n".join(lines)),)))
    assert result.outcome is Outcome.SUCCEEDED
    return dict(line.split() for line in out.decode().splitlines()), before, HostFacts.look()  # type: ignore[misc]  # two words each


@pytest.mark.parametrize("name", SETUID_TOOLS)
def test_tool_of_the_host(tried: tuple[dict[str, str], HostFacts, HostFacts], name: str) -> None:
    """A set-user-id program or an administrator's tool of the host's /usr does nothing for a job."""
    answers, before, after = tried
    assert answers[name] == "refused"
    before.assert_unchanged(after)


@pytest.mark.acceptance("Privileged container is denied for normal jobs.")
def test_set_user_id_files_of_the_host_are_inert(shared_state: Path) -> None:
    """Every set-id program that /usr shows is on a nosuid mount, and no_new_privs is on."""
    script = "grep -c ' /usr .*nosuid' /proc/self/mountinfo; grep NoNewPrivs /proc/self/status | tr -d '\\t'; id -u"
    result, out, _ = run(shared_state, Job(rootfs="host", steps=(sh(script),)))
    assert (result.outcome, out) == (Outcome.SUCCEEDED, b"1\nNoNewPrivs:1\n1000\n")


@pytest.fixture(scope="module")
def hostile_image(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image whose layers carry set-id programs, file capabilities, device nodes and links out."""
    assert BUSYBOX is not None
    program = Path(BUSYBOX).read_bytes()
    layer = tar(
        [
            Entry("suid/id", program, mode=0o6755),
            Entry("caps/sed", program, mode=0o755, pax={"SCHILY.xattr.security.capability": ALL_CAPABILITIES}),
            Entry("dev/disk", type=tarfile.BLKTYPE, mode=0o666, device=(8, 0)),
            Entry("srv/mem", type=tarfile.CHRTYPE, mode=0o666, device=(1, 1)),
            symlink("out", "/proc/1/root"),
            symlink("up", "../../../../../.."),
            Entry("etc/ld.so.preload", b"/nowhere.so\n"),
            Entry("etc/sudoers", b"ALL ALL=(ALL) NOPASSWD: ALL\n"),
        ]
    )
    writer = LayoutWriter(tmp_path_factory.mktemp("hostile"))
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
    image = writer.image([*busybox_layers(BUSYBOX), layer], {"User": "1000:1000"}, architecture=machine)
    writer.finish(image)
    return f"oci:{writer.path}@{image['digest']}"


IMAGE_ATTACKS = {
    "set-user-id": ("/suid/id -u; /suid/id -g", b"1000\n1000\n"),
    "file capabilities": ("ln -s /caps/sed /tmp/x; /caps/" + SETS + " | tr '\\n' ' '", EMPTY_SETS + b" "),
    "devices": ("test -e /dev/disk || test -e /srv/mem || echo none", b"none\n"),
    "link to the root of PID 1": ("ls /out/ 2>/dev/null || echo closed", b"closed\n"),
    "link upwards": (
        "ls -d /up/work /up/.forgeyard; ls /up/var/lib/forgeyard 2>/dev/null || echo none",
        b"/up/.forgeyard\n/up/work\nnone\n",
    ),
    "umask and copies": ("cp /suid/id /tmp/id; chmod 6755 /tmp/id; /tmp/id -u", b"1000\n"),
}


@pytest.mark.parametrize("name", IMAGE_ATTACKS)
def test_hostile_image(shared_state: Path, hostile_image: str, name: str) -> None:
    """What an image's files would grant is not granted, and the links in it end inside."""
    script, expected = IMAGE_ATTACKS[name]
    before = HostFacts.look()
    result, out, err = run(shared_state, Job(image=hostile_image, steps=(sh(script),)))
    assert (result.outcome, out) == (Outcome.SUCCEEDED, expected), err
    before.assert_unchanged(HostFacts.look())


def test_unpacked_set_id_files_are_closed_to_users(shared_state: Path, hostile_image: str) -> None:
    """On the host the unpacked layers, root-owned set-id programs among them, lie where no other user can come."""
    run(shared_state, Job(image=hostile_image, steps=(sh("true"),)))
    found = [path for path in (shared_state / "images").rglob("suid/id") if path.is_file()]
    assert found
    for path in found:
        steps = [step for step in path.parents if step.is_relative_to(shared_state / "images")]
        assert any(not step.stat().st_mode & 0o001 for step in steps), path
    assert shutil.which("su")
