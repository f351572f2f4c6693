// SPDX-License-Identifier: Apache-2.0

package control

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"time"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/events"
	"github.com/segue-lb/segue/internal/fieldpath"
	"github.com/segue-lb/segue/internal/serversets"
	"github.com/segue-lb/segue/internal/store"
)

const (
	// effectPatience is how long the request for a change waits until this balancer has read the
	// change from the store, and has tried to follow it.
	effectPatience = 10 * time.Second
	// releasePatience is how long the request then waits until this balancer follows the change. That
	// can take longer, because a service begins at most one generation in ten seconds.
	releasePatience = 2 * time.Second
	// storePatience is how long the store may take to make a change. All three times together are
	// shorter than the timeout of the API's requests.
	storePatience = 40 * time.Second
)

// ErrHeld is wrapped in the error of a change that permits removals while a version of the store,
// which removes too many servers, awaits confirmation. The change would permit the removals of that
// version, too.
var ErrHeld = errors.New("confirm the version, or restore its servers first")

// CheckRemovals returns a function that checks a change of a store. The function returns an error,
// which wraps ErrRemovals, if the change takes more servers out of service than the limit in cfg
// allows. namesDrains tells that somebody has named each server that the change drains. Then
// drained servers do not count.
func CheckRemovals(cfg *desired.Balancer, namesDrains bool) func(before, after store.Tree) error {
	return func(before, after store.Tree) error {
		err := store.CheckRemovals(before, after, cfg.Store.MaxRemovedPercent, namesDrains)
		if err != nil {
			return fmt.Errorf("%w: %w", err, ErrRemovals)
		}
		return nil
	}
}

// Member is a running balancer of a fleet.
type Member interface {
	Runner[*desired.Balancer]
	// Follow is Reload with the generations of the fleet. Without a fleet, the generations are nil,
	// and the balancer makes its own.
	Follow(context.Context, *desired.Balancer, desired.Secrets, serversets.Generations) error
}

// Fleet connects the controller of a balancer with the store of its fleet.
type Fleet struct {
	controller *Balancer
	store      *store.Store
	follower   *store.Follower
	log        *slog.Logger
	member     Member
	attached   chan struct{} // closed when there is a member
	cancel     context.CancelFunc
	ended      chan struct{}

	// The controller's mutex guards these fields. The balancer follows own and state together.
	own    *config.BalancerFiles // its own file, which has no services
	state  *store.State          // the state of the store; nil before the first one
	warned []string              // the warnings about own and state that were logged already
}

// Join connects the controller with the store that its configuration names, and begins to follow
// the store. The result is nil if the configuration names no store. Join returns an error if a file
// for the connection, such as one with a key, cannot be read.
func (c *Balancer) Join(ctx context.Context, log *slog.Logger) (*Fleet, error) {
	cfg := c.Desired()
	if cfg.Store == nil {
		return nil, nil
	}
	s, err := store.Open(&cfg.Store.Etcd, cfg.Node.Name)
	if err != nil {
		return nil, err
	}
	f := &Fleet{
		controller: c, store: s, log: log, own: c.inForce,
		attached: make(chan struct{}), ended: make(chan struct{}),
	}
	f.follower = store.NewFollower(s, f, cfg, ownGenerations(&cfg.Node, log), log)
	c.fleet, c.keeper = f, f
	ctx, f.cancel = context.WithCancel(ctx)
	go func() { // Close waits for the end of this goroutine
		defer close(f.ended)
		_ = f.follower.Run(ctx)
	}()
	return f, nil
}

// ownGenerations returns the generations that the balancer had before it joined a fleet.
func ownGenerations(node *desired.BalancerNode, log *slog.Logger) serversets.Generations {
	own, err := serversets.Load(serversets.File(node.State, node.Instance))
	if err != nil {
		log.Warn("the generations from before the fleet are unknown", "error", err)
	}
	return own
}

// Close ends the connection, and gives the lease back.
func (f *Fleet) Close() error {
	f.cancel()
	<-f.ended
	return f.store.Close()
}

// First waits until the balancer has services: those in the store, or those that the balancer has
// followed last. Until then, First calls waiting every few seconds.
func (f *Fleet) First(ctx context.Context, waiting func(store.Status)) error {
	return f.follower.First(ctx, waiting)
}

// Status returns the condition of the connection.
func (f *Fleet) Status() store.Status { return f.follower.Status() }

// Await waits until condition returns true for the status of the connection, or until the context
// ends.
func (f *Fleet) Await(ctx context.Context, condition func(store.Status) bool) error {
	return f.follower.Await(ctx, condition)
}

// Present keeps this balancer present in the store (store.Store.Present).
func (f *Fleet) Present(
	ctx context.Context, seconds int64, own <-chan string, heard func(map[string]string, error),
) {
	f.store.Present(ctx, seconds, own, heard)
}

