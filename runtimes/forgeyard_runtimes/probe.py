"""What a sandbox is from inside: a script that tries things in a real one, and what its report proves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from forgeyard_model.capabilities import Feature, Probe

PREAMBLE: Final = r"""
export LC_ALL=C
nl='
'
say() { printf '%s\t%s\n' "$1" "${2%%"$nl"*}"; }
try() {
    name=$1
    shift
    if seen=$("$@" 2>&1); then say "$name" "done $seen"; else say "$name" "refused: $seen"; fi
}
"""

LOOK: Final = r"""
say pid $$
set -- /proc/[0-9]*
say processes $#
read -r inside outside count </proc/self/uid_map && say uid_map "$inside $outside $count"
say id "$(id -u):$(id -g)"
while IFS=: read -r key value; do
    case $key in
        NoNewPrivs | Seccomp | CapInh | CapPrm | CapEff | CapBnd | CapAmb) say "$key" "${value#?}" ;;
    esac
done </proc/self/status
say namespaces "$(echo $(readlink /proc/self/ns/*))"
say cgroup "$(echo $(cat /proc/self/cgroup))"
for file in /sys/fs/cgroup/memory/memory.limit_in_bytes /sys/fs/cgroup/memory.max; do
    if [ -r "$file" ]; then read -r value <"$file" && say memory "$value"; fi
