"""Reads a tar stream: ustar, pax, and GNU long names and sparse files.

Our own, since the standard library's reader takes headers of any size into memory, recurses on them, and hides the
binary values of pax records; every loop here is bounded by what the stream really holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from forgeyard_model.errors import SandboxError
from forgeyard_oci.image_errors import refused, refused_entry
from forgeyard_oci.unpack_limits import UnpackLimits
from forgeyard_oci.unpack_sparse import SparseMap, checked_map, data_numbers, gnu_numbers, pax_numbers
from forgeyard_oci.unpack_stream import LayerStream

BLOCK: Final = 512
_ZERO: Final = bytes(BLOCK)
_ENDS: Final = b"\0 "  # what follows the digits of a number, nearly always
_MAX_TIME: Final = 1 << 62  # nanoseconds; beyond what filesystems keep, far from overflow
_XATTR: Final = "SCHILY.xattr."


class EntryKind(Enum):
    """What an entry makes."""

    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symbolic link"
    HARDLINK = "hard link"
    DEVICE = "device"
    FIFO = "fifo"


_KINDS: Final = {
    b"0": EntryKind.FILE,
    b"\0": EntryKind.FILE,
    b"7": EntryKind.FILE,
    b"S": EntryKind.FILE,
    b"1": EntryKind.HARDLINK,
    b"2": EntryKind.SYMLINK,
    b"3": EntryKind.DEVICE,
    b"4": EntryKind.DEVICE,
    b"5": EntryKind.DIRECTORY,
    b"6": EntryKind.FIFO,
}
_NO_XATTRS: Final[Mapping[str, bytes]] = {}


@dataclass(slots=True)
class TarEntry:
    """One entry. mtime: nanoseconds. stored: bytes of data that follow. size: bytes of the file, holes included."""

    name: str
    kind: EntryKind
    mode: int
    uid: int
    gid: int
    mtime: int
    stored: int = 0
    size: int = 0
    link: str = ""
    xattrs: Mapping[str, bytes] = field(default_factory=lambda: _NO_XATTRS)
    sparse: SparseMap | None = None


@dataclass(slots=True)
class _Pending:
    """What the headers before an entry's own said about it."""

    records: list[tuple[str, bytes]] = field(default_factory=list)
    name: bytes | None = None
    link: bytes | None = None

    def headers(self) -> dict[str, bytes]:
        headers = dict(self.records)
        if self.name is not None:
            headers.setdefault("path", self.name)
        if self.link is not None:
            headers.setdefault("linkpath", self.link)
        return headers


