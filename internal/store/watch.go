// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sync/errgroup"
)

const (
	// probeInterval is the time between two questions whether the store is there, and whether it is
	// still the same. A store that was emptied and restarted continues watches without an error.
	probeInterval = time.Second
	probeTimeout  = 5 * time.Second
	// missedProbes is how many questions in a row may find a newer change than the watch has
	// delivered. After that the content is read anew. If a question between them has no answer, two
	// suffice.
	missedProbes = 10
	// firstPause and longestPause are the times before the content is read anew after an error.
	firstPause, longestPause = 200 * time.Millisecond, 5 * time.Second
)

// latest hands the newest value over to one reader. A slow reader misses values and delays nobody.
type latest[T any] chan T

func newLatest[T any]() latest[T] { return make(latest[T], 1) }

// put replaces a value that was not read yet. There is one writer.
func (l latest[T]) put(value T) {
	select {
	case <-l:
	default:
	}
	l <- value
}

// watch reads the content of the store, and reports it, whenever the head or the release has
// changed, until the context ends. It also reports whether the store answers: nil, or the error.
func (s *Store) watch(ctx context.Context, emit func(*Snapshot), reachable func(error)) {
	pause := firstPause
	for ctx.Err() == nil {
		hasAnswered, err := s.follow(ctx, emit, reachable)
		if ctx.Err() != nil {
			return
		}
		if !errors.Is(err, errReadAnew) {
			reachable(err)
		}
		if hasAnswered {
			pause = firstPause
		}
		select {
		case <-ctx.Done():
		case <-time.After(jittered(pause)):
		}
		pause = min(2*pause, longestPause)
	}
}

// jittered returns a random time from half of a pause to the whole, so that the balancers of a fleet do
// not all read the content at the same moment.
func jittered(pause time.Duration) time.Duration { return pause/2 + rand.N(pause/2) }

// errReadAnew tells that the content must be read anew, although the store answers.
var errReadAnew = errors.New("the content is read anew")

// errLost tells that the store may have become another one.
var errLost = fmt.Errorf("%w: the store did not answer, and a connection was lost", errReadAnew)

// follow reads the content and follows its changes until that is no longer possible. hasAnswered tells
// whether the store has answered a probe meanwhile. A store that is too slow for probes would become
// slower if all balancers soon read the content again.
func (s *Store) follow(
	ctx context.Context, emit func(*Snapshot), reachable func(error),
) (hasAnswered bool, err error) {
	lost := s.connections.lost()
	n, err := s.Read(ctx)
	if err != nil {
		return false, err
	}
	reachable(nil)
	emit(n.clone())
	group, ctx := errgroup.WithContext(ctx)
	seen := newLatest[position]() // which the watch has delivered
	seen.put(n.position())
	cluster, revision := n.cluster, n.revision // receive changes n from now on
	link := &link{connections: s.connections}
	link.answered(lost)
	group.Go(func() error { return s.receive(ctx, n, emit, seen, link) })
	group.Go(func() error {
		var err error
		hasAnswered, err = s.probe(ctx, cluster, revision, seen, link, reachable)
		return err
	})
	err = group.Wait()
	return hasAnswered, err
}

// link tells whether a store that has not answered is still the one that is being watched. After the
// loss of a connection, the library resumes the watch. But the store may have been restored from a
// backup meanwhile, and may have other changes with the same revisions.
type link struct {
	connections *connections
	lost        atomic.Int64 // how many connections were lost before the last answer
	isSlow      atomic.Bool  // a probe has had no answer since
}

// answered notes an answer to a request. lost is how many connections were lost before the request.
func (l *link) answered(lost int64) {
	l.isSlow.Store(false)
	l.lost.Store(lost)
}

func (l *link) holds() bool { return l.connections.lost() == l.lost.Load() }