done
: >/tmp/mine
try shadow cat /etc/shadow
try usr touch /usr/forgeyard-was-here
try root touch /forgeyard-was-here
try mount mount -t tmpfs none /tmp
try unshare unshare --user true
try chown chown 0:0 /tmp/mine
try mknod mknod /tmp/disk b 7 0
"""

LEAVE_BEHIND: Final = r"""
(trap '' TERM; exec sleep 600) &
setsid sleep 600 &
"""
"""Processes that outlive their step, in two ways that a plain signal would miss."""

LOOK_AGAIN: Final = r"""
set -- /proc/[0-9]*
say after $#
"""

FEATURES: Final = (
    Feature.USER_NAMESPACE,
    Feature.MOUNT_NAMESPACE,
    Feature.PID_NAMESPACE,
    Feature.NETWORK_NAMESPACE,
    Feature.CGROUP_NAMESPACE,
    Feature.SECCOMP,
    Feature.NO_NEW_PRIVS,
    Feature.CAPABILITY_DROP,
    Feature.KILL_TREE,
)

_CURE: Final = {
    Feature.USER_NAMESPACE: "check the sysctls user.max_user_namespaces and kernel.unprivileged_userns_clone",
    Feature.SECCOMP: "use a runtime built with libseccomp, and a kernel with CONFIG_SECCOMP_FILTER",
}
_NAMESPACES: Final = {
    Feature.MOUNT_NAMESPACE: "mnt",
    Feature.NETWORK_NAMESPACE: "net",
    Feature.CGROUP_NAMESPACE: "cgroup",
}
_BEHIND_GATE: Final = {
    "gate_namespace_user": Feature.USER_NAMESPACE,
    "gate_id_map": Feature.USER_NAMESPACE,
    "no_user_namespace": Feature.USER_NAMESPACE,
    "gate_namespace_mnt": Feature.MOUNT_NAMESPACE,
    "gate_namespace_pid": Feature.PID_NAMESPACE,
    "gate_namespace_net": Feature.NETWORK_NAMESPACE,
    "gate_namespace_cgroup": Feature.CGROUP_NAMESPACE,
    "gate_no_new_privs": Feature.NO_NEW_PRIVS,
    "gate_seccomp": Feature.SECCOMP,
    "gate_capabilities": Feature.CAPABILITY_DROP,
}


def parse_report(text: str) -> dict[str, str]:
    """The lines of the script, by name. What a job prints is never trusted to be well-formed."""
    pairs = (line.split("\t", 1) for line in text.splitlines())
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def sandbox_probes(
    seen: Mapping[str, str], own_namespaces: Mapping[str, int], runtime: str, *, leftovers: int
) -> tuple[Probe, ...]:
    """What the report of a sandbox proves.

    :param own_namespaces: the executor's, which the sandbox must not share.
    :param leftovers: how many processes of the first step were ended after it.
    """
    inside = namespaces(seen)

    def own(name: str) -> bool:
        return name in inside and inside[name] != own_namespaces.get(name)

    facts: dict[Feature, tuple[bool, str]] = {
        Feature.USER_NAMESPACE: (own("user") and mapped(seen), f"ids {seen.get('uid_map', 'unknown')}"),
        **{feature: (own(name), f"{name}:[{inside.get(name)}]") for feature, name in _NAMESPACES.items()},
        Feature.PID_NAMESPACE: (own("pid"), f"{seen.get('processes', 'no')} processes seen"),
        Feature.SECCOMP: (filtered(seen), f"unshare {seen.get('unshare', 'not tried')}"),
        Feature.NO_NEW_PRIVS: (seen.get("NoNewPrivs") == "1", f"NoNewPrivs {seen.get('NoNewPrivs', 'unknown')}"),
        Feature.CAPABILITY_DROP: (unprivileged(seen), f"chown {seen.get('chown', 'not tried')}"),
        Feature.KILL_TREE: (leftovers >= 2 and seen.get("after") == "2", f"{leftovers} left processes ended"),
    }
    return tuple(_probe(feature, *facts[feature], by=f"kernel, set up by {runtime}") for feature in FEATURES)


def _probe(feature: Feature, works: bool, details: str, *, by: str) -> Probe:
    if works:
        return Probe(feature, works=True, by=by, details=details)
    cure = _CURE.get(feature, "check the runtime's version and configuration")
    return Probe(feature, works=False, details=details, cure=cure)


def failed_sandbox(reason: str, brief: str, cure: str, features: tuple[Feature, ...] = FEATURES) -> tuple[Probe, ...]:
    """What is known when no sandbox came to be: the feature that `reason` names is missing, the rest was not seen."""
    missing = _BEHIND_GATE.get(reason)
    return tuple(
        Probe(
            feature,
            works=False,
            details=brief if feature is missing else f"no sandbox to look from: {brief}",
            cure=_CURE.get(feature, cure) if feature is missing else cure,
            seen=feature is missing,
        )
        for feature in features
    )


def namespaces(seen: Mapping[str, str]) -> dict[str, int]:
    """Inode numbers by kind, of lines such as ``pid:[4026531836] net:[4026531840]``."""
    found = {}
    for word in seen.get("namespaces", "").split():
        name, _, number = word.partition(":")
        if number.strip("[]").isdecimal():
            found[name] = int(number.strip("[]"))
    return found


def mapped(seen: Mapping[str, str]) -> bool:
    """Whether root inside is somebody else outside, and the job is not even that."""
    words = seen.get("uid_map", "").split()
    return len(words) == 3 and words[0] == "0" and words[1] != "0" and not seen.get("id", "0:0").startswith("0:")


def filtered(seen: Mapping[str, str]) -> bool:
    """Whether a filter is on, and refused what this user could do without one."""
    return seen.get("Seccomp") == "2" and refused(seen, "unshare", "Operation not permitted")


def unprivileged(seen: Mapping[str, str]) -> bool:
    """Whether every capability set is empty, and what needs one is refused."""
    sets = [seen.get(name, "unknown") for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")]
    return all(value.strip("0") == "" for value in sets) and refused(seen, "chown", "Operation not permitted")


def refused(seen: Mapping[str, str], name: str, *errors: str) -> bool:
    """Whether the script's attempt called `name` failed, with one of `errors` when any are given."""
    answer = seen.get(name, "")
    return answer.startswith("refused: ") and (not errors or any(error in answer for error in errors))
