// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"reflect"
	"slices"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/serversets"
)

const (
	// leaseTTL is the time in seconds after which another balancer takes over from a leader
	// that has died.
	leaseTTL = 10
	// generationInterval is the least time between two generations of a service. Changes of servers in
	// this time become one generation. So the kept generations, which are few, reach back for some
	// time.
	generationInterval = 10 * time.Second
	// strangerPause is how long a balancer without history leaves the lease to others, if the store
	// has no generations. By then, a balancer with a history has connected again. After an outage, it
	// may have just begun its longest pause. A pause of gRPC and an attempt to connect can follow,
	// each of longestDial. If the balancer's next request fails, too, another longestPause follows.
	strangerPause = 2*longestPause + 2*longestDial
	// cannotLeadPause is how long a balancer does not take the lease again after it has found that it
	// cannot follow the content. The pause ends earlier if the content changes.
	cannotLeadPause = 30 * time.Second
)

// releaser makes the generations of a fleet while its balancer holds the lease.
type releaser struct {
	*Store
	log *slog.Logger
	// interpret returns the desired state of this balancer that follows from the content of a version.
	interpret func(Version, Tree) (*desired.Balancer, error)
	// state returns what this balancer follows, or nil. history has the generations from before it
	// followed a store.
	state     func() *State
	history   serversets.Generations
	interval  time.Duration // generationInterval, except in tests
	deference time.Duration // strangerPause, except in tests

	// began tells, by service, when its last generation began.
	began map[string]beginning
	token string // the value of the key leader, if this balancer has written it
	// removed has the keys that this balancer has removed, with the revisions at which it has removed
	// them. A snapshot of an earlier revision still has these keys.
	removed map[string]int64
	// strangerSince is when this balancer found that neither the store has generations nor it itself
	// has a history. It is zero if the store has generations, or if this balancer has a history.
	strangerSince time.Time
	// failedAt is the revision of the head whose change this balancer could not release. 0: none.
	failedAt int64
}

// beginning is the number of a generation, and when this balancer has seen it first. The time is by
// this balancer's clock, because the clock of another leader may differ.
type beginning struct {
	number uint64
	at     time.Time
}

// run takes the lease whenever nobody has it, and then releases changes, until the context ends. It
// makes a pause if deferral demands one, or if hold has failed. During a pause, it does not take
// the lease.
func (r *releaser) run(ctx context.Context, snapshots <-chan *Snapshot) {
	var newest *Snapshot
	again := time.NewTimer(0) // fires when a pause ends
	<-again.C                 // there is no pause yet
	isPausing := false
	for {
		select {
		case <-ctx.Done():
			return
		case newest = <-snapshots:
			r.note(newest) // also while another balancer leads, because this one may have to take over
			// A new snapshot does not end a pause, because the end of this balancer's lease causes one, too.
			// Only a change after the one that this balancer could not release ends the pause.
			isNewChange := r.failedAt > 0 && newest.headAt != r.failedAt
			if isPausing && !isNewChange {
				continue
			}
		case <-again.C:
			isPausing = false
		}
		// If this balancer has lost its lease, the key leader may still exist, with this balancer's
		// token. Then nobody else has the lease.
		isTaken := newest.leader != "" && newest.leader != r.token
		if isTaken || newest.Check() != nil {
			continue
		}
		if wait := r.deferral(newest); wait > 0 {
			isPausing = true
			again.Reset(wait)
			continue
		}
		r.failedAt = 0
		err := r.hold(ctx, newest.leader, snapshots)
		if ctx.Err() != nil {
			return
		}
		isPausing = err != nil
		again.Reset(r.pauseAfter(err)) // unless isPausing, a snapshot may cause an earlier attempt
	}
}

// pauseAfter logs the error of hold, if there is one. It returns the time until the next attempt to
// take the lease.
func (r *releaser) pauseAfter(err error) time.Duration {
	switch {
	case errors.Is(err, errCannotLead):
		r.log.Error("the lease is given back", "error", err)
		return cannotLeadPause
	case err != nil:
		r.log.Warn("make generations", "error", err)
	}
	return longestPause
}

