// SPDX-License-Identifier: Apache-2.0

package modules

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/segue-lb/segue/internal/testhost"
)

// each runs a test with each kind of server.
func each(t *testing.T, test func(*testing.T, kind)) {
	for _, k := range kinds {
		t.Run(k.name, func(t *testing.T) {
			t.Parallel()
			test(t, k)
		})
	}
}

// The load is the number of requests in progress, also after many short ones, and after requests
// that clients have abandoned. When the server ends, no process reports.
func TestBusyRequests(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, k kind) {
		s := start(t, k, nil)
		s.idle()
		s.wait(5)
		s.idle()
		var clients sync.WaitGroup
		for range 8 {
			clients.Go(func() {
				for range 50 {
					if err := s.get("/"); err != nil {
						t.Error(err)
					}
				}
			})
		}
		clients.Wait()
		s.idle()

		ctx, abandon := context.WithCancel(context.Background())
		for range 3 {
			clients.Go(func() { _ = s.getUntil(ctx, "/wait") })
		}
		s.expect(3, capacity)
		abandon()
		clients.Wait()
		if k.name != "nginx" { // Apache does not notice before it sends the response
			for range 3 {
				s.release <- struct{}{}
			}
		}
		s.idle()
		s.stop()
		s.expect(0, 0)
	})
}

// A killed worker does not count, and its successor does. The capacity stays.
func TestKilledWorker(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, k kind) {
		s := start(t, k, nil)
		s.idle()
		for range 3 {
			ctx, abandon := context.WithCancel(context.Background())
			var clients sync.WaitGroup
			for range 4 {
				clients.Go(func() { _ = s.getUntil(ctx, "/wait") })
			}
			s.expect(4, capacity)
			for _, pid := range s.workers() {
				testhost.Must(t, syscall.Kill(pid, syscall.SIGKILL))
			}
			abandon()
			clients.Wait()
			testhost.Eventually(t, func() error { return s.get("/") })
			s.idle()
			s.wait(2)
			s.idle()
		}
	})
}

// Requests count while the configuration is read again, by former workers and by new ones.
func TestReload(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, k kind) {
		s := start(t, k, nil)
		finish := s.waitBeside(0, 3)
		for range 3 {
			s.reload()
			s.expect(3, capacity)
		}
		s.newClient()
		newer := s.waitBeside(3, 2)
		go func() { // releases requests of both, in any order
			for range 5 {
				s.release <- struct{}{}
			}
		}()
		testhost.Must(t, errors.Join(finish(), newer()))
		s.idle()
	})
}

// Each stream of HTTP/2 counts while it is in progress, and none counts after that, although its
// connection stays.
func TestHTTP2(t *testing.T) {
	t.Parallel()
	for _, k := range kinds {
		if k.name == "prefork" {
			continue // Apache does not support HTTP/2 with it
		}
		t.Run(k.name, func(t *testing.T) {
			t.Parallel()
			s := start(t, k, func(s *settings) { s.HTTP2 = true })
			s.wait(5)
			s.expect(0, capacity)
			for range 100 {
				var streams sync.WaitGroup
				for range 6 {
					streams.Go(func() {
						if err := s.get("/"); err != nil {
							t.Error(err)
						}
					})
				}
				streams.Wait()
				s.expect(0, capacity)
			}
		})
	}
}

// Without a capacity in the configuration, it is that of the server. The load may be in a file.
func TestDefaults(t *testing.T) {
	t.Parallel()
	want := map[string]int{"prefork": 16, "worker": 64, "event": 64}
	each(t, func(t *testing.T, k kind) {
		s := start(t, k, func(s *settings) {
			s.Capacity, s.Load = 0, filepath.Join(t.TempDir(), "load")
		})
		s.Capacity = want[k.name]
		if k.name == "nginx" {
			s.Capacity = processors(t)
		}
		s.wait(2)
		s.idle()
	})
}

// processors returns the number of the machine's processors, as nginx counts them.
func processors(t *testing.T) int {
	online, err := filepath.Glob("/sys/devices/system/cpu/cpu[0-9]*")
	testhost.Must(t, err)
	return len(online)
}

// A server that cannot report its load works, and says why it does not report.
func TestWithoutAMap(t *testing.T) {
	t.Parallel()
	each(t, func(t *testing.T, k kind) {
		s := start(t, k, func(s *settings) { s.Load = filepath.Join(t.TempDir(), "none", "load") })
		log, err := os.ReadFile(filepath.Join(s.Dir, "error.log"))
		testhost.Must(t, err)
		requireText(t, string(log), "cannot report the load", "No such file or directory")
	})
}

// A request that nginx redirects inside counts once.
func TestRedirect(t *testing.T) {
	t.Parallel()
	s := start(t, kind{name: "nginx"}, nil)
	for range 10 {
		testhost.Must(t, s.get("/elsewhere"))
	}
	s.idle()
}

func requireText(t *testing.T, text string, wanted ...string) {
	t.Helper()
	for _, want := range wanted {
		if !strings.Contains(text, want) {
			t.Errorf("%q does not contain %q", text, want)
		}
	}
}
