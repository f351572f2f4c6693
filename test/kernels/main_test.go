// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// TestArchive reads an initramfs as the kernel does: names and contents begin at multiples of four.
func TestArchive(t *testing.T) {
	var out bytes.Buffer
	a := &archiver{out: &out}
	a.add("bin", fs.ModeDir|0o755, nil)
	a.add("bin/x", 0o755, []byte("12345"))
	a.add("TRAILER!!!", 0, nil)
	var got []string
	for rest := out.Bytes(); len(rest) > 0; {
		const header = 110
		field := func(number int) int {
			n, err := strconv.ParseInt(string(rest[6+8*number:14+8*number]), 16, 64)
			if err != nil {
				t.Fatal(err)
			}
			return int(n)
		}
		mode, size, name := field(1), field(6), field(11)
		content := (header + name + 3) &^ 3
		got = append(got, strconv.FormatInt(int64(mode), 8)+" "+string(rest[header:header+name-1])+" "+
			string(rest[content:content+size]))
		rest = rest[(content+size+3)&^3:]
	}
	want := []string{"40755 bin ", "100755 bin/x 12345", "100000 TRAILER!!! "}
	if a.err != nil || !slices.Equal(got, want) {
		t.Errorf("error %v, the files are %q, want %q", a.err, got, want)
	}
}

func TestReadModule(t *testing.T) {
	root := t.TempDir()
	dir := filepath.Join(root, "lib/modules/1/kernel/drivers/net")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"veth.ko", "vethernet.ko"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(name), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for module, want := range map[string]string{"veth": "veth.ko", "stp": ""} {
		if got, err := readModule(t.Context(), root, module); err != nil || string(got) != want {
			t.Errorf("%s: %q, error %v, want %q", module, got, err, want)
		}
	}
}

// TestVerdict checks which outputs of a guest count as a success.
func TestVerdict(t *testing.T) {
	for _, c := range []struct{ name, console, want string }{
		{"all passed", "boot\nguest: passed: a\nguest: end", ""},
		{"one failed", "guest: passed: a\nguest: FAILED: b: no\nguest: end", "1 failed: b: no"},
		{"nothing ran", "guest: end", "nothing ran"},
		{"a panic", "guest: passed: a\nKernel panic", "the guest ended early; its output is above"},
	} {
		var r result
		for line := range strings.SplitSeq(c.console, "\n") {
			r.read(line)
		}
		got := ""
		if err := r.verdict(); err != nil {
			got = err.Error()
		}
		if got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
}
