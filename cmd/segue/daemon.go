// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"

	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/daemon"
	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/field"
	"github.com/segue-lb/segue/internal/runstate"
)

// runDaemon is the body of the commands that run in the foreground. It catches SIGHUP first,
// because a SIGHUP during the start would end the process.
func runDaemon(cmd *cobra.Command, run func(ctx context.Context, hangups <-chan os.Signal, log *slog.Logger) error) error {
	hangups, stop := daemon.CatchHangups()
	defer stop()
	log := slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), nil))
	if datapath.HidesPins() {
		log.Warn("/sys/fs/bpf is private to this process, as under ip netns exec: the data path ends with " +
			"the process, and segue status cannot see it; use nsenter --net= instead")
	}
	return run(cmd.Context(), hangups, log)
}

// lockInstance is runstate.Lock for a process that will run the instance.
func lockInstance(name string) (*os.File, error) {
	lock, err := runstate.Lock(name)
	if errors.Is(err, runstate.ErrRunning) {
		err = fmt.Errorf("%w; another instance on this host needs another node.instance", err)
	}
	return lock, err
}

// logWarnings logs the warnings about a configuration.
func logWarnings(log *slog.Logger, warnings field.Errors) {
	for _, warning := range warnings {
		log.Warn("configuration", "warning", warning)
	}
}
