"""An executor behind a socket, with the interface of the one in this process."""

from forgeyard_api.client.remote import RemoteExecutor

__all__ = ["RemoteExecutor"]
