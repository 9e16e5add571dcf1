"""What is tested: a stock in PostgreSQL, with counts that are read often kept in Redis."""

from __future__ import annotations

import psycopg
import redis

KEPT_FOR = 60
"""Seconds."""


class OutOfStockError(Exception):
    """Nothing of it is left."""


class Shop:
    """A shop on open connections."""

    def __init__(self, database: psycopg.Connection, cache: redis.Redis) -> None:
        self._database = database
        self._cache = cache

    def stock(self, name: str) -> int:
        """How many there are; from the cache, if it knows.

        :raises KeyError: no such product.
        """
        if (known := self._cache.get(_key(name))) is not None:
            return int(known)
        row = self._database.execute("select stock from products where name = %s", [name]).fetchone()
        if row is None:
            raise KeyError(name)
        self._cache.set(_key(name), row[0], ex=KEPT_FOR)
        return row[0]

    def sell(self, name: str) -> None:
        """One less, and the cache forgets what it knew.

        :raises OutOfStockError: the table's own check refused it.
        """
        try:
            with self._database.transaction():
                self._database.execute("update products set stock = stock - 1 where name = %s", [name])
        except psycopg.errors.CheckViolation as error:
            raise OutOfStockError(name) from error
        self._cache.delete(_key(name))


def _key(name: str) -> str:
    return f"stock:{name}"
