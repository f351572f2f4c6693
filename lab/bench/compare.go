// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/segue-lb/segue/internal/version"
)

// CompareOptions are the options of Compare.
type CompareOptions struct {
	// PacketOptions apply to both builds. Without Case, Compare measures null, floor and all cases
	// of whole programs of the product (isDataPath).
	PacketOptions
	// Old is the executable of the old build. The new build is that of this process.
	Old string
}

// DefaultCompareOptions returns options for many short measurements of few cases.
func DefaultCompareOptions() PacketOptions {
	o := DefaultPacketOptions()
	o.Flows, o.Rounds, o.Packets = []uint32{1_000}, 100, 20_000
	return o
}

// thisBuild is the executable of this process, even if its file is replaced meanwhile.
const thisBuild = "/proc/self/exe"

// roundsPerStart is the number of rounds after which both workers are restarted. One process is
// some percent faster than another one of the same build, during its whole life. The causes are the
// addresses of its tables and programs in memory, and the random keys of its hashes. Restarts
// average these differences out.
const roundsPerStart = 10

// roundsPerVisit is the number of rounds that are measured of a case before the next case. To
// change the case after each round would take longer, because the kernel needs much more time to
// change services and programs than to measure a case.
const roundsPerVisit = 5

// Comparison is the cost of packets in two builds, measured alternately.
type Comparison struct {
	Old     version.Build    `json:"old"`
	New     version.Build    `json:"new"`
	Cases   []CaseComparison `json:"cases"`
	OnlyOld []CaseName       `json:"only_old"` // cases that the new build does not have
	OnlyNew []CaseName       `json:"only_new"`
}

// CaseComparison compares the cost of one kind of packet in two builds.
type CaseComparison struct {
	CaseName
	Old BuildCost `json:"old"`
	New BuildCost `json:"new"`
	// Ratio is the new build's time divided by the old build's. Both include the host program's
	// time.
	Ratio Spread `json:"ratio"`
	// NetRatio is Ratio without the host program's time: the time of case null in the same round
	// and build is subtracted from both times. It is nil if nothing remains, as for null itself.
	NetRatio *Spread `json:"net_ratio,omitempty"`
	// SameProgram tells whether the programs of both builds have the same instructions.
	SameProgram bool `json:"same_program"`
}

// BuildCost is the cost of a packet of a case in one build.
type BuildCost struct {
	// Median is the median CPU time in nanoseconds. It includes the host program's time.
	Median  float64         `json:"ns_median"`
	Program programIdentity `json:"program"`
	// Instructions is the median number of instructions that were executed for a packet, including
	// those of the host program. It is nil if the processor does not count instructions.
	Instructions *float64 `json:"instructions,omitempty"`
}

// Spread has percentiles of the values of all rounds.
type Spread struct {
	Median float64 `json:"median"`
	P10    float64 `json:"p10"`
	P90    float64 `json:"p90"`
}

// spreadOf returns the percentiles of values.
func spreadOf(values []float64) Spread {
	return Spread{percentile(values, 50), percentile(values, 10), percentile(values, 90)}
}

// build is one of the two compared builds.
type build int

const (
	oldBuild build = iota
	newBuild
)

var buildNames = [...]string{oldBuild: "old", newBuild: "new"}

// comparedCase is a case that both builds have, with its measurements.
type comparedCase struct {
	CaseName
	programs [2]programIdentity
	samples  []sample
}

// sample is one measurement of a case in both builds.
type sample struct {
	round int
	costs [2]workerCost
}

// comparison is the state of a running comparison.
type comparison struct {
	options CompareOptions
	cpu     int
	workers [2]*workerClient
	// prepared holds each build's answer to the first prepare request.
	prepared [2][]workerCase
	result   Comparison
	cases    []*comparedCase
}

