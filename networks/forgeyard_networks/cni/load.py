"""Network configurations by name, out of directories that an operator fills."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from forgeyard_model.errors import InvalidRequest
from forgeyard_networks.cni.config import Conflist, parse_conflist

DEFAULT_CONF_DIRS: Final = ("/etc/cni/net.d",)
_SUFFIXES: Final = (".conflist", ".conf", ".json")
_LARGEST: Final = 1 << 20


def load_network(name: str, conf_dirs: Sequence[str] = DEFAULT_CONF_DIRS) -> Conflist:
    """The first configuration of that name: directories in order, in each the lists first, then by file name.

    Files with other networks need not be right, since they are somebody else's.

    :raises InvalidRequest: there is none, or its file is wrong.
    """
    broken: list[InvalidRequest] = []
    others: list[str] = []
    for path in (path for directory in conf_dirs for path in _files(Path(directory))):
        try:
            found = _read(path)
        except InvalidRequest as error:
            broken.append(error)
            continue
        if found.name == name:
            return found
        others.append(found.name)
    if broken:
        raise broken[0]
    known = f"there is {', '.join(sorted(set(others))[:10])}" if others else "no network is configured"
    raise InvalidRequest("cni network", name, f"put its conflist into {' or '.join(conf_dirs)}; {known}")


def list_networks(conf_dirs: Sequence[str] = DEFAULT_CONF_DIRS) -> tuple[list[Conflist], list[InvalidRequest]]:
    """Every network that `load_network` finds, and what is wrong with the files of which none can be read."""
    found: dict[str, Conflist] = {}
    broken: list[InvalidRequest] = []
    for path in (path for directory in conf_dirs for path in _files(Path(directory))):
        try:
            conflist = _read(path)
        except InvalidRequest as error:
            broken.append(error)
        else:
            found.setdefault(conflist.name, conflist)
    return list(found.values()), broken


def _files(directory: Path) -> list[Path]:
    try:
        inside = [path for path in directory.iterdir() if path.suffix in _SUFFIXES and path.is_file()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise InvalidRequest("cni conf dir", directory, f"make it readable: {error.strerror}") from error
    return sorted(inside, key=lambda path: (path.suffix != ".conflist", path.name))


def _read(path: Path) -> Conflist:
    try:
        with path.open("rb") as file:
            text = file.read(_LARGEST + 1)
    except OSError as error:
        raise InvalidRequest(str(path), error.strerror, "make the file readable for the executor") from error
    if len(text) > _LARGEST:
        raise InvalidRequest(str(path), f"over {_LARGEST} bytes", "a network configuration is smaller")
    return parse_conflist(text, str(path))
