"""`python -m forgeyard_api.keeper`: started by `forgeyard serve`, ends by itself when nobody needs it."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

from forgeyard_api.keeper.keeper import Task, keep, recover
from forgeyard_api.keeper.place import Place
from forgeyard_api.observe import logs
from forgeyard_model.errors import ForgeyardError


def main() -> int:
    """Keep until there is nothing to keep; 125 when it could not begin, after a line on stderr."""
    parser = argparse.ArgumentParser(description="Keeps the containers of one runtime for forgeyard serve.")
    parser.add_argument("--runtime", required=True)
    parser.add_argument("--state-dir", required=True)
    parser.add_argument("--directory", required=True, type=Path, help="its own, in the server's run directory")
    parser.add_argument("--lock", required=True, type=int, help="descriptor of the lock that says that it lives")
    parser.add_argument("--config", type=Path, help="in the place of the system's configuration file")
    parser.add_argument("--linger", required=True, type=float, help="seconds without a server and without an attempt")
    parser.add_argument("--result-ttl", required=True, type=float, help="seconds with ended attempts alone")
    parser.add_argument("--recover", action="store_true", help="only destroy what dead keepers left")
    given = parser.parse_args()
    os.set_inheritable(given.lock, False)  # it is this process's alone
    os.chdir("/")
    logs.set_up()
    place = Place(given.directory)
    task = Task(given.runtime, given.state_dir, place, given.config, given.linger, given.result_ttl)
    try:
        asyncio.run(recover(task) if given.recover else keep(task))
    except ForgeyardError as error:
        print(f"keeper for {given.runtime}: {error}", file=sys.stderr, flush=True)
        return 125
    return 0


if __name__ == "__main__":
    sys.exit(main())
