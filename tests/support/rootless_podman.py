"""A real rootless Podman: the service of an ordinary user without ranges of ids, and gone with all it made."""

from __future__ import annotations

import contextlib
import os
import signal

from daemons import PodmanService

USER = 65534
"""nobody: on every system, and in no /etc/subuid."""


class RootlessPodman(PodmanService):
    """`podman system service` as the user USER."""

    def __init__(self) -> None:
        super().__init__()
        # Root's configuration means nothing to an ordinary user; its own defaults are below HOME.
        self._home = self._made("user")
        self._runtime = self._home / "run"
        self._runtime.mkdir(mode=0o700)
        self.socket = self._home / "podman.sock"
        for path in (self._home, self._runtime):
            os.chown(path, USER, USER)

    def argv(self) -> list[str]:
        drop = [f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--inh-caps=-all"]
        return ["setpriv", *drop, "podman", "system", "service", "--time", "0", self.address]

    def environment(self) -> dict[str, str]:
        path = super().environment()["PATH"]
        return {"PATH": path, "HOME": str(self._home), "XDG_RUNTIME_DIR": str(self._runtime)}

    def close(self) -> None:
        """End it with the process that keeps its user namespace, which has a name like everybody's."""
        self.stop()
        kept = self._runtime / "libpod/tmp/pause.pid"
        if kept.exists():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(kept.read_text()), signal.SIGKILL)
        super().close()
