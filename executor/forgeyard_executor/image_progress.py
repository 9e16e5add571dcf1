"""What a pull tells of itself, and what is remembered of it for the result."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forgeyard_oci.registry.budget import Progress


class PullWatch:
    """Passes progress on, and remembers whether anything was fetched. Called from several threads."""

    def __init__(self, listener: Progress | None) -> None:
        self._listener = listener
        self._states: set[str] = set()

    @property
    def worked(self) -> bool:
        """Something had to be fetched or unpacked."""
        return bool(self._states & {"pulled", "unpacked"})

    @property
    def source(self) -> str:
        """Where the image came from, as provenance has it: pulled, unpacked (its bytes were there), or present."""
        if "pulled" in self._states:
            return "pulled"
        return "unpacked" if self.worked else "present"

    def begin(self, digest: str, size: int, what: str) -> None:
        """A blob is about to be fetched."""
        if self._listener is not None:
            self._listener.begin(digest, size, what)

    def advance(self, digest: str, total_received: int) -> None:
        """So many bytes of it have come so far."""
        if self._listener is not None:
            self._listener.advance(digest, total_received)

    def done(self, digest: str, state: str) -> None:
        """It is there, or has failed."""
        self._states.add(state)
        if self._listener is not None:
            self._listener.done(digest, state)
