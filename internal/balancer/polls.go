// SPDX-License-Identifier: Apache-2.0

package balancer

import (
	"net/netip"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/segue-lb/segue/internal/balancer/dataplane"
	"github.com/segue-lb/segue/internal/infer"
	"github.com/segue-lb/segue/internal/poll"
)

// maxMissed is how many polls in a row a server may leave unanswered while its last load counts.
// After one more, its load counts as the average of the others.
const maxMissed = 4

// polled is a server that is polled.
type polled struct {
	target poll.Target
	load   *infer.Load // of the last answer; nil: there is none that counts
	heard  time.Time   // when the last answer came; zero: there was none
	missed int         // the number of polls since the last answer
}

// recall continues with a load that an earlier process has stored, if it is young enough. The
// argument now is the time of BootTime.
func (p *polled) recall(e *dataplane.Estimate, now, interval time.Duration) {
	age := now - e.ToldAt
	if missed := int(age / interval); e.Told != nil && missed <= maxMissed {
		p.load, p.heard, p.missed = e.Told, time.Now().Add(-age), missed
	}
}

// Polls returns the collector of metrics about polls.
func (b *Balancer) Polls() prometheus.Collector { return b.inference.poller }

// targetOf returns where the agent of a service's server is polled.
func targetOf(svc *service, m *member) poll.Target {
	return poll.Target{
		ID: m.slot, Address: netip.AddrPortFrom(m.Host, svc.Infer.PollPort),
		Service: poll.Service{VIP: svc.VIP, Port: svc.Port.Number(), Protocol: svc.Protocol.Number()},
	}
}

// arrangePolls makes the service's present members be polled, if its placement polls. What a member
// has told stays while the member has its slot and address.
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

// poll polls all servers of a service if the interval has passed since the last polls. It passes
// the present load of each server to the estimator. It returns true if a server has answered since
// the last call.
func (n *inference) poll(in *inferred, now time.Time) (news bool) {
	isDue := now.Sub(in.asked) >= in.interval
	for i := range in.polled {
		p := &in.polled[i]
		answer, ok := n.poller.Answer(p.target.ID)
		if ok && answer.At.After(p.heard) {
			n.logAnswers(in, i)
			l := answer.Load
			p.load = &infer.Load{Busy: float64(l.Busy), Capacity: float64(l.Capacity)}
			p.heard, p.missed, news = answer.At, 0, true
		}
		if isDue {
			n.ask(in, i)
		}
		in.estimator.SetLoad(i, p.load)
	}
	if isDue {
		in.asked = now
	}
	return news
}

// ask polls a server. If the server has left more than maxMissed earlier polls in a row
// unanswered, ask forgets its load, and logs that once.
func (n *inference) ask(in *inferred, server int) {
	p := &in.polled[server]
	err := n.poller.Ask(p.target)
	unanswered := p.missed // without the poll that was just sent
	if p.missed++; unanswered != maxMissed+1 {
		return
	}
	p.load = nil
	about := []any{"service", in.name, "server", in.names[server], "address", p.target.Address}
	if err != nil {
		about = append(about, "error", err)
	}
	n.log.Warn("a server does not answer polls, and counts as the average", about...)
}

// logAnswers logs that a server answers again.
func (n *inference) logAnswers(in *inferred, server int) {
	if in.polled[server].missed > maxMissed+1 {
		n.log.Info("a server answers polls again", "service", in.name, "server", in.names[server])
	}
}
