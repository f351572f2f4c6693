package daemon

import (
	"context"
	"log/slog"
	"os"
	"syscall"
	"testing"
)

// slowService is ready when the channel is closed.
type slowService chan struct{}

func (s slowService) Ready() <-chan struct{} { return s }

func (s slowService) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

// TestEarlyHangupReloads has a SIGHUP from before the service is ready.
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
	go func() { ended <- Serve(ctx, service, reload, hangups, slog.New(slog.DiscardHandler)) }()
	ready = true
	close(service)
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
