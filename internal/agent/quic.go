// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"encoding/hex"
	"fmt"
	"time"

	"github.com/cilium/ebpf"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/desired"
)

// The first octet of a connection ID: the config rotation in its upper three bits, and then random
// bits or the length of the ID. A mask has the bits that are the same in all IDs of a form. Package
// quiclb has the same layout.
const (
	quicRotationShift = 5
	quicRotationMask  = 0xe0 // mask of the first octet if its lower five bits are random
	quicWholeMask     = 0xff // mask of the first octet if its lower five bits are the length
)

// ownIDOf returns the octets with which the connection IDs of this server begin, for a form of IDs,
// and a mask of the bits that are the same in all of them.
func ownIDOf(form *desired.QUIC, serverID []byte) agentQuicOwnId {
	own := agentQuicOwnId{Length: uint32(form.Config().Length())}
	own.Octets[0] = form.Rotation<<quicRotationShift | uint8(own.Length-1)
	own.Mask[0] = quicRotationMask
	if form.EncodeLength {
		own.Mask[0] = quicWholeMask
	}
	for i, octet := range serverID {
		own.Octets[1+i], own.Mask[1+i] = octet, 0xff
	}
	return own
}

// form is the reverse of ownIDOf: it returns the form of connection IDs, and the server ID in
// hexadecimal.
func (own *agentQuicOwnId) form() (form *desired.QUIC, serverID string) {
	n := 0 // octets of the server ID: their masks are 0xff, after that of the first octet
	for n+1 < len(own.Mask) && own.Mask[n+1] != 0 {
		n++
	}
	return &desired.QUIC{
		Form: desired.QUICLB21, Rotation: own.Octets[0] >> quicRotationShift,
		ServerIDLength: n, NonceLength: int(own.Length) - 1 - n,
		EncodeLength: own.Mask[0] == quicWholeMask,
	}, hex.EncodeToString(own.Octets[1 : 1+n])
}

// ownIDsOf returns, for each UDP service, how the connection IDs of this server begin, in the
// present and the former form. Without a former form, Former is the same as Present. Both are zero
// for a service without quic. If no service has quic, ownIDsOf returns nil.
func ownIDsOf(services []desired.AgentService) map[agentServiceKey]agentQuicOwnIds {
	all := map[agentServiceKey]agentQuicOwnIds{}
	anyQUIC := false
	for _, s := range services {
		var own agentQuicOwnIds
		if s.QUIC != nil {
			anyQUIC = true
			own.Present = ownIDOf(s.QUIC, s.QUICServerID())
			own.Former = own.Present
		}
		if s.FormerQUIC != nil {
			own.Former = ownIDOf(s.FormerQUIC, s.FormerQUICServerID())
		}
		if s.Protocol == desired.UDP {
			all[serviceKey(s)] = own
		}
	}
	if !anyQUIC {
		return nil
	}
	return all
}

// writeOwnIDs writes to the data path the connection IDs that name this server. A service with quic
// gets counters, unless it has some from before. Counters of services without quic are removed only
// when the takeover is complete, because the previous process uses them until then.
func (k *kernel) writeOwnIDs(
	t *datapath.Takeover, want map[agentServiceKey]agentQuicOwnIds,
) error {
	counted := map[agentServiceKey]bool{}
	for key, own := range want {
		if own.Present.Length == 0 {
			continue
		}
		counted[key] = true
		zero := make([]agentQuicIdCounts, ebpf.MustPossibleCPU())
		if err := addIfAbsent(t, k.objects.QuicIdCounts, key, zero); err != nil {
			return err
		}
	}
	t.OnCommit(func() error { return datapath.Keep(k.objects.QuicIdCounts, counted) })
	if err := datapath.Replace(k.objects.QuicOwnIds, want); err != nil {
		return err
	}
	compared := uint32(0)
	if len(counted) > 0 {
		compared = 1
	}
	if err := k.objects.QuicIsCompared.Set(compared); err != nil {
		return fmt.Errorf("set whether connection IDs are compared: %w", err)
	}
	return nil
}

