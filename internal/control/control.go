// SPDX-License-Identifier: Apache-2.0

// Package control keeps the desired state of a running balancer: the content of its file, and the
// overrides that operators make while it runs. Each change is a transaction: it is checked, applied
// and stored, or it has no effect at all.
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

// Controller changes the desired state of a balancer. Several goroutines may use it.
type Controller struct {
	file string // of the configuration

	mu      sync.Mutex
	runner  Runner
	inForce *config.BalancerFiles
	// onChange gets the overrides after each change.
	onChange func([]desired.Override)
}

// versionOf identifies a desired state. Equal files and overrides have the same version.
func versionOf(f *config.BalancerFiles) string {
	sum := sha256.New()
	fmt.Fprintf(sum, "%d\n", len(f.Text))
	sum.Write(f.Text)
	for _, o := range f.Overrides {
		fmt.Fprintln(sum, o)
	}
	return hex.EncodeToString(sum.Sum(nil)[:8])
}

// Load reads a balancer's configuration file and its overrides. Warnings and errors are those of
// config.LoadBalancer.
func Load(file string) (*Controller, field.Errors, error) {
	files, warnings, err := config.LoadBalancer(file)
	if err != nil {
		return nil, nil, err
	}
	return &Controller{file: file, inForce: files, onChange: func([]desired.Override) {}}, warnings, nil
}

// Desired returns the desired state in force. The caller must not change it.
func (c *Controller) Desired() *desired.Balancer {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.inForce.Desired
}

// Attach makes the controller change a balancer, and report the overrides in force to a function:
// now, and after each change.
func (c *Controller) Attach(runner Runner, onChange func([]desired.Override)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.runner, c.onChange = runner, onChange
	onChange(c.inForce.Desired.Overrides)
}

// Reload reads both files again and makes the balancer follow them. If it returns an error, the
// state before stays in force.
func (c *Controller) Reload(ctx context.Context) (warnings field.Errors, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	next, warnings, err := config.LoadBalancer(c.file)
	if err != nil {
		return nil, err
	}
	if err := c.runner.Reload(ctx, next.Desired); err != nil {
		return nil, err
	}
	c.enforce(next)
	return warnings, nil
}

func (c *Controller) enforce(next *config.BalancerFiles) {
	c.inForce = next
	c.onChange(next.Desired.Overrides)
}

// Overrides returns all overrides, also those without effect, and the version of the desired state.
func (c *Controller) Overrides() (overrides []desired.Override, version string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.inForce.Overrides), versionOf(c.inForce)
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
	version := versionOf(c.inForce)
	if r.Version != "" && r.Version != version {
		return nil, fmt.Errorf("version %s: %w: it has version %s now", r.Version, ErrVersion, version)
	}
	overrides, err := c.edited(r)
	if err != nil {
		return nil, err
	}
	next, warnings := c.inForce.WithOverrides(overrides)
	result := &Result{versionOf(next), next.Desired.ChangesFrom(c.inForce.Desired), warnings}
	if r.DryRun || result.Version == version {
		return result, nil
	}
	return result, c.apply(ctx, next)
}

// edited returns the overrides that a request asks for.
func (c *Controller) edited(r Request) ([]desired.Override, error) {
	file, _ := c.inForce.WithOverrides(nil)
	server := file.Desired.Server(r.Service, r.Server)
	if server == nil {
		return nil, fmt.Errorf("%s/%s: %w", r.Service, r.Server, ErrNoServer)
	}
	all := desired.Overrides{Overrides: slices.Clone(c.inForce.Overrides)}
	at := slices.IndexFunc(all.Overrides, func(o desired.Override) bool {
		return o.Service == r.Service && o.Server == r.Server
	})
	if at < 0 {
		at = len(all.Overrides)
		all.Overrides = append(all.Overrides, desired.Override{Service: r.Service, Server: r.Server})
	}
	r.Edit(&all.Overrides[at], server)
	if o := all.Overrides[at]; o.Drained == nil && o.Weight == nil {
		all.Overrides = slices.Delete(all.Overrides, at, at+1)
	}
	if problems := all.Validate(); len(problems) > 0 {
		return nil, problems
	}
	return all.Overrides, nil
}

// apply makes the balancer follow other overrides, and stores them. The file is written first, under
// another name: the likeliest failure, a full disk, then changes nothing.
func (c *Controller) apply(ctx context.Context, next *config.BalancerFiles) error {
	pending, err := c.prepare(next)
	if err != nil {
		return err
	}
	if err := c.runner.Reload(ctx, next.Desired); err != nil {
		return errors.Join(err, pending.Discard())
	}
	if err := pending.Commit(); err != nil {
		return errors.Join(fmt.Errorf("store the overrides: %w", err),
			c.runner.Reload(context.WithoutCancel(ctx), c.inForce.Desired))
	}
	c.enforce(next)
	return nil
}

// prepare writes the file of overrides under another name.
func (c *Controller) prepare(next *config.BalancerFiles) (*wholefile.Pending, error) {
	path := config.OverridesFile(&next.Desired.Node)
	if path == "" {
		return nil, errors.New("the balancer has no directory for its state, so overrides cannot be stored")
	}
	text, err := yaml.Dump(desired.Overrides{Overrides: next.Overrides})
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
		return nil, fmt.Errorf("%s %w", path, ErrStored)
	}
	next.Stored = text
	pending, err := wholefile.Prepare(path, text, 0o644)
	if err != nil {
		return nil, fmt.Errorf("store the overrides: %w", err)
	}
	return pending, nil
}
