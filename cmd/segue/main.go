// SPDX-License-Identifier: Apache-2.0

// Command segue is a load-aware layer-4 load balancer for Linux.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/version"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := newRoot().ExecuteContext(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "segue:", err)
		os.Exit(1)
	}
}

// newRoot assembles the command tree. Commands write to cmd.OutOrStdout, so that
// tests run them in-process.
func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:           "segue",
		Short:         "Load-aware layer-4 load balancer",
		Version:       version.String(),
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.SetFlagErrorFunc(describeFlagError)
	root.AddCommand(newCheck())
	root.AddCommand(newLB())
	root.AddCommand(newLab())
	root.AddCommand(newAgent())
	root.AddCommand(newStatus())
	root.AddCommand(newTrace())
	root.AddCommand(newBench())
	root.AddCommand(newModel())
	root.AddCommand(newRepro())
	root.AddCommand(newSim())
	root.AddCommand(newVersion())
	return root
}
