// SPDX-License-Identifier: Apache-2.0

// Command segue-lab tries and measures Segue: a data centre in network namespaces, load,
// benchmarks, and the simulator and the models that reproduce the research.
package main

import (
	"github.com/spf13/cobra"

	"github.com/segue-lb/segue/internal/cli"
)

// programName is the name of the program.
const programName = "segue-lab"

func main() { cli.Main(newRoot()) }

// newRoot assembles the command tree.
func newRoot() *cobra.Command {
	root := cli.NewRoot(programName, "Laboratory of the load balancer Segue")
	cli.AddGroup(root, "lab", "Try and measure on this machine:",
		newLab(), newApp(), newLoad(), newBench())
	cli.AddGroup(root, "research", "Simulate and compute:", newSim(), newModel(), newRepro())
	cli.Complete(root)
	return root
}
