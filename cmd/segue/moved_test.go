// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/cli/clitest"
	"github.com/segue-lb/segue/internal/testhost"
)

// TestMovedCommands checks that the commands that have moved to segue-lab say so.
func TestMovedCommands(t *testing.T) {
	const moved = "this command has moved to the program segue-lab, of the package segue-lab; write: segue-lab "
	clitest.ArgumentErrors(t, newRoot, map[string]string{
		"lab":                            "lab: " + moved + "lab",
		"lab up -f x --name y":           "lab: " + moved + "lab",
		"load --rate 1 http://x/ --help": "load: " + moved + "load",
		"bench --against x":              "bench: " + moved + "bench",
		"app":                            "app: " + moved + "app",
		"sim x.yaml":                     "sim: " + moved + "sim",
		"model servers":                  "model: " + moved + "model",
		"repro --quick":                  "repro: " + moved + "repro",
	})
	if help, err := runSegue(t.Context(), "help", "lab"); err != nil || !strings.Contains(help, moved+"lab\n") {
		t.Errorf("help lab: %v\n%s", err, help)
	}
}

// TestProductHasNoLaboratory checks that the product does not depend on the laboratory.
func TestProductHasNoLaboratory(t *testing.T) {
	own := 0
	for _, name := range dependencies(t, ".") {
		folder, is := strings.CutPrefix(name, "github.com/segue-lb/segue/")
		if !is {
			continue
		}
		own++
		product := []string{"cmd/segue", "loadshm", "p4", "quiclb"}
		if !strings.HasPrefix(folder, "internal/") && !slices.Contains(product, folder) {
			t.Errorf("the product contains %s", folder)
		}
	}
	if own < 20 {
		t.Errorf("only %d packages were found", own)
	}
}

// TestDataPathsReadNoFiles checks that the data paths depend on plain types, and not on YAML files.
func TestDataPathsReadNoFiles(t *testing.T) {
	for _, folder := range []string{"balancer", "agent", "datapath", "health", "bgp", "store"} {
		for _, name := range dependencies(t, "../../internal/"+folder) {
			if name == "github.com/segue-lb/segue/internal/config" {
				t.Errorf("internal/%s depends on %s", folder, name)
			}
		}
	}
}

// dependencies returns the names of a package and of all packages that it needs.
func dependencies(t *testing.T, folder string) []string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", folder).Output()
	testhost.Must(t, err)
	return strings.Fields(string(out))
}
