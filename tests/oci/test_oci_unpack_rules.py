"""The OCI layer rules: whiteouts, opaque directories, links, parents, attributes."""

from __future__ import annotations

import itertools
import os
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trees
from build import Entry, folder, hardlink, opaque, symlink, whiteout

from forgeyard_model.errors import SandboxError
from forgeyard_oci.unpack_limits import UnpackLimits

pytestmark = pytest.mark.kernel


def stack(tmp_path: Path, *layers: Sequence[Any]) -> list[Path]:
    """Unpack layers one over the other, lowest first; their trees, topmost first."""
    made: list[Path] = []
    for number, layer in enumerate(layers):
        target = tmp_path / f"layer{number}"
        trees.unpack(layer, target, made)
        made.insert(0, target)
    return made


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("with_parents", [False, True])
def test_opaque_hides_lower_layers_only(tmp_path: Path, order: tuple[int, ...], with_parents: bool) -> None:
    """Field case C50: new files stay, wherever among them the opaque mark stands."""
    lower = [folder("d"), Entry("d/old"), folder("d/.dot", mode=0o700, uid=7), Entry("d/.dot/x")]
    upper = [Entry("d/new"), Entry("d/.dot/y"), opaque("d")]
    parents = [folder("d"), folder("d/.dot")] if with_parents else []
    layers = stack(tmp_path, lower, parents + [upper[position] for position in order])
    assert trees.names(layers[0]) == {"d/new", "d/.dot/y"}
    assert trees.describe(layers[0])["d/.dot"] == "dir 755 0:0"
    assert set(trees.overlay_names(layers, tmp_path)) == {"d", "d/new", "d/.dot", "d/.dot/y"}


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_whiteout_of_a_directory_that_comes_back(tmp_path: Path, order: tuple[int, ...]) -> None:
    """A layer that deletes a directory and makes it anew shows only the new one's contents, in any order."""
    upper = [whiteout("d"), folder("d"), Entry("d/new")]
    layers = stack(tmp_path, [folder("d"), Entry("d/old"), Entry("kept")], [upper[position] for position in order])
    assert set(trees.overlay_names(layers, tmp_path)) == {"d", "d/new", "kept"}


@pytest.mark.parametrize("reverse", [False, True])
def test_whiteout_beside_a_new_file(tmp_path: Path, reverse: bool) -> None:
    """Whiteouts are about lower layers: a file of the same layer stays."""
    upper = [whiteout("f"), Entry("f", b"new")]
    layers = stack(tmp_path, [Entry("f", b"old")], upper[::-1] if reverse else upper)
    assert trees.overlay_names(layers, tmp_path) == {"f": "new"}


def test_whiteouts_through_layers(tmp_path: Path) -> None:
    """A file deleted in one layer may come back in the next; a whiteout of nothing is harmless."""
    layers = stack(
        tmp_path,
        [Entry("a", b"1"), Entry("d/b", b"1")],
        [whiteout("a"), whiteout("d/b"), whiteout("no/such")],
        [Entry("a", b"3")],
    )
    assert trees.overlay_names(layers, tmp_path) == {"a": "3", "d": "dir", "no": "dir"}


def test_whiteouts_of_nothing_are_not_made(tmp_path: Path) -> None:
    """An overlay lists a whiteout in a directory that merges with none below as a name that can't be opened."""
    lower = [folder("d"), Entry("d/x"), Entry("f"), whiteout("base")]
    upper = [folder("new"), whiteout("new/x"), folder("d"), opaque("d"), whiteout("d/x")]
    layers = stack(tmp_path, lower, upper)
    assert "whiteout" not in trees.describe(layers[0]).values()
    assert trees.overlay_names(layers, tmp_path) == {"d": "dir", "f": "", "new": "dir"}


def test_opaque_root_is_reported(tmp_path: Path) -> None:
    """An overlay does not look for the mark on a lower's root, so the store has to cut the chain there."""
    assert trees.unpack([opaque(""), Entry("new")], tmp_path / "a").opaque_root
    assert not trees.unpack([folder("d"), opaque("d")], tmp_path / "b").opaque_root


