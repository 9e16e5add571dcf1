"""The shop on a real database and a real cache."""

from __future__ import annotations

import psycopg
import pytest
import redis
from shop import KEPT_FOR, OutOfStockError, Shop


@pytest.fixture
def shop(database: psycopg.Connection, cache: redis.Redis) -> Shop:
    """A shop as the init script left it."""
    return Shop(database, cache)


@pytest.mark.parametrize(("name", "stock"), [("anvil", 3), ("bellows", 1), ("tongs", 0)])
def test_the_init_script_has_run(shop: Shop, name: str, stock: int) -> None:
    """The products of db/init.sql are there."""
    assert shop.stock(name) == stock


def test_a_count_is_kept(shop: Shop, cache: redis.Redis) -> None:
    """The second question is answered by the cache, which forgets in time."""
    cache.set("stock:anvil", 42)
    assert shop.stock("anvil") == 42
    cache.delete("stock:anvil")
    assert shop.stock("anvil") == 3
    assert cache.get("stock:anvil") == b"3"
    assert 0 < cache.ttl("stock:anvil") <= KEPT_FOR


def test_a_sale_is_seen_at_once(shop: Shop) -> None:
    """Selling drops what the cache knew."""
    assert shop.stock("anvil") == 3
    shop.sell("anvil")
    assert shop.stock("anvil") == 2


def test_nothing_is_sold_twice(shop: Shop) -> None:
    """The database refuses what is not there, and the stock stays as it was."""
    shop.sell("bellows")
    with pytest.raises(OutOfStockError):
        shop.sell("bellows")
    assert shop.stock("bellows") == 0


def test_an_unknown_product(shop: Shop) -> None:
    """It is named in the error."""
    with pytest.raises(KeyError, match="hammer"):
        shop.stock("hammer")
