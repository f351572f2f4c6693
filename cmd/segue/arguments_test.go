// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/segue-lb/segue/internal/cli"
)

// everyCommand calls do for a command and all its subcommands.
func everyCommand(cmd *cobra.Command, do func(*cobra.Command)) {
	do(cmd)
	for _, sub := range cmd.Commands() {
		everyCommand(sub, do)
	}
}

// TestPlaceholders checks that the help of each flag names the kind of its value by one of the
// usual words, and that an invalid value of each type causes a clear error.
func TestPlaceholders(t *testing.T) {
	known := []string{"", "address", "bytes", "command", "count", "counts", "distribution", "duration",
		"file", "folder", "format", "hex", "int", "kind", "line", "name", "number", "numbers", "process",
		"regexp", "role", "schedule", "share", "shares", "time", "version"}
	everyCommand(newRoot(), func(cmd *cobra.Command) {
		cmd.LocalFlags().VisitAll(func(flag *pflag.Flag) {
			if placeholder, _ := pflag.UnquoteUsage(flag); !slices.Contains(known, placeholder) {
				t.Errorf("%s: --%s %s: the placeholder is none of %v", cmd.CommandPath(), flag.Name, placeholder, known)
			}
			if kind := flag.Value.Type(); kind != "string" && valueForms[kind] == "" {
				t.Errorf("%s --%s: no words for what a %s must be", cmd.CommandPath(), flag.Name, kind)
			}
		})
	})
}

