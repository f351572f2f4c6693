// SPDX-License-Identifier: Apache-2.0

package scenario

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/segue-lb/segue/research/sim"
)

// Conditions have this grammar, in the notation of Go's specification:
//
//	condition = sum ( "<" | "<=" | ">" | ">=" ) sum | sum "within" number "%" "of" sum .
//	sum       = product { ( "+" | "-" ) product } .
//	product   = factor { ( "*" | "/" ) factor } .
//	factor    = number | duration | metric [ "(" case ")" ] | "(" sum ")" .
//
// Durations, such as 350ms, and metrics that are times can only be added to and compared with
// times. So "mean < 350" is an error: its author hardly means seconds. A plus or minus after a name
// must have a space before it, because names may contain these characters.
type (
	expression struct {
		value     func(results) float64
		time      int  // the power of seconds in its unit: 1 for times, 0 for numbers and shares
		hasMetric bool // depends on results, and not only on constants
	}
	comparison func(results) verdict
	verdict    struct {
		// holds and fails are both false if a value does not exist, such as a percentile of no
		// flows.
		holds, fails bool
		values       string
	}
)

// metrics are the names that expressions can use, in addition to p50, p99.9 and other percentiles
// of the response time.
var metrics = map[string]func(*sim.Result) float64{
	"mean":             func(r *sim.Result) float64 { return r.Mean().Value },
	"deviation":        func(r *sim.Result) float64 { return r.Response.Deviation() },
	"max":              func(r *sim.Result) float64 { return r.Response.Max() },
	"flows":            func(r *sim.Result) float64 { return float64(r.Flows()) },
	"refused":          func(r *sim.Result) float64 { return r.Share(sim.Refused).Value },
	"timed-out":        func(r *sim.Result) float64 { return r.Share(sim.TimedOut).Value },
	"lost":             func(r *sim.Result) float64 { return r.Share(sim.Lost).Value },
	"broken":           func(r *sim.Result) float64 { return r.Share(sim.Broken).Value },
	"failed":           func(r *sim.Result) float64 { return failed(r).Value },
	"hops":             func(r *sim.Result) float64 { return r.Hops().Value },
	"wrongful":         func(r *sim.Result) float64 { return r.Wrongful().Value },
	"untracked":        func(r *sim.Result) float64 { return r.Untracked().Value },
	"recovered":        func(r *sim.Result) float64 { return recovered(r).Value },
	"fairness":         func(r *sim.Result) float64 { return r.Fairness().Value },
	"instant-fairness": func(r *sim.Result) float64 { return r.InstantFairness().Value },
	"open":             func(r *sim.Result) float64 { return r.Open().Value },
	"utilisation":      func(r *sim.Result) float64 { return r.Utilisation().Value },
}

// times are the metrics that are times, in addition to percentiles.
var times = []string{"mean", "deviation", "max"}

// metric returns a metric by its name, or nil if there is none. time is 1 if the metric is a time,
// and 0 if it is a number or a share.
func metric(name string) (value func(*sim.Result) float64, time int) {
	if digits, ok := strings.CutPrefix(name, "p"); ok {
		percent, err := strconv.ParseFloat(digits, 64)
		if err == nil && percent > 0 && percent < 100 {
			return func(r *sim.Result) float64 { return r.Quantile(percent / 100).Value }, 1
		}
	}
	if slices.Contains(times, name) {
		time = 1
	}
	return metrics[name], time
}

// assertion adds an assertion of the file to the result, or reports what is wrong with it.
func (b *builder) assertion(path string, a Assertion) {
	text := a.Holds + a.Fails // one of them is empty
	if (a.Holds == "") == (a.Fails == "") {
		b.failf(path, "must have one of holds and fails")
		return
	}
	name := "holds"
	if a.Holds == "" {
		name = "fails"
	}
	p := parser{words: word.FindAllString(text, -1), cases: b.result.Cases}
	compare, err := p.condition()
	if err != nil {
		b.failf(join(path, name), "%v", err)
		return
	}
	b.result.Assertions = append(b.result.Assertions,
		Condition{Text: text, Expected: a.Holds != "", compare: compare, everyCase: p.everyCase})
}

var word = regexp.MustCompile(`[A-Za-z_][A-Za-z0-9_.+-]*|[0-9][0-9A-Za-zµ.]*|<=|>=|[^\s]`)

// parser reads a condition word by word.
type parser struct {
	words     []string
	cases     []RunnableCase
	everyCase bool // a metric without a case has been read
}

// next returns the next word. It is empty at the end.
func (p *parser) next() string {
	if len(p.words) == 0 {
		return ""
	}
	return p.words[0]
}

// accept consumes the next word if it is one of the given words, and returns it.
func (p *parser) accept(words ...string) string {
	w := p.next()
	if w == "" || !slices.Contains(words, w) {
		return ""
	}
	p.words = p.words[1:]
	return w
}

// expect is accept for a word that must follow.
func (p *parser) expect(w string) error {
	if p.accept(w) == "" {
		return fmt.Errorf("expected %q, found %s", w, p.found())
	}
	return nil
}

func (p *parser) found() string {
	if p.next() == "" {
		return "the end"
	}
	return strconv.Quote(p.next())
}

