// SPDX-License-Identifier: Apache-2.0

package agent

import (
	"context"

	"github.com/segue-lb/segue/internal/accept"
	"github.com/segue-lb/segue/internal/poll"
)

// listenForPolls opens the address at which balancers ask for loads, if there is one.
func (a *Agent) listenForPolls() error {
	if a.polls == nil {
		return nil
	}
	a.polls.SetKeys(a.keys)
	return a.polls.Listen(a.cfg.Poll.Listen)
}

// answerPolls answers balancers until the context ends or end is called. The function end waits for
// the last answer.
func (a *Agent) answerPolls(ctx context.Context) (end func()) {
	if a.polls == nil {
		return func() {}
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		a.polls.Run(ctx)
	}()
	return func() {
		_ = a.polls.Close()
		<-done
	}
}

// polledLoad returns the load of a service by its load source, under any accept policy. It
// returns false if the load is not known, or if the service has no accept policy.
func (a *Agent) polledLoad(s poll.Service) (l poll.Load, ok bool) {
	key := agentServiceKey{Protocol: s.Protocol, Port: networkOrder(s.Port)}
	key.Vip.In6U.U6Addr8 = s.VIP.As16()
	view := a.kernel.view()
	key, err := firstKey(view.maps.FirstKeys, key)
	if err != nil {
		return l, false
	}
	policy, err := view.acceptance(key)
	if policy == nil || err != nil {
		return l, false
	}
	now, known, err := view.loadNow(key, policy)
	if !known || err != nil {
		return l, false
	}
	l = poll.Load{Busy: now.Busy, Capacity: now.Capacity}
	if l.Capacity == accept.NoCapacity {
		l.Capacity = 0 // in an answer: the capacity is not known
	}
	return l, true
}
