"""`forgeyard serve`: many callers' attempts on one host, kept over a restart."""
