#!/bin/sh
# The long runs, which take too long for every change: `./dev nightly`, or `./dev nightly STEP...` for some of them.
# POSIX sh, like dev, which prepares everything and calls this.
#
#   FORGEYARD_TEST_JOBS     jobs on each adapter (300)
#   FORGEYARD_FUZZ_SECONDS  seconds for each fuzz target (600)
#   FORGEYARD_CONTAINERD_2  version of containerd 2 to build (v2.0.5)
#   CI=true                 a step whose tool is missing fails instead of being skipped
#
# A step is a line of `steps` and a function `step_NAME`, which returns 0, SKIPPED after `skip`, or anything else when
# it failed. One that fails stops no other.
set -u

ROOT=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd -P)
cd "$ROOT" || exit 1
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
PYTHON=$ROOT/.venv/bin/python
CACHE=$ROOT/.cache
SKIPPED=77
export FORGEYARD_TEST_JOBS="${FORGEYARD_TEST_JOBS:-300}" FORGEYARD_FUZZ_SECONDS="${FORGEYARD_FUZZ_SECONDS:-600}"
CONTAINERD_2=${FORGEYARD_CONTAINERD_2:-v2.0.5}
CONTAINERD_2_BIN=$CACHE/containerd-$CONTAINERD_2
trap 'exit 130' INT
trap 'exit 143' TERM

steps() {
    cat <<TEXT
leaks $FORGEYARD_TEST_JOBS jobs with every ending on each adapter, after which nothing may be left
fuzz every fuzz target for $FORGEYARD_FUZZ_SECONDS seconds
containerd2 the adapter, conformance and leaks on containerd $CONTAINERD_2, built with go
runsc the contract of the adapter for gVisor's runsc, built with go
rustagent examples/rust-agent, built with cargo, against a server
TEXT
}

say() { printf 'nightly: %s\n' "$*"; }

have() { command -v "$1" >/dev/null 2>&1; }

# skip WHY: what a step ends with when its tool is missing.
skip() {
    say "SKIPPED $STEP: $1"
    return "$SKIPPED"
}

tests() { "$PYTHON" -m pytest --durations=10 --durations-min=1 "$@"; }

# --- steps ---------------------------------------------------------------------------------------------------------

step_leaks() { tests tests/chaos/test_chaos_adapters.py; }

step_fuzz() {
    "$PYTHON" -c 'import atheris' 2>/dev/null || { skip "atheris is not in .venv (./dev setup installs it)" || return; }
    # Two at a time, as the machine of the tests has two cores.
    tests -n 2 tests/fuzz
}

step_containerd2() {
    have go || [ -x "$CONTAINERD_2_BIN/containerd" ] ||
        { skip "go is not installed, with which containerd $CONTAINERD_2 is built" || return; }
    build_containerd_2 || return 1
    (
        export FORGEYARD_TEST_CONTAINERD="$CONTAINERD_2_BIN"
        tests -k containerd tests/runtimes tests/conformance tests/executor/test_executor_adapters.py \
            tests/chaos/test_chaos_adapters.py
    )
}

step_runsc() {
    built=0
    mkdir -p "$CACHE"
    sh tests/conformance/get_runsc.sh "$CACHE/runsc" || built=$?
    [ "$built" -ne 77 ] || { skip "go is not installed, with which runsc is built" || return; }
    [ "$built" -eq 0 ] || return 1
    (
        export FORGEYARD_TEST_RUNSC="$CACHE/runsc"
        tests -k runsc tests/conformance
    )
}

build_containerd_2() {
    [ ! -x "$CONTAINERD_2_BIN/containerd" ] || return 0
    say "building containerd $CONTAINERD_2"
    module=github.com/containerd/containerd/v2
    rm -rf "$CONTAINERD_2_BIN.new"
    mkdir -p "$CONTAINERD_2_BIN.new/source"
    # Not `go install NAME@VERSION`: that takes no module with exclude directives, as containerd has.
    (
        cd "$CONTAINERD_2_BIN.new/source" && export GOFLAGS=-mod=mod GOBIN="$CONTAINERD_2_BIN.new" &&
            go mod init nightly && go get "$module@$CONTAINERD_2" &&
            go install "$module/cmd/containerd" "$module/cmd/containerd-shim-runc-v2"
    ) && rm -rf "$CONTAINERD_2_BIN.new/source" && mv "$CONTAINERD_2_BIN.new" "$CONTAINERD_2_BIN"
}

step_rustagent() {
    cargo=$(command -v cargo || echo "$HOME/.cargo/bin/cargo")
    [ -x "$cargo" ] || { skip "cargo is not installed, with which examples/rust-agent is built" || return; }
    # Cargo finds its own compiler beside itself.
    (
        export CARGO_TARGET_DIR="$CACHE/rust-agent" PATH="$(dirname "$cargo"):$PATH" &&
            "$cargo" build --quiet --manifest-path examples/rust-agent/Cargo.toml
    ) || return 1
    FORGEYARD_TEST_RUST_AGENT="$CACHE/rust-agent/debug/rust-agent" tests tests/examples/rust_agent.py
}

# --- all of them ---------------------------------------------------------------------------------------------------

about() { steps | sed -n "s/^$1 //p"; }

# run_step NAME: one line of SUMMARY, and 1 when it counts as failed.
run_step() {
    STEP=$1
    say "$STEP: $(about "$STEP")"
    begun=$(date +%s)
    "step_$STEP"
    case $? in
        0) verdict=passed ;;
        "$SKIPPED") verdict=SKIPPED ;;
        *) verdict=FAILED ;;
    esac
    SUMMARY="$SUMMARY$(printf '%-8s %s (%s s): %s' "$verdict" "$STEP" "$(($(date +%s) - begun))" "$(about "$STEP")")
"
    [ "$verdict" = passed ] || { [ "$verdict" = SKIPPED ] && [ "${CI:-}" != true ]; }
}

# Before anything long begins: a name that is no step is a mistake at once.
for name; do
    if [ -z "$(about "$name")" ]; then
        say "no step $name; there are: $(steps | cut -d ' ' -f 1 | paste -s -d ' ' -)" >&2
        exit 2
    fi
done
if [ "$(id -u)" -ne 0 ]; then
    say "the long runs make namespaces and start daemons, so they need root (run it as root, or with sudo)" >&2
    exit 1
fi
# The word splitting is meant.
# shellcheck disable=SC2046
[ "$#" -gt 0 ] || set -- $(steps | cut -d ' ' -f 1)
SUMMARY=
STATUS=0
for name; do
    run_step "$name" || STATUS=1
done
printf '%s' "$SUMMARY" | sed 's/^/nightly: /'
exit "$STATUS"
