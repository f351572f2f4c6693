// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"testing"
)

// wavering is a package in which TestOnce fails the first time only.
const wavering = `package wavering

import (
	"os"
	"testing"
)

func TestOnce(t *testing.T) {
	t.Run("part", func(t *testing.T) {
		if os.Mkdir("ran", 0o700) == nil {
			t.Error("the first time")
		}
	})
}

func TestPasses(t *testing.T) {}
`

// prints returns a test that prints a text, and fails the first time.
func prints(text string) string {
	return fmt.Sprintf("func TestPrints(t *testing.T) { if os.Mkdir(%q, 0o700) == nil { t.Error(%[1]q) } }\n", text)
}

// A test that has failed is repeated alone. If it passes then, its tier has not failed, and the
// failure is kept for the end of the output.
func TestRepeat(t *testing.T) {
	for _, c := range []struct {
		name     string
		others   int // further tests, which always fail
		more     string
		want     counts
		repeated int
	}{
		{"fails once", 0, "", counts{passed: 3}, 2},
		{"another fails always", 1, "", counts{passed: 3, failed: 1}, 2},
		{"too many fail", mostRepeated, "", counts{passed: 1, failed: mostRepeated + 2}, 0},
		{"one races", 0, prints("WARNING: DATA RACE"), counts{passed: 1, failed: 3}, 0},
		{"one panics", 0, "func TestPanics(t *testing.T) { panic(1) }\n", counts{passed: 1, failed: 3}, 0},
		{"a goroutine panics", 0, "func TestWaits(t *testing.T) { go func() { panic(1) }(); select {} }\n",
			counts{passed: 1, failed: 3}, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Chdir(t.TempDir())
			text := wavering + c.more
			for i := range c.others {
				text += fmt.Sprintf("func TestAlways%d(t *testing.T) { t.Error() }\n", i)
			}
			for name, content := range map[string]string{"go.mod": "module wavering\n", "w_test.go": text} {
				if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			of := tier{name: "wavering", packages: []string{"."}}
			r, err := of.runOnce(t.Context(), of.packages)
			err = of.repeat(t.Context(), &r, err)
			if (err != nil) != (c.want.failed > 0) || r.counts != c.want || len(r.repeated) != c.repeated {
				t.Errorf("%v, %v, %d withdrawn; want %v, %d", r.counts, err, len(r.repeated), c.want, c.repeated)
			}
		})
	}
}

// Two flaky tests are reported. More make the run fail.
func TestFlaky(t *testing.T) {
	r := result{repeated: []failure{{"a", "TestOne", "x"}, {"a", "TestOne/part", "x"}, {"b", "TestOne", "x"}}}
	if err := r.judgeFlaky(); err != nil {
		t.Errorf("two flaky tests: %v", err)
	}
	r.repeated = append(r.repeated, failure{"b", "TestTwo", "x"})
	if err := r.judgeFlaky(); err == nil {
		t.Error("three flaky tests do not fail the run")
	}
}
