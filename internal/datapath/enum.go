// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"fmt"
	"strings"

	"github.com/cilium/ebpf/btf"
)

// EnumLabels returns the names of a C enumeration among a program's types, indexed by value. It
// removes the common prefix and converts to lower case: LB_DROP_FRAGMENT of enum lb_reason becomes
// drop_fragment. The values must start at 0 and have no gaps. The last value, the enumeration's
// COUNT, is left out.
func EnumLabels(types *btf.Spec, name, prefix string) ([]string, error) {
	var enum *btf.Enum
	if err := types.TypeByName(name, &enum); err != nil {
		return nil, fmt.Errorf("enum %s: %w", name, err)
	}
	var labels []string
	for i, value := range enum.Values {
		label, ok := strings.CutPrefix(value.Name, prefix)
		if !ok || value.Value != uint64(i) {
			return nil, fmt.Errorf("enum %s: value %d is %s = %d, want %s... = %d",
				name, i, value.Name, value.Value, prefix, i)
		}
		labels = append(labels, strings.ToLower(label))
	}
	count := len(labels) - 1
	if count < 0 || labels[count] != "count" {
		return nil, fmt.Errorf("enum %s: does not end with %sCOUNT", name, prefix)
	}
	return labels[:count], nil
}
