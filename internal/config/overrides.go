// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"io/fs"
	"path/filepath"

	"github.com/segue-lb/segue/internal/desired"
)

// OverridesFile returns the path of the file with the overrides of a balancer's instance. It is
// empty if the balancer has no directory for its state.
func OverridesFile(node *desired.BalancerNode) string {
	if node.State == "" {
		return ""
	}
	return filepath.Join(node.State, node.Instance+".overrides.yaml")
}

// LoadOverrides reads the overrides of a balancer's instance. There are none if the file does not
// exist. The error is of type field.Errors, or that of reading the file.
func LoadOverrides(b *desired.Balancer) ([]desired.Override, error) {
	overrides, _, err := readOverrides(b)
	return overrides, err
}

// readOverrides is LoadOverrides, and also returns the content of the file; nil: there is no file.
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

// ParseOverrides is LoadOverrides for a file's content.
func ParseOverrides(data []byte) ([]desired.Override, error) {
	var o desired.Overrides
	err := Decode(data, &o, o.Validate)
	return o.Overrides, err
}
