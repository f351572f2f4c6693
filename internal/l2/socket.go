// SPDX-License-Identifier: Apache-2.0

package l2

import (
	"errors"
	"fmt"
	"net/netip"
	"os"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// longestMessage is the size of the longest frame that is read. Questions and claims are shorter.
const longestMessage = 256

// socket sends and receives the frames of ARP and neighbour discovery on a link. VIPs are no
// addresses of the host, so the kernel does not answer for them, and a socket of ICMPv6 would not
// get the questions that are addressed to a VIP.
type socket struct {
	*os.File
	// groups has a socket that is a member of each multicast group, by group: questions for IPv6
	// VIPs go to these groups, and switches learn the members from the host's reports.
	groups  map[netip.Addr]*os.File
	ifindex int
}

// filter selects the received frames without a VLAN tag that are ARP packets, or solicitations and
// advertisements of neighbours.
var filter = []bpf.Instruction{
	bpf.LoadExtension{Num: bpf.ExtVLANTagPresent},
	bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: 0, SkipTrue: 8},
	bpf.LoadAbsolute{Off: 12, Size: 2},
	bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.ETH_P_ARP, SkipTrue: 7},
	bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.ETH_P_IPV6, SkipTrue: 5},
	bpf.LoadAbsolute{Off: 14 + 6, Size: 1}, // the next header
	bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.IPPROTO_ICMPV6, SkipTrue: 3},
	bpf.LoadAbsolute{Off: 14 + 40, Size: 1}, // the type of the message
	bpf.JumpIf{Cond: bpf.JumpEqual, Val: 135, SkipTrue: 2},
	bpf.JumpIf{Cond: bpf.JumpEqual, Val: 136, SkipTrue: 1},
	bpf.RetConstant{Val: 0},
	bpf.RetConstant{Val: longestMessage},
}

// openSocket opens a socket on an interface. Frames that the host itself sends do not arrive.
func openSocket(ifindex int) (*socket, error) {
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open a packet socket: %w", err)
	}
	// The filter is set before the socket is bound. Until then no frames arrive.
	raw, err := bpf.Assemble(filter)
	if err != nil {
		panic(err)
	}
	program := make([]unix.SockFilter, len(raw))
	for i, in := range raw {
		program[i] = unix.SockFilter{Code: in.Op, Jt: in.Jt, Jf: in.Jf, K: in.K}
	}
	err = errors.Join(
		unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
			&unix.SockFprog{Len: uint16(len(program)), Filter: &program[0]}),
		unix.SetsockoptInt(fd, unix.SOL_PACKET, unix.PACKET_IGNORE_OUTGOING, 1),
		unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: bigEndian(unix.ETH_P_ALL), Ifindex: ifindex}))
	if err != nil {
		return nil, errors.Join(fmt.Errorf("set up a packet socket: %w", err), unix.Close(fd))
	}
	return &socket{os.NewFile(uintptr(fd), "packet socket"), map[netip.Addr]*os.File{}, ifindex}, nil
}

// bigEndian returns a number whose bytes in memory are those of a big-endian number.
func bigEndian(n uint16) uint16 { return n<<8 | n>>8 }

// join makes the host a member of the groups of the VIPs, and of no other group.
func (s *socket) join(vips []netip.Addr) error {
	var errs []error
	wanted := map[netip.Addr]bool{}
	for _, vip := range vips {
		if vip.Is4() {
			continue
		}
		group := groupOf(vip)
		wanted[group] = true
		if s.groups[group] != nil {
			continue
		}
		member, err := s.member(group)
		if err != nil {
			errs = append(errs, fmt.Errorf("join the group %s: %w", group, err))
			continue
		}
		s.groups[group] = member
	}
	for group, member := range s.groups {
		if !wanted[group] {
			errs = append(errs, member.Close())
			delete(s.groups, group)
		}
	}
	return errors.Join(errs...)
}

// member returns a socket that is a member of a group until it is closed. One socket for all groups
// would exceed the kernel's limit on the memory of a socket's options.
func (s *socket) member(group netip.Addr) (*os.File, error) {
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	request := &unix.IPv6Mreq{Multiaddr: group.As16(), Interface: uint32(s.ifindex)}
	if err := unix.SetsockoptIPv6Mreq(fd, unix.IPPROTO_IPV6, unix.IPV6_JOIN_GROUP, request); err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	return os.NewFile(uintptr(fd), "member of "+group.String()), nil
}

// Close closes the socket, and leaves all groups.
func (s *socket) Close() error { return errors.Join(s.join(nil), s.File.Close()) }

// sendAll sends frames.
func (s *socket) sendAll(frames ...[]byte) error {
	for _, frame := range frames {
		if _, err := s.Write(frame); err != nil {
			return err
		}
	}
	return nil
}
