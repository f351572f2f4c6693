// SPDX-License-Identifier: Apache-2.0

package config

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/internal/fieldpath"
)

type animal struct {
	kind any
}

type dog struct {
	legs `yaml:",inline"`
	Name string `yaml:"name"`
	Seen bool   // no field of a file
}

type legs struct {
	Legs int `yaml:"legs"`
}

type clock struct {
	Tick time.Duration `yaml:"tick"`
}

func (a *animal) Choose(name string) (any, error) {
	switch name {
	case "dog":
		a.kind = &dog{legs: legs{4}}
	case "clock":
		a.kind = &clock{}
	default:
		return nil, fmt.Errorf("must be dog or clock")
	}
	return a.kind, nil
}

func TestVariant(t *testing.T) {
	for _, test := range []struct {
		text    string
		kind    any
		problem string
	}{
		{"pet: dog", &dog{legs: legs{4}}, ""},
		{"pet: {dog: {name: Rex, legs: 3}}", &dog{legs: legs{3}, Name: "Rex"}, ""},
		{"pet: {dog: {}}", &dog{legs: legs{4}}, ""},
		{"pet:\n  clock: {tick: 1s}", &clock{Tick: time.Second}, ""},
		{"pet: cat", nil, `line 1: pet "cat": must be dog or clock`},
		{"pet:\n  cat: {}", nil, `line 2: pet "cat": must be dog or clock`},
		{"pet: {dog: {Seen: true}}", nil, "line 1: pet.dog.Seen: unknown field; must be one of: legs, name"},
		{"pet: {dog: {legs: many}}", nil, `line 1: pet.dog.legs "many": must be a whole number`},
		{"pet: {dog: {}, clock: {}}", nil, "line 1: pet: must be a name, or a mapping of one name to its fields"},
		{"pet: [dog]", nil, "line 1: pet: must be a name, or a mapping of one name to its fields"},
		{"pet: {dog: 4}", nil, `line 1: pet.dog "4": must be a mapping of field names to values`},
	} {
		var file struct {
			Pet animal `yaml:"pet"`
		}
		err := Decode([]byte(test.text), &file, func() fieldpath.Errors { return nil })
		got := ""
		if err != nil {
			got = err.Error()
		}
		if got != test.problem {
			t.Errorf("%s: error %q, want %q", test.text, got, test.problem)
			continue
		}
		if test.problem != "" {
			continue
		}
		if diff := cmp.Diff(test.kind, file.Pet.kind, cmp.AllowUnexported(dog{}, legs{})); diff != "" {
			t.Errorf("%s (-want +got):\n%s", test.text, diff)
		}
	}
}