class TarReader:
    """Iterates over the entries of a layer; `data` gives the bytes of the current one, what is not taken is skipped."""

    def __init__(self, stream: LayerStream, limits: UnpackLimits) -> None:
        self._stream, self._limits = stream, limits
        self._left = self._padding = 0
        self.headers_seen = 0

    def data(self, most: int) -> memoryview:
        """The next bytes of the current entry's data, at most `most`; empty at its end.

        :raises SandboxError: when the stream ends first.
        """
        if not self._left:
            return memoryview(b"")
        piece = self._stream.take(min(most, self._left))
        if not piece:
            raise _bad("it ends within a file")
        self._left -= len(piece)
        return piece

    def __iter__(self) -> Iterator[TarEntry]:
        pending = _Pending()
        while (header := self._next_header()) is not None:
            kind = header[156:157]
            if kind in b"xgLK":
                self._special(kind, header, pending)
                continue
            entry = self._entry(kind, header, pending)
            pending = _Pending()
            if entry is not None:
                yield entry

    def _next_header(self) -> bytes | None:
        self._skip_rest()
        header = self._stream.read(BLOCK)
        if header == _ZERO:
            # One zero block may be followed by another, or by the end; readers differ about anything else.
            if self._stream.read(BLOCK) not in (b"", _ZERO):
                raise _bad("it goes on after its end mark")
            return None
        if not header:
            return None
        if len(header) < BLOCK:
            raise _bad("it ends within a header")
        self.headers_seen += 1
        if self.headers_seen > self._limits.entries:
            raise refused("layer_too_large", f"the layer has more than {self._limits.entries} entries")
        _check_sum(header)
        return header

    def _skip_rest(self) -> None:
        while self.data(BLOCK << 11):
            pass
        if self._padding:
            # A missing pad at the very end is common and harmless.
            self._stream.read(self._padding)
            self._padding = 0

    def _expect(self, stored: int) -> None:
        self._left, self._padding = stored, -stored % BLOCK

    def _special(self, kind: bytes, header: bytes, pending: _Pending) -> None:
        size = number(header[124:136])
        if not 0 <= size <= self._limits.header:
            raise _bad(f"a header of {size} bytes stands in it")
        self._expect(size)
        data = b"".join(iter(lambda: bytes(self.data(size)), b""))
        if kind == b"x":
            pending.records = pax_records(data)
        elif kind == b"L":
            pending.name = data.rstrip(b"\0")
        elif kind == b"K":
            pending.link = data.rstrip(b"\0")
        # Global headers are read past: no image builder relies on them, and docker ignores them too.

    def _entry(self, typeflag: bytes, header: bytes, pending: _Pending) -> TarEntry | None:
        pax = pending.headers()
        name = _text(pax.get("GNU.sparse.name") or pax.get("path") or _ustar_name(header))
        stored = _pax_number(pax, "size", header[124:136])
        if stored < 0:
            raise refused_entry(name, "bad_tar", "has a negative size")
        kind = _KINDS.get(typeflag)
        if kind is None:
            self._skip_unknown(name, typeflag, stored)
            return None
        # Only files carry data, whatever the size field of the others says (POSIX, as Go and GNU tar read it).
        self._expect(stored if kind is EntryKind.FILE else 0)
        if kind is EntryKind.FILE and name.endswith("/"):
            kind = EntryKind.DIRECTORY  # how tars before ustar wrote directories
        entry = TarEntry(
            name,
            kind,
            number(header[100:108]) & 0o7777,
            _pax_number(pax, "uid", header[108:116]),
            _pax_number(pax, "gid", header[116:124]),
            _mtime(pax, header, name),
            link=_text(pax.get("linkpath") or header[157:257].split(b"\0", 1)[0]),
            xattrs={key[len(_XATTR) :]: pax[key] for key in pax if key.startswith(_XATTR)} if pax else _NO_XATTRS,
        )
        if kind is EntryKind.FILE:
            entry.stored = entry.size = stored
            self._read_sparse(entry, typeflag, header, pending, pax)
        return entry

    def _skip_unknown(self, name: str, typeflag: bytes, stored: int) -> None:
        if typeflag != b"V":  # a volume label is the one other thing that GNU tar writes by itself
            raise refused_entry(name, "bad_tar", f"has the unknown type {typeflag!r}")
        self._expect(stored)

    def _read_sparse(
        self, entry: TarEntry, typeflag: bytes, header: bytes, pending: _Pending, pax: Mapping[str, bytes]
    ) -> None:
        if typeflag == b"S":
            entry.size = number(header[483:495])
            numbers = gnu_numbers(header[386:482], 4, number)
            more = header[482]
            while more:
                block = self._block()
                numbers += gnu_numbers(block, 21, number)
                more = block[504]
        elif pax.get("GNU.sparse.major") == b"1" and pax.get("GNU.sparse.minor") == b"0":
            entry.size = _pax_number(pax, "GNU.sparse.realsize", b"")
            numbers, used = data_numbers(self._data_block)
            entry.stored -= used
        else:
            found = pax_numbers(pending.records, pax) if pax else None
            if found is None:
                return
            numbers = found
            entry.size = _pax_number(pax, "GNU.sparse.size", b"")
        entry.sparse = checked_map(numbers, entry.size, entry.stored)

    def _block(self) -> bytes:
        block = self._stream.read(BLOCK)
        if len(block) < BLOCK:
            raise _bad("it ends within a header")
        return block

    def _data_block(self) -> bytes:
        block = b""
        while len(block) < BLOCK:
            piece = self.data(BLOCK - len(block))
            if not piece:
                raise _bad("it ends within a map of a sparse file")
            block += piece
        return block