// Confirm makes the balancer follow a version of the store that removes more servers than the limit
// allows. The error wraps ErrVersion if the store has released another version since.
func (f *Fleet) Confirm(ctx context.Context, version string) error {
	v, err := store.ParseVersion(version)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrVersion, err)
	}
	return f.follower.Confirm(ctx, v)
}

// Attach is Controller.Attach for a balancer that may be a member of a fleet.
func (c *Balancer) Attach(member Member, onChange Report) {
	c.Controller.Attach(member, onChange)
	if c.fleet != nil {
		c.fleet.member = member
		close(c.fleet.attached)
	}
}

// Fleet returns the connection to a store, or nil.
func (c *Balancer) Fleet() *Fleet { return c.fleet }

// Generations returns the generations of the fleet, or nil if the balancer makes its own.
func (c *Balancer) Generations() serversets.Generations {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.fleet == nil || c.fleet.state == nil {
		return nil
	}
	return c.fleet.state.Generations
}

// interpret returns the balancer's own file with the services and overrides of a store.
func (f *Fleet) interpret(d *store.Document) (*config.BalancerFiles, fieldpath.Errors, error) {
	f.controller.mu.Lock()
	own := f.own
	f.controller.mu.Unlock()
	return config.WithStored(own, d.Services, d.Overrides)
}

// Interpret implements store.Balancer.
func (f *Fleet) Interpret(d *store.Document) (*desired.Balancer, error) {
	files, _, err := f.interpret(d)
	if err != nil {
		return nil, err
	}
	return files.Desired, nil
}

