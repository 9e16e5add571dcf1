"""Process mode's root filesystem: read-only binds of what runs programs, over a small private skeleton.

What is not put in is not there: no /etc/shadow, /root, /home of others, /var, agent state, control socket or other
workspace. The skeleton is a directory named by its digest, built once per state of the host and shared by all jobs.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from forgeyard_model.capabilities import ExecutorKind
from forgeyard_model.errors import SandboxError, SandboxErrorKind
from forgeyard_model.plan import RootfsBind, RootfsPlan
from forgeyard_process_shim import hostroot_rules as rules
from forgeyard_process_shim.hostroot_assemble import COVERS, ROOT, Skeleton, assemble, bare_skeleton, etc_names
from forgeyard_process_shim.hostroot_cache import Record, building, load_record, publish, save_record, stamp_of
from forgeyard_process_shim.hostroot_layout import Layout, read_layout
from forgeyard_process_shim.hostroot_synthetic import EXTRA_WRITABLE, HOSTNAME, HOSTS, JOB_USER, RESOLV_CONF, hosts_file
from forgeyard_process_shim.hostroot_tree import digest

__all__ = ["EXTRA_WRITABLE", "HOSTNAME", "HOSTS", "RESOLV_CONF", "HostRootfs", "hosts_file"]

_FORMAT: Final = 1  # raise it when a skeleton is put together otherwise from the same inputs


class HostRootfs:
    """The host rootfs of one executor.

    :param cache_dir: where skeletons live, such as <state>/rootfs; every parent must be open to pass through (o+x).
    :param local: show /usr/local, which an approval names.
    :param opt: show /opt, which an approval names.
    :param host_root: the tree that is looked at; anything but / is for tests.
    """

    def __init__(self, cache_dir: Path, *, local: bool = False, opt: bool = False, host_root: Path = Path("/")) -> None:
        self._cache = cache_dir
        self._host = host_root
        self._local = local
        self._opt = opt
        self._opened: tuple[RootfsPlan, Record] | None = None

    def plan(self) -> RootfsPlan:
        """The root as data. The first call looks at the host, and builds the skeleton if none fits; later ones don't.

        A host that changed since is noticed by the next HostRootfs, under another digest: jobs that run on this
        one keep what they have.

        :raises SandboxError: INVALID_FILESYSTEM_PLAN when the host can't serve as a root, INTERNAL when the
            skeleton could not be written.
        """
        return self._open()[0]

    def skipped(self) -> tuple[rules.Skipped, ...]:
        """Host configuration that was looked at and left out, with the reason. Raises as `plan`."""
        return self._open()[1].skipped

    def dangling(self) -> tuple[str, ...]:
        """Links of /usr, as "link -> target", that work on the host and lead nowhere in a job. Raises as `plan`."""
        return self._open()[1].dangling

    def _open(self) -> tuple[RootfsPlan, Record]:
        if self._opened is None:
            layout = read_layout(self._host, local=self._local, opt=self._opt)
            record = self._record(layout)
            self._opened = self._plan(layout, record), record
        return self._opened

    def _record(self, layout: Layout) -> Record:
        bare = bare_skeleton(self._host, layout)
        key = hashlib.sha256(repr((_FORMAT, str(self._host), layout, rules.recipe(), digest(bare.stored()))).encode())
        file = self._cache / f"{key.hexdigest()[:32]}.json"
        if (record := self._current(file)) is not None:
            return record
        try:
            with building(self._cache):
                # another process may have built it while this one waited
                return self._current(file) or self._build(layout, bare, file)
        except OSError as error:
            raise SandboxError(
                SandboxErrorKind.INTERNAL,
                "host_rootfs_not_built",
                "the root for process mode could not be built",
                details=f"{self._cache}: {error}",
                resolution="free some disk space, or check who owns the state directory",
            ) from error

    def _current(self, file: Path) -> Record | None:
        """The record, while the host is as it was and the skeleton is there."""
        record = load_record(file)
        if record is None or not (self._cache / record.digest).is_dir():
            return None
        return record if stamp_of(record.inputs, etc_names(self._host)) == record.stamp else None

    def _build(self, layout: Layout, bare: Skeleton, file: Path) -> Record:
        tree, record = assemble(self._host, layout, bare)
        publish(tree, self._cache, record.digest)
        save_record(file, record)
        return record

    def _plan(self, layout: Layout, record: Record) -> RootfsPlan:
        root = f"{self._cache.absolute() / record.digest}/{ROOT}"
        shown = (RootfsBind(_host_path(self._host, path), path) for path in layout.binds)
        covers = sorted((*layout.hidden_dirs, *layout.config_dirs, *layout.hidden_files))
        return RootfsPlan(
            kind=ExecutorKind.PROCESS,
            lowers=(root,),
            identity=f"sha256:{record.digest}",
            binds=(*shown, *(RootfsBind(f"{root}{COVERS}{path}", path) for path in covers)),
            writable=False,
            user=JOB_USER,
        )


def _host_path(host: Path, path: str) -> str:
    return path if host == Path("/") else f"{host}{path}"
