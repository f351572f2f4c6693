// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/netdev"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/lab"
)

// strangersAreNotBalanced lets the switch send packets to a VIP in a VLAN to lb1. The switch's end
// of the veth would pass the tag beside the frame, unless the balancer switches that off. The
// balancer must count each packet as one in a VLAN, and forward none. The same holds after somebody
// has switched the offloads on again and the balancer has noticed.
func strangersAreNotBalanced(t *testing.T, l *lab.Lab) {
	requireOff := func() error {
		return l.Node("fabric").Do(func() error {
			on, err := netdev.ActiveOffloads("lb1", tagOffloads...)
			if err == nil && len(on) > 0 {
				err = fmt.Errorf("on: %v", on)
			}
			return err
		})
	}
	must(t, requireOff())
	vip := l.Topology.Services[0]
	for _, kind := range []uint16{unix.ETH_P_8021Q, unix.ETH_P_8021AD} {
		before := packetCounts(t, l.Node("lb1"))
		remove := tagPackets(t, l, "lb1", vip.VIP, kind)
		var frames [][]byte
		for port := range uint16(10) {
			frames = append(frames, packet.TCP(netip.AddrPortFrom(l.Node("client").IPv6, 20000+port), vip.Address()))
		}
		send(t, l, "s3", "eth0", "lb1", "eth0", frames)
		eventually(t, func() error {
			grown := packetCounts(t, l.Node("lb1")).since(t, before)
			got := counts{"pass_vlan": grown["pass_vlan"], "forward_hunt": grown["forward_hunt"]}
			want := counts{"pass_vlan": uint64(len(frames)), "forward_hunt": 0}
			if diff := cmp.Diff(want, got); diff != "" {
				return errors.New("-want +got:\n" + diff)
			}
			return nil
		})
		remove()
		must(t, l.Node("fabric").Do(func() error { return netdev.SetOffloads("lb1", true, tagOffloads...) }))
		eventually(t, requireOff)
	}
	if s := balancerStatus(t, l.Node("lb1")); s.Attachment.HiddenVLANTags != "" {
		t.Errorf("status: %s", s.Attachment.HiddenVLANTags)
	}
}

// tagOffloads pass the tags of sent packets beside the frames.
var tagOffloads = []string{"tx-vlan-hw-insert", "tx-vlan-stag-hw-insert"}

// tagPackets puts packets to an address of IPv6 into a VLAN, when they leave the switch by a port.
// It returns a function that ends this.
func tagPackets(t *testing.T, l *lab.Lab, port string, to netip.Addr, kind uint16) (end func()) {
	t.Helper()
	prefix := to.As16()
	tags := asm.Instructions{ // at tc egress
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.LoadAbs(12, asm.Half), // EtherType
		asm.JNE.Imm(asm.R0, unix.ETH_P_IPV6, "pass"),
		asm.LoadAbs(14+24, asm.Word), // the beginning of the destination
		asm.JNE.Imm(asm.R0, int32(binary.BigEndian.Uint32(prefix[:])), "pass"),
		asm.Mov.Reg(asm.R1, asm.R6),
		asm.Mov.Imm(asm.R2, int32(binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, kind)))),
		asm.Mov.Imm(asm.R3, 100),
		asm.FnSkbVlanPush.Call(),
		asm.Mov.Imm(asm.R0, -1).WithSymbol("pass"), // TC_ACT_UNSPEC
		asm.Return(),
	}
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL", Instructions: tags})
	must(t, err)
	defer program.Close()
	var filter *netlink.BpfFilter
	must(t, l.Node("fabric").Do(func() error {
		link, err := netlink.LinkByName(port)
		if err != nil {
			return err
		}
		filter = &netlink.BpfFilter{
			FilterAttrs: netlink.FilterAttrs{
				LinkIndex: link.Attrs().Index, Parent: netlink.HANDLE_MIN_EGRESS,
				Handle: 1, Priority: 1, Protocol: unix.ETH_P_ALL,
			},
			Name: "tags", DirectAction: true, Fd: program.FD(),
		}
		return netlink.FilterAdd(filter)
	}))
	return func() { must(t, l.Node("fabric").Do(func() error { return netlink.FilterDel(filter) })) }
}
