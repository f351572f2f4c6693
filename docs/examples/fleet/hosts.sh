#!/bin/bash
# SPDX-License-Identifier: Apache-2.0

# Makes the hosts of docs/operate/fleet.md on one Linux machine: each is a bare Debian with its own systemd,
# network interfaces and files, but with the kernel of the machine. Needs root, debootstrap, iproute2
# and ethtool, and control groups version 2.
#
#   hosts.sh up                     makes and boots the hosts (the first time downloads Debian)
#   hosts.sh run HOST [COMMAND...]  runs a command as root on a host; without a command, a shell
#   hosts.sh copy FILE...           copies files into /var/tmp of each host
#   hosts.sh off HOST               switches a host off at once, as a power failure does
#   hosts.sh on HOST                boots a host that is off; its files are kept
#   hosts.sh down                   removes all hosts, with their files
#
# SEGUE_HOSTS_ROOT  the Debian that all hosts start from: made if it does not exist; "down" keeps it
# SEGUE_HOSTS_MIRROR  the mirror of Debian (default: that of debootstrap)
set -euo pipefail

hosts=(router client lb1 lb2 lb3 s1 s2 s3)
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
base=${SEGUE_HOSTS_ROOT:-/var/lib/segue-hosts/bookworm}
state=/run/segue-hosts # a tmpfs with the files that the hosts change
switch=fleet-switch    # the namespace with the link of all hosts but the client

say() { echo "hosts: $*" >&2; }
die() { say "$*"; exit 1; }

check() {
    local command
    [[ $EUID -eq 0 ]] || die "needs root"
    for command in debootstrap ethtool ip nsenter; do
        command -v "$command" >/dev/null || die "needs $command: apt install debootstrap ethtool iproute2"
    done
    groups=$(findmnt --noheadings --first-only --types cgroup2 --output TARGET) ||
        die "needs control groups version 2"
    groups+=/segue-hosts
}

is_host() { [[ " ${hosts[*]} " == *" $1 "* ]] || die "$1: not one of ${hosts[*]}"; }

make_root() {
    [[ ! -d $base ]] || return 0
    say "making a Debian in $base: some minutes"
    mkdir -p "$(dirname "$base")"
    rm -rf "$base.new"
    debootstrap --variant=minbase \
        --include=curl,dbus,etcd-client,etcd-server,frr,iproute2,iputils-ping,nginx,procps,systemd,systemd-sysv \
        bookworm "$base.new" ${SEGUE_HOSTS_MIRROR:+"$SEGUE_HOSTS_MIRROR"} >"$base.log" || die "debootstrap failed: $base.log"
    chmod 0755 "$base.new"
    # Only some hosts need these programs, and start them by hand.
    chroot "$base.new" systemctl --quiet disable etcd frr nginx
    rm -f "$base.log"
    mv "$base.new" "$base"
}

# number HOST: prints the last part of the host's addresses.
number() {
    case $1 in
        router) echo 1 ;;
        lb*) echo "1${1#lb}" ;;
        s*) echo "10${1#s}" ;;
    esac
}

# plug HOST: connects the host's eth0 with the switch, or the client with the router's eth1.
plug() {
    local n mac
    n=$(number "$1")
    if [[ $1 == client ]]; then
        ip -n fleet-client link add eth0 type veth peer name eth1 netns fleet-router
        ip -n fleet-router link set eth1 up
        ip -n fleet-router address add 2001:db8:99::1/64 dev eth1 nodad
        ip -n fleet-router address add 198.51.100.1/24 dev eth1
        address client 2001:db8:99::100/64 198.51.100.100/24 2001:db8:99::1 198.51.100.1
        return
    fi
    # The same at each boot: the other hosts remember the address of a host that lost its power.
    mac=$(printf '02:00:00:00:00:%02x' "$n")
    ip -n "fleet-$1" link add eth0 address "$mac" type veth peer name "$1" netns $switch
    ip -n $switch link set "$1" master br0 up
    # XDP programs on veth need both: see docs/research/lab.md. They see VLAN tags only in frames.
    ip netns exec $switch ethtool -K "$1" gro on tx off >/dev/null
    ip netns exec $switch ethtool -K "$1" txvlan off tx-vlan-stag-hw-insert off
    if [[ $1 == router ]]; then
        address router 2001:db8:1::1/64 192.0.2.1/24
        return
    fi
    address "$1" "2001:db8:1::$n/64" "192.0.2.$n/24" 2001:db8:1::1 192.0.2.1
}

