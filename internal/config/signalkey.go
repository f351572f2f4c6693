// SPDX-License-Identifier: Apache-2.0

package config

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/segue-lb/segue/internal/desired"
	"github.com/segue-lb/segue/internal/fieldpath"
)

// mostSignalKeys is 2, so that the old and the new key are valid while keys are changed.
const mostSignalKeys = 2

// longestKeyFile, in bytes, has room for the keys, a trailing line break and carriage returns.
const longestKeyFile = mostSignalKeys*(2*len(desired.SignalKey{})+2) + 1

// ReadSignalKeys reads a file with one or two keys, each as 32 hexadecimal digits on a line. For an
// empty file name it returns no keys. The file must be a regular file to which only its owner has
// access. The error is of type *fieldpath.Error. It names the field and the file, and never quotes
// the content of the file.
func ReadSignalKeys(file string) (desired.SignalKeys, error) {
	if file == "" {
		return nil, nil
	}
	content, err := readSecret(file, longestKeyFile)
	if err != nil {
		return nil, &fieldpath.Error{Path: desired.SignalKeyField, Value: file, Problem: err.Error()}
	}
	keys, problem := parseSignalKeys(content)
	if problem != "" {
		return nil, &fieldpath.Error{Path: desired.SignalKeyField, Value: file, Problem: problem}
	}
	return keys, nil
}

// readSecret reads a file to which only the owner has access. If the file has more than longest
// bytes, readSecret returns longest+1 of them, so that the caller notices. The error does not
// contain the name of the file.
func readSecret(file string, longest int) (string, error) {
	f, err := os.OpenFile(file, os.O_RDONLY|unix.O_NONBLOCK, 0) // so that a FIFO does not block
	if system, ok := errors.AsType[*fs.PathError](err); ok {
		return "", system.Err
	}
	if err != nil {
		return "", err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return "", err
	}
	if !info.Mode().IsRegular() {
		return "", fmt.Errorf("must be a regular file, is %s", info.Mode().Type())
	}
	if mode := info.Mode().Perm(); mode&0o077 != 0 {
		return "", fmt.Errorf("has mode %04o: others than its owner may use it; 0600 or 0400 is right", mode)
	}
	content, err := io.ReadAll(io.LimitReader(f, int64(longest)+1))
	return string(content), err
}

// parseSignalKeys reads the content of a file with keys. If it is not valid, problem says why.
func parseSignalKeys(content string) (keys desired.SignalKeys, problem string) {
	lines := strings.Split(strings.TrimSuffix(content, "\n"), "\n")
	if len(content) > longestKeyFile || len(lines) > mostSignalKeys {
		return nil, fmt.Sprintf("must hold one or two keys and nothing else: at most %d lines of %d hexadecimal digits",
			mostSignalKeys, 2*len(desired.SignalKey{}))
	}
	for i, line := range lines {
		digits := strings.TrimSuffix(line, "\r")
		key, err := hex.DecodeString(digits)
		if len(digits) != 2*len(desired.SignalKey{}) {
			return nil, fmt.Sprintf("line %d has %d bytes, not the %d hexadecimal digits of a key of %d bytes",
				i+1, len(digits), 2*len(desired.SignalKey{}), len(desired.SignalKey{}))
		}
		if err != nil {
			return nil, fmt.Sprintf("line %d has characters that are not hexadecimal digits", i+1)
		}
		keys = append(keys, desired.SignalKey(key))
	}
	return keys, ""
}
