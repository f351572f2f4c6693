// SPDX-License-Identifier: Apache-2.0

// Command kernels tests the data path on kernels of Debian that are not the machine's own.
//
//	make kernels
//	make kernels KERNEL="6.1 arm64"
//
// It gets the kernels from the sources of Debian that this machine's apt has, and boots one after
// the other in QEMU, which emulates the processor: /dev/kvm is not needed. The guest has no disk.
// Its initramfs has the static programs segue and segue-lab, the tests of the verifier's work, the
// modules for virtual links, and the program guest, which runs all of them and prints a line for
// each that passed or failed. At the end the command prints what passed on which kernel. It fails
// if anything failed, and if nothing ran on a kernel. It needs root, for apt.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/segue-lb/segue/test/kernels/console"
)

// kernel is a kernel of Debian.
type kernel struct {
	name string
	arch string // as Go and Debian call it
	// suites have the kernel. The newest version in all of them is taken. The list of packages of a
	// security suite is short.
	suites []suite
}

// suite is a part of Debian's archive.
type suite struct {
	name       string
	isSecurity bool
}

var kernels = []kernel{
	{"6.1", "amd64", []suite{{"bookworm-security", true}}},
	{"6.12", "amd64", []suite{{"trixie-security", true}}},
	{"arm64", "arm64", []suite{{"trixie-security", true}}},
	{"newest", "amd64", []suite{{"trixie-backports", false}, {"experimental", false}}},
}

func main() {
	limit := flag.Duration("limit", 2*time.Hour, "end a guest after this time")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, flag.Args(), *limit)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "kernels:", err)
		os.Exit(1)
	}
}

// run tests the named kernels, or all of them if there is no name.
func run(ctx context.Context, names []string, limit time.Duration) error {
	for _, name := range names {
		if !slices.ContainsFunc(kernels, func(k kernel) bool { return k.name == name }) {
			return fmt.Errorf("no kernel has the name %q; there are 6.1, 6.12, arm64 and newest", name)
		}
	}
	var results []result
	for _, k := range kernels {
		if len(names) > 0 && !slices.Contains(names, k.name) {
			continue
		}
		r := result{kernel: k}
		r.err = r.test(ctx, limit)
		results = append(results, r)
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	return report(results)
}

// result is what happened on a kernel.
type result struct {
	kernel
	version        string // of the package
	passed, failed []string
	ended          bool // the guest has run all that it has
	err            error
}

// test gets the kernel, builds what the guest runs, and boots the guest.
func (r *result) test(ctx context.Context, limit time.Duration) error {
	fmt.Printf("kernels: %s (%s)\n", r.name, r.arch)
	found, err := r.kernel.fetch(ctx)
	if err != nil {
		return err
	}
	r.version = found.version
	programs, err := build(ctx, r.arch)
	if err != nil {
		return err
	}
	initramfs, err := pack(ctx, found, programs)
	if err != nil {
		return err
	}
	fmt.Printf("kernels: booting Linux %s\n", found.version)
	late := fmt.Errorf("the guest did not end in %v", limit)
	ctx, cancel := context.WithTimeoutCause(ctx, limit, late)
	defer cancel()
	if err := boot(ctx, r.arch, found.image, initramfs, r.read); err != nil {
		return err
	}
	return r.verdict()
}

// verdict returns an error unless the guest has run all that it has, and nothing failed.
func (r *result) verdict() error {
	switch {
	case !r.ended:
		return errors.New("the guest ended early; its output is above")
	case len(r.passed)+len(r.failed) == 0:
		return errors.New("nothing ran")
	case len(r.failed) > 0:
		return fmt.Errorf("%d failed: %s", len(r.failed), strings.Join(r.failed, ", "))
	}
	return nil
}

// read takes a line of the guest's console.
func (r *result) read(line string) {
	if what, ok := strings.CutPrefix(line, console.Passed); ok {
		r.passed = append(r.passed, what)
	} else if what, ok := strings.CutPrefix(line, console.Failed); ok {
		r.failed = append(r.failed, what)
	} else if line == console.End {
		r.ended = true
	}
}

// report prints what passed on which kernel.
func report(results []result) error {
	fmt.Println()
	failed := 0
	for _, r := range results {
		fmt.Printf("%s, %s, Linux %s: %d passed, %d failed\n",
			r.name, r.arch, r.version, len(r.passed), len(r.failed))
		for _, what := range r.passed {
			fmt.Printf("    passed: %s\n", what)
		}
		if r.err != nil {
			failed++
			fmt.Printf("    FAILED: %v\n", r.err)
		}
	}
	if failed > 0 {
		return fmt.Errorf("failed on %d of %d kernels", failed, len(results))
	}
	return nil
}
