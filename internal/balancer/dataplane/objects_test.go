// SPDX-License-Identifier: Apache-2.0

package dataplane

import (
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/datapath/datapathtest"
	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/testhost"
)

// Both sides share all tables, except those that the compiler makes for variables.
func TestSidesShareTables(t *testing.T) {
	t.Parallel()
	spec, _, err := LoadSpec()
	testhost.Must(t, err)
	shared := new(Objects).Shared()
	for name := range spec.Maps {
		if _, ok := shared[name]; ok == strings.HasPrefix(name, ".") {
			t.Errorf("table %s is shared: %v", name, ok)
		}
	}
}

func TestEachTableIsDeclared(t *testing.T) {
	t.Parallel()
	spec, _, err := LoadSpec()
	testhost.Must(t, err)
	datapathtest.AreDeclared(t, spec, declare(desired.Limits{}).Names(datapath.Private, datapath.Renewed, datapath.Kept, datapath.Expendable))
}
