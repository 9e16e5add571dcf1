"""Containers at a containerd, over its own gRPC services: the literal bundle, run by containerd's shim and runc."""
