#!/bin/sh
# Build gVisor's runsc from the Go module proxy, for the tests: tests/conformance/get_runsc.sh FILE.
# Some 100 MB, and two to three minutes on two cores, so ./dev setup leaves it out. Then: FORGEYARD_TEST_RUNSC=FILE.
set -eu
# Of the branch "go", whose commits are the only ones that the go command can build.
VERSION=${FORGEYARD_RUNSC:-v0.0.0-20260905035102-160fafc42237}
FILE=$1
[ ! -x "$FILE" ] || exit 0
command -v go >/dev/null 2>&1 || { echo "get_runsc: go is not installed" >&2 && exit 77; }
place=$(mktemp -d "$FILE.XXXXXX")
trap 'rm -rf "$place"' EXIT
number=${VERSION#v0.0.0-}
CGO_ENABLED=0 GOFLAGS=-mod=mod GOBIN=$place go install \
    -ldflags "-s -w -X gvisor.dev/gvisor/runsc/version.version=${number%%-*}" "gvisor.dev/gvisor/runsc@$VERSION"
mv "$place/runsc" "$FILE"
