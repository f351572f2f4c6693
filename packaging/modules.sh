#!/bin/bash
# SPDX-License-Identifier: Apache-2.0

# Builds the packages bin/libapache2-mod-segue-load_VERSION_ARCHITECTURE.deb and
# bin/libnginx-mod-segue-load_VERSION_ARCHITECTURE.deb, for the release and the architecture of this
# machine. `make modules` calls it, after modules/build.sh.
#
#   VERSION   version of the packages, as for packaging/build.sh
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
[[ -n ${VERSION:-} ]] || {
    echo "modules: this source has no git repository: name a version, such as make modules VERSION=1.2.3" >&2
    exit 1
}
out=bin/package-modules
rm -rf "$out"
mkdir -p "$out"
strip --strip-unneeded -o "$out/mod_segue_load.so" bin/modules/mod_segue_load.so
strip --strip-unneeded -o "$out/ngx_http_segue_load_module.so" bin/modules/ngx_http_segue_load_module.so
chmod 0644 "$out"/*.so

SOURCE_DATE_EPOCH=${SOURCE_DATE_EPOCH:-$(git -c safe.directory="$PWD" log -1 --format=%ct 2>/dev/null ||
    stat --format=%Y CHANGELOG.md)}
ARCH=$(dpkg --print-architecture)
# nginx loads only modules that were built for its version.
NGINX_ABI=$(dpkg-query --show --showformat='${Provides}' nginx | grep -o 'nginx-abi-[^, ]*')
export SOURCE_DATE_EPOCH ARCH VERSION NGINX_ABI OUT="../$out"
for package in libapache2-mod-segue-load libnginx-mod-segue-load; do
    GOARCH='' go -C packaging tool nfpm package --packager deb --config $package.yaml --target ../bin/ >"$out/nfpm.log" 2>&1 || {
        cat "$out/nfpm.log" >&2
        exit 1
    }
    echo "bin/${package}_${VERSION}_$ARCH.deb"
done
