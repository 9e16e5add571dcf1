"""Which parts of the host make up the root of a job: links, binds, and what a bind must not show."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forgeyard_model.errors import SandboxError, SandboxErrorKind

_CONFIG_DIRS: Final = ("/usr/etc", "/usr/local/etc")
"""Configuration below /usr: npm and git keep the site's own there. Shown only as far as /etc would be."""
_CONFIG_FILES: Final = ("/usr/pip.conf", "/usr/lib/node_modules/npm/npmrc", "/usr/share/nodejs/npm/npmrc")
"""Site configuration that tools look for beside themselves: hidden when there."""
_PROGRAMS: Final = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_PRIVATE: Final = ("/etc", "/root", "/home", "/var", "/run", "/proc", "/sys", "/dev", "/boot", "/tmp")  # noqa: S108  only names
"""An approval of /opt or /usr/local that leads into one of these is refused."""
_IMAGE_BASED: Final = ("/var/usrlocal", "/var/opt")
"""Where hosts with an immutable /usr keep the two: the one exception."""
_MAX_LINKS: Final = 40  # the kernel's own limit


@dataclass(frozen=True, slots=True)
class Layout:
    """The host's shape, in paths as the job sees them.

    :param links: top-level links, as (/bin, usr/bin).
    :param binds: host directories shown at the same path.
    :param hidden_dirs: directories below a bind that an empty one covers.
    :param config_dirs: directories below a bind that a filtered copy covers.
    :param hidden_files: files below a bind that an empty one covers.
    """

    links: tuple[tuple[str, str], ...]
    binds: tuple[str, ...]
    hidden_dirs: tuple[str, ...]
    config_dirs: tuple[str, ...]
    hidden_files: tuple[str, ...]

    def canonical(self, path: str) -> str:
        """`path` without . and .., and past the top-level link it may begin with: /lib/x is /usr/lib/x."""
        path = os.path.normpath(path)
        for name, target in self.links:
            if path == name or path.startswith(name + "/"):
                return os.path.normpath(f"/{target.lstrip('/')}{path[len(name) :]}")
        return path

    def shows(self, path: str) -> bool:
        """Whether a canonical path comes from a bind and is not covered."""
        covers = (*self.hidden_dirs, *self.config_dirs, *self.hidden_files)
        return _within(path, self.binds) and not _within(path, covers)


def read_layout(host: Path, *, local: bool, opt: bool) -> Layout:
    """Look at the top of the host's tree: a dozen lstat calls.

    :param local: /usr/local is approved.
    :param opt: /opt is approved.
    :raises SandboxError: when there is no /usr, or an approved path leads to a private place.
    """
    if not (host / "usr").is_dir():
        raise SandboxError(
            SandboxErrorKind.INVALID_FILESYSTEM_PLAN,
            "host_without_usr",
            "process mode needs the programs of a /usr, and this host has none",
            resolution="run the job in an image",
        )
    links, binds = _top_level(host)
    approved = [_approved(host, path) for path, wanted in (("/usr/local", local), ("/opt", opt)) if wanted]
    binds += [path for path in approved if path is not None]
    links += [("/opt", path[1:]) for path in approved if opt and path in _IMAGE_BASED and path.endswith("/opt")]
    hidden = [] if local else [_shown(host, "/usr/local")]
    config = [path for path in _CONFIG_DIRS if local or not path.startswith("/usr/local")]
    return Layout(
        links=tuple(links),
        binds=tuple(binds),
        hidden_dirs=tuple(path for path in hidden if path is not None),
        config_dirs=tuple(path for path in config if _is(stat.S_ISDIR, host, path)),
        hidden_files=tuple(path for path in _CONFIG_FILES if _is(stat.S_ISREG, host, path)),
    )


def _top_level(host: Path) -> tuple[list[tuple[str, str]], list[str]]:
    """/bin, /sbin and the /lib family: links on a merged host, directories to bind on another."""
    links, binds = [], ["/usr"]
    for name in _PROGRAMS:
        path = host / name
        if path.is_symlink():
            target = os.path.normpath("/" + os.fspath(path.readlink()).lstrip("/"))
            if _within(target, ("/usr",)):
                links.append((f"/{name}", target.lstrip("/")))
        elif path.is_dir():
            binds.append(f"/{name}")
    return links, binds


def _approved(host: Path, path: str) -> str | None:
    """Where an approved directory really is; None when the host has none."""
    real = real_path(host, path)
    if real is None:
        return None
    if real in ("/", "/usr") or (_within(real, _PRIVATE) and real not in _IMAGE_BASED):
        raise SandboxError(
            SandboxErrorKind.INVALID_FILESYSTEM_PLAN,
            "approved_path_leads_out",
            f"{path} is approved, but it is a link to {real}, which jobs must not see",
            resolution=f"make {path} a directory, or approve what it points to by its own path",
        )
    return real


def _shown(host: Path, path: str) -> str | None:
    """The place below /usr where `path` would appear in a job; None when it would not."""
    real = real_path(host, path)
    return real if real is not None and real != "/usr" and _within(real, ("/usr",)) else None


def real_path(host: Path, path: str) -> str | None:
    """Follow the links of `path` with `host` as the root; None when it leads nowhere.

    :raises SandboxError: when the links go round in a circle.
    """
    done, rest = "", [part for part in path.split("/") if part]
    for _ in range(_MAX_LINKS + 64):
        if not rest:
            return done or "/"
        part = rest.pop(0)
        if part == "..":
            done = done.rpartition("/")[0]  # the root's parent is the root
            continue
        here = f"{done}/{part}"
        try:
            mode = os.lstat(f"{host}{here}").st_mode
        except OSError:
            return None
        if not stat.S_ISLNK(mode):
            done = here
            continue
        target = os.readlink(f"{host}{here}")  # noqa: PTH115  keeps the text as it is
        rest = [word for word in target.split("/") if word not in ("", ".")] + rest
        done = "" if target.startswith("/") else done
    raise SandboxError(SandboxErrorKind.INVALID_FILESYSTEM_PLAN, "link_loop", f"the links of {path} never end")


def _within(path: str, places: tuple[str, ...]) -> bool:
    return any(path == place or path.startswith(place + "/") for place in places)


def _is(kind: Callable[[int], bool], host: Path, path: str) -> bool:
    """Whether `path` itself, no link followed, is of `kind`."""
    try:
        return kind(os.lstat(f"{host}{path}").st_mode)
    except OSError:
        return False