def test_union_filesystem_leftovers_are_ignored(tmp_path: Path) -> None:
    """Bookkeeping names of an old union filesystem are neither files nor whiteouts."""
    trees.unpack(
        [Entry(".wh..wh.aufs"), folder(".wh..wh.plnk"), Entry(".wh..wh.plnk/1.2", b"x"), Entry("f")], tmp_path / "t"
    )
    assert trees.describe(tmp_path / "t").keys() == {"f"}


def test_duplicates_the_last_wins(tmp_path: Path) -> None:
    """Of two entries with one name the later one counts, with its attributes, however its name is spelled."""
    entries = [
        Entry("f", b"1", mode=0o600),
        Entry("./f", b"22", mode=0o644),
        Entry("d//g", b"1"),
        Entry("/d/g", b"333"),
    ]
    trees.unpack(entries, tmp_path / "t")
    shown = trees.describe(tmp_path / "t")
    assert shown["f"] == "file 644 0:0 b'22'"
    assert shown["d/g"] == "file 644 0:0 b'333'"


@pytest.mark.parametrize("first", ["file", "directory", "symlink", "hardlink"])
@pytest.mark.parametrize("second", ["file", "directory", "symlink", "hardlink"])
def test_type_changes(tmp_path: Path, first: str, second: str) -> None:
    """Any kind of entry replaces any other; what a replaced link pointed to is left alone."""
    make = {
        "file": lambda text: [Entry("x", text)],
        "directory": lambda _: [folder("x"), Entry("x/in")],
        "symlink": lambda _: [symlink("x", "/target")],
        "hardlink": lambda _: [hardlink("x", "target")],
    }
    trees.unpack([Entry("target", b"T"), *make[first](b"1"), *make[second](b"2")], tmp_path / "t")
    shown = trees.describe(tmp_path / "t")
    assert shown["target"] == "file 644 0:0 b'T'"
    expected = {
        "file": "file 644 0:0 b'2'",
        "directory": "dir 755 0:0",
        "symlink": "link /target",
        "hardlink": "file 644 0:0 b'T'",
    }
    assert shown["x"] == expected[second]
    assert ("x/in" in shown) == (second == "directory")


def test_type_change_over_a_lower_layer(tmp_path: Path) -> None:
    """A directory becomes a file and a file a directory, across layers."""
    layers = stack(tmp_path, [folder("a"), Entry("a/x"), Entry("b")], [Entry("a", b"file"), folder("b"), Entry("b/y")])
    assert trees.overlay_names(layers, tmp_path) == {"a": "file", "b": "dir", "b/y": ""}


def test_files_below_a_replaced_directory_land_in_the_new_one(tmp_path: Path) -> None:
    """No descriptor of a removed directory is used again."""
    entries = [folder("d"), Entry("d/1"), Entry("d", b"f"), folder("d"), Entry("d/2"), symlink("e", "d"), Entry("e/3")]
    trees.unpack(entries, tmp_path / "t")
    assert trees.names(tmp_path / "t") == {"d/2", "d/3", "e"}


def test_hard_links_are_one_inode(tmp_path: Path) -> None:
    """Links share an inode within a layer, also when they replace something, and count."""
    entries = [
        Entry("a", b"x", mode=0o4755),
        hardlink("b", "a"),
        Entry("c"),
        hardlink("c", "/a"),
        hardlink("d/e", "./b"),
    ]
    trees.unpack(entries, tmp_path / "t")
    inodes = {os.stat(tmp_path / "t" / name).st_ino for name in ("a", "b", "c", "d/e")}
    assert len(inodes) == 1
    assert os.stat(tmp_path / "t/a").st_nlink == 4


def test_hard_link_to_a_lower_layer(tmp_path: Path) -> None:
    """The target is brought up with all its attributes, so that both names are one file in the merged view."""
    lower = [
        folder("d", mode=0o711, uid=3),
        Entry("d/y", b"data", mode=0o4711, uid=5, gid=6, pax={"SCHILY.xattr.user.k": "v"}),
    ]
    layers = stack(tmp_path, lower, [hardlink("x", "d/y")])
    top = layers[0]
    assert os.stat(top / "x").st_ino == os.stat(top / "d/y").st_ino
    assert trees.describe(top)["x"] == "file 4711 5:6 b'data'"
    assert trees.describe(top)["d"] == "dir 711 3:0"
    assert os.getxattr(top / "x", "user.k") == b"v"
    assert os.stat(top / "x").st_mtime == 1_700_000_000


