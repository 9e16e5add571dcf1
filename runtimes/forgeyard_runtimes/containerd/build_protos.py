"""Makes the checked-in descriptors and type stubs from protos/*.proto.

    python -m forgeyard_runtimes.containerd.build_protos [--check]

Message classes are made when they are first used, from descriptors, and not from generated Python code: such code
refuses to run beside a protobuf of another major version, and registers its names where another client of
containerd in the same process would register them too.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PROTOS: Final = Path(__file__).parent / "protos"
DESCRIPTORS: Final = "descriptors.binpb"
_ROOT: Final = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Generated:
    """What the compiler makes: one set of descriptors, and a stub by file name."""

    descriptors: bytes
    stubs: dict[str, str]

    def differences(self, folder: Path = PROTOS) -> tuple[str, ...]:
        """Names of files in `folder` that are not what was generated, or are of no proto file any more."""
        wanted = {DESCRIPTORS: self.descriptors, **{name: text.encode() for name, text in self.stubs.items()}}
        there = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".pyi", ".binpb")}
        return tuple(sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name)))

    def write(self, folder: Path = PROTOS) -> None:
        """Replace what is checked in."""
        for path in folder.glob("*.pyi"):
            path.unlink()
        (folder / DESCRIPTORS).write_bytes(self.descriptors)
        for name, text in self.stubs.items():
            (folder / name).write_text(text)


def generate() -> Generated:
    """Run the protobuf compiler of grpcio-tools over the proto files.

    :raises RuntimeError: it found something wrong with them, and has said so on stderr.
    """
    from grpc_tools import protoc  # type: ignore[import-untyped]  # has no types; only developers have it

    sources = sorted(str(path) for path in PROTOS.glob("*.proto"))
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        well_known = Path(protoc.__file__).parent / "_proto"
        flags = [f"-I{_ROOT}", f"-I{well_known}", f"--pyi_out={out}", f"--descriptor_set_out={out / DESCRIPTORS}"]
        if protoc.main(["protoc", *flags, *sources]) != 0:
            raise RuntimeError("the protobuf compiler refused the proto files")
        stubs = {path.name: path.read_text() for path in sorted(out.rglob("*.pyi"))}
        return Generated((out / DESCRIPTORS).read_bytes(), stubs)


def main() -> int:
    """Write what is generated, or with --check only compare it; 1 when something differs."""
    parser = argparse.ArgumentParser(description="Make the descriptors and stubs of the containerd client.")
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    check = parser.parse_args().check
    made = generate()
    changed = made.differences()
    if not check:
        made.write()
    for name in changed:
        print(f"{name} {'differs' if check else 'written'}")
    return 1 if check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
