// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/sync/errgroup"

	"github.com/segue-lb/segue/internal/bpfclock"
)

// Service is a process that works until its context ends.
type Service interface {
	// Run works until the context ends. It returns earlier only if there is an error.
	Run(context.Context) error
	// Ready returns a channel that is closed when the service does its work.
	Ready() <-chan struct{}
	// Steps returns how many steps the service has made. Once the service is ready, the number grows
	// at least every ten seconds, unless the service is stuck.
	Steps() uint64
}

// CatchHangups delivers SIGHUP to the channel until stop is called. Otherwise, SIGHUP would end the
// process.
func CatchHangups() (hangups <-chan os.Signal, stop func()) {
	caught := make(chan os.Signal, 1) // several signals before a reload count as one
	signal.Notify(caught, syscall.SIGHUP)
	return caught, func() { signal.Stop(caught) }
}

// Serve runs a service until the context ends, and tells the service manager when the service is
// ready. From then on, Serve calls reload for each value from hangups. A value that came earlier
// waits until then. If reload fails, it must have changed nothing; Serve logs the error.
//
// When the context ends, Serve logs the cause and the command that detaches the data path.
// detachCommand is empty if the data path ends with the process.
func Serve(ctx context.Context, service Service, reload func(context.Context) error, hangups <-chan os.Signal,
	detachCommand string, log *slog.Logger) error {
	group, running := errgroup.WithContext(ctx)
	group.Go(func() error { return service.Run(running) })
	group.Go(func() error {
		select {
		case <-service.Ready():
			feedWatchdog(running, service, watchdogInterval(), log)
		case <-running.Done():
		}
		return nil
	})
	group.Go(func() error {
		reloadOnHangups(running, service, reload, hangups, log)
		if ctx.Err() != nil { // otherwise the service has failed, and its error says more
			announceStop(service, context.Cause(ctx), detachCommand, log)
		}
		return nil
	})
	return group.Wait()
}

// reloadOnHangups tells the service manager when the service is ready, and then reloads for each
// value from hangups, until the context ends.
func reloadOnHangups(
	ctx context.Context, service Service, reload func(context.Context) error,
	hangups <-chan os.Signal, log *slog.Logger,
) {
	select {
	case <-service.Ready():
	case <-ctx.Done():
		return
	}
	if err := Notify("READY=1"); err != nil {
		log.Warn("cannot notify the service manager", "error", err)
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-hangups:
			announceReload(func() error { return reload(ctx) }, log)
		}
	}
}

// announceStop logs why the process stops, and what becomes of the data path.
func announceStop(service Service, reason error, detachCommand string, log *slog.Logger) {
	isReady := false
	select {
	case <-service.Ready():
		isReady = true
	default:
	}
	switch {
	case isReady && detachCommand == "":
		log.Info("stopping; the data path ends with the process", "reason", reason)
	case isReady:
		log.Info("stopping; the data path stays attached and keeps working", "reason", reason,
			"remove", detachCommand)
	case detachCommand == "": // the data path of an earlier process has ended with that process
		log.Info("stopping before the data path was attached", "reason", reason)
	default:
		log.Info("stopping before the data path was attached; the data path of an earlier process stays",
			"reason", reason)
	}
}

// announceReload reloads between the two notifications that sd_notify(3) requires.
func announceReload(reload func() error, log *slog.Logger) {
	now, err := bpfclock.Monotonic()
	if err != nil {
		log.Warn("read the clock", "error", err)
	}
	if err := Notify(fmt.Sprintf("RELOADING=1\nMONOTONIC_USEC=%d", now.Microseconds())); err != nil {
		log.Warn("cannot notify the service manager", "error", err)
	}
	if err := reload(); err != nil {
		log.Error("reload failed; the earlier configuration stays in force", "error", err)
	}
	if err := Notify("READY=1"); err != nil {
		log.Warn("cannot notify the service manager", "error", err)
	}
}
