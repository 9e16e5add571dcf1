"""Real programs of this host on the host rootfs, in a real runc container made by hand."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from forgeyard_model.plan import RootfsPlan
from forgeyard_process_shim.hostroot import EXTRA_WRITABLE, HOSTS, HostRootfs, hosts_file

pytestmark = [pytest.mark.kernel, pytest.mark.skipif(os.getuid() != 0, reason="mounts and runc need root")]

HOSTNAME = "fy-test"
WRITABLE = ("/tmp", "/work/build", "/home/forgeyard", *EXTRA_WRITABLE)
USER_NAMESPACE = {"containerID": 0, "hostID": 300000, "size": 65536}


def bind(source: object, destination: str, *options: str) -> dict[str, object]:
    """A bind mount of a bundle."""
    flags = ["bind", "nosuid", "nodev", *options]
    return {"source": str(source), "destination": destination, "type": "bind", "options": flags}


@dataclass
class Box:
    """A plan to run commands on, and a directory for their writable places."""

    plan: RootfsPlan
    base: Path

    def run(self, script: str, *, userns: bool = False, **env: str) -> subprocess.CompletedProcess[str]:
        """Run a shell script as the job user, without network or capabilities."""
        name = f"fy-test-{secrets.token_hex(6)}"
        bundle = self.base / name
        bundle.mkdir()
        try:
            (bundle / "config.json").write_text(json.dumps(self._config(bundle, script, userns, env)))
            return subprocess.run(
                ["runc", "--root", str(bundle / "state"), "run", "-b", str(bundle), name],
                capture_output=True,
                text=True,
                timeout=50,
            )
        finally:
            shutil.rmtree(bundle)

    def _config(self, bundle: Path, script: str, userns: bool, env: dict[str, str]) -> dict[str, object]:
        namespaces = ["pid", "mount", "ipc", "uts", "network"] + ["user"] * userns
        maps = {"uidMappings": [USER_NAMESPACE], "gidMappings": [USER_NAMESPACE]} if userns else {}
        return {
            "ociVersion": "1.0.2",
            "hostname": HOSTNAME,
            "root": {"path": self.plan.lowers[0], "readonly": True},
            "mounts": self._mounts(bundle, USER_NAMESPACE["hostID"] if userns else 0),
            "process": {
                "args": ["/bin/sh", "-ec", script],
                "cwd": "/work/build",
                "env": [f"{key}={value}" for key, value in ({**ENVIRONMENT, **env}).items()],
                "user": {"uid": self.plan.user.uid, "gid": self.plan.user.gid},
                "noNewPrivileges": True,
            },
            "linux": {"namespaces": [{"type": kind} for kind in namespaces], **maps},
        }

    def _mounts(self, bundle: Path, base_id: int) -> list[dict[str, object]]:
        mounts: list[dict[str, object]] = [
            {"source": "proc", "destination": "/proc", "type": "proc"},
            {"source": "tmpfs", "destination": "/dev", "type": "tmpfs", "options": ["nosuid", "mode=755"]},
        ]
        mounts += [bind(item.source, item.destination, "ro") for item in self.plan.binds]
        for path in WRITABLE:
            place = bundle / path.strip("/").replace("/", "-")
            place.mkdir()
            os.chown(place, base_id + 1000, base_id + 1000)
            mounts.append(bind(place, path, "rw"))
        hosts = bundle / "hosts"
        hosts.write_text(hosts_file(HOSTNAME))
        return [*mounts, bind(hosts, HOSTS, "ro")]


ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/home/forgeyard",
    "LANG": "C.UTF-8",
    "TZ": "UTC",
}


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    """A directory that a runtime in a user namespace can pass through, as the state directory is."""
    with tempfile.TemporaryDirectory(prefix="fy-hostroot-") as name:
        Path(name).chmod(0o711)
        yield Path(name)


@pytest.fixture(scope="module")
def box(base: Path) -> Box:
    """The host rootfs without approvals."""
    return Box(HostRootfs(base / "cache").plan(), base)


def needs(*programs: str) -> None:
    """Skip when a program is not installed below /usr: then there is nothing to test."""
    for program in programs:
        found = shutil.which(program, path="/usr/bin:/usr/sbin")
        if found is None or not os.path.realpath(found).startswith("/usr/") or "/usr/local/" in os.path.realpath(found):
            pytest.skip(f"{program} is not installed below /usr on this host")


def ok(box: Box, script: str, **env: str) -> str:
    """Run, insist on exit 0, return stdout."""
    done = box.run(script, **env)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout.strip()


def test_awk_through_alternatives(box: Box) -> None:
    """awk is a link into /etc/alternatives on Debian."""
    needs("awk")
    assert ok(box, "echo 1 2 | awk '{print $1 + $2}'") == "3"


def test_text_and_archive_tools(box: Box) -> None:
    """tar, gzip, sed, find, sort and xargs do a small day's work."""
    script = "mkdir d; echo hi > d/f; tar czf t.tgz d; tar tzf t.tgz | sort | xargs -n1 basename | sed s/f/F/ | tail -1"
    assert ok(box, script) == "F"


def test_git_commits(box: Box) -> None:
    """git init and commit in a writable directory, with its templates and its editor-less defaults."""
    needs("git")
    script = (
        "git init -q r && cd r && echo x > x && git add x"
        " && git -c user.name=a -c user.email=a@example.org commit -qm one && git log --format=%s"
    )
    assert ok(box, script) == "one"


def test_compiler_and_make(box: Box) -> None:
    """cc (a link through alternatives) compiles and links, the result runs, make drives it."""
    needs("gcc", "make")
    script = r"""printf '#include <stdio.h>\nint main(void){puts("built");return 0;}\n' > hello.c
        make -s hello && ./hello"""
    assert ok(box, script) == "built"


