// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"strings"
	"syscall"
	"testing"
)

// slowService is ready when the channel is closed.
type slowService chan struct{}

func (s slowService) Ready() <-chan struct{} { return s }

func (slowService) Steps() uint64 { return 0 }

func (s slowService) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

// TestEarlyHangupReloads sends a SIGHUP before the service is ready.
func TestEarlyHangupReloads(t *testing.T) {
	hangups := make(chan os.Signal, 1)
	hangups <- syscall.SIGHUP
	ctx, cancel := context.WithCancel(t.Context())
	service := make(slowService)
	ready := false
	reload := func(context.Context) error {
		if !ready {
			t.Error("reloaded before it was ready")
		}
		cancel()
		return nil
	}
	ended := make(chan error)
	go func() { ended <- Serve(ctx, service, reload, hangups, "", slog.New(slog.DiscardHandler)) }()
	ready = true
	close(service)
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// TestStopSaysWhyAndWhatStays ends services that work, and services that are not ready yet.
func TestStopSaysWhyAndWhatStays(t *testing.T) {
	const detach = "segue lb detach lb"
	for _, c := range []struct {
		ready  bool
		detach string
		want   string
	}{
		{true, detach, `"stopping; the data path stays attached and keeps working" reason="a signal" remove="segue lb detach lb"`},
		{true, "", `"stopping; the data path ends with the process" reason="a signal"`},
		{false, detach, `"stopping before the data path was attached; the data path of an earlier process stays" reason="a signal"`},
		{false, "", `"stopping before the data path was attached" reason="a signal"`},
	} {
		ctx, cancel := context.WithCancelCause(t.Context())
		service := make(slowService)
		if c.ready {
			close(service)
		}
		cancel(errors.New("a signal"))
		var log bytes.Buffer
		if err := Serve(ctx, service, nil, nil, c.detach, slog.New(slog.NewTextHandler(&log, nil))); err != nil {
			t.Error(err)
		}
		if !strings.HasSuffix(log.String(), "msg="+c.want+"\n") || strings.Count(log.String(), "\n") != 1 {
			t.Errorf("ready %t, detach %q: logged %q, want %s", c.ready, c.detach, log.String(), c.want)
		}
	}
}

// failingService ends by itself.
type failingService struct{ slowService }

func (failingService) Run(context.Context) error { return errors.New("broken") }

// TestServiceThatFails checks that Serve does not say that the data path stays attached, because
// the error may be about the data path.
func TestServiceThatFails(t *testing.T) {
	var log bytes.Buffer
	err := Serve(t.Context(), failingService{make(slowService)}, nil, nil, "", slog.New(slog.NewTextHandler(&log, nil)))
	if err == nil || err.Error() != "broken" || log.Len() > 0 {
		t.Errorf("error %v, logged %q", err, log.String())
	}
}
