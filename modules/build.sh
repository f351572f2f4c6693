#!/bin/bash
# SPDX-License-Identifier: Apache-2.0

# Builds the modules for the Apache httpd and the nginx of this machine, into bin/modules or OUT:
# mod_segue_load.so and ngx_http_segue_load_module.so. It needs the packages apache2-dev and
# nginx-dev. A module whose sources have not changed is not built again.
#
# nginx loads only modules of its own version: build them on the release on which they are to run.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=${OUT:-bin/modules}
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# is_current FILE SOURCE...: whether a file is newer than its sources.
is_current() {
    local file=$1 source
    shift
    for source in "$@"; do
        [[ $file -nt $source ]] || return 1
    done
}

# logged COMMAND...: runs a command, and prints its output only if it fails.
logged() {
    "$@" >"$work/log" 2>&1 || {
        cat "$work/log" >&2
        exit 1
    }
}

build_apache() {
    is_current "$out/mod_segue_load.so" modules/build.sh modules/apache/*.c loadshm/segue_load.h \
        "$(command -v apxs)" && return
    cp modules/apache/mod_segue_load.c "$work/" # apxs writes beside the source
    (
        cd "$work"
        logged apxs -c -Wc,-Wall -Wc,-Werror -Wc,-g0 -I"$OLDPWD/loadshm" mod_segue_load.c
    )
    install -m 0644 "$work/.libs/mod_segue_load.so" "$out/"
}

build_nginx() {
    local source=/usr/share/nginx/src root=$PWD
    is_current "$out/ngx_http_segue_load_module.so" modules/build.sh modules/nginx/* \
        loadshm/segue_load.h $source/src/core/nginx.h && return
    # shellcheck source=/dev/null
    . $source/conf_flags # NGX_CONF_FLAGS: the options with which Debian has built nginx
    (
        cd $source
        logged ./configure "${NGX_CONF_FLAGS[@]}" --with-cc-opt='-O2 -g0' \
            --add-dynamic-module="$root/modules/nginx" --builddir="$work/nginx"
        logged make -f "$work/nginx/Makefile" modules
    )
    install -m 0644 "$work/nginx/ngx_http_segue_load_module.so" "$out/"
}

build_apache
build_nginx
