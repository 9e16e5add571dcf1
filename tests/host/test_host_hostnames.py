"""The host name of a container, from outside."""

from __future__ import annotations

import os
import subprocess

import pytest

from forgeyard_host.hostnames import hostname_of, set_hostname
from forgeyard_model.errors import SandboxError, SandboxErrorKind

pytestmark = pytest.mark.kernel


def test_a_name_is_set_and_read_there_alone() -> None:
    """The process sees it; this one keeps its own, in every thread."""
    before = os.uname().nodename
    words = ["unshare", "--uts", "sh", "-c", "echo in; read go; hostname"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as waiting:
        assert waiting.stdout is not None
        assert waiting.stdin is not None
        assert waiting.stdout.readline() == b"in\n"
        set_hostname(waiting.pid, "of-a-container")
        assert hostname_of(waiting.pid) == "of-a-container"
        waiting.stdin.close()
        assert waiting.stdout.read() == b"of-a-container\n"
    assert os.uname().nodename == before


def test_the_executors_own_name_is_never_touched() -> None:
    """A process in this one's own namespace, and one that is gone, are typed errors."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    for pid in (os.getpid(), gone.pid):
        with pytest.raises(SandboxError) as refused:
            set_hostname(pid, "no")
        assert refused.value.kind is SandboxErrorKind.NAMESPACE_FAILED
