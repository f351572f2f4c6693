// SPDX-License-Identifier: Apache-2.0

package bpfclock

import (
	"io/fs"
	"os"
	"path"
	"regexp"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/testhost"
)

// wallClock matches expressions that make a time depend on the date and time of the host. A
// time.Time from time.Now also has a monotonic part, which comparisons use (package time). A
// conversion removes that part.
var wallClock = regexp.MustCompile(
	`\btime\.Unix\(|\.Unix(Nano|Milli|Micro)?\(\)|\.ModTime\(\)|SetToCurrentTime|CLOCK_REALTIME|\.UTC\(\)|\.Round\(0\)`)

// shown are the files that use the date and time, and for what. None of them decides by the date
// and time. The text must say why a jump does no harm.
var shown = map[string]string{
	"cmd/segue/statuswatch.go":   "the time of a status, for humans",
	"cmd/segue/store.go":         "since when the balancer waits for its store, for alerts",
	"internal/daemon/metrics.go": "the time of the last reload, for humans and alerts",
	"internal/announce/drain.go": "since when the balancer is drained, for the status",
	"internal/bgp/speaker.go":    "the age of a route, which the library shows",
	"internal/events/events.go":  "the first ID of a stream; IDs of a clock that was ahead count as 0",
	"internal/health/check.go":   "a deadline in the past, to end a check",
	"internal/rundir/process.go": "the start of a process, compared for equality only",
	"internal/rundir/record.go":  "the start of a process, compared for equality only",
}

// TestNothingDecidesByTheDate checks that a jump of the host's date and time has no effect: the
// processes use clocks that do not jump.
func TestNothingDecidesByTheDate(t *testing.T) {
	used := map[string]bool{}
	root := os.DirFS("../..")
	for _, folder := range []string{"cmd/segue", "internal"} {
		err := fs.WalkDir(root, folder, func(name string, entry fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			if entry.IsDir() && name == "internal/packet/packettest" {
				return fs.SkipDir
			}
			if path.Ext(name) != ".go" || strings.HasSuffix(name, "_test.go") || strings.Contains(name, "_bpfel") {
				return nil
			}
			text, err := fs.ReadFile(root, name)
			if err != nil {
				return err
			}
			for i, line := range strings.Split(string(text), "\n") {
				line, _, _ = strings.Cut(line, "//")
				if !wallClock.MatchString(line) {
					continue
				}
				used[name] = true
				if shown[name] == "" {
					t.Errorf("%s:%d depends on the date and time of the host: %s", name, i+1, strings.TrimSpace(line))
				}
			}
			return nil
		})
		testhost.Must(t, err)
	}
	for name := range shown {
		if !used[name] {
			t.Errorf("%s does not use the date and time any more", name)
		}
	}
}
