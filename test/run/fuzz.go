// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"
)

// fuzz runs all fuzzers one after the other. The only argument is the duration of all together. If
// a fuzzer fails, the others still run. The error names all that have failed.
func fuzz(ctx context.Context, args []string) (passed bool, err error) {
	if len(args) != 1 {
		return false, errors.New("usage: fuzz DURATION")
	}
	total, err := time.ParseDuration(args[0])
	if err != nil {
		return false, fmt.Errorf("duration %q: %w", args[0], err)
	}
	out, err := goCommand(ctx, "test", "-list", "^Fuzz", "./...").Output()
	if err != nil {
		return false, fmt.Errorf("go test -list: %w", err)
	}
	fuzzers := parseList(string(out))
	if len(fuzzers) == 0 {
		return false, errors.New("there are no fuzzers")
	}
	share := total / time.Duration(len(fuzzers))
	var failed []string
	for _, f := range fuzzers {
		fmt.Printf("== %s of %s, for %v\n", f.name, f.pkg, share)
		if err := f.run(ctx, share); err != nil {
			failed = append(failed, f.name)
		}
		if ctx.Err() != nil {
			return false, errors.New("interrupted")
		}
	}
	if len(failed) > 0 {
		return false, fmt.Errorf("failed: %s", strings.Join(failed, ", "))
	}
	return true, nil
}

// fuzzer is a fuzz test of a package.
type fuzzer struct{ pkg, name string }

// parseList reads the output of `go test -list`. For each package, the output has the names of its
// fuzzers, and then a line with "ok", the path of the package and the time.
func parseList(out string) (fuzzers []fuzzer) {
	var names []string
	for line := range strings.Lines(out) {
		fields := strings.Fields(line)
		switch {
		case len(fields) == 1:
			names = append(names, fields[0])
		case len(fields) > 1 && fields[0] == "ok":
			for _, name := range names {
				fuzzers = append(fuzzers, fuzzer{fields[1], name})
			}
			names = nil
		}
	}
	return fuzzers
}

// run runs the fuzzer for the given time, without the tests of the package. It limits the attempts
// to make an interesting input shorter. Without a limit they would take most of the time. They are
// of little use: Go sees only the branches of the reference, and not those of the BPF programs.
func (f fuzzer) run(ctx context.Context, duration time.Duration) error {
	cmd := goCommand(ctx, "test", "-run=^$", "-fuzz=^"+f.name+"$",
		"-fuzztime="+duration.String(), "-fuzzminimizetime=20x", f.pkg)
	said := &strings.Builder{}
	cmd.Stdout = io.MultiWriter(os.Stdout, said)
	err := cmd.Run()
	if err != nil && ctx.Err() == nil && ranOutOfTime(said.String()) {
		return nil
	}
	return err
}

// ranOutOfTime tells whether a fuzzer has found no fault, and `go test` has only reported that its
// time ended while it tried an input. That happens if inputs take long.
func ranOutOfTime(output string) bool {
	return strings.Contains(output, "\n    context deadline exceeded\n") &&
		!strings.Contains(output, "Failing input written to") && !strings.Contains(output, "panic:")
}
