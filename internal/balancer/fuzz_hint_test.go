// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"math/rand/v2"
	"net/netip"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
)

// returnedBy returns a client's packet as a server returns it.
func returnedBy(kind desired.Encapsulation, sender netip.Prefix, frame []byte) []byte {
	to := srv6.SID{Locator: node().Locator, Function: srv6.Return}
	back, err := packet.Signal(frame, packet.Encap{
		Kind: kind, Sender: sender.Addr(), Segments: []netip.Addr{to.Addr()},
		Own: packet.MAC{2, 0, 0, 0, 0, 1}, NextHop: ownMAC,
	})
	if err != nil {
		panic(err)
	}
	return back
}

// fromServers returns signals about a flow, and packets of the flow that servers return. Server m0
// is not one of the service any more.
func (c columnService) fromServers(flow dataplane.Flow) (frames [][]byte) {
	ack, fin := packet.Flags(packet.ACK), packet.Flags(packet.FIN|packet.ACK)
	for _, number := range []uint8{0, 1, 2, 3, 8} {
		sender := srv6Server("", 80+number, 1).Locator
		frames = append(frames,
			signal(c.kind, sender, flow, srv6.CreateStickiness, synAck),
			signal(c.kind, sender, flow, srv6.CreateStickiness, ack),
			signal(c.kind, sender, flow, srv6.RemoveStickiness, fin))
	}
	sender := srv6Server("", 81, 1).Locator
	for _, frame := range [][]byte{
		frameOf(flow), frameOf(flow, ack), frameOf(flow, packet.Flags(packet.RST)),
		frameOf(flow, ack, packet.Timestamps(1, 0xabcde001)),
	} {
		frames = append(frames, returnedBy(c.kind, sender, frame))
	}
	return frames
}

// varyHint enters a hint with the tag of a flow, if there is room. Mostly it names a server that
// its column has or had. Otherwise it is as that of another flow.
func (r *reference) varyHint(random *rand.Rand, flow dataplane.Flow, svc *desired.Service) {
	set, tag := r.setOf(flow)
	room := set.room()
	if room == nil || room.use != hintFree || set.find(tag) != nil {
		return
	}
	column := random.IntN(svc.Candidates)
	past := r.past(svc, r.bucket(flow, svc), column)
	server := past[random.IntN(len(past))]
	if server == "" || random.IntN(4) == 0 {
		column, server = random.IntN(8), svc.Servers[random.IntN(len(svc.Servers))].Name
	}
	*room = referenceHint{
		tag, uint64(column), markOf(r.slotOf(svc, server)),
		[]hintUse{hintIdle, hintRecent, hintRecent, hintShared}[random.IntN(4)],
	}
	first, _ := r.hintPlace(flow)
	for i, number := range []int{first, first ^ 1} {
		r.plane.Hints.Words()[number] = set[i].word()
	}
}
