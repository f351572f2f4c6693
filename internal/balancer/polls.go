// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"net/netip"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/infer"
	"github.com/segue-lb/segue/internal/poll"
)

// mostMissed is how many polls in a row a server may leave unanswered and keep its last load. With
// one more it counts as the average.
const mostMissed = 4

// polled is a server that is polled.
type polled struct {
	target poll.Target
	heard  time.Time // when the last answer came; zero: there is none
	missed int       // polls since then
}

// Polls returns the collector of metrics about polls.
func (b *Balancer) Polls() prometheus.Collector { return b.inference.poller }

// targetOf returns where the agent of a service's server is polled.
func targetOf(svc *service, m *member) poll.Target {
	protocol := uint8(unix.IPPROTO_TCP)
	if svc.Protocol == desired.UDP {
		protocol = unix.IPPROTO_UDP
	}
	return poll.Target{
		ID: m.slot, Address: netip.AddrPortFrom(m.Host, svc.Infer.PollPort),
		Service: poll.Service{VIP: svc.VIP, Port: svc.Port.Number(), Protocol: protocol},
	}
}

// arrangePolls makes the service's present members be polled, if its placement polls. What was
// heard of a member stays while the member has its slot and address.
func (n *inference) arrangePolls(in *inferred, svc *service) {
	before := map[uint32]polled{}
	for _, p := range in.polled {
		before[p.target.ID] = p
	}
	in.polled = nil
	if svc.Placement.Polls() {
		for _, m := range svc.members {
			p := polled{target: targetOf(svc, m)}
			if was := before[m.slot]; was.target == p.target {
				p = was
				delete(before, m.slot)
			}
			in.polled = append(in.polled, p)
		}
	}
	for slot := range before {
		n.poller.Forget(slot)
	}
}

// poll asks all servers of a service if it is time to, and passes what they have answered to the
// estimator. It returns true if there is something new.
func (n *inference) poll(in *inferred, now time.Time) (news bool) {
	isDue := now.Sub(in.asked) >= in.interval
	for i := range in.polled {
		p := &in.polled[i]
		answer, ok := n.poller.Answer(p.target.ID)
		if ok && answer.At != p.heard {
			p.heard, p.missed, news = answer.At, 0, true
			load := infer.Load{Busy: float64(answer.Load.Busy), Capacity: float64(answer.Load.Capacity)}
			in.estimator.SetLoad(i, &load)
		}
		if isDue {
			n.ask(in, i)
		}
	}
	if isDue {
		in.asked = now
	}
	return news
}

// ask polls a server. A server that has not answered for too long has no load.
func (n *inference) ask(in *inferred, server int) {
	p := &in.polled[server]
	if p.missed > mostMissed {
		in.estimator.SetLoad(server, nil)
	}
	if err := n.poller.Ask(p.target); err != nil && p.missed == mostMissed {
		n.log.Warn("a server is not polled", "server", in.names[server], "error", err)
	}
	p.missed++
}
