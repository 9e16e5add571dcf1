"""Package tools keep their caches below HOME, and work without a network from what is there."""

from __future__ import annotations

from pathlib import Path

import pytest
from builds import PYTHON, build, host_tool, python_paths, toolchain

pytestmark = pytest.mark.kernel

BUILD = "/work/build"

# A package index on loopback that serves one wheel, which pip installs; pip's return code.
INDEX = """
import functools, http.server, os, subprocess, sys, threading, zipfile
os.makedirs("index/hello")
with zipfile.ZipFile("index/hello/hello-1-py3-none-any.whl", "w") as wheel:
    wheel.writestr("hello.py", "print('installed')")
    wheel.writestr("hello-1.dist-info/METADATA", "Metadata-Version: 2.1\\nName: hello\\nVersion: 1\\n")
    wheel.writestr("hello-1.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
    wheel.writestr("hello-1.dist-info/RECORD", "")
class Handler(http.server.SimpleHTTPRequestHandler):
    def end_headers(self):
        self.send_header("Cache-Control", "max-age=600")
        super().end_headers()
    def log_message(self, *args):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory="index"))
threading.Thread(target=server.serve_forever, daemon=True).start()
host = f"127.0.0.1:{server.server_port}"
options = ["-q", "--user", "--no-deps", "--index-url", f"http://{host}/", "--trusted-host", host]
code = subprocess.run([sys.executable, "-m", "pip", "install", *options, "hello"]).returncode
server.shutdown()
sys.exit(code)
"""


def test_pip(shared_state: Path) -> None:
    """pip installs from an index on loopback into HOME and keeps its cache there."""
    script = f"""
cat > index.py <<'X'
{INDEX}
X
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_BREAK_SYSTEM_PACKAGES=1 PYTHONPATH=/site
{PYTHON} index.py; {PYTHON} -m hello; test -n "$(find ~/.cache/pip -type f)"; ls -A ~"""
    assert build(shared_state, script, at=BUILD, host_paths=python_paths()).split() == ["installed", ".cache", ".local"]


def test_npm(shared_state: Path) -> None:
    """npm installs a package of the tree and keeps its logs and cache in HOME."""
    host_tool("npm")
    script = """
mkdir dep app; echo '{"name":"dep","version":"1.0.0","main":"i.js"}' > dep/package.json
echo 'module.exports = "required"' > dep/i.js; echo '{"name":"app","version":"1.0.0"}' > app/package.json; cd app
npm install --offline --no-audit --no-fund --silent ../dep; node -p 'require("dep")'; ls -A ~"""
    assert build(shared_state, script, at=BUILD).split() == ["required", ".npm"]


def test_cargo(shared_state: Path) -> None:
    """cargo builds and runs a program offline, with a toolchain that a policy names."""
    rust = toolchain("rust", version=("rustc", "--print", "sysroot"))
    script = "cargo init -q --vcs none --name hello; cargo run -q --offline; ls -A ~"
    out = build(shared_state, script, at=BUILD, toolchains=(rust,))
    assert out.split() == ["Hello,", "world!", ".cargo"]


def test_go(shared_state: Path) -> None:
    """go compiles a package with its build cache in HOME, with a toolchain that a policy names."""
    go = toolchain("go", version=("go", "env", "GOROOT"))
    # A package that imports nothing: the standard library alone would take ten seconds to compile.
    script = """
go mod init example.org/x 2> /dev/null; printf 'package x\\n\\nfunc F() int { return 1 }\\n' > x.go
go build ./...; test -n "$(find ~/.cache/go-build -name '*-d')"; gofmt -l .; echo built"""
    assert build(shared_state, script, at=BUILD, toolchains=(go,)) == "built\n"


@pytest.mark.parametrize("user", ["1000", "root", None])
def test_home_is_writable_in_an_image(shared_state: Path, busybox_image: str, user: str | None) -> None:
    """Whoever the image or the job names, HOME is theirs, so that a cache can be made there."""
    script = "mkdir -p ~/.cache/x; echo y > ~/.cache/x/f; stat -c %u ~; id -u"
    out = build(shared_state, script, image=busybox_image, user=user)
    assert len(set(out.split())) == 1
