"""How allowed_images and allowed_registries see references of registries: in full, and by what decides."""

from __future__ import annotations

import pytest

from forgeyard_executor.config_apply import registry_of, turned_down
from forgeyard_model.config import ExecutorConfig, PatternRule
from forgeyard_model.errors import InvalidRequest

DIGEST = "sha256:" + "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("image", "registry"),
    [
        ("busybox", "docker.io"),
        ("index.docker.io/busybox", "docker.io"),
        ("Registry.Example.org/a", "registry.example.org"),
        ("[::1]:5000/a", "[::1]:5000"),
        (f"localhost/a:b@{DIGEST}", "localhost"),
    ],
)
def test_the_registry_of_a_reference_is_its_one_name(image: str, registry: str) -> None:
    """However it is written, so that one rule covers every way to write it."""
    assert registry_of(image) == registry


@pytest.mark.parametrize(
    ("pattern", "image", "passes"),
    [
        ("docker.io/library/*", "busybox", True),
        ("docker.io/library/*", "index.docker.io/busybox:1", True),
        ("docker.io/library/*", "team/busybox", False),
        ("busybox*", "busybox", False),
        ("registry.example.org/team/**", f"REGISTRY.example.org/team/a/b:v1@{DIGEST}", True),
        ("registry.example.org/app:v1*", f"registry.example.org/app:v1@{DIGEST}", False),
        (f"registry.example.org/app@{DIGEST}", f"registry.example.org/app:v9@{DIGEST}", True),
    ],
)
def test_images_are_matched_in_full_and_a_tag_beside_a_digest_does_not_count(
    pattern: str, image: str, passes: bool
) -> None:
    """Defaults are filled in first; what a caller claims beside the digest satisfies no rule."""
    config = ExecutorConfig(allowed_images=(PatternRule((pattern,), "config.toml:1"),))
    assert (turned_down(image, config) is None) is passes


def test_a_malformed_reference_passes_no_rule() -> None:
    """It is refused as what it is, before any pattern sees it."""
    config = ExecutorConfig(allowed_images=(PatternRule(("**",), "config.toml:1"),))
    with pytest.raises(InvalidRequest, match="image"):
        turned_down("https://registry.example.org/a", config)
