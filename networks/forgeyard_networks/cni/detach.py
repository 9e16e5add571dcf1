"""Take one attachment back: DEL through the whole chain, then a look at what the plugins say is gone."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from ipaddress import IPv4Interface
from pathlib import Path

from forgeyard_host.links import FIRST_INDEX, Address, Links, Veth
from forgeyard_host.netns import NetNamespace, is_nsfs, new_namespace
from forgeyard_model.errors import ForgeyardError, SandboxError, SandboxErrorKind
from forgeyard_networks.cni.attachment import Attachment
from forgeyard_networks.cni.cache import Cache, Entry
from forgeyard_networks.cni.config import Conflist
from forgeyard_networks.cni.leases import Lease, held, lease_directories, release
from forgeyard_networks.cni.plugins import Call, Plugins, explain
from forgeyard_networks.cni.result import parse_result


def namespace_inode(path: str) -> int:
    """Number of the namespace at `path`; 0 for none, or something else: an empty file that a reboot left."""
    try:
        return os.stat(path).st_ino if is_nsfs(Path(path)) else 0  # noqa: PTH116  is_nsfs wants a Path, this does not
    except OSError:
        return 0


@dataclass(frozen=True, slots=True)
class Detacher:
    """What DEL needs besides an entry."""

    plugins: Plugins
    cache: Cache

    async def detach(self, entry: Entry) -> None:
        """Run DEL for `entry` and forget it.

        All plugins are run, in reverse order, also behind one that fails: what it keeps must not keep the others'.

        :raises SandboxError: CLEANUP_FAILED, with every problem; the entry stays, for another try.
        """
        config = entry.config
        if config is None:
            raise _left(entry.attachment, ["its saved configuration can't be read"])
        problems, stand_in = [], None
        try:
            stand_in = await asyncio.to_thread(_stand_in, entry, config)
        except ForgeyardError as error:
            problems.append(explain(error))
        try:
            problems += await self._delete(entry, config, _namespace(entry, stand_in))
        finally:
            if stand_in is not None:
                stand_in.close()
        problems += await asyncio.to_thread(_release, config, entry.attachment)
        if problems:
            raise _left(entry.attachment, problems)
        self.cache.remove(entry.attachment)

    async def _delete(self, entry: Entry, config: Conflist, netns: str) -> list[str]:
        problems = []
        call = Call.of("DEL", entry.attachment, netns, entry.args or {})
        previous = entry.result if config.speaks("0.4.0") else None
        for plugin in reversed(config.plugins):
            document = config.document(plugin, entry.runtime_config or {}, prevResult=previous)
            try:
                await self.plugins.run(plugin.kind, call, document)
            except ForgeyardError as error:
                problems.append(explain(error))
        return problems


def _namespace(entry: Entry, stand_in: NetNamespace | None) -> str:
    """The namespace of `entry` while it is the same one; the path may be another's by now."""
    if stand_in is not None:
        return stand_in.path
    return entry.netns if entry.inode and namespace_inode(entry.netns) == entry.inode else ""


def _stand_in(entry: Entry, config: Conflist) -> NetNamespace | None:
    """A namespace that looks like the one that is gone, for plugins that masquerade. Blocking.

    They find the addresses whose rules they have to remove nowhere but on the interface itself, and without a
    namespace leave the rules behind.
    """
    if _namespace(entry, None) or not any(plugin.raw.get("ipMasq") for plugin in config.plugins):
        return None
    addresses = _addresses(entry, config)
    if not addresses:
        return None
    made = new_namespace()
    links = Links.at(made.fd)
    try:
        pair = Veth(
            entry.attachment.ifname, "peer" if entry.attachment.ifname != "peer" else "far", made.fd, FIRST_INDEX
        )
        links.run(pair, *(Address(FIRST_INDEX, address) for address in addresses))
    except ForgeyardError:
        made.close()
        raise
    finally:
        links.close()
    return made


def _addresses(entry: Entry, config: Conflist) -> list[IPv4Interface]:
    """From the result; of an ADD that never ended, from the leases."""
    if entry.result is not None:
        try:
            return list(parse_result(entry.result).ipv4)
        except ValueError:
            pass  # the leases tell as well
    try:
        found = held(config, entry.attachment)
    except OSError:
        return []
    return [IPv4Interface(lease.address) for lease in found if ":" not in lease.address]


def _release(config: Conflist, attachment: Attachment) -> list[str]:
    """Remove leases that DEL left; what went wrong. Blocking."""

    def mine(lease: Lease) -> bool:
        return lease.belongs_to(attachment)

    problems = []
    for directory in lease_directories(config):
        try:
            release(directory, mine)
        except OSError as error:
            problems.append(f"the leases in {directory} can't be checked: {error}")
    return problems


def _left(attachment: Attachment, problems: list[str]) -> SandboxError:
    return SandboxError(
        SandboxErrorKind.CLEANUP_FAILED,
        "cni_leftovers",
        f"{attachment.container} could not be taken off network {attachment.network} whole",
        details="; ".join(problems),
        resolution="`forgeyard gc` tries again",
    )