// QUICState tells which connection IDs name this server, and which IDs its packets had.
type QUICState struct {
	// QUIC and FormerQUIC are the present and the former form of connection IDs. FormerQUIC is nil
	// if there is no former form. QUICID and FormerQUICID are the server ID of this server in each
	// form.
	QUIC         *desired.QUIC `json:"quic"`
	QUICID       string        `json:"quic_id"`
	FormerQUIC   *desired.QUIC `json:"former_quic,omitempty"`
	FormerQUICID string        `json:"former_quic_id,omitempty"`
	// IDs has counts by the result of the comparison: issued_own, issued_other and delivered_other.
	// The application issues IDs in its packets. Delivered IDs are in packets of clients.
	IDs map[string]IDCount `json:"ids"`
}

// IDCount is the number of packets with one result of the comparison of connection IDs.
type IDCount struct {
	Packets uint64 `json:"packets"`
	// Last is the ID of the last of these packets in hexadecimal, up to 20 octets. If the packet
	// had a short header, which does not tell where its ID ends, Last may have octets after the ID.
	Last string `json:"last"`
}

// quicState reads which connection IDs of a service name this server, and which IDs its packets
// had. It returns nil for a service without quic.
func (v *View) quicState(key agentServiceKey) (*QUICState, error) {
	var own agentQuicOwnIds
	if found, err := find(v.maps.QuicOwnIds, key, &own); !found || own.Present.Length == 0 {
		return nil, err
	}
	state := &QUICState{}
	state.QUIC, state.QUICID = own.Present.form()
	if own.Former != own.Present {
		state.FormerQUIC, state.FormerQUICID = own.Former.form()
	}
	var err error
	state.IDs, err = v.idCounts(key)
	return state, err
}

// idCounts returns the numbers of packets whose connection IDs were compared, by result.
func (v *View) idCounts(key agentServiceKey) (map[string]IDCount, error) {
	var perCPU []agentQuicIdCounts
	if _, err := find(v.maps.QuicIdCounts, key, &perCPU); err != nil {
		return nil, err
	}
	counts := map[string]IDCount{}
	for i, label := range v.labels.quicIDs {
		var sum IDCount
		latest := uint64(0) // when the last ID was seen, on any CPU
		for _, cpu := range perCPU {
			count := &cpu.Of[i]
			sum.Packets += count.Packets
			if count.When > latest {
				last := count.Last
				latest, sum.Last = count.When, hex.EncodeToString(last.Octets[:last.Length])
			}
		}
		counts[label] = sum
	}
	return counts, nil
}

// othersWarned is the last warning that the application of a service issues IDs of other servers.
type othersWarned struct {
	packets uint64 // how many packets had IDs of other servers at that time
	at      time.Time
}

// othersInterval is the shortest time between two warnings of followQUIC about the same service.
const othersInterval = time.Minute

// followQUIC warns about applications that issue connection IDs of other servers. It does not warn
// about delivered packets with such IDs, because any client can send them.
func (a *Agent) followQUIC() error {
	view, warned := a.kernel.view(), map[string]othersWarned{}
	for _, s := range a.cfg.Services {
		if s.QUIC == nil {
			continue
		}
		counts, err := view.idCounts(serviceKey(s))
		if err != nil {
			return fmt.Errorf("service %s: %w", s.Name, err)
		}
		others := counts["issued_other"]
		before, known := a.others[s.Name]
		grown := datapath.Growth(others.Packets, before.packets)
		switch {
		case !known: // the counted packets are from before the start: no warning
			before.packets = others.Packets
		case grown > 0 && time.Since(before.at) >= othersInterval:
			a.log.Warn("the program issues connection IDs that do not name this server: "+
				"balancers may send packets of its connections to other servers", "service", s.Name,
				"packets", grown, "last_id", others.Last, "quic_id", s.QUICID)
			before = othersWarned{others.Packets, time.Now()}
		}
		warned[s.Name] = before
	}
	a.others = warned
	return nil
}
