"""Test images made of Debian packages: one base layer, and one layer of packages on top of it for each service.

Needs root, mmdebstrap and a Debian mirror when an image is built; nothing of these when it is in the cache.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import build
from build import Layer, LayoutWriter, cached, machine, sha256

HERE = Path(__file__).parent
SUITE = "bookworm"
EPOCH = 1_700_000_000
"""Latest time stamp in a layer: files that the build itself made differ in their times otherwise."""
DEBIAN_DEBS = ("make", "sudo")
"""Packages that lie in the Debian image's /srv/debs, not installed: tests install them without a network."""
PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
BUILD_TIME = 400
"""Seconds after which the installation of packages is given up."""


class CannotBuildError(RuntimeError):
    """An image can't be made here: no root, no tool or no mirror. The message ends with the output's last lines."""


@dataclass(frozen=True)
class Recipe:
    """A layer of Debian packages.

    before, after: shell commands inside, around the installation. options: of apt-get.
    """

    packages: Sequence[str]
    config: Mapping[str, Any]
    before: str = ":"
    after: str = ":"
    options: Sequence[str] = ()
    environment: Sequence[str] = ()


def _without(*paths: str) -> tuple[str, ...]:
    return tuple(f"-oDPkg::Options::=--path-exclude={path}" for path in paths)


_ENTRYPOINT = ["docker-entrypoint.sh"]
_PGDATA = "/var/lib/postgresql/data"
RECIPES: Mapping[str, Recipe] = {
    "postgres": Recipe(
        ("postgresql-15", "tzdata"),
        {
            "Entrypoint": _ENTRYPOINT,
            "Cmd": ["postgres"],
            # PATH once: of two, Docker hands on both, and programs take the first.
            "Env": ["PATH=/usr/lib/postgresql/15/bin:" + PATH.partition("=")[2], f"PGDATA={_PGDATA}"],
            "ExposedPorts": {"5432/tcp": {}},
            "Volumes": {_PGDATA: {}},
            "StopSignal": "SIGINT",
        },
        before="""
            mkdir /etc/postgresql-common
            echo create_main_cluster=false > /etc/postgresql-common/createcluster.conf""",
        after=f"""
            sed -i "s/^#listen_addresses = .*/listen_addresses = '*'/" /usr/share/postgresql/15/postgresql.conf.sample
            mkdir /docker-entrypoint-initdb.d; install -d -o postgres -g postgres -m 0700 {_PGDATA}
            install -d -o postgres -g postgres -m 2775 /var/run/postgresql""",
        # The compiler for long queries is three quarters of the size; the server does without it when it is missing.
        options=(
            *_without(
                "/usr/lib/*/libLLVM*", "/usr/lib/postgresql/15/lib/llvmjit*", "/usr/lib/postgresql/15/lib/bitcode/*"
            ),
            "-oDPkg::Options::=--path-include=/usr/share/zoneinfo/*",
        ),
    ),
    "redis": Recipe(
        ("redis-server",),
        {
            "Entrypoint": _ENTRYPOINT,
            "Cmd": ["redis-server"],
            "ExposedPorts": {"6379/tcp": {}},
            "Volumes": {"/data": {}},
            "WorkingDir": "/data",
        },
        after="install -d -o redis -g redis /data",
    ),
    "rabbitmq": Recipe(
        ("rabbitmq-server",),
        {
            "Entrypoint": _ENTRYPOINT,
            "Cmd": ["rabbitmq-server"],
            "ExposedPorts": {"5672/tcp": {}},
            "Volumes": {"/var/lib/rabbitmq": {}},
        },
        # Every node makes a cookie of its own. PATH leads past Debian's wrapper, which changes users in its own way.
        after="rm -f /var/lib/rabbitmq/.erlang.cookie",
        environment=("PATH=/usr/lib/rabbitmq/bin:" + PATH.partition("=")[2],),
    ),
    "nginx": Recipe(
        ("nginx-light",),
        {
            "Cmd": ["nginx", "-g", "daemon off;"],
            "ExposedPorts": {"80/tcp": {}},
            "StopSignal": "SIGQUIT",
        },
        after="ln -sf /dev/stdout /var/log/nginx/access.log; ln -sf /dev/stderr /var/log/nginx/error.log",
    ),
    "python": Recipe(
        ("python3-minimal", "python3-psycopg", "python3-redis", "python3-pika", "python3-pytest"),
        {"Cmd": ["python3"]},
    ),
    "registry": Recipe(
        ("docker-registry",),
        {
            "Entrypoint": ["docker-registry"],
            "Cmd": ["serve", "/etc/registry.yml"],
            "ExposedPorts": {"5000/tcp": {}},
            "Volumes": {"/var/lib/registry": {}},
        },
    ),
    "containerd": Recipe(
        ("containerd", "runc"),
        {"Cmd": ["containerd"], "Volumes": {"/var/lib/containerd": {}}},
    ),
    # The tests themselves, and pytest, come with the project: see compose-test.yaml.
    "suite": Recipe(
        ("python3-minimal", "python3-psycopg", "python3-redis"),
        {"Cmd": ["forgeyard-suite"]},
    ),
}


