"""From what plugins print to errors a caller can act on (specification, "Error" and "Well-known error codes")."""

from __future__ import annotations

from typing import Final

from forgeyard_model.errors import SandboxError, SandboxErrorKind

_KNOWN: Final = {
    1: ("cni_version", "the plugin speaks other versions: write one of them as cniVersion"),
    2: ("cni_config", "correct this key of the network configuration"),
    3: ("cni_container", ""),
    4: ("cni_plugin_failed", "the plugin wants other parameters than this version of CNI gives"),
    6: ("cni_config", "correct the network configuration"),
    7: ("cni_config", "correct the network configuration"),
    11: ("cni_try_again", "try again later"),
    50: ("cni_not_ready", "wait for the network's own services"),
    51: ("cni_not_ready", "wait for the network's own services; networks of running jobs may be limited too"),
}
_LINE: Final = 500


def setup_failed(reason: str, brief: str, *, details: str = "", resolution: str = "") -> SandboxError:
    """NETWORK_SETUP_FAILED, with what a plugin printed made harmless."""
    return SandboxError(
        SandboxErrorKind.NETWORK_SETUP_FAILED, reason, one_line(brief), details=one_line(details), resolution=resolution
    )


def plugin_failed(who: str, code: int, message: str, details: str) -> SandboxError:
    """The error a plugin printed. `who`: plugin, command and network, in words."""
    reason, resolution = _KNOWN.get(code, ("cni_plugin_failed", ""))
    return setup_failed(reason, f"{who} failed with code {code}: {message}", details=details, resolution=resolution)


def one_line(text: str) -> str:
    """`text` without line ends and control characters, cut to a length that fits a message."""
    shown = " ".join("".join(char if char.isprintable() else " " for char in text[: 4 * _LINE]).split())
    return shown if len(shown) <= _LINE else f"{shown[:_LINE]}..."
