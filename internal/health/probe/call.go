// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"context"
	"errors"
	"sync"
)

const (
	// callTimeout is how long a call waits for the server's answer. It ends before the server's next
	// turn.
	callTimeout = Interval * 9 / 10
	// mostCalls is the highest number of calls at a time. Clients can make all servers suspect.
	mostCalls = 256
)

// ErrUntried tells that this host cannot make a call. It says nothing about the server.
var ErrUntried = errors.New("not tried")

// Caller makes calls: connections of the balancer's own. Its method may be called from several
// goroutines.
type Caller interface {
	// Call offers a connection to a server, as clients' connections are offered, but no other server
	// may accept it. The offer visits the server through first, which passes it on; nil: it goes
	// straight to the server. Call returns nil if the server answers, also by a reset. The error
	// contains ErrUntried if this host cannot make the call.
	Call(ctx context.Context, to, through *Target) error
}

// call is a call that was begun.
type call struct{ result chan error }

// calls makes calls while a prober runs.
type calls struct {
	caller Caller
	life   context.Context
	group  sync.WaitGroup
	room   chan struct{}
}

func newCalls(ctx context.Context, caller Caller) *calls {
	return &calls{caller: caller, life: ctx, room: make(chan struct{}, mostCalls)}
}

// begin begins a call to a server, through another one unless that is nil. It returns nil if there
// are too many calls.
func (c *calls) begin(to Target, through *Target) *call {
	select {
	case c.room <- struct{}{}:
	default:
		return nil
	}
	begun := &call{make(chan error, 1)}
	c.group.Go(func() {
		defer func() { <-c.room }()
		ctx, cancel := context.WithTimeout(c.life, callTimeout)
		defer cancel()
		begun.result <- c.caller.Call(ctx, &to, through)
	})
	return begun
}

// wait waits for the end of all calls.
func (c *calls) wait() { c.group.Wait() }
