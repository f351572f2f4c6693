// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
)

// quicService is a service with persistence quic in openReference.
type quicService struct {
	name   string
	flow   dataplane.Flow
	kind   desired.Encapsulation
	form   desired.QUIC
	former bool // it had a flow table before, and placement hash
	hunts  bool
	// rotated is the form before form, or nil if there was none.
	rotated *desired.QUIC
}

var quicServices = []quicService{
	{"quic-encap", flowTo(vip6, 101, desired.UDP), desired.SRv6Encap,
		desired.QUIC{Rotation: 2, ServerIDLength: 3, NonceLength: 4, EncodeLength: true},
		false, false, nil},
	{"quic-insert", flowTo(vip6, 102, desired.UDP), desired.SRv6Insert,
		desired.QUIC{Rotation: 0, ServerIDLength: 1, NonceLength: 8}, false, false,
		&desired.QUIC{Rotation: 4, ServerIDLength: 15, NonceLength: 4}},
	{"quic-gre", flowTo(vip4, 103, desired.UDP), desired.GRE,
		desired.QUIC{Rotation: 6, ServerIDLength: 15, NonceLength: 4}, false, false,
		&desired.QUIC{Rotation: 0, ServerIDLength: 1, NonceLength: 4, EncodeLength: true}},
	{"quic-ipip", flowTo(vip4, 104, desired.UDP), desired.IPIP,
		desired.QUIC{Rotation: 5, ServerIDLength: 8, NonceLength: 8, EncodeLength: true},
		false, false, nil},
	{"quic-encap4", flowTo(vip4, 106, desired.UDP), desired.SRv6Encap,
		desired.QUIC{Rotation: 3, ServerIDLength: 15, NonceLength: 4}, false, false, nil},
	{"quic-former", flowTo(vip6, 105, desired.UDP), desired.SRv6Encap,
		desired.QUIC{Rotation: 1, ServerIDLength: 2, NonceLength: 5}, true, false, nil},
	{"quic-hunt", flowTo(vip6, 107, desired.UDP), desired.SRv6Insert,
		desired.QUIC{Rotation: 1, ServerIDLength: 3, NonceLength: 8}, false, true, nil},
	{"quic-hunt4", flowTo(vip4, 108, desired.UDP), desired.SRv6Encap,
		desired.QUIC{Rotation: 2, ServerIDLength: 1, NonceLength: 4}, true, true, nil},
}

// quicServerCount is the number of servers of each of quicServices.
const quicServerCount = 4

// service returns the service. The argument former tells whether it is the one before the service
// got persistence quic.
func (q quicService) service(former bool) desired.Service {
	var servers []desired.Server
	for i := range uint8(quicServerCount) {
		s := srv6Server(fmt.Sprintf("c%d", i), 100+i, 1)
		if q.kind.IsTunnel() {
			s = tunnelServer(s.Name, fmt.Sprintf("10.0.2.%d", i))
		}
		s.Drained = i == 3
		if !former {
			s = withID(s, 0xa0+i, &q.form)
		}
		if q.rotated != nil {
			s.FormerQUICID = withID(s, 0xb0+i, q.rotated).QUICID
		}
		servers = append(servers, s)
	}
	vip, port := q.flow.Destination.Addr(), desired.Port(q.flow.Destination.Port())
	svc := serviceOf(q.name, vip, port, desired.UDP, q.kind, servers...)
	if !former {
		form := q.form
		svc.Persistence, svc.QUIC, svc.FormerQUIC = desired.PersistenceQUIC, &form, q.rotated
		if q.hunts {
			svc.Placement, svc.Selection = desired.PlacementHunt, desired.SelectConsistent
		}
	}
	return svc
}

// quicConfig returns quicServices, either before or after all of them have persistence quic.
func quicConfig(before bool) (services []desired.Service) {
	for _, q := range quicServices {
		services = append(services, q.service(before && q.former))
	}
	return services
}

