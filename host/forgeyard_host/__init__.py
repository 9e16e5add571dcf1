"""What touches the kernel: mounts, ID maps, cgroups, process facts, the ledger. The only area with ctypes and setns."""
