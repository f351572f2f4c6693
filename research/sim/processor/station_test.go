// SPDX-License-Identifier: Apache-2.0

package processor_test

import (
	"math"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/segue-lb/segue/research/sim/processor"
)

// ends runs a station until it is idle. It returns the jobs with their ends.
func ends(s *processor.Station[string]) map[string]float64 {
	all := map[string]float64{}
	for s.Len() > 0 {
		at := s.End()
		all[s.Remove(at)] = at
	}
	return all
}

func TestStation(t *testing.T) {
	const ps, fifo = processor.ProcessorSharing, processor.FIFO
	type arrival struct {
		at   float64
		job  string
		work float64
	}
	for _, test := range []struct {
		name     string
		config   processor.Config
		arrivals []arrival
		want     map[string]float64
	}{
		{
			"a job alone takes its work divided by the speed",
			processor.Config{Cores: 4, Speed: 2, Discipline: ps},
			[]arrival{{1, "a", 3}}, map[string]float64{"a": 2.5},
		},
		{
			// From 1 on each has half of the core. b ends after 2 seconds; a has 2 of 4 left then.
			"jobs share a core", processor.Config{Cores: 1, Speed: 1, Discipline: ps},
			[]arrival{{0, "a", 4}, {1, "b", 1}}, map[string]float64{"b": 3, "a": 5},
		},
		{
			"a job does not use more than one core", processor.Config{Cores: 2, Speed: 1, Discipline: ps},
			[]arrival{{0, "a", 4}, {1, "b", 1}}, map[string]float64{"b": 2, "a": 4},
		},
		{
			"three jobs share two cores", processor.Config{Cores: 2, Speed: 1, Discipline: ps},
			[]arrival{{0, "a", 2}, {0, "b", 4}, {0, "c", 4}}, map[string]float64{"a": 3, "b": 5, "c": 5},
		},
		{
			"a job without work ends at once", processor.Config{Cores: 1, Speed: 1, Discipline: ps},
			[]arrival{{0, "a", 4}, {1, "b", 0}}, map[string]float64{"b": 1, "a": 4},
		},
		{
			"jobs start in the order of arrival", processor.Config{Cores: 2, Speed: 1, Discipline: fifo},
			[]arrival{{0, "a", 4}, {0, "b", 1}, {0, "c", 2}, {0, "d", 1}},
			map[string]float64{"b": 1, "c": 3, "a": 4, "d": 4},
		},
		{
			"under fifo a short job waits for a long one",
			processor.Config{Cores: 1, Speed: 2, Discipline: fifo},
			[]arrival{{0, "a", 4}, {1, "b", 0}}, map[string]float64{"a": 2, "b": 2},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := processor.NewStation[string](test.config)
			for _, a := range test.arrivals {
				s.Add(a.at, a.job, a.work)
			}
			if diff := cmp.Diff(test.want, ends(s)); diff != "" {
				t.Errorf("ends (-want +got):\n%s", diff)
			}
			if end := s.End(); !math.IsInf(end, 1) {
				t.Errorf("an idle station ends a job at %v", end)
			}
		})
	}
}

// TestColocated has other work take half of the cores while jobs are served and wait, and end.
func TestColocated(t *testing.T) {
	for _, test := range []struct {
		discipline processor.Discipline
		want       map[string]float64
	}{
		// Each has received 1 of 4 at 2. Then each gets a quarter of the core until 6, and half
		// from then on.
		{processor.ProcessorSharing, map[string]float64{"a": 10, "b": 10}},
		// a has received 2 of 4 at 2, and 4 at 6.
		{processor.FIFO, map[string]float64{"a": 6, "b": 10}},
	} {
		c := processor.Config{Cores: 1, Speed: 1, Discipline: test.discipline}
		s := processor.NewStation[string](c)
		s.Add(0, "a", 4)
		s.Add(0, "b", 4)
		s.SetColocated(2, 0.5)
		got := map[string]float64{}
		for s.End() <= 6 {
			at := s.End()
			got[s.Remove(at)] = at
		}
		s.SetColocated(6, 0)
		for job, at := range ends(s) {
			got[job] = at
		}
		if diff := cmp.Diff(test.want, got); diff != "" {
			t.Errorf("discipline %d: ends (-want +got):\n%s", test.discipline, diff)
		}
	}
}

func TestConfigIsChecked(t *testing.T) {
	for _, test := range []struct {
		config processor.Config
		want   string
	}{
		{processor.Config{Cores: 2, Speed: 0.5}, ""},
		{processor.Config{Cores: 0, Speed: 1}, "cores 0: must be 1 to 1024"},
		{processor.Config{Cores: 1025, Speed: 1}, "cores 1025: must be 1 to 1024"},
		{processor.Config{Cores: 1, Speed: 0}, "speed 0: must be a positive number"},
		{processor.Config{Cores: 1, Speed: math.NaN()}, "speed NaN: must be a positive number"},
		{processor.Config{Cores: 1, Speed: math.Inf(1)}, "speed +Inf: must be a positive number"},
	} {
		got := ""
		if err := test.config.Validate(); err != nil {
			got = err.Error()
		}
		if got != test.want {
			t.Errorf("%+v: %q, want %q", test.config, got, test.want)
		}
	}
	const want = "must be processor-sharing or fifo"
	if _, err := processor.ParseDiscipline("lifo"); err == nil || err.Error() != want {
		t.Errorf("lifo: %v", err)
	}
}
