// SPDX-License-Identifier: Apache-2.0

package probe

// service has the servers of a service, and what became of the connections offered to them.
type service struct {
	servers  []*server
	outcomes outcomes
	inVain   uint64 // connections lost in a row
}

// outcomes counts connections that were offered to the servers of a service.
type outcomes struct{ taken, lost uint64 }

func (s *service) add(o outcomes) {
	s.outcomes.taken += o.taken
	s.outcomes.lost += o.lost
	s.inVain += o.lost
	if o.taken > 0 {
		s.inVain = 0
	}
}

// isOverloaded tells whether more than a third of the servers leave offers unanswered. They are
// overloaded, or the clients do not wait for answers. Fewer servers would make it worse.
func (s *service) isOverloaded() bool {
	suspects := 0
	for _, server := range s.servers {
		if server.suspect() {
			suspects++
		}
	}
	return suspects > max(1, len(s.servers)/3)
}

// isDown tells whether the service has lost all its connections for some time.
func (s *service) isDown() bool { return s.inVain >= uint64(UnansweredOffers*len(s.servers)) }

// mayCauseOutage tells whether a service that is down should be tried without the server. If each
// connection is offered to all servers, a single server that drops what it accepts can take all
// connections under policy `least`, because it has the lowest load. So one server at a time is left
// out. First comes a server whose absence helped before, which has a longer trial. Then comes the
// server that was not heard for the longest time.
func (s *service) mayCauseOutage(server *server) bool {
	if !s.isDown() {
		return false
	}
	for _, other := range s.servers {
		longer := other.trial == server.trial && other.share.due > server.share.due
		if other.unheard || other.trial > server.trial || longer {
			return false
		}
	}
	return true
}

// share compares what a server has accepted with its equal share of a service's connections. Under
// policy `least`, the servers behind the first one accept most connections. So the server that was
// offered a connection first does not tell which server failed to answer.
type share struct {
	seen outcomes // of the service, at the last reading
	// Since the server was heard last:
	due  float64 // connections that are its share, whether they were accepted or lost
	lost float64 // lost connections of all servers
}

// add adds the outcomes of a service with that many servers since the last reading.
func (s *share) add(now outcomes, servers int) {
	taken, lost := now.taken-s.seen.taken, now.lost-s.seen.lost
	s.due += float64(taken+lost) / float64(servers)
	s.lost += float64(lost)
}

// isMissing tells whether the server has accepted none of its share of connections, which was at
// least n, and at least half as many were lost. A server that refuses all its offers loses none.
func (s *share) isMissing(n float64) bool { return s.due >= n && s.lost >= s.due/2 }

func (s *share) forget() { s.due, s.lost = 0, 0 }
