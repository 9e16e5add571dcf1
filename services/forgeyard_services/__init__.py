"""Sidecar services beside a job: their order, readiness and supervision, and what CI files say of them."""
