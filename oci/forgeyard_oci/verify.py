"""Looks whether a store is what it says it is: blobs hash to their names, trees are as they were unpacked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Final

from forgeyard_oci.claims import claimed
from forgeyard_oci.image_info import Problem, VerifyReport
from forgeyard_oci.layers import EMPTY, FILES, TREE, named_by
from forgeyard_oci.locks import store_lock
from forgeyard_oci.prune import remove_tree
from forgeyard_oci.store_parts import StoreParts
from forgeyard_oci.tree_records import check_tree

_MOST_SHOWN: Final = 20
"""Findings of one tree that are reported one by one."""


class Verifier:
    """One verification of a store."""

    def __init__(self, parts: StoreParts) -> None:
        self._parts = parts
        self._blobs = self._trees = self._bytes = 0

    def run(self, *, repair: bool) -> VerifyReport:
        """Look at everything; with `repair`, remove what is bad and in no use."""
        problems = [*self._bad_blobs(), *self._bad_trees()]
        if repair:
            problems = [self._repair(problem) for problem in problems]
        # After the repairs, which leave records and names of what is gone.
        for problem in [*self._bad_records(), *self._bad_names()]:
            problems.append(self._repair(problem) if repair else problem)
        return VerifyReport(self._blobs, self._trees, self._bytes, tuple(problems))

    def _bad_blobs(self) -> Iterator[Problem]:
        for digest, path in self._parts.blobs.all():
            self._blobs += 1
            self._bytes += path.stat().st_size if path.exists() else 0
            if found := self._parts.blobs.problem(digest):
                yield Problem("blob", digest, found)

    def _bad_trees(self) -> Iterator[Problem]:
        for place in sorted(self._parts.paths.layers.iterdir()):
            if place.name == EMPTY:
                continue
            self._trees += 1
            if not self._parts.layers.trusted([place.name]):
                yield Problem("tree", place.name, "it may have been lost in part when the machine went down")
                continue
            found = self._tree_findings(place)
            if not place.exists():
                continue  # removed while we looked
            more = [f"and {len(found) - _MOST_SHOWN} more"] if len(found) > _MOST_SHOWN else []
            if found:
                yield Problem("tree", place.name, "; ".join([*found[:_MOST_SHOWN], *more]))

    def _tree_findings(self, place: Path) -> list[str]:
        try:
            return check_tree(place / TREE, place / FILES)
        except OSError as error:
            return [f"can't be read: {error.strerror}"]

    def _bad_records(self) -> Iterator[Problem]:
        for used in self._parts.records.all():
            record = used.record
            if not self._parts.layers.trusted(record.folders()):
                yield Problem("record", used.path.name, "a layer's tree is missing")
            elif record.stored and not all(self._parts.blobs.has(*blob) for blob in record.blobs().items()):
                yield Problem("record", used.path.name, "a blob is missing")

    def _bad_names(self) -> Iterator[Problem]:
        for name, digest in self._parts.names.all().items():
            if not self._parts.blobs.path(digest).exists():
                yield Problem("name", name, f"what it names is not there: {digest}")

    def _repair(self, problem: Problem) -> Problem:
        trash: list[Path] = []
        try:
            with store_lock(self._parts.paths.store_lock, alone=True):
                claims = claimed(self._parts.paths.claims)
                if problem.kind == "tree":
                    return self._repair_tree(problem, claims, trash)
                if problem.kind == "record":
                    return self._repair_record(problem)
                if problem.kind == "name":
                    self._parts.names.remove(lambda name, _: name == problem.what)
                    return replace(problem, repaired=True)
                if problem.what in claims:
                    return replace(problem, held=True)
                self._parts.blobs.remove(problem.what)
                return replace(problem, repaired=True)
        finally:
            for path in trash:
                remove_tree(path)

    def _repair_tree(self, problem: Problem, claims: set[str], trash: list[Path]) -> Problem:
        users = [image for image in self._parts.images() if problem.what in image.folders()]
        if named_by(problem.what) in claims or self._parts.forget(users) is not None:
            return replace(problem, held=True)
        trash.append(self._parts.layers.discard(problem.what))
        return replace(problem, repaired=True)

    def _repair_record(self, problem: Problem) -> Problem:
        users = [
            image for image in self._parts.images() if any(used.path.name == problem.what for used in image.records)
        ]
        return replace(problem, repaired=True) if self._parts.forget(users) is None else replace(problem, held=True)
