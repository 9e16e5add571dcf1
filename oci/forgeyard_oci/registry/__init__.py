"""Images from registries: settings, authentication, transfers (OCI distribution spec 1.1)."""
