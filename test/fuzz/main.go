// Command fuzz runs all fuzzers of the project one after the other, each for its share of the time.
//
//	make fuzz FUZZTIME=10m
//
// A fuzzer that finds something writes the input to testdata/fuzz/<name> beside its source, where
// `go test` runs it from then on; the others go on.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:])
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "fuzz:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string) error {
	if len(args) != 1 {
		return errors.New("usage: fuzz DURATION")
	}
	total, err := time.ParseDuration(args[0])
	if err != nil {
		return fmt.Errorf("duration %q: %w", args[0], err)
	}
	list := exec.CommandContext(ctx, "go", "test", "-list", "^Fuzz", "./...")
	list.Stderr = os.Stderr
	out, err := list.Output()
	if err != nil {
		return fmt.Errorf("go test -list: %w", err)
	}
	fuzzers := parseList(string(out))
	if len(fuzzers) == 0 {
		return errors.New("there are no fuzzers")
	}
	share := total / time.Duration(len(fuzzers))
	var failed []string
	for _, f := range fuzzers {
		fmt.Printf("== %s of %s, for %v\n", f.name, f.pkg, share)
		if err := f.run(ctx, share); err != nil {
			failed = append(failed, f.name)
		}
		if ctx.Err() != nil {
			return errors.New("interrupted")
		}
	}
	if len(failed) > 0 {
		return fmt.Errorf("failed: %s", strings.Join(failed, ", "))
	}
	return nil
}

// fuzzer is a fuzz test of a package.
type fuzzer struct{ pkg, name string }

// parseList reads what `go test -list` prints: the names in a package, then a line "ok", its path and
// the time.
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

// run fuzzes for that long, without the tests of the package. To make inputs shorter that are of
// interest only by the reference's branches would cost most of the time: some attempts are enough.
func (f fuzzer) run(ctx context.Context, duration time.Duration) error {
	cmd := exec.CommandContext(ctx, "go", "test", "-run=^$", "-fuzz=^"+f.name+"$",
		"-fuzztime="+duration.String(), "-fuzzminimizetime=20x", f.pkg)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	// In a process group of its own, interrupted through us alone, once, so that it can clean up.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGINT) }
	cmd.WaitDelay = 20 * time.Second
	return cmd.Run()
}
