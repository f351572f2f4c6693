// SPDX-License-Identifier: Apache-2.0

// Command segue is a load-aware layer-4 load balancer for Linux.
package main

import (
	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/cli"
)

func main() { cli.Main(newRoot()) }

// newRoot assembles the command tree.
func newRoot() *cobra.Command {
	root := cli.NewRoot("segue", "Load-aware layer-4 load balancer")
	cli.AddGroup(root, "run", "Run a balancer or an agent:", newLB(), newAgent(), newCheck())
	cli.AddGroup(root, "change", "Change a running balancer or agent:", newDrain(), newUndrain(), newServer(), newService(),
		newDiff(), newApply(), newReload(), newStore())
	cli.AddGroup(root, "observe", "Observe a balancer or an agent:", newStatus(), newTrace(), newEvents())
	root.AddCommand(newMoved()...)
	cli.Complete(root)
	return root
}