// Follow implements store.Balancer. The balancer starts with the first state. A later state waits
// until the balancer has started.
func (f *Fleet) Follow(ctx context.Context, state *store.State) error {
	c := f.controller
	c.mu.Lock()
	isFirst := f.state == nil
	c.mu.Unlock()
	if !isFirst {
		select {
		case <-f.attached:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	warnings, err := f.enforce(ctx, f.own, state)
	if err != nil {
		return err
	}
	f.logNew(warnings)
	return nil
}

// enforce makes the balancer follow its own file with a state of the store. The first state is only
// noted: the balancer starts with it.
//
// The caller must lock the controller's mutex before it reads own or state, and hold it until
// enforce returns. So if a reload and a new state come at the same time, the balancer ends with the
// new file and the new state.
func (f *Fleet) enforce(
	ctx context.Context, own *config.BalancerFiles, state *store.State,
) (warnings fieldpath.Errors, err error) {
	document, err := state.Content.Document()
	if err != nil {
		return nil, err
	}
	files, warnings, err := config.WithStored(own, document.Services, document.Overrides)
	if err != nil {
		return nil, err
	}
	if err := state.Generations.Check(files.Desired.Services); err != nil {
		return nil, err
	}
	c := f.controller
	if f.state == nil {
		c.inForce = files
	} else {
		if err := f.member.Follow(ctx, files.Desired, files.Secrets, state.Generations); err != nil {
			return nil, err
		}
		c.enforce(files)
	}
	f.own, f.state = own, state
	return warnings, nil
}

// Reload implements keeper. The caller of Controller.Reload logs the warnings.
func (f *Fleet) Reload(ctx context.Context, own *config.BalancerFiles) (fieldpath.Errors, error) {
	if err := own.File.ReloadableFrom(f.own.File); err != nil {
		return nil, err
	}
	warnings, err := f.enforce(ctx, own, f.state)
	if err == nil {
		f.warned = textsOf(warnings)
	}
	return warnings, err
}

// logNew logs the warnings that the previous state did not have, because most warnings are the same
// for each state. The caller holds the controller's mutex.
func (f *Fleet) logNew(warnings fieldpath.Errors) {
	texts := textsOf(warnings)
	for _, text := range texts {
		if !slices.Contains(f.warned, text) {
			f.log.Warn("configuration", "warning", text)
		}
	}
	f.warned = texts
}

func textsOf(warnings fieldpath.Errors) []string {
	texts := make([]string, len(warnings))
	for i, warning := range warnings {
		texts[i] = warning.Error()
	}
	return texts
}

// Overrides implements keeper. It returns the overrides and the version of the store's newest
// content or, if this content is missing or not valid, of the content in force.
func (f *Fleet) Overrides() ([]desired.Override, string) {
	if n := f.follower.Newest(); n != nil && n.Check() == nil {
		if document, err := n.Tree().Document(); err == nil {
			return document.Overrides, n.Version().String()
		}
	}
	c := f.controller
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.inForce.Overrides), f.follower.Status().Follows.String()
}

// Change implements keeper. It makes a change in the store, so that all balancers follow it. Then
// it waits until this balancer follows the change. If the balancer does not follow it in time, the
// result has a warning. Except in a dry run, Change refuses to permit removals while a version of
// the store awaits confirmation: the change would permit the removals of this version, too.
func (f *Fleet) Change(ctx context.Context, terms Terms, c change[*desired.Balancer]) (*Result, error) {
	change, err := f.changeOf(ctx, terms, c.isWhole)
	if err != nil {
		return nil, err
	}
	held := f.Status().Confirmable
	if held != (store.Version{}) && terms.PermitsRemovals && !terms.DryRun {
		return nil, fmt.Errorf("version %s is held (segue store status), and --allow-removals would also "+
			"permit the removals of that version: %w", held, ErrHeld)
	}
	var result *Result
	var refusal error // the error of the last call of Edit
	change.Edit = func(tree store.Tree) (next store.Tree, err error) {
		next, result, refusal = f.edit(ctx, tree, c)
		return next, refusal
	}
	writing, cancel := context.WithTimeout(ctx, storePatience)
	defer cancel()
	version, err := f.store.Apply(writing, change)
	switch {
	case refusal != nil:
		return nil, refusal
	case errors.Is(err, ErrRemovals), errors.Is(err, store.ErrVersion):
		return nil, err
	case errors.Is(err, store.ErrUnknown):
		return nil, fmt.Errorf("%w: look with segue service list and segue server list before you repeat it", err)
	case err != nil:
		return nil, fmt.Errorf("change the store: %w", err)
	}
	result.Version = version.String()
	if terms.DryRun {
		return result, nil
	}
	result.Warnings = append(result.Warnings, f.awaitEffect(ctx, version)...)
	return result, nil
}

// changeOf returns a change of the store with these terms. The caller sets Edit.
func (f *Fleet) changeOf(ctx context.Context, terms Terms, isWhole bool) (store.Change, error) {
	change := store.Change{
		PermitsRemovals: terms.PermitsRemovals, NamesDrains: !isWhole, DryRun: terms.DryRun,
		Who: events.ActorOf(ctx),
	}
	if !terms.PermitsRemovals {
		change.Check = CheckRemovals(f.controller.Desired(), !isWhole)
	}
	if terms.Version != "" {
		var err error
		if change.Expected, err = store.ParseVersion(terms.Version); err != nil {
			return change, fmt.Errorf("%w: %w", ErrVersion, err)
		}
	}
	return change, nil
}

// edit computes a change: the content of the store after the change, and the result for this
// balancer.
func (f *Fleet) edit(
	ctx context.Context, tree store.Tree, c change[*desired.Balancer],
) (store.Tree, *Result, error) {
	document, err := tree.Document()
	if err != nil {
		return nil, nil, err
	}
	before, _, err := f.interpret(document)
	if err != nil {
		return nil, nil, err
	}
	after, warnings, err := c.compute(before)
	if err != nil {
		return nil, nil, err
	}
	next, err := tree.WithOverrides(after.Overrides)
	if err != nil {
		return nil, nil, err
	}
	losses, err := f.member.Losses(ctx, after.Desired)
	if err != nil {
		return nil, nil, err
	}
	changes := after.Desired.ChangesFrom(before.Desired)
	return next, &Result{Changes: changes, Losses: losses, Warnings: warnings}, nil
}

// awaitEffect waits until this balancer follows a change. It returns a warning if the balancer has
// not read the change in time, if it does not follow the change for another reason, or if it awaits
// the next generation of a service. These are not errors, because the change is in the store.
func (f *Fleet) awaitEffect(ctx context.Context, version store.Version) (warnings fieldpath.Errors) {
	hasConsidered := func(s store.Status) bool {
		return s.Newest.Epoch == version.Epoch && s.Newest.Change >= version.Change
	}
	followsOrAsks := func(s store.Status) bool {
		follows := s.Follows.Epoch == version.Epoch && s.Follows.Change >= version.Change
		needsConfirmation := s.Confirmable != (store.Version{})
		return follows || needsConfirmation
	}
	waiting, cancel := context.WithTimeout(ctx, effectPatience)
	defer cancel()
	if err := f.Await(waiting, hasConsidered); err != nil {
		warnings.Addf("store", "the change is made, and this balancer does not follow it yet")
		return warnings
	}
	waiting, cancel = context.WithTimeout(ctx, releasePatience)
	defer cancel()
	err := f.Await(waiting, followsOrAsks)
	switch held := f.Status().Held; {
	case held != "":
		warnings.Addf("store", "this balancer does not follow the change: %s", held)
	case err != nil:
		warnings.Addf("store", "the change takes effect with the next generation of the service, within "+
			"ten seconds; drains have taken effect")
	}
	return warnings
}
