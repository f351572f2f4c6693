// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"strings"
	"testing"

	"github.com/cilium/ebpf/btf"
	"github.com/google/go-cmp/cmp"
)

// specOf returns types with one enumeration.
func specOf(t *testing.T, values ...btf.EnumValue) *btf.Spec {
	t.Helper()
	builder, err := btf.NewBuilder([]btf.Type{&btf.Enum{Name: "reason", Size: 4, Values: values}}, nil)
	must(t, err)
	raw, err := builder.Marshal(nil, nil)
	must(t, err)
	types, err := btf.LoadSpecFromReader(strings.NewReader(string(raw)))
	must(t, err)
	return types
}

func TestEnumLabels(t *testing.T) {
	value := func(name string, v uint64) btf.EnumValue { return btf.EnumValue{Name: name, Value: v} }
	for _, c := range []struct {
		name   string
		values []btf.EnumValue
		want   []string
		err    string
	}{
		{"all", []btf.EnumValue{value("REASON_NONE", 0), value("REASON_DROP_SRH", 1), value("REASON_COUNT", 2)},
			[]string{"none", "drop_srh"}, ""},
		{"gap", []btf.EnumValue{value("REASON_NONE", 0), value("REASON_COUNT", 2)}, nil, "value 1 is REASON_COUNT = 2"},
		{"prefix", []btf.EnumValue{value("NONE", 0), value("REASON_COUNT", 1)}, nil, "value 0 is NONE = 0"},
		{"no count", []btf.EnumValue{value("REASON_NONE", 0)}, nil, "does not end with REASON_COUNT"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := EnumLabels(specOf(t, c.values...), "reason", "REASON_")
			if c.err != "" {
				if err == nil || !strings.Contains(err.Error(), c.err) {
					t.Errorf("error %v, want %q", err, c.err)
				}
				return
			}
			must(t, err)
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("labels (-want +got):\n%s", diff)
			}
		})
	}
	if _, err := EnumLabels(specOf(t, value("REASON_COUNT", 0)), "verdict", "VERDICT_"); err == nil {
		t.Error("an enumeration that is not there: no error")
	}
}
