"""What a failed step was probably refused, and the policy that decides it. Pure.

Read from what the request says, never from the job's output: a hint says which words a step has, not why it failed.
"""

from __future__ import annotations

import re
from typing import Final

from forgeyard_model.job import Step
from forgeyard_model.plan import ContainerPlan


def _commands(*names: str) -> re.Pattern[str]:
    """Matches one of `names` as a word of a script: "pseudo", "sudoers" and "./apt" hold none."""
    return re.compile(rf"(?<![\w./-])(?:/usr/s?bin/|/s?bin/)?({'|'.join(names)})(?![\w./-])")


_GAINS_RIGHTS: Final = _commands("sudo", "doas")
_INSTALLS: Final = _commands("apt-get", "apt", "dpkg", "apk", "dnf", "microdnf", "yum", "zypper")
_SETS_OWNERS: Final = _commands("chown", "chgrp", "tar", "useradd", "adduser", "groupadd", "setcap")
_COMMENT: Final = re.compile(r"(?:^|\s)#.*$", re.MULTILINE)
_ROOT: Final = "image mode with user: root and capabilities: root-in-userns"


def privilege_hint(step: Step, plan: ContainerPlan) -> str | None:
    """The note for a step that failed and mentions what needs rights that its sandbox lacks; None without one."""
    text = _COMMENT.sub("", step.script) if step.script is not None else " ".join(step.argv)
    root = plan.user.uid == 0
    if not root and (match := _GAINS_RIGHTS.search(text)):
        why = f"no program gains rights in a sandbox (no_new_privs, always); be root with {_ROOT}, without {match[1]}"
    elif not plan.capabilities and (match := _INSTALLS.search(text)):
        why = f"policy capabilities: none installs no packages; use {_ROOT}, or an image that has them"
    elif root and not plan.capabilities and (match := _SETS_OWNERS.search(text)):
        why = f"root under policy capabilities: none sets no owners; use {_ROOT}, or run as another user"
    else:
        return None
    return f"step {step.name} failed and mentions {match[1]}: {why}"
