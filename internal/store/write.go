// SPDX-License-Identifier: Apache-2.0

package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

const (
	// writerTTL is the time in seconds from the death of a writer of many keys until another writer
	// may remove what the dead one has written.
	writerTTL = 10
	// settlePatience is how long a writer tries to find out whether its change was made, if the
	// store's answer was lost.
	settlePatience = 15 * time.Second
)

// Change is a change of a fleet's content.
type Change struct {
	// Edit returns the content after the change. It must not change its argument, and may be called
	// several times.
	Edit func(Tree) (Tree, error)
	// Expected is the version that the store must have before the change. The zero value: any version.
	Expected Version
	// Check returns an error if a balancer that follows the content before must not follow the content
	// after. Apply calls it with the content after the change, and with each content that balancers
	// follow now or may follow before the change takes effect (see check for the exceptions). nil:
	// there is no such check.
	Check func(before, after Tree) error
	// PermitsRemovals makes balancers follow the change even if it removes more servers than their
	// limits allow.
	PermitsRemovals bool
	// NamesDrains tells that somebody has named each server that the change drains or gives the weight
	// 0. Balancers follow the change, however many servers these are.
	NamesDrains bool
	// Replaces permits values of services, servers and overrides that are not valid: the change
	// replaces or removes them. Edit does not get these values.
	Replaces bool
	// Fills tells that the store must be empty before the change.
	Fills bool
	// Who is the user that asks for the change. Empty: unknown.
	Who string
	// DryRun tells to call Edit and Check, and to write nothing.
	DryRun bool
}

