package daemon

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// Service is a process that works until its context ends.
type Service interface {
	// Run works until the context ends; an error ends it early.
	Run(context.Context) error
	// Ready is closed when the service does its work.
	Ready() <-chan struct{}
}

// CatchHangups delivers SIGHUP from now on, until stop is called; it would end the process otherwise.
func CatchHangups() (hangups <-chan os.Signal, stop func()) {
	caught := make(chan os.Signal, 1) // any number before a reload are one
	signal.Notify(caught, syscall.SIGHUP)
	return caught, func() { signal.Stop(caught) }
}

// Serve runs a service and tells the service manager when it is ready. On each of hangups, also those
// from before it was ready, it calls reload; a reload that fails is logged and changes nothing.
func Serve(ctx context.Context, service Service, reload func(context.Context) error, hangups <-chan os.Signal, log *slog.Logger) error {
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return service.Run(ctx) })
	group.Go(func() error {
		select {
		case <-service.Ready():
		case <-ctx.Done():
			return nil
		}
		if err := Notify("READY=1"); err != nil {
			log.Warn(err.Error())
		}
		for {
			select {
			case <-ctx.Done():
				return nil
			case <-hangups:
				announceReload(func() error { return reload(ctx) }, log)
			}
		}
	})
	return group.Wait()
}

// announceReload reloads between the two messages that sd_notify(3) asks for.
func announceReload(reload func() error, log *slog.Logger) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		log.Warn("read the clock", "error", err)
	}
	if err := Notify(fmt.Sprintf("RELOADING=1\nMONOTONIC_USEC=%d", now.Nano()/1000)); err != nil {
		log.Warn(err.Error())
	}
	if err := reload(); err != nil {
		log.Error("reload failed: the configuration before stays in force", "error", err)
	} else {
		log.Info("reloaded")
	}
	if err := Notify("READY=1"); err != nil {
		log.Warn(err.Error())
	}
}
