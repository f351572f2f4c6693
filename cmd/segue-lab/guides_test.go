// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"

	"github.com/segue-lb/segue/internal/cli/clitest"
)

// TestCommandsInGuides parses all commands of the documents about the laboratory.
func TestCommandsInGuides(t *testing.T) {
	clitest.Guides(t, newRoot, "../../README.md", "../../docs/research/application.md", "../../docs/research/lab.md",
		"../../docs/research/load.md", "../../docs/research/model.md", "../../docs/understand/performance.md", "../../docs/research/placement.md",
		"../../docs/research/reproduction.md", "../../docs/research/simulator.md", "../../docs/operate/sizing.md", "../../docs/research/testbed.md",
		"../../docs/research/papers.md")
}
