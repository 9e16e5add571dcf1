"""The plugins of a host: found by name, executed by the protocol (CNI specification, "Execution Protocol")."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from forgeyard_model.errors import ForgeyardError, SandboxError
from forgeyard_networks.cni.attachment import Attachment, cni_args
from forgeyard_networks.cni.config import SPOKEN, Conflist
from forgeyard_networks.cni.execute import OUTPUT_LIMIT, Finished, execute
from forgeyard_networks.cni.failures import one_line, plugin_failed, setup_failed

DEFAULT_PLUGIN_DIRS: Final = ("/opt/cni/bin", "/usr/lib/cni")
DEFAULT_SECONDS: Final = 60.0
_PATH: Final = "/usr/sbin:/usr/bin:/sbin:/bin"  # plugins call iptables and the like


def plugin_dirs(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Where plugins are: CNI_PATH where it is set, then the usual places."""
    named = [part for part in environ.get("CNI_PATH", "").split(":") if part.startswith("/")]
    return tuple(dict.fromkeys((*named, *DEFAULT_PLUGIN_DIRS)))


@dataclass(frozen=True, slots=True)
class Call:
    """One command, less the plugin: what goes into its environment. `netns`: "" when there is none any more."""

    command: str
    attachment: Attachment | None = None
    netns: str = ""
    args: str = ""

    @classmethod
    def of(cls, command: str, attachment: Attachment, netns: str, args: Mapping[str, str]) -> Call:
        """For one attachment."""
        return cls(command, attachment, netns, cni_args(args))


class Plugins:
    """The programs in some directories.

    :param dirs: searched in order.
    :param seconds: how long one of them may run.
    """

    def __init__(self, dirs: Sequence[str], seconds: float = DEFAULT_SECONDS) -> None:
        self._dirs = tuple(dirs)
        self._seconds = seconds
        self._versions: dict[tuple[str, int, int], frozenset[str]] = {}

    def find(self, kind: str) -> str:
        """Path of the plugin `kind`.

        :raises SandboxError: NETWORK_SETUP_FAILED, reason cni_plugin_missing.
        """
        if "/" not in kind and kind not in ("", ".", ".."):
            for path in (f"{directory}/{kind}" for directory in self._dirs):
                if os.access(path, os.X_OK) and Path(path).is_file():
                    return path
        raise setup_failed(
            "cni_plugin_missing",
            f"there is no CNI plugin {kind}",
            details=f"searched {', '.join(self._dirs)}",
            resolution="install it there, or name its directory as plugin directory",
        )

    async def run(self, kind: str, call: Call, document: Mapping[str, Any]) -> dict[str, Any] | None:
        """Execute `kind`; what it printed, or None for nothing.

        :raises SandboxError: NETWORK_SETUP_FAILED, naming plugin, command and network.
        """
        path = self.find(kind)
        who = f"CNI plugin {kind} ({call.command} of network {document.get('name', '')})"
        try:
            finished = await execute(path, self._env(call), json.dumps(document).encode(), self._seconds)
        except TimeoutError as error:
            brief = f"{who} did not end within {self._seconds:g} s and was killed"
            raise setup_failed("cni_plugin_timeout", brief, details=path) from error
        except OSError as error:
            raise setup_failed(
                "cni_plugin_broken", f"{who} can't be executed: {error.strerror}", details=path
            ) from error
        return _printed(who, finished)

    async def versions(self, kind: str) -> frozenset[str]:
        """What the plugin says it speaks; asked once for each program.

        :raises SandboxError: NETWORK_SETUP_FAILED.
        """
        path = self.find(kind)
        state = os.stat(path)  # noqa: PTH116  a microsecond
        key = (path, state.st_ino, state.st_mtime_ns)
        if key not in self._versions:
            self._versions[key] = await self._ask_versions(kind)
        return self._versions[key]

    async def negotiate(self, config: Conflist) -> Conflist:
        """`config` at the newest version that it offers and all its plugins speak.

        One that offers a single version is not negotiated: the plugins are not asked, they refuse for themselves.

        :raises SandboxError: NETWORK_SETUP_FAILED, reason cni_version.
        """
        if len(config.versions) == 1:
            return config
        spoken = {kind: await self.versions(kind) for kind in config.programs}
        common = [version for version in config.versions if all(version in known for known in spoken.values())]
        if not common:
            told = "; ".join(f"{kind} speaks {', '.join(sorted(known))}" for kind, known in spoken.items())
            brief = f"the plugins of network {config.name} have no version in common with its configuration"
            raise setup_failed("cni_version", brief, details=f"it offers {', '.join(config.versions)}; {told}")
        return config.at(common[-1])

    async def _ask_versions(self, kind: str) -> frozenset[str]:
        from pydantic import ValidationError

        from forgeyard_networks.cni.wire import VersionModel

        printed = await self.run(kind, Call("VERSION"), {"cniVersion": SPOKEN[-1]})
        try:
            return frozenset(VersionModel.model_validate(printed).supportedVersions)
        except ValidationError as error:
            brief = f"CNI plugin {kind} does not say which versions it speaks"
            raise setup_failed("cni_plugin_garbage", brief, details=str(printed)) from error

    def _env(self, call: Call) -> dict[str, str]:
        env = {"PATH": _PATH, "CNI_COMMAND": call.command, "CNI_PATH": ":".join(self._dirs)}
        if call.attachment is not None:
            env |= {
                "CNI_CONTAINERID": call.attachment.container,
                "CNI_IFNAME": call.attachment.ifname,
                "CNI_NETNS": call.netns,
                "CNI_ARGS": call.args,
            }
        return env


def _printed(who: str, finished: Finished) -> dict[str, Any] | None:
    if finished.overflowed:
        brief = f"{who} printed more than {OUTPUT_LIMIT} bytes"
        raise setup_failed("cni_plugin_garbage", brief, details=_text(finished.stdout))
    if finished.code != 0:
        raise _reported(who, finished)
    if not finished.stdout.strip():
        return None
    found = _object(finished.stdout)
    if found is None:
        brief = f"{who} ended well, but printed something else than a JSON object"
        raise setup_failed("cni_plugin_garbage", brief, details=_text(finished.stdout))
    return found


def _reported(who: str, finished: Finished) -> SandboxError:
    """From an exit that is not 0, with or without the JSON that should come with it."""
    from pydantic import ValidationError

    from forgeyard_networks.cni.wire import ErrorModel

    try:
        told = ErrorModel.model_validate(_object(finished.stdout))
    except ValidationError:
        how = f"exit {finished.code}" if finished.code > 0 else f"signal {-finished.code}"
        printed = _text(finished.stderr) or _text(finished.stdout) or "it printed nothing"
        return setup_failed("cni_plugin_failed", f"{who} failed with {how} and no CNI error", details=printed)
    return plugin_failed(who, told.code, told.msg, told.details or _text(finished.stderr))


def _object(printed: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(printed)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _text(printed: bytes) -> str:
    """The end of it, where programs say what went wrong."""
    return one_line(printed[-2000:].decode("utf-8", "replace"))


def explain(error: ForgeyardError) -> str:
    """One line of a list of problems."""
    return one_line(str(error))