def debian_layout(cache: Path) -> tuple[Path, str]:
    """A layout of a minimal Debian made by mmdebstrap, for tests that need a real distribution."""
    # What no test reads would be half of the files to unpack.
    without = (f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "locale", "man", "zoneinfo", "info"))
    fetch = f"mkdir /srv/debs && cd /srv/debs && apt-get -q download {' '.join(DEBIAN_DEBS)} && chmod a+r /srv/debs/*"
    # The names of the machine that builds are none of the image's.
    hook = f"--customize-hook=chroot \"$1\" sh -ec '{fetch}; rm -f /etc/resolv.conf /etc/hostname'"
    command = ["mmdebstrap", "--variant=minbase", "--format=tar", *without, hook, SUITE]

    def make(path: Path) -> str:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".debian-") as work:
            file, tree = Path(work, "debian.tar"), Path(work, "tree")
            tree.mkdir(0o755)
            _run("debian", [*command, str(file)])
            _run("debian", ["tar", "-x", "-C", str(tree), "--exclude=./dev/*", "--numeric-owner", "-f", str(file)])
            layer = tree_layer(tree, file)
        writer = LayoutWriter(path)
        # Not compressed: it is read from the disk it was written to, and unpacks in half the time.
        image = writer.image([writer.layer(layer, "")], {"Env": [PATH], "Cmd": ["bash"]}, architecture=machine())
        writer.finish(image)
        return str(image["digest"])

    # It takes half a minute and a mirror: built anew when its own recipe changes, not when some other image's does.
    return cached(cache, "debian", _recipe(" ".join(command), debian_layout), make)


def service_layout(cache: Path, name: str) -> tuple[Path, str]:
    """A layout of the Debian image with the packages of RECIPES[name] on top."""
    recipe = RECIPES[name]
    base, base_digest = debian_layout(cache)

    def make(path: Path) -> str:
        writer = LayoutWriter(path)
        lowest = _only_layer(base, base_digest)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{name}-") as work:
            upper = _install(name, recipe, base / _blob(lowest.blob["digest"]), Path(work))
            layer = writer.layer(tree_layer(upper, Path(work, "layer.tar")), "gzip")
        config = {"Env": [PATH, *recipe.environment], **recipe.config}
        image = writer.image([writer.adopt(lowest, base), layer], config, architecture=machine())
        writer.finish(image)
        return str(image["digest"])

    files = [path.read_text() for path in sorted(files_of(name).rglob("*")) if path.is_file()]
    text = "".join([base_digest, repr(recipe), (HERE / "install.sh").read_text(), *files])
    return cached(cache, name, _recipe(text, service_layout, _install), make)


def files_of(name: str) -> Path:
    """Our own files that go into an image, as they lie in it."""
    return HERE / "files" / name


def variant_layout(cache: Path, name: str, of: str, config: Mapping[str, Any]) -> tuple[Path, str]:
    """The image `of` under another name, with further words in its config; its layers are shared."""
    base, digest = service_layout(cache, of)

    def make(path: Path) -> str:
        manifest = _document(base, digest)
        file = _document(base, manifest["config"]["digest"])
        pairs = zip(manifest["layers"], file["rootfs"]["diff_ids"], strict=True)
        writer = LayoutWriter(path)
        layers = [writer.adopt(Layer(blob, diff_id), base) for blob, diff_id in pairs]
        image = writer.image(layers, {**file["config"], **config}, architecture=machine())
        writer.finish(image)
        return str(image["digest"])

    return cached(cache, name, sha256(f"{digest} {config}".encode()), make)


