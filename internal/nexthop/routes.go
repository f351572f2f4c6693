// SPDX-License-Identifier: Apache-2.0

package nexthop

import (
	"encoding/binary"
	"hash/fnv"
	"math"
	"net/netip"

	"golang.org/x/sys/unix"
)

// route is a route of the kernel (ip-route(8)).
type route struct {
	table  uint32
	prefix netip.Prefix
	kind   byte // RTN_*
	metric uint32
	rank   int // of routes with the same metric, the one with the lowest rank is preferred
	paths  []path
	object uint32 // the number of the nexthop object that has the route's paths; 0: none
}

// path is one of the paths of a route.
type path struct {
	ifindex int
	gateway netip.Addr // invalid if the destination itself is on the link
	weight  int        // share of flows, relative to the other paths of the route
	dead    bool       // the kernel does not use the path now
}

// readRoutes calls f for every route of a family.
func readRoutes(family byte, f func(*route)) error {
	return dump(unix.RTM_GETROUTE, unix.RTM_NEWROUTE, family, unix.SizeofRtMsg, func(message []byte) {
		if r, ok := parseRoute(message); ok {
			f(r)
		}
	})
}

// parseRoute reads a struct rtmsg and the attributes after it. It returns false if the route does
// not matter here: it has a source prefix or a type of service, or is a cached copy of another
// route.
func parseRoute(message []byte) (*route, bool) {
	sourceBits, tos, flags := message[2], message[3], number(message[8:])
	if sourceBits != 0 || tos != 0 || flags&unix.RTM_F_CLONED != 0 {
		return nil, false
	}
	destination := netip.IPv6Unspecified()
	if message[0] == unix.AF_INET {
		destination = netip.IPv4Unspecified()
	}
	r := &route{table: uint32(message[4]), kind: message[7]}
	single := path{weight: 1, dead: flags&unix.RTNH_F_DEAD != 0} // of a route without RTA_MULTIPATH
	for kind, value := range attributes(message[unix.SizeofRtMsg:]) {
		switch kind {
		case unix.RTA_TABLE:
			r.table = number(value)
		case unix.RTA_DST:
			destination = addressOf(value)
		case unix.RTA_PRIORITY:
			r.metric = number(value)
		case unix.RTA_PREF:
			r.rank = rankOf(value)
		case rtaNhID:
			r.object = number(value)
		case unix.RTA_MULTIPATH:
			r.paths = parsePaths(value)
		default:
			single.read(kind, value)
		}
	}
	r.prefix = netip.PrefixFrom(destination, int(message[1]))
	if len(r.paths) == 0 && single.ifindex != 0 {
		r.paths = []path{single}
	}
	return r, r.prefix.IsValid()
}

// rtaNhID is RTA_NH_ID: the number of a nexthop object.
const rtaNhID = 30

func (p *path) read(kind uint16, value []byte) {
	switch kind {
	case unix.RTA_OIF:
		p.ifindex = int(number(value))
	case unix.RTA_GATEWAY:
		p.gateway = addressOf(value)
	case unix.RTA_VIA: // the number of another family, then a gateway of that family
		if len(value) > 2 {
			p.gateway = addressOf(value[2:])
		}
	}
}

// parsePaths reads the paths of a route: structs rtnexthop, each with attributes.
func parsePaths(b []byte) []path {
	var paths []path
	for len(b) >= unix.SizeofRtNexthop {
		length := int(binary.NativeEndian.Uint16(b))
		if length < unix.SizeofRtNexthop || length > len(b) {
			break
		}
		p := path{
			dead:    b[2]&unix.RTNH_F_DEAD != 0,
			weight:  int(b[3]) + 1, // the field is the weight minus 1
			ifindex: int(number(b[4:])),
		}
		for kind, value := range attributes(b[unix.SizeofRtNexthop:length]) {
			p.read(kind, value)
		}
		paths = append(paths, p)
		b = b[min(aligned(length), len(b)):]
	}
	return paths
}

// rankOf returns the rank for a route's preference (RFC 4191 section 2.1). Preference 1 is high, 3
// is low, and all others are medium.
func rankOf(value []byte) int {
	switch {
	case len(value) == 1 && value[0] == 1:
		return -1
	case len(value) == 1 && value[0] == 3:
		return 1
	}
	return 0
}

// objects are the kernel's nexthop objects (ip-nexthop(8)), by their numbers.
type objects map[uint32]object

// object is a path, or a group of other objects.
type object struct {
	path  path
	group []member
}

// member is an object in a group.
type member struct {
	id     uint32
	weight int
}

// readObjects lists all nexthop objects.
func readObjects() (objects, error) {
	all := objects{}
	err := dump(unix.RTM_GETNEXTHOP, unix.RTM_NEWNEXTHOP, unix.AF_UNSPEC, sizeofNhmsg, all.add)
	return all, err
}

// sizeofNhmsg is the size of a struct nhmsg, in bytes.
const sizeofNhmsg = 8

// add adds the nexthop object of a message: a struct nhmsg and the attributes after it.
func (all objects) add(message []byte) {
	var id uint32
	o := object{path: path{weight: 1, dead: number(message[4:])&unix.RTNH_F_DEAD != 0}}
	for kind, value := range attributes(message[sizeofNhmsg:]) {
		switch kind {
		case unix.NHA_ID:
			id = number(value)
		case unix.NHA_OIF:
			o.path.ifindex = int(number(value))
		case unix.NHA_GATEWAY:
			o.path.gateway = addressOf(value)
		case unix.NHA_GROUP: // structs nexthop_grp: the id, the weight minus 1, and its high byte
			for ; len(value) >= 8; value = value[8:] {
				weight := int(value[4]) + int(value[5])<<8 + 1
				o.group = append(o.group, member{number(value), weight})
			}
		}
	}
	all[id] = o
}

// resolve gives a route the paths of its nexthop object. Depending on the sysctl
// net.ipv4.nexthop_compat_mode, the kernel reports only the number of the object.
func (all objects) resolve(r *route) {
	members := all[r.object].group
	if members == nil {
		members = []member{{r.object, 1}}
	}
	for _, m := range members {
		if p := all[m.id].path; p.ifindex != 0 {
			p.weight = m.weight
			r.paths = append(r.paths, p)
		}
	}
}

// order returns a number by which to sort the paths of a route, for a target. The path with the
// lowest number is the first. Each path is the first one for a share of the targets that follows
// from its weight. A target keeps its first path when other paths are added and removed (weighted
// rendezvous hashing; Schindelhauer and Schomaker, "Weighted Distributed Hash Tables", 2005).
func (p *path) order(target netip.Addr) float64 {
	h := fnv.New64a()
	h.Write(target.AsSlice())
	h.Write(p.gateway.AsSlice())
	h.Write(binary.BigEndian.AppendUint32(nil, uint32(p.ifindex)))
	hash := h.Sum64()
	// The high bits of FNV differ too little. This multiplication mixes the low bits into them.
	hash = (hash ^ hash>>32) * 0x9e3779b97f4a7c15
	uniform := (float64(hash>>11) + 0.5) / (1 << 53) // between 0 and 1
	return -math.Log(uniform) / float64(p.weight)
}
