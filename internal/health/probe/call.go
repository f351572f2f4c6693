// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"context"
	"errors"
	"sync"
)

const (
	// callTimeout is how long a call waits for the server's answer. It is less than Interval, so
	// the call has ended when the server is judged again.
	callTimeout = Interval * 9 / 10
	// mostCalls is the highest number of calls at a time. There must be a limit, because clients
	// can make all servers suspect.
	mostCalls = 256
)

// ErrUntried is the error if this host cannot make a call. It proves nothing about the server.
var ErrUntried = errors.New("not tried")

// Caller makes calls. A call is a connection that the balancer itself opens to a server, to test
// it. Several goroutines may call its method.
type Caller interface {
	// Call offers a connection to a server, the target to, in the way in which clients' connections
	// are offered. But no other server may accept it. If through is not nil, the offer first visits
	// the server through, which should pass it on. Call returns nil if the target to answers, even
	// by a reset. The error wraps ErrUntried if this host cannot make the call.
	Call(ctx context.Context, to, through *Target) error
}

// call is a call that was begun. Its result arrives when it ends.
type call struct{ result chan error }

// calls makes calls while a prober runs.
type calls struct {
	caller Caller
	life   context.Context // of the prober
	group  sync.WaitGroup
	room   chan struct{} // holds a value for each call that has not ended
}

// newCalls returns the calls of a prober that runs until the context ends.
func newCalls(ctx context.Context, caller Caller) *calls {
	return &calls{caller: caller, life: ctx, room: make(chan struct{}, mostCalls)}
}

// begin begins a call to a server, the target to. If through is not nil, the call goes through that
// server. begin returns nil if mostCalls calls are under way.
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

func (c *calls) wait() { c.group.Wait() }