def _install(name: str, recipe: Recipe, base: Path, work: Path) -> Path:
    """Install the recipe's packages on the tree in tar `base`; the directory of what changed, as overlayfs keeps it."""
    lower, upper, scratch, root = (work / part for part in ("lower", "upper", "scratch", "root"))
    for folder in (lower, upper, scratch, root):
        folder.mkdir(0o755)
    files = files_of(name) if files_of(name).is_dir() else scratch.parent / "nothing"
    files.mkdir(exist_ok=True)
    _run(name, ["tar", "-x", "-C", str(lower), "--numeric-owner", "-f", str(base)])
    folders = map(str, (lower, upper, scratch, root, files))
    words = (recipe.before, recipe.after, " ".join(recipe.packages), *recipe.options)
    # The mount namespace of a process that ends takes its mounts with it.
    _run(name, ["unshare", "--mount", "--", str(HERE / "install.sh"), *folders, *words])
    return upper


def tree_layer(tree: Path, file: Path) -> bytes:
    """The tar of a tree, or of the upper directory of an overlay, whose marks become those of layers.

    Sorted, with numeric owners and no times after EPOCH. `file` is where it is written first.
    """
    with tarfile.open(file, "w", format=tarfile.PAX_FORMAT) as archive:
        for folder, directories, files in os.walk(tree):
            directories.sort()
            _add(archive, Path(folder), tree)
            for name in sorted([*files, *(name for name in directories if os.path.islink(f"{folder}/{name}"))]):
                _add(archive, Path(folder, name), tree)
    return file.read_bytes()


def _add(archive: tarfile.TarFile, path: Path, tree: Path) -> None:
    status = path.lstat()
    name = str(path.relative_to(tree))
    if stat.S_ISCHR(status.st_mode) and status.st_rdev == 0:
        archive.addfile(tarfile.TarInfo(build.whiteout(name).name))
        return
    if stat.S_ISSOCK(status.st_mode):
        return
    info = archive.gettarinfo(str(path), name)
    info.uname = info.gname = ""
    info.mtime = min(int(status.st_mtime), EPOCH)
    attributes = {
        key: os.getxattr(path, key, follow_symlinks=False) for key in os.listxattr(path, follow_symlinks=False)
    }
    info.pax_headers = {
        f"SCHILY.xattr.{key}": value.decode("utf-8", "surrogateescape")
        for key, value in attributes.items()
        if not key.startswith("trusted.overlay.")
    }
    if info.isreg():
        with path.open("rb") as content:
            archive.addfile(info, content)
    else:
        archive.addfile(info)
    if "trusted.overlay.opaque" in attributes:
        archive.addfile(tarfile.TarInfo(build.opaque(name).name))


def _run(name: str, command: Sequence[str]) -> None:
    """Run a command of a build; its output is shown only when it fails."""
    if shutil.which(command[0]) is None:
        raise CannotBuildError(f"the image {name} needs {command[0]}: ./dev setup installs it")
    if os.geteuid() != 0:
        raise CannotBuildError(f"the image {name} is built by root alone: run as root, or with sudo")
    environ = {**os.environ, "SOURCE_DATE_EPOCH": str(EPOCH)}
    run = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=BUILD_TIME,
        env=environ,
        check=False,
    )
    if run.returncode != 0:
        lines = "\n".join(run.stdout.splitlines()[-15:])
        raise CannotBuildError(f"building the image {name} failed ({command[0]}); it needs a Debian mirror:\n{lines}")


def _recipe(text: str, *functions: Any) -> str:
    """The digest of what decides how an image comes out."""
    parts = (*functions, tree_layer, _add, LayoutWriter.layer, LayoutWriter.image)
    return sha256((text + "".join(map(inspect.getsource, parts))).encode())


def _only_layer(layout: Path, digest: str) -> Layer:
    manifest = _document(layout, digest)
    (diff_id,) = _document(layout, manifest["config"]["digest"])["rootfs"]["diff_ids"]
    return Layer(manifest["layers"][0], diff_id)


def _document(layout: Path, digest: str) -> Any:
    return json.loads((layout / _blob(digest)).read_text())


def _blob(digest: str) -> str:
    return f"blobs/sha256/{digest.partition(':')[2]}"
