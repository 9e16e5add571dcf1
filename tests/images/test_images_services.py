"""The service images do what services of a job will ask: each is started, as root of a sandbox, and talked to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import run, sh

from forgeyard_executor import Job, Outcome, ResourceLimits
from forgeyard_model.policy import CapabilityGrant

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(600), pytest.mark.xdist_group("service images")]

# Each waits for its server by the server's own means, within a time that a loaded machine keeps.
# A signal to another user's process takes a right that root of a sandbox lacks: it becomes that user.
PRELUDE = 'set -e; as() { user=$1; shift; setpriv --reuid "$user" --regid "$user" --clear-groups -- "$@"; }\n'
POSTGRES = """
cat > /docker-entrypoint-initdb.d/1.sql <<'SQL'
create table t (n int); insert into t values (41);
SQL
docker-entrypoint.sh postgres > /tmp/log 2>&1 &
until pg_isready -q -h 127.0.0.1; do [ -d /proc/$! ] || { cat /tmp/log; exit 1; }; sleep 0.1; done
export PGPASSWORD=secret; psql -h 127.0.0.1 -U app -d data -A -t -c 'select n + 1, current_user from t'
PGPASSWORD=wrong psql -h 127.0.0.1 -U app -d data -c 'select 1' 2>&1 | grep -o 'password authentication failed'
stat -c %U /proc/$!; as postgres sh -c "kill -INT $!"; wait $!; echo "ended $?"
"""
REDIS = """
docker-entrypoint.sh redis-server > /tmp/log 2>&1 &
until redis-cli ping > /tmp/ping 2>&1; do [ -d /proc/$! ] || { cat /tmp/log; exit 1; }; sleep 0.1; done
cat /tmp/ping; redis-cli set a 1; stat -c %U /proc/$! .; as redis sh -c "kill $!"; wait $!; echo "ended $?"
"""
RABBITMQ = """
docker-entrypoint.sh rabbitmq-server > /tmp/log 2>&1 &
until as rabbitmq env HOME=/var/lib/rabbitmq rabbitmq-diagnostics -q check_port_connectivity > /tmp/check 2>&1; do
    [ -d /proc/$! ] || { cat /tmp/log; exit 1; }; sleep 0.5
done
stat -c %U /proc/$!; grep -c 'listener on .*:5672' /tmp/log
as rabbitmq sh -c "kill $!"; wait $! || :
# A process of another user that is left behind can't be ended by root of a sandbox.
as rabbitmq epmd -kill > /tmp/epmd; echo ended
"""
NGINX = """
sed -i 's/80 default_server/8080 default_server/' /etc/nginx/sites-available/default  # a job's root may not bind 80
nginx -g 'daemon off;' > /tmp/log 2>&1 &
until timeout 5 bash -c 'exec 3<>/dev/tcp/127.0.0.1/8080; printf "GET / HTTP/1.0\\r\\n\\r\\n" >&3; head -n 1 <&3' 2>&1 |
    grep -o '200 OK'; do [ -d /proc/$! ]; sleep 0.1; done
kill -QUIT $!; wait $!; echo "ended $?"
"""
PYTHON = """python3 -c 'import psycopg, redis, pika; print(psycopg.__version__.split(".")[0])'"""


@pytest.mark.parametrize(
    ("name", "script", "expected"),
    [
        pytest.param(
            "postgres",
            POSTGRES,
            ["42|app", "password authentication failed", "postgres", "ended 0"],
            id="postgres",
        ),
        pytest.param("redis", REDIS, ["PONG", "OK", "redis", "redis", "ended 0"], id="redis"),
        pytest.param("rabbitmq", RABBITMQ, ["rabbitmq", "1", "ended"], id="rabbitmq"),
        pytest.param("nginx", NGINX, ["200 OK", "ended 0"], id="nginx"),
        pytest.param("python", PYTHON, ["3"], id="python"),
    ],
)
def test_service_starts(name: str, script: str, expected: list[str], images: Any, shared_state: Path) -> None:
    """The entry point sets the server up, gives up root, serves, and ends at its stop signal."""
    env = {"POSTGRES_PASSWORD": "secret", "POSTGRES_USER": "app", "POSTGRES_DB": "data"} if name == "postgres" else {}
    job = Job(
        image=images.local(name),
        user="root",
        capabilities=CapabilityGrant.ROOT_IN_USERNS,
        env=env,
        limits=ResourceLimits(wall_time=120),
        steps=(sh(PRELUDE + script),),
    )
    result, out, err = run(shared_state, job)
    assert result.outcome is Outcome.SUCCEEDED, (result.message, out[-3000:], err[-3000:])
    assert out.decode().splitlines() == expected
