// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"testing"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/health/probe"
	"github.com/segue-lb/segue/internal/packet"
	"github.com/segue-lb/segue/internal/srv6"
)

// Whichever server answers a SYN, the answer counts for the server that got the offer first.
func TestAnswersCountForTheFirstOffered(t *testing.T) {
	t.Parallel()
	f := open(t, hunting(desired.SelectConsistent, 2))
	for service, flow := range hunted {
		t.Run(service, func(t *testing.T) {
			f.t = t
			row := f.row(flow, service)
			kind := f.service(service).Encapsulation
			answer := func(server string, flags packet.TCPFlags) {
				f.run(signal(kind, f.locatorOf(service, server), flow, srv6.CreateStickiness, packet.Flags(flags)))
			}
			expect := func(when, server string, offered, answered, taken uint64) {
				t.Helper()
				got, err := f.plane.Offers(f.slot(service, server))
				f.must(err)
				if want := (probe.Offers{Offered: offered, Answered: answered, Taken: taken}); got != want {
					t.Errorf("%s: %+v, want %+v", when, got, want)
				}
			}
			f.run(frameOf(flow))
			expect("a SYN", row[0], 1, 0, 0)
			answer(row[1], packet.SYN|packet.ACK)
			expect("the second server takes it", row[0], 1, 1, 0)
			expect("the second server takes it", row[1], 0, 0, 1)
			answer(row[1], packet.ACK)
			expect("not a SYN-ACK", row[0], 1, 1, 0)

			f.forgetFlows()
			f.setHealth(service, row[0], false)
			defer f.setHealth(service, row[0], true)
			next := f.row(flow, service) // in the row; the segment list omits the failing server
			f.run(frameOf(flow))
			answer(next[1], packet.SYN|packet.ACK)
			expect("the first one fails its checks", row[0], 1, 1, 0)
		})
	}
}

// With random candidates, it is not known afterwards which server got the offer first.
func TestAnswersToRandomOffersDoNotCount(t *testing.T) {
	t.Parallel()
	f := open(t, hunting(desired.SelectRandom, 2))
	row := f.row(web, "web")
	f.run(signal(desired.SRv6Encap, f.locatorOf("web", row[0]), web, srv6.CreateStickiness, packet.Flags(packet.SYN|packet.ACK)))
	for _, server := range f.service("web").Servers {
		if got, err := f.plane.Offers(f.slot("web", server.Name)); got.Answered != 0 || err != nil {
			t.Errorf("%s: %+v, %v", server.Name, got, err)
		}
	}
}