def test_hard_link_to_a_symbolic_link(tmp_path: Path) -> None:
    """The link itself is linked, never what it points to, in this layer or below."""
    layers = stack(
        tmp_path,
        [symlink("low", "/etc/shadow")],
        [symlink("s", "/etc/passwd"), hardlink("h", "s"), hardlink("l", "low")],
    )
    shown = trees.describe(layers[0])
    assert shown["h"] == "link /etc/passwd"
    assert shown["l"] == "link /etc/shadow"


@pytest.mark.parametrize(
    "entries",
    [
        [hardlink("x", "nothing")],
        [hardlink("x", "later"), Entry("later")],
        [hardlink("x", "x")],
        [folder("d"), Entry("d/f"), hardlink("d", "d/f")],
        [whiteout("low"), hardlink("x", "low")],
    ],
    ids=["missing", "later", "itself", "below", "deleted"],
)
def test_dangling_hard_links_are_named(tmp_path: Path, entries: list[Any]) -> None:
    """A link to what is not there is refused with its name and target."""
    with pytest.raises(SandboxError, match="is a hard link to") as caught:
        stack(tmp_path, [Entry("low")], entries)
    assert caught.value.reason == "dangling_link"


def test_left_out_parents_look_like_the_lower_layers(tmp_path: Path) -> None:
    """A parent that the layer leaves out keeps the owner, mode, time and xattrs it has below."""
    lower = [folder("d", mode=0o1770, uid=9, gid=8, mtime=1234567, pax={"SCHILY.xattr.user.k": "v"})]
    layers = stack(tmp_path, lower, [Entry("d/e/f")])
    shown = trees.describe(layers[0])
    assert shown["d"] == "dir 1770 9:8"
    assert shown["d/e"] == "dir 755 0:0"
    assert os.stat(layers[0] / "d").st_mtime == 1234567
    assert os.getxattr(layers[0] / "d", "user.k") == b"v"


def test_left_out_parents_follow_lower_links(tmp_path: Path) -> None:
    """bin/x over bin -> usr/bin lands in usr/bin, absolute or not; the link stays a link."""
    lower = [folder("usr"), folder("usr/bin"), symlink("bin", "usr/bin"), symlink("sbin", "/usr/bin")]
    layers = stack(tmp_path, lower, [Entry("bin/x", b"1"), Entry("sbin/y", b"2")])
    assert trees.names(layers[0]) == {"usr/bin/x", "usr/bin/y"}
    assert trees.overlay_names(layers, tmp_path)["bin"] == "-> usr/bin"


def test_layers_that_need_those_below_say_so(tmp_path: Path) -> None:
    """Only a layer that leaves something out depends on its chain; the store keeps those apart."""
    assert not trees.unpack([folder("d"), Entry("d/f"), hardlink("g", "d/f"), opaque("d")], tmp_path / "a").used_lowers
    assert trees.unpack([Entry("d/f")], tmp_path / "b").used_lowers
    assert trees.unpack([whiteout("f")], tmp_path / "w").used_lowers
    assert trees.unpack([hardlink("g", "d/f")], tmp_path / "c", [tmp_path / "b"]).used_lowers


def test_attributes(tmp_path: Path) -> None:
    """Owners, setuid bits, directory times and capabilities survive each other."""
    capability = bytes.fromhex("0100000200200000000000000000000000000000").decode("latin-1")
    entries = [
        folder("d", mode=0o2755, uid=1, gid=2, mtime=1111),
        Entry(
            "d/suid", b"x", mode=0o4755, uid=3, gid=4, mtime=2222, pax={"SCHILY.xattr.security.capability": capability}
        ),
        Entry("d/early", mtime=-5),
        Entry("d/nano", pax={"mtime": "1500000000.123456789"}),
        folder("sticky", mode=0o1777),
        symlink("d/link", "x", uid=5, gid=6, mtime=3333),
    ]
    trees.unpack(entries, tmp_path / "t")
    root = tmp_path / "t"
    shown = trees.describe(root)
    assert shown["d"] == "dir 2755 1:2"
    assert shown["d/suid"] == "file 4755 3:4 b'x'"
    assert shown["sticky"] == "dir 1777 0:0"
    assert os.getxattr(root / "d/suid", "security.capability") == capability.encode("latin-1")
    assert [os.lstat(root / name).st_mtime for name in ("d", "d/suid", "d/early", "d/link")] == [1111, 2222, -5, 3333]
    assert os.stat(root / "d/nano").st_mtime_ns == 1_500_000_000_123_456_789
    assert (os.lstat(root / "d/link").st_uid, os.lstat(root / "d/link").st_gid) == (5, 6)
    assert os.stat(root / "d/early").st_gid == 0, "a setgid directory gives its group to no entry"


