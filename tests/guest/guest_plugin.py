"""Loaded by pytest in the guest: what a machine that is emulated can't do in the time of a real one."""

from __future__ import annotations

from forgeyard_host import probes_cgroups

# Its 1.5 seconds end a program that no limit stops before it has eaten a host. In the guest, whose pages come over
# virtiofs, one that is being stopped has been seen to take longer, and jobs would be refused for it.
probes_cgroups.PATIENCE = 30.0  # type: ignore[misc]  # Final: for everybody else
