// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"

	"github.com/segue-lb/segue/internal/cli/clitest"
)

// TestArgumentErrors checks the errors about wrong flags and arguments.
func TestArgumentErrors(t *testing.T) {
	clitest.ArgumentErrors(t, newRoot, map[string]string{
		"bench --rounds many":                 `--rounds "many": must be a whole number`,
		"bench --rounds 1.5":                  `--rounds "1.5": must be a whole number`,
		"bench --rounds 99999999999999999999": `--rounds "99999999999999999999": is out of range`,
		"bench --packets -1":                  `--packets "-1": must be a whole number from 0 to 4294967295`,
		"bench --packets 4294967296":          `--packets "4294967296": is out of range`,
		`bench --flows "1`:                    `--flows "\"1": must be values separated by commas`,
		"bench --flows=":                      "--flows: at least one number is required",
		"bench --json=perhaps":                `--json "perhaps": must be true or false`,
		"bench --case (":                      `--case "(": must be a regular expression: missing closing ): (`,
		"bench memory --flows=":               "--flows: at least one number is required",
		"bench throughput --duration 1":       `--duration "1": must be a duration with a unit, such as 500ms, 30s or 2h`,
		"lab report --output page.html x":     "unknown flag: --output; --out names the folder of the page",
		"lab up -f a -f b":                    `--file "b": can be given only once`,
		"app --speed fast":                    `--speed "fast": must be a number`,
		"app --speed 0":                       "--speed 0: must be a positive number",
		"app --workers 0":                     "--workers 0: must be 1 to 65536",
		"app --discipline lifo":               `--discipline "lifo": must be processor-sharing or fifo`,
		"app --demand exponential:190ms":      `--demand "exponential:190ms": must be a mapping of field names to values, such as "exponential: 190ms"`,
		"app --demand-table /nowhere":         "--demand-table: open /nowhere: no such file or directory",
		"app --colocated 50%":                 `--colocated "50%": must be SHARE@TIME, with a share from 0% to less than 100%, such as 50%@60s`,
		"app 8080":                            `app: unexpected argument "8080"`,
		"sim":                                 "sim: missing FILE...",
		"bench nothing":                       `bench: unknown command "nothing": the commands are control, memory, tables, throughput`,
		"bench memory nothing":                `bench memory: unexpected argument "nothing"`,
		"lab nothing": `lab: unknown command "nothing": ` +
			"the commands are check, demo, down, exec, impair, list, queries, report, restart, run, status, table, up",
		"lab up x":                        `lab up: unexpected argument "x"; to name the topology file, write: segue-lab lab up -f x`,
		"lab down x":                      `lab down: unexpected argument "x"; to name the lab, write: segue-lab lab down --name x`,
		"lab status x":                    `lab status: unexpected argument "x"; to name the lab, write: segue-lab lab status --name x`,
		"lab list x":                      `lab list: unexpected argument "x"`,
		"load":                            "load: missing URL...",
		"load --rate x http://127.0.0.1/": `--rate "x": must be a number`,
		"load --rate 1 --expect-status x http://127.0.0.1/": `--expect-status "x": must be whole numbers separated by commas`,
		"lab exec":              "lab exec: missing NODE",
		"lab restart":           "lab restart: missing NODE",
		"lab restart --kill":    "lab restart: missing NODE",
		"lab udp-echo s1":       "lab udp-echo: missing PORT...",
		"lab udp-echo s1 99999": `port "99999": must be a number from 1 to 65535`,
		"lab udp-echo s1 x":     `port "x": must be a number from 1 to 65535`,
		"lab udp-echo s1 0":     `port "0": must be a number from 1 to 65535`,
		"version nothing":       `version: unexpected argument "nothing"`,
		"nothing":               `unknown command "nothing": segue-lab --help lists the commands`,
	})
}

// TestCommands checks all commands. The map tells what commands print instead of a table.
func TestCommands(t *testing.T) {
	clitest.Commands(t, newRoot, map[string]string{
		"app":       "runs until it is ended",
		"lab":       "help",
		"lab check": "one line for each error",
		"lab delay": "nothing", "lab guard": "nothing", "lab udp-echo": "nothing",
		"lab down": "a sentence", "lab impair": "a sentence", "lab restart": "a sentence",
		"lab exec":    "the output of another program",
		"lab queries": "a trace", "lab report": "a sentence; the page has the tables",
		"lab table": "a table in Markdown; the file is for programs",
		"lab up":    "sentences",
	})
}
