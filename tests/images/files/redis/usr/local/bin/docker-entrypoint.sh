#!/bin/sh
# Starts Redis as its own user. Its protected mode is off: who may reach it is the network's business here.
set -eu

if [ "${1:-}" != redis-server ]; then
    exec "$@"
fi
if [ "$(id -u)" -eq 0 ]; then
    find . ! -user redis -exec chown redis:redis {} +
    exec setpriv --reuid redis --regid redis --init-groups -- "$0" "$@"
fi
exec "$@" --protected-mode no
