"""What a host makes of a request, as a table: each field, each missing feature, each rule of the configuration."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forgeyard_executor.capabilities import needed, refuse_missing
from forgeyard_executor.config_apply import configured_job, matches, registry_of, turned_down
from forgeyard_executor.explain import explain
from forgeyard_executor.explain_facts import HostFacts
from forgeyard_model.capabilities import ExecutorCapabilities, Feature, Probe, ResourceControls
from forgeyard_model.config import ExecutorConfig, PatternRule
from forgeyard_model.enforcement import Enforcement, PlanReport, PlanRow
from forgeyard_model.errors import ExecutorError, ForgeyardError, InvalidRequest, SandboxError
from forgeyard_model.identity import AttemptContext
from forgeyard_model.job import Job, Step
from forgeyard_model.limits import Limits, ResourceLimits
from forgeyard_model.policy import ApprovedHostPath, IsolationLevel, NetworkMode, NetworkPolicy, SourceMode
from forgeyard_model.profile import ExecutionProfile
from forgeyard_model.request import ExecutionRequest, PreparedWorkspace, request_from_job

DIGEST = "sha256:" + "a" * 64
CLAIMS = ExecutorCapabilities(
    runtime="runc 1.1.5",
    isolation_levels=frozenset({IsolationLevel.PROCESS, IsolationLevel.NAMESPACE, IsolationLevel.CONTAINER}),
    network_modes=frozenset({NetworkMode.DENY, NetworkMode.HOST}),
    resource_controls=ResourceControls(cpu=True, memory=True, pids=True, disk=True),
    user_namespace=True,
    seccomp=True,
    cgroup="v1",
)
ALL_WORK = replace(CLAIMS, probes=tuple(Probe(feature, works=True) for feature in Feature))
JOB = Job(rootfs="host", steps=(Step("true"),))


def request(job: Job = JOB, *, source: str | None = "/srv/tree") -> ExecutionRequest:
    """`job` as a request."""
    return request_from_job(job, context=AttemptContext("x"), workspace=PreparedWorkspace(source))


def facts(backend: ExecutorCapabilities = ALL_WORK, config: ExecutorConfig | None = None) -> HostFacts:
    """A host with one backend."""
    return HostFacts((backend,), 20_000, config or ExecutorConfig())


def report(job: Job = JOB, known: HostFacts | None = None) -> PlanReport:
    """The report of `job`."""
    return explain(request(job), known or facts()).report


def row(found: PlanReport, name: str) -> PlanRow:
    """The row of one field."""
    return next(item for item in found.rows if item.field == name)


def broken(*features: Feature) -> ExecutorCapabilities:
    """A host on which probes saw some features fail."""
    probes = (
        Probe(feature, feature not in features, details="seen to fail", cure=f"mend {feature.value}")
        for feature in Feature
    )
    return replace(CLAIMS, probes=tuple(probes))


def test_every_field_has_one_row() -> None:
    """The rows the issue asks for, each once, none refused on a host where all works."""
    job = replace(
        JOB,
        limits=Limits(disk="64MiB"),
        toolchains=(ApprovedHostPath("/opt/py", "/toolchains/py"),),
        host_paths=(ApprovedHostPath("/srv/models", "/models"),),
    )
    found = report(job)
    names = [item.field for item in found.rows]
    assert sorted(set(names)) == sorted(names)
    assert set(names) >= {
        *("isolation", "user_namespace", "seccomp", "capabilities", "no_new_privs", "network", "rootfs"),
        *("root_read_only", "source.mode", "source.owner", "toolchains", "host_path", "output_cap", "timeout"),
        *("resources.cpus", "resources.memory", "resources.swap", "resources.pids", "resources.disk"),
        *("resources.nofile", "resources.shm", "prepare_timeout", "grace", "finally_timeout"),
    }
    assert found.runnable
    assert all(item.by for item in found.rows)


def test_sizes_are_echoed_in_mib() -> None:
    """However they were written."""
    found = report(replace(JOB, limits=Limits(memory="2GiB", disk="1g", shm=1 << 20)))
    shown = {item.field: item.asked for item in found.rows}
    assert shown["resources.memory"] == "2048 MiB"
    assert (shown["resources.disk"], shown["resources.shm"]) == ("1024 MiB", "1 MiB")
    assert row(found, "resources.disk").status is Enforcement.EMULATED


@pytest.mark.parametrize("feature", sorted(Feature))
@pytest.mark.parametrize("image", [None, f"oci:/srv/image@{DIGEST}"])
def test_a_missing_feature_refuses_exactly_where_it_is_needed(feature: Feature, image: str | None) -> None:
    """Plan and prepare decide by the same facts: with one feature gone, both refuse the jobs that need it alone."""
    jobs = [
        replace(JOB, rootfs=None if image else "host", image=image, limits=limits, network=network, profile=profile)
        for limits in (ResourceLimits(), Limits(disk="64MiB"))
        for network, profile in (
            (NetworkPolicy.deny(), ExecutionProfile.STANDARD_CI),
            (NetworkPolicy.host(), ExecutionProfile.DEVELOPMENT),
        )
    ]
    for job in jobs:
        asked = request(job)
        found = explain(asked, facts(broken(feature))).report
        assert found.runnable == (feature not in set(needed(asked))), (feature, [r for r in found.rows if r.refused])
        if not found.runnable:
            with pytest.raises(SandboxError) as early:
                refuse_missing(asked, broken(feature))
            with pytest.raises(SandboxError) as late:
                found.require()
            assert early.value.reason == late.value.reason == f"no_{feature.value}"
            assert f"mend {feature.value}" in [item.cure for item in found.rows if item.refused]


def test_before_the_first_probe_the_adapters_claims_decide() -> None:
    """A job does not wait for probes; the gate checks what was claimed."""
    assert report(known=facts(CLAIMS)).runnable
    without = replace(CLAIMS, resource_controls=ResourceControls(cpu=True, memory=False, pids=True, disk=True))
    assert row(report(known=facts(without)), "resources.memory").refused


def test_a_probe_that_could_not_look_is_no_refusal() -> None:
    """Nothing is known then; the claim stands until the gate."""
    unseen = replace(CLAIMS, probes=(Probe(Feature.SECCOMP, works=False, seen=False),))
    assert report(known=facts(unseen)).runnable


@pytest.mark.parametrize("mode", [NetworkMode.ALLOW, NetworkMode.RESTRICTED, NetworkMode.FETCH_ONLY])
def test_a_network_that_can_not_be_enforced_is_its_own_row(mode: NetworkMode) -> None:
    """The boundary is fine, the network is not, and the error says which."""
    found = report(replace(JOB, network=NetworkPolicy(mode)))
    assert [item.field for item in found.rows if item.refused] == ["network"]
    with pytest.raises(ExecutorError, match=f"network {mode.value} can't be enforced"):
        found.require()


def test_high_assurance_is_refused() -> None:
    """There is no VM backend."""
    found = report(replace(JOB, profile=ExecutionProfile.HIGH_ASSURANCE))
    assert row(found, "isolation").refused
    assert "below virtual_machine" in row(found, "isolation").note


def test_nofile_is_clamped_and_said() -> None:
    """C67: a limit above the executor's own hard limit is held at that, as a note."""
    found = report(replace(JOB, limits=Limits(nofile=30_000)))
    clamped = row(found, "resources.nofile")
    assert (clamped.status, clamped.asked) == (Enforcement.CLAMPED, "30000")
    assert "20000" in clamped.note
    assert found.runnable
    assert found.notes == (f"resources.nofile: {clamped.note}",)