// deferral returns for how long this balancer leaves the lease to others. If the result is not more
// than 0, the balancer may take the lease now. If the store has no generations, for example because
// it has lost its content, the fleet gets those of the first leader. So a balancer that has neither
// a state nor a history gives the others time to lead first.
func (r *releaser) deferral(n *Snapshot) time.Duration {
	if _, isReleased := n.released(); isReleased || r.state() != nil || len(r.history) > 0 {
		r.strangerSince = time.Time{}
		return 0
	}
	if r.strangerSince.IsZero() {
		r.strangerSince = time.Now()
	}
	return time.Until(r.strangerSince.Add(r.deference))
}

// hold takes the lease, and releases changes as long as this balancer has it. before is the value
// of the key leader, or empty. If the key has another value by now, another balancer has the lease,
// and hold returns nil. It also returns nil if the context ends. It returns an error if the lease
// is lost, or if a change cannot be released.
func (r *releaser) hold(ctx context.Context, before string, snapshots <-chan *Snapshot) error {
	life, err := r.newLease(ctx, leaseTTL)
	if err != nil {
		return err
	}
	defer life.close()
	holds, ok, err := r.takeLease(ctx, before, life)
	if err != nil || !ok {
		return err
	}
	r.log.Info("this balancer makes the generations of the fleet")
	// The watch may not have delivered the last release of the former leader yet.
	newest, err := r.Read(ctx)
	if err != nil {
		return err
	}
	r.note(newest)
	for {
		var due <-chan time.Time // fires when the last change can be released; nil: nothing waits
		wait, err := r.release(ctx, newest, holds)
		if err != nil {
			return err
		}
		if wait > 0 {
			due = time.After(wait)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-life.ended:
			return errors.New("the lease is lost")
		case n := <-snapshots:
			if n.revision < newest.revision && n.cluster == newest.cluster {
				// n is from before the lease, or the store was restored from a backup.
				if n, err = r.Read(ctx); err != nil {
					return err
				}
			}
			newest = n
			r.note(newest)
			if newest.leader != r.token {
				return errors.New("somebody has removed the key of the lease")
			}
		case <-due:
		}
	}
}

// takeLease writes this balancer's token into the key leader, if the key still has the value
// before. holds is the condition that this balancer has the lease. ok is false if another balancer
// has it.
func (r *releaser) takeLease(ctx context.Context, before string, life *lease) (
	holds clientv3.Cmp, ok bool, err error,
) {
	key := r.key(leaderKey)
	free := clientv3.Compare(clientv3.CreateRevision(key), "=", 0)
	if before != "" {
		free = clientv3.Compare(clientv3.Value(key), "=", before)
	}
	r.token = r.name + " " + newID()
	take := clientv3.OpPut(key, r.token, clientv3.WithLease(life.id))
	revision, ok, err := r.commit(ctx, []clientv3.Cmp{free}, []clientv3.Op{take})
	return clientv3.Compare(clientv3.ModRevision(key), "=", revision), ok, err
}

// note notes the present time for each service whose generation has a new number.
func (r *releaser) note(n *Snapshot) {
	version, ok := n.released()
	if !ok {
		return
	}
	all, _ := n.generations(version.Change) // release reports the damage
	for name, g := range all {
		r.begin(name, g.Number)
	}
}

// begin notes the number of a service's generation and, if the number is new, the present time.
func (r *releaser) begin(service string, number uint64) {
	if before, ok := r.began[service]; !ok || before.number != number {
		r.began[service] = beginning{number, time.Now()}
	}
}

// errCannotLead tells that this balancer cannot make the generations. Another balancer may be able
// to do so.
var errCannotLead = errors.New("another balancer has to make the generations")

// release releases the last change. It does nothing if this change is released already, and no
// generation in the store is damaged. If a service is to get a new generation too soon after its
// last one, release returns the time to wait instead. If this balancer cannot make the generations,
// the error wraps errCannotLead. holds is the condition that this balancer has the lease.
func (r *releaser) release(ctx context.Context, n *Snapshot, holds clientv3.Cmp) (time.Duration, error) {
	if n.Check() != nil {
		return 0, nil // the follower of each balancer reports it
	}
	former, damage, err := r.formerGenerations(n)
	version, ok := n.released()
	isReleased := ok && version == n.Version()
	if err == nil && damage == nil && isReleased {
		return 0, nil
	}
	var next serversets.Generations
	if err == nil {
		next, err = r.next(n, former)
	}
	if err != nil {
		r.failedAt = n.headAt
		return 0, fmt.Errorf("%w: %w", errCannotLead, err)
	}
	if wait := r.wait(former, next); wait > 0 {
		return wait, nil
	}
	if damage != nil {
		r.log.Warn("generations of the store are damaged: they are written again as this balancer follows them",
			"error", damage)
	}
	return 0, r.write(ctx, n, next, holds)
}