// TestArgumentErrors gives flags and arguments bad values in every way.
func TestArgumentErrors(t *testing.T) {
	for _, test := range []struct{ args, err string }{
		{"bench --rounds many", `--rounds "many": must be a whole number`},
		{"bench --rounds 1.5", `--rounds "1.5": must be a whole number`},
		{"bench --rounds 99999999999999999999", `--rounds "99999999999999999999": is out of range`},
		{"bench --packets -1", `--packets "-1": must be a whole number from 0 to 4294967295`},
		{"bench --packets 4294967296", `--packets "4294967296": is out of range`},
		{`bench --flows "1`, `--flows "\"1": must be values separated by commas`},
		{"bench --flows=", "--flows: at least one number is required"},
		{"bench --json=perhaps", `--json "perhaps": must be true or false`},
		{"bench --case (", `--case "(": must be a regular expression: missing closing ): (`},
		{"bench memory --flows=", "--flows: at least one number is required"},
		{"bench throughput --duration 1", `--duration "1": must be a duration with a unit, such as 500ms, 30s or 2h`},
		{"status --interval 9999999h", `--interval "9999999h": must be a duration with a unit, such as 500ms, 30s or 2h`},
		{"status --nothing", "unknown flag: --nothing; segue status --help lists the flags"},
		{"status --jsn", "unknown flag: --jsn; did you mean --json?"},
		{"status -x", "unknown shorthand flag: 'x' in -x; segue status --help lists the flags"},
		{"lab report --output page.html x", "unknown flag: --output; --out names the folder of the page"},
		{"lb -c a -c b", `--config "b": can be given only once`},
		{"check -c a --config b", `--config "b": can be given only once`},
		{"reload -c a -c a", `--config "a": can be given only once`},
		{"store export -c a -c b", `--config "b": can be given only once`},
		{"lab up -f a -f b", `--file "b": can be given only once`},
		{"lb -c -", "lb: -c -: must be a file, because the process reads it at each reload"},
		{"agent -c -", "agent: -c -: must be a file, because the process reads it at each reload"},
		{"reload -c -", "reload: -c -: must be a file, because the process reads it at each reload"},
		{"store import -c - -", "store import: FILE and SERVICES cannot both be standard input"},
		{"events --since yesterday", `--since "yesterday": must be a duration such as 30m, or a time such as ` +
			`2026-11-26T12:00:00Z or "2026-11-26 12:00"`},
		{"status --interval",
			"flag needs an argument: --interval; segue status --help lists the flags"},
		{"app --speed fast", `--speed "fast": must be a number`},
		{"app --speed 0", "--speed 0: must be a positive number"},
		{"app --workers 0", "--workers 0: must be 1 to 65536"},
		{"app --discipline lifo", `--discipline "lifo": must be processor-sharing or fifo`},
		{"app --demand exponential:190ms",
			`--demand "exponential:190ms": must be a mapping of field names to values, such as "exponential: 190ms"`},
		{"app --demand-table /nowhere", "--demand-table: open /nowhere: no such file or directory"},
		{"app --colocated 50%",
			`--colocated "50%": must be SHARE@TIME, with a share from 0% to less than 100%, such as 50%@60s`},
		{"app 8080", `app: unexpected argument "8080"`},
		{"lb detach", "lb detach: missing INSTANCE"},
		{"agent detach a b", `agent detach: unexpected argument "b"`},
		{"lb", "lb: missing -c FILE"},
		{"lb lb.yaml",
			`lb: unexpected argument "lb.yaml"; to name the file, write: segue lb -c lb.yaml`},
		{"agent", "agent: missing -c FILE"},
		{"agent -c a b", `agent: unexpected argument "b"; to name the file, write: segue agent -c b`},
		{"sim", "sim: missing FILE..."},
		{"bench nothing",
			`bench: unknown command "nothing": the commands are memory, tables, throughput`},
		{"bench memory nothing", `bench memory: unexpected argument "nothing"`},
		{"version nothing", `version: unexpected argument "nothing"`},
		{"lb detch", `lb: unknown command "detch": did you mean detach?`},
		{"agent detch -c x", `agent: unknown command "detch": did you mean detach?`},
		{"server lst", `server: unknown command "lst": did you mean list?`},
		{"service rmove web", `service: unknown command "rmove": did you mean remove?`},
		{"store statsu", `store: unknown command "statsu": did you mean status?`},
		{"statsu", `unknown command "statsu": did you mean status?`},
		{"nothing", `unknown command "nothing": segue --help lists the commands`},
		{"help statsu", `unknown command "statsu": did you mean status?`},
		{"help store statsu", `store: unknown command "statsu": did you mean status?`},
		{"help status x", `status: unexpected argument "x"`},
		{"completion bsh", `completion: unknown command "bsh": did you mean bash?`},
		{"server add web/a/b weight=1", `"web/a/b": must be SERVICE/SERVER, such as web/s1`},
		{"server remove /s1", `"/s1": must be SERVICE/SERVER, such as web/s1`},
		{"lab nothing", `lab: unknown command "nothing": ` +
			"the commands are demo, down, exec, impair, list, queries, report, restart, run, status, up"},
		{"lab up x",
			`lab up: unexpected argument "x"; to name the topology file, write: segue lab up -f x`},
		{"lab down x",
			`lab down: unexpected argument "x"; to name the lab, write: segue lab down --name x`},
		{"lab status x",
			`lab status: unexpected argument "x"; to name the lab, write: segue lab status --name x`},
		{"lab list x", `lab list: unexpected argument "x"`},
		{"load", "load: missing URL..."},
		{"load --rate x http://127.0.0.1/", `--rate "x": must be a number`},
		{"load --rate 1 --expect-status x http://127.0.0.1/",
			`--expect-status "x": must be whole numbers separated by commas`},
		{"lab exec", "lab exec: missing NODE"},
		{"lab restart", "lab restart: missing NODE"},
		{"lab restart --kill", "lab restart: missing NODE"},
		{"lab udp-echo s1", "lab udp-echo: missing PORT..."},
		{"lab udp-echo s1 99999", `port "99999": must be a number from 1 to 65535`},
		{"lab udp-echo s1 x", `port "x": must be a number from 1 to 65535`},
		{"lab udp-echo s1 0", `port "0": must be a number from 1 to 65535`},
	} {
		root := newRoot()
		root.SetOut(new(bytes.Buffer))
		root.SetArgs(strings.Fields(test.args))
		if err := root.Execute(); err == nil || err.Error() != test.err {
			t.Errorf("segue %s: error %v, want %s", test.args, err, test.err)
		}
	}
}

// withoutTable are the commands that print no table, so that they need no --json, and why.
var withoutTable = map[string]string{
	"agent": "runs until it is ended", "agent detach": "a sentence",
	"app":   "runs until it is ended",
	"apply": "one line for each change", "diff": "one line for each change",
	"check": "one line for each error or finding",
	"drain": "sentences", "undrain": "sentences",
	"help": "help", "completion": "help", "lab": "help", "server": "help", "service": "help", "store": "help",
	"completion bash": "a script", "completion fish": "a script", "completion powershell": "a script",
	"completion zsh": "a script",
	"lab delay":      "nothing", "lab guard": "nothing", "lab udp-echo": "nothing",
	"lab down": "a sentence", "lab impair": "a sentence", "lab restart": "a sentence",
	"lab exec":    "the output of another program",
	"lab queries": "a trace", "lab report": "a sentence; the page has the tables",
	"lab up": "sentences",
	"lb":     "runs until it is ended", "lb detach": "a sentence",
	"man":        "nothing",
	"reload":     "a sentence",
	"server add": "one line for each change", "server set": "one line for each change",
	"server remove": "one line for each change", "server reset": "one line for each change",
	"service add": "one line for each change", "service set": "one line for each change",
	"service remove": "one line for each change", "service reset": "one line for each change",
	"store confirm": "sentences; store status has --json", "store export": "YAML",
	"store import": "one line for each change",
}

