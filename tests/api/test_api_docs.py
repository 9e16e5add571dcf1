"""Pages made from the code are what the code makes; the written ones name every field; examples are valid."""

from __future__ import annotations

from pathlib import Path

import pytest

import forgeyard_api
from forgeyard_api.jobfile_reader import load_job_file
from forgeyard_api.reference_docs import PAGES
from forgeyard_model.jobfile import job_schema
from forgeyard_model.profile import ExecutionProfile

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))


@pytest.mark.parametrize("name", sorted(PAGES))
def test_generated_pages_are_fresh(name: str) -> None:
    """After a change run `python -m forgeyard_api.reference_docs docs`."""
    assert (ROOT / "docs" / name).read_text() == PAGES[name]()


def test_the_profile_table_has_every_profile() -> None:
    """One column each."""
    assert all(f"`{profile.value}`" in PAGES["profiles.md"]() for profile in ExecutionProfile)


def test_every_field_is_in_the_reference() -> None:
    """docs/job-file.md names each field of each part of the format."""
    text = (ROOT / "docs" / "job-file.md").read_text()
    schema = job_schema()
    models = [schema, *(item for item in schema["$defs"].values() if "properties" in item)]
    names = {name for model in models for name in model["properties"]}
    assert sorted(name for name in names if f"`{name}`" not in text and f"{name}:" not in text) == []


def test_examples_are_there() -> None:
    """The ones the texts speak of."""
    assert {path.name for path in EXAMPLES} >= {"hello.yaml", "build-c.yaml", "steps.yaml"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_become_jobs(path: Path) -> None:
    """Each example can be run by this version, and its source is there."""
    loaded = load_job_file(path)
    loaded.file.to_job(base=loaded.base)
    source = loaded.file.source
    assert source is None or (path.parent / source.path).is_dir()


def test_the_public_names_exist() -> None:
    """What `from forgeyard_api import …` promises can be imported."""
    assert [name for name in forgeyard_api.__all__ if getattr(forgeyard_api, name, None) is None] == []
    with pytest.raises(AttributeError):
        _ = forgeyard_api.Nothing