def number(text: bytes) -> int:
    """A numeric field: octal, or base 256 as GNU tar writes what octal can't hold.

    :raises SandboxError: for anything else.
    """
    if text[:-1].isdigit() and text[-1] in _ENDS:
        try:
            return int(text[:-1], 8)
        except ValueError:  # an 8 or a 9
            pass
    if text[:1] and text[0] & 0x80:
        value = int.from_bytes(bytes([text[0] & 0x7F]) + text[1:], "big")
        return value - (1 << (8 * len(text) - 1)) if text[0] & 0x40 else value
    digits = text.split(b"\0", 1)[0].strip(b" ")
    if not digits:
        return 0
    # int() alone would take signs, prefixes and underscores.
    if digits.translate(None, b"01234567"):
        raise _bad(f"a field holds {digits!r} for a number")
    return int(digits, 8)


def pax_records(data: bytes) -> list[tuple[str, bytes]]:
    """The ``LENGTH KEY=VALUE`` lines of a pax header, values as they are.

    :raises SandboxError: when the lengths don't add up.
    """
    records = []
    at = 0
    while at < len(data):
        space = data.find(b" ", at, at + 8)
        length = data[at : max(space, at)]
        end = at + int(length) if length.isdigit() else 0
        if not space < end <= len(data) or data[end - 1 : end] != b"\n":
            raise _bad("a pax header is broken")
        key, equals, value = data[space + 1 : end - 1].partition(b"=")
        if not equals or not key:
            raise _bad("a pax header is broken")
        records.append((_text(key), value))
        at = end
    return records


def _check_sum(header: bytes) -> None:
    field = header[148:156]
    stated = number(field)
    total = sum(header) - sum(field) + 8 * ord(" ")
    if stated == total:
        return
    # Some old writers summed signed bytes.
    if stated != total - 256 * sum(byte > 127 for byte in header) + 256 * sum(byte > 127 for byte in field):
        raise _bad("a header's checksum is wrong")


def _ustar_name(header: bytes) -> bytes:
    name = header[:100].split(b"\0", 1)[0]
    if header[257:263] == b"ustar\0" and header[345]:
        return header[345:500].split(b"\0", 1)[0] + b"/" + name
    return name


def _pax_number(pax: Mapping[str, bytes], key: str, octal: bytes) -> int:
    text = pax.get(key)
    if not text:
        return number(octal)
    if not text.isdigit() or len(text) > 20:
        raise _bad(f"a pax header holds {text[:40]!r} for {key}")
    return int(text)


def _mtime(pax: Mapping[str, bytes], header: bytes, name: str) -> int:
    text = pax.get("mtime")
    if not text:
        nanoseconds = number(header[136:148]) * 1_000_000_000
    else:
        whole, _, fraction = text.partition(b".")
        digits = whole.removeprefix(b"-")
        if not digits.isdigit() or len(digits) > 20 or (fraction and not fraction.isdigit()):
            raise refused_entry(name, "bad_tar", "has no readable time")
        part = int(fraction[:9].ljust(9, b"0"))
        nanoseconds = int(whole) * 1_000_000_000 + (-part if whole.startswith(b"-") else part)
    return max(-_MAX_TIME, min(_MAX_TIME, nanoseconds))


def _text(data: bytes) -> str:
    # Names are bytes; this form goes through the system calls unchanged.
    return data.decode("utf-8", "surrogateescape")


def _bad(why: str) -> SandboxError:
    return refused("bad_tar", "the layer is not a well-formed tar", details=why)
