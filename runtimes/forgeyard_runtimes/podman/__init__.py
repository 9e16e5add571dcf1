"""The adapter for Podman's service: the bundle as a container that Podman lists, inspects and can stop."""
