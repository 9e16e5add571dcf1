"""What attempts and their containers are called here.

An id is a digest, 64 hexadecimal digits as containerd has them: `crictl` shows the first 13, which tell any two apart.
Those of a sandbox begin with the time, so that a job and its services, made in one millisecond, would look alike. It
says nothing of a caller's own name for an attempt, which may hold anything and is shown as data only.
"""

from __future__ import annotations

import hashlib

from forgeyard_api.serve.attempt_types import AttemptView, Caller

OPERATOR = Caller(uid=0, gid=0, pid=0, operator=True)
"""Who asks the table: only operators get as far as here."""

JOB = ""
"""The service whose container is the job's: no service has an empty name."""


def pod_id(view: AttemptView) -> str:
    """The same for as long as the attempt is known. A later attempt of the same name has another one."""
    return _digest("pod", str(view.owner_uid), view.attempt_id, str(round(view.created_at.timestamp() * 1e6)))


def container_id(view: AttemptView, service: str = JOB) -> str:
    """The container of a service of an attempt, or of its job."""
    return _digest("container", pod_id(view), service)


def owner(view: AttemptView) -> Caller:
    """As whom the table is asked about an attempt by its name, which another owner may have given too."""
    return Caller(uid=view.owner_uid, gid=0, pid=0)


def shown(name: str) -> str:
    """A caller's word, fit for a line of a table: what a terminal would obey is written as an escape."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in name)


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode(errors="surrogatepass")).hexdigest()
