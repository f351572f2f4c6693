// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/segue-lb/segue/internal/datapath"
	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/internal/version"
)

// serve passes a worker all its input at once, and returns its lines after the hello.
func serve(t *testing.T, ctx context.Context, input string) ([]answer, error) {
	t.Helper()
	var out bytes.Buffer
	serveErr := ServeWorker(ctx, strings.NewReader(input), &out)
	lines := json.NewDecoder(&out)
	var first hello
	testhost.Must(t, lines.Decode(&first))
	if want := (hello{workerProtocol, version.Read()}); first != want {
		t.Errorf("hello is %+v, want %+v", first, want)
	}
	var answers []answer
	for lines.More() {
		var a answer
		testhost.Must(t, lines.Decode(&a))
		if a.Progress == "" {
			answers = append(answers, a)
		}
	}
	return answers, serveErr
}

// A worker makes the requested measurements, and leaves nothing pinned.
func TestWorkerMeasures(t *testing.T) {
	testhost.NeedAgent(t)
	answers, err := serve(t, t.Context(), `
		{"prepare": {"flows": [10], "room": 16, "case": "^vip-miss$"}}
		{"run": {"case": 2, "packets": 1000}}
		{"run": {"case": 3, "packets": 1000}}`)
	testhost.Must(t, err)
	if len(answers) != 3 {
		t.Fatalf("%d answers: %+v", len(answers), answers)
	}
	var names []string
	for _, c := range answers[0].Cases {
		names = append(names, c.String())
		if c.Program.Instructions <= 0 || len(c.Program.Tag) != 16 {
			t.Errorf("%s: program %+v", c, c.Program)
		}
	}
	want := "null, ipv6, 1 flows|null, ipv4, 1 flows|floor, ipv6, srv6-insert, 1 flows|" +
		"vip-miss, ipv6, srv6-insert, 1 flows|vip-miss, ipv4, srv6-encap, 1 flows"
	if got := strings.Join(names, "|"); got != want {
		t.Errorf("cases are %s, want %s", got, want)
	}
	for _, a := range answers[1:] {
		if a.Cost == nil || a.Cost.Nanoseconds <= 0 || a.Error != "" {
			t.Errorf("a measurement was answered by %+v", a)
		}
	}
	left, err := filepath.Glob(datapath.Dir(fmt.Sprintf("bench-%d-*", os.Getpid())))
	if err != nil || len(left) > 0 {
		t.Errorf("still pinned: %v, %v", left, err)
	}
}

// An invalid request is answered by an error with the reason. The worker then reads the next
// request.
func TestWorkerRefuses(t *testing.T) {
	for request, want := range map[string]string{
		`{}`:                                  "no known kind",
		`{"run": {"case": 0, "packets": 1}}`:  "case 0: there are 0",
		`{"run": {"case": -1, "packets": 1}}`: "case -1",
		`{"prepare": {"flows": [1], "room": 1, "case": "("}}`:      "missing closing )",
		`{"prepare": {"flows": [1], "room": 1, "case": "nosuch"}}`: `"nosuch"`,
	} {
		answers, err := serve(t, t.Context(), request+"\n{}")
		if err != nil || len(answers) != 2 || !strings.Contains(answers[0].Error, want) {
			t.Errorf("%s: %+v, %v; want %q", request, answers, err, want)
		}
	}
	_, err := serve(t, t.Context(), "list")
	if err == nil || !strings.Contains(err.Error(), "read a request") {
		t.Errorf("input that is not JSON: %v", err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	answers, err := serve(t, ended, "{}")
	if err != nil || len(answers) != 1 || answers[0].Error != context.Canceled.Error() {
		t.Errorf("after the end of its context: %+v, %v", answers, err)
	}
}

// If the request names no case, the cases are those of whole programs of the build. Single steps
// and the reference program are not among them.
func TestCasesOfBuilds(t *testing.T) {
	chosen, err := (&prepareRequest{Flows: []uint32{1000}, Room: 1000}).chooseCases()
	testhost.Must(t, err)
	counts := map[string]int{}
	for _, c := range chosen {
		counts[c.name]++
		if c.name == caseReference || strings.Contains(c.name, caseSteps) {
			t.Errorf("%s is compared", c.name)
		}
	}
	for _, name := range []string{
		caseNull, caseKnown, caseSYN, caseTurnSYN, caseHuntSYN, caseReportSYN, caseSignal, caseDeliver,
		caseAccept, casePassOn, caseAck,
	} {
		if counts[name] < 2 {
			t.Errorf("%s is compared %d times, want each family", name, counts[name])
		}
	}
}
