#!/bin/bash
# SPDX-License-Identifier: Apache-2.0

# Prints the version of this checkout, by git's tags. Without git or a repository, it prints
# nothing. By the rules of dpkg(1), versions sort in the order of their commits:
#
#   0.0.0~git20260801093000.1a2b3c4   a commit without a tag before it; its time and its short hash
#   1.2.0~rc.1                        the tag v1.2.0-rc.1
#   1.2.0                             the tag v1.2.0
#   1.2.0+5.g1a2b3c4                  the fifth commit after the tag v1.2.0
#   1.2.0+dirty                       the tag v1.2.0, with changed files
#
# With --commit, it prints the commit and its time, such as 1a2b3c4...,2026-08-01T09:30:00Z.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
git() { command git -c safe.directory="$PWD" "$@"; }

git rev-parse --verify --quiet HEAD >/dev/null 2>&1 || exit 0
if [[ ${1:-} == --commit ]]; then
    TZ=UTC git log -1 --format=%H,%cd --date=format-local:%Y-%m-%dT%H:%M:%SZ
    exit
fi
described=$(git describe --tags --match 'v[0-9]*' --long --abbrev=7 --dirty=+dirty 2>/dev/null || true)
if [[ $described =~ ^v([^-]+)(-(.+))?-([0-9]+)-(g[0-9a-f]+)(\+dirty)?$ ]]; then
    version=${BASH_REMATCH[1]}${BASH_REMATCH[3]:+"~${BASH_REMATCH[3]}"}
    [[ ${BASH_REMATCH[4]} == 0 ]] || version+=+${BASH_REMATCH[4]}.${BASH_REMATCH[5]}
    echo "$version${BASH_REMATCH[6]:-}"
else
    time=$(TZ=UTC git log -1 --format=%cd --date=format-local:%Y%m%d%H%M%S)
    git update-index -q --refresh >/dev/null 2>&1 || true # so that only changed contents count
    dirty=$(git diff-index --quiet HEAD -- || echo +dirty)
    echo "0.0.0~git$time.$(git rev-parse --short=7 HEAD)$dirty"
fi