def test_xattrs_of_overlays_and_labels_are_dropped(tmp_path: Path) -> None:
    """An image can't forge an opaque directory or a label; what is dropped is counted."""
    names = (
        "trusted.overlay.opaque",
        "user.overlay.opaque",
        "security.selinux",
        "system.posix_acl_access",
        "user.fine",
    )
    report = trees.unpack([folder("d", pax={f"SCHILY.xattr.{name}": "y" for name in names})], tmp_path / "t")
    assert os.listxattr(tmp_path / "t/d") == ["user.fine"]
    assert report.dropped_xattrs == 4


def test_devices_and_fifos_are_not_made(tmp_path: Path) -> None:
    """They are skipped and reported; a 0:0 character device can't forge a whiteout."""
    entries = [
        Entry("f", b"first"),
        Entry("null", type=tarfile.CHRTYPE, device=(1, 3)),
        Entry("forged", type=tarfile.CHRTYPE, device=(0, 0)),
        Entry("disk", type=tarfile.BLKTYPE, device=(8, 0)),
        Entry("pipe", type=tarfile.FIFOTYPE),
        Entry("f", type=tarfile.FIFOTYPE),
    ]
    report = trees.unpack(entries, tmp_path / "t")
    assert trees.describe(tmp_path / "t") == {}
    assert report.devices_skipped == 5
    assert report.skipped == ("null", "forged", "disk", "pipe", "f")


def test_unmapped_owners_are_refused(tmp_path: Path) -> None:
    """A uid that no sandbox can map is an error that names the path and the uid (field case C58)."""
    with pytest.raises(SandboxError, match=r"'home/x' is owned by 1516583083:0, outside the ids 0 to 65535") as caught:
        trees.unpack([Entry("home/x", uid=1516583083)], tmp_path / "t")
    assert caught.value.reason == "unmapped_owner"
    trees.unpack([Entry("x", uid=65535, gid=65535)], tmp_path / "u")
    with pytest.raises(SandboxError, match="65536"):
        trees.unpack([Entry("x", gid=65536)], tmp_path / "v")


def test_odd_names_are_kept(tmp_path: Path) -> None:
    """Backslashes, newlines, colons, long names, bytes that are no UTF-8: all legal in a file name."""
    names = ["a\\b", "new\nline", "x:y,z w", "-rf", "n" * 255, "deep/" * 100 + "f", "caf\u00e9"]
    trees.unpack([Entry(name, b"x") for name in names], tmp_path / "t")
    assert trees.names(tmp_path / "t") == set(names)


@pytest.mark.parametrize("entry", [Entry("n" * 256), Entry("d/" * 256 + "f"), Entry("long/" + "x/" * 200 + "n" * 4000)])
def test_names_beyond_the_kernels_limits_are_named(tmp_path: Path, entry: Any) -> None:
    """A name that can't exist is the entry's fault."""
    with pytest.raises(SandboxError, match="layer entry") as caught:
        trees.unpack([entry], tmp_path / "t")
    assert caught.value.reason == "bad_entry"


def test_the_root_entry_sets_the_roots_attributes(tmp_path: Path) -> None:
    """`./` is the image's root directory."""
    trees.unpack([folder("./", mode=0o750, uid=4, gid=5, mtime=99), Entry("f")], tmp_path / "t")
    status = os.stat(tmp_path / "t")
    assert (status.st_mode & 0o7777, status.st_uid, status.st_gid, status.st_mtime) == (0o750, 4, 5, 99)