// TestEveryCommand checks each command: its help works, it refuses an unknown flag, and as a group an unknown
// command. It has --json, unless it prints no table. Letters mean the same everywhere.
func TestEveryCommand(t *testing.T) {
	letters := map[string]string{}
	jsonless := maps.Clone(withoutTable)
	root := newRoot()
	everyCommand(root, func(cmd *cobra.Command) {
		words := strings.Fields(cmd.CommandPath())[1:]
		name := strings.Join(words, " ")
		if help, err := runSegue(t.Context(), append(words, "--help")...); err != nil || !strings.Contains(help, "Usage:\n  "+cmd.CommandPath()) {
			t.Errorf("%s --help: %v\n%s", name, err, help)
		}
		if help, err := runSegue(t.Context(), append([]string{"help"}, words...)...); err != nil || !strings.Contains(help, "Usage:\n") {
			t.Errorf("help %s: %v\n%s", name, err, help)
		}
		if _, err := runSegue(t.Context(), append(words, "--no-such-flag")...); err == nil ||
			!strings.Contains(err.Error(), "unknown flag: --no-such-flag; segue "+name) {
			t.Errorf("%s with an unknown flag: %v", name, err)
		}
		if subs := subcommands(cmd); len(subs) > 0 {
			mistyped := subs[0][:1] + subs[0][2:]
			advice := fmt.Sprintf("unknown command %q: did you mean ", mistyped)
			if out, err := runSegue(t.Context(), append(words, mistyped)...); err == nil || !strings.Contains(err.Error(), advice) {
				t.Errorf("%s %s: %v\n%s", name, mistyped, err, out)
			}
			if out, err := runSegue(t.Context(), append(words, "zzzzzz")...); err == nil {
				t.Errorf("%s zzzzzz succeeded:\n%s", name, out)
			}
		}
		cmd.InheritedFlags() // also adds those of the parents
		if _, is := withoutTable[name]; cmd != root && is == (cmd.Flag("json") != nil) {
			t.Errorf("%s: either it has --json, or withoutTable says why not", name)
		}
		delete(jsonless, name)
		cmd.LocalFlags().VisitAll(func(flag *pflag.Flag) {
			other, known := letters[flag.Shorthand]
			if flag.Shorthand != "" && known && other != flag.Name {
				t.Errorf("%s: -%s is --%s, and elsewhere --%s", name, flag.Shorthand, flag.Name, other)
			}
			letters[flag.Shorthand] = flag.Name
			if flag.Name == "config" || flag.Name == "file" && flag.Shorthand != "" {
				if _, once := flag.Value.(*fileFlag); !once {
					t.Errorf("%s: --%s can be given twice", name, flag.Name)
				}
			}
			if flag.Name == "out" && flag.Shorthand != "o" {
				t.Errorf("%s: --out has no -o", name)
			}
		})
	})
	for name := range jsonless {
		t.Errorf("withoutTable has %s, which is no command", name)
	}
}

// TestArgumentErrorsArePlain calls every command with too few and with too many arguments. The
// errors must not be those of the library.
func TestArgumentErrorsArePlain(t *testing.T) {
	many := make([]string, 100)
	for i := range many {
		many[i] = "x"
	}
	refused := 0
	root := newRoot()
	everyCommand(root, func(cmd *cobra.Command) {
		if cmd == root {
			return // the arguments of this command are subcommands
		}
		for _, args := range [][]string{nil, many} {
			for _, err := range []error{cmd.ValidateArgs(args), cmd.ValidateRequiredFlags()} {
				if err == nil {
					continue
				}
				refused++
				text := err.Error()
				named := strings.HasPrefix(text, cli.CommandName(cmd)+": ")
				if !named || strings.Contains(text, "(s)") {
					t.Errorf("%s with %d arguments: %s", cmd.CommandPath(), len(args), text)
				}
			}
		}
	})
	if refused < 20 {
		t.Errorf("only %d errors were looked at", refused)
	}
}

// TestHelpGroups checks that help lists every command in a group, except for those about segue
// itself.
func TestHelpGroups(t *testing.T) {
	root := newRoot()
	var help bytes.Buffer
	root.SetOut(&help)
	root.SetArgs([]string{"--help"})
	if err := root.Execute(); err != nil {
		t.Fatal(err)
	}
	golden(t, "help.txt", &help)
	about := []string{"completion", "help", "man", "version"}
	for _, cmd := range root.Commands() {
		if grouped := cmd.GroupID != ""; grouped == slices.Contains(about, cmd.Name()) {
			t.Errorf("segue %s is in group %q", cmd.Name(), cmd.GroupID)
		}
	}
}