def test_exact_limits_refuse_what_would_be_clamped() -> None:
    """Where the organisation wants limits to hold exactly, a clamp is a refusal by name."""
    exact = facts(config=ExecutorConfig(exact_limits=True, origins=(("exact_limits", "c.toml:1"),)))
    found = report(replace(JOB, limits=Limits(nofile=30_000)), exact)
    refused = row(found, "resources.nofile")
    assert refused.status is Enforcement.REFUSED
    assert not found.runnable
    with pytest.raises(InvalidRequest, match=r"30000.*20000.*c\.toml:1"):
        found.require()
    assert report(known=exact).runnable


def test_a_source_that_can_not_be_mapped_is_said() -> None:
    """C32's kind: the job runs, and its files are nobody's."""
    looked = replace(facts(), source_idmap=Probe(Feature.IDMAPPED_MOUNT, works=False, details="nfs"))
    owner = row(report(known=looked), "source.owner")
    assert owner.status is Enforcement.CLAMPED
    assert "nobody: nfs" in owner.note


@pytest.mark.parametrize(
    ("limit", "asked", "field", "shown"),
    [
        ({"memory": "1GiB"}, {"memory": "2GiB"}, "resources.memory", "2048 MiB"),
        ({"cpus": 2}, {"cpus": 3}, "resources.cpus", "3"),
        ({"pids": 100}, {"pids": 101}, "resources.pids", "101"),
        ({"disk": "1GiB"}, {"disk": "2GiB"}, "resources.disk", "2048 MiB"),
        ({"nofile": 100}, {"nofile": 101}, "resources.nofile", "101"),
        ({"shm": "1MiB"}, {"shm": "2MiB"}, "resources.shm", "2 MiB"),
        ({"wall_time": "1m"}, {"wall_time": "2m"}, "timeout", "2m"),
    ],
)
def test_more_than_the_maximum_is_refused_by_name(
    limit: dict[str, str], asked: dict[str, str], field: str, shown: str
) -> None:
    """The field, what was asked, the maximum, and where it stands."""
    key = f"limits.maximum.{'timeout' if field == 'timeout' else field.rpartition('.')[2]}"
    config = ExecutorConfig(
        maximum_limits=Limits(**limit),  # type: ignore[arg-type]  # one of each kind, by name
        origins=((key, "config.toml:3"),),
    )
    job = configured_job(replace(JOB, limits=Limits(**asked)), config)  # type: ignore[arg-type]  # as above
    found = report(job.job, facts(config=config))
    assert [item.field for item in found.rows if item.refused] == [field]
    with pytest.raises(InvalidRequest, match=r"config\.toml:3") as caught:
        found.require()
    assert (caught.value.field, caught.value.value) == (field, shown)