def test_equal_layers_give_equal_trees(tmp_path: Path) -> None:
    """Nothing of the moment of unpacking shows in a tree, times of left-out directories included."""
    for name in ("one", "two"):
        trees.unpack([Entry("a/b/c"), symlink("l", "x")], tmp_path / name)
    seen = [
        [os.lstat(tmp_path / name / path).st_mtime_ns for path in ("", "a", "a/b", "a/b/c", "l")]
        for name in ("one", "two")
    ]
    assert seen[0] == seen[1]


def test_bounds_are_named(tmp_path: Path) -> None:
    """Too many entries, and files too large in sum, end the unpacking."""
    with pytest.raises(SandboxError, match="more than 3 entries"):
        trees.unpack([Entry(f"f{n}") for n in range(4)], tmp_path / "a", limits=UnpackLimits(entries=3))
    with pytest.raises(SandboxError, match="beyond 100000 bytes"):
        trees.unpack([Entry("big", b"x" * 200_000)], tmp_path / "b", limits=UnpackLimits(expanded=100_000))


def test_dropped_xattrs_are_named(tmp_path: Path) -> None:
    """The report says which names were dropped, each once, and counts all."""
    label = {"SCHILY.xattr.security.selinux": "x", "SCHILY.xattr.trusted.overlay.redirect": "y"}
    report = trees.unpack([Entry("a", pax=label), Entry("b", pax=label)], tmp_path / "t")
    assert report.dropped_xattrs == 4
    assert set(report.dropped_names) == {"security.selinux", "trusted.overlay.redirect"}
    assert os.listxattr(tmp_path / "t/a") == []


def test_what_is_in_the_tree_is_counted(tmp_path: Path) -> None:
    """Nodes are counted through replacement and removal: the number is that of the walk afterwards."""
    lower = [folder("d"), Entry("d/x"), Entry("w")]
    upper = [
        *(Entry("f", b"1"), Entry("f", b"2"), hardlink("g", "f"), symlink("g", "f"), folder("h"), Entry("h/1")),
        *(
            folder("h/2"),
            Entry("h/2/3"),
            Entry("h"),
            whiteout("w"),
            hardlink("x", "d/x"),
            folder("h"),
            Entry("h/a/b/c"),
        ),
    ]
    trees.unpack(lower, tmp_path / "low")
    report = trees.unpack(upper, tmp_path / "up", [tmp_path / "low"])
    assert report.nodes == len(trees.describe(tmp_path / "up"))


@pytest.mark.parametrize("target", ["/etc/passwd", "etc/passwd", "./etc//passwd", "l/passwd", "/l/passwd", "up/passwd"])
def test_hard_link_names_resolve_in_the_image(tmp_path: Path, target: str) -> None:
    """Field case C52: absolute targets, and targets by way of links, are the image's own files, never the host's."""
    entries = [
        folder("etc"),
        Entry("etc/passwd", b"image's"),
        symlink("l", "/etc"),
        folder("a"),
        symlink("up", "a/../etc"),
    ]
    trees.unpack([*entries, hardlink("new/parent/x", target)], tmp_path / "t")
    assert os.stat(tmp_path / "t/new/parent/x").st_ino == os.stat(tmp_path / "t/etc/passwd").st_ino
    assert (tmp_path / "t/new/parent/x").read_bytes() == b"image's"


@pytest.mark.parametrize("target", ["../../etc/passwd", "/../etc/passwd", "out/passwd"])
def test_hard_links_that_lead_out(tmp_path: Path, target: str) -> None:
    """A target above the root is refused, written out or by way of a link."""
    with pytest.raises(SandboxError) as caught:
        trees.unpack([symlink("out", "../../../../etc"), hardlink("x", target)], tmp_path / "t")
    assert caught.value.reason == "escape"


def test_a_whiteout_through_a_link(tmp_path: Path) -> None:
    """A whiteout whose parent is a link hides what the link leads to in the image, as a file there would land there."""
    layers = stack(tmp_path, [folder("usr"), Entry("usr/x"), symlink("l", "/usr")], [whiteout("l/x")])
    assert trees.overlay_names(layers, tmp_path) == {"l": "-> /usr", "usr": "dir"}
