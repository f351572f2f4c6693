// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/cli/clitest"
	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/lab"
)

func TestLabRefuses(t *testing.T) {
	file := filepath.Join(t.TempDir(), "topology.yaml")
	testhost.Must(t, os.WriteFile(file, []byte("servers: 1000\n"), 0o644))
	for _, test := range []struct{ args, err string }{
		{"up -f " + file, file + `:1: servers "1000": must be 1 to 128`},
		{"up -f " + file + ".none", "no such file"},
		{"up --name my-lab", `name "my-lab": must be`},
		{"demo extra", `lab demo: unexpected argument "extra"`},
		{"status --name nosuchlab", `lab "nosuchlab" is not up`},
		{"exec --name nosuchlab s1 -- true", `lab "nosuchlab" is not up`},
		{"exec s1 --name nosuchlab", "lab exec: --name after the node: flags go before the node"},
		{"restart --name nosuchlab s1", `lab "nosuchlab" is not up`},
		{"impair --name nosuchlab --drop 5%", `lab "nosuchlab" is not up`},
		{"impair --name nosuchlab --off", `lab "nosuchlab" is not up`},
		{"impair --drop 5", `--drop "5": must be a share from 0% to 100%, such as 5%`},
		{"impair",
			"lab impair: missing a share: --drop, --duplicate or --reorder; --off ends the"},
		{"impair s1", "lab impair: missing a share: "},
		{"impair --seed 1 s1", "lab impair: missing a share: "},
		{"impair --drop 0% --reorder 0%",
			"lab impair: all shares are 0%: --off ends the impairment"},
		{"impair --off s1",
			"lab impair: --off ends the impairment of all nodes; it cannot have shares or nodes beside it"},
		{"impair --off --drop 5%", "lab impair: --off ends the impairment of all nodes; "},
		{"queries", "--rate 0: must be more than 0"},
		{"queries --rate 1 --day -1s", "--day -1s: must be more than 0"},
		{"queries --rate 1 --duration -1s", "--duration -1s: must not be negative"},
		{"queries --rate 1 --static 1.5", "--static 1.5: must be from 0 to 1"},
		{"queries --rate 1 --curve sine:2", `--curve "sine:2": the amplitude must be`},
		{"queries --rate 1 -f " + file, file + `:1: servers "1000": must be 1 to 128`},
		{"down --name ../x", `name "../x": must be`},
		{"down --name ../x --if-exists", `name "../x": must be`},
		{"down --name nosuchlab", `lab "nosuchlab" is not up`},
	} {
		if _, err := runLab(test.args); err == nil || !strings.Contains(err.Error(), test.err) {
			t.Errorf("lab %s: %v, want %s", test.args, err, test.err)
		}
	}
}

// TestTopologyByStandardInput reads topologies from standard input.
func TestTopologyByStandardInput(t *testing.T) {
	for input, want := range map[string]string{
		"servers: 1000\n": `standard input:1: servers "1000": must be 1 to 128`,
		"servers: [\n":    "standard input:2: a value is missing here",
		"servers: 2\n":    "",
	} {
		_, err := clitest.Run(t.Context(), newRoot(), input, "lab", "queries", "--rate", "1", "--duration", "1ms", "-f", "-")
		if (err == nil) != (want == "") || !strings.Contains(fmt.Sprint(err), want) {
			t.Errorf("%q: %v, want %q", input, err, want)
		}
	}
}

// TestLabCheck validates topologies of files and of standard input.
func TestLabCheck(t *testing.T) {
	const valid = "../../docs/examples/lab/infer.yaml"
	file := filepath.Join(t.TempDir(), "lab.yaml")
	testhost.Must(t, os.WriteFile(file, []byte("balancers: 17\n"), 0o644))
	for _, test := range []struct{ file, input, output, err string }{
		{valid, "", valid + ": valid topology: 2 balancers, 8 servers, 1 service\n", ""},
		{file, "", file + ":1: balancers \"17\": must be 1 to 16\n", file + ": invalid topology: 1 error"},
		{"-", "servers: 2\n", "standard input: valid topology: 2 balancers, 2 servers, 17 services\n", ""},
		{"-", "servers: [\n", "standard input:2: a value is missing here, or a bracket before it is not closed\n", "standard input: invalid topology: 1 error"},
		{"/nowhere", "", "", "open /nowhere: no such file or directory"},
	} {
		output, err := clitest.Run(t.Context(), newRoot(), test.input, "lab", "check", test.file)
		if output != test.output || (err == nil) != (test.err == "") || err != nil && err.Error() != test.err {
			t.Errorf("lab check %s: %v, output:\n%s", test.file, err, output)
		}
	}
}

