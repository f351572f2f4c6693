// SPDX-License-Identifier: Apache-2.0

// Package control keeps the desired state of a running balancer or agent: the content of its file,
// and the overrides that operators make while it runs. Each change is a transaction: it is checked,
// applied and stored, or it has no effect at all.
package control

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"go.yaml.in/yaml/v4"

	"github.com/segue-lb/segue/internal/atomicfile"
	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/fieldpath"
	"github.com/segue-lb/segue/internal/store"
)

// Runner is a running balancer or agent.
type Runner[D any] interface {
	// Reload makes the process follow another desired state with its secrets. It reads no files. If it
	// returns an error, the earlier state stays in force.
	Reload(context.Context, D, desired.Secrets) error
	// Losses returns the servers whose flows would be affected if the process followed another desired
	// state. For an agent, it returns the services whose connections would be affected.
	Losses(context.Context, D) ([]desired.Loss, error)
}

// Controller changes the desired state of a process. Several goroutines may use it.
type Controller[D config.State[D]] struct {
	file string // the configuration file
	load func(file string) (*config.Files[D], fieldpath.Errors, error)
	// keeper keeps the overrides in a store. If it is nil, they are in a file.
	keeper keeper[D]

	mu       sync.Mutex
	runner   Runner[D]
	inForce  *config.Files[D]
	onChange Report
}

// Report gets the overrides after each change: those in force, and those that are left out.
type Report func(inForce []desired.Override, invalid []desired.InvalidOverride)

// keeper keeps the overrides in place of a controller, and makes its changes. Fleet is a keeper.
type keeper[D config.State[D]] interface {
	Overrides() (list []desired.Override, version string)
	// Reload makes the process follow own, its configuration file, which was read again. The caller
	// holds the controller's mutex.
	Reload(ctx context.Context, own *config.Files[D]) (fieldpath.Errors, error)
	Change(ctx context.Context, terms Terms, c change[D]) (*Result, error)
}

// Agent is the controller of an agent.
type Agent = Controller[*desired.Agent]

// Balancer is the controller of a balancer, whose services may come from the store of a fleet.
type Balancer struct {
	Controller[*desired.Balancer]
	fleet *Fleet // nil: the services come from the file
}

// LoadBalancer reads a balancer's configuration file, its secrets and its overrides. It leaves out
// invalid overrides: Invalid returns them. Warnings are those of config.LoadBalancer.
func LoadBalancer(file string) (*Balancer, fieldpath.Errors, error) {
	var b Balancer
	warnings, err := b.start(file, config.LoadBalancer)
	if err != nil {
		return nil, nil, err
	}
	return &b, warnings, nil
}

// LoadAgent is LoadBalancer for an agent.
func LoadAgent(file string) (*Agent, fieldpath.Errors, error) {
	var a Agent
	warnings, err := a.start(file, config.LoadAgent)
	if err != nil {
		return nil, nil, err
	}
	return &a, warnings, nil
}

// start reads the files for the first time.
func (c *Controller[D]) start(
	file string, load func(string) (*config.Files[D], fieldpath.Errors, error),
) (warnings fieldpath.Errors, err error) {
	c.file, c.load, c.onChange = file, load, func([]desired.Override, []desired.InvalidOverride) {}
	c.inForce, warnings, err = c.read()
	return warnings, err
}

// read reads the configuration file, the files with secrets that it names, and the overrides. Only
// starts and reloads read them.
func (c *Controller[D]) read() (*config.Files[D], fieldpath.Errors, error) {
	files, warnings, err := c.load(c.file)
	if err != nil {
		return nil, nil, err
	}
	var problems fieldpath.Errors
	switch err := files.ReadSecrets(); {
	case errors.As(err, &problems):
		return nil, nil, problems.In(c.file)
	case err != nil:
		return nil, nil, err
	}
	return files, warnings, nil
}

// versionOf returns the version of a desired state: a hash of the configuration file and of the
// overrides.
func versionOf[D config.State[D]](f *config.Files[D]) string {
	sum := sha256.New()
	fmt.Fprintf(sum, "%d\n", len(f.Text)) // tells where the file ends and the overrides begin
	sum.Write(f.Text)
	for _, o := range overridesToStore(f) {
		text, err := json.Marshal(o)
		if err != nil {
			panic(err) // overrides have only what JSON can express
		}
		sum.Write(text)
	}
	return hex.EncodeToString(sum.Sum(nil)[:8]) // 64 bits suffice to tell versions apart
}

// overridesToStore returns all overrides that belong into the file of overrides, also invalid ones.
func overridesToStore[D config.State[D]](f *config.Files[D]) []desired.Override {
	all := slices.Clone(f.Overrides)
	for _, o := range f.Invalid {
		all = append(all, o.Override)
	}
	return all
}

