// SPDX-License-Identifier: Apache-2.0

package store

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"reflect"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/events"
	"github.com/segue-lb/segue/internal/fieldpath"
	"github.com/segue-lb/segue/internal/serversets"
)

const (
	// startPatience is how long a start waits for the store before it uses the balancer's own file.
	startPatience = 5 * time.Second
	// retryInterval is the time after which the follower tries again to follow the store, or to write
	// the balancer's own file.
	retryInterval = 10 * time.Second
)

// Balancer is the balancer that a follower keeps up to date. Several goroutines may call Interpret
// at the same time. Only one goroutine calls Follow.
type Balancer interface {
	// Interpret returns the desired state of the balancer that follows from a document. The error says
	// which value of the document the balancer cannot follow.
	Interpret(*Document) (*desired.Balancer, error)
	// Follow makes the balancer follow a state whose document Interpret has accepted. If it returns an
	// error, the earlier state stays in force.
	Follow(context.Context, *State) error
}

// Follower makes a balancer follow the store. Several goroutines may use it.
type Follower struct {
	store    *Store
	log      *slog.Logger
	balancer Balancer
	cache    string        // the path of the balancer's own file, which has the state that it follows
	setAside bool          // this file could not be read: save must keep it under another name
	interval time.Duration // generationInterval, except in tests
	// deference is the time that others get to lead first: strangerPause, except in tests.
	deference time.Duration
	history   serversets.Generations // those that the balancer had before it followed a store

	first    chan struct{} // closed when the balancer follows its first state
	confirms chan confirmation

	mu      sync.Mutex
	status  Status
	state   *State        // the state in force; before the first, that of the balancer's own file, or nil
	newest  *Snapshot     // the content that was read last
	changed chan struct{} // closed and replaced when the status changes
}

// Status tells whether the store answers, and which version of it a balancer follows.
type Status struct {
	// Reachable tells whether the store answers. Since is the time from which on it does, or does not.
	Reachable bool
	Since     time.Time
	// Begun is when this follower was made.
	Begun time.Time
	// Problem tells why the store does not answer.
	Problem string
	// Follows is the version that the balancer follows. FromCache tells that this version comes from
	// the balancer's own file, and that the store has not delivered a version yet.
	Follows   Version
	FromCache bool
	// Newest is the last version of the store that was read.
	Newest Version
	// Held tells why the balancer does not follow the store's released version, or why it cannot
	// follow the last version, which is not released yet. Empty: neither is the case.
	Held string
	// Confirmable is a version that the balancer does not follow because it removes too many servers.
	// Confirm makes the balancer follow it. The zero value means that there is none.
	Confirmable Version
	// Leader is the balancer that makes the generations. IsLeader tells that it is this one.
	Leader   string
	IsLeader bool
	// Unsaved tells why the state could not be written to the balancer's own file.
	Unsaved string
}

// noAnswerYet is the first Problem of a status.
const noAnswerYet = "it has not answered yet"

// NewFollower returns a follower of a store. It reads the state that the balancer followed last
// from the balancer's own file. history has the generations that the balancer had before it
// followed a store. If the store has no generations, and this balancer leads first, its history
// becomes that of the fleet.
func NewFollower(
	s *Store, b Balancer, cfg *desired.Balancer, history serversets.Generations, log *slog.Logger,
) *Follower {
	f := &Follower{
		store: s, log: log, balancer: b, history: history,
		interval: generationInterval, deference: strangerPause,
		cache: CacheFile(cfg.Node.State, cfg.Node.Instance),
		first: make(chan struct{}), confirms: make(chan confirmation), changed: make(chan struct{}),
	}
	f.status.Begun, f.status.Problem = time.Now(), noAnswerYet
	f.status.Since = f.status.Begun
	var err error
	if f.state, err = LoadCache(f.cache, s.prefix); err != nil {
		log.Error("what the store had before is unknown: its first version is followed without a limit",
			"error", err)
		f.setAside = true
	}
	return f
}

// Status returns the present status.
func (f *Follower) Status() Status {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.status
}

// State returns the state in force. Before the balancer has begun, it is that of its own file, or
// nil.
func (f *Follower) State() *State {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.state
}

// Newest returns the last content that was read, or nil.
func (f *Follower) Newest() *Snapshot {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.newest
}

// update changes the status, and wakes the goroutines that wait for a change.
func (f *Follower) update(change func(*Status)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	before := f.status
	change(&f.status)
	if f.status != before {
		close(f.changed)
		f.changed = make(chan struct{})
	}
}

