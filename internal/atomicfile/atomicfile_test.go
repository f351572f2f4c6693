// SPDX-License-Identifier: Apache-2.0

package atomicfile

import (
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/segue-lb/segue/internal/testhost"
)

func TestWrite(t *testing.T) {
	directory := t.TempDir()
	path := filepath.Join(directory, "file")
	for _, content := range []string{"first", "second"} {
		testhost.Must(t, Write(path, []byte(content), 0o640))
		text, err := os.ReadFile(path)
		if err != nil || string(text) != content {
			t.Errorf("content %q, error %v; want %q", text, err, content)
		}
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode() != 0o640 {
		t.Errorf("mode %v, error %v; want 0640", info.Mode(), err)
	}
}

// A failure leaves the former file, and no other one.
func TestWriteFails(t *testing.T) {
	directory := t.TempDir()
	path := filepath.Join(directory, "file")
	testhost.Must(t, os.MkdirAll(filepath.Join(path, "not-empty"), 0o755))
	if err := Write(path, []byte("text"), 0o644); err == nil {
		t.Error("replaced a directory")
	}
	if err := Write(filepath.Join(directory, "missing", "file"), nil, 0o644); err == nil {
		t.Error("wrote into a directory that does not exist")
	}
	entries, err := os.ReadDir(directory)
	if err != nil || len(entries) != 1 {
		t.Errorf("left behind: %v, error %v", entries, err)
	}
}

// TestLinksAreNotFollowed writes to a path at which there is a link to another file. The link is
// replaced, and the other file stays.
func TestLinksAreNotFollowed(t *testing.T) {
	directory := t.TempDir()
	victim, path := filepath.Join(directory, "victim"), filepath.Join(directory, "file")
	testhost.Must(t, os.WriteFile(victim, []byte("precious"), 0o600))
	testhost.Must(t, os.Symlink(victim, path))
	testhost.Must(t, Write(path, []byte("new"), 0o644))
	if text, err := os.ReadFile(victim); err != nil || string(text) != "precious" {
		t.Errorf("the other file is %q, error %v", text, err)
	}
	if info, err := os.Lstat(path); err != nil || !info.Mode().IsRegular() {
		t.Errorf("the link is now %v, error %v", info, err)
	}
}

// Temporary files of processes that were killed are removed, and no others.
func TestRemoveLeft(t *testing.T) {
	directory := t.TempDir()
	path := filepath.Join(directory, "file")
	testhost.Must(t, Write(path, []byte("text"), 0o644))
	if _, err := Prepare(path, []byte("lost"), 0o644); err != nil { // the process dies before Commit
		t.Fatal(err)
	}
	stay := []string{".file", ".file.", ".file.5.old", ".file.mine", ".files.5", "file", "file.5"}
	for _, name := range stay {
		testhost.Must(t, os.WriteFile(filepath.Join(directory, name), nil, 0o644))
	}
	testhost.Must(t, os.Mkdir(filepath.Join(directory, ".file.7"), 0o755))
	stay = append(stay, ".file.7")
	for range 2 {
		if err := RemoveLeft(path); err != nil {
			t.Error(err)
		}
	}
	entries, err := os.ReadDir(directory)
	var names []string
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	slices.Sort(stay)
	if !slices.Equal(names, stay) || err != nil {
		t.Errorf("there are %q, error %v; want %q", names, err, stay)
	}
	if err := RemoveLeft(filepath.Join(directory, "missing", "file")); err != nil {
		t.Error(err)
	}
}
