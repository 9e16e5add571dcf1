"""USER of an image and `user:` of a job, looked up in the image's own files (field case C44)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from forgeyard_model.errors import InvalidRequest
from forgeyard_model.plan import JobUser
from forgeyard_oci.image_user import resolve_user
from forgeyard_oci.unpack_merged import MergedTree

PASSWD = """\
root:x:0:0:root:/root:/bin/sh
short:x:0
empty:x::0::/:/bin/sh
evil:x:0x0:0::/:/bin/sh
negative:x:-1:0::/:/bin/sh
+nis:x:7:7::/:/bin/sh
app:x:1000:1001:App:/home/app:/bin/sh
app:x:0:0:second:/:/bin/sh
huge:x:70000:70000::/:/bin/sh
1234:x:0:0:digits:/:/bin/sh

no newline at the end:x
"""
GROUP = "root:x:0:\napp:x:1001:\nbroken:x\nextra:x:2000:other,app\nfar:x:70000:app\nwheel:x:10:app,root\n"


@pytest.fixture
def tree(tmp_path: Path) -> MergedTree:
    """An image with account files, good lines and bad."""
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/passwd").write_text(PASSWD)
    (tmp_path / "etc/group").write_text(GROUP)
    return MergedTree([str(tmp_path)])


@pytest.mark.parametrize(
    ("text", "user"),
    [
        ("", JobUser(0, 0, (10,), "root")),
        ("root", JobUser(0, 0, (10,), "root")),
        ("0", JobUser(0, 0, (10,), "root")),
        ("1000", JobUser(1000, 1001, (10, 2000), "app")),
        ("4321", JobUser(4321, 0, (), "4321")),
        ("1000:1000", JobUser(1000, 1000, (), "app")),
        ("app", JobUser(1000, 1001, (10, 2000), "app")),
        ("app:extra", JobUser(1000, 2000, (), "app")),
        ("app:5", JobUser(1000, 5, (), "app")),
        ("1000:extra", JobUser(1000, 2000, (), "app")),
        ("+nis", JobUser(7, 7, (), "+nis")),
        ("1234", JobUser(1234, 0, (), "1234")),
        ("65535:65535", JobUser(65535, 65535, (), "65535")),
    ],
)
def test_users_that_resolve(tree: MergedTree, text: str, user: JobUser) -> None:
    """Names come from the image, digits are numbers, groups come with an account where none is named."""
    found = resolve_user(text, tree)
    assert found == user


@pytest.mark.parametrize(("text", "home"), [("app", "/home/app"), ("1000:5", "/home/app"), ("1234", "")])
def test_the_home_of_a_user(tree: MergedTree, text: str, home: str) -> None:
    """As passwd has it; a number without an account has none."""
    assert resolve_user(text, tree).home == home


@pytest.mark.parametrize(
    "text",
    [
        "nosuch",
        "1000:nosuch",
        "app:nosuch",
        "-1",
        "65536",
        "4294967296",
        "1" * 5000,
        "huge",
        "app:far",
        "short",
        "empty",
        "evil",
        "negative",
        ":",
        ":app",
        "app:",
        "a:b:c",
        " root",
        "\u0661",
        "root\n",
    ],
)
def test_users_that_do_not(tree: MergedTree, text: str) -> None:
    """An unknown or malformed user is named, and is never root."""
    with pytest.raises(InvalidRequest) as caught:
        resolve_user(text, tree, field="image USER")
    assert caught.value.field == "image USER"
    assert repr(caught.value.value) in str(caught.value)


@pytest.mark.parametrize(("text", "user"), [("", (0, 0)), ("1000", (1000, 0)), ("5:6", (5, 6))])
def test_numbers_need_no_files(tmp_path: Path, text: str, user: tuple[int, int]) -> None:
    """A scratch image has no account files at all."""
    found = resolve_user(text, MergedTree([str(tmp_path)]))
    assert (found.uid, found.gid, found.groups) == (*user, ())


def test_a_name_needs_them(tmp_path: Path) -> None:
    """A name in an image without /etc/passwd is an error that names it."""
    with pytest.raises(InvalidRequest, match="no user 'app'"):
        resolve_user("app", MergedTree([str(tmp_path)]))


def test_absolute_links_stay_inside_the_image(tmp_path: Path) -> None:
    """/etc/passwd as a link to /etc/passwd of elsewhere is read in the image, never on the host."""
    image = tmp_path / "image"
    (image / "etc").mkdir(parents=True)
    outside = tmp_path / "passwd"
    outside.write_text("app:x:7:7::/:/bin/sh\n")
    (image / "etc/passwd").symlink_to(outside)
    (image / "etc/group").symlink_to("../../../../../../../../etc/group")
    for name in ("app", "0:root"):
        with pytest.raises(InvalidRequest):
            resolve_user(name, MergedTree([str(image)]))
    (image / "shared").mkdir()
    (image / "shared/passwd").write_text("app:x:8:8::/:/bin/sh\n")
    (image / "etc/passwd").unlink()
    (image / "etc/passwd").symlink_to("/shared/../../shared/passwd")
    assert resolve_user("app", MergedTree([str(image)])).uid == 8


@pytest.mark.parametrize("kind", ["fifo", "directory", "loop"])
def test_odd_files_are_no_accounts(tmp_path: Path, kind: str) -> None:
    """A FIFO does not block, a directory or a loop of links is no file: numbers work, names don't."""
    (tmp_path / "etc").mkdir()
    path = tmp_path / "etc/passwd"
    {"fifo": lambda: os.mkfifo(path), "directory": path.mkdir, "loop": lambda: path.symlink_to("passwd")}[kind]()
    tree = MergedTree([str(tmp_path)])
    assert resolve_user("5", tree).gid == 0
    with pytest.raises(InvalidRequest):
        resolve_user("app", tree)


def test_an_enormous_passwd_is_not_read_through(tmp_path: Path) -> None:
    """Reading is bounded: a name is refused with the way out, a number works."""
    (tmp_path / "etc").mkdir()
    with (tmp_path / "etc/passwd").open("wb") as file:
        file.truncate(50 << 20)
    tree = MergedTree([str(tmp_path)])
    assert resolve_user("5", tree).uid == 5
    with pytest.raises(InvalidRequest, match="UID:GID"):
        resolve_user("app", tree)


@pytest.mark.kernel
def test_the_topmost_layer_counts(tmp_path: Path) -> None:
    """Account files come from the merged view: a whiteout hides the ones below, an opaque /etc too."""
    for name in ("low", "mid", "top", "opaque"):
        (tmp_path / name / "etc").mkdir(parents=True)
    (tmp_path / "low/etc/passwd").write_text("app:x:5:5::/:/bin/sh\n")
    (tmp_path / "top/etc/passwd").write_text("app:x:6:6::/:/bin/sh\n")
    os.mknod(tmp_path / "mid/etc/passwd", 0o020000, os.makedev(0, 0))
    os.setxattr(tmp_path / "opaque/etc", "trusted.overlay.opaque", b"y")

    def uid(*layers: str) -> int:
        return resolve_user("app", MergedTree([str(tmp_path / layer) for layer in layers])).uid

    assert uid("low") == 5
    assert uid("top", "low") == 6
    for layers in (("mid", "low"), ("opaque", "low")):
        with pytest.raises(InvalidRequest):
            uid(*layers)
