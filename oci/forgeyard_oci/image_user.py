"""USER of an image (or `user:` of a job) as numbers, looked up in the image's own /etc/passwd and /etc/group.

``uid``, ``uid:gid``, ``name``, ``name:group``, ``uid:group``, ``name:gid``; empty is root. Digits are always a number,
never a name. A number needs no file; a name that no well-formed line gives is an error, never root.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from forgeyard_model.errors import InvalidRequest
from forgeyard_model.plan import JobUser
from forgeyard_oci.unpack_merged import MergedTree

MAX_ID: Final = 65535
"""Highest uid and gid in a sandbox: a user namespace maps 0 to 65535."""
_MAX_FILE: Final = 4 << 20
_MAX_GROUPS: Final = 256


def resolve_user(text: str, tree: MergedTree, *, field: str = "user") -> JobUser:
    """The numeric identity for `text`.

    :param field: what to call it in an error: the request's field, or the image's USER.
    :raises InvalidRequest: unknown name, bad or unmapped number, or account files too large to read.
    """
    user, colon, group = text.partition(":")
    if not text:
        home = next((entry.home for entry in _passwd(tree) if entry.uid == 0), "/root")
        return JobUser(0, 0, _groups_of("root", tree), "root", home)
    if not user or (colon and not group) or ":" in group:
        raise InvalidRequest(field, text, "write NAME, UID, NAME:GROUP or UID:GID")
    account = _account(user, text, tree, field)
    if group:
        return JobUser(account.uid, _group(group, text, tree, field), (), account.name, account.home)
    # Like docker: extra groups come with an account, and only where no group was named.
    return JobUser(account.uid, account.gid, _groups_of(account.name, tree), account.name, account.home)


def _account(user: str, text: str, tree: MergedTree, field: str) -> JobUser:
    if user.isascii() and user.isdigit():
        uid = _number(user, text, field)
        known = next((entry for entry in _passwd(tree) if entry.uid == uid), None)
        return known if known is not None and known.gid <= MAX_ID else JobUser(uid, 0, (), user)
    for entry in _passwd(tree, required_by=text, field=field):
        if entry.name == user:
            _number(str(max(entry.uid, entry.gid)), text, field)
            return entry
    raise InvalidRequest(
        field, text, f"the image's /etc/passwd has no user {user!r}: use one of its names, or a number"
    )


def _group(group: str, text: str, tree: MergedTree, field: str) -> int:
    if group.isascii() and group.isdigit():
        return _number(group, text, field)
    for name, gid, _ in _group_lines(tree, required_by=text, field=field):
        if name == group:
            return _number(str(gid), text, field)
    raise InvalidRequest(
        field, text, f"the image's /etc/group has no group {group!r}: use one of its names, or a number"
    )


def _number(digits: str, text: str, field: str) -> int:
    # Length first: int() of a million digits is slow.
    if len(digits) > 10 or int(digits) > MAX_ID:
        raise InvalidRequest(field, text, f"ids in a sandbox go from 0 to {MAX_ID}")
    return int(digits)


def _groups_of(name: str, tree: MergedTree) -> tuple[int, ...]:
    found = {gid for _, gid, members in _group_lines(tree) if name in members and gid <= MAX_ID}
    return tuple(sorted(found)[:_MAX_GROUPS])


def _passwd(tree: MergedTree, *, required_by: str | None = None, field: str = "") -> Iterator[JobUser]:
    for words in _lines("etc/passwd", tree, required_by, field):
        # Anything but seven fields is no account: a short line read leniently would give uid 0.
        if len(words) == 7 and words[0] and _is_id(words[2]) and _is_id(words[3]):
            yield JobUser(int(words[2]), int(words[3]), (), words[0], words[5])


def _group_lines(
    tree: MergedTree, *, required_by: str | None = None, field: str = ""
) -> Iterator[tuple[str, int, tuple[str, ...]]]:
    for words in _lines("etc/group", tree, required_by, field):
        if len(words) == 4 and words[0] and _is_id(words[2]):
            yield words[0], int(words[2]), tuple(words[3].split(","))


def _is_id(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) <= 10


def _lines(path: str, tree: MergedTree, required_by: str | None, field: str) -> Iterator[list[str]]:
    data = tree.read_file(path, _MAX_FILE + 1) or b""
    if len(data) > _MAX_FILE:
        if required_by is not None:
            raise InvalidRequest(field, required_by, f"the image's /{path} is larger than 4 MiB: use numbers, UID:GID")
        return
    for line in data.decode("utf-8", "surrogateescape").split("\n"):
        yield line.strip().split(":")
