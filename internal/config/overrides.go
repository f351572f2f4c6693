// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"io/fs"
	"path/filepath"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/field"
)

// OverridesFile returns the path of the file with the overrides of a balancer's instance. It is
// empty if the balancer has no directory for its state.
func OverridesFile(node *desired.BalancerNode) string {
	if node.State == "" {
		return ""
	}
	return filepath.Join(node.State, node.Instance+".overrides.yaml")
}

// readOverrides reads the overrides of a balancer's instance, and returns them with the content of
// their file; nil: there is no file. The error is of type field.Errors, or that of reading the file.
func readOverrides(b *desired.Balancer) (overrides []desired.Override, text []byte, err error) {
	path := OverridesFile(&b.Node)
	if path == "" {
		return nil, nil, nil
	}
	overrides, err = Load(path, func(data []byte) ([]desired.Override, error) {
		text = data
		return ParseOverrides(data)
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil, nil
	}
	return overrides, text, err
}

// ParseOverrides reads the content of a file of overrides. The error is of type field.Errors.
func ParseOverrides(data []byte) ([]desired.Override, error) {
	var o desired.Overrides
	d := decode(data, &o)
	if d.check(o.Validate); len(d.problems) > 0 {
		return nil, d.problems.OrNil()
	}
	for i := range o.Overrides {
		o.Overrides[i].Line = d.fields[field.Item("overrides", i)].line
	}
	return o.Overrides, nil
}
