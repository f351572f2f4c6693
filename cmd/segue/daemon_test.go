// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"log/slog"
	"os"
	"syscall"
	"testing"

	"github.com/spf13/cobra"
)

// TestHangupWhileStarting waits for the daemon, and does not end the process.
func TestHangupWhileStarting(t *testing.T) {
	cmd := &cobra.Command{}
	cmd.SetContext(t.Context())
	err := runDaemon(cmd, func(_ context.Context, hangups <-chan os.Signal, _ *slog.Logger) error {
		if err := syscall.Kill(os.Getpid(), syscall.SIGHUP); err != nil {
			return err
		}
		<-hangups
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}