// Await waits until condition returns true for the status, or until the context ends. In the second
// case, it returns the cause of the context's end.
func (f *Follower) Await(ctx context.Context, condition func(Status) bool) error {
	for {
		f.mu.Lock()
		status, changed := f.status, f.changed
		f.mu.Unlock()
		if condition(status) {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Run follows the store until the context ends. While this balancer holds the lease, Run also makes
// the generations.
func (f *Follower) Run(ctx context.Context) error {
	toFollow, toRelease := newLatest[*Snapshot](), newLatest[*Snapshot]()
	r := newReleaser(f)
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		f.store.watch(ctx, func(n *Snapshot) {
			toFollow.put(n)
			toRelease.put(n)
		}, f.reached)
		return nil
	})
	group.Go(func() error { r.run(ctx, toRelease); return nil })
	group.Go(func() error { f.follow(ctx, toFollow); return nil })
	return group.Wait()
}

// newReleaser returns the part of a follower that makes generations.
func newReleaser(f *Follower) *releaser {
	return &releaser{
		Store: f.store, log: f.log, interval: f.interval, deference: f.deference,
		interpret: func(version Version, content Tree) (*desired.Balancer, error) {
			_, wanted, err := f.interpret(version, content)
			return wanted, err
		},
		state: f.State, history: f.history,
		began: map[string]beginning{}, removed: map[string]int64{},
	}
}

// reached notes whether the store answers: err is nil, or says why it does not. It logs when the
// store begins or ceases to answer, and if the first attempt to reach it fails.
func (f *Follower) reached(err error) {
	problem := ""
	if err != nil {
		problem = err.Error()
	}
	before := f.Status()
	f.update(func(s *Status) {
		if isReachable := err == nil; s.Reachable != isReachable {
			s.Reachable, s.Since = isReachable, time.Now()
		}
		s.Problem = problem
	})
	switch {
	case err == nil && !before.Reachable:
		f.log.Info("the store answers", "duration", time.Since(before.Since).Round(time.Millisecond))
	case err != nil && (before.Reachable || before.Problem == noAnswerYet):
		f.log.Error("the store does not answer; the balancer continues with its last state", "error", err)
	}
}

// follow considers each content of the store, and each confirmation, until the context ends. If the
// store has delivered nothing usable after startPatience, the balancer begins with its own file. If
// the balancer cannot follow a content, or cannot write its own file, follow considers the content
// again after retryInterval.
func (f *Follower) follow(ctx context.Context, snapshots <-chan *Snapshot) {
	patience := time.NewTimer(startPatience)
	defer patience.Stop()
	var newest *Snapshot
	var retry <-chan time.Time // nil: the last attempt has succeeded
	for {
		var c confirmation // stays zero unless an operator has confirmed a version
		select {
		case <-ctx.Done():
			return
		case <-patience.C:
			s := f.Status()
			f.begin(ctx, cmp.Or(s.Held, s.Problem))
			continue
		case newest = <-snapshots:
		case <-retry:
		case c = <-f.confirms:
		}
		retry = nil
		if newest == nil {
			if c.reply != nil {
				c.reply <- errors.New("the store does not answer")
			}
			continue
		}
		err := f.consider(ctx, newest, c.version)
		if c.reply != nil {
			c.reply <- f.outcome(c.version, err)
		}
		if s := f.Status(); s.Held != "" || s.Unsaved != "" {
			retry = time.After(retryInterval)
		}
	}
}

// begin makes the balancer begin with the state of its own file. It does nothing if the file has no
// state, or if the balancer has begun already. reason tells why the balancer does not begin with
// the store's state.
func (f *Follower) begin(ctx context.Context, reason string) {
	state := f.State()
	if state == nil || f.hasBegun() {
		return
	}
	if err := f.balancer.Follow(ctx, state); err != nil {
		f.log.Error("the balancer cannot follow what it followed last", "error", err)
		return
	}
	f.log.Warn("the balancer starts with what it followed last", "version", state.Version, "reason", reason)
	f.update(func(s *Status) { s.Follows, s.FromCache = state.Version, true })
	close(f.first)
}

// confirmation is an operator's wish that the balancer follow a version. The zero value confirms
// nothing.
type confirmation struct {
	version Version
	reply   chan error // has room for the answer, so the sender never waits
}

// outcome returns the answer to a confirmation, after consider has returned err. The answer is nil
// if the balancer follows the confirmed version. It wraps ErrVersion if the store has released
// another version: either the balancer follows that version, or it needs a confirmation of it.
// Otherwise the answer is err.
func (f *Follower) outcome(confirmed Version, err error) error {
	s := f.Status()
	switch {
	case err != nil && s.Confirmable != (Version{}): // it is another one: this one was confirmed
		return fmt.Errorf("version %s: %w: %w", confirmed, ErrVersion, err)
	case err == nil && s.Follows != confirmed:
		return fmt.Errorf("version %s: %w: the balancer follows version %s", confirmed, ErrVersion, s.Follows)
	}
	return err
}

// Confirm makes the balancer follow a version of the store although this version removes more
// servers than the limit permits. If the store has released another version since, the error wraps
// ErrVersion. Another error says why the balancer cannot follow the version.
func (f *Follower) Confirm(ctx context.Context, version Version) error {
	c := confirmation{version, make(chan error, 1)}
	select {
	case f.confirms <- c:
	case <-ctx.Done():
		return ctx.Err()
	}
	select {
	case err := <-c.reply:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// errNotReleased tells that the store has no released change yet.
var errNotReleased = errors.New("no balancer has made generations yet")

// errUnreadable tells that the last change cannot be read, and so the drains in it are unknown.
var errUnreadable = errors.New("the last change cannot be read")

// consider makes the balancer follow the version that the store has released. confirmed is the
// version that an operator has confirmed, or zero. consider returns an error if the balancer does
// not follow the released version. It also reports in the status if the balancer cannot follow the
// last version. Such a version may never be released, so nobody else would report it.
func (f *Follower) consider(ctx context.Context, n *Snapshot, confirmed Version) error {
	f.mu.Lock()
	f.newest = n
	f.mu.Unlock()
	next, err := stateOf(n)
	var confirmable Version
	if err == nil {
		var isConfirmable bool
		if isConfirmable, err = f.apply(ctx, n, next, confirmed); isConfirmable {
			confirmable = next.Version
		}
	}
	held := err // what the status reports
	if err == nil || errors.Is(err, errNotReleased) || errors.Is(err, errUnreadable) {
		// The released version is not the problem, but the last version may be.
		if err := f.checkNewest(n); err != nil {
			held = err
		}
	}
	f.report(n, held, confirmable)
	return err
}

// checkNewest returns an error if the balancer cannot follow the last version. If the last version
// is released already, it returns nil: apply has checked it.
func (f *Follower) checkNewest(n *Snapshot) error {
	if released, ok := n.released(); ok && released == n.Version() {
		return nil
	}
	_, _, err := f.interpret(n.Version(), n.Tree())
	return err
}

// interpret returns the content of a version as a document, and the desired state of this balancer
// that follows from it. The error tells the operator what to do.
func (f *Follower) interpret(version Version, content Tree) (*Document, *desired.Balancer, error) {
	document, err := content.Document()
	var wanted *desired.Balancer
	if err == nil {
		wanted, err = f.balancer.Interpret(document)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("this balancer cannot follow version %s: %s: correct that by "+
			"segue store import --replace, or upgrade this balancer if a newer build has written it",
			version, describeProblems(err))
	}
	return document, wanted, nil
}

// describeProblems returns the text of an error in one line. A content may have thousands of
// problems, so it has only the first ones.
func describeProblems(err error) string {
	const most = 5
	var problems fieldpath.Errors
	if !errors.As(err, &problems) {
		return err.Error()
	}
	var texts []string
	for _, problem := range problems[:min(len(problems), most)] {
		texts = append(texts, problem.Error())
	}
	text := strings.Join(texts, "; ")
	if more := len(problems) - most; more > 0 {
		text += fmt.Sprintf("; and %d more", more)
	}
	return text
}

// stateOf returns the state that balancers follow: the released version, with the drains of the
// last one.
func stateOf(n *Snapshot) (*State, error) {
	if err := n.Check(); err != nil {
		return nil, err
	}
	version, ok := n.released()
	if !ok {
		return nil, errNotReleased
	}
	content, err := n.tree(version.Change).withDrainsOf(n.Tree())
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errUnreadable, err)
	}
	generations, err := n.generations(version.Change)
	if err != nil {
		return nil, err
	}
	return &State{version, content, generations}, nil
}

// apply makes the balancer follow the state next. If the balancer follows the same state already,
// apply only notes the new version. If the balancer cannot or must not follow next, apply returns
// an error, and the earlier state stays in force. A balancer that has just started then begins with
// the state of its own file, if there is one. confirmable is true if the error is that next removes
// too many servers: an operator can confirm next. confirmed is the version that an operator has
// confirmed.
func (f *Follower) apply(
	ctx context.Context, n *Snapshot, next *State, confirmed Version,
) (confirmable bool, err error) {
	before, isFirst := f.State(), !f.hasBegun()
	if !isFirst && before.equal(next) {
		f.adopt(next, before.Version != next.Version)
		return false, nil
	}
	confirmable, err = f.check(n, before, next)
	isConfirmed := confirmable && confirmed == next.Version
	if err != nil && !isConfirmed {
		if isFirst && before != nil {
			f.begin(ctx, err.Error())
		}
		return confirmable, err
	}
	byStore := events.WithActor(ctx, n.head.author)
	if err := f.balancer.Follow(byStore, next); err != nil {
		return false, err
	}
	if isFirst || before.Version != next.Version {
		f.log.Info("follows the store", "version", next.Version)
	}
	f.adopt(next, true)
	return false, nil
}

// hasBegun tells whether the balancer follows a state.
func (f *Follower) hasBegun() bool {
	select {
	case <-f.first:
		return true
	default:
		return false
	}
}

// equal tells whether two states are the same for a balancer, even with different versions. For
// example, a drain takes effect before its change is released. The release then has another version
// and nothing new.
func (s *State) equal(other *State) bool {
	return s.Content.Equal(other.Content) && reflect.DeepEqual(s.Generations, other.Generations)
}

// check returns an error if the balancer cannot follow a state, or must not, because the state
// removes more servers than the limit permits. In the second case, confirmable is true. before is
// the state in force. If it is nil, there is no limit.
func (f *Follower) check(n *Snapshot, before, next *State) (confirmable bool, err error) {
	document, wanted, err := f.interpret(next.Version, next.Content)
	if err != nil || before == nil {
		return false, err
	}
	limit := wanted.Store.MaxRemovedPercent
	had, err := before.Content.Document()
	if err != nil {
		return false, err
	}
	// Numbers of changes can be compared only within an epoch.
	isSameStore := before.Version.Epoch == next.Version.Epoch
	// The last change whose writer has permitted removals is in next, and not in the state before.
	isPermitted := before.Version.Change < n.head.Removals && n.head.Removals <= next.Version.Change
	if isSameStore && isPermitted {
		return false, nil
	}
	was, is := had.serving(), document.serving()
	// If the last change whose writer has named the servers to drain is not in the state before,
	// drained servers do not count. This change may be later than next: drains do not wait for the
	// release.
	if isSameStore && before.Version.Change < n.head.Drains {
		was, is = was.WithoutDrains(), is.WithoutDrains()
	}
	if err := was.CheckLoss(is, limit); err != nil {
		return true, fmt.Errorf("version %s %w: confirm it by segue store confirm %s, or restore the content "+
			"of the store", next.Version, err, next.Version)
	}
	return false, nil
}

// adopt notes that a state is in force. If the state is new, or if the last attempt to write the
// balancer's own file has failed, adopt writes this file.
func (f *Follower) adopt(state *State, isNew bool) {
	f.mu.Lock()
	f.state = state
	f.mu.Unlock()
	f.update(func(s *Status) { s.Follows, s.FromCache = state.Version, false })
	if !f.hasBegun() {
		close(f.first)
	}
	if !isNew && f.Status().Unsaved == "" {
		return
	}
	unsaved := ""
	if err := f.save(state); err != nil {
		unsaved = err.Error()
		f.log.Error("what the store has is not saved: a restart without the store would use an older state",
			"error", err)
	}
	f.update(func(s *Status) { s.Unsaved = unsaved })
}

// save writes the balancer's own file. If the present file could not be read at the start, save
// first renames it, so that it is kept.
func (f *Follower) save(state *State) error {
	if f.setAside {
		aside := f.cache + ".invalid"
		if err := os.Rename(f.cache, aside); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("set the file aside that could not be read: %w", err)
		}
		f.log.Warn("a file of the store's state that could not be read is kept", "file", aside)
		f.setAside = false
	}
	return state.save(f.cache, f.store.prefix)
}