// takeQUICStep gives quicServices that had a flow table persistence quic.
func takeQUICStep(f *fixture, cfg *desired.Balancer) {
	first := slices.IndexFunc(cfg.Services, func(s desired.Service) bool {
		return s.Name == quicServices[0].name
	})
	others := cfg.Services[first+len(quicServices):]
	cfg.Services = slices.Concat(cfg.Services[:first], quicConfig(false), others)
	f.mustApply(cfg)
	f.silent["c2"] = true
}

// quicCaptures returns packets to quicServices.
func quicCaptures() (frames [][]byte) {
	for _, q := range quicServices {
		svc := q.service(false)
		for i := range svc.Servers {
			id := q.id(&q.form, svc.Servers[i].QUICServerID())
			payloads := [][]byte{
				shortHeader(id), append([]byte{0x40}, id...), append([]byte{0x40}, id[:len(id)-1]...),
				// A version and a length that look like an ID behind a short header.
				append([]byte{0xc0}, shortHeader(id)[1:]...),
			}
			for kind := range byte(4) {
				for _, version := range []uint32{0, version1, version2, version3} {
					payloads = append(payloads, longHeader(kind, version, id))
				}
			}
			longest := append(slices.Clone(id), make([]byte, 255-len(id))...)
			payloads = append(payloads, longHeader(2, version1, append(id, 1, 2, 3)),
				longHeader(2, version1, longest), longHeader(2, version1, id[:len(id)-1]),
				longHeader(2, version1, nil), nil, shortHeader(changed(id, 1, 1)),
				longHeader(0, version1, []byte("12345678"))) // the client has chosen the ID
			if q.rotated != nil {
				id := q.id(q.rotated, svc.Servers[i].FormerQUICServerID())
				payloads = append(payloads, shortHeader(id), longHeader(2, version1, id))
			}
			for _, payload := range payloads {
				flow := fromPort(q.flow, uint16(len(frames)%3))
				frames = append(frames, frameOf(flow, packet.Payload(payload)))
			}
			long := packet.Payload(append(shortHeader(id), make([]byte, 64)...))
			frames = append(frames, packet.Fragments(frameOf(q.flow, long), 64, 12)...)
		}
		router, kind := router6, uint8(1)
		if q.flow.Source.Addr().Is4() {
			router, kind = router4, 3
		}
		frames = append(frames, packet.ICMPError(router, kind, 0, 0, reply(q.flow)))
	}
	return frames
}

// id returns a connection ID of a form with this server ID. It is always the same one, so that a
// seed of the fuzzer makes the same frames in each process.
func (q quicService) id(form *desired.QUIC, serverID []byte) []byte {
	id, err := form.Config().Encode(serverID, make([]byte, form.NonceLength))
	if err != nil {
		panic(err)
	}
	if !form.EncodeLength { // then Encode gives the first octet random low bits
		id[0] = id[0]&^0x1f | serverID[0]&0x1f
	}
	return id
}

// varyQUIC makes some servers of quicServices fail, and enters some of the flows of their captures
// into the flow table, as of before they had persistence quic.
func (r *reference) varyQUIC(random *rand.Rand) {
	for _, q := range quicServices {
		svc := r.classify(q.flow)
		if svc == nil {
			continue // the balancer is not that of openReference
		}
		for _, server := range svc.Servers {
			r.fail(svc, server.Name, random.IntN(4) == 0)
		}
		for port := range uint16(3) {
			if q.former && random.IntN(2) == 0 {
				r.enterAny(random, fromPort(q.flow, port), svc)
			}
		}
	}
}

// quicReasons are the reasons for which services with persistence quic forward packets.
var quicReasons = []string{
	"quic forward_new", "quic forward_known", "quic forward_recover", "quic forward_fragment",
	"quic forward_icmp", "quic forward_hunt",
}

// isQUIC tells whether one of quicServices got a frame.
func isQUIC(o outcome) bool {
	service, _, _ := strings.Cut(serverOf(o), "/")
	named := func(q quicService) bool { return q.name == service }
	return slices.ContainsFunc(quicServices, named)
}
