// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/cli"
	"github.com/segue-lb/segue/internal/version"
)

func TestPrintVersion(t *testing.T) {
	known := version.Build{
		Version: "v0.4.1-0.20260102030405-c0ffee123456+dirty",
		Commit:  "c0ffee1234567890c0ffee1234567890c0ffee12", Time: "2026-01-02T03:04:05Z",
		Modified: true, Go: "go1.26.0", Platform: "linux/amd64", Tables: 3,
	}
	var output bytes.Buffer
	unknown := version.Build{
		Version: "(devel)", Go: "go1.26.0", Platform: "linux/arm64", Tables: 3,
	}
	for _, build := range []version.Build{known, unknown} {
		if err := printVersion(&output, build); err != nil {
			t.Fatal(err)
		}
	}
	golden(t, "version.txt", &output)
	output.Reset()
	if err := cli.PrintJSON(&output, known); err != nil {
		t.Fatal(err)
	}
	golden(t, "version.json", &output)
}

// TestVersion checks that the command and the flag print the same version.
func TestVersion(t *testing.T) {
	run := func(args ...string) string {
		var output bytes.Buffer
		root := newRoot()
		root.SetOut(&output)
		root.SetArgs(args)
		if err := root.Execute(); err != nil {
			t.Fatal(err)
		}
		return output.String()
	}
	var build version.Build
	if err := json.Unmarshal([]byte(run("version", "--json")), &build); err != nil {
		t.Fatal(err)
	}
	if build != version.Read() {
		t.Errorf("the command says %+v, the build is %+v", build, version.Read())
	}
	if got, want := run("--version"), "segue version "+build.Version+"\n"; got != want {
		t.Errorf("--version prints %q, want %q", got, want)
	}
	if got := run("version"); !strings.HasPrefix(got, "segue "+build.Version+"\n") {
		t.Errorf("version prints %q", got)
	}
}
