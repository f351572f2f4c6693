// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
)

// TestNoMemcmp looks for __builtin_memcmp in the BPF programs. clang 14 makes it a call of a function
// that does not exist in BPF. Later versions compile it.
func TestNoMemcmp(t *testing.T) {
	t.Parallel()
	sources := 0
	must(t, filepath.WalkDir("../../bpf", func(file string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		sources++
		text, err := os.ReadFile(file)
		if bytes.Contains(text, []byte("memcmp")) {
			t.Errorf("%s: memcmp; same_address() compares addresses", file)
		}
		return err
	}))
	if sources < 100 {
		t.Errorf("only %d files of the BPF programs were found", sources)
	}
}