// Desired returns the desired state in force. The caller must not change it.
func (c *Controller[D]) Desired() D {
	state, _ := c.InForce()
	return state
}

// Secrets returns the secrets of the desired state in force.
func (c *Controller[D]) Secrets() desired.Secrets {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.inForce.Secrets
}

// InForce returns the desired state in force, and the overrides that it follows. The caller must
// not change them.
func (c *Controller[D]) InForce() (D, []desired.Override) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.inForce.Desired, c.inForce.InForce
}

// Invalid returns the overrides that are left out, because they are invalid with the configuration
// file. They stay in the file of overrides until they are edited or reset.
func (c *Controller[D]) Invalid() []desired.InvalidOverride {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.inForce.Invalid
}

// Attach gives the controller the process that it changes. The controller calls onChange now, and
// after each change.
func (c *Controller[D]) Attach(runner Runner[D], onChange Report) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.runner, c.onChange = runner, onChange
	onChange(c.inForce.InForce, c.inForce.Invalid)
}

// Reload reads all files again and makes the process follow them. If it returns an error, the
// earlier state stays in force. An invalid override is an error, unless it is one of those that are
// left out already.
func (c *Controller[D]) Reload(ctx context.Context) (warnings fieldpath.Errors, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	next, warnings, err := c.read()
	if err != nil {
		return nil, err
	}
	if c.keeper != nil {
		return c.keeper.Reload(ctx, next)
	}
	if problems := c.newlyInvalid(next); len(problems) > 0 {
		return nil, problems
	}
	if err := c.runner.Reload(ctx, next.Desired, next.Secrets); err != nil {
		return nil, err
	}
	c.enforce(next)
	return warnings, nil
}

// newlyInvalid returns the errors of invalid overrides that were not left out before.
func (c *Controller[D]) newlyInvalid(next *config.Files[D]) fieldpath.Errors {
	var leftOut []desired.Override
	for _, o := range c.inForce.Invalid {
		leftOut = append(leftOut, o.Override)
	}
	return desired.NewlyInvalid(next.Invalid, leftOut)
}

// enforce notes files that the process follows now, and reports their overrides.
func (c *Controller[D]) enforce(next *config.Files[D]) {
	c.inForce = next
	c.onChange(next.InForce, next.Invalid)
}

// Overrides returns the overrides, also those without effect, but not those that are left out. It
// also returns the version of the desired state.
func (c *Controller[D]) Overrides() (overrides []desired.Override, version string) {
	if c.keeper != nil {
		return c.keeper.Overrides()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.inForce.Overrides), versionOf(c.inForce)
}

var (
	// ErrVersion is wrapped in the error of a change if the version in force is not the expected
	// one.
	ErrVersion = store.ErrVersion
	// ErrStored is wrapped in the error of a change if the process does not know the content of the
	// file of overrides: somebody else has changed the file, or the process could not read it at the
	// start.
	ErrStored = errors.New("reload first")
	// ErrNotFound is wrapped in the error of a change if there is no such service or server.
	ErrNotFound = errors.New("no such service or server")
	// ErrRemovals is wrapped in the error of a change that takes more servers out of service than its
	// limit allows.
	ErrRemovals = errors.New("permit it by --allow-removals")
	// ErrExists is wrapped in the error of a change that adds a service or server that exists already.
	ErrExists = errors.New("exists already")
)

// Terms are the conditions of a change.
type Terms struct {
	// Version is the version in force that the caller expects; empty: any.
	Version string
	// DryRun checks the change and applies nothing.
	DryRun bool
	// PermitsRemovals permits the change to take more servers out of service than the limit allows.
	// With a store, this is the store's limit. Otherwise only ApplyFile has a limit,
	// desired.DefaultMaxRemovedPercent.
	PermitsRemovals bool
}

// Result is what a change did, or would do.
type Result struct {
	// Version is the version of the desired state after the change. After a dry run, it is the version
	// before the change. A caller can put it into the Terms of the real change. The real change then
	// fails if another change came between.
	Version  string
	Changes  desired.Changes  // none: the change has no effect
	Losses   []desired.Loss   // servers or services whose flows the change affects
	Warnings fieldpath.Errors // of the desired state after the change
}

// Change makes all edits in their order, or none. It stores the overrides, so that they survive a
// restart. The error is one of these:
//   - It wraps ErrVersion, ErrStored, ErrNotFound, ErrExists, ErrRemovals or ErrHeld.
//   - It is of type fieldpath.Errors: the desired state would be invalid.
//   - The process could not follow the change, or the file or the store could not be written.
//
// After an error, the earlier state stays in force. Only if the error wraps store.ErrUnknown, the
// change may have been made.
func (c *Controller[D]) Change(ctx context.Context, edits []Edit, terms Terms) (*Result, error) {
	compute := func(f *config.Files[D]) (*config.Files[D], fieldpath.Errors, error) { return edited(f, edits) }
	return c.follow(ctx, terms, change[D]{compute: compute})
}

