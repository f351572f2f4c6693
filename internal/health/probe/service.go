// SPDX-License-Identifier: Apache-2.0

package probe

import "slices"

// service has the servers of a service, and what became of the connections offered to them.
type service struct {
	servers  []*server
	outcomes outcomes
	mute     bool // this host could not make the last call to a server
}

// outcomes counts connections that were offered to the servers of a service.
type outcomes struct{ taken, lost uint64 }

func (s *service) add(o outcomes) {
	s.outcomes.taken += o.taken
	s.outcomes.lost += o.lost
}

// peerOf returns a server to which a call through another one may go, or nil. They take turns.
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

// withdraw forgets that calls through a server had no answer.
func (s *service) withdraw(through *server) {
	for _, peer := range s.servers {
		if i := slices.Index(peer.accused, through); i >= 0 {
			peer.accused = slices.Delete(peer.accused, i, i+1)
		}
	}
}

// isOverloaded tells whether more than a third of the servers do not answer calls. They are
// overloaded, or the fault is near the balancer. Fewer servers would make it worse.
func (s *service) isOverloaded() bool {
	unreached := 0
	for _, server := range s.servers {
		if server.unreached > 0 {
			unreached++
		}
	}
	return unreached > max(1, len(s.servers)/3)
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
