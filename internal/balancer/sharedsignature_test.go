// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"encoding/binary"
	"net/netip"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
)

// anyFlow generates flows from any client to one of the VIPs.
func anyFlow(vips ...netip.Addr) *rapid.Generator[dataplane.Flow] {
	return rapid.Custom(func(t *rapid.T) dataplane.Flow {
		vip := rapid.SampledFrom(vips).Draw(t, "vip")
		source := netip.AddrFrom4([4]byte(rapid.SliceOfN(rapid.Byte(), 4, 4).Draw(t, "source")))
		if vip.Is6() {
			source = netip.AddrFrom16([16]byte(rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "source")))
		}
		return dataplane.Flow{
			Protocol:    rapid.SampledFrom([]desired.Protocol{desired.TCP, desired.UDP}).Draw(t, "protocol"),
			Source:      netip.AddrPortFrom(source, rapid.Uint16().Draw(t, "source port")),
			Destination: netip.AddrPortFrom(vip, rapid.Uint16().Draw(t, "port")),
		}
	})
}

// The data path and this process compute the same bucket, signature and candidate for each flow.
func TestHashesAgree(t *testing.T) {
	t.Parallel()
	var servers []desired.Server
	for i := range uint8(20) {
		servers = append(servers, srv6Server(string(rune('a'+i)), i+1, 1))
	}
	names := map[dataplane.Flow]string{}
	name := func(vip netip.Addr, protocol desired.Protocol) string {
		return names[dataplane.Flow{Protocol: protocol, Destination: netip.AddrPortFrom(vip, 0)}]
	}
	var services []desired.Service
	for _, vip := range []netip.Addr{vip4, vip6} {
		for _, protocol := range []desired.Protocol{desired.TCP, desired.UDP} {
			svc := serviceOf("all "+vip.String()+string(protocol), vip, desired.AllPorts, protocol, desired.SRv6Encap, servers...)
			services = append(services, svc)
			names[dataplane.Flow{Protocol: protocol, Destination: netip.AddrPortFrom(vip, 0)}] = svc.Name
		}
	}
	cfg := balancerOf(services...)
	cfg.Node.Limits = desired.Limits{Flows: 1 << 16, Servers: 128}
	f := open(t, cfg)
	rapid.Check(t, func(t *rapid.T) {
		flow := anyFlow(vip4, vip6).Draw(t, "flow")
		clear(f.bucket(flow))
		service := name(flow.Destination.Addr(), flow.Protocol)
		server := f.placed(flow, service)
		f.check(f.forwarded(frameOf(flow), flow, service, server, "forward_new"), f.run(frameOf(flow)))
		if f.t.Failed() {
			t.Fatalf("flow %+v", flow)
		}
		f.isEntered(flow, service, server, stateNew)
	})
}

// rekey starts the balancer again, with other keys for the flow table.
func (f *fixture) rekey(keys dataplane.FlowKeys) {
	f.t.Helper()
	identity := f.identity
	identity.FlowKeys = keys
	f.must(f.plane.Objects.Identity.Put(uint32(0), identity))
	cfg := f.cfg
	f.stop()
	f.start(cfg)
}

// portsOf returns the word of the hash that contains a flow's ports.
func portsOf(flow dataplane.Flow) uint64 {
	ports := binary.BigEndian.AppendUint16(nil, flow.Source.Port())
	ports = binary.BigEndian.AppendUint16(ports, flow.Destination.Port())
	return uint64(binary.NativeEndian.Uint32(ports))
}

// ignoreDestinations gives two flows of the same client address and port the same bucket and
// signature.
func (f *fixture) ignoreDestinations(a, b dataplane.Flow) {
	f.t.Helper()
	// In both hashes, the product of ports and service is zero for both flows. For each of them,
	// another factor is zero.
	ports, service := -portsOf(b), -uint64(f.serviceID(a))
	f.rekey(dataplane.FlowKeys{5: ports, 6: service, 7: ports, 8: service})
	if f.signature(a) != f.signature(b) || &f.bucket(a)[0] != &f.bucket(b)[0] {
		f.t.Fatal("the keys tell destinations apart")
	}
}

// Two flows of one service with the same signature go to the same server.
func TestSharedSignature(t *testing.T) {
	t.Parallel()
	server := []desired.Server{srv6Server("s1", 1, 1), srv6Server("s2", 2, 1), srv6Server("s3", 3, 1)}
	f := open(t, balancerOf(serviceOf("all", vip6, desired.AllPorts, desired.TCP, desired.SRv6Encap, server...)))
	a, b := flowTo(vip6, 80, desired.TCP), flowTo(vip6, 81, desired.TCP)
	f.ignoreDestinations(a, b)
	other := f.otherThanPlaced(b, "all")
	f.enter(a, "all", other, stateEstablished)
	f.check(f.forwarded(frameOf(b), b, "all", other, "forward_known"), f.run(frameOf(b)))
}

// Two flows of different services with the same signature are never mixed up. Each packet is placed
// by its own service.
func TestSharedSignatureOfTwoServices(t *testing.T) {
	t.Parallel()
	two := slices.DeleteFunc(standard().Services, func(s desired.Service) bool { return s.Name != "web" && s.Name != "insert" })
	f := open(t, balancerOf(two...))
	f.ignoreDestinations(web, insert)
	for range 3 {
		for _, flags := range []packet.TCPFlags{packet.SYN, packet.ACK} {
			for flow, service := range map[dataplane.Flow]string{web: "web", insert: "insert"} {
				got := f.run(frameOf(flow, packet.Flags(flags)))
				if want := service + "/" + f.placed(flow, service); serverOf(got) != want {
					t.Errorf("%v with %#x went to %s, want %s", flow, flags, serverOf(got), want)
				}
			}
		}
	}
}