def test_python_finds_the_hosts_authorities(box: Box) -> None:
    """The system's python3 trusts in a job what it trusts on the host."""
    needs("python3")
    program = "import ssl; print(len(ssl.create_default_context().get_ca_certs()))"
    clean = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
    host = subprocess.run(["/usr/bin/python3", "-c", program], env=clean, capture_output=True, text=True, check=True)
    if host.stdout.strip() == "0":
        pytest.skip("ca-certificates is not installed on this host")

    assert ok(box, f"/usr/bin/python3 -c '{program}'") == host.stdout.strip()


def test_openssl_verifies_by_hashed_directory(box: Box) -> None:
    """The hash links of /etc/ssl/certs lead to certificates: each root on disk verifies itself."""
    needs("openssl")
    if not Path("/etc/ssl/certs/ISRG_Root_X1.pem").exists():
        pytest.skip("ca-certificates is not installed on this host")
    assert ok(box, "openssl verify -CApath /etc/ssl/certs /etc/ssl/certs/ISRG_Root_X1.pem").endswith("OK")
    assert ok(box, "find -L /etc -type l -path '*ssl*'") == ""


def test_java_compiles_and_runs(box: Box) -> None:
    """The JVM finds its configuration in /etc, its trust store, and the name of its own host."""
    needs("java", "javac")
    script = r"""cat > T.java <<'END'
    import java.net.InetAddress;
    public class T { public static void main(String[] a) throws Exception {
      javax.net.ssl.SSLContext.getDefault();
      System.out.println(InetAddress.getLocalHost().getHostName()); } }
END
    javac T.java && java -Xshare:auto -cp . T"""
    assert ok(box, script) == HOSTNAME


def test_node_runs(box: Box) -> None:
    """node runs a script and reads a directory."""
    needs("node")
    assert ok(box, "node -e 'console.log(require(\"os\").userInfo().username)'") == "forgeyard"


def test_perl_runs(box: Box) -> None:
    """perl loads modules that live in /usr."""
    needs("perl")
    assert ok(box, "perl -MPOSIX -MFile::Temp -e 'print POSIX::floor(2.5)'") == "2"


def test_identity_and_names(box: Box) -> None:
    """The job is forgeyard; localhost and the sandbox's own name resolve without any server."""
    assert ok(box, "id -un; id -gn; id -u; echo ~").split() == ["forgeyard", "forgeyard", "1000", "/home/forgeyard"]
    assert "localhost" in ok(box, "getent hosts localhost")
    assert ok(box, 'getent hosts "$(hostname)"').split()[-1] == HOSTNAME


def test_unknown_names_fail_fast(box: Box) -> None:
    """Without a network a look-up is refused at once, instead of waiting for a server."""
    # Killed at 3 s: a resolver with a server to wait for takes 5 for the first try alone.
    done = box.run("timeout 3 getent hosts registry.example.org")

    assert done.returncode == 2


def test_locale_and_time_zone(box: Box) -> None:
    """C.UTF-8 counts characters, and zones come from the host's database."""
    assert ok(box, "printf '\\303\\251' | wc -m") == "1"
    if Path("/usr/share/zoneinfo/Asia/Tokyo").exists():
        assert ok(box, "date -d @0 +%H", TZ="Asia/Tokyo") == "09"
    assert ok(box, "date +%Z") == "UTC"


def test_what_is_the_hosts_is_not_there(box: Box) -> None:
    """No shadow, no home of others, no state, no socket, no site tool: not hidden, absent."""
    absent = ["/etc/shadow", "/etc/gshadow", "/etc/ssl/private", "/root", "/var/lib", "/var/log", "/srv", "/mnt"]
    absent += ["/var/cache", "/run/docker.sock", "/run/containerd", "/run/lock", "/boot", "/usr/etc/npmrc"]
    tests = "; ".join(f"[ ! -e {path} ] || echo {path}" for path in absent)

    assert ok(box, tests) == ""
    assert ok(box, "ls -A /home").split() == ["forgeyard"]
    assert ok(box, "ls -A /usr/local /opt /run | grep -v : || true") == ""
    top = ".forgeyard bin dev etc home lib lib32 lib64 libx32 opt proc run sbin sys tmp toolchains usr var work"
    assert set(ok(box, "ls -A /").split()) <= {*top.split()}


def test_root_is_read_only(box: Box) -> None:
    """Only the places that are meant to be written to can be."""
    denied = "for d in / /etc /usr /usr/bin /usr/local /opt /var; do touch $d/x 2>/dev/null && echo $d; done; true"
    assert ok(box, denied) == ""
    assert ok(box, " ".join(f"touch {path}/x;" for path in WRITABLE) + " echo yes") == "yes"


def test_approved_local_and_opt_are_shown(base: Path) -> None:
    """With the approvals the job sees what the host has there, still without the site's configuration."""
    shown = Box(HostRootfs(base / "cache", local=True, opt=True).plan(), base)

    listing = ok(shown, "ls -A /usr/local; echo; ls -A /opt").split()

    assert sorted(listing) == sorted([*os.listdir("/usr/local"), *os.listdir("/opt")])
    assert ok(shown, "ls -A /usr/local/etc 2>/dev/null | grep -x npmrc || true") == ""


def test_works_in_a_user_namespace(box: Box) -> None:
    """With a uid range of its own the job is still forgeyard and its programs run."""
    done = box.run("id -un; echo x > /work/build/x; awk 1 /work/build/x", userns=True)

    assert (done.returncode, done.stdout.split()) == (0, ["forgeyard", "x"]), done.stderr