// ApplyFile changes the services to those of another configuration file, by overrides. What
// operators have drained stays drained. Other sections of the file have no effect: there is a
// warning if they differ from those in force. Errors are those of Change.
func (c *Controller[D]) ApplyFile(ctx context.Context, text []byte, terms Terms) (*Result, error) {
	compute := func(f *config.Files[D]) (*config.Files[D], fieldpath.Errors, error) {
		return f.FollowingFile(text)
	}
	return c.follow(ctx, terms, change[D]{compute, true})
}

// change is a change of files.
type change[D config.State[D]] struct {
	// compute returns the changed files, and warnings about the change.
	compute func(*config.Files[D]) (*config.Files[D], fieldpath.Errors, error)
	// isWhole tells that the change gives all services, and removes each other service. A change that
	// is not whole names each service and server that it affects.
	isWhole bool
}

// follow computes changed files, checks them, and makes the process follow them. With a store, the
// keeper does so. In a dry run, or if the change has no effect, follow only returns the result.
func (c *Controller[D]) follow(ctx context.Context, terms Terms, wanted change[D]) (*Result, error) {
	if c.keeper != nil {
		return c.keeper.Change(ctx, terms, wanted)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	version := versionOf(c.inForce)
	if terms.Version != "" && terms.Version != version {
		return nil, fmt.Errorf("version %s: %w: %s", terms.Version, ErrVersion, version)
	}
	if c.inForce.Unreadable() {
		return nil, fmt.Errorf("%s could not be read: correct or remove it, and %w",
			c.inForce.Desired.OverridesFile(), ErrStored)
	}
	next, warnings, err := wanted.compute(c.inForce)
	if err != nil {
		return nil, err
	}
	if wanted.isWhole && !terms.PermitsRemovals {
		err := c.inForce.Desired.Serving().CheckLoss(next.Desired.Serving(), desired.DefaultMaxRemovedPercent)
		if err != nil {
			return nil, fmt.Errorf("the file %w: %w", err, ErrRemovals)
		}
	}
	losses, err := c.runner.Losses(ctx, next.Desired)
	if err != nil {
		return nil, err
	}
	result := &Result{version, next.Desired.ChangesFrom(c.inForce.Desired), losses, warnings}
	if after := versionOf(next); !terms.DryRun && after != version {
		result.Version = after
		return result, c.apply(ctx, next)
	}
	return result, nil
}

// apply makes the process follow other overrides, and stores them. It writes the file under another
// name before the process follows the overrides. So the likeliest failure, a full disk, changes
// nothing. If the file cannot get its name later, the process returns to the earlier overrides.
func (c *Controller[D]) apply(ctx context.Context, next *config.Files[D]) error {
	pending, err := c.prepare(next)
	if err != nil {
		return err
	}
	if err := c.runner.Reload(ctx, next.Desired, next.Secrets); err != nil {
		return errors.Join(err, pending.Discard())
	}
	if err := pending.Commit(); err != nil {
		// The process must not follow overrides that a restart would forget: it returns to the earlier
		// ones.
		return errors.Join(fmt.Errorf("store the overrides: %w", err),
			c.runner.Reload(context.WithoutCancel(ctx), c.inForce.Desired, c.inForce.Secrets))
	}
	c.enforce(next)
	return nil
}

// prepare writes the file of overrides of next under another name, and sets next.Stored. It returns
// an error if somebody else has changed the file since the process read or wrote it.
func (c *Controller[D]) prepare(next *config.Files[D]) (*atomicfile.Pending, error) {
	path := next.Desired.OverridesFile()
	if path == "" {
		return nil, errors.New("the process has no directory for its state, so overrides cannot be stored")
	}
	text, err := yaml.Dump(desired.Overrides{Overrides: overridesToStore(next)})
	if err == nil {
		err = os.MkdirAll(filepath.Dir(path), 0o755)
	}
	if err != nil {
		return nil, fmt.Errorf("store the overrides: %w", err)
	}
	now, err := os.ReadFile(path)
	switch {
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return nil, fmt.Errorf("store the overrides: %w", err)
	case !bytes.Equal(now, c.inForce.Stored):
		return nil, fmt.Errorf("%s was changed, and not reloaded: %w", path, ErrStored)
	}
	next.Stored = text
	pending, err := atomicfile.Prepare(path, text, 0o644)
	if err != nil {
		return nil, fmt.Errorf("store the overrides: %w", err)
	}
	return pending, nil
}
