"""Bounds on one layer, so that a small download can't fill a disk or run for ever."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UnpackLimits:
    """Far above what real images have; whoever meets one names it in the error.

    entries: tar members. expanded: bytes, of the tar and of the files in it (holes count). ratio: expanded to
    compressed, looked at once `ratio_from` bytes came out. name: bytes of one path. depth: its components.
    header: bytes of one pax header or GNU long name. ids: uids and gids that a sandbox maps, from 0.
    """

    entries: int = 2_000_000
    expanded: int = 64 << 30
    ratio: int = 200
    ratio_from: int = 512 << 20
    name: int = 4096
    depth: int = 255
    header: int = 1 << 20
    ids: int = 65536
