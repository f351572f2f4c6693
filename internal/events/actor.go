// SPDX-License-Identifier: Apache-2.0

package events

import (
	"context"
	"fmt"
	"os/user"
	"strconv"
)

// Signal is the actor of a change by SIGHUP. The sender is unknown: the kernel names it only to a
// signal handler, and a Go program cannot install one.
const Signal = "signal"

type actorKey struct{}

// WithActor returns a context for the changes of an actor. The function who returns the actor. It
// is called only when the actor is needed.
func WithActor(ctx context.Context, who func() string) context.Context {
	return context.WithValue(ctx, actorKey{}, who)
}

// ActorOf returns the actor of the changes in a context. It is empty if no actor is known.
func ActorOf(ctx context.Context) string {
	if who, ok := ctx.Value(actorKey{}).(func() string); ok {
		return who()
	}
	return ""
}

// ByActor returns ctx with the actor of the context of. A goroutine that makes changes for callers
// needs it: it has its own context, and the actor is in the caller's context.
func ByActor(ctx, of context.Context) context.Context {
	by := ActorOf(of)
	return WithActor(ctx, func() string { return by })
}

// User names a user of the host, such as "root (uid 0)".
func User(uid uint32) string {
	number := strconv.FormatUint(uint64(uid), 10)
	if u, err := user.LookupId(number); err == nil {
		return fmt.Sprintf("%s (uid %s)", u.Username, number)
	}
	return "uid " + number
}