def test_no_limit_is_more_than_any_maximum() -> None:
    """A request of the API without a disk limit does not slip past one."""
    config = ExecutorConfig(maximum_limits=Limits(disk="1GiB"))
    assert row(report(known=facts(config=config)), "resources.disk").refused


def test_a_default_above_the_maximum_is_cut_and_said() -> None:
    """Nobody asked for the profile's 2 GiB: the job gets the maximum, as a note and not a refusal."""
    config = ExecutorConfig(maximum_limits=Limits(memory="1GiB", disk="1GiB"), default_limits=Limits(pids=99))
    configured = configured_job(JOB, config)
    assert (configured.job.limits.memory, configured.job.limits.pids) == (1 << 30, 99)
    known = replace(facts(config=config), lowered=configured.lowered)
    found = report(configured.job, known)
    memory, disk = row(found, "resources.memory"), row(found, "resources.disk")
    assert (memory.status, memory.asked, disk.asked) == (Enforcement.CLAMPED, "2048 MiB", "no limit")
    assert "1024 MiB instead" in memory.note
    assert found.runnable


def test_a_jobs_own_limit_beats_the_configured_default() -> None:
    """A default is for those who name none."""
    config = ExecutorConfig(default_limits=Limits(memory="1GiB"))
    assert configured_job(replace(JOB, limits=Limits(memory="3GiB")), config).job.limits.memory == 3 << 30