// receive applies the events of a watch to the content.
func (s *Store) receive(
	ctx context.Context, n *Snapshot, emit func(*Snapshot), seen latest[position], link *link,
) error {
	events := s.client.Watch(clientv3.WithRequireLeader(ctx), s.prefix,
		clientv3.WithPrefix(), clientv3.WithRev(n.revision+1), clientv3.WithProgressNotify())
	for response := range events {
		if err := response.Err(); err != nil {
			// Revisions that the watch has missed may be compacted, or the member of etcd has lost
			// its majority.
			return fmt.Errorf("%w: %w", errReadAnew, err)
		}
		if link.isSlow.Load() && !link.holds() {
			return errLost
		}
		moved := false
		for _, event := range response.Events {
			key := strings.TrimPrefix(string(event.Kv.Key), s.prefix)
			moved = moved || key == headKey || key == releaseKey || key == leaderKey
			if event.Type == clientv3.EventTypeDelete {
				n.remove(key)
			} else {
				n.put(key, event.Kv)
			}
		}
		n.revision = max(n.revision, response.Header.Revision)
		if moved {
			seen.put(n.position())
			emit(n.clone())
		}
	}
	return errReadAnew
}

// probe asks the store again and again for its head and its release, and reports whether it answers. A
// store that is only slow stays the same, and so the watch goes on. probe returns an error if the
// store cannot be reached, if it may be another one than the one that is being watched, or if the
// watch does not deliver its changes. hasAnswered tells whether the store has answered before.
func (s *Store) probe(
	ctx context.Context, cluster uint64, revision int64, seen latest[position], link *link,
	reachable func(error),
) (hasAnswered bool, err error) {
	tick := time.NewTicker(probeInterval)
	defer tick.Stop()
	var delivered position
	missed := 0
	for {
		select {
		case <-ctx.Done():
			return hasAnswered, ctx.Err()
		case delivered = <-seen:
			missed = 0
			continue
		case <-tick.C:
		}
		lost := s.connections.lost()
		now, err := s.ask(ctx)
		if ctx.Err() != nil {
			return hasAnswered, ctx.Err()
		}
		switch {
		case errors.Is(err, errNoAnswer) && link.holds():
			link.isSlow.Store(true)
			reachable(err)
			continue
		case err != nil:
			return hasAnswered, err
		case link.isSlow.Load() && !link.holds():
			return hasAnswered, errLost
		case now.cluster != cluster || now.revision < revision, now.isBefore(delivered):
			return hasAnswered, fmt.Errorf("%w: the store is another one, or was restored", errReadAnew)
		case now.position == delivered:
			missed = 0
		case missed == missedProbes, missed > 0 && link.isSlow.Load():
			// The member of etcd that does not answer may be the one of the watch.
			return hasAnswered, fmt.Errorf("%w: the watch does not deliver changes", errReadAnew)
		default:
			missed++
		}
		if link.isSlow.Load() {
			reachable(nil)
		}
		link.answered(lost)
		revision, hasAnswered = now.revision, true
	}
}

// answer is what a probe learns.
type answer struct {
	cluster  uint64
	revision int64
	position
}

// position are the revisions at which the head and the release were written.
type position struct{ head, release int64 }

func (n *Snapshot) position() position { return position{n.headAt, n.releaseAt} }

// isBefore tells whether a position is older than another one, or lacks a key. That is so for a
// moment if a key was deleted.
func (p position) isBefore(other position) bool {
	return p.head < other.head || p.release < other.release
}

func (s *Store) ask(ctx context.Context) (a answer, err error) {
	began := time.Now()
	ctx, cancel := forRequest(ctx, probeTimeout)
	defer cancel()
	response, err := untilLeader(ctx, s.client.Txn(ctx).Then(
		clientv3.OpGet(s.key(headKey), clientv3.WithKeysOnly()),
		clientv3.OpGet(s.key(releaseKey), clientv3.WithKeysOnly())).Commit)
	if err != nil {
		return a, s.causes.describe(err, began)
	}
	a.cluster, a.revision = response.Header.ClusterId, response.Header.Revision
	for i, into := range []*int64{&a.head, &a.release} {
		for _, kv := range response.Responses[i].GetResponseRange().Kvs {
			*into = kv.ModRevision
		}
	}
	return a, nil
}
