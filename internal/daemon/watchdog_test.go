// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/testhost"
)

// stepping is a service that makes a step when a test says so.
type stepping struct {
	slowService
	steps atomic.Uint64
}

func (s *stepping) Steps() uint64 { return s.steps.Load() }

// manager opens the socket of a service manager. messages returns the messages since the last call.
func manager(t *testing.T) (messages func() []string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "notify")
	t.Setenv("NOTIFY_SOCKET", path)
	socket, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err == nil {
		err = unix.Bind(socket, &unix.SockaddrUnix{Name: path})
	}
	testhost.Must(t, err)
	t.Cleanup(func() { _ = unix.Close(socket) })
	return func() (all []string) {
		text := make([]byte, 64)
		for {
			n, _, err := unix.Recvfrom(socket, text, unix.MSG_DONTWAIT)
			if errors.Is(err, unix.EAGAIN) {
				return all
			}
			testhost.Must(t, err)
			all = append(all, string(text[:n]))
		}
	}
}

// The service manager gets a message for each interval in which the service makes a step, and none
// while the service is stuck.
func TestWatchdog(t *testing.T) {
	messages := manager(t)
	t.Setenv("WATCHDOG_USEC", strconv.Itoa(int((time.Minute).Microseconds())))
	t.Setenv("WATCHDOG_PID", strconv.Itoa(os.Getpid()))
	synctest.Test(t, func(t *testing.T) {
		service := &stepping{slowService: make(slowService)}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- Serve(ctx, service, nil, nil, "", slog.New(slog.DiscardHandler)) }()
		pass := func(what string, d time.Duration, want int) {
			t.Helper()
			time.Sleep(d)
			synctest.Wait()
			alive := 0
			for _, m := range messages() {
				if m == "WATCHDOG=1" {
					alive++
				}
			}
			if alive != want {
				t.Errorf("%s: %d signs of life in %s, want %d", what, alive, d, want)
			}
		}
		service.steps.Add(1)
		pass("before it is ready", time.Minute, 0)
		close(service.slowService)
		for range 5 {
			synctest.Wait()
			service.steps.Add(1)
			pass("works", 15*time.Second, 1)
		}
		pass("is stuck", 2*time.Minute, 0)
		service.steps.Add(1000)
		pass("works again", 15*time.Second, 1)
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

func TestWatchdogInterval(t *testing.T) {
	for _, c := range []struct {
		limit, pid string
		want       time.Duration
	}{
		{"60000000", "", 15 * time.Second}, {"60000000", strconv.Itoa(os.Getpid()), 15 * time.Second},
		{"60000000", "1", 0}, {"", "", 0}, {"none", "", 0}, {"0", "", 0},
	} {
		t.Setenv("WATCHDOG_USEC", c.limit)
		t.Setenv("WATCHDOG_PID", c.pid)
		if got := watchdogInterval(); got != c.want {
			t.Errorf("%q, %q: %s, want %s", c.limit, c.pid, got, c.want)
		}
	}
}
