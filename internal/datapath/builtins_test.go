// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

// TestNoMemcmp looks for __builtin_memcmp in the BPF programs. clang 14 makes it a call of a function
// that does not exist in BPF. Later versions compile it.
func TestNoMemcmp(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("../../bpf/*/*.[ch]")
	if err != nil || len(files) == 0 {
		t.Fatal("no BPF programs:", err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		must(t, err)
		if bytes.Contains(text, []byte("memcmp")) {
			t.Errorf("%s: memcmp; same_address() compares addresses", file)
		}
	}
}