// next returns the generations of the last change. A changed service gets a new generation, and any
// other service keeps its former one.
func (r *releaser) next(n *Snapshot, former serversets.Generations) (serversets.Generations, error) {
	wanted, err := r.interpret(n.Version(), n.Tree())
	if err != nil {
		return nil, err
	}
	return former.Next(wanted.Services), nil
}

// formerGenerations returns the generations before the change that is to be released.
//
// If some of them are damaged or missing in the store, damage says which. Then the result is the
// generations that this balancer follows. They must be those that the store had. So this balancer
// must follow the released version, and the generations that are not damaged must be the same as
// its own. If they are not, formerGenerations returns an error, and another balancer has to repair
// the store.
func (r *releaser) formerGenerations(n *Snapshot) (
	former serversets.Generations, damage, err error,
) {
	state := r.state()
	version, isReleased := n.released()
	switch {
	case !isReleased && state != nil: // the store has lost its content
		return state.Generations, nil, nil
	case !isReleased: // the store is new
		return r.history, nil, nil
	}
	former, damage = n.generations(version.Change)
	switch {
	case damage == nil:
		return former, nil, nil
	case state == nil || state.Version != version:
		return nil, nil, fmt.Errorf("%w; this balancer does not follow version %s", damage, version)
	}
	for name, g := range former {
		if !reflect.DeepEqual(g, state.Generations[name]) {
			return nil, nil, fmt.Errorf("%w; this balancer follows another generation of service %s", damage, name)
		}
	}
	return state.Generations, damage, nil
}

// wait returns the time until the last of the services that get a new generation may begin it. A
// service without a generation need not wait.
func (r *releaser) wait(former, next serversets.Generations) (longest time.Duration) {
	for name, g := range next {
		began, isKnown := r.began[name]
		hadOne, getsNew := former[name].Number > 0, g.Number != former[name].Number
		if isKnown && hadOne && getsNew {
			longest = max(longest, time.Until(began.at.Add(r.interval)))
		}
	}
	return longest
}

// write stores generations, and then the number of their change, as the value of the key named
// release. After that, it removes keys that are no longer needed. If this balancer has lost the
// lease, or if somebody has changed the store since the snapshot n, write stops and returns nil.
func (r *releaser) write(
	ctx context.Context, n *Snapshot, next serversets.Generations, holds clientv3.Cmp,
) error {
	plan := r.plan(n, next)
	conditions := []clientv3.Cmp{
		holds,
		clientv3.Compare(clientv3.ModRevision(r.key(releaseKey)), "=", n.releaseAt),
		clientv3.Compare(clientv3.ModRevision(r.key(headKey)), "=", n.headAt),
	}
	// The key release is written last: a balancer that sees it has seen the generations.
	released := encode(release{n.head.Epoch, n.head.Change, r.name + " " + newID()})
	plan.put.add(clientv3.OpPut(r.key(releaseKey), released), len(released))
	for _, batch := range plan.put.ops {
		_, ok, err := r.commit(ctx, conditions, batch)
		if err != nil {
			return err
		}
		if !ok {
			return nil // somebody has changed the store: the watch delivers the change
		}
	}
	for name, g := range next {
		r.begin(name, g.Number)
	}
	if n.head.Writing > 0 {
		return nil // the release of the change that is being written cleans up
	}
	// The key release now has another revision than in n. It has the value released until the next
	// release.
	conditions[1] = clientv3.Compare(clientv3.Value(r.key(releaseKey)), "=", released)
	return r.clean(ctx, conditions, plan.remove)
}

