// SPDX-License-Identifier: Apache-2.0

package bgp

import (
	"net/netip"
	"testing"

	"github.com/osrg/gobgp/v4/pkg/packet/bgp"

	"github.com/segue-lb/segue/internal/testhost"
)

// FuzzPeerMessages gives the library any bytes as messages of a peer, in the way in which it reads
// them from a session. It may refuse them, and must not crash.
func FuzzPeerMessages(f *testing.F) {
	for _, message := range []*bgp.BGPMessage{
		openMessage(f, true, true), bgp.NewBGPKeepAliveMessage(), update(f, vip4, "198.51.100.0/24"),
		bgp.NewBGPNotificationMessage(bgp.BGP_ERROR_CEASE, bgp.BGP_ERROR_SUB_ADMINISTRATIVE_SHUTDOWN, []byte("\x03bye")),
		bgp.NewBGPRouteRefreshMessage(1, 0, 1), bgp.NewEndOfRib(bgp.RF_IPv6_UC),
	} {
		text, err := message.Serialize()
		testhost.Must(f, err)
		f.Add(text)
	}
	own := netip.MustParseAddr("192.0.2.2")
	families := map[bgp.Family]bgp.BGPAddPathMode{bgp.RF_IPv4_UC: 0, bgp.RF_IPv6_UC: 0}
	f.Fuzz(func(t *testing.T, text []byte) {
		header := &bgp.BGPHeader{}
		if len(text) < bgp.BGP_HEADER_LENGTH || header.DecodeFromBytes(text) != nil ||
			int(header.Len) < bgp.BGP_HEADER_LENGTH || len(text) < int(header.Len) {
			return
		}
		message, err := bgp.ParseBGPBody(header, text[bgp.BGP_HEADER_LENGTH:header.Len])
		if err != nil { // the library ends the session
			return
		}
		switch body := message.Body.(type) {
		case *bgp.BGPUpdate:
			_, _ = bgp.ValidateUpdateMsg(body, families, true, false, false)
		case *bgp.BGPOpen:
			_, _ = bgp.ValidateOpenMsg(body, routerASN, balancerASN, own)
		}
	})
}
