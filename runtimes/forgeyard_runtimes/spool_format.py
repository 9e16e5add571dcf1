"""What a spool holds: chunks for readers, records on disk.

A spool directory holds segments, numbered from 0: ``N.stdout`` and ``N.stderr`` are the raw bytes, ``N.index`` says
when they came; a file is made at its first byte. Segment 0 is the head of the output, the others are its tail, of
which the oldest go first.

    index   = header, record*
    header  = magic "FYSPOOL1", offset of the segment's first byte in stdout, the same in stderr (u64 each)
    record  = time (ns since the epoch, i64), offset in the stream (u64), length (u32), stream (u8), padding

Integers are little endian. Offsets count every byte the job wrote to the stream, also those that were not kept.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal, NamedTuple

StreamName = Literal["stdout", "stderr"]

STDOUT: Final = 0
STDERR: Final = 1
INDEX: Final = 2
STREAMS: Final[tuple[StreamName, StreamName]] = ("stdout", "stderr")

HEADER: Final = struct.Struct("<8sQQ")
MAGIC: Final = b"FYSPOOL1"
RECORD: Final = struct.Struct("<qQIB3x")


@dataclass(frozen=True, slots=True)
class OutputChunk:
    """Up to 64 KiB that arrived together on one stream.

    dropped_before: bytes of this stream between the last chunk and this one that were not kept; with empty `data`
    those at the end of the stream. Lengths and `dropped_before` add up to what the job wrote.
    """

    stream: StreamName
    time: datetime
    data: bytes
    dropped_before: int = 0


@dataclass(frozen=True, slots=True)
class SpoolMark:
    """A moment in the output: bytes written to each stream so far, kept or not."""

    stdout: int
    stderr: int


START: Final = SpoolMark(0, 0)
"""The first byte of an output."""


class Record(NamedTuple):
    """Bytes `offset` to `offset + length` of a stream came at `time` (ns since the epoch), within its granularity."""

    time: int
    offset: int
    length: int
    stream: int

    @property
    def end(self) -> int:
        """Offset of the first byte after it."""
        return self.offset + self.length


def unpack_records(data: bytes | memoryview) -> Iterator[Record]:
    """The records in a whole number of packed ones."""
    return map(Record._make, RECORD.iter_unpack(data))