// condition reads a whole condition, and returns the function that judges it. Both sides must have
// the same unit, and at least one of them must have a metric.
func (p *parser) condition() (comparison, error) {
	left, err := p.sum()
	if err != nil {
		return nil, err
	}
	op := p.accept("<", "<=", ">", ">=", "within")
	var within float64 // percent; only for the operator within
	switch op {
	case "":
		return nil, fmt.Errorf("expected <, <=, >, >= or within, found %s", p.found())
	case "within":
		if within, err = p.percent(); err != nil {
			return nil, err
		}
	}
	right, err := p.sum()
	if err == nil && p.next() != "" {
		err = fmt.Errorf("expected the end, found %s", p.found())
	}
	switch {
	case err != nil:
		return nil, err
	case left.time != right.time:
		return nil, fmt.Errorf("%s is compared with %s: times have units, such as 350ms", left.kind(), right.kind())
	case !left.hasMetric && !right.hasMetric:
		return nil, errors.New("contains no metric")
	}
	return func(r results) verdict { return compare(left.value(r), op, within, right.value(r)) }, nil
}

// percent reads the words after "within", up to "of".
func (p *parser) percent() (float64, error) {
	x, ok := number(p.next())
	if !ok {
		return 0, fmt.Errorf("expected a number, found %s", p.found())
	}
	p.words = p.words[1:]
	return x, errors.Join(p.expect("%"), p.expect("of"))
}

// number reads a number. It must begin with a digit, so it rejects nan and inf.
func number(w string) (float64, bool) {
	if w == "" || w[0] < '0' || w[0] > '9' {
		return 0, false
	}
	x, err := strconv.ParseFloat(w, 64)
	return x, err == nil
}

// kind describes the value in error messages.
func (e expression) kind() string {
	switch e.time {
	case 0:
		return "a number"
	case 1:
		return "a time"
	}
	return fmt.Sprintf("time to the power of %d", e.time)
}

// compare compares two values. within is the allowed difference in percent, for the operator
// "within".
func compare(left float64, op string, within, right float64) verdict {
	v := verdict{values: fmt.Sprintf("%.4g %s %.4g", left, op, right)}
	switch op {
	case "<":
		v.holds = left < right
	case "<=":
		v.holds = left <= right
	case ">":
		v.holds = left > right
	case ">=":
		v.holds = left >= right
	default:
		v.holds = math.Abs(left-right) <= within/100*math.Abs(right)
		v.values = fmt.Sprintf("%.4g within %g%% of %.4g", left, within, right)
	}
	v.fails = !v.holds && !math.IsNaN(left) && !math.IsNaN(right)
	return v
}

func (p *parser) sum() (expression, error) { return p.chain(p.product, "+", "-") }

func (p *parser) product() (expression, error) { return p.chain(p.factor, "*", "/") }

// chain reads operands with operators between them.
func (p *parser) chain(operand func() (expression, error), operators ...string) (expression, error) {
	left, err := operand()
	for err == nil {
		op := p.accept(operators...)
		if op == "" {
			break
		}
		var right expression
		if right, err = operand(); err == nil {
			left, err = combine(left, op, right)
		}
	}
	return left, err
}

// combine returns the expression of an operator and its operands. For + and -, both operands must
// have the same unit.
func combine(left expression, op string, right expression) (expression, error) {
	e := expression{time: left.time, hasMetric: left.hasMetric || right.hasMetric}
	l, r := left.value, right.value
	switch op {
	case "+":
		e.value = func(of results) float64 { return l(of) + r(of) }
	case "-":
		e.value = func(of results) float64 { return l(of) - r(of) }
	case "*":
		e.time += right.time
		e.value = func(of results) float64 { return l(of) * r(of) }
	default:
		e.time -= right.time
		e.value = func(of results) float64 { return l(of) / r(of) }
	}
	if strings.Contains("+-", op) && left.time != right.time {
		return e, fmt.Errorf("%s %s %s: times have units, such as 350ms", left.kind(), op, right.kind())
	}
	return e, nil
}

// factor reads a factor of the grammar: a number, a duration, a metric, or a sum in parentheses.
func (p *parser) factor() (expression, error) {
	w := p.next()
	if w == "" {
		return expression{}, errors.New("expected a number or a metric, found the end")
	}
	p.words = p.words[1:]
	if w == "(" {
		inner, err := p.sum()
		if err != nil {
			return expression{}, err
		}
		return inner, p.expect(")")
	}
	if x, ok := number(w); ok {
		return constant(x, 0), nil
	}
	if d, err := time.ParseDuration(w); err == nil {
		return constant(d.Seconds(), 1), nil
	}
	value, time := metric(w)
	if value == nil {
		return expression{}, fmt.Errorf("%q is not a metric; must be one of: %s, or a percentile such as p99.9", w,
			strings.Join(slices.Sorted(maps.Keys(metrics)), ", "))
	}
	of, err := p.ofCase(value)
	return expression{value: of, time: time, hasMetric: true}, err
}

func constant(x float64, time int) expression {
	return expression{value: func(results) float64 { return x }, time: time}
}

// ofCase reads the case in parentheses after a metric, if there is one. It returns a function that
// reads the metric from the results of that case. Without a case in parentheses, the function reads
// it from the results of the current case.
func (p *parser) ofCase(value func(*sim.Result) float64) (func(results) float64, error) {
	if p.accept("(") == "" {
		p.everyCase = true
		return func(r results) float64 { return value(r.cases[r.current]) }, nil
	}
	name := p.next()
	if !slices.ContainsFunc(p.cases, func(c RunnableCase) bool { return c.Name == name }) {
		return nil, fmt.Errorf("expected a case, found %s; must be one of: %s", p.found(), strings.Join(names(p.cases), ", "))
	}
	p.words = p.words[1:]
	return func(r results) float64 { return value(r.cases[name]) }, p.expect(")")
}

func names(cases []RunnableCase) (names []string) {
	for _, c := range cases {
		names = append(names, c.Name)
	}
	return names
}
