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
	// probeInterval is the time between two probes. A probe asks the store whether it answers, and
	// whether it is still the same store. The watch does not tell: if the store is emptied and
	// restarted, the watch goes on without an error.
	probeInterval = time.Second
	probeTimeout  = 5 * time.Second
	// missedProbes is how many probes in a row may find a newer change than the watch has
	// delivered. At the next such probe, the content is read anew. If two such probes have between
	// them a probe without an answer, the content is read anew at the second one.
	missedProbes = 10
	// firstPause is the time before the content is read anew after an error. The pause doubles with
	// each further error, up to longestPause.
	firstPause, longestPause = 200 * time.Millisecond, 5 * time.Second
)

// latest passes values from one writer to one reader. A slow reader gets only the newest value, and
// does not delay the writer.
type latest[T any] chan T

func newLatest[T any]() latest[T] { return make(latest[T], 1) }

// put passes a value on. It replaces an earlier value that the reader has not taken yet.
func (l latest[T]) put(value T) {
	select {
	case <-l:
	default:
	}
	l <- value
}

// watch reads the content of the store and follows its changes until the context ends. It calls
// emit with the content at first, and whenever the keys head, release or leader have changed. It
// calls reachable with nil when the store answers, and with an error when it does not.
func (s *Store) watch(ctx context.Context, emit func(*Snapshot), reachable func(error)) {
	pause := firstPause
	for ctx.Err() == nil {
		hasAnswered, err := s.follow(ctx, emit, reachable)
		if ctx.Err() != nil {
			return
		}
		if !errors.Is(err, errReadAnew) { // errReadAnew does not say that the store is unreachable
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

// jittered returns a random time from half of a pause to the whole, so that the balancers of a
// fleet do not all read the content at the same moment.
func jittered(pause time.Duration) time.Duration { return pause/2 + rand.N(pause/2) }

// errReadAnew tells that the content must be read anew, although the store answers.
var errReadAnew = errors.New("the content is read anew")

// errLost tells that the store may be another one than before.
var errLost = fmt.Errorf("%w: the store did not answer, and a connection was lost", errReadAnew)

// follow reads the content and follows its changes until it must be read anew. hasAnswered tells
// whether the store has answered a probe meanwhile. If it has not, the pause before the next read
// must grow: a store that is too slow for probes would become slower if all balancers soon read the
// content again.
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
	seen := newLatest[position]() // the positions that the watch has delivered, for probe
	seen.put(n.position())
	cluster, revision := n.cluster, n.revision // read here, because receive changes n
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

// link tells whether a store that has not answered a probe is still the store that is being
// watched. If a connection was lost since the last answer, the store may be another one: it may
// have been restored from a backup, and have other changes with the same revisions. The library
// resumes the watch without noticing that.
type link struct {
	connections *connections
	lost        atomic.Int64 // how many connections were lost before the last answer
	isSlow      atomic.Bool  // a probe since the last answer has had no answer
}

// answered notes an answer to a request. lost is how many connections were lost before the request.
func (l *link) answered(lost int64) {
	l.isSlow.Store(false)
	l.lost.Store(lost)
}

// holds tells whether no connection was lost since the last answer.
func (l *link) holds() bool { return l.connections.lost() == l.lost.Load() }

// receive applies the events of a watch to the content n until the watch ends. It emits a copy of n
// whenever the keys head, release or leader have changed. The error always wraps errReadAnew.
func (s *Store) receive(
	ctx context.Context, n *Snapshot, emit func(*Snapshot), seen latest[position], link *link,
) error {
	events := s.client.Watch(clientv3.WithRequireLeader(ctx), s.prefix,
		clientv3.WithPrefix(), clientv3.WithRev(n.revision+1), clientv3.WithProgressNotify())
	for response := range events {
		if err := response.Err(); err != nil {
			// For example, etcd has compacted revisions that the watch still needs, or the member of etcd is
			// cut off from the others.
			return fmt.Errorf("%w: %w", errReadAnew, err)
		}
		if link.isSlow.Load() && !link.holds() {
			return errLost
		}
		hasNews := false
		for _, event := range response.Events {
			key := strings.TrimPrefix(string(event.Kv.Key), s.prefix)
			hasNews = hasNews || key == headKey || key == releaseKey || key == leaderKey
			if event.Type == clientv3.EventTypeDelete {
				n.remove(key)
			} else {
				n.put(key, event.Kv)
			}
		}
		n.revision = max(n.revision, response.Header.Revision)
		if hasNews {
			seen.put(n.position())
			emit(n.clone())
		}
	}
	return errReadAnew
}

// probe asks the store every probeInterval for the revisions of its head and its release, and
// reports whether it answers. A store that is only slow is still the same store, so the watch goes
// on. probe returns an error in three cases: the store cannot be reached, the store may be another
// one than the one that is being watched, or the watch does not deliver the changes. hasAnswered
// tells whether the store has answered a probe before the error.
func (s *Store) probe(
	ctx context.Context, cluster uint64, revision int64, seen latest[position], link *link,
	reachable func(error),
) (hasAnswered bool, err error) {
	tick := time.NewTicker(probeInterval)
	defer tick.Stop()
	var delivered position // what the watch has delivered
	missed := 0            // how many answers in a row had a newer change than the watch
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
		case errors.Is(err, errNoAnswer) && link.holds(): // the store is only slow
			link.isSlow.Store(true)
			reachable(err)
			continue
		case err != nil:
			return hasAnswered, err
		case link.isSlow.Load() && !link.holds(): // the store answers again, but may be another one
			return hasAnswered, errLost
		case now.cluster != cluster || now.revision < revision, now.isBefore(delivered):
			return hasAnswered, fmt.Errorf("%w: the store is another one, or was restored", errReadAnew)
		case now.position == delivered: // the watch has delivered all changes
			missed = 0
		case missed == missedProbes, missed > 0 && link.isSlow.Load():
			// The watch may be at a member of etcd that does not answer.
			return hasAnswered, fmt.Errorf("%w: the watch does not deliver changes", errReadAnew)
		default: // the watch is behind, and may soon deliver the change
			missed++
		}
		if link.isSlow.Load() {
			reachable(nil)
		}
		link.answered(lost)
		revision, hasAnswered = now.revision, true
	}
}

// answer is the store's answer to a probe.
type answer struct {
	cluster  uint64
	revision int64
	position
}

// position are the revisions at which the head and the release were written.
type position struct{ head, release int64 }

func (n *Snapshot) position() position { return position{n.headAt, n.releaseAt} }

// isBefore tells whether either key of a position is older than in another position, or missing. So
// if a key is deleted, the store is before the watch until the watch has delivered the deletion.
func (p position) isBefore(other position) bool {
	return p.head < other.head || p.release < other.release
}

// ask sends a probe, and returns the answer. A position of 0 means that the key does not exist.
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
