"""Makes the checked-in descriptors and type stubs of the API from proto/forgeyard/executor/v1/*.proto.

python -m forgeyard_api.wire.build_protos [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from forgeyard_runtimes.proto_build import ProtoFolder

_API: Final = Path(__file__).parents[1]
FOLDER: Final = ProtoFolder(
    root=_API / "proto",
    protos=_API / "proto/forgeyard/executor/v1",
    kept=_API / "wire/stubs",
    package="forgeyard_api.wire.stubs",
)

if __name__ == "__main__":
    sys.exit(FOLDER.main("Make the descriptors and stubs of the executor's API."))
