"""Makes the checked-in descriptors and type stubs from protos/*.proto.

python -m forgeyard_runtimes.containerd.build_protos [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from forgeyard_runtimes.proto_build import ProtoFolder

_PROTOS: Final = Path(__file__).parent / "protos"
FOLDER: Final = ProtoFolder(root=Path(__file__).parents[2], protos=_PROTOS, kept=_PROTOS)

if __name__ == "__main__":
    sys.exit(FOLDER.main("Make the descriptors and stubs of the containerd client."))
