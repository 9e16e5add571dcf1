"""``python -m forgeyard_api``: the same as the `forgeyard` command."""

from forgeyard_api.main import main

main()