// Apply makes a change as a whole, and returns the version after it. If there is nothing to change,
// or for a dry run, it returns the version before the change. For a dry run of a change that fills
// the store, this is the zero value.
//
// If somebody else changes the store at the same time, or if the change is lost on its way, Apply
// begins anew, until the context ends. The error wraps ErrVersion, ErrEmpty, ErrNotEmpty or
// ErrUnknown, or is that of Edit, of Check or of the store. Unless it wraps ErrUnknown, nothing has
// changed.
func (s *Store) Apply(ctx context.Context, c Change) (Version, error) {
	w := &writer{Store: s, change: c, by: s.name + " " + newID()}
	for {
		version, err := w.attempt(ctx)
		if !errors.Is(err, errConflict) && !errors.Is(err, errNotMade) {
			return version, err
		}
		select {
		case <-ctx.Done():
			return Version{}, fmt.Errorf("%w: %w", err, context.Cause(ctx))
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// writer makes a change.
type writer struct {
	*Store
	change Change
	by     string // head.By of its changes
}

// readForChange does the same as Read, but waits if a member of etcd is cut off from the others.
func (w *writer) readForChange(ctx context.Context) (*Snapshot, error) {
	waiting, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	return untilLeader(waiting, func() (*Snapshot, error) { return w.Read(ctx) })
}

// attempt tries once to make the change. If another attempt may succeed, the error wraps
// errConflict or errNotMade.
func (w *writer) attempt(ctx context.Context) (Version, error) {
	n, err := w.readForChange(ctx)
	if err != nil {
		return Version{}, err
	}
	if n, err = w.prepare(ctx, n); err != nil {
		return Version{}, err
	}
	before := n.Tree()
	after, err := w.change.Edit(maps.Clone(before))
	if err != nil {
		return Version{}, err
	}
	if err := w.check(n, after); err != nil {
		return Version{}, err
	}
	switch {
	case w.change.DryRun && w.change.Fills:
		return Version{}, nil
	case w.change.DryRun:
		return n.Version(), nil
	}
	next, err := w.nextHead(n.head, before, after)
	if err != nil {
		return Version{}, err
	}
	// before lacks the unreadable keys, so changesTo does not find their removal.
	changes := append(before.changesTo(after), n.unreadableRemovals(after)...)
	batches := w.batches(n, changes, next.Change)
	switch {
	case len(batches) == 0 && n.head.Change > 0: // nothing to change; a first change writes its head
		return n.Version(), nil
	case len(batches) <= 1: // one transaction suffices, with the head
		_, err = w.finish(ctx, n.headAt, slices.Concat(batches...), n.head, &next)
	default:
		err = w.writeMany(ctx, n, batches, &next)
	}
	if err != nil {
		return Version{}, err
	}
	return Version{next.Epoch, next.Change}, nil
}

// nextHead returns the head after the change, which replaces the content before by after.
func (w *writer) nextHead(now *head, before, after Tree) (head, error) {
	next := *now
	next.Change, next.By, next.Who, next.Writing = now.Change+1, w.by, w.change.Who, 0
	if w.change.PermitsRemovals {
		next.Removals = next.Change
	}
	if !w.change.NamesDrains {
		return next, nil
	}
	isDrain, err := drains(before, after)
	if isDrain {
		next.Drains = next.Change
	}
	return next, err
}

// check calls Check with the contents that balancers may follow before the change: the last one and
// the released one. Balancers that still follow the released content get the later changes and this
// change together. If the writer of a later change has permitted removals, this permission holds
// for all these changes, so check leaves out the released content. If the change repairs a last
// content that no balancer can follow, check leaves out the last content instead, and never the
// released one.
func (w *writer) check(n *Snapshot, after Tree) error {
	if w.change.Check == nil {
		return nil
	}
	last := n.counted(n.head.Change)
	released, ok := n.released()
	if !ok || released == n.Version() {
		return w.change.Check(last, after)
	}
	_, problem := last.Document()
	isRepair := problem != nil && w.change.Replaces // no balancer will follow the last content
	if isRepair || n.head.Removals <= released.Change {
		if err := w.change.Check(n.counted(released.Change), after); err != nil {
			return fmt.Errorf("together with the changes that have not taken effect yet, %w", err)
		}
	}
	if isRepair {
		return nil
	}
	return w.change.Check(last, after)
}

// prepare returns the snapshot on which the change builds. For a change that fills an empty store,
// it gives the snapshot a head with a new epoch. It returns an error if the store does not fulfil
// the conditions of the change. Except for a dry run, the error wraps errConflict if another writer
// is in the middle of a change. If that writer has died, prepare first removes what the writer has
// left. In both cases the attempt must begin anew.
func (w *writer) prepare(ctx context.Context, n *Snapshot) (*Snapshot, error) {
	check := n.Check
	if w.change.Replaces {
		check = n.checkForReplacing
	}
	err := check()
	hasKeys := len(n.items)+len(n.pieces) > 0 || n.release != nil
	switch {
	case w.change.Fills && !errors.Is(err, ErrEmpty):
		return nil, fmt.Errorf("%w below %s", ErrNotEmpty, w.prefix)
	case w.change.Fills && n.head != nil: // an attempt to fill the store was not completed
	case w.change.Fills && hasKeys:
		return nil, fmt.Errorf("%w: keys below %s, and no key %s; remove them first",
			ErrNotEmpty, w.prefix, w.key(headKey))
	case w.change.Fills:
		n.head = &head{Format: format, Epoch: newID()}
		return n, nil
	case err != nil:
		return nil, err
	}
	if expected := w.change.Expected; expected != (Version{}) && expected != n.Version() {
		return nil, fmt.Errorf("version %s: %w: %s", expected, ErrVersion, n.Version())
	}
	switch {
	case n.head.Writing == 0 || w.change.DryRun:
		return n, nil
	case n.hasWriter:
		return nil, fmt.Errorf("%w: %s is writing", errConflict, n.head.By)
	}
	if err := w.takeBack(ctx, n); err != nil && !errors.Is(err, ErrUnknown) {
		return nil, err
	}
	// Another writer may have begun meanwhile, so everything has to be checked again.
	return nil, fmt.Errorf("%w: a writer has ended in the middle of a change", errConflict)
}

// batches returns the operations that write the changed values. number is that of the change. Each
// group of operations fits into one transaction.
func (w *writer) batches(n *Snapshot, changes []changed, number uint64) [][]clientv3.Op {
	var all batches
	readers := []uint64{n.head.Change} // the changes as of which balancers may still read
	if released, ok := n.released(); ok {
		readers = append(readers, released.Change)
	}
	for _, c := range changes {
		it, isUnreadable := n.items[c.key], n.problems[c.key] != nil
		switch {
		case isUnreadable && c.value == nil:
			all.add(clientv3.OpDelete(w.key(c.key)), 0)
			continue
		case isUnreadable:
			// The present value cannot be read. So readers of earlier changes get the new value, too:
			// it is also the value as of change 0, which is before all others.
			it = item{{Value: c.value}}
		}
		next := it.with(version{number, c.value}, readers...)
		all.add(clientv3.OpPut(w.key(c.key), next.text()), len(next.text()))
	}
	return all.ops
}

// batches are operations in groups of the size of a transaction.
type batches struct {
	ops   [][]clientv3.Op
	bytes int // of the last group
}

// add adds an operation whose value has the given number of bytes. If the last batch has no room
// for the operation, add begins a batch.
func (b *batches) add(operation clientv3.Op, bytes int) {
	last := len(b.ops) - 1
	if last < 0 || len(b.ops[last]) >= batchKeys || b.bytes+bytes > batchBytes {
		b.ops, b.bytes = append(b.ops, nil), 0
		last++
	}
	b.ops[last] = append(b.ops[last], operation)
	b.bytes += bytes
}

// finish writes operations and the head next in one transaction, if the head is still as it was
// written at the revision headAt. before is this head. finish returns the revision of the new head.
// If the head is another one by now, it returns errConflict. If the store's answer is lost, the
// result is that of settle.
func (w *writer) finish(
	ctx context.Context, headAt int64, operations []clientv3.Op, before, next *head,
) (int64, error) {
	// Watches deliver the operations in their order: a balancer that sees the head has seen the other
	// operations.
	operations = append(slices.Clone(operations), clientv3.OpPut(w.key(headKey), encode(next)))
	if next.Writing == 0 { // the writer has no more to write
		operations = append(operations, clientv3.OpDelete(w.key(writerKey)))
	}
	revision, ok, err := w.commit(ctx, []clientv3.Cmp{w.headIs(headAt)}, operations)
	switch {
	case errors.Is(err, errUncertain):
		return w.settle(ctx, headAt, before, next, err)
	case err != nil:
		return 0, err
	case !ok:
		return 0, errConflict
	}
	return revision, nil
}

// settle finds out whether a transaction of finish has taken place. cause is the error of the
// transaction, which does not tell. The result is the revision of the new head, or an error of
// outcome. If the transaction has not taken place because the store is full, it would fail again,
// so the error is the cause. If the store does not answer in time, the error wraps ErrUnknown.
func (w *writer) settle(
	ctx context.Context, headAt int64, before, next *head, cause error,
) (int64, error) {
	waiting, cancel := context.WithTimeout(ctx, settlePatience)
	defer cancel()
	for {
		at, err := w.outcome(waiting, headAt, before, next, errors.Is(cause, errFull))
		switch {
		case err == nil:
			return at, nil
		case errors.Is(err, errNotMade) && errors.Is(cause, errFull):
			return 0, cause
		case errors.Is(err, errNotMade):
			return 0, fmt.Errorf("%w: %w", err, cause)
		case errors.Is(err, errConflict):
			return 0, err
		case errors.Is(err, ErrUnknown):
			return 0, fmt.Errorf("%w (%w)", err, cause)
		}
		select {
		case <-waiting.Done():
			return 0, fmt.Errorf("%w (%w)", ErrUnknown, cause)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// errNotMade tells that a change was lost on its way, and will not be made.
var errNotMade = errors.New("the change was lost on its way to the store")

// outcome returns the revision at which a transaction has replaced the head before by the head
// next. The error wraps errNotMade if the transaction has not taken place and never will,
// errConflict if others have replaced the head, and ErrUnknown if the store no longer has the
// earlier values of the head.
//
// If the store has not answered, the transaction may still be on its way. So that it cannot take
// place later, outcome replaces the head by a barrier: the same head with another writer. Then the
// transaction finds that the head is not the one that it expects. If isAnswered is true, this is
// not needed.
func (w *writer) outcome(
	ctx context.Context, headAt int64, before, next *head, isAnswered bool,
) (int64, error) {
	ctx, cancel := forRequest(ctx, requestTimeout)
	defer cancel()
	barrier := *before
	barrier.By = w.by + " gives up"
	key := w.key(headKey)
	var replace []clientv3.Op
	if !isAnswered { // otherwise the store is full, and would refuse the barrier, too
		replace = append(replace, clientv3.OpPut(key, encode(barrier)))
	}
	answer, err := untilLeader(ctx, w.client.Txn(ctx).If(w.headIs(headAt)).
		Then(replace...).Else(clientv3.OpGet(key)).Commit)
	switch {
	case err != nil:
		return 0, err
	case answer.Succeeded:
		return 0, errNotMade
	}
	found := answer.Responses[0].GetResponseRange().Kvs
	// If others have made changes since, look for next among the former values of the head.
	for len(found) == 1 && found[0].ModRevision > headAt {
		var now head
		if err := json.Unmarshal(found[0].Value, &now); err != nil {
			return 0, err
		}
		switch at := found[0].ModRevision; now {
		case *next:
			return at, nil
		case barrier:
			return 0, errNotMade
		default:
			former, err := w.client.Get(ctx, key, clientv3.WithRev(at-1))
			if errors.Is(err, rpctypes.ErrCompacted) {
				return 0, ErrUnknown
			}
			if err != nil {
				return 0, err
			}
			found = former.Kvs
		}
	}
	if len(found) == 0 && headAt > 0 {
		return 0, ErrUnknown // somebody has removed the content
	}
	return 0, errConflict
}

// headIs returns the condition that the head is still the one that was written at a revision.
func (w *writer) headIs(revision int64) clientv3.Cmp {
	return clientv3.Compare(clientv3.ModRevision(w.key(headKey)), "=", revision)
}

// writeMany makes a change that needs several transactions. The first transaction notes in the head
// that the change is being written. This keeps other writers off. Nobody reads the versions of the
// change before the last transaction writes its number into the head.
func (w *writer) writeMany(
	ctx context.Context, n *Snapshot, batches [][]clientv3.Op, next *head,
) error {
	life, err := w.newLease(ctx, writerTTL)
	if err != nil {
		return err
	}
	defer life.close()
	reserved := *n.head
	reserved.Writing, reserved.By = next.Change, w.by
	operations := []clientv3.Op{clientv3.OpPut(w.key(writerKey), w.by, clientv3.WithLease(life.id))}
	at, err := w.finish(ctx, n.headAt, operations, n.head, &reserved)
	if errors.Is(err, ErrUnknown) {
		err = errConflict // at most the head has changed, so the attempt can begin anew
	}
	if err != nil {
		return err
	}
	for _, batch := range batches {
		if err := w.writeBatch(ctx, at, batch); err != nil {
			return err
		}
	}
	_, err = w.finish(ctx, at, nil, &reserved, next)
	return err
}

// writeBatch writes some of the versions of a change. If it is unknown whether a transaction has
// taken place, writeBatch repeats it until the context ends: to write the same versions twice does
// no harm.
func (w *writer) writeBatch(ctx context.Context, headAt int64, batch []clientv3.Op) error {
	for {
		_, ok, err := w.commit(ctx, []clientv3.Cmp{w.headIs(headAt)}, batch)
		switch {
		case err == nil && ok:
			return nil
		case err == nil:
			return errConflict
		case !errors.Is(err, errUncertain), errors.Is(err, errFull):
			return err // a repetition would be refused, too
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// takeBack removes the versions of a change whose writer has died. First it replaces the head: if
// the dead writer lives after all, it can then write no more.
func (w *writer) takeBack(ctx context.Context, n *Snapshot) error {
	taken := *n.head
	taken.By = w.by
	life, err := w.newLease(ctx, writerTTL)
	if err != nil {
		return err
	}
	defer life.close()
	operations := []clientv3.Op{clientv3.OpPut(w.key(writerKey), w.by, clientv3.WithLease(life.id))}
	at, err := w.finish(ctx, n.headAt, operations, n.head, &taken)
	if err != nil {
		return err
	}
	if n, err = w.Read(ctx); err != nil {
		return err
	}
	var undo batches
	for key, it := range n.items {
		if kindOf(key) == generationsKey || it[0].Change <= taken.Change {
			continue // the dead writer has written no version of this item
		}
		if kept := it.without(taken.Change); len(kept) == 0 {
			undo.add(clientv3.OpDelete(w.key(key)), 0)
		} else {
			undo.add(clientv3.OpPut(w.key(key), kept.text()), len(kept.text()))
		}
	}
	for _, batch := range undo.ops {
		if err := w.writeBatch(ctx, at, batch); err != nil {
			return err
		}
	}
	// The versions of the dead writer are gone. Others may write again.
	free := taken
	free.Writing = 0
	_, err = w.finish(ctx, at, nil, &taken, &free)
	return err
}
