#!/bin/bash
# SPDX-License-Identifier: Apache-2.0

# Builds the packages bin/segue_VERSION_ARCHITECTURE.deb and bin/segue-lab_VERSION_ARCHITECTURE.deb,
# and the same as rpm, bin/segue-VERSION-1.ARCHITECTURE.rpm. `make package` calls it. Two builds of one commit with the same tools are equal, byte for byte.
#
#   VERSION   version of the packages; make takes it from scripts/version.sh
#   GOARCH    architecture of the packages; default: that of the machine
#   LDFLAGS   flags of the linker, which set the version and the commit that `segue version` shows
#   OUT       folder for the content of the packages; default: bin/package
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ -n ${VERSION:-} ]] || {
    echo "package: this source has no git repository: name a version, such as make package VERSION=1.2.3" >&2
    exit 1
}
out=${OUT:-bin/package}
rm -rf "$out"
mkdir -p "$out/completion" "$out/copyright"

SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -c safe.directory="$PWD" log -1 --format=%ct 2>/dev/null ||
    stat --format=%Y CHANGELOG.md)}
export SOURCE_DATE_EPOCH VERSION OUT="../$out"
ARCH=$(go env GOARCH)
export ARCH

GOARCH='' go -C packaging build -buildvcs=false -o "../$out/notices" ./notices

# build PROGRAM: builds a program, its man pages, its completions, and the file of its licences.
build() {
    # -trimpath: otherwise the program would depend on the folder in which it is built.
    go build -trimpath -buildvcs=false -ldflags "$LDFLAGS" -o "$out/$1" "./cmd/$1"
    local runs_here=$out/$1 shell
    # The program writes its own man pages and completions. For another architecture, a program for
    # this machine writes them.
    if [[ $ARCH != $(go env GOHOSTARCH) ]]; then
        runs_here=$out/$1-host
        GOARCH='' go build -trimpath -buildvcs=false -ldflags "$LDFLAGS" -o "$runs_here" "./cmd/$1"
    fi
    "$runs_here" man "$out/man/$1"
    gzip -9 --no-name "$out/man/$1"/*
    for shell in bash zsh fish; do
        "$runs_here" completion "$shell" >"$out/completion/$1.$shell"
    done
    "$out/notices" packaging/copyright "./cmd/$1" >"$out/copyright/$1"
}
build segue
build segue-lab
# For /usr/share/doc. The folders stay the same, so that links between the documents work.
mkdir -p "$out/doc"
cp -r README.md CHANGELOG.md docs "$out/doc/"
cp -r packaging/examples/. "$out/doc/docs/examples/"
# Modes do not depend on the umask.
chmod -R u=rwX,go=rX "$out"

# nfpm PACKAGE FORMAT FILE: builds a package as the file bin/FILE.
nfpm() {
    GOARCH='' go -C packaging tool nfpm package --packager "$2" --config "$1.yaml" --target "../bin/$3" \
        >"$out/nfpm.log" 2>&1 || {
        cat "$out/nfpm.log" >&2
        exit 1
    }
    echo "bin/$3"
}
declare -A rpm_arch=([amd64]=x86_64 [arm64]=aarch64)
for package in segue segue-lab; do
    nfpm $package rpm "$package-$VERSION-1.${rpm_arch[$ARCH]:-$ARCH}.rpm"
done
for package in segue segue-lab; do
    nfpm $package deb "${package}_${VERSION}_$ARCH.deb"
done