# address HOST IPV6 IPV4 [ROUTER6 ROUTER4]
address() {
    local n=fleet-$1
    ip -n "$n" link set lo up
    ip -n "$n" link set eth0 up
    ip -n "$n" address add "$2" dev eth0 nodad
    ip -n "$n" address add "$3" dev eth0
    [[ $# -eq 3 ]] || { ip -n "$n" route add default via "$4"; ip -n "$n" route add default via "$5"; }
}

on() {
    local dir=$state/$1 host
    [[ ! -e /run/netns/fleet-$1 ]] || die "$1 is on"
    mkdir -p "$dir"/{upper,work,root} "$groups/$1"
    mountpoint -q "$dir/root" ||
        mount -t overlay -o "lowerdir=$base,upperdir=$dir/upper,workdir=$dir/work" overlay "$dir/root"
    echo "$1" >"$dir/root/etc/hostname"
    echo "127.0.0.1 localhost" >"$dir/root/etc/hosts"
    for host in "${hosts[@]}"; do
        [[ $host == client ]] || echo "2001:db8:1::$(number "$host") $host" >>"$dir/root/etc/hosts"
    done
    ip netns add "fleet-$1"
    plug "$1"
    # The client's link was to the router that was switched off, so it is gone.
    [[ $1 != router || ! -e /run/netns/fleet-client ]] || plug client
    # The shell joins the host's control group, which then is the root of the namespace of control
    # groups that unshare makes.
    # shellcheck disable=SC2016
    setsid nsenter --net="/run/netns/fleet-$1" sh -c 'echo $$ >"$2/cgroup.procs" &&
        exec unshare --mount --uts --ipc --cgroup --pid --fork --kill-child sh "$0" "$1"' \
        "$here/boot.sh" "$dir/root" "$groups/$1" >"$dir/log" 2>&1 </dev/null &
    echo $! >"$dir/pid"
}

# await HOST: waits until systemd has started everything.
await() {
    local deadline=$((SECONDS + 180)) now=
    until [[ $now == running || $now == degraded ]]; do
        ((SECONDS < deadline)) || die "$1 does not boot: ${now:-$(cat "$state/$1/log")}"
        sleep 0.5
        now=$(run "$1" systemctl is-system-running 2>/dev/null) || true
    done
}

run() {
    local pid init host=$1
    shift
    [[ -e $state/$host/pid ]] || die "$host is off"
    pid=$(<"$state/$host/pid")
    init=$(cat "/proc/$pid/task/$pid/children" 2>/dev/null) || die "$host is off"
    [[ $# -gt 0 ]] || set -- bash -l
    nsenter --target "${init// /}" --mount --uts --ipc --net --pid --cgroup --root --wd=/ -- \
        env --chdir=/root -i HOME=/root LC_ALL=C.UTF-8 PATH=/usr/sbin:/usr/bin:/sbin:/bin TERM="${TERM:-dumb}" "$@"
}

off() {
    local dir=$state/$1
    [[ ! -e $dir/pid ]] || kill -KILL "$(<"$dir/pid")" 2>/dev/null || true
    rm -f "$dir/pid"
    ip -n $switch link delete "$1" 2>/dev/null || true
    ip netns delete "fleet-$1" 2>/dev/null || true
    [[ -d $groups/$1 ]] || return 0
    until [[ $(<"$groups/$1/cgroup.events") == *"populated 0"* ]]; do sleep 0.1; done
    find "$groups/$1" -depth -type d -exec rmdir {} +
}

up() {
    local host
    [[ ! -e $state ]] || die "the hosts exist: hosts.sh down removes them"
    make_root
    mkdir -p $state "$groups"
    mount -t tmpfs -o mode=0755 segue-hosts $state
    ip netns add $switch
    ip -n $switch link add br0 type bridge
    ip -n $switch link set br0 up
    for host in "${hosts[@]}"; do on "$host"; done
    for host in "${hosts[@]}"; do await "$host"; done
    say "${hosts[*]} run"
}

down() {
    local host
    for host in "${hosts[@]}"; do
        off "$host"
        ! mountpoint -q "$state/$host/root" || umount "$state/$host/root"
    done
    ip netns delete $switch 2>/dev/null || true
    ! mountpoint -q $state || umount $state
    rm -rf $state
    [[ ! -d $groups ]] || rmdir "$groups"
}

copy() {
    local host
    for host in "${hosts[@]}"; do cp "$@" "$state/$host/root/var/tmp/"; done
}

[[ $# -ge 1 ]] || { sed -n '4,/^set/s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 2; }
check
case $1:$# in
    up:1 | down:1) "$1" ;;
    copy:1) die "copy: needs a file" ;;
    copy:*) "$@" ;;
    on:2) is_host "$2"; on "$2"; await "$2" ;;
    off:2) is_host "$2"; off "$2" ;;
    run:1) die "run: needs a host" ;;
    run:*) is_host "$2"; "$@" ;;
    *) die "$*: unknown command; without arguments, hosts.sh shows all" ;;
esac
