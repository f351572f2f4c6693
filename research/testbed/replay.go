// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"

	"github.com/segue-lb/segue/research/sim"
)

// Replay tells how an experiment takes its requests from a trace (Options.Trace). The trace
// determines the order of the requests, the proportions of the times between them, and the
// proportions of their work if it has sizes. The experiment determines the mean work and the load.
type Replay struct {
	Format TraceFormat `yaml:"format"`
	// Match is a regular expression that must be found in each query. Its only group captures the
	// size of the request, to which its work is proportional. Without a group, the experiment's
	// work is drawn.
	Match string `yaml:"match"`
}

// TraceFormat is the format of a trace, by its name in segue-lab load and in scenarios.
type TraceFormat string

var traceFormats = map[TraceFormat]sim.TraceFormat{
	"queries": sim.TimedQueries, "wikibench": sim.Wikibench,
}

// problems calls fail for each field that is wrong or does not fit the experiment.
func (r *Replay) problems(e *Experiment, fail func(name, problem string)) {
	if _, ok := traceFormats[r.Format]; !ok {
		fail("format", "must be queries or wikibench")
	}
	if match, err := regexp.Compile(r.Match); err != nil || match.NumSubexp() > 1 {
		fail("match", "must be a regular expression with at most one group, such as 'n=([0-9]+)$'")
	}
	if e.Kind != KindLoad || e.Axis == AxisDeviation {
		fail("match", "a trace is only for the kind load, and not for the axis deviation")
	}
}

// streamWork is the stream of random numbers for the work of requests whose trace has no work.
const streamWork = 1

// recording has the requests of a trace.
type recording struct {
	at, size []float64 // time and size of each request; its work is in proportion to its size
	digest   string    // SHA-256 of the file
}

// read reads a trace. If the trace has no sizes of requests, read draws them from the distribution
// of the work.
func (r *Replay) read(file string, work *sim.Distribution) (*recording, error) {
	recorded := &recording{}
	match := regexp.MustCompile(r.Match)
	drawn, random := match.NumSubexp() == 0, sim.NewRand(1, streamWork)
	var err error
	if recorded.digest, err = digestOf(file); err != nil {
		return nil, err
	}
	source, err := sim.Trace{
		File: file, Format: traceFormats[r.Format], MustMatch: true,
		Classes: []sim.TraceClass{{Match: match, Sized: !drawn}},
	}.Start(nil)
	if err != nil {
		return nil, err
	}
	for next, ok := source.Next(); ok; next, ok = source.Next() {
		if drawn {
			next.Size = work.Sample(random.Uint64())
		}
		recorded.at = append(recorded.at, next.At)
		recorded.size = append(recorded.size, next.Size)
	}
	return recorded, source.Close()
}

// digestOf returns the SHA-256 digest of a file.
func digestOf(path string) (string, error) {
	file, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer file.Close()
	hash := sha256.New()
	_, err = io.Copy(hash, file)
	return hex.EncodeToString(hash.Sum(nil)), err
}

// replayed returns the settings with the requests of a trace. Each seed replays its own part of the
// trace. If the experiment replays no trace, file must be empty, and the settings stay the same. It
// is an error if the trace has too few requests, or if the requests of a seed cannot be scaled.
func (s settings) replayed(file string) (settings, error) {
	switch {
	case s.Replay == nil && file == "":
		return s, nil
	case s.Replay == nil:
		return s, fmt.Errorf("trace %s: the experiment replays no trace", file)
	case file == "":
		return s, errors.New("trace: a file with the requests is required")
	}
	recorded, err := s.Replay.read(file, s.baseWork())
	if err != nil {
		return s, fmt.Errorf("trace: %w", err)
	}
	if need := s.Seeds * s.Connections; len(recorded.at) < need {
		return s, fmt.Errorf("trace: %s: has %d requests, and %d seeds of %d requests need %d",
			file, len(recorded.at), s.Seeds, s.Connections, need)
	}
	s.recorded = recorded
	for seed := range s.Seeds {
		at, size := s.part(uint64(seed + 1))
		if at[len(at)-1] == at[0] || sum(size) == 0 {
			return s, fmt.Errorf("trace: %s: requests %d to %d are all at the same time, or without work",
				file, seed*s.Connections+1, (seed+1)*s.Connections)
		}
	}
	return s, nil
}

// part returns the times and the sizes of the requests of a seed.
func (s settings) part(seed uint64) (at, size []float64) {
	first := int(seed-1) * s.Connections
	last := first + s.Connections
	return s.recorded.at[first:last], s.recorded.size[first:last]
}

func sum(values []float64) (total float64) {
	for _, x := range values {
		total += x
	}
	return total
}

// writeReplay writes the requests of the run in emulated time, at the rate and with the mean work
// of the experiment.
func (p planned) writeReplay(path string) error {
	at, size := p.part(p.seed)
	n := float64(p.Connections)
	// With these factors, n requests last n/rate, and have the experiment's mean work.
	timeFactor := n / p.rate() / (at[len(at)-1] - at[0])
	workFactor := p.baseWork().Mean() * n / sum(size)
	return writeTrace(path, func(out io.Writer) error {
		buffer := bufio.NewWriter(out)
		_, err := fmt.Fprintln(buffer, "time\tquery")
		for i := range at {
			_, failed := fmt.Fprintf(buffer, "%.9f\t/?work=%.3fms\n",
				(at[i]-at[0])*timeFactor, 1e3*size[i]*workFactor)
			err = errors.Join(err, failed)
		}
		return errors.Join(err, buffer.Flush())
	})
}
