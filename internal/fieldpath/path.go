// SPDX-License-Identifier: Apache-2.0

package fieldpath

import (
	"strconv"
	"strings"
)

// Child returns the path of a field of the struct at a path.
func Child(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// Item returns the path of an element of the list at a path.
func Item(path string, i int) string {
	return path + "[" + strconv.Itoa(i) + "]"
}

// Parent returns the path of the struct or list that contains a field: a.b for a.b[1], and a for
// a.b.
func Parent(path string) string {
	return path[:max(strings.LastIndexAny(path, ".["), 0)]
}

// IsPlain tells whether a name is made of letters, digits, - and _.
func IsPlain(name string) bool {
	return name != "" && !strings.ContainsFunc(name, func(r rune) bool {
		return !('a' <= r && r <= 'z' || 'A' <= r && r <= 'Z' || '0' <= r && r <= '9' || r == '-' || r == '_')
	})
}
