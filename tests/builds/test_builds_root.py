"""Root of a user namespace: apt-get in an image, what it can't do, and what a job without it is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from builds import attempt, build
from jobs import run, sh

from forgeyard_executor import Job, Limits, Outcome, Output, Step
from forgeyard_model.policy import ROOT_IN_USERNS_CAPABILITIES, CapabilityGrant

# The image takes a minute and a mirror the first time; one worker builds it.
pytestmark = [pytest.mark.kernel, pytest.mark.timeout(400), pytest.mark.xdist_group("debian")]

ROOT = {"user": "root", "capabilities": CapabilityGrant.ROOT_IN_USERNS}
_NUMBERS = {"CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "FSETID": 4, "KILL": 5, "SETGID": 6, "SETUID": 7, "SETFCAP": 31}


@pytest.fixture(scope="session")
def debian(images: Any) -> dict[str, str]:
    """A minimal Debian, kept between runs, as arguments of Job."""
    return {"image": images.local("debian")}


def test_apt_get_install(shared_state: Path, debian: dict[str, str]) -> None:
    """apt-get installs real packages, a maintainer script with accounts and a set-user-id program among them."""
    # Without dpkg's syncs, as builds of images do it.
    script = """
exec < /dev/null; export DEBIAN_FRONTEND=noninteractive; apt-get install -y -q -o DPkg::Options::=--force-unsafe-io \\
    /srv/debs/make_*.deb /srv/debs/sudo_*.deb > /tmp/log 2>&1 || { cat /tmp/log; exit 1; }
printf 'all:\\n\\techo made\\n' > Makefile; make -s; stat -c %a /usr/bin/sudo; sudo -u nobody id -un
useradd -m bob; stat -c %U /home/bob; su bob -c 'id -un'; dpkg --audit; dpkg-query -W -f '${Status}\\n' make"""
    out = build(shared_state, script, at="/work/build", **debian, **ROOT)
    assert out.splitlines() == ["made", "4755", "nobody", "bob", "bob", "install ok installed"]


def test_apt_get_from_a_repository(shared_state: Path, debian: dict[str, str]) -> None:
    """apt-get update and install from a repository: the user _apt, whom it becomes to fetch, reads and writes."""
    script = """
exec < /dev/null; export DEBIAN_FRONTEND=noninteractive; mkdir /srv/repo; cd /srv/repo; cp /srv/debs/make_*.deb make.deb
{ dpkg-deb -f make.deb; printf 'Filename: ./make.deb\\nSize: %s\\nSHA256: %s\\n\\n' \\
    $(stat -c %s make.deb) $(sha256sum make.deb | cut -d' ' -f1); } > Packages
rm -f /etc/apt/sources.list.d/*; echo 'deb [trusted=yes] file:/srv/repo ./' > /etc/apt/sources.list
apt-get -q update > /tmp/log 2>&1; stat -c %U /var/lib/apt/lists/partial
apt-get -y -q -o DPkg::Options::=--force-unsafe-io install make >> /tmp/log 2>&1 || { cat /tmp/log; exit 1; }
grep -c unsandboxed /tmp/log || :; make --version | head -n 1"""
    out = build(shared_state, script, **debian, **ROOT)
    assert out.splitlines()[:2] == ["_apt", "0"]
    assert out.splitlines()[2].startswith("GNU Make")


def test_exactly_what_is_granted(shared_state: Path, debian: dict[str, str]) -> None:
    """The sets hold what the grant says, nothing is inheritable, and uid 0 is a high uid of the host's."""
    out = build(shared_state, "grep -E '^Cap|NoNewPrivs' /proc/self/status; cat /proc/self/uid_map", **debian, **ROOT)
    *status, mapping = out.splitlines()
    sets = {line.split(":")[0]: int(line.split(":")[1], 16) for line in status}
    expected = sum(1 << _NUMBERS[name.removeprefix("CAP_")] for name in ROOT_IN_USERNS_CAPABILITIES)
    assert sets == {
        "CapInh": 0,
        "CapPrm": expected,
        "CapEff": expected,
        "CapBnd": expected,
        "CapAmb": 0,
        "NoNewPrivs": 1,
    }
    inside, outside, count = map(int, mapping.split())
    assert (inside, count) == (0, 65536)
    assert outside >= 65536


def test_what_root_leaves_to_another_user_ends_with_its_step(shared_state: Path, debian: dict[str, str]) -> None:
    """PID 1 has root's uid and may signal processes that root handed to another user: the step's end waits for none."""
    away = "setpriv --reuid 33 --regid 33 --clear-groups sleep 1000 >/dev/null 2>&1 &"
    script = f"{away} until grep -qs '^Uid:.33' /proc/[0-9]*/status; do :; done"
    job = Job(steps=(Step.shell(script), Step("true")), limits=Limits(wall_time="30s"), **debian, **ROOT)
    result, _, _ = run(shared_state, job)
    assert result.outcome is Outcome.SUCCEEDED
    assert result.steps[0].leftovers == 1


