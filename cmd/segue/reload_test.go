// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/segue-lb/segue/internal/api"
	"github.com/segue-lb/segue/internal/control"
	"github.com/segue-lb/segue/internal/events"
	"github.com/segue-lb/segue/internal/fieldpath"
	"github.com/segue-lb/segue/internal/rundir"
	"github.com/segue-lb/segue/internal/testhost"
)

// TestReload reloads the process of the test, which takes the place of a balancer.
func TestReload(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can write below /run/segue")
	}
	instance := fmt.Sprintf("test-%d-reload", os.Getpid())
	dir := t.TempDir()
	file := filepath.Join(dir, "lb.yaml")
	write := func(name, seed string) {
		t.Helper()
		content := fmt.Sprintf(`node: {instance: %s, state: %q, interface: eth0, seed: %s}
services:
- name: web
  vip: 198.51.100.1
  port: 80
  protocol: tcp
  encapsulation: ipip
  servers: [{name: s1, address: 192.0.2.1}]
`, instance, dir, seed)
		content = strings.Replace(content, "seed:", "addresses: [192.0.2.9], seed:", 1)
		testhost.Must(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644))
	}
	write("lb.yaml", "1")
	run := func(name string, more ...string) (string, error) {
		args := append([]string{"reload", "-c", filepath.Join(dir, name)}, more...)
		return runSegue(t.Context(), args...)
	}
	refuse := func(name, why string, more ...string) {
		t.Helper()
		if out, err := run(name, more...); err == nil || !strings.Contains(out+err.Error(), why) {
			t.Errorf("%s: error %v, output %q; want %q", name, err, out, why)
		}
	}
	refuse("lb.yaml", "no process runs the instance")

	lock, err := rundir.Lock(instance)
	testhost.Must(t, err)
	controller, _, err := control.LoadBalancer(file)
	testhost.Must(t, err)
	log := slog.New(slog.DiscardHandler)
	recorder := rundir.NewRecorder(lock, "balancer", file, controller.Desired().Fixed(), log)
	var problem atomic.Pointer[string]
	var reloads atomic.Int32
	reload := func(context.Context) (fieldpath.Errors, error) {
		reloads.Add(1)
		if text := problem.Load(); text != nil {
			return nil, errors.New(*text)
		}
		return nil, nil
	}
	socket, err := api.Listen(instance, "", log)
	testhost.Must(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	handler := api.Balancer{Control: controller, Reload: reload, Events: events.NewStream()}.Handler()
	go func() { ended <- socket.Run(ctx, handler) }()
	defer func() {
		cancel()
		if err := errors.Join(<-ended, recorder.Close(), rundir.Unlock(lock)); err != nil {
			t.Error(err)
		}
	}()

	if out, err := run("lb.yaml"); err != nil || !strings.HasSuffix(out, "has reloaded its configuration\n") || reloads.Load() != 1 {
		t.Errorf("output %q, error %v, %d reloads", out, err, reloads.Load())
	}
	refusal := "the kernel refuses\nthe second line"
	problem.Store(&refusal)
	refuse("lb.yaml", "the kernel refuses\nthe second line")
	if reloads.Load() != 2 {
		t.Errorf("%d reloads, want 2", reloads.Load())
	}
	problem.Store(nil)

	// In these cases the command fails before it sends a request to the process.
	write("seed.yaml", "2")
	refuse("seed.yaml", "node.seed: a change needs a restart")
	write("other.yaml", "1")
	refuse("other.yaml", fmt.Sprintf("runs with %s, not with ", file))
	write("invalid.yaml", "-1")
	refuse("invalid.yaml", "node.seed")
	refuse("lb.yaml", "not by both", "--instance", instance)
	if reloads.Load() != 2 {
		t.Errorf("%d reloads, want 2", reloads.Load())
	}
}
