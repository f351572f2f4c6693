// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestPinsOfAnotherUser checks directories that another user has made in the place of the pins, or
// may write to.
func TestPinsOfAnotherUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to give directories away")
	}
	for _, c := range []struct {
		name    string
		prepare func(dir string) error
		problem string
	}{
		{"own", func(dir string) error { return os.Mkdir(dir, 0o700) }, ""},
		{"readable", func(dir string) error { return os.Mkdir(dir, 0o755) }, ""},
		{"another user's", func(dir string) error {
			if err := os.Mkdir(dir, 0o700); err != nil {
				return err
			}
			return os.Chown(dir, 1000, 0)
		}, "belongs to user 1000 and has mode 0700"},
		{"writable", func(dir string) error {
			if err := os.Mkdir(dir, 0o700); err != nil {
				return err
			}
			return os.Chmod(dir, 0o770)
		}, "belongs to user 0 and has mode 0770"},
		{"link", func(dir string) error { return os.Symlink("/root", dir) }, "remove it"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "segue")
			if err := c.prepare(dir); err != nil {
				t.Fatal(err)
			}
			err := checkOwner(dir)
			if (err != nil) != (c.problem != "") || err != nil && !strings.Contains(err.Error(), c.problem) {
				t.Errorf("error %v, want %q", err, c.problem)
			}
		})
	}
}
