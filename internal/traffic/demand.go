// SPDX-License-Identifier: Apache-2.0

package traffic

import (
	"errors"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/segue-lb/segue/internal/sim"
)

// distributions are the distributions of demands by name. Each takes the text after the colon, and
// returns an error that says what the text must be.
var distributions = map[string]func(text string) (sim.Distribution, error){
	"constant":    one("a time", sim.Constant),
	"exponential": one("a mean", sim.Exponential),
	"uniform":     uniform,
	"lognormal":   withNumber("a median and a standard deviation of the logarithm", 0, sim.Lognormal),
	"pareto":      withNumber("a mean and a tail index above 1", 1, sim.Pareto),
	"values":      values,
}

// ParseDemand reads the distribution of the demand of a request: constant:TIME, exponential:MEAN,
// uniform:MIN,MAX, lognormal:MEDIAN,SIGMA, pareto:MEAN,INDEX, or values:FILE, a file with a number
// of seconds on each line. Times have units. The names are those of scenarios of the simulator.
func ParseDemand(text string) (sim.Distribution, error) {
	name, parameters, _ := strings.Cut(text, ":")
	parse, known := distributions[name]
	if !known {
		return sim.Distribution{}, errors.New("must be constant:TIME, exponential:MEAN, " +
			"uniform:MIN,MAX, lognormal:MEDIAN,SIGMA, pareto:MEAN,INDEX or values:FILE")
	}
	return parse(parameters)
}

// positive reads a time of more than 0, and returns it in seconds.
func positive(text string) (seconds float64, ok bool) {
	d, err := time.ParseDuration(text)
	return d.Seconds(), err == nil && d > 0
}

// one makes the parser of a distribution with one time.
func one(what string, make func(float64) sim.Distribution) func(string) (sim.Distribution, error) {
	return func(text string) (sim.Distribution, error) {
		x, ok := positive(text)
		if !ok {
			return sim.Distribution{}, fmt.Errorf("must have %s, such as 190ms", what)
		}
		return make(x), nil
	}
}

// withNumber makes the parser of a distribution with a time and a number above least.
func withNumber(
	what string, least float64, make func(time, number float64) sim.Distribution,
) func(string) (sim.Distribution, error) {
	return func(text string) (sim.Distribution, error) {
		first, second, _ := strings.Cut(text, ",")
		x, ok := positive(first)
		number, err := strconv.ParseFloat(second, 64)
		if !ok || err != nil || !(number > least) || math.IsInf(number, 1) {
			return sim.Distribution{}, fmt.Errorf("must have %s, such as 190ms,1.5", what)
		}
		return make(x, number), nil
	}
}

func uniform(text string) (sim.Distribution, error) {
	first, second, _ := strings.Cut(text, ",")
	low, err1 := time.ParseDuration(first)
	high, err2 := time.ParseDuration(second)
	if err := errors.Join(err1, err2); err != nil || low < 0 || high < low {
		return sim.Distribution{},
			errors.New("must have two times, the lower one first, such as 10ms,50ms")
	}
	return sim.Uniform(low.Seconds(), high.Seconds()), nil
}

// values reads a file of observed times.
func values(name string) (sim.Distribution, error) {
	text, err := os.ReadFile(name)
	if err != nil {
		return sim.Distribution{}, err
	}
	var observed []float64
	for i, line := range strings.Split(strings.TrimRight(string(text), "\n"), "\n") {
		x, err := strconv.ParseFloat(strings.TrimSpace(line), 64)
		if err != nil || !(x >= 0) || math.IsInf(x, 1) {
			return sim.Distribution{},
				fmt.Errorf("%s:%d: %.200q: must be a number of seconds", name, i+1, line)
		}
		observed = append(observed, x)
	}
	return sim.Empirical(observed), nil
}