// clean removes keys that nobody needs after a release. The conditions say that this is still the
// last release, and that no writer has begun since. If they do not hold, clean removes nothing
// more: a later release cleans up.
func (r *releaser) clean(ctx context.Context, conditions []clientv3.Cmp, keys []string) error {
	for batch := range slices.Chunk(keys, batchKeys) {
		operations := make([]clientv3.Op, len(batch))
		for i, key := range batch {
			operations[i] = clientv3.OpDelete(r.key(key))
		}
		revision, ok, err := r.commit(ctx, conditions, operations)
		if err != nil || !ok {
			return err
		}
		for _, key := range batch {
			r.removed[key] = revision
		}
	}
	return nil
}

// plan has the operations of a release, and the keys to remove after it.
type plan struct {
	put    batches
	remove []string
}

// plan returns the plan for the release of the last change with its generations.
func (r *releaser) plan(n *Snapshot, next serversets.Generations) *plan {
	p := &plan{}
	// Forget the removals that the snapshot shows already.
	maps.DeleteFunc(r.removed, func(_ string, revision int64) bool { return revision <= n.revision })
	records := map[string]json.RawMessage{} // by key; nil: the service is removed
	pieces := map[string]string{}           // of the sets in all records, by key
	for name, g := range next {
		records[keyOf(generationsKey, name)] = encodeGeneration(g, pieces)
	}
	for _, key := range slices.Sorted(maps.Keys(pieces)) {
		isThere := n.pieces[key] == pieces[key] && r.removed[key] <= n.revision
		if !isThere {
			p.put.add(clientv3.OpPut(r.key(key), pieces[key]), len(pieces[key]))
		}
	}
	for key := range n.pieces {
		if _, isNeeded := pieces[key]; !isNeeded {
			p.remove = append(p.remove, key)
		}
	}
	for key, it := range n.items {
		_, isWanted := records[key]
		switch isRecord := kindOf(key) == generationsKey; {
		case isRecord && !isWanted:
			records[key] = nil // the service is removed
		case !isRecord && it.isGone(n.head.Change):
			p.remove = append(p.remove, key) // balancers that follow this release read no value there
		}
	}
	for _, key := range slices.Sorted(maps.Keys(n.problems)) {
		// Balancers that see the release must not find a damaged record of a removed service any more.
		// So it is deleted with the release, and not after it.
		if _, isWanted := records[key]; kindOf(key) == generationsKey && !isWanted {
			p.put.add(clientv3.OpDelete(r.key(key)), 0)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(records)) {
		r.planRecord(n, key, records[key], p)
	}
	return p
}

// planRecord plans what a release does with the record of a service. value is the service's record
// as of the release, or nil if the service is removed. The item keeps the record as of the release
// before, because balancers follow that one until the new release is complete.
func (r *releaser) planRecord(n *Snapshot, key string, value json.RawMessage, p *plan) {
	before := uint64(0) // the change that was released last; 0: none
	if version, ok := n.released(); ok {
		before = version.Change
	}
	now := n.items[key].without(before) // a leader that has died may have left later versions
	next := now
	if string(now.at(before)) != string(value) {
		next = now.with(version{n.head.Change, value}, before)
	}
	switch text := next.text(); {
	case len(next) == 0 || next.isGone(before): // no record before the release, and none after it
		p.remove = append(p.remove, key)
	case text != n.items[key].text():
		p.put.add(clientv3.OpPut(r.key(key), text), len(text))
	}
}

// encodeGeneration returns the record of a generation, and adds the pieces of its sets to pieces.
func encodeGeneration(g serversets.Generation, pieces map[string]string) json.RawMessage {
	r := record{Number: g.Number, Sets: make([]setRef, len(g.Sets))}
	for i, set := range g.Sets {
		text := encode(set)
		ref := setRef{ID: idOf(text)}
		for len(text) > 0 {
			piece := text[:min(len(text), pieceBytes)]
			pieces[ref.key(ref.Pieces)] = piece
			ref.Pieces++
			text = text[len(piece):]
		}
		r.Sets[i] = ref
	}
	return json.RawMessage(encode(r))
}

// pieceBytes is the greatest size of a piece of a set's text.
const pieceBytes = 256 << 10

// idOf returns the ID of a set's text. It is the first half of the text's hash.
func idOf(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:16])
}
