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
)

// SignalKey is a key of SipHash-2-4, in the order of its bytes in the paper's test vectors.
type SignalKey [16]byte

// SignalKeys are those of a node: it makes tags by the first, and takes those by any.
type SignalKeys []SignalKey

// mostSignalKeys are one, and another while keys are being changed.
const mostSignalKeys = 2

// signalKeyPath is the field that names the file of keys.
const signalKeyPath = "node.signal-key"

// longestKeyFile is in bytes: enough for the keys, a trailing line break, and carriage returns.
const longestKeyFile = mostSignalKeys*(2*len(SignalKey{})+2) + 1

// ReadSignalKeys reads a file of one or two keys, 32 hexadecimal digits each on a line of its own; of no file, "", it
// returns none. The file must be a regular one that only its owner may read or write. The error is of type *Error,
// names field and file, and never quotes what is in it.
func ReadSignalKeys(file string) (SignalKeys, error) {
	if file == "" {
		return nil, nil
	}
	content, err := readSecret(file)
	var system *fs.PathError
	if errors.As(err, &system) {
		err = system.Err // which names the file again
	}
	if err != nil {
		return nil, &Error{Path: signalKeyPath, Value: file, Problem: err.Error()}
	}
	keys, problem := parseSignalKeys(content)
	if problem != "" {
		return nil, &Error{Path: signalKeyPath, Value: file, Problem: problem}
	}
	return keys, nil
}

// readSecret reads what nobody but the owner may know or choose.
func readSecret(file string) (string, error) {
	f, err := os.OpenFile(file, os.O_RDONLY|unix.O_NONBLOCK, 0) // a FIFO would keep it waiting
	if err != nil {
		return "", err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return "", err
	}
	if !info.Mode().IsRegular() {
		return "", fmt.Errorf("is no regular file, but %s", info.Mode().Type())
	}
	if mode := info.Mode().Perm(); mode&0o077 != 0 {
		return "", fmt.Errorf("has mode %04o: others than its owner may use it; 0600 or 0400 is right", mode)
	}
	content, err := io.ReadAll(io.LimitReader(f, int64(longestKeyFile)+1))
	return string(content), err
}

func parseSignalKeys(content string) (keys SignalKeys, problem string) {
	lines := strings.Split(strings.TrimSuffix(content, "\n"), "\n")
	if len(content) > longestKeyFile || len(lines) > mostSignalKeys {
		return nil, fmt.Sprintf("must hold one key, or two, and nothing else: %d lines of %d hexadecimal digits at most",
			mostSignalKeys, 2*len(SignalKey{}))
	}
	for i, line := range lines {
		digits := strings.TrimSuffix(line, "\r")
		key, err := hex.DecodeString(digits)
		if len(digits) != 2*len(SignalKey{}) {
			return nil, fmt.Sprintf("line %d has %d bytes, not the %d hexadecimal digits of a key of %d bytes",
				i+1, len(digits), 2*len(SignalKey{}), len(SignalKey{}))
		}
		if err != nil {
			return nil, fmt.Sprintf("line %d has other characters than hexadecimal digits", i+1)
		}
		keys = append(keys, SignalKey(key))
	}
	return keys, ""
}
