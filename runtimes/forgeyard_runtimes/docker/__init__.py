"""The adapter for Docker: the same bundle through HostConfig, on our own assembled root."""
