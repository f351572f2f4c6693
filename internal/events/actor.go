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

// WithActor returns a context for the changes of an actor. The function actor returns the actor's
// name, and is called only when the name is needed.
func WithActor(ctx context.Context, actor func() string) context.Context {
	return context.WithValue(ctx, actorKey{}, actor)
}

// ActorOf returns the actor of the changes in a context. It is empty if no actor is known.
func ActorOf(ctx context.Context) string {
	if actor, ok := ctx.Value(actorKey{}).(func() string); ok {
		return actor()
	}
	return ""
}

// ByActor returns ctx with the actor of a caller's context. It is for a goroutine that makes
// changes for callers, in a context of its own.
func ByActor(ctx, caller context.Context) context.Context {
	actor := ActorOf(caller)
	return WithActor(ctx, func() string { return actor })
}

// User names a user of the host, such as "root (uid 0)".
func User(uid uint32) string {
	number := strconv.FormatUint(uint64(uid), 10)
	if u, err := user.LookupId(number); err == nil {
		return fmt.Sprintf("%s (uid %s)", u.Username, number)
	}
	return "uid " + number
}
