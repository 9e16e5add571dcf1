"""What of the host's /etc may be copied into a job's root, and what never is.

Two gates, since either alone fails open one day: WANTED (and what links in /usr point to) says what is looked at;
`refusal` then turns away whatever belongs to the host's own business or smells of a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

MAX_FILE: Final = 8 << 20
"""Bytes of one file. Java's trust store and the CA bundle, the largest that are wanted, stay below 1 MiB."""
MAX_TOTAL: Final = 64 << 20
"""Bytes of all that is copied."""

WANTED: Final = (
    # the dynamic linker and the choice of programs
    *("ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives"),
    # trust
    *("ssl/certs", "ssl/openssl.cnf", "ca-certificates", "ca-certificates.conf", "pki", "crypto-policies"),
    # language run times
    *("java", "java-*", ".java", "maven", "perl", "python*", "dotnet"),
    # names that libraries look up
    *("services", "protocols", "networks", "rpc", "mime.types", "magic", "magic.mime", "locale.alias"),
    *("localtime", "timezone", "terminfo", "fonts", "xml", "sgml", "mke2fs.conf"),
    # what the system is
    *("debian_version", "alpine-release", "*-release"),
)
"""Globs below /etc, each for a file or a whole directory."""

LOCAL_TRUST: Final = "/usr/local/share/ca-certificates/"
"""Where an organisation's own CAs are put; links from ssl/certs to here become copies, /usr/local shown or not."""

NEVER: Final = (
    # accounts; a job gets synthetic ones
    *("passwd*", "shadow*", "group", "group-", "gshadow*", "subuid*", "subgid*", "sudoers*", "security", "pam*"),
    # identity and network of the host; a job gets its own
    *("machine-id", "hostname", "hosts", "hosts.*", "resolv.conf", "resolvconf", "nsswitch.conf", "netplan"),
    *("network", "NetworkManager", "wpa_supplicant", "wireguard", "openvpn", "ipsec*", "ppp", "krb5*"),
    # site environment: proxies and tokens live here
    *("environment", "environment.d", "profile", "profile.d", "default", "bash.bashrc", "ld.so.preload"),
    # tools' own configuration with registries and passwords
    *("pip.conf", "npmrc", "gitconfig", "gemrc", "wgetrc", "curlrc", "apt", "yum*", "dnf", "zypp", "maven/settings*"),
    # services of the host and their control
    *("ssh", "cron*", "anacrontab", "at.allow", "systemd", "init.d", "rc?.d", "docker", "containerd", "containers"),
    *("crictl.yaml", "cni", "cdi", "kubernetes", "rancher", "letsencrypt", "ldap", "sssd", "samba", "mysql"),
    *("postgresql*", "redis", "exim4", "postfix", "gitlab-runner", "buildkite-agent", "forgeyard"),
    # keys of a subscription or an authority
    *("pki/entitlement*", "pki/consumer", "pki/CA", "pki/nssdb"),
)
"""Globs below /etc (and any other configuration directory): never copied, nor anything below them."""

SECRET_NAMES: Final = (
    *("private", "*secret*", "*password*", "*passwd*", "*credential*", "*token*", "*shadow*", "*keytab*"),
    *("*.key", "*-key.pem", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx", "*.ppk", "key3.db", "key4.db"),
    *("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "ssh_host_*", "secring*", "auth.json", "auth.conf*"),
    *(".netrc", "netrc", "_netrc", ".pypirc", "pypirc", "pip.conf", "npmrc", ".npmrc", "gitconfig", ".gitconfig"),
    *("settings.xml", "settings-security.xml", "gemrc", ".gemrc", ".pgpass", ".my.cnf", "nuget.config", "*.bak"),
)
"""Globs for any one component of a path, compared without case."""

_SECRET_CONTENT: Final = re.compile(
    rb"PRIVATE KEY-----"
    rb"|[a-z][a-z0-9+.-]{1,15}://[^\s/:@\"'<>]{1,128}:[^\s/@\"'<>]{1,256}@"  # user and password in a URL
    rb"|_auth(?:token)?\s*="
    rb"|aws_secret_access_key\s*=",
    re.IGNORECASE,
)


class Refusal(StrEnum):
    """Why something of the host's configuration was not copied."""

    NEVER = "never"
    LOOKS_SECRET = "looks_secret"  # noqa: S105  a word, not a password
    NOT_WORLD_READABLE = "not_world_readable"
    LEADS_OUT = "leads_out"
    TOO_LARGE = "too_large"
    SPECIAL_FILE = "special_file"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Skipped:
    """A path of the host that a job does not see, and why."""

    path: str
    reason: Refusal


def _one_of(globs: Iterable[str]) -> str:
    # a star stays within one component: `python*` must not reach python3/private/key
    return "|".join(re.escape(glob).replace(r"\*", "[^/]*").replace(r"\?", "[^/]") for glob in globs)


_NEVER: Final = re.compile(rf"(?:{_one_of(NEVER)})(?:/.*)?", re.DOTALL)
_SECRET: Final = re.compile(rf"(?:.*/)?(?:{_one_of(SECRET_NAMES)})(?:/.*)?", re.DOTALL | re.IGNORECASE)


def refusal(relative: str) -> Refusal | None:
    """Judge a path by its name alone.

    :param relative: path below the configuration directory, such as ssl/private.
    """
    if _NEVER.fullmatch(relative):
        return Refusal.NEVER
    if _SECRET.fullmatch(relative):
        return Refusal.LOOKS_SECRET
    return None


def smells_of_secret(content: bytes) -> bool:
    """Whether a file that may be read by anyone still holds a private key, a password in a URL or a token."""
    return _SECRET_CONTENT.search(content) is not None


def recipe() -> tuple[object, ...]:
    """All of the above as one value: a skeleton made by other rules is another skeleton."""
    return (MAX_FILE, MAX_TOTAL, WANTED, NEVER, SECRET_NAMES, _SECRET_CONTENT.pattern)
