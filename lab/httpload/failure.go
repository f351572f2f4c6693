// SPDX-License-Identifier: Apache-2.0

package httpload

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Outcome is how a request ended.
type Outcome uint8

// The outcomes. All but the first are failures.
const (
	Succeeded      Outcome = iota
	Refused                // the connection was refused
	Reset                  // the connection was reset
	ConnectTimeout         // no connection in time
	Timeout                // a connection, and no complete response in time
	Unreachable            // an ICMP message or this host said that the server cannot be reached
	Short                  // the connection ended before the end of the response
	Malformed              // the response is not HTTP/1.1
	WrongStatus            // the response does not have an expected status
	WrongContent           // the response does not have the expected body
	Local                  // this host could not make a connection: no port, descriptor or memory
	outcomes
)

var outcomeNames = [outcomes]string{
	"succeeded", "refused", "reset", "connect-timeout", "timeout", "unreachable", "short", "malformed",
	"wrong-status", "wrong-content", "local",
}

// String returns the outcome's name in reports.
func (o Outcome) String() string { return outcomeNames[o] }

// outcomesOf has the outcomes of errors of system calls. The outcome of other errors is Local.
var outcomesOf = map[unix.Errno]Outcome{
	unix.ECONNREFUSED: Refused,
	unix.ECONNRESET:   Reset, unix.EPIPE: Reset, unix.ECONNABORTED: Reset,
	unix.ETIMEDOUT:    ConnectTimeout,
	unix.EHOSTUNREACH: Unreachable, unix.ENETUNREACH: Unreachable, unix.EHOSTDOWN: Unreachable,
	unix.ENETDOWN: Unreachable, unix.EPROTO: Unreachable,
}

// outcomeOf returns the outcome of an error of a system call. connected tells whether the handshake
// was complete. The kernel reports ETIMEDOUT during the handshake and later: the outcome is
// ConnectTimeout during the handshake, and Timeout later.
func outcomeOf(err error, connected bool) Outcome {
	var errno unix.Errno
	if !errors.As(err, &errno) {
		return Local
	}
	outcome, known := outcomesOf[errno]
	switch {
	case !known:
		return Local
	case outcome == ConnectTimeout && connected:
		return Timeout
	}
	return outcome
}

// explain adds advice to errors that tell that this host has no free port or file descriptor. It
// returns other errors as they are.
func explain(err error) error {
	switch {
	case errors.Is(err, unix.EADDRNOTAVAIL):
		return fmt.Errorf("%w: all ports of the client addresses are in use; add client addresses", err)
	case errors.Is(err, unix.EMFILE):
		var limit unix.Rlimit
		if unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) == nil {
			return fmt.Errorf("%w: the limit of this process is %d (ulimit -Hn)", err, limit.Cur)
		}
	}
	return err
}
