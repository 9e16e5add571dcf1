"""Try destinations, and say what became of each.

python3 reach.py HOST:PORT…             each has to be reached
python3 reach.py --refused HOST:PORT…   each has to be refused, at once
"""

from __future__ import annotations

import argparse
import socket
import sys
import time

AT_ONCE = 2.0
"""Seconds. A policy answers; a wait for a time-out would mean that packets vanish."""


def reach(host: str, port: int) -> str:
    """Why there is no connection; empty when there is one."""
    try:
        with socket.create_connection((host, port), timeout=10):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def main() -> int:
    """The exit code: 0 when everything is as it has to be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--refused", action="store_true")
    parser.add_argument("destinations", metavar="HOST:PORT", nargs="+")
    options = parser.parse_args()
    as_it_should = True
    for destination in options.destinations:
        host, _, port = destination.rpartition(":")
        begun = time.monotonic()
        problem = reach(host, int(port))
        late = time.monotonic() - begun > AT_ONCE
        print(f"{destination}: {f'refused ({problem})' if problem else 'reached'}{', but late' if late else ''}")
        as_it_should &= bool(problem) == options.refused and not late
    return 0 if as_it_should else 1


if __name__ == "__main__":
    sys.exit(main())
