// SPDX-License-Identifier: Apache-2.0

// Package control keeps what a running balancer has to do: the content of its file, and the
// overrides that operators make while it runs. It makes each change a transaction: a change is
// checked as a whole, applied, and stored, or it has no effect at all.
package control

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"go.yaml.in/yaml/v4"

	"github.com/segue-lb/segue/internal/config"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/field"
	"github.com/segue-lb/segue/internal/wholefile"
)

// Runner is a running balancer. If Reload returns an error, the state before stays in force.
type Runner interface {
	Reload(context.Context, *desired.Balancer) error
}

// Controller changes what a balancer has to do. Several goroutines may use it.
type Controller struct {
	file string // of the configuration

	mu     sync.Mutex
	runner Runner
	state  state
	// onChange gets the overrides after each change.
	onChange func([]desired.Override)
}

// state is the desired state in force, and the two files of which it is made.
type state struct {
	text      []byte             // content of the configuration file
	overrides []desired.Override // also those without effect
	stored    []byte             // content of the file of overrides; nil: there is none
	desired   *desired.Balancer
}

// version identifies a desired state. Equal files and overrides have the same version.
func (s *state) version() string {
	sum := sha256.New()
	fmt.Fprintf(sum, "%d\n", len(s.text))
	sum.Write(s.text)
	for _, o := range s.overrides {
		fmt.Fprintln(sum, o)
	}
	return hex.EncodeToString(sum.Sum(nil)[:8])
}

// Load reads a balancer's configuration file and its overrides. Warnings and errors are those of
// config.LoadBalancer.
func Load(file string) (*Controller, field.Errors, error) {
	c := &Controller{file: file, onChange: func([]desired.Override) {}}
	read, warnings, err := c.read()
	c.state = read
	return c, warnings, err
}

// Desired returns the desired state in force. The caller must not change it.
func (c *Controller) Desired() *desired.Balancer {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.state.desired
}

// Attach makes the controller change a balancer, and report the overrides in force to a function:
// now, and after each change.
func (c *Controller) Attach(runner Runner, onChange func([]desired.Override)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.runner, c.onChange = runner, onChange
	onChange(c.state.desired.Overrides)
}

// read reads both files.
func (c *Controller) read() (s state, warnings field.Errors, err error) {
	if s.text, err = os.ReadFile(c.file); err != nil {
		return s, nil, err
	}
	b, warnings, err := config.ParseBalancer(s.text)
	if err != nil {
		return s, nil, located(err, c.file)
	}
	path := config.OverridesFile(&b.Node)
	if s.stored, err = readIfExists(path); err != nil {
		return s, nil, err
	}
	if s.stored != nil {
		if s.overrides, err = config.ParseOverrides(s.stored); err != nil {
			return s, nil, located(err, path)
		}
	}
	return s, append(warnings.In(c.file), s.follow(b)...), nil
}

// follow makes a desired state without overrides the state's own, with the overrides.
func (s *state) follow(b *desired.Balancer) (warnings field.Errors) {
	s.desired = b
	return b.Override(s.overrides).In(config.OverridesFile(&b.Node))
}

// located adds the file's name to the errors of its content.
func located(err error, file string) error {
	var problems field.Errors
	if errors.As(err, &problems) {
		return problems.In(file)
	}
	return err
}

func readIfExists(path string) ([]byte, error) {
	if path == "" {
		return nil, nil
	}
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return text, err
}

// Reload reads both files again and makes the balancer follow them. If it returns an error, the
// state before stays in force.
func (c *Controller) Reload(ctx context.Context) (warnings field.Errors, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	next, warnings, err := c.read()
	if err != nil {
		return nil, err
	}
	if err := c.runner.Reload(ctx, next.desired); err != nil {
		return nil, err
	}
	c.enforce(next)
	return warnings, nil
}

func (c *Controller) enforce(next state) {
	c.state = next
	c.onChange(next.desired.Overrides)
}

// Overrides returns all overrides, also those without effect, and the version of the desired state.
func (c *Controller) Overrides() (overrides []desired.Override, version string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.state.overrides), c.state.version()
}

