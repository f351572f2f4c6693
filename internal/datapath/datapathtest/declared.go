// SPDX-License-Identifier: Apache-2.0

package datapathtest

import (
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/google/go-cmp/cmp"
)

// AreDeclared reports an error unless each map of a data path has one declaration. The maps that the
// compiler makes for variables have none.
func AreDeclared(t testing.TB, spec *ebpf.CollectionSpec, declared []string) {
	t.Helper()
	var want []string
	for name := range spec.Maps {
		if !strings.HasPrefix(name, ".") {
			want = append(want, name)
		}
	}
	slices.Sort(want)
	slices.Sort(declared)
	if diff := cmp.Diff(want, declared); diff != "" {
		t.Errorf("declared maps (-want +got):\n%s", diff)
	}
}
