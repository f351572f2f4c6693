// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"

	"github.com/segue-lb/segue/internal/cli/clitest"
)

// TestArgumentErrors checks the errors about wrong flags and arguments.
func TestArgumentErrors(t *testing.T) {
	clitest.ArgumentErrors(t, newRoot, map[string]string{
		"status --interval 9999999h": `--interval "9999999h": must be a duration with a unit, such as 500ms, 30s or 2h`,
		"status --nothing":           "unknown flag: --nothing; segue status --help lists the flags",
		"status --jsn":               "unknown flag: --jsn; did you mean --json?",
		"status -x":                  "unknown shorthand flag: 'x' in -x; segue status --help lists the flags",
		"lb -c a -c b":               `--config "b": can be given only once`,
		"check -c a --config b":      `--config "b": can be given only once`,
		"reload -c a -c a":           `--config "a": can be given only once`,
		"store export -c a -c b":     `--config "b": can be given only once`,
		"lb -c -":                    "lb: -c -: must be a file, because the process reads it at each reload",
		"agent -c -":                 "agent: -c -: must be a file, because the process reads it at each reload",
		"reload -c -":                "reload: -c -: must be a file, because the process reads it at each reload",
		"store import -c - -":        "store import: FILE and SERVICES cannot both be standard input",
		"events --since yesterday": `--since "yesterday": must be a duration such as 30m, or a time such as ` +
			`2026-11-26T12:00:00Z or "2026-11-26 12:00"`,
		"status --interval":           "flag needs an argument: --interval; segue status --help lists the flags",
		"lb detach":                   "lb detach: missing INSTANCE",
		"agent detach a b":            `agent detach: unexpected argument "b"`,
		"lb":                          "lb: missing -c FILE",
		"lb lb.yaml":                  `lb: unexpected argument "lb.yaml"; to name the file, write: segue lb -c lb.yaml`,
		"agent":                       "agent: missing -c FILE",
		"agent -c a b":                `agent: unexpected argument "b"; to name the file, write: segue agent -c b`,
		"version nothing":             `version: unexpected argument "nothing"`,
		"lb detch":                    `lb: unknown command "detch": did you mean detach?`,
		"agent detch -c x":            `agent: unknown command "detch": did you mean detach?`,
		"server lst":                  `server: unknown command "lst": did you mean list?`,
		"service rmove web":           `service: unknown command "rmove": did you mean remove?`,
		"store statsu":                `store: unknown command "statsu": did you mean status?`,
		"statsu":                      `unknown command "statsu": did you mean status?`,
		"nothing":                     `unknown command "nothing": segue --help lists the commands`,
		"help statsu":                 `unknown command "statsu": did you mean status?`,
		"help store statsu":           `store: unknown command "statsu": did you mean status?`,
		"help status x":               `status: unexpected argument "x"`,
		"completion bsh":              `completion: unknown command "bsh": did you mean bash?`,
		"server add web/a/b weight=1": `"web/a/b": must be SERVICE/SERVER, such as web/s1`,
		"server remove /s1":           `"/s1": must be SERVICE/SERVER, such as web/s1`,
	})
}

// TestCommands checks all commands. The map tells what commands print instead of a table.
func TestCommands(t *testing.T) {
	clitest.Commands(t, newRoot, map[string]string{
		"agent": "runs until it is ended", "agent detach": "a sentence",
		"apply": "one line for each change", "diff": "one line for each change",
		"check": "one line for each error or finding",
		"drain": "sentences", "undrain": "sentences",
		"server": "help", "service": "help", "store": "help",
		"lb": "runs until it is ended", "lb detach": "a sentence",
		"reload":     "a sentence",
		"server add": "one line for each change", "server set": "one line for each change",
		"server remove": "one line for each change", "server reset": "one line for each change",
		"service add": "one line for each change", "service set": "one line for each change",
		"service remove": "one line for each change", "service reset": "one line for each change",
		"store confirm": "sentences; store status has --json", "store export": "YAML",
		"store import": "one line for each change",
	})
}