def test_the_organisations_minimum_shows_where_it_stands() -> None:
    """A host-rootfs job on a host that demands containers."""
    config = ExecutorConfig(
        minimum_isolation=IsolationLevel.CONTAINER, origins=(("minimum_isolation", "/etc/x.toml:1"),)
    )
    refused = row(report(known=facts(config=config)), "isolation")
    assert (refused.status, refused.by) == (Enforcement.REFUSED, "minimum_isolation (/etc/x.toml:1)")
    image = replace(JOB, rootfs=None, image=f"oci:/srv/image@{DIGEST}")
    assert report(image, facts(config=config)).runnable


@pytest.mark.parametrize(
    ("pattern", "text", "fits"),
    [
        ("registry.example.org/team/*", f"registry.example.org/team/api@{DIGEST}", True),
        ("registry.example.org/team/*", "registry.example.org/team/a/b", False),
        ("registry.example.org/**", "registry.example.org/team/a/b", True),
        ("*.example.org", "registry.example.org", True),
        ("*.example.org", "registry.example.org.evil.test", False),
        ("oci:/srv/images/*", f"oci:/srv/images/app@{DIGEST}", True),
        ("oci:/srv/images/*", f"oci:/srv/images/a/../../x@{DIGEST}", False),
        ("a.b", "axb", False),
        ("a?c", "abc", True),
        ("", "", True),
    ],
)
def test_patterns(pattern: str, text: str, fits: bool) -> None:
    """A star stays within one part, two do not, and a dot is a dot."""
    assert matches(pattern, text) is fits


@pytest.mark.parametrize(
    ("image", "registry"),
    [
        (f"registry.example.org/team/api@{DIGEST}", "registry.example.org"),
        ("localhost:5000/api", "localhost:5000"),
        ("debian", "docker.io"),
        ("team/api", "docker.io"),
        (f"oci:/srv/images/app@{DIGEST}", "oci:/srv/images/app"),
        ("oci:/srv/images/app:tag", "oci:/srv/images/app"),
    ],
)
def test_the_registry_of_a_reference(image: str, registry: str) -> None:
    """As container engines read it; a layout on disk is its own place."""
    assert registry_of(image) == registry


def test_an_image_has_to_pass_every_rule() -> None:
    """Registries and images, the system's list and the user's: one that does not fit refuses, and is named."""
    image = f"oci:/srv/images/app@{DIGEST}"
    rule = PatternRule(("oci:/srv/images/*",), "config.toml:1")
    other = PatternRule(("oci:/srv/other/*",), "user.toml:2")
    assert turned_down(image, ExecutorConfig(allowed_images=(rule,), allowed_registries=(rule,))) is None
    assert turned_down(image, ExecutorConfig(allowed_images=(rule, other))) == ("allowed_images", other)
    config = ExecutorConfig(allowed_registries=(other,))
    found = report(replace(JOB, rootfs=None, image=image), facts(config=config))
    assert row(found, "image").refused
    with pytest.raises(ForgeyardError, match=r"allowed_registries \(user.toml:2\)"):
        found.require()


def test_approved_paths_reach_the_job_but_no_image_loses_its_own() -> None:
    """/usr/local and /opt are parts of the host rootfs; other paths are shown to every job."""
    approved = (ApprovedHostPath("/usr/local", "/usr/local"), ApprovedHostPath("/srv/m", "/models"))
    config = ExecutorConfig(approved_host_paths=approved)
    assert configured_job(JOB, config).job.host_paths == approved
    image = replace(JOB, rootfs=None, image=f"oci:/srv/image@{DIGEST}")
    assert configured_job(image, config).job.host_paths == approved[1:]


def test_a_read_only_source_needs_no_overlay() -> None:
    """A row stands or falls with the feature that its mode uses."""
    job = replace(JOB, source_mode=SourceMode.RO)
    assert report(job, facts(broken(Feature.OVERLAY))).runnable
    assert not report(JOB, facts(broken(Feature.OVERLAY))).runnable
