"""Properties of the bundle compiler over all plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
from hypothesis import given, settings
from hypothesis import strategies as st

from forgeyard_model.capabilities import ExecutorKind
from forgeyard_model.errors import SandboxError
from forgeyard_model.identity import SandboxId
from forgeyard_model.job import Step
from forgeyard_model.limits import ResourceLimits
from forgeyard_model.plan import ContainerPlan, JobUser, MountKind, Placement, PlanMount, Rlimit
from forgeyard_model.policy import NetworkMode
from forgeyard_oci.spec import compile_bundle, compile_exec

VALIDATOR = jsonschema.Draft202012Validator(
    json.loads(Path(__file__).with_name("runtime-spec-subset.schema.json").read_text())
)

TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=20)
NAME = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0/"), min_size=1, max_size=12).filter(
    lambda name: name not in (".", "..")
)
# Below one directory of each kind's own, so that no generated mount hides another.
PATH = st.lists(NAME, min_size=1, max_size=3).map("/".join)
ENV = st.dictionaries(TEXT.filter(lambda name: bool(name) and "=" not in name), TEXT, max_size=4)
SLOT = st.text(max_size=5)


@st.composite
def mounts(draw: st.DrawFn) -> tuple[PlanMount, ...]:
    """Mounts with any path, each below a directory of its own."""
    paths = draw(st.lists(PATH, max_size=4))
    return tuple(
        PlanMount(
            f"/m{number}/{path}",
            draw(st.sampled_from((MountKind.BIND, MountKind.TMPFS))),
            slot=draw(SLOT),
            read_only=draw(st.booleans()),
            executable=draw(st.booleans()),
            size=draw(st.none() | st.integers(1, 1 << 40)),
            mode=draw(st.none() | st.integers(0, 0o7777)),
        )
        for number, path in enumerate(paths)
    )


PLANS = st.builds(
    ContainerPlan,
    kind=st.sampled_from(ExecutorKind),
    rootfs_identity=TEXT,
    root_read_only=st.booleans(),
    mounts=mounts(),
    user=st.builds(
        JobUser, st.integers(0, 65535), st.integers(0, 65535), st.lists(st.integers(0, 65535), max_size=3).map(tuple)
    ),
    user_namespace=st.booleans(),
    network=st.sampled_from((NetworkMode.DENY, NetworkMode.HOST)),
    capabilities=st.just(()),
    seccomp=st.just("general-build"),
    limits=st.builds(
        ResourceLimits,
        cpus=st.none() | st.floats(0.01, 8192),
        memory=st.none() | st.integers(4 << 20, 1 << 62),
        pids=st.none() | st.integers(4, 4_000_000),
        shm=st.none() | st.integers(1, 1 << 62),
    ),
    rlimits=st.lists(
        st.builds(
            Rlimit, st.sampled_from(("RLIMIT_CORE", "RLIMIT_NOFILE")), st.integers(0, 1 << 62), st.integers(0, 1 << 62)
        ),
        max_size=2,
        unique_by=lambda limit: limit.name,
    ).map(tuple),
    umask=st.integers(0, 0o777),
    env=ENV,
    workdir=st.just("/"),
    steps=st.lists(st.builds(Step, TEXT, stdin=st.none() | st.binary(max_size=8), env=ENV), max_size=2).map(tuple),
)


def placement(plan: ContainerPlan, source: str) -> Placement:
    """A placement that has what `plan` asks for."""
    return Placement(
        sandbox=SandboxId("01jfzq3v5m8r2t4w6x8y0z1a2b"),
        rootfs=f"/root/{source}",
        sources={mount.slot: f"/{source}" for mount in plan.mounts},
        uid_base=100_000 if plan.user_namespace else None,
        uid_count=65536,
        cgroup=None,
        netns=None,
        argv=("/init", source),
    )


@given(PLANS, TEXT)
@settings(max_examples=60, deadline=None)
def test_any_plan_compiles_to_one_valid_bundle(plan: ContainerPlan, source: str) -> None:
    """Paths with blanks, commas, quotes or any script arrive as they are, in a bundle the schema accepts."""
    place = placement(plan, source)
    bundle = compile_bundle(plan, place)
    value = json.loads(bundle.config)
    VALIDATOR.validate(value)
    assert [entry["destination"] for entry in value["mounts"][7:]] == [mount.destination for mount in plan.mounts]
    assert {entry["source"] for entry in value["mounts"] if entry["type"] == "bind"} <= {f"/{source}"}
    assert dict(entry.split("=", 1) for entry in value["process"]["env"]) == dict(plan.env)
    assert compile_bundle(plan, place) == bundle


@given(PLANS, st.lists(TEXT, min_size=1, max_size=3), ENV)
@settings(max_examples=40, deadline=None)
def test_any_exec_has_the_rights_of_init(plan: ContainerPlan, argv: list[str], env: dict[str, str]) -> None:
    """User, capabilities, limits and no_new_privs of an exec are those of init, whatever it runs."""
    place = placement(plan, "s")
    process = json.loads(compile_exec(plan, place, argv, env, "/"))
    init = json.loads(compile_bundle(plan, place).config)["process"]
    assert process == init | {"args": argv, "env": process["env"]}


@given(st.lists(st.sampled_from(("/a", "/a/b", "/a/b/c", "/ab", "/sys", "/dev/x")), min_size=1, max_size=4))
def test_no_accepted_mount_is_hidden_by_a_later_one(paths: list[str]) -> None:
    """Either every mount of the list stays visible, or compiling is refused."""
    hidden = any(
        later == earlier or earlier.startswith(f"{later}/")
        for number, later in enumerate(paths)
        for earlier in ["/sys", "/sys/fs/cgroup", *paths[:number]]
    )
    assert _compiles(paths) is not hidden


def _compiles(paths: list[str]) -> bool:
    plan: Any = ContainerPlan(
        kind=ExecutorKind.PROCESS,
        rootfs_identity="",
        root_read_only=True,
        mounts=tuple(PlanMount(path, MountKind.TMPFS) for path in paths),
        user=JobUser(1, 1),
        user_namespace=False,
        network=NetworkMode.DENY,
        capabilities=(),
        seccomp="general-build",
        limits=ResourceLimits(),
        rlimits=(),
        umask=0,
        env={},
        workdir="/",
        steps=(),
    )
    try:
        compile_bundle(plan, placement(plan, "s"))
    except SandboxError:
        return False
    return True
