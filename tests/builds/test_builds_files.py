"""What builds do with files: archives, links, renames, sparse files, many of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from builds import build, host_tool

pytestmark = pytest.mark.kernel

BUILD = "/work/build"


def test_archives_keep_modes(shared_state: Path, root: dict[str, str]) -> None:
    """tar gives back modes, set-id bits included, links and times."""
    script = """
mkdir a; echo x > a/f; ln a/f a/h; ln -s f a/s; mkdir -m 1777 a/t; chmod 4755 a/f; chmod 750 a; touch -d @1000000 a/f
tar cf a.tar a; mkdir b; tar xpf a.tar -C b
stat -c '%a %h' b/a/f; stat -c '%a' b/a b/a/t; stat -c %Y b/a/f; readlink b/a/s"""
    out = build(shared_state, script, at=BUILD, **root)
    assert out.split() == ["4755", "2", "750", "1777", "1000000", "f"]


def test_zip_keeps_modes(shared_state: Path) -> None:
    """zip and unzip give back the executable bit."""
    host_tool("zip")
    host_tool("unzip")
    script = "mkdir a; echo x > a/f; chmod 750 a/f; zip -qr a.zip a; mkdir b; unzip -q a.zip -d b; stat -c %a b/a/f"
    assert build(shared_state, script, at=BUILD) == "750\n"


def test_links_and_renames(shared_state: Path) -> None:
    """They work within a directory of the contract; across two of them it is EXDEV, and mv copies instead."""
    host_tool("python3")
    script = """
echo x > f; ln f h; mv h g; stat -c %h f; mv g /tmp/g; cat /tmp/g
python3 - <<'X'
import errno, os
for name in ("rename", "link"):
    try:
        getattr(os, name)("/tmp/g", "/work/build/g")
    except OSError as error:
        print(errno.errorcode[error.errno])
X"""
    assert build(shared_state, script, at=BUILD).split() == ["2", "x", "EXDEV", "EXDEV"]


def test_renames_in_a_cow_source(shared_state: Path, tree: Path) -> None:
    """Files and directories of a cow source can be renamed, linked and replaced like any other."""
    (tree / "d").mkdir()
    (tree / "d/x").write_text("x\n")
    for path in (tree / "d", tree / "d/x"):
        os.chown(path, tree.stat().st_uid, tree.stat().st_gid)
    host_tool("python3")
    # Not mv, which would copy where a rename is refused, as overlays refuse it without redirects.
    script = """python3 -c 'import os; os.rename("d", "e")'
cat e/x; ln f h; mv f g; cat g h; echo new > f2; mv f2 g; cat g; rm -r e; ls"""
    assert build(shared_state, script, source=tree).split() == ["x", "original", "original", "new", "g", "h"]
    assert (tree / "d/x").read_text() == "x\n"


def test_files_of_others_in_a_source(shared_state: Path, tree: Path) -> None:
    """One owner of a source becomes the job. What others own in it stays theirs, readable by mode."""
    (tree / "d").mkdir()
    (tree / "d/x").write_text("x\n")
    script = "stat -c %U f d; cat d/x; if rm -f d/x 2> /dev/null; then exit 1; fi; cp -r d e; rm -r e; ls"
    assert build(shared_state, script, source=tree).split() == ["forgeyard", "root", "x", "d", "f"]


def test_sparse_files_and_direct_io(shared_state: Path) -> None:
    """A hole takes no room, a copy keeps it, fallocate and O_DIRECT work."""
    script = """
truncate -s 1G s; stat -c %b s; cp --sparse=always s t; stat -c %b t; rm s t
fallocate -l 1M a; stat -c %s a; dd if=/dev/zero of=d bs=4096 count=1 oflag=direct status=none; stat -c %s d"""
    assert build(shared_state, script, at=BUILD).split() == ["0", "0", "1048576", "4096"]


def test_ten_thousand_files(shared_state: Path) -> None:
    """A large tree is made, counted, copied with hard links and removed."""
    host_tool("python3")
    script = """
python3 - <<'X'
import os
for d in range(100):
    os.makedirs(f"t/{d}")
    for f in range(100):
        open(f"t/{d}/{f}", "w").close()
X
cp -al t u; find u -type f -links 2 | wc -l; rm -r t u; ls"""
    assert build(shared_state, script, at=BUILD) == "10000\n"


def test_locales_and_time_zones(shared_state: Path) -> None:
    """UTF-8 and UTC by default; another zone by TZ."""
    host_tool("python3")
    script = """date -d @0 +%Z; TZ=Asia/Tokyo date -d @0 +%H
python3 - <<'X'
import locale
locale.setlocale(locale.LC_ALL, "")
print(locale.nl_langinfo(locale.CODESET), "\\u00e9")
X"""
    if not Path("/usr/share/zoneinfo/Asia/Tokyo").exists():
        pytest.skip("the host's /usr has no time zones")
    assert build(shared_state, script).split() == ["UTC", "09", "UTF-8", "\u00e9"]


def test_names_of_people_and_hosts(shared_state: Path) -> None:
    """The job's user and host resolve, as git, ssh-keygen, postgres and Java expect."""
    script = (
        "id -un; id -gn; getent passwd $(id -u) | cut -d: -f6; getent hosts $(hostname) > /dev/null && echo resolved"
    )
    assert build(shared_state, script).split() == ["forgeyard", "forgeyard", "/home/forgeyard", "resolved"]
