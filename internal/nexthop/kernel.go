// SPDX-License-Identifier: Apache-2.0

package nexthop

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// snapshot has the kernel's interfaces, addresses and neighbours, and its routes to the targets.
type snapshot struct {
	links      map[int]Link
	addresses  []netip.Addr // of the host, sorted
	neighbours map[neighbour]entry
	policies   map[byte]*policy // by family
}

// neighbour identifies an entry of the kernel's neighbour tables.
type neighbour struct {
	ifindex int
	address netip.Addr
}

// entry is what the kernel knows about a neighbour.
type entry struct {
	mac     [6]byte
	usable  bool // the kernel itself would send packets to this MAC address
	failed  bool // the kernel has asked the neighbour, and got no answer
	managed bool // the kernel keeps the entry resolved
	ours    bool // a resolver has made the entry managed
	fixed   bool // an operator or a routing daemon keeps the entry
}

// usable are the states of an entry in which the kernel itself would send to its MAC address.
const usable = netlink.NUD_REACHABLE | netlink.NUD_STALE | netlink.NUD_DELAY |
	netlink.NUD_PROBE | netlink.NUD_PERMANENT | netlink.NUD_NOARP

// readSnapshot reads all interfaces, addresses and neighbours, and the routes to the targets.
func readSnapshot(targets targets) (s *snapshot, err error) {
	s = &snapshot{policies: map[byte]*policy{}}
	if s.links, err = readLinks(); err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	if s.addresses, err = readAddresses(); err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	for _, family := range []byte{unix.AF_INET, unix.AF_INET6} {
		if !targets.has(family) {
			continue
		}
		if s.policies[family], err = readPolicy(family, targets); err != nil {
			return nil, err
		}
	}
	s.neighbours, err = readNeighbours()
	return s, err
}

// readLinks lists the interfaces by their indexes. MAC is zero for one without an Ethernet address.
func readLinks() (map[int]Link, error) {
	all, err := netlink.LinkList()
	if err != nil {
		return nil, err
	}
	links := map[int]Link{}
	for _, l := range all {
		attrs := l.Attrs()
		link := Link{Index: attrs.Index, Name: attrs.Name, Type: l.Type(), MTU: attrs.MTU}
		if len(attrs.HardwareAddr) == len(link.MAC) {
			link.MAC = [6]byte(attrs.HardwareAddr)
		}
		links[link.Index] = link
	}
	return links, nil
}

// readAddresses lists the addresses of the host.
func readAddresses() ([]netip.Addr, error) {
	var all []netip.Addr
	err := dump(unix.RTM_GETADDR, unix.RTM_NEWADDR, unix.AF_UNSPEC, unix.SizeofIfAddrmsg, func(message []byte) {
		var address, local netip.Addr
		for kind, value := range attributes(message[unix.SizeofIfAddrmsg:]) {
			switch kind {
			case unix.IFA_ADDRESS:
				address = addressOf(value)
			case unix.IFA_LOCAL: // for IPv4, and for a point-to-point link, where IFA_ADDRESS is the peer
				local = addressOf(value)
			}
		}
		if local.IsValid() {
			address = local
		}
		if address.IsValid() {
			all = append(all, address)
		}
	})
	slices.SortFunc(all, netip.Addr.Compare)
	return slices.Compact(all), err
}

// readNeighbours lists the entries of the kernel's neighbour tables.
func readNeighbours() (map[neighbour]entry, error) {
	all := map[neighbour]entry{}
	for _, family := range []byte{unix.AF_INET, unix.AF_INET6} {
		err := dump(unix.RTM_GETNEIGH, unix.RTM_NEWNEIGH, family, unix.SizeofNdMsg, func(message []byte) {
			n, e := parseNeighbour(message)
			all[n] = e
		})
		if err != nil {
			return nil, fmt.Errorf("list neighbours: %w", err)
		}
	}
	return all, nil
}

// parseNeighbour reads a struct ndmsg and the attributes after it.
func parseNeighbour(message []byte) (n neighbour, e entry) {
	n.ifindex = int(number(message[4:]))
	state, flags := binary.NativeEndian.Uint16(message[8:]), message[10]
	e.failed = state&netlink.NUD_FAILED != 0
	e.fixed = state&(netlink.NUD_PERMANENT|netlink.NUD_NOARP) != 0 ||
		flags&netlink.NTF_EXT_LEARNED != 0
	for kind, value := range attributes(message[unix.SizeofNdMsg:]) {
		switch kind {
		case netlink.NDA_DST:
			n.address = addressOf(value)
		case netlink.NDA_LLADDR:
			if len(value) == len(e.mac) {
				e.mac, e.usable = [6]byte(value), state&usable != 0
			}
		case netlink.NDA_FLAGS_EXT:
			e.managed = number(value)&netlink.NTF_EXT_MANAGED != 0
		case netlink.NDA_PROTOCOL:
			e.ours = bytes.Equal(value, []byte{originator})
		}
	}
	e.ours = e.ours && e.managed // a released entry still has the number originator
	return n, e
}

// linksNamed returns the interfaces with these names. A missing one is zero.
func (s *snapshot) linksNamed(names []string) []Link {
	found := make([]Link, len(names))
	for _, link := range s.links {
		if i := slices.Index(names, link.Name); i >= 0 {
			found[i] = link
		}
	}
	return found
}

// originator is the number by which resolvers mark their entries ("proto" of ip-neighbour(8)).
// Neither the kernel's rtnetlink.h nor iproute2 has a name for this number.
const originator = 83

// setManaged tells the kernel whether to keep a neighbour resolved (NTF_EXT_MANAGED, since Linux
// 5.16). The kernel itself sends no packets to the neighbour, so it would otherwise not resolve it.
// Because of NTF_USE, an existing entry keeps its state and MAC address.
func setManaged(n neighbour, managed bool) error {
	request := nl.NewNetlinkRequest(unix.RTM_NEWNEIGH, unix.NLM_F_CREATE|unix.NLM_F_REPLACE|unix.NLM_F_ACK)
	request.AddData(&netlink.Ndmsg{
		Family: familyOf(n.address), Index: uint32(n.ifindex), Flags: netlink.NTF_USE,
	})
	request.AddData(nl.NewRtAttr(netlink.NDA_DST, n.address.AsSlice()))
	if managed {
		request.AddData(nl.NewRtAttr(netlink.NDA_FLAGS_EXT, nl.Uint32Attr(netlink.NTF_EXT_MANAGED)))
		request.AddData(nl.NewRtAttr(netlink.NDA_PROTOCOL, nl.Uint8Attr(originator)))
	}
	_, err := request.Execute(unix.NETLINK_ROUTE, 0)
	return err
}

// GiveBack releases all neighbours in this network namespace that resolvers have made managed. It
// is for those that killed resolvers have left. A running resolver makes its own neighbours managed
// again.
func GiveBack() error {
	all, err := readNeighbours()
	if err != nil {
		return err
	}
	for n, e := range all {
		if e.ours {
			if failed := setManaged(n, false); failed != nil {
				err = errors.Join(err, fmt.Errorf("give back neighbour %s: %w", n.address, failed))
			}
		}
	}
	return err
}
