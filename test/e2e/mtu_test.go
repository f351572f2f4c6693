// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"net/netip"
	"slices"
	"testing"

	"github.com/gopacket/gopacket/layers"

	"github.com/segue-lb/segue/lab"
)

const transferSize = lab.Size(1e6)

// httpServices are the TCP services of the built-in topology.
var httpServices = []string{
	"http6-insert", "http6-encap", "http6-gre", "http6-ipip", "http4-encap", "http4-gre", "http4-ipip",
}

// transfer sends 1 MB to and from a service.
func transfer(t *testing.T, l *lab.Lab, s lab.Service) {
	t.Helper()
	c := newClient(l)
	must(t, c.download(t.Context(), s, transferSize))
	must(t, c.upload(t.Context(), s, transferSize))
}

// TestTransfersAtFullMTU uses a fabric whose MTU has room for the headers of every encapsulation.
func TestTransfersAtFullMTU(t *testing.T) {
	t.Parallel()
	topology := topology(httpServices...)
	topology.MTU = lab.MTU{Client: 1500, Fabric: 1600}
	l := up(t, topology)
	for _, s := range l.Topology.Services {
		t.Run(s.Name, func(t *testing.T) {
			longest := watchLongest(t, l)
			transfer(t, l, s)
			before, after := longest()
			if before != 1500 || after != 1500+overhead(t, s) {
				t.Errorf("the longest packets have %d bytes before the balancers and %d after; want 1500 and %d",
					before, after, 1500+overhead(t, s))
			}
		})
	}
	requireNoDrops(t, l)
}

// TestTransfersThroughClampedMSS uses a fabric without room for other headers. The clients'
// segments fit only because servers announce a smaller MSS.
func TestTransfersThroughClampedMSS(t *testing.T) {
	t.Parallel()
	topology := topology(httpServices...)
	topology.MTU = lab.MTU{Client: 1500, Fabric: 1500}
	l := up(t, topology)
	for _, s := range l.Topology.Services {
		t.Run(s.Name, func(t *testing.T) {
			tunnelsOfFamily(t, l, s)
			var capture bytes.Buffer
			synAcks, err := l.Node("client").Capture("eth0", &capture)
			must(t, err)
			longest := watchLongest(t, l)
			transfer(t, l, s)
			must(t, synAcks.Stop())
			headers := 40 + 20
			if s.VIP.Is4() {
				headers = 20 + 20
			}
			want := 1500 - overhead(t, s) - headers
			announced := announcedMSS(t, &capture)
			if len(announced) == 0 {
				t.Error("no SYN-ACK was captured")
			}
			for _, mss := range announced {
				if mss != want {
					t.Errorf("a SYN-ACK announces an MSS of %d, want %d", mss, want)
				}
			}
			if _, after := longest(); after != 1500 {
				t.Errorf("the longest packet after the balancers has %d bytes: not what the fabric can carry", after)
			}
		})
	}
	requireNoDrops(t, l)
}

// tunnelsOfFamily leaves the agents only tunnels of the family of a service's VIP. An agent leaves
// room for the longer of the possible outer headers.
func tunnelsOfFamily(t *testing.T, l *lab.Lab, s lab.Service) {
	t.Helper()
	for _, name := range nodes(l, lab.RoleServer) {
		cfg := l.Node(name).AgentConfig()
		cfg.Node.Addresses = slices.DeleteFunc(cfg.Node.Addresses, func(a netip.Addr) bool { return a.Is4() != s.VIP.Is4() })
		must(t, l.Node(name).WriteAgentConfig(cfg))
		must(t, l.Process(name, "agent").Reload(t.Context()))
	}
}

// announcedMSS returns the values of the MSS options of the SYN-ACKs in a capture, in bytes.
func announcedMSS(t *testing.T, capture *bytes.Buffer) (all []int) {
	t.Helper()
	for _, frame := range frames(t, capture) {
		tcp, ok := layer[*layers.TCP](frame)
		if !ok || !tcp.SYN || !tcp.ACK {
			continue
		}
		mss := 0
		for _, option := range tcp.Options {
			if option.OptionType == layers.TCPOptionKindMSS && len(option.OptionData) == 2 {
				mss = int(option.OptionData[0])<<8 | int(option.OptionData[1])
			}
		}
		all = append(all, mss)
	}
	return all
}

// watchLongest captures the packets that the balancers receive and send. The returned function ends
// the capture, and returns the lengths of the longest packets, in bytes of layer 3.
func watchLongest(t *testing.T, l *lab.Lab) func() (before, after int) {
	t.Helper()
	captures := map[string]*capture{}
	for _, name := range nodes(l, lab.RoleBalancer) {
		captures[name] = startCapture(t, l, name)
	}
	return func() (before, after int) {
		for _, c := range captures {
			in, out := c.stop(t)
			for _, frame := range in {
				before = max(before, len(frame)-14)
			}
			for _, frame := range out {
				after = max(after, len(frame)-14)
			}
		}
		return before, after
	}
}
