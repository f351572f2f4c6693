package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
)

// counts of tests, subtests included.
type counts struct{ passed, failed, skipped int }

func (c *counts) add(d counts) {
	c.passed += d.passed
	c.failed += d.failed
	c.skipped += d.skipped
}

func (c counts) String() string {
	return fmt.Sprintf("%d passed, %d failed, %d skipped", c.passed, c.failed, c.skipped)
}

// event is one line of `go test -json`; see `go doc test2json` and `go help buildjson`.
type event struct {
	Action     string
	Package    string
	ImportPath string // in place of Package in what the build says
	Test       string // empty in events of the package as a whole
	Elapsed    float64
	Output     string
}

// report reads the events of one `go test -json` and writes a line for every package with tests, and
// above it all output of its failed tests and the reasons of its skipped ones.
func report(events io.Reader, w io.Writer) (counts, error) {
	var total counts
	packages := map[string]*counts{}
	output := map[[2]string]*strings.Builder{} // by package and test
	lines := json.NewDecoder(events)
	for {
		var e event
		if err := lines.Decode(&e); errors.Is(err, io.EOF) {
			return total, nil
		} else if err != nil {
			return total, fmt.Errorf("reading the output of go test: %w", err)
		}
		switch e.Action {
		case "start":
			packages[e.Package] = &counts{}
		case "build-output":
			fmt.Fprint(w, e.Output)
		case "output":
			at := [2]string{e.Package, e.Test}
			if output[at] == nil {
				output[at] = &strings.Builder{}
			}
			output[at].WriteString(e.Output)
		case "pass", "fail", "skip":
			at := [2]string{e.Package, e.Test}
			text := ""
			if output[at] != nil {
				text = output[at].String()
				delete(output, at)
			}
			c := packages[e.Package]
			if e.Test != "" {
				c.endTest(e, text, w)
				continue
			}
			c.endPackage(e, text, w)
			total.add(*c)
		}
	}
}

func (c *counts) endTest(e event, output string, w io.Writer) {
	switch e.Action {
	case "pass":
		c.passed++
		return
	case "fail":
		c.failed++
	case "skip":
		c.skipped++
	}
	fmt.Fprint(w, output)
}

func (c *counts) endPackage(e event, output string, w io.Writer) {
	if e.Action == "fail" && c.failed == 0 { // it did not build, or died outside of any test
		c.failed = 1
	}
	if e.Action == "fail" {
		fmt.Fprint(w, output)
	}
	if *c != (counts{}) {
		fmt.Fprintf(w, "%-4s %s: %v (%.1f s)\n", e.Action, e.Package, c, e.Elapsed)
	}
}
