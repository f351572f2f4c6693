// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/balancer/inspect"
)

// watched returns what status --watch prints for the snapshots. It ends status after the last one.
func watched(t *testing.T, o statusOptions, snapshots ...*inspect.Snapshot) string {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	o.watch, o.interval = true, time.Nanosecond
	read := func() (*balancerStatus, error) {
		if len(snapshots) == 0 {
			cancel()
			return nil, ctx.Err()
		}
		next := snapshots[0]
		snapshots = snapshots[1:]
		return &balancerStatus{Snapshot: next}, nil
	}
	var output bytes.Buffer
	if err := report(ctx, &output, o, read, printBalancer); err != nil {
		t.Errorf("error %v after the end, want none", err)
	}
	return output.String()
}

// TestWatch checks that status prints a block for each snapshot if the output is not a terminal.
// All blocks but the first have rates.
func TestWatch(t *testing.T) {
	before, after := someSnapshots()
	_, later := someSnapshots()
	later.Time = later.Time.Add(2 * time.Second)
	blocks := strings.Split(watched(t, statusOptions{}, before, after, later), "balancer lb: ")
	if len(blocks) != 4 {
		t.Fatalf("%d blocks, want 3", len(blocks)-1)
	}
	if !strings.HasSuffix(blocks[0], "Z, every 1ns\n") || !strings.HasSuffix(blocks[1], "Z, every 1ns\n") {
		t.Errorf("no time above the blocks: %q", blocks[:2])
	}
	for i, want := range []string{
		"forward_known  1000     1000000  -          -",
		"forward_known  2500     2500000  750        6.00M",
		"forward_known  2500     2500000  0          0",
	} {
		if !strings.Contains(blocks[i+1], want) {
			t.Errorf("block %d has no line %q:\n%s", i, want, blocks[i+1])
		}
	}
	if strings.Contains(strings.Join(blocks, ""), "\x1b") {
		t.Error("escape sequences without a terminal")
	}
}

// TestWatchJSON checks that --json prints one object for each snapshot, and nothing else.
func TestWatchJSON(t *testing.T) {
	before, after := someSnapshots()
	decoder := json.NewDecoder(strings.NewReader(watched(t, statusOptions{asJSON: true}, before, after)))
	for i := range 2 {
		var s struct{ Instance string }
		if err := decoder.Decode(&s); err != nil || s.Instance != "lb" {
			t.Errorf("object %d: instance %q, error %v", i, s.Instance, err)
		}
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		t.Errorf("more than two objects: %v", err)
	}
}

// TestWatchFails checks that an instance that is gone ends the command with an error.
func TestWatchFails(t *testing.T) {
	before, _ := someSnapshots()
	first := true
	read := func() (*balancerStatus, error) {
		if first {
			first = false
			return &balancerStatus{Snapshot: before}, nil
		}
		return nil, errors.New("gone")
	}
	err := report(context.Background(), io.Discard, statusOptions{watch: true, interval: 1}, read, printBalancer)
	if err == nil || err.Error() != "gone" {
		t.Errorf("error %v, want gone", err)
	}
}

func TestFit(t *testing.T) {
	for _, c := range []struct {
		text          string
		rows, columns int
		want          string
	}{
		{"a\nb\nc\n", 4, 10, "a\nb\nc\n"},
		{"a\nb\nc\n", 3, 40, "a\n... 2 more lines: enlarge the window\n"},
		{"a\nb\nc\n", 3, 10, "a\n... 2 more\n"},
		{"abcdefghijk\nb\nc\n", 5, 10, "abcdefghijk\nb\nc\n"}, // the first line takes two rows
		{"abcdefghijk\nb\nc\n", 4, 10, "abcdefghijk\n... 2 more\n"},
		{"a\nb\n", 2, 10, "... 2 more\n"},
		{"ééééé\n\nb\n", 4, 5, "ééééé\n\nb\n"},
		{"a\nb\n", 0, 0, "a\nb\n"}, // the size is not known
	} {
		if got := fit(c.text, c.rows, c.columns); got != c.want {
			t.Errorf("%q in %d × %d: %q, want %q", c.text, c.rows, c.columns, got, c.want)
		}
	}
}
