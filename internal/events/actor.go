// SPDX-License-Identifier: Apache-2.0

package events

import (
	"context"
	"fmt"
	"os/user"
	"strconv"
)

// Signal is the actor of a change by SIGHUP. The kernel tells the sender only to a handler that Go does
// not let a program install.
const Signal = "signal"

type actorKey struct{}

// WithActor returns a context with the actor of the changes that are made in it. The function is called
// only if somebody wants to know.
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

// ByActor returns a context with the actor of another one. The goroutine that makes a change for a
// caller has a context of its own.
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