var (
	// ErrVersion is wrapped in the error of Change if the version in force is not the expected one.
	ErrVersion = errors.New("the configuration has changed meanwhile")
	// ErrStored is wrapped in the error of Change if somebody else has changed the file of
	// overrides, and the balancer has not read it yet.
	ErrStored = errors.New("was changed, and not reloaded: reload the balancer first")
	// ErrNoServer is wrapped in the error of Change if there is no such server.
	ErrNoServer = errors.New("no such server")
)

// Request is a change of the override of one server.
type Request struct {
	Service, Server string
	// Version is the version in force that the caller expects; empty: any.
	Version string
	// DryRun checks the change and applies nothing.
	DryRun bool
	// Edit changes the override of the server. It gets one without settings if there is none. An
	// override without settings is removed.
	Edit func(o *desired.Override, server *desired.Server)
}

// Result is what a change did, or would do.
type Result struct {
	Version  string          // of the desired state after the change
	Changes  desired.Changes // none: the change has no effect
	Warnings field.Errors    // of the desired state after the change
}

// Change changes the override of a server, and stores it, so that it survives a restart. The error
// wraps ErrVersion, ErrStored or ErrNoServer, is of type field.Errors, or is that of the balancer or
// of writing the file. After an error, the state before stays in force.
func (c *Controller) Change(ctx context.Context, r Request) (*Result, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if r.Version != "" && r.Version != c.state.version() {
		return nil, fmt.Errorf("version %s: %w: it has version %s now", r.Version, ErrVersion, c.state.version())
	}
	next, warnings, err := c.changed(r)
	if err != nil {
		return nil, err
	}
	result := &Result{next.version(), next.desired.ChangesFrom(c.state.desired), warnings}
	if r.DryRun || next.version() == c.state.version() {
		return result, nil
	}
	return result, c.apply(ctx, next)
}

// changed returns the state that a request asks for.
func (c *Controller) changed(r Request) (next state, warnings field.Errors, err error) {
	next = state{text: c.state.text, overrides: slices.Clone(c.state.overrides)}
	base, _, err := config.ParseBalancer(next.text)
	if err != nil {
		return next, nil, located(err, c.file)
	}
	server := base.Server(r.Service, r.Server)
	if server == nil {
		return next, nil, fmt.Errorf("%s/%s: %w", r.Service, r.Server, ErrNoServer)
	}
	at := slices.IndexFunc(next.overrides, func(o desired.Override) bool {
		return o.Service == r.Service && o.Server == r.Server
	})
	if at < 0 {
		at = len(next.overrides)
		next.overrides = append(next.overrides, desired.Override{Service: r.Service, Server: r.Server})
	}
	r.Edit(&next.overrides[at], server)
	if o := next.overrides[at]; o.Drained == nil && o.Weight == nil {
		next.overrides = slices.Delete(next.overrides, at, at+1)
	}
	all := desired.Overrides{Overrides: next.overrides}
	if problems := all.Validate(); len(problems) > 0 {
		return next, nil, problems
	}
	if next.stored, err = yaml.Dump(all); err != nil {
		return next, nil, fmt.Errorf("write the overrides: %w", err)
	}
	return next, next.follow(base), nil
}

// apply makes the balancer follow a state, and stores its overrides. The file is written first,
// under another name: the likeliest failure, a full disk, then changes nothing.
func (c *Controller) apply(ctx context.Context, next state) error {
	path := config.OverridesFile(&next.desired.Node)
	if path == "" {
		return errors.New("the balancer has no directory for its state, so overrides cannot be stored")
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return fmt.Errorf("store the overrides: %w", err)
	}
	now, err := readIfExists(path)
	switch {
	case err != nil:
		return fmt.Errorf("store the overrides: %w", err)
	case !bytes.Equal(now, c.state.stored):
		return fmt.Errorf("%s %w", path, ErrStored)
	}
	pending, err := wholefile.Prepare(path, next.stored, 0o644)
	if err != nil {
		return fmt.Errorf("store the overrides: %w", err)
	}
	if err := c.runner.Reload(ctx, next.desired); err != nil {
		return errors.Join(err, pending.Discard())
	}
	if err := pending.Commit(); err != nil {
		undo := c.runner.Reload(ctx, c.state.desired)
		return errors.Join(fmt.Errorf("store the overrides: %w", err), undo)
	}
	c.enforce(next)
	return nil
}
