"""Put a skeleton together in memory: what is ours, what is copied, and what covers parts of the binds."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forgeyard_process_shim.hostroot_cache import Record, changed_since, stamp_of
from forgeyard_process_shim.hostroot_etc import ConfigCopy
from forgeyard_process_shim.hostroot_layout import Layout
from forgeyard_process_shim.hostroot_rules import WANTED
from forgeyard_process_shim.hostroot_synthetic import synthetic_tree
from forgeyard_process_shim.hostroot_tree import Tree, digest, directory, link, text, with_parents
from forgeyard_process_shim.hostroot_usr import scan_usr

ROOT: Final = "rootfs"
COVERS: Final = "-covers"
"""Added to the root's path it gives the directory of the covers.

They lie beside the root and not in it, since a runtime mounts onto the root's own path: a source below its /usr would
be the host's /usr by then, and the cover would show what it is there to hide.
"""
_SHELLS: Final = ("/bin/sh", "/bin/bash", "/bin/dash", "/bin/zsh")


@dataclass(frozen=True, slots=True)
class Skeleton:
    """Two trees: the root itself, and the covers by the path that each is laid over."""

    root: Tree
    covers: Tree

    def stored(self) -> Tree:
        """The one tree that is written: rootfs and rootfs-covers."""
        inside = {f"/{ROOT}{path}": entry for path, entry in self.root.items()}
        beside = {f"/{ROOT}{COVERS}{path}": entry for path, entry in self.covers.items()}
        return with_parents(inside | beside | {f"/{ROOT}{COVERS}": directory()})


def bare_skeleton(host: Path, layout: Layout) -> Skeleton:
    """A skeleton before anything is copied into it: cheap, and the same as long as the layout is."""
    shells = tuple(shell for shell in _SHELLS if os.path.lexists(f"{host}{layout.canonical(shell)}"))
    root = synthetic_tree(shells)
    root |= {path: directory() for path in layout.binds if not path.startswith("/usr/")}
    root |= {path: link(target) for path, target in layout.links}
    covers = {path: directory() for path in (*layout.hidden_dirs, *layout.config_dirs)}
    covers |= {path: text("") for path in layout.hidden_files}
    return Skeleton(root, covers)


def etc_names(host: Path) -> list[str]:
    """The names in /etc. /etc itself changes with every account and lease: which names it has is what counts."""
    try:
        return sorted(os.listdir(host / "etc"))  # noqa: PTH208  names alone
    except FileNotFoundError:
        return []


def assemble(host: Path, layout: Layout, bare: Skeleton) -> tuple[Tree, Record]:
    """Read the host and make the whole: the tree to store, and what there is to remember of it.

    :raises SandboxError: when far too much would be copied.
    """
    started = time.time_ns()
    links = scan_usr(host, layout)
    copies = [ConfigCopy(host, path, layout) for path in ("/etc", *layout.config_dirs)]
    etc, *others = copies
    etc.collect(WANTED, links.etc_targets)
    for other in others:
        other.collect(("*",))
    inputs = (*links.inputs, *(path for copy in copies for path in copy.inputs))
    # what changed while it was read cannot be trusted: without a stamp the next open builds again
    stamp = "" if changed_since(inputs, started) else stamp_of(inputs, etc_names(host))
    copied = {path: entry for other in others for path, entry in other.tree.items()}
    tree = Skeleton(etc.tree | bare.root, copied | bare.covers).stored()  # ours wins over the host's
    record = Record(
        digest=digest(tree, layout.binds),
        inputs=inputs,
        stamp=stamp,
        skipped=tuple(item for copy in copies for item in copy.skipped),
        dangling=tuple(f"{path} -> {target}" for path, target in links.leaving),
    )
    return tree, record
