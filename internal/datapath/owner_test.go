// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
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
			return os.Chown(dir, 54321, 0)
		}, "belongs to the user 54321, who could replace the tables, and this process runs as root: start the process " +
			"as 54321 (the package's unit does: systemctl start segue-agent), or"},
		{"another user's, and writable", func(dir string) error {
			if err := os.Mkdir(dir, 0o700); err != nil {
				return err
			}
			return errors.Join(os.Chmod(dir, 0o777), os.Chown(dir, 54321, 0))
		}, "belongs to the user 54321 and has mode 0777: other users could replace the tables; remove it"},
		{"writable", func(dir string) error {
			if err := os.Mkdir(dir, 0o700); err != nil {
				return err
			}
			return os.Chmod(dir, 0o770)
		}, "belongs to the user root and has mode 0770"},
		{"link", func(dir string) error { return os.Symlink("/root", dir) }, "remove it"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "segue")
			must(t, c.prepare(dir))
			err := checkOwner(dir, RoleAgent)
			if (err != nil) != (c.problem != "") || err != nil && !strings.Contains(err.Error(), c.problem) {
				t.Errorf("error %v, want %q", err, c.problem)
			}
		})
	}
}
