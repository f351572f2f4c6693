// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"

	"github.com/segue-lb/segue/internal/cli/clitest"
)

// TestCommandsInGuides parses all commands of the documents about the laboratory.
func TestCommandsInGuides(t *testing.T) {
	clitest.Guides(t, newRoot, "../../README.md", "../../docs/application.md", "../../docs/lab.md",
		"../../docs/load.md", "../../docs/model.md", "../../docs/performance.md", "../../docs/placement.md",
		"../../docs/reproduction.md", "../../docs/simulator.md", "../../docs/sizing.md", "../../docs/testbed.md")
}
