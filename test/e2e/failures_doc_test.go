// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/segue-lb/segue/internal/balancer/inspect"
)

const (
	failuresPage = "../../docs/operate/server-failures.md"
	// TestServerFailures writes the part of the page between these lines.
	tablesBegin = "<!-- by TestServerFailures: begin -->\n"
	tablesEnd   = "<!-- by TestServerFailures: end -->\n"
)

// documentFailures replaces the tables of the page.
func documentFailures(outcomes []*outcome) error {
	page, err := os.ReadFile(failuresPage)
	if err != nil {
		return err
	}
	head, rest, ok := bytes.Cut(page, []byte(tablesBegin))
	_, tail, ok2 := bytes.Cut(rest, []byte(tablesEnd))
	if !ok || !ok2 {
		return fmt.Errorf("%s: there is no place for the tables", failuresPage)
	}
	commit, err := builtFrom()
	if err != nil {
		return err
	}
	var text strings.Builder
	fmt.Fprintf(&text, "Measured with commit %s.\n\n", commit)
	writeOutcomes(&text, outcomes)
	text.WriteString("\nWhat finds each failure, and after how long:\n\n")
	writeFinders(&text, outcomes)
	page = slices.Concat(head, []byte(tablesBegin+text.String()+tablesEnd), tail)
	return os.WriteFile(failuresPage, page, 0o644)
}

// builtFrom returns the commit of the tree, and tells if the code differs from it.
func builtFrom() (string, error) {
	commit, err := exec.Command("git", "rev-parse", "--short", "HEAD").Output()
	if err != nil {
		return "", fmt.Errorf("name the commit: %w", err)
	}
	changes, err := exec.Command(
		"git", "status", "--porcelain", "--untracked-files=no", "--", ":/", ":!/docs").Output()
	if err != nil {
		return "", fmt.Errorf("look for changes since the commit: %w", err)
	}
	name := strings.TrimSpace(string(commit))
	if len(changes) > 0 {
		name += ", changed"
	}
	return name, nil
}

// writeOutcomes writes the table of the outcomes of each failure.
func writeOutcomes(text *strings.Builder, outcomes []*outcome) {
	text.WriteString("| failure | service | noticed by lb1, lb2 after | failed until then " +
		"| failed later | `status` |\n|---|---|---|---|---|---|\n")
	for _, o := range outcomes {
		title := o.failure.name
		for _, name := range probed {
			cells := append([]string{title, probedAs[name]}, o.row(name)...)
			fmt.Fprintf(text, "| %s |\n", strings.Join(cells, " | "))
			title = "" // only in the first row
		}
	}
}

// probedAs describes the services in the tables.
var probedAs = map[string]string{
	"http6-insert": "hash, IPv6", "http4-encap": "hash, IPv4",
	"hunt6-insert": "hunt, IPv6", "hunt4-encap": "hunt, IPv4",
}

func (o *outcome) row(name string) []string {
	s := o.services[name]
	var noticed, told []string
	for _, balancer := range slices.Sorted(maps.Keys(s.noticed)) {
		noticed = append(noticed, seconds(s.noticed[balancer]))
	}
	for _, condition := range s.told {
		told = append(told, fmt.Sprintf("`%s`", condition))
	}
	if len(told) == 0 {
		return []string{"not within " + seconds(o.lasted), s.before.String(), "–", "`up`"}
	}
	return []string{
		strings.Join(noticed, ", "), s.before.String(), s.after.String(), strings.Join(told, ", "),
	}
}

func seconds(d time.Duration) string { return fmt.Sprintf("%.1f s", d.Seconds()) }

func (t tally) String() string {
	var kinds []string
	failed := 0
	for _, kind := range slices.Sorted(maps.Keys(t.failed)) {
		failed += t.failed[kind]
		kinds = append(kinds, fmt.Sprintf("%d %s", t.failed[kind], kind))
	}
	text := fmt.Sprintf("%d of %d", failed, t.offered)
	switch len(kinds) {
	case 0:
	case 1:
		text += ", " + strings.Fields(kinds[0])[1]
	default:
		text += ": " + strings.Join(kinds, ", ")
	}
	return text
}

// finders are the methods that can find a failed server, with the conditions that they set.
var finders = []struct {
	name   string
	causes []inspect.Condition
}{
	{"next hop", []inspect.Condition{inspect.ServerUnresolved, inspect.ServerUnreachable}},
	{"health checks", []inspect.Condition{inspect.ServerFailing}},
	{"probes", []inspect.Condition{
		inspect.ServerSilent, inspect.ServerIncompatible, inspect.ServerNotServed,
		inspect.ServerRefusing,
	}},
	{"offers without answers (hunt)", []inspect.Condition{inspect.ServerUnheard}},
}

// writeFinders writes the table of the methods that find each failure.
func writeFinders(text *strings.Builder, outcomes []*outcome) {
	text.WriteString("| failure |")
	for _, finder := range finders {
		fmt.Fprintf(text, " %s |", finder.name)
	}
	text.WriteString("\n|---|" + strings.Repeat("---|", len(finders)) + "\n")
	for _, o := range outcomes {
		fmt.Fprintf(text, "| %s |", o.failure.name)
		for _, finder := range finders {
			fmt.Fprintf(text, " %s |", o.foundBy(finder.causes))
		}
		text.WriteString("\n")
	}
}

// foundBy returns when balancers knew one of the causes, over all services.
func (o *outcome) foundBy(causes []inspect.Condition) string {
	var times []time.Duration
	for _, s := range o.services {
		for _, cause := range causes {
			times = append(times, s.found[cause]...)
		}
	}
	if len(times) == 0 {
		return "no"
	}
	first, last := seconds(slices.Min(times)), seconds(slices.Max(times))
	if first == last {
		return first
	}
	return strings.TrimSuffix(first, " s") + " to " + last
}

// String describes the outcome of a failure, for the test's output.
func (o *outcome) String() string {
	var text strings.Builder
	fmt.Fprintf(&text, "%s, for %s", o.failure.name, seconds(o.lasted))
	for _, name := range probed {
		fmt.Fprintf(&text, "\n%s: %s", name, strings.Join(o.row(name), " | "))
	}
	for _, finder := range finders {
		fmt.Fprintf(&text, "\n%s: %s", finder.name, o.foundBy(finder.causes))
	}
	return text.String()
}