// report puts the result of consider into the status. It logs if the reason why the balancer does
// not follow the store has changed. err is this reason, or nil if the balancer follows the store.
func (f *Follower) report(n *Snapshot, err error, confirmable Version) {
	held := ""
	if err != nil {
		held = err.Error()
	}
	before := f.Status()
	f.update(func(s *Status) {
		s.Held, s.Confirmable = held, confirmable
		s.Leader = withoutID(n.leader)
		s.IsLeader = s.Leader == f.store.name
		if s.Newest = (Version{}); n.head != nil {
			s.Newest = n.Version()
		}
	})
	switch {
	case held == before.Held:
	case held == "":
		f.log.Info("the balancer follows the store again")
	case errors.Is(err, errNotReleased):
		f.log.Info("waits for the store", "reason", err)
	case f.hasBegun():
		f.log.Error("the balancer keeps its state and does not follow the store", "reason", err)
	default:
		f.log.Error("the balancer cannot start: it has no state, and cannot follow the store", "reason", err)
	}
}

// First waits until the balancer follows its first state. Until then, it calls waiting at intervals
// of startPatience. It returns an error if the context ends first.
func (f *Follower) First(ctx context.Context, waiting func(Status)) error {
	tick := time.NewTicker(startPatience)
	defer tick.Stop()
	for {
		select {
		case <-f.first:
			return nil
		case <-tick.C:
			waiting(f.Status())
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
