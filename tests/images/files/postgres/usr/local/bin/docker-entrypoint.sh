#!/bin/sh
# Starts PostgreSQL; the first time, makes the cluster and runs what lies in /docker-entrypoint-initdb.d.
#
# POSTGRES_PASSWORD        of the superuser; needed unless POSTGRES_HOST_AUTH_METHOD=trust
# POSTGRES_PASSWORD_FILE   a file that holds it, instead
# POSTGRES_USER            the superuser's name (postgres)
# POSTGRES_DB              a database that is made (POSTGRES_USER)
# POSTGRES_INITDB_ARGS     further arguments of initdb
set -eu

if [ "${1:-}" != postgres ]; then
    exec "$@"
fi

if [ "$(id -u)" -eq 0 ]; then
    mkdir -p "$PGDATA" /var/run/postgresql
    # A volume belongs to root at first. What is there already is left alone when it is right.
    find "$PGDATA" /var/run/postgresql ! -user postgres -exec chown postgres:postgres {} +
    chmod 0700 "$PGDATA"
    exec setpriv --reuid postgres --regid postgres --init-groups -- "$0" "$@"
fi

fail() {
    printf '%s: %s\n' "$0" "$1" >&2
    exit 1
}

make_cluster() {
    user=${POSTGRES_USER:-postgres}
    database=${POSTGRES_DB:-$user}
    password=${POSTGRES_PASSWORD:-}
    if [ -n "${POSTGRES_PASSWORD_FILE:-}" ]; then
        password=$(cat "$POSTGRES_PASSWORD_FILE")
    fi
    method=${POSTGRES_HOST_AUTH_METHOD:-scram-sha-256}
    [ -n "$password" ] || [ "$method" = trust ] || fail "no superuser password: set POSTGRES_PASSWORD"

    file=$(mktemp)
    printf '%s\n' "$password" >"$file"
    [ -n "$password" ] && set -- --pwfile="$file" || set --
    # The word splitting is meant.
    # shellcheck disable=SC2086
    initdb --username="$user" --encoding=UTF8 --locale=C.UTF-8 --auth-local=trust --auth-host="$method" "$@" \
        ${POSTGRES_INITDB_ARGS:-}
    rm "$file"
    printf 'host all all all %s\n' "$method" >>"$PGDATA/pg_hba.conf"

    # Nobody outside may take the server for ready before the scripts have run: it listens on its socket alone.
    pg_ctl -w -o "-c listen_addresses=''" start
    if [ "$database" != postgres ]; then
        createdb --username="$user" --maintenance-db=postgres "$database"
    fi
    for script in /docker-entrypoint-initdb.d/*; do
        case $script in
            *.sh) sh -eu "$script" ;;
            *.sql) psql --no-psqlrc -v ON_ERROR_STOP=1 --username="$user" --dbname="$database" --file="$script" ;;
            *.sql.gz) gzip -dc "$script" | psql --no-psqlrc -v ON_ERROR_STOP=1 --username="$user" --dbname="$database" ;;
        esac
    done
    pg_ctl -w -m fast stop
}

if [ ! -s "$PGDATA/PG_VERSION" ]; then
    make_cluster
fi
exec "$@"
