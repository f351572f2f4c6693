// SPDX-License-Identifier: Apache-2.0

package cpulimit

import "fmt"

// FindIn returns where a mount table has the hierarchy, and the hierarchy's version.
func FindIn(mounts string) (string, error) {
	h, err := find(mounts)
	version := 1
	if h.v2 {
		version = 2
	}
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%s (%d)", h.root, version), nil
}

// Version2 returns a hierarchy of version 2 that is mounted at root.
func Version2(root string) Hierarchy { return Hierarchy{root: root, v2: true} }