def test_root_is_no_way_out(shared_state: Path, debian: dict[str, str]) -> None:
    """Devices, mounts, namespaces, clocks and host names stay refused; what it owns is owned by the range alone."""
    script = """
tried() { if "$@" > /dev/null 2>&1; then echo "got: $*"; else echo refused; fi; }
tried mknod /tmp/n c 1 3; tried mount -t tmpfs x /mnt; tried unshare -n true; tried unshare -Ur true
tried chroot / true; tried hostname other; tried date -s @0; tried chown 70000 /tmp
tried nice -n -5 sh -c '[ $(nice) = -5 ]'
tried sh -c 'echo 1 > /proc/sys/kernel/panic'; tried dd if=/dev/mem count=1"""
    assert set(build(shared_state, script, **debian, **ROOT).split()) == {"refused"}


def test_set_user_id_gives_nothing(shared_state: Path, debian: dict[str, str]) -> None:
    """A set-user-id program of the image, or one that root made, keeps the uid of who runs it, and no capability."""
    script = """
cp /bin/grep /usr/local/bin/mine; chown root:root /usr/local/bin/mine; chmod 6755 /usr/local/bin/mine
chmod a+rx /usr/local/bin; stat -c '%a %u' /usr/local/bin/mine
su nobody -s /bin/sh -c '/usr/local/bin/mine -E "^(Uid|Gid|CapEff)" /proc/self/status'
if su nobody -s /bin/sh -c 'su -c true' < /dev/null > /dev/null 2>&1; then echo gained; fi"""
    mode, uid, gid, effective = build(shared_state, script, **debian, **ROOT).splitlines()
    assert mode == "6755 0"
    assert (set(uid.split()[1:]), set(gid.split()[1:])) == ({"65534"}, {"65534"})
    assert int(effective.split()[1], 16) == 0


def test_files_of_root_are_of_the_range(shared_state: Path, debian: dict[str, str], tmp_path: Path) -> None:
    """What root makes with a set-user-id bit arrives among the outputs as an ordinary file of the caller's."""
    steps = (sh("cp /bin/true /work/output/t; chown root /work/output/t; chmod 6755 /work/output/t"),)
    job = Job(**debian, **ROOT, steps=steps, outputs=(Output("t"),))
    result, _, err = run(shared_state, job, output=tmp_path / "o")
    assert result.outcome is Outcome.SUCCEEDED, err
    assert (tmp_path / "o/t").stat().st_mode & 0o6000 == 0


@pytest.mark.parametrize(
    ("script", "word"),
    [("sudo make install", "sudo"), ("make || /usr/bin/sudo -E make", "sudo"), ("apt-get install -y make", "apt-get")],
)
def test_hint_names_the_policy(shared_state: Path, root: dict[str, str], script: str, word: str) -> None:
    """A step that fails and mentions sudo, or installs packages, without the rights gets a note with the policy."""
    result, _, _ = attempt(shared_state, script, user="1000", **root)
    assert result.outcome is Outcome.FAILED
    (note,) = result.notes
    assert f"mentions {word}" in note
    assert "root-in-userns" in note


def test_hint_for_exec_form(shared_state: Path) -> None:
    """A program that could not even be started counts as much as one that failed."""
    result, _, _ = run(shared_state, Job(rootfs="host", steps=(Step("sudo", "make"), Step("/bin/true"))))
    assert result.outcome is Outcome.FAILED
    assert [note for note in result.notes if "mentions sudo" in note and "no_new_privs" in note]


def test_hint_for_root_without_capabilities(shared_state: Path, debian: dict[str, str]) -> None:
    """An image's root has no capabilities by default: tar can't restore owners, and the note says what gives them."""
    script = "chown 5:5 f || :; tar cf a.tar --owner=5 --group=5 -C /etc passwd; tar xf a.tar"
    result, _, err = attempt(shared_state, script, at="/work/build", **debian)
    assert b"Cannot change ownership" in err
    (note,) = result.notes
    assert "root-in-userns" in note
    assert build(shared_state, script + "; stat -c %u passwd", at="/work/build", **debian, **ROOT) == "5\n"


@pytest.mark.parametrize("script", ["sudo true || :", "echo pseudo sudoers ./apt; exit 1", "false # sudo"])
def test_no_hint_without_reason(shared_state: Path, script: str) -> None:
    """A step that succeeded, or has the word in a comment or another word, gets none."""
    assert attempt(shared_state, script)[0].notes == ()


def test_no_hint_for_who_has_the_rights(shared_state: Path, debian: dict[str, str]) -> None:
    """Root with the grant whose apt-get fails is told nothing about capabilities."""
    result, _, _ = attempt(shared_state, "apt-get install -y nosuchpackage", **debian, **ROOT)
    assert (result.outcome, result.notes) == (Outcome.FAILED, ())
