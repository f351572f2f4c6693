package main

import (
	"strings"
	"testing"
)

func TestReport(t *testing.T) {
	const start = `{"Action":"start","Package":"p"}`
	for _, c := range []struct {
		name   string
		events []string
		want   counts
		prints []string
		hides  string
	}{
		{
			name: "one of each, with the output of those that did not pass",
			events: []string{
				start,
				`{"Action":"output","Package":"p","Test":"A","Output":"all is well\n"}`,
				`{"Action":"pass","Package":"p","Test":"A"}`,
				`{"Action":"output","Package":"p","Test":"B","Output":"got 1, want 2\n"}`,
				`{"Action":"fail","Package":"p","Test":"B"}`,
				`{"Action":"output","Package":"p","Test":"C","Output":"needs root\n"}`,
				`{"Action":"skip","Package":"p","Test":"C"}`,
				`{"Action":"fail","Package":"p","Elapsed":0.2}`,
			},
			want:   counts{1, 1, 1},
			prints: []string{"got 1, want 2", "needs root", "fail p: 1 passed, 1 failed, 1 skipped (0.2 s)"},
			hides:  "all is well",
		},
		{
			name: "a package that does not build",
			events: []string{
				`{"ImportPath":"p","Action":"build-output","Output":"undefined: x\n"}`,
				`{"ImportPath":"p","Action":"build-fail"}`,
				start,
				`{"Action":"output","Package":"p","Output":"FAIL\tp [build failed]\n"}`,
				`{"Action":"fail","Package":"p","FailedBuild":"p"}`,
			},
			want:   counts{failed: 1},
			prints: []string{"undefined: x", "[build failed]"},
		},
		{
			name: "a package that dies outside of its tests",
			events: []string{
				start,
				`{"Action":"pass","Package":"p","Test":"A"}`,
				`{"Action":"output","Package":"p","Output":"panic: in TestMain\n"}`,
				`{"Action":"fail","Package":"p"}`,
			},
			want:   counts{passed: 1, failed: 1},
			prints: []string{"panic: in TestMain"},
		},
		{
			name:   "a package without tests",
			events: []string{start, `{"Action":"skip","Package":"p"}`},
			hides:  "p:",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			var out strings.Builder
			got, err := report(strings.NewReader(strings.Join(c.events, "\n")), &out)
			if err != nil {
				t.Fatal(err)
			}
			if got != c.want {
				t.Errorf("counts: %v, want %v", got, c.want)
			}
			for _, text := range c.prints {
				if !strings.Contains(out.String(), text) {
					t.Errorf("does not print %q:\n%s", text, &out)
				}
			}
			if c.hides != "" && strings.Contains(out.String(), c.hides) {
				t.Errorf("prints %q:\n%s", c.hides, &out)
			}
		})
	}
}

func TestTiersDivideThePackages(t *testing.T) {
	all := []string{
		module + "/cmd/segue", module + "/internal/tables", module + "/internal/balancers",
		module + "/internal/balancer", module + "/internal/nexthop", module + "/test/e2e",
	}
	found := map[string][]string{}
	for _, tier := range tiers {
		for _, p := range tier.choosePackages(all) {
			found[p] = append(found[p], tier.name)
		}
	}
	for i, want := range []string{"unit", "unit", "unit", "packet", "e2e", "e2e"} {
		if got := strings.Join(found[all[i]], " "); got != want {
			t.Errorf("%s is in tier %q, want %q", all[i], got, want)
		}
	}
}
