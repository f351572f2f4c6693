// SPDX-License-Identifier: Apache-2.0

package probe

import "slices"

// service has the servers of a service, and the outcomes of the connections offered to them.
type service struct {
	servers    []*server
	outcomes   outcomes
	cannotCall bool // this host could not make the last call to a server
}

// outcomes counts the connections that were offered to the servers of a service: those that a
// server accepted, and those that no server answered.
type outcomes struct{ taken, lost uint64 }

func (s *service) add(o outcomes) {
	s.outcomes.taken += o.taken
	s.outcomes.lost += o.lost
}

// peerOf returns the peer for a call through a server: another server, to which the call then goes.
// It is one without a fault or an unanswered call. Such servers take turns. peerOf returns nil if
// there is none.
func (s *service) peerOf(server *server) *server {
	for range s.servers {
		server.turn++
		peer := s.servers[server.turn%len(s.servers)]
		if peer != server && peer.probed == None && !peer.unheard && peer.unreached == 0 {
			return peer
		}
	}
	return nil
}

// withdraw removes the server through from the accused of all servers of the service, because a
// call to it or through it has just had an answer.
func (s *service) withdraw(through *server) {
	for _, peer := range s.servers {
		if i := slices.Index(peer.accused, through); i >= 0 {
			peer.accused = slices.Delete(peer.accused, i, i+1)
		}
	}
}

// isOverloaded tells whether more than one server, and more than a third of all, do not answer
// calls. Then the servers are overloaded, or the fault is near the balancer. To take servers out
// would make it worse.
func (s *service) isOverloaded() bool {
	unreached := 0
	for _, server := range s.servers {
		if server.unreached > 0 {
			unreached++
		}
	}
	return unreached > max(1, len(s.servers)/3)
}

// share finds a server that accepts nothing, although its equal share of the service's connections
// would be many. The score of unanswered offers does not find such a server under policy `least`.
// There, a later candidate of the list accepts most connections. So an offer without an answer does
// not tell which candidate failed, and it counts for the first one.
type share struct {
	seen outcomes // of the service, at the last reading
	// Since the server last accepted a connection:
	due  float64 // its equal share of the service's connections, both accepted and lost
	lost float64 // lost connections of the whole service
}

// add adds the outcomes of the service since the last reading: to due the server's equal part of
// them, and to lost all lost connections. now are all outcomes so far.
func (s *share) add(now outcomes, servers int) {
	taken, lost := now.taken-s.seen.taken, now.lost-s.seen.lost
	s.due += float64(taken+lost) / float64(servers)
	s.lost += float64(lost)
}

// isMissing tells whether the server has accepted nothing while its share was n connections or
// more, and the service has lost at least half as many as this share. A server that refuses all its
// offers is not missing: the other servers accept them, so none is lost.
func (s *share) isMissing(n float64) bool { return s.due >= n && s.lost >= s.due/2 }

func (s *share) forget() { s.due, s.lost = 0, 0 }
