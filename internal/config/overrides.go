// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"io/fs"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/fieldpath"
)

// readOverrides reads a file of overrides, and returns the overrides and the content of the file.
// If there is no file, both are nil. The error is of type fieldpath.Errors, or that of reading the
// file.
func readOverrides(path string) (overrides []desired.Override, text []byte, err error) {
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

// ParseOverrides reads the content of a file of overrides. The error is of type fieldpath.Errors.
func ParseOverrides(data []byte) ([]desired.Override, error) {
	var o desired.Overrides
	d := decode(data, &o)
	if d.check(o.Validate); len(d.problems) > 0 {
		return nil, d.problems.OrNil()
	}
	for i := range o.Overrides {
		o.Overrides[i].Line = d.fields[fieldpath.Item("overrides", i)].line
	}
	return o.Overrides, nil
}
