// SPDX-License-Identifier: Apache-2.0

package config

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/fieldpath"
	"github.com/segue-lb/segue/internal/testhost"
)

func TestReadSignalKeys(t *testing.T) {
	const first, second = "000102030405060708090a0b0c0d0e0f", "FFfeFDfcfbfaf9f8f7f6f5f4f3f2f1f0"
	firstKey := desired.SignalKey{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
	secondKey := desired.SignalKey{0xff, 0xfe, 0xfd, 0xfc, 0xfb, 0xfa, 0xf9, 0xf8, 0xf7, 0xf6, 0xf5, 0xf4, 0xf3, 0xf2, 0xf1, 0xf0}
	const (
		form     = "must hold one or two keys and nothing else: at most 2 lines of 32 hexadecimal digits"
		not32    = ", not the 32 hexadecimal digits of a key of 16 bytes"
		tooOpen  = ": others than its owner may use it; 0600 or 0400 is right"
		noDigits = " has characters that are not hexadecimal digits"
	)
	for _, c := range []struct {
		name, content string
		mode          fs.FileMode
		want          desired.SignalKeys
		problem       string
	}{
		{"one", first + "\n", 0o600, desired.SignalKeys{firstKey}, ""},
		{"one without a line break", first, 0o400, desired.SignalKeys{firstKey}, ""},
		{"one from elsewhere", first + "\r\n", 0o600, desired.SignalKeys{firstKey}, ""},
		{"two", second + "\n" + first + "\n", 0o600, desired.SignalKeys{secondKey, firstKey}, ""},
		{"two from elsewhere", second + "\r\n" + first + "\r\n", 0o600, desired.SignalKeys{secondKey, firstKey}, ""},
		{"three", first + "\n" + second + "\n" + first + "\n", 0o600, nil, form},
		{"empty", "", 0o600, nil, "line 1 has 0 bytes" + not32},
		{"short", first[1:] + "\n", 0o600, nil, "line 1 has 31 bytes" + not32},
		{"long", first + "\n" + second + "0\n", 0o600, nil, "line 2 has 33 bytes" + not32},
		{"very long", strings.Repeat(first, 1000), 0o600, nil, form},
		{"an empty line", first + "\n\n", 0o600, nil, "line 2 has 0 bytes" + not32},
		{"other characters", first + "\n" + strings.Replace(second, "F", "g", 1), 0o600, nil, "line 2" + noDigits},
		{"of the group", first, 0o640, nil, "has mode 0640" + tooOpen},
		{"of all", first, 0o604, nil, "has mode 0604" + tooOpen},
		{"to be written by all", first, 0o602, nil, "has mode 0602" + tooOpen},
	} {
		t.Run(c.name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "key")
			testhost.Must(t, errors.Join(os.WriteFile(file, []byte(c.content), 0o600), os.Chmod(file, c.mode)))
			checkKeys(t, file, c.want, c.problem)
		})
	}
	dir := t.TempDir()
	checkKeys(t, "", nil, "")
	checkKeys(t, filepath.Join(dir, "none"), nil, "no such file or directory")
	checkKeys(t, dir, nil, "must be a regular file, is d---------")
	fifo := filepath.Join(dir, "fifo")
	testhost.Must(t, unix.Mkfifo(fifo, 0o600))
	checkKeys(t, fifo, nil, "must be a regular file, is p---------")
}

// checkKeys compares the keys. If an error is expected, it must name the field and the file.
func checkKeys(t *testing.T, file string, want desired.SignalKeys, problem string) {
	t.Helper()
	keys, err := ReadSignalKeys(file)
	if diff := cmp.Diff(want, keys); diff != "" {
		t.Errorf("keys (-want +got):\n%s", diff)
	}
	var got *fieldpath.Error
	if problem == "" && err == nil {
		return
	}
	if wanted := (&fieldpath.Error{Path: "node.signal-key", Value: file, Problem: problem}); !errors.As(err, &got) || *got != *wanted {
		t.Errorf("error %v, want %v", err, wanted)
	}
}
