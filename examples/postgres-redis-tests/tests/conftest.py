"""Connections to the services. Both are ready before the first step starts: there is nothing to wait for."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import redis

sys.path.insert(0, str(Path(__file__).parents[1]))


@pytest.fixture
def database() -> Iterator[psycopg.Connection]:
    """A connection whose changes are taken back after the test."""
    with psycopg.connect(os.environ["DATABASE_URL"]) as connection:
        yield connection
        connection.rollback()


@pytest.fixture
def cache() -> Iterator[redis.Redis]:
    """An empty cache."""
    with redis.Redis.from_url(os.environ["REDIS_URL"]) as client:
        client.flushdb()
        yield client
