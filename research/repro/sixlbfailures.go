// SPDX-License-Identifier: Apache-2.0

package repro

import (
	"context"
	"fmt"

	"github.com/segue-lb/segue/research/chart"
	"github.com/segue-lb/segue/research/sim"
	"github.com/segue-lb/segue/research/tolerance"
)

// failureLoad is the load at which section II-D of 6LB is simulated. The text does not state one.
const failureLoad = 0.71

// sectionIID simulates section II-D of 6LB: one of 48 hosts, or the application on it, fails, and
// balancers do not know yet. p_R is the share of flows that their first candidate rejects. If a
// host fails, two groups of new flows fail. The first group has the host as its first candidate: as
// many flows as fail with SC. The second group, p_R times as many flows, is rejected by the first
// candidate and has the host as its second one. If an application fails, its host passes flows on.
// So only the second group fails.
func sectionIID(ctx context.Context, r *run) error {
	experiments := pick(r, 8, 20)
	contenders := []contender{singleChoice, sr4, srDynamic}
	failures := [][]sim.EventKind{nil, {sim.ServerFail}, {sim.ApplicationFail}}
	const sc = 0                                // the index of single choice in contenders
	const none, ofHost, ofApplication = 0, 1, 2 // indexes in failures
	var b batches
	for _, c := range contenders {
		for _, failing := range failures {
			for e := range experiments {
				t := sixLBTestbed
				t.experiment = e // another table for each experiment
				b.addFailing(t, c, failing)
			}
		}
	}
	results, err := r.simulateBatches(ctx, &b, 1)
	if err != nil {
		return err
	}
	of := func(contender, failure, experiment int) *sim.RunResult {
		return results[(contender*len(failures)+failure)*experiments+experiment].Runs[0]
	}
	c := chart.Chart{
		Title: fmt.Sprintf("New flows that fail while one of 48 servers does, ρ = %v", failureLoad),
		X: chart.Axis{
			Label:      "what fails",
			Categories: []string{"the host", "the application"},
		},
		Y: chart.Axis{Label: "share of new flows, %"},
	}
	for i, contender := range contenders {
		series := chart.Series{Name: contender.name, Style: chart.Bars}
		var rejected, extra, fewer []float64          // see compareFailures
		var ofHostFail, ofApplicationFail []float64   // percent of the flows that fail
		var ofHostByText, ofApplicationByText float64 // the same, by the text's p_R
		for e := range experiments {
			undisturbed := of(i, none, e)
			reject := float64(undisturbed.Hops) / float64(undisturbed.Flows())
			host, application := failed(of(i, ofHost, e)), failed(of(i, ofApplication, e))
			hostSC, applicationSC := failed(of(sc, ofHost, e)), failed(of(sc, ofApplication, e))
			ofHostFail = append(ofHostFail, 100*host)
			ofApplicationFail = append(ofApplicationFail, 100*application)
			ofHostByText += 100 * hostSC * (1 + reject) / float64(experiments)
			ofApplicationByText += 100 * applicationSC * reject / float64(experiments)
			rejected = append(rejected, 100*reject)
			extra = append(extra, (host/hostSC-1)/reject)
			fewer = append(fewer, (1-application/applicationSC)/(1-reject))
		}
		series.Points = estimates([]sim.Estimate{sim.EstimateOf(ofHostFail), sim.EstimateOf(ofApplicationFail)})
		c.Series = append(c.Series, series)
		if contender.name != singleChoice.name {
			r.compareFailures(contender.name, experiments, sim.EstimateOf(rejected),
				sim.EstimateOf(extra), sim.EstimateOf(fewer))
			c.Series = append(c.Series,
				printed(contender.name, indexed(ofHostByText, ofApplicationByText)...))
		}
	}
	r.draw(c)
	r.remark(
		"The text has no experiment, and no load. Each of the %d experiments here has another "+
			"table. The server has failed from the start to the end, and the first quarter of the "+
			"flows is not measured.", experiments)
	return nil
}

// compareFailures checks the statements of section II-D about a contender. rejected is p_R in
// percent, measured without a failure. If a host fails, a share p_R more flows should fail than
// with SC: extra is the measured share, divided by p_R. If an application fails, a share 1 - p_R
// fewer flows should fail than with SC: fewer is the measured share, divided by 1 - p_R.
func (r *run) compareFailures(name string, experiments int, rejected, extra, fewer sim.Estimate) {
	if name == srDynamic.name {
		r.about("p_R of "+name+", %", "50", rejected.Value, sampled(rejected, experiments, tolerance.Derived),
			"")
	}
	pR := fmt.Sprintf("p_R = %.1f%% more, says the text", rejected.Value)
	r.equal("more failures than SC when a host fails, over p_R, "+name, extra, pR)
	r.because("chance: with two other seeds it is 0.97, and inside")
	pR = fmt.Sprintf("100%% − p_R = %.1f%% fewer, says the text", 100-rejected.Value)
	r.equal("fewer failures than SC when an application fails, over 100% − p_R, "+name, fewer, pR)
	r.because("the flows of the failed application load the other servers by 1.7%% more, so they " +
		"reject more than p_R, which was measured without a failure. With two other seeds it is " +
		"0.987, too")
}

// failed returns the share of flows that found no server.
func failed(run *sim.RunResult) float64 {
	return float64(run.Outcomes[sim.Lost]+run.Outcomes[sim.Refused]) / float64(run.Flows())
}

// addFailing adds a batch in which the first server fails at the start in the given way, if any.
// Balancers never learn of the failure.
func (b *batches) addFailing(t testbed, c contender, failing []sim.EventKind) {
	b.add(t, c, t.rate(failureLoad))
	if b.err != nil {
		return
	}
	config := b.configs[len(b.configs)-1]
	config.Warmup = 0.25
	for _, kind := range failing {
		config.Events = append(config.Events,
			sim.Event{Kind: kind, Servers: []int32{0}, Detect: 1e9}) // seconds: after the end
	}
}
