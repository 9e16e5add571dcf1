"""Sidecar services beside a job. None can be run yet: a job file that names one is refused by name."""
