// SPDX-License-Identifier: Apache-2.0

package packages

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/segue-lb/segue/internal/testhost"
)

const (
	guide       = project + "/docs/operate/fleet.md"
	hostsScript = project + "/docs/examples/fleet/hosts.sh"
	// hostsState is where the script keeps its hosts. The file marks hosts of this test.
	hostsState = "/run/segue-hosts"
	hostsMark  = hostsState + "/test"
)

// TestGuide follows the first part of docs/operate/fleet.md: it runs all its blocks on the hosts of
// hosts.sh, in their order, and compares what they print.
func TestGuide(t *testing.T) {
	testhost.NeedNamespaces(t)
	testhost.NeedBPF(t)
	testhost.NeedAgent(t)
	testhost.NeedCgroup2(t)
	testhost.NeedCommand(t, "debootstrap", "debootstrap")
	testhost.NeedCommand(t, "ethtool", "ethtool")
	text, err := os.ReadFile(guide)
	must(t, err)
	_, part, _ := strings.Cut(string(text), "\n## Build a fleet\n")
	part, _, found := strings.Cut(part, "\n## ")
	if !found {
		t.Fatal("docs/operate/fleet.md has no section \"Build a fleet\"")
	}
	fleetUp(t)
	deb := buildPackage(t, later)
	fleet(t, "copy", deb, laboratory(deb))
	g := &guideRun{steps: map[string][]guideBlock{}}
	blocks := guideBlocks(part)
	for _, b := range blocks {
		g.steps[b.step] = append(g.steps[b.step], b)
	}
	for _, b := range blocks {
		g.follow(t, b)
	}
	if g.commands < 30 || g.compared < 20 {
		t.Errorf("only %d commands and %d outputs were found", g.commands, g.compared)
	}
}

// fleetUp makes the hosts, and removes them after the test.
func fleetUp(t *testing.T) {
	t.Helper()
	if _, err := os.Stat(hostsMark); err == nil {
		fleet(t, "down") // of a test that was killed
	}
	root, err := filepath.Abs(filepath.Join(rootsDir, "fleet"))
	must(t, err)
	t.Setenv("SEGUE_HOSTS_ROOT", root)
	t.Setenv("SEGUE_HOSTS_MIRROR", aptMirror())
	making.Lock()
	defer making.Unlock()
	if _, err := os.Stat(hostsState); err == nil {
		t.Fatalf("somebody uses hosts.sh on this machine: %s down removes the hosts", hostsScript)
	}
	t.Cleanup(func() { fleet(t, "down") })
	out, err := exec.CommandContext(t.Context(), hostsScript, "up").CombinedOutput()
	if strings.Contains(string(out), "debootstrap failed") {
		t.Skipf("debootstrap cannot make a root here: %s", out)
	}
	if err != nil {
		t.Fatalf("hosts.sh up: %v\n%s", err, out)
	}
	must(t, os.WriteFile(hostsMark, nil, 0o600))
}

