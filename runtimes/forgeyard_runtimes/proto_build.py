"""Makes checked-in descriptors and type stubs from proto files.

Message classes are made when they are first used, from descriptors (`proto_messages`), and not from generated Python
code: such code refuses to run beside a protobuf of another major version, and registers its names where another
client of the same service in the same process would register them too.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

DESCRIPTORS: Final = "descriptors.binpb"


@dataclass(frozen=True, slots=True)
class ProtoFolder:
    """Proto files, and where what is made of them is kept.

    :param root: what their imports are relative to. protos: the files.
    :param kept: holds descriptors and stubs, and nothing else that ends in .pyi.
    :param package: how Python code imports `kept`, where that differs from the files' own path below `root`.
    """

    root: Path
    protos: Path
    kept: Path
    package: str = ""

    def generate(self) -> Generated:
        """Run the protobuf compiler of grpcio-tools over the proto files.

        :raises RuntimeError: it found something wrong with them, and has said so on stderr.
        """
        from grpc_tools import protoc  # type: ignore[import-untyped]  # has no types; only developers have it

        sources = sorted(str(path) for path in self.protos.glob("*.proto"))
        with tempfile.TemporaryDirectory() as name:
            out = Path(name)
            well_known = Path(protoc.__file__).parent / "_proto"
            flags = [
                f"-I{self.root}",
                f"-I{well_known}",
                f"--pyi_out={out}",
                f"--descriptor_set_out={out / DESCRIPTORS}",
            ]
            if protoc.main(["protoc", *flags, *sources]) != 0:
                raise RuntimeError("the protobuf compiler refused the proto files")
            stubs = {path.name: self._renamed(path.read_text()) for path in sorted(out.rglob("*.pyi"))}
            return Generated((out / DESCRIPTORS).read_bytes(), stubs)

    def _renamed(self, stub: str) -> str:
        own = ".".join(self.protos.relative_to(self.root).parts)
        return stub.replace(f"from {own} import", f"from {self.package} import") if self.package else stub

    def main(self, description: str) -> int:
        """Write what is generated, or with --check only compare it; 1 when something differs."""
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--check", action="store_true", help="compare, and write nothing")
        check = parser.parse_args().check
        made = self.generate()
        changed = made.differences(self.kept)
        if not check:
            made.write(self.kept)
        for name in changed:
            print(f"{name} {'differs' if check else 'written'}")
        return 1 if check and changed else 0


@dataclass(frozen=True, slots=True)
class Generated:
    """What the compiler makes: one set of descriptors, and a stub by file name."""

    descriptors: bytes
    stubs: dict[str, str]

    def differences(self, folder: Path) -> tuple[str, ...]:
        """Names of files in `folder` that are not what was generated, or are of no proto file any more."""
        wanted = {DESCRIPTORS: self.descriptors, **{name: text.encode() for name, text in self.stubs.items()}}
        there = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".pyi", ".binpb")}
        return tuple(sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name)))

    def write(self, folder: Path) -> None:
        """Replace what is checked in."""
        for path in folder.glob("*.pyi"):
            path.unlink()
        (folder / DESCRIPTORS).write_bytes(self.descriptors)
        for name, text in self.stubs.items():
            (folder / name).write_text(text)