// Compare measures an old build and this one in one run. In each round it measures a case in one
// build, and directly after that in the other build, on the same CPU. Compare needs root.
func Compare(ctx context.Context, o CompareOptions) (_ *Comparison, err error) {
	cpus, err := allowedCPUs()
	if err != nil {
		return nil, err
	}
	// Use the last CPU, because the first one serves most interrupts.
	c := &comparison{options: o, cpu: cpus[len(cpus)-1]}
	defer func() {
		err = errors.Join(err, c.stop()) // ends the workers that an error has left running
		if ctx.Err() != nil {
			err = ctx.Err() // the errors of workers only tell that they were ended
		}
	}()
	for first := 0; first < o.Rounds; first += roundsPerStart {
		newFirst := first/roundsPerStart%2 == 1 // at every second start
		if err := c.start(ctx, newFirst); err != nil {
			return nil, err
		}
		end := min(first+roundsPerStart, o.Rounds)
		for round := first; round < end; round += roundsPerVisit {
			o.Progress.say("round %d of %d", round+1, o.Rounds)
			if err := c.measure(round, min(round+roundsPerVisit, end)); err != nil {
				return nil, err
			}
		}
		if err := c.stop(); err != nil {
			return nil, err
		}
	}
	c.result.Cases = summarizeComparison(c.cases)
	return &c.result, nil
}

// inOrder returns both builds. The old one is first, unless reversed is true.
func inOrder(reversed bool) [2]build {
	if reversed {
		return [2]build{newBuild, oldBuild}
	}
	return [2]build{oldBuild, newBuild}
}

// start starts both workers, and has them prepare their cases: the old build first, unless reversed
// is true. The first start of a run also finds the cases that both builds have. A later start
// returns an error if a build or its cases have changed since.
func (c *comparison) start(ctx context.Context, reversed bool) error {
	r := prepareRequest{Flows: c.options.Flows, Room: c.options.Room}
	if c.options.Case != nil {
		r.Case = c.options.Case.String()
	}
	executables := [2]string{oldBuild: c.options.Old, newBuild: thisBuild}
	for _, b := range inOrder(reversed) {
		w, err := startWorker(ctx, buildNames[b], executables[b], c.cpu)
		if err != nil {
			return err
		}
		c.workers[b] = w
	}
	var cases [2][]workerCase
	for _, b := range inOrder(reversed) {
		var err error
		if cases[b], err = c.workers[b].prepare(r, c.options.Progress); err != nil {
			return err
		}
	}
	if c.cases != nil {
		return c.requireSame(cases)
	}
	c.prepared = cases
	c.result.Old, c.result.New = c.workers[oldBuild].build, c.workers[newBuild].build
	c.cases, c.result.OnlyOld, c.result.OnlyNew = matchCases(cases[oldBuild], cases[newBuild])
	// Base cases alone are no comparison.
	if !slices.ContainsFunc(c.cases, func(m *comparedCase) bool { return !m.isBase() }) {
		return errors.New("the builds have no case in common")
	}
	return nil
}

// requireSame returns an error if an executable was replaced since the run began: then its worker
// is of another build, or has other cases.
func (c *comparison) requireSame(cases [2][]workerCase) error {
	builds := [2]version.Build{oldBuild: c.result.Old, newBuild: c.result.New}
	for b, name := range buildNames {
		if c.workers[b].build != builds[b] || !slices.Equal(cases[b], c.prepared[b]) {
			return fmt.Errorf("the executable of the %s build changed during the run", name)
		}
	}
	return nil
}

// matchCases finds the cases that both builds have, in the order of the new build, and those that
// only one build has.
func matchCases(ofOld, ofNew []workerCase) (both []*comparedCase, onlyOld, onlyNew []CaseName) {
	programs := map[CaseName]programIdentity{}
	for _, c := range ofOld {
		programs[c.CaseName] = c.Program
	}
	onlyOld, onlyNew = []CaseName{}, []CaseName{} // in JSON an empty list, not null
	known := map[CaseName]bool{}
	for _, c := range ofNew {
		known[c.CaseName] = true
		if program, ok := programs[c.CaseName]; ok {
			both = append(both, &comparedCase{
				CaseName: c.CaseName,
				programs: [2]programIdentity{oldBuild: program, newBuild: c.Program},
			})
		} else {
			onlyNew = append(onlyNew, c.CaseName)
		}
	}
	for _, c := range ofOld {
		if !known[c.CaseName] {
			onlyOld = append(onlyOld, c.CaseName)
		}
	}
	return both, onlyOld, onlyNew
}