// fleet runs a command of hosts.sh, and returns what it prints.
func fleet(t *testing.T, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 3*patience)
	defer cancel()
	out, err := exec.CommandContext(ctx, hostsScript, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("hosts.sh %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// guideBlock is a block of code in the guide, with the paragraph before it.
type guideBlock struct {
	step      string // the number in the heading
	paragraph string // in one line
	code      string
}

var guideStep = regexp.MustCompile(`^### (\d+)\. `)

// guideBlocks returns the blocks, and paragraphs without a block, in their order.
func guideBlocks(text string) (blocks []guideBlock) {
	step := ""
	for _, piece := range strings.Split(text, "\n\n") {
		piece = strings.Trim(piece, "\n")
		match := guideStep.FindStringSubmatch(piece)
		last := len(blocks) - 1
		switch {
		case match != nil:
			step = match[1]
		case !strings.HasPrefix(piece, "    "):
			blocks = append(blocks, guideBlock{step: step, paragraph: strings.Join(strings.Fields(piece), " ")})
		case last >= 0 && blocks[last].code == "":
			blocks[last].code = strings.ReplaceAll(strings.TrimPrefix(piece, "    "), "\n    ", "\n")
		}
	}
	return blocks
}

// guideRun is where a test is in the guide.
type guideRun struct {
	steps              map[string][]guideBlock
	hosts              []string // of the last command
	script             string   // its last line
	printed            []string // by each host
	commands, compared int
}

var (
	backquoted = regexp.MustCompile("`([^`]*)`")
	otherHost  = regexp.MustCompile("^Then run the blocks of the steps (\\d+) and (\\d+) on `(\\w+)`")
	power      = regexp.MustCompile(`^docs/examples/fleet/hosts.sh (on|off) (\w+)$`)
)

func (g *guideRun) follow(t *testing.T, b guideBlock) {
	t.Helper()
	if match := otherHost.FindStringSubmatch(b.paragraph); match != nil {
		for _, step := range match[1:3] {
			for _, block := range g.steps[step] {
				if strings.Contains(block.paragraph, "`lb1`") || g.isOutput(block) {
					block.paragraph = strings.NewReplacer("`lb1`", "`"+match[3]+"`").Replace(block.paragraph)
					g.followOn(t, block, match[3])
				}
			}
		}
		return
	}
	g.followOn(t, b, "")
}

func (g *guideRun) isOutput(b guideBlock) bool {
	return b.code != "" && strings.Contains(b.paragraph, "t prints")
}

// followOn runs a block on the hosts that it names, or on one host, or compares the output.
func (g *guideRun) followOn(t *testing.T, b guideBlock, only string) {
	t.Helper()
	match := power.FindStringSubmatch(b.code)
	switch {
	case match != nil:
		fleet(t, match[1:]...)
	case g.isOutput(b):
		g.compare(t, b)
	case strings.HasPrefix(b.paragraph, "On `") && b.code != "":
		g.hosts, g.printed = nil, nil
		for _, host := range backquoted.FindAllStringSubmatch(b.paragraph, -1) {
			if only == "" || only == host[1] {
				g.hosts = append(g.hosts, host[1])
			}
		}
		for _, host := range g.hosts {
			t.Logf("%s: %s", host, strings.SplitN(b.code, "\n", 2)[0])
			g.printed = append(g.printed, fleet(t, "run", host, "bash", "-e", "-c", b.code))
		}
		g.script = b.code[strings.LastIndexByte(b.code, '\n')+1:]
		g.commands++
	}
}

// compare requires that each host of the last command has printed the lines of the block in their
// order, possibly with others between. "After some seconds" repeats the last line of the command.
func (g *guideRun) compare(t *testing.T, b guideBlock) {
	t.Helper()
	g.compared++
	for i, host := range g.hosts {
		problem := missingLine(g.printed[i], b.code)
		for deadline := time.Now().Add(patience); problem != nil && strings.HasPrefix(b.paragraph, "After some seconds"); {
			if time.Now().After(deadline) {
				break
			}
			problem = missingLine(fleet(t, "run", host, "bash", "-c", g.script), b.code)
		}
		if problem != nil {
			t.Fatalf("%s, step %s: %v", host, b.step, problem)
		}
	}
}

// missingLine returns an error if a line of the guide is not in the output.
func missingLine(output, guide string) error {
	lines := strings.Split(output, "\n")
	for want := range strings.Lines(guide) {
		i := slices.IndexFunc(lines, func(line string) bool { return sameFields(line, want) })
		if i < 0 {
			return fmt.Errorf("nothing equals %q of the guide, after the lines before it:\n%s", want, output)
		}
		lines = lines[i+1:]
	}
	return nil
}

var variable = regexp.MustCompile(`^([0-9][0-9.,:hms]*|\d+-\d+-\d+T[\d:]+Z|[0-9a-f]{16})$`)

// sameFields reports whether two lines have the same words. Numbers, durations, times and MAC
// addresses may differ. VERSION is any word. Percentages, IP addresses and digests must be equal.
func sameFields(got, want string) bool {
	return slices.EqualFunc(strings.Fields(got), strings.Fields(want), func(got, want string) bool {
		got, want = strings.TrimSuffix(got, ","), strings.TrimSuffix(want, ",")
		if got == want || want == "VERSION" {
			return true
		}
		if _, err := net.ParseMAC(want); err == nil {
			_, err = net.ParseMAC(got)
			return err == nil
		}
		_, err := netip.ParseAddr(want)
		return err != nil && variable.MatchString(want) && variable.MatchString(got)
	})
}

func TestSameFields(t *testing.T) {
	for _, c := range []struct {
		got, want string
		same      bool
	}{
		{"s1  up 33.3% 72:9e:a8:40:dd:50 eth0", "s1 up 33.3% 00:9e:a8:40:dd:51 eth0", true},
		{"process: 12, since 2026-11-26T15:28:35Z", "process: 8, since 2025-01-26T15:28:35Z", true},
		{"established 17s 1", "established 1m2s 3", true},
		{"program 569504 tag 8e0be030b4a65c1b", "program 1 tag bf48c571b741b764", true},
		{"segue 1.2.3", "segue VERSION", true},
		{"succeeded 12 99.99%", "succeeded 12 100.00%", false},
		{"via 192.0.2.11", "via 192.0.2.12", false},
		{"web6/s3 up", "web6/s3 drained", false},
		{"18 s1", "18 s2", false},
		{"18 s1 more", "18 s1", false},
	} {
		if same := sameFields(c.got, c.want); same != c.same {
			t.Errorf("%q and %q: %t", c.got, c.want, same)
		}
	}
}
