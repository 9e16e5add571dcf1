#!/bin/sh
# Starts RabbitMQ as its own user. The node's name holds the host's, which must resolve.
# RABBITMQ_DEFAULT_USER and RABBITMQ_DEFAULT_PASS are read by the server itself.
set -eu

if [ "${1:-}" != rabbitmq-server ]; then
    exec "$@"
fi
export HOME=/var/lib/rabbitmq
if [ "$(id -u)" -eq 0 ]; then
    find "$HOME" ! -user rabbitmq -exec chown rabbitmq:rabbitmq {} +
    exec setpriv --reuid rabbitmq --regid rabbitmq --init-groups -- "$0" "$@"
fi
exec "$@"
