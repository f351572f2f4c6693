// SPDX-License-Identifier: Apache-2.0

package accept

import "slices"

// Spare is a balancer's list of servers that had free capacity when they last reported their load.
// It is the list of idle servers of "Join-Idle-Queue" (Lu et al., Performance Evaluation, 2011).
// The load reports are in signals that servers send anyway. A server reports only to the balancer
// of its last connection, so the lists of balancers differ.
type Spare struct {
	servers []int32 // the newest last
	room    int     // the most servers that the list can have
}

// NewSpare returns an empty list with room for a number of servers, 0 or more.
func NewSpare(room int) *Spare { return &Spare{make([]int32, 0, room), room} }

// Report takes a server's load report. The server becomes the newest of the list if it has free
// capacity, and otherwise leaves the list. If the list is full, the oldest server is removed.
func (s *Spare) Report(server int32, load Load) {
	s.Forget(server)
	if !load.free() || s.room == 0 {
		return
	}
	if len(s.servers) == s.room {
		s.servers = slices.Delete(s.servers, 0, 1)
	}
	s.servers = append(s.servers, server)
}

// Forget removes a server.
func (s *Spare) Forget(server int32) {
	if i := slices.Index(s.servers, server); i >= 0 {
		s.servers = slices.Delete(s.servers, i, i+1)
	}
}

// Newest returns the newest server of the list that is not excluded. ok is false if there is none.
func (s *Spare) Newest(excluded []int32) (server int32, ok bool) {
	for _, server := range slices.Backward(s.servers) {
		if !slices.Contains(excluded, server) {
			return server, true
		}
	}
	return 0, false
}