// measure measures each case in each round from first to end-1, once in each build. Which build is
// first alternates from round to round, and from case to case. Base cases have several turns in a
// round.
func (c *comparison) measure(first, end int) error {
	for turn, m := range interleave(c.cases) {
		for round := first; round < end; round++ {
			s := sample{round: round}
			for _, b := range inOrder((round+turn)%2 == 1) {
				var err error
				if s.costs[b], err = c.workers[b].run(m.CaseName, c.options.Packets); err != nil {
					return err
				}
			}
			m.samples = append(m.samples, s)
		}
	}
	return nil
}

// stop ends the workers that run.
func (c *comparison) stop() (err error) {
	for b, w := range c.workers {
		if w != nil {
			err = errors.Join(err, w.close())
		}
		c.workers[b] = nil
	}
	return err
}

func summarizeComparison(cases []*comparedCase) (results []CaseComparison) {
	nulls := map[string]map[int][2]float64{} // median times of case null, by family and round
	for _, m := range cases {
		if m.Case == caseNull {
			nulls[m.Family] = m.medianByRound()
		}
	}
	for _, m := range cases {
		r := CaseComparison{
			CaseName: m.CaseName, Old: m.costOf(oldBuild), New: m.costOf(newBuild),
			Ratio:       spreadOf(m.ratios(nil)),
			SameProgram: m.programs[oldBuild] == m.programs[newBuild],
		}
		// For case null, or if null takes as long as the case, there is no net ratio.
		if net := m.ratios(nulls[m.Family]); m.Case != caseNull && len(net) > 0 {
			spread := spreadOf(net)
			r.NetRatio = &spread
		}
		results = append(results, r)
	}
	return results
}

// times returns the times of a build in the samples.
func times(samples []sample, b build) (all []float64) {
	for _, s := range samples {
		all = append(all, s.costs[b].Nanoseconds)
	}
	return all
}

// medianByRound returns the median time of each build in each round. It is for cases that are
// measured several times in a round.
func (m *comparedCase) medianByRound() map[int][2]float64 {
	byRound := map[int][]sample{}
	for _, s := range m.samples {
		byRound[s.round] = append(byRound[s.round], s)
	}
	medians := map[int][2]float64{}
	for round, samples := range byRound {
		medians[round] = [2]float64{
			oldBuild: percentile(times(samples, oldBuild), 50),
			newBuild: percentile(times(samples, newBuild), 50),
		}
	}
	return medians
}

// ratios returns, for each sample, the new build's time divided by the old build's. hostTimes has
// the host program's times by round, which are subtracted from both times first. If hostTimes is
// nil, nothing is subtracted. ratios leaves out samples in which nothing remains of the old build's
// time.
func (m *comparedCase) ratios(hostTimes map[int][2]float64) (ratios []float64) {
	for _, s := range m.samples {
		host := hostTimes[s.round]
		old := s.costs[oldBuild].Nanoseconds - host[oldBuild]
		if old > 0 {
			ratios = append(ratios, (s.costs[newBuild].Nanoseconds-host[newBuild])/old)
		}
	}
	return ratios
}

// costOf returns the cost of a packet of the case in one build.
func (m *comparedCase) costOf(b build) BuildCost {
	cost := BuildCost{Median: percentile(times(m.samples, b), 50), Program: m.programs[b]}
	var counted []float64
	for _, s := range m.samples {
		counted = append(counted, s.costs[b].Instructions)
	}
	if median := percentile(counted, 50); median > 0 {
		cost.Instructions = &median
	}
	return cost
}
