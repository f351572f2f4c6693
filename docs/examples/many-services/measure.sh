#!/bin/bash
# SPDX-License-Identifier: Apache-2.0

# Prints the CPU time that changes of a balancer with 100 services of 50 servers take: that of the
# process and that of the command. Its argument is the program; the default is bin/segue. It needs
# root, and removes all that it makes.
set -euo pipefail

segue=$(realpath "${1:-bin/segue}")
name=many-services
dir=$(mktemp -d)
pid=

here() { nsenter --net=/run/netns/$name "$@"; }

# Writes the configuration. The first argument is the weight of server s7 in the first service, and the
# second one in the others.
configure() {
	echo "node: {instance: $name, interface: eth0, locator: 'fd00:6c:0:9::/64', addresses: [10.99.1.1]," \
		"state: $dir/state, limits: {servers: 16384}}"
	echo 'services:'
	local placement=(hash hunt)
	for ((i = 0; i < 100; i++)); do
		echo "- {name: web$i, vip: 203.0.113.$((100 + i % 50)), port: $((80 + i / 50)), protocol: tcp," \
			"placement: ${placement[i % 2]}, servers: ["
		for ((s = 0; s < 50; s++)); do
			local weight=1
			((s != 7)) || weight=$((i > 0 ? $2 : $1))
			printf '  {name: s%d, locator: "fd00:5:0:%x::/64", weight: %d},\n' $s $((256 + s)) $weight
		done
		echo '  ]}'
	done
}

remove() {
	[ -z "$pid" ] || { kill "$pid" && wait "$pid"; } || true
	here "$segue" lb detach $name >/dev/null || true
	ip netns del $name
	rm -rf "$dir"
}

# Prints the CPU time of the process so far, in clock ticks.
ticks() { awk '{ print $14 + $15 }' "/proc/$pid/stat"; }

measure() {
	local what=$1 before
	shift
	before=$(ticks)
	TIMEFORMAT='%U %S'
	{ time here "$segue" "$@" >/dev/null 2>"$dir/errors"; } 2>"$dir/time" || cat "$dir/errors"
	echo "$what $(ticks) $before $(getconf CLK_TCK) $(cat "$dir/time")" |
		awk '{ printf "%-22s process %.2f s, command %.2f s\n", $1, ($2 - $3) / $4, $5 + $6 }'
}

ip netns add $name
trap remove EXIT
ip link add many0 type veth peer name eth0 netns $name
ip link set many0 up
here ip link set lo up
here ip link set eth0 up
here ip addr add 10.99.1.1/24 dev eth0
here ip addr add fd00:99::1/64 dev eth0 nodad
here ip -6 route add fd00:5::/48 via fd00:99::2
here ip neigh add fd00:99::2 lladdr 02:00:00:00:00:02 dev eth0

configure 1 1 >"$dir/lb.yaml"
nsenter --net=/run/netns/$name "$segue" lb -c "$dir/lb.yaml" >"$dir/log" 2>&1 &
pid=$!
until grep -q msg=steering "$dir/log"; do
	kill -0 "$pid" || { cat "$dir/log" && exit 1; }
	sleep 0.1
done
sleep 3 # until servers that do not answer are known
measure drain drain web5/s1
measure undrain undrain web5/s1
measure status status --interval 0
measure server-list server list
configure 2 1 >"$dir/lb.yaml"
measure reload-1-service reload -c "$dir/lb.yaml"
configure 2 2 >"$dir/lb.yaml"
measure reload-99-services reload -c "$dir/lb.yaml"
