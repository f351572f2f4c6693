// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/store/etcdtest"
	"github.com/segue-lb/segue/internal/testhost"
)

// TestPresence: a balancer learns which others are present, and what they say. One that ends is
// gone at once. One that cannot reach the store is gone when its lease is over, keeps what it knew,
// and returns.
func TestPresence(t *testing.T) {
	t.Parallel()
	etcd := etcdtest.Start(t)
	proxy := etcdtest.NewProxy(t, etcd)
	a := attend(t, "a", etcd.Endpoint())
	b := attend(t, "b", proxy.Endpoint())
	a.await("map[a:1 b:1]")
	b.await("map[a:1 b:1]")
	b.own <- "2"
	a.await("map[a:1 b:2]")

	proxy.Cut()
	a.await("map[a:1]")
	b.await("error")
	proxy.Heal()
	b.await("map[a:1 b:2]")
	a.await("map[a:1 b:2]")

	b.end()
	a.await("map[a:1]")
}

// attendee is a balancer that is present.
type attendee struct {
	*testing.T
	own   latest[string]
	heard latest[string]
	end   func()
}

// attend makes a balancer present, which says 1.
func attend(t *testing.T, name, endpoint string) *attendee {
	t.Helper()
	s, err := Open(&desired.Etcd{Endpoints: []string{endpoint}, Prefix: prefix}, name)
	testhost.Must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	a := &attendee{T: t, own: newLatest[string](), heard: newLatest[string]()}
	ended := make(chan struct{})
	a.end = func() {
		cancel()
		<-ended
	}
	a.own.put("1")
	go func() {
		defer close(ended)
		s.Present(ctx, 2, a.own, func(all map[string]string, err error) {
			if err != nil {
				a.heard.put("error")
				return
			}
			a.heard.put(fmt.Sprint(all))
		})
	}()
	t.Cleanup(func() {
		a.end()
		_ = s.Close()
	})
	return a
}

// await waits until the balancer has heard something.
func (a *attendee) await(want string) {
	a.Helper()
	deadline := time.After(time.Minute)
	last := ""
	for last != want {
		select {
		case last = <-a.heard:
		case <-deadline:
			a.Fatalf("heard %s, want %s", last, want)
		}
	}
}
