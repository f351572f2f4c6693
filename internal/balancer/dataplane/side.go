// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"sync"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/datapath"
)

// Side is the data path on one of the balancer's interfaces: the outside, which is node.interface,
// or the inside, which is node.inside. Both sides share all tables. Each side has its own programs,
// because the variables of the programs describe the interface.
type Side struct {
	sideKind
	Objects SideObjects
	// running is held by goroutines that run XdpLb, so that Plane.Widen does not close it meanwhile.
	running sync.RWMutex
}

// sideKind contains the names that belong to a side.
type sideKind struct {
	Setting  string        // the setting that names the interface
	xdp      datapath.Hook // of xdp_lb
	onReturn datapath.Hook // of tc_return, which runs after XDP
}

// SideObjects are the objects that each side has for itself.
type SideObjects struct {
	XdpLb               *ebpf.Program  `ebpf:"xdp_lb"`
	TcReturn            *ebpf.Program  `ebpf:"tc_return"`
	XdpProbe            *ebpf.Program  `ebpf:"xdp_probe"`
	HostMac             *ebpf.Variable `ebpf:"host_mac"`
	HostHairpin         *ebpf.Variable `ebpf:"host_hairpin"`
	HostClientInterface *ebpf.Variable `ebpf:"host_client_interface"`
	NodeLocator         *ebpf.Variable `ebpf:"node_locator"`
	ProbeTurn           *ebpf.Variable `ebpf:"probe_turn"`
	Variables           *ebpf.Map      `ebpf:".bss"` // the memory of the variables
}
