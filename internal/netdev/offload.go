// SPDX-License-Identifier: Apache-2.0

package netdev

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Names of offloads.
const (
	GRO      = "rx-gro"
	GSO      = "tx-generic-segmentation"
	Checksum = "tx-checksum-ip-generic" // of packets that the interface sends
)

// TSO are the offloads of segmentation of TCP.
var TSO = []string{
	"tx-tcp-segmentation", "tx-tcp6-segmentation", "tx-tcp-ecn-segmentation", "tx-tcp-mangleid-segmentation",
}

// ActiveOffloads returns those of the given offloads that are on at the interface of this name.
func ActiveOffloads(name string, offloads ...string) ([]string, error) {
	reply, err := request(name, unix.ETHTOOL_MSG_FEATURES_GET)
	if err != nil {
		return nil, fmt.Errorf("read the offloads of %s: %w", name, err)
	}
	on := namesIn(reply, unix.ETHTOOL_A_FEATURES_ACTIVE)
	return slices.DeleteFunc(on, func(o string) bool { return !slices.Contains(offloads, o) }), nil
}

// SetOffloads switches offloads on or off. It returns an error if the interface cannot switch one
// of them. It needs CAP_NET_ADMIN.
func SetOffloads(name string, on bool, offloads ...string) error {
	what := fmt.Sprintf("switch %s of %s %s", strings.Join(offloads, ", "), name,
		map[bool]string{true: "on", false: "off"}[on])
	wanted := nl.NewRtAttr(unix.ETHTOOL_A_FEATURES_WANTED|unix.NLA_F_NESTED, nil)
	bits := wanted.AddRtAttr(unix.ETHTOOL_A_BITSET_BITS|unix.NLA_F_NESTED, nil)
	for _, o := range offloads {
		bit := bits.AddRtAttr(unix.ETHTOOL_A_BITSET_BITS_BIT|unix.NLA_F_NESTED, nil)
		bit.AddRtAttr(unix.ETHTOOL_A_BITSET_BIT_NAME, nl.ZeroTerminated(o))
		if on {
			bit.AddRtAttr(unix.ETHTOOL_A_BITSET_BIT_VALUE, nil)
		}
	}
	reply, err := request(name, unix.ETHTOOL_MSG_FEATURES_SET, wanted)
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	// The reply names the offloads whose state is not the wanted one.
	if fixed := namesIn(reply, unix.ETHTOOL_A_FEATURES_WANTED); len(fixed) > 0 {
		return fmt.Errorf("%s: the interface does not let %s be switched", what, strings.Join(fixed, ", "))
	}
	return nil
}

// request sends a request about the features of an interface, and returns the attributes of the
// reply.
func request(name string, command uint8, attributes ...*nl.RtAttr) ([]byte, error) {
	family, err := netlink.GenlFamilyGet(unix.ETHTOOL_GENL_NAME)
	if err != nil {
		return nil, fmt.Errorf("netlink family %s: %w", unix.ETHTOOL_GENL_NAME, err)
	}
	req := nl.NewNetlinkRequest(int(family.ID), 0)
	req.AddData(&nl.Genlmsg{Command: command, Version: unix.ETHTOOL_GENL_VERSION})
	header := nl.NewRtAttr(unix.ETHTOOL_A_FEATURES_HEADER|unix.NLA_F_NESTED, nil)
	header.AddRtAttr(unix.ETHTOOL_A_HEADER_DEV_NAME, nl.ZeroTerminated(name))
	req.AddData(header)
	for _, a := range attributes {
		req.AddData(a)
	}
	replies, err := req.Execute(unix.NETLINK_GENERIC, family.ID)
	if err != nil {
		return nil, err
	}
	if len(replies) != 1 || len(replies[0]) < nl.SizeofGenlmsg {
		return nil, errors.New("the kernel sent no reply")
	}
	return replies[0][nl.SizeofGenlmsg:], nil
}

// namesIn returns the names of the bits in a bit set of a reply.
func namesIn(reply []byte, set uint16) (names []string) {
	for _, bits := range nested(reply, set) {
		for _, list := range nested(bits, unix.ETHTOOL_A_BITSET_BITS) {
			for _, bit := range nested(list, unix.ETHTOOL_A_BITSET_BITS_BIT) {
				for _, name := range nested(bit, unix.ETHTOOL_A_BITSET_BIT_NAME) {
					names = append(names, unix.ByteSliceToString(name))
				}
			}
		}
	}
	return names
}

// nested returns the values of all attributes of a kind.
func nested(attributes []byte, kind uint16) (values [][]byte) {
	all, err := nl.ParseRouteAttr(attributes)
	if err != nil {
		return nil // the kernel sends no such messages
	}
	for _, a := range all {
		if a.Attr.Type&nl.NLA_TYPE_MASK == kind {
			values = append(values, a.Value)
		}
	}
	return values
}
