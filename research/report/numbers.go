// SPDX-License-Identifier: Apache-2.0

package report

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/segue-lb/segue/research/chart"
	"github.com/segue-lb/segue/research/sim"
	"github.com/segue-lb/segue/research/testbed"
)

// measure is a number that describes a distribution of times, such as the mean.
type measure struct {
	// name is the column of the table and a part of a file's name. title is that of a chart.
	name, title string
	of          func(*testbed.Response) float64
}

var measures = []measure{
	{"mean", "Mean", func(r *testbed.Response) float64 { return r.Mean }},
	{"p50", "Median", func(r *testbed.Response) float64 { return r.P50 }},
	{"p90", "90th percentile", func(r *testbed.Response) float64 { return r.P90 }},
	{"p99", "99th percentile", func(r *testbed.Response) float64 { return r.P99 }},
}

// unit is the unit in which a chart or table shows times or shares.
type unit struct {
	Name   string
	factor float64 // units in a second, or in a whole
}

var (
	milliseconds = unit{"ms", 1e3}
	nanoseconds  = unit{"ns", 1e9}
)

// forwards tells whether the experiment measures the CPU time of packets, and not response times.
func (f *folder) forwards() bool { return f.Kind == testbed.KindForward }

// holds tells whether the experiment counts open connections, and not responses.
func (f *folder) holds() bool { return f.Kind == testbed.KindHold }

// counted names what the shares of the servers count.
func (f *folder) counted() string {
	if f.holds() {
		return "Open connections"
	}
	return "Responses"
}

// unit is the unit of the times that the experiment measures.
func (f *folder) unit() unit {
	if f.forwards() {
		return nanoseconds
	}
	return milliseconds
}

// source selects one of the distributions of a run. The result may be nil.
type source func(*testbed.Run) *testbed.Response

func measured(run *testbed.Run) *testbed.Response  { return &run.Measured }
func simulated(run *testbed.Run) *testbed.Response { return run.Simulated }
func bounded(run *testbed.Run) *testbed.Response   { return run.Bound }
func modelled(run *testbed.Run) *testbed.Response  { return run.Model }
func handshake(run *testbed.Run) *testbed.Response { return run.Handshake }

// estimate returns the mean of a measure over runs with different seeds, with its confidence
// interval. For the mean response time of a single run, the interval is Response.Half, if that is
// known. A measure of 0 counts as missing: the model, for example, has only the mean. If no run has
// the measure, estimate returns false.
func estimate(runs []*testbed.Run, from source, m measure, u unit) (sim.Estimate, bool) {
	var values []float64
	half := 0.0
	for _, run := range runs {
		if r := from(run); r != nil && m.of(r) > 0 {
			values = append(values, m.of(r)*u.factor)
			half = r.Half * u.factor
		}
	}
	e := sim.EstimateOf(values)
	if len(values) == 1 && m.name == "mean" && half > 0 {
		e.Half = half
	}
	return e, len(values) > 0
}

// deviation returns the difference of the measured mean response times from the simulated ones for
// the same arrivals, in percent of the simulated ones. It returns false if there is no simulation.
func deviation(runs []*testbed.Run) (sim.Estimate, bool) {
	var values []float64
	for _, run := range runs {
		if run.Simulated != nil && run.Simulated.Mean > 0 {
			values = append(values, 100*(run.Measured.Mean/run.Simulated.Mean-1))
		}
	}
	return sim.EstimateOf(values), len(values) > 0
}

// timesBound returns the measured mean response times as multiples of those of an omniscient
// balancer for the same arrivals. It returns false if no run has the times of an omniscient
// balancer.
func timesBound(runs []*testbed.Run) (sim.Estimate, bool) {
	var values []float64
	for _, run := range runs {
		if run.Bound != nil && run.Bound.Mean > 0 {
			values = append(values, run.Measured.Mean/run.Bound.Mean)
		}
	}
	return sim.EstimateOf(values), len(values) > 0
}

// fromEven returns the largest distance of a server's open connections from an even share, as the
// mean over the runs.
func fromEven(runs []*testbed.Run) (sim.Estimate, bool) {
	var values []float64
	for _, run := range runs {
		values = append(values, run.FromEven())
	}
	return sim.EstimateOf(values), len(values) > 0
}

// decimals is the number of decimals with which a value has three digits.
func decimals(v float64) int {
	v = math.Abs(v)
	switch {
	case v == 0 || v >= 99.95:
		return 0
	case v >= 9.995:
		return 1
	case v >= 0.9995:
		return 2
	}
	return min(2-int(math.Floor(math.Log10(v))), 9)
}

// number formats a value with three digits. Values from 1000 on have all digits before the point.
func number(v float64) string { return strconv.FormatFloat(v, 'f', decimals(v), 64) }

// unknown stands for a value that is not known.
const unknown = "–"

// value is a value of a table, with half its confidence interval if it is known.
type value struct{ Number, Half string }

// valueOf formats an estimate. ok tells whether there is one.
func valueOf(e sim.Estimate, ok bool) value {
	switch {
	case !ok || math.IsNaN(e.Value):
		return value{Number: unknown}
	case math.IsNaN(e.Half):
		return value{Number: number(e.Value)}
	}
	half := strconv.FormatFloat(e.Half, 'f', decimals(e.Value), 64)
	if strings.Trim(half, "0.") == "" && e.Half > 0 { // a half of 0 would say that the value is exact
		half = strconv.FormatFloat(e.Half, 'g', 1, 64)
	}
	return value{number(e.Value), half}
}

// plain formats a number that a file states, with the digits that it has there.
func plain(v float64) string { return strconv.FormatFloat(v, 'f', -1, 64) }

// withSign formats a number with one decimal and its sign.
func withSign(v float64) string {
	return strings.Replace(fmt.Sprintf("%+.1f", v), "-", "−", 1)
}

// signed is a value in percent with its sign.
func signed(e sim.Estimate, ok bool) value {
	if !ok || math.IsNaN(e.Value) {
		return value{Number: unknown}
	}
	v := value{Number: withSign(e.Value)}
	if !math.IsNaN(e.Half) {
		v.Half = fmt.Sprintf("%.1f", e.Half)
	}
	return v
}

// percent formats a share of 0 to 1 with two digits.
func percent(share float64) string {
	return strconv.FormatFloat(100*share, 'f', max(decimals(100*share)-1, 0), 64) + "%"
}

// pointName names a point of an axis, with no-break spaces around =.
func pointName(axis testbed.Axis, point float64) string {
	text := plain(point)
	switch axis.Key {
	case "load":
		return chart.Unbroken("ρ = " + text)
	case "servers", "balancers", "buckets", "flows", "connections":
		return text + " " + axis.Key
	case "removed":
		return text + " removed"
	case "deviation":
		return chart.Unbroken("σ = "+text) + " s"
	case "speed":
		return "speed " + text
	case "rate":
		return text + " requests/s"
	}
	return axis.Label + ": " + text
}
