"""One network by CNI: attach a container's namespace, check it, take it off again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Self

from forgeyard_model.errors import ForgeyardError, InvalidRequest
from forgeyard_networks.cni.attachment import Attachment
from forgeyard_networks.cni.cache import DEFAULT_CACHE, Cache, Entry
from forgeyard_networks.cni.claims import DEFAULT_CLAIMS, Claims
from forgeyard_networks.cni.config import Conflist
from forgeyard_networks.cni.detach import Detacher, namespace_inode
from forgeyard_networks.cni.failures import setup_failed
from forgeyard_networks.cni.leases import held
from forgeyard_networks.cni.load import DEFAULT_CONF_DIRS, load_network
from forgeyard_networks.cni.plugins import DEFAULT_SECONDS, Call, Plugins, plugin_dirs
from forgeyard_networks.cni.result import CniResult, parse_result
from forgeyard_networks.tasks import to_the_end

log: Final = logging.getLogger("forgeyard.networks.cni")


class CniNetwork:
    """A network that plugins make, kept open by an executor. Read once: a later edit shows in the next executor.

    Plugins run in the network namespace of the thread whose loop calls: that is the host to them.

    :param dirs: where plugins are; by default CNI_PATH and the usual places.
    :param cache_dir: what is attached, below the state directory of the executor.
    :param claims_dir: locks that all executors of the host share.
    :param seconds: how long one plugin may run.
    """

    def __init__(
        self,
        conflist: Conflist,
        dirs: Sequence[str] | None = None,
        cache_dir: str = DEFAULT_CACHE,
        *,
        claims_dir: str = DEFAULT_CLAIMS,
        seconds: float = DEFAULT_SECONDS,
    ) -> None:
        self.conflist = conflist
        self._plugins = Plugins(plugin_dirs() if dirs is None else dirs, seconds)
        self._cache = Cache(cache_dir)
        self._claims = Claims(claims_dir)
        self._detacher = Detacher(self._plugins, self._cache)
        self._spoken: Conflist | None = None

    @classmethod
    def named(cls, name: str, conf_dirs: Sequence[str] = DEFAULT_CONF_DIRS, **options: Any) -> Self:
        """The operator's network of that name; `options` as the constructor has them.

        :raises InvalidRequest: as `load_network`.
        """
        return cls(load_network(name, conf_dirs), **options)

    async def add(
        self,
        container: str,
        netns: str,
        ifname: str = "eth0",
        *,
        args: Mapping[str, str] | None = None,
        runtime_config: Mapping[str, Any] | None = None,
    ) -> CniResult:
        """Attach the namespace at `netns`.

        :param args: CNI_ARGS. `runtime_config`: by capability, such as portMappings.
        :raises InvalidRequest: a name that CNI has none of, or a capability that no plugin here has.
        :raises SandboxError: NETWORK_SETUP_FAILED: the plugin's own error. The whole chain was taken back; what could
            not be is in a note of the error, and found by `reconcile`.
        """
        attachment = Attachment.checked(self.conflist.name, container, ifname)
        self._check_capabilities(runtime_config or {})
        inode = namespace_inode(netns)
        if not inode:
            raise setup_failed("cni_namespace", f"no network namespace is at {netns}")
        config = await self._config()
        self._claims.take(attachment)
        entry = Entry(attachment, False, netns, inode, args or {}, runtime_config or {}, config)
        try:
            self._cache.begin(entry)
        except ForgeyardError:
            self._claims.drop(attachment)
            raise
        return await self._add(entry, config)

    async def delete(self, container: str, ifname: str = "eth0") -> None:
        """Take it off, with the configuration and the result that ADD had. What is not attached is no error.

        :raises SandboxError: CLEANUP_FAILED, with all problems; it can be tried again.
        """
        attachment = Attachment.checked(self.conflist.name, container, ifname)
        entry = self._cache.read(attachment)
        if entry is None and await self._has_lease(attachment):
            entry = Entry(attachment)  # its file was lost, its lease was not
        try:
            if entry is not None:
                await self._detacher.detach(entry if entry.config else replace(entry, config=await self._config()))
        finally:
            self._claims.drop(attachment)

    async def check(self, container: str, ifname: str = "eth0") -> bool:
        """Have the plugins check the attachment.

        :return: False when the network's configuration or version rules that out, and nothing was run.
        :raises SandboxError: NETWORK_SETUP_FAILED: what is wrong, or that nothing is attached.
        """
        attachment = Attachment.checked(self.conflist.name, container, ifname)
        entry = self._cache.read(attachment)
        if entry is None or not entry.added or entry.config is None:
            raise setup_failed("cni_not_attached", f"{container} is not on network {attachment.network}")
        config = entry.config
        if config.disable_check or not config.speaks("0.4.0"):
            return False
        call = Call.of("CHECK", attachment, entry.netns, entry.args or {})
        for plugin in config.plugins:
            document = config.document(plugin, entry.runtime_config or {}, prevResult=entry.result)
            await self._plugins.run(plugin.kind, call, document)
        return True

    async def status(self) -> None:
        """Whether the network can take an ADD: all programs are there and, from version 1.1 on, say so themselves.

        :raises SandboxError: NETWORK_SETUP_FAILED, reason cni_not_ready where a plugin says that it is not.
        """
        for kind in self.conflist.programs:
            self._plugins.find(kind)
        config = await self._config()
        if config.speaks("1.1.0"):
            for plugin in config.plugins:
                await self._plugins.run(plugin.kind, Call("STATUS"), config.document(plugin, {}))

    async def versions(self) -> dict[str, frozenset[str]]:
        """What each program of the network speaks.

        :raises SandboxError: NETWORK_SETUP_FAILED.
        """
        return {kind: await self._plugins.versions(kind) for kind in self.conflist.programs}

    def pending(self) -> list[Attachment]:
        """Attachments of this network whose ADD has not ended, or never will: its executor may be gone.

        :raises SandboxError: NETWORK_SETUP_FAILED.
        """
        mine = (entry for entry in self._cache.entries() if entry.attachment.network == self.conflist.name)
        return [entry.attachment for entry in mine if not entry.added]

    def close(self) -> None:
        """Let go of the locks. What is still attached stays so, for `reconcile`."""
        self._claims.close()

    async def _has_lease(self, attachment: Attachment) -> bool:
        try:
            return bool(await asyncio.to_thread(held, self.conflist, attachment))
        except OSError as error:
            brief = f"the leases of network {attachment.network} can't be read"
            raise setup_failed("cni_leases", brief, details=str(error)) from error

    async def _config(self) -> Conflist:
        if self._spoken is None:
            self._spoken = await self._plugins.negotiate(self.conflist)
        return self._spoken

    async def _add(self, entry: Entry, config: Conflist) -> CniResult:
        call = Call.of("ADD", entry.attachment, entry.netns, entry.args or {})
        try:
            for plugin in config.plugins:
                document = config.document(plugin, entry.runtime_config or {}, prevResult=entry.result)
                printed = await self._plugins.run(plugin.kind, call, document)
                result = _parsed(plugin.kind, printed)
                # Kept after each: a plugin in the middle finds what it made by the result that it was given.
                entry = replace(entry, result=printed, added=plugin is config.plugins[-1])
                self._cache.update(entry)
        except BaseException as error:
            await to_the_end(self._take_back(entry, error))
            raise
        return result

    async def _take_back(self, entry: Entry, error: BaseException) -> None:
        try:
            await self._detacher.detach(entry)
        except ForgeyardError as left:
            error.add_note(str(left))
            log.warning("%s", left)
        finally:
            self._claims.drop(entry.attachment)

    def _check_capabilities(self, runtime_config: Mapping[str, Any]) -> None:
        for name in runtime_config:
            if name not in self.conflist.capabilities:
                cure = f"no plugin of network {self.conflist.name} declares this capability"
                raise InvalidRequest("cni runtime config", name, cure)


def _parsed(kind: str, printed: Mapping[str, Any] | None) -> CniResult:
    if printed is None:
        raise setup_failed("cni_plugin_garbage", f"CNI plugin {kind} printed no result")
    try:
        return parse_result(printed)
    except ValueError as error:
        brief = f"CNI plugin {kind} printed a result that is none: {error}"
        raise setup_failed("cni_plugin_garbage", brief) from error
