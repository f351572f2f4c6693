// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/segue-lb/segue/lab"
	"github.com/segue-lb/segue/lab/httpload"
)

// TestLoadGenerator sends requests through the balancers to services of both placements, from many
// client addresses, and counts who answers. All requests succeed, and the servers agree with the
// report about their number.
func TestLoadGenerator(t *testing.T) {
	t.Parallel()
	l := up(t, topology("http6-insert", "hunt6-insert"))
	command(t, l, "client", "ip", "route", "add", "local", "2001:db8:c1::/124", "dev", "lo")
	command(t, l, "edge", "ip", "route", "add", "2001:db8:c1::/124", "via", "2001:db8:c::2")
	url := func(name string) string {
		return fmt.Sprintf("http://%s/1kB", service(t, l, name).Address())
	}

	for name, flags := range map[string][]string{
		"connection per request": nil,
		"keep-alive":             {"--keep-alive", "--connections", "50", "--idle", "200"},
	} {
		t.Run(name, func(t *testing.T) {
			log := filepath.Join(t.TempDir(), "log.csv")
			report := generate(t, l, append(flags, "--rate", "400", "--requests", "800", "--log", log,
				"--source", "2001:db8:c1::/124", url("http6-insert"), url("hunt6-insert"))...)
			if report.Requests != 800 || report.Succeeded != 800 {
				t.Errorf("%d of %d requests succeeded: %v", report.Succeeded, report.Requests, report.Errors)
			}
			var answered []string
			responses := uint64(0)
			for _, s := range report.Servers {
				answered = append(answered, s.Name)
				responses += s.Responses
			}
			if responses != 800 {
				t.Errorf("%d responses by %v, want 800", responses, answered)
			}
			// Few connections may all go to few servers.
			all := nodes(l, lab.RoleServer)
			if report.Connections == 800 && !slices.Equal(answered, all) {
				t.Errorf("800 connections to %v, want some to each of %v", answered, all)
			}
			if reused := report.Connections < 800; reused != (len(flags) > 0) {
				t.Errorf("%d connections for 800 requests", report.Connections)
			}
			if idle := report.Idle; len(flags) > 0 && (idle.Open != 200 || idle.Failed+idle.Lost > 0) {
				t.Errorf("idle connections %+v", idle)
			}
		})
	}
	requireNoDrops(t, l)
}

// generate runs segue-lab load on the client.
func generate(t *testing.T, l *lab.Lab, args ...string) *httpload.Report {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
	defer cancel()
	var out, messages bytes.Buffer
	cmd := exec.CommandContext(ctx, laboratory, append([]string{"load", "--json"}, args...)...)
	cmd.Stdout, cmd.Stderr = &out, &messages
	must(t, l.Node("client").Start(cmd))
	if err := cmd.Wait(); err != nil {
		t.Fatalf("segue-lab load: %v: %s", err, &messages)
	}
	report := new(httpload.Report)
	must(t, json.Unmarshal(out.Bytes(), report))
	return report
}
