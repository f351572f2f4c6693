// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// lease is a lease of the store. A goroutine keeps it alive. Some time after the process has died
// or has lost the store, etcd removes the keys of the lease.
type lease struct {
	store *Store
	id    clientv3.LeaseID
	end   context.CancelFunc
	ended chan struct{} // closed when the lease is no longer kept alive
}

// newLease gets a lease, and keeps it alive until close or the end of the context. The lease ends
// when it has not been kept alive for the given number of seconds.
func (s *Store) newLease(ctx context.Context, seconds int64) (*lease, error) {
	began := time.Now()
	asking, cancel := forRequest(ctx, requestTimeout)
	defer cancel()
	granted, err := untilLeader(asking, func() (*clientv3.LeaseGrantResponse, error) {
		return s.client.Grant(asking, seconds)
	})
	if err != nil {
		return nil, s.causes.describe(err, began)
	}
	keeping, end := context.WithCancel(ctx)
	answers, err := s.client.KeepAlive(keeping, granted.ID)
	if err != nil {
		end()
		return nil, s.causes.describe(err, began)
	}
	l := &lease{s, granted.ID, end, make(chan struct{})}
	go func() { // close waits for its end
		defer close(l.ended)
		for range answers {
		}
	}()
	return l, nil
}

// leave stops to prolong the lease. It ends when its time is over.
func (l *lease) leave() {
	l.end()
	<-l.ended
}

// close ends the lease at once, so that others need not wait until its time is over.
func (l *lease) close() {
	l.leave()
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	_, _ = l.store.client.Revoke(ctx, l.id) // after an error, the lease ends when its time is over
}
