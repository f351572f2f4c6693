// SPDX-License-Identifier: Apache-2.0

package accept

import "slices"

// Spare is what a balancer remembers of servers that said they would take a connection at once: they had
// a free worker when they last spoke of their load. It is the list of idle servers of "Join-Idle-Queue"
// (Lu et al., Performance Evaluation, 2011), filled by signals that there are anyway. As a server
// speaks to the balancer of its last connection only, several balancers' lists differ.
type Spare struct {
	servers []int32 // the newest last
	most    int
}

// NewSpare remembers up to so many servers, 0 or more.
func NewSpare(most int) *Spare { return &Spare{make([]int32, 0, most), most} }

// Report takes in what a server said of its load now. The oldest makes way for it where there is no room.
func (s *Spare) Report(server int32, load Load) {
	s.Forget(server)
	if !load.free() || s.most == 0 {
		return
	}
	if len(s.servers) == s.most {
		s.servers = slices.Delete(s.servers, 0, 1)
	}
	s.servers = append(s.servers, server)
}

// Forget is for a server that is not to be used any more.
func (s *Spare) Forget(server int32) {
	if i := slices.Index(s.servers, server); i >= 0 {
		s.servers = slices.Delete(s.servers, i, i+1)
	}
}

// Newest returns the server that said so last, among those that are not to be left out; false if there is
// none.
func (s *Spare) Newest(leaveOut []int32) (server int32, ok bool) {
	for _, server := range slices.Backward(s.servers) {
		if !slices.Contains(leaveOut, server) {
			return server, true
		}
	}
	return 0, false
}
