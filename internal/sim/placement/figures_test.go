package placement_test

import (
	"regexp"
	"testing"

	"github.com/segue-lb/segue/internal/sim/scenario"
)

// certain are the assertions about values that scatter little from run to run.
var certain = regexp.MustCompile(`^(mean\((sr4|least[234]|reports|gsq)|(mean|p90)\((lsq|lsq-home|territory)-[248]|(mean|p90)\(sed-[24])\) within`)

// TestFigures runs the scenarios of docs/placement.md once, instead of several times, and has their
// assertions hold about cases that scatter little.
func TestFigures(t *testing.T) {
	checked := 0
	for _, file := range []string{"placement-hunt.yaml", "placement-infer.yaml"} {
		s, err := scenario.Load("../../../docs/examples/sim/" + file)
		if err != nil {
			t.Fatal(err)
		}
		s.Runs = 1
		report, err := s.Run(t.Context(), 0, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, v := range report.Assertions {
			if !certain.MatchString(v.Condition) {
				continue
			}
			checked++
			if !v.OK() {
				t.Errorf("%s: %s: %s", file, v.Condition, v.Values)
			}
		}
	}
	if checked != 28 {
		t.Errorf("only %d assertions checked", checked)
	}
}