// TestTellNext checks that the commands that the demo prints at its end exist, and name the lab.
func TestTellNext(t *testing.T) {
	small := lab.DefaultTopology()
	small.Name = "small"
	called := os.Args[0]
	os.Args[0] = "bin/segue-lab"
	defer func() { os.Args[0] = called }()
	for _, test := range []struct {
		topology lab.Topology
		flags    []string
		commands string
	}{
		{lab.DefaultTopology(), nil, `segue-lab lab up
segue-lab lab exec client -- curl -s 'http://[2001:db8:80::1]:80/'
segue status -i lab-demo-lb1
segue-lab lab down`},
		{small, []string{"-f", "small.yaml"}, `segue-lab lab up --file small.yaml
segue-lab lab exec --name small client -- curl -s 'http://[2001:db8:80::1]:80/'
segue status -i lab-small-lb1
segue-lab lab down --name small`},
	} {
		cmd := newLabDemo()
		testhost.Must(t, cmd.ParseFlags(test.flags))
		var out bytes.Buffer
		cmd.SetOut(&out)
		tellNext(cmd, test.topology)
		test.commands = strings.ReplaceAll(test.commands, "segue", "bin/segue")
		want := "    " + strings.ReplaceAll(test.commands, "\n", "\n    ") + "\n"
		if _, commands, _ := strings.Cut(out.String(), ":\n"); commands != want {
			t.Errorf("%v: printed\n%s\nwant\n%s", test.flags, commands, want)
		}
		for line := range strings.SplitSeq(test.commands, "\n") {
			if strings.HasPrefix(line, "bin/segue status ") {
				continue
			}
			found, rest, err := newRoot().Find(strings.Fields(line)[1:])
			if err != nil || found.ParseFlags(rest) != nil || found.ValidateArgs(found.Flags().Args()) != nil {
				t.Errorf("%s: no such command: %v", line, err)
			}
		}
	}
}

// runLab runs a command of segue-lab lab and returns what it printed.
func runLab(args string) (string, error) {
	words := append([]string{"lab"}, strings.Fields(args)...)
	return clitest.Run(context.Background(), newRoot(), "", words...)
}

// TestLabWithoutProcesses runs commands on a lab that consists only of its state, as after its
// namespaces were deleted by hand.
func TestLabWithoutProcesses(t *testing.T) {
	name := fmt.Sprintf("l%d", os.Getpid()%1e6)
	dir := filepath.Join("/run/segue/lab", name)
	if err := os.MkdirAll(dir, 0o755); err != nil || os.Geteuid() != 0 {
		t.Skipf("labs need root: %v", err)
	}
	t.Cleanup(func() {
		if _, err := runLab("down --if-exists --name " + name); err != nil {
			t.Error(err)
		}
	})
	for _, test := range []struct{ args, output, err string }{
		// A lab that is not complete counts as up. Otherwise nobody would take it down.
		{"list", name + "\n", ""},
		{"list --json", "\"" + name + "\"", ""},
		{"status --name " + name, "", `lab "` + name + `" is half built or half removed; ` +
			"remove it with: segue-lab lab down --name " + name},
		{"down --name nosuchlab",
			"", `lab "nosuchlab" is not up; choose a lab that is up with --name: `},
		{"down --name nosuchlab", "", name},
		{"down --if-exists --name nosuchlab", "There is no lab nosuchlab.\n", ""},
		{"down --name " + name, "Lab " + name + " is down.\n", ""},
		{"down --name " + name, "", `lab "` + name + `" is not up`},
		{"down --if-exists --name " + name, "There is no lab " + name + ".\n", ""},
	} {
		output, err := runLab(test.args)
		if !strings.Contains(output, test.output) || (output == "") != (test.output == "") {
			t.Errorf("lab %s: output %q, want %q", test.args, output, test.output)
		}
		if (err == nil) != (test.err == "") || !strings.Contains(fmt.Sprint(err), test.err) {
			t.Errorf("lab %s: error %v, want %q", test.args, err, test.err)
		}
	}
	output, err := runLab("list")
	if err != nil || slices.Contains(strings.Split(output, "\n"), name) {
		t.Errorf("%q, %v, want no %s", output, err, name)
	}
}

// TestLabQueries writes the requests of a whole day, and of a part of a day.
func TestLabQueries(t *testing.T) {
	for _, test := range []struct {
		args  string
		until float64 // seconds
	}{{"--day 1m", 60}, {"--day 1h --duration 30s --start 12:00 --static 0", 30}} {
		output, err := runLab("queries --rate 20 " + test.args)
		lines := strings.Split(strings.TrimSpace(output), "\n")
		last, _, _ := strings.Cut(lines[len(lines)-1], "\t")
		at, errLast := strconv.ParseFloat(last, 64)
		if err != nil || errLast != nil || at > test.until || at < 0.8*test.until {
			t.Errorf("%s: %v, the last request is at %q, want it shortly before %v",
				test.args, err, last, test.until)
		}
		if strings.Contains(output, "/resources/") == strings.Contains(test.args, "--static 0") {
			t.Errorf("%s: wrong static files in %s", test.args, output)
		}
	}
}
