"""`python -m forgeyard_api.keeper`: started by `forgeyard serve`, ends by itself when nobody needs it."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from pathlib import Path

from forgeyard_api.keeper.keeper import keep
from forgeyard_model.errors import ForgeyardError


def main() -> int:
    """Keep until there is nothing to keep; 125 when it could not begin, after a line on stderr."""
    parser = argparse.ArgumentParser(description="Keeps the containers of one runtime for forgeyard serve.")
    parser.add_argument("--runtime", required=True)
    parser.add_argument("--state-dir", required=True)
    parser.add_argument("--directory", required=True, type=Path, help="its own, in the server's run directory")
    parser.add_argument("--linger", required=True, type=float, help="seconds without a server and without an attempt")
    given = parser.parse_args()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    try:
        asyncio.run(keep(given.runtime, given.state_dir, given.directory, given.linger))
    except ForgeyardError as error:
        print(f"keeper for {given.runtime}: {error}", file=sys.stderr, flush=True)
        return 125
    return 0


if __name__ == "__main__":
    sys.exit(main())
