// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"fmt"
	"os"
	"path"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/desired"
)

// TestMethods checks that the tables of methods in docs/understand/architecture.md are those that
// follow from package desired. With -update it writes them.
func TestMethods(t *testing.T) {
	const name = "docs/understand/architecture.md"
	text := read(t, name)
	want := text
	for section, table := range map[string]string{
		"| placement | a new flow goes to |":          placementTable(),
		"| persistence | how later packets find the ": persistenceTable(),
	} {
		start := strings.Index(want, section)
		if start < 0 {
			t.Fatalf("%s has no table that begins with %q", name, section)
		}
		end := start + strings.Index(want[start:], "\n\n") + 1
		want = want[:start] + table + want[end:]
	}
	switch {
	case want == text:
	case *update:
		if err := os.WriteFile(path.Join(root, name), []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
	default:
		t.Errorf("the tables of methods in %s differ from internal/desired/methods.go; run "+
			"go test ./test/docs -update", name)
	}
}

func placementTable() string {
	var b strings.Builder
	b.WriteString("| placement | a new flow goes to | who decides | variants |\n|---|---|---|---|\n")
	for _, m := range desired.PlacementMethods {
		decides, variants := "balancer", ""
		switch {
		case m.ServersDecide:
			decides, variants = "servers", "`selection`: "+list(m.Selections)
		case m.Infers():
			variants = "`infer.among`: " + list(m.Amongs)
		}
		fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", m.Name, m.Summary, decides, variants)
	}
	return b.String()
}

func persistenceTable() string {
	var b strings.Builder
	b.WriteString("| persistence | how later packets find the server |\n|---|---|\n")
	for _, m := range desired.PersistenceMethods {
		fmt.Fprintf(&b, "| `%s` | %s |\n", m.Name, m.Summary)
	}
	return b.String()
}

// list returns names as code, with commas.
func list[N ~string](names []N) string {
	quoted := make([]string, len(names))
	for i, name := range names {
		quoted[i] = "`" + string(name) + "`"
	}
	return strings.Join(quoted, ", ")
}

// TestNamesHaveMethods checks that each name in a placement's method has a method of its own.
func TestNamesHaveMethods(t *testing.T) {
	for _, m := range desired.PlacementMethods {
		for _, among := range m.Amongs {
			if among.Method().Name != among {
				t.Errorf("placement %s: the set of servers %q has no method", m.Name, among)
			}
		}
		for _, estimator := range m.Estimators {
			if estimator.Method().Name != estimator {
				t.Errorf("placement %s: the estimator %q has no method", m.Name, estimator)
			}
		}
	}
}

// TestConfigurationListsMethods checks that the reference of the configuration names each method.
func TestConfigurationListsMethods(t *testing.T) {
	var placements []desired.Placement
	for _, m := range desired.PlacementMethods {
		placements = append(placements, m.Name)
	}
	var persistences []desired.Persistence
	for _, m := range desired.PersistenceMethods {
		persistences = append(persistences, m.Name)
	}
	text := strings.Join(strings.Fields(read(t, "docs/reference/configuration.md")), " ")
	for field, names := range map[string]string{
		"placement": list(placements), "persistence": list(persistences),
	} {
		if start := fmt.Sprintf("#### `services[].%s` %s. ", field, names); !strings.Contains(text, start) {
			t.Errorf("docs/reference/configuration.md does not have: %s", start)
		}
	}
}
