"""Makes the checked-in descriptors and type stubs of the Container Runtime Interface from protos/api.proto.

python -m forgeyard_api.cri.build_protos [--check]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from forgeyard_runtimes.proto_build import ProtoFolder

_CRI: Final = Path(__file__).parent
FOLDER: Final = ProtoFolder(root=_CRI, protos=_CRI / "protos", kept=_CRI / "stubs")

if __name__ == "__main__":
    sys.exit(FOLDER.main("Make the descriptors and stubs of the Container Runtime Interface."))
