// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/cli/clitest"
)

// runModel runs segue-lab model with arguments separated by spaces.
func runModel(t *testing.T, args string) *bytes.Buffer {
	t.Helper()
	out := new(bytes.Buffer)
	root := newRoot()
	root.SetOut(out)
	root.SetArgs(append([]string{"model"}, strings.Fields(args)...))
	if err := root.Execute(); err != nil {
		t.Fatalf("segue-lab model %s: %v", args, err)
	}
	return out
}

func TestModel(t *testing.T) {
	for name, args := range map[string]string{
		"model.txt":              "--threshold 4,8 --load 50%,88% --cores 2 --service 190ms --delay 1ms --percentile 50,99.9",
		"model-distribution.txt": "distribution --threshold 4 --points 5",
		"model-servers.txt":      "servers",
		"model-transient.txt":    "transient --threshold 2,4 --to 4s",
		"model-two-servers.txt":  "two-servers --room 5",
	} {
		clitest.Golden(t, name, runModel(t, args))
	}
}

// TestModelJSON checks that every command prints valid JSON.
func TestModelJSON(t *testing.T) {
	for _, args := range []string{"", "distribution", "servers", "transient", "two-servers --room 3"} {
		var rows []map[string]any
		if err := json.Unmarshal(runModel(t, args+" --json").Bytes(), &rows); err != nil || len(rows) == 0 {
			t.Errorf("segue-lab model %s --json: %d objects, error %v", args, len(rows), err)
		}
	}
}

func TestModelErrors(t *testing.T) {
	for args, want := range map[string]string{
		"--load 100%":                 `--load "100%": must be a share above 0% and below 100%, such as 50%`,
		"--load 0.88":                 `--load "0.88": must be a share above 0% and below 100%, such as 50%`,
		"--load=":                     "--load: at least one share is required",
		"--threshold 257":             `--threshold "257": must be a number from 0 to 256`,
		"--threshold x":               `--threshold "x": must be a number from 0 to 256`,
		"--cores 0":                   "--cores 0: must be from 1 to 256",
		"--service 0s":                "--service 0s: must be above 0",
		"--delay -1s":                 "--delay -1s: must not be negative",
		"--percentile 100":            `--percentile "100": must be a number above 0 and at most 99.9999`,
		"distribution --points 0":     "--points 0: must be from 1 to 10000",
		"distribution --to -1s":       "--to -1s: must not be negative",
		"servers --limit 2s":          "--limit 2s: limit of 2 service times: must be above 2.303, the percentile of an idle server, and at most 10000",
		"servers --servers 0":         "--servers 0: must be at least 1",
		"transient --step 0s":         "--step 0s: must be above 0, at most --to 20s, and at least 1/10000 of that",
		"transient --flows -1":        "--flows -1: must be from 0 to 256",
		"transient --service 1ns":     "--to 20s: must be at most 1000000 times --service 1ns",
		"two-servers --speeds 1":      `--speeds "1": must be two numbers, such as 2,1`,
		"two-servers --weights 1,0":   `--weights "0": must be a number above 0`,
		"two-servers --load 0%":       `--load "0%": must be a share above 0%, such as 50%`,
		"two-servers --observed 101%": `--observed "101%": must be a share from 0% to 100%, such as 50%`,
		"two-servers --room 33":       "--room 33: must be from 1 to 32",
		"nothing": `model: unknown command "nothing": ` +
			"the commands are distribution, servers, transient, two-servers",
	} {
		clitest.ArgumentErrors(t, newRoot, map[string]string{"model " + args: want})
	}
}

// TestModelInterrupted checks that a long computation ends when the program is interrupted.
func TestModelInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for _, args := range []string{"transient", "two-servers --room 3"} {
		_, err := clitest.Run(ctx, newRoot(), "", append([]string{"model"}, strings.Fields(args)...)...)
		if !errors.Is(err, context.Canceled) {
			t.Errorf("segue-lab model %s: error %v, want that it was cancelled", args, err)
		}
	}
}

// TestModelThreshold checks that the policy of --threshold +4 has the name SR4.
func TestModelThreshold(t *testing.T) {
	if got := runModel(t, "--load 50% --threshold +4").String(); !strings.Contains(got, " SR4 ") {
		t.Errorf("no SR4 in\n%s", got)
	}
}
