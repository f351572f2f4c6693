// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/segue-lb/segue/internal/balancer/inspect"
	"github.com/segue-lb/segue/lab/pktgen"
)

// startTime is more than the time between the start of the first generator and that of the last.
const startTime = 300 * time.Millisecond

// mostAttempts is how often a measurement is tried, if the generators ended too early because the
// estimated rate was much too low.
const mostAttempts = 3

// measure makes a measurement of a network way. It returns the packets per second, and the share of
// sent packets that did not arrive.
func (b *testbed) measure(ctx context.Context, way Way, cores int) (rate, lost float64, err error) {
	if err := b.useProgramOf(way); err != nil {
		return 0, 0, err
	}
	// All generators must send until the end of the measurement. So estimate the rate first, and
	// then send the packets of three times the measurement's duration, because rates vary.
	estimate, err := b.estimate(ctx)
	if err != nil {
		return 0, 0, err
	}
	count := uint64(estimate * (3*b.options.Duration + startTime).Seconds())
	for range mostAttempts {
		rate, lost, err = b.attempt(ctx, way, cores, count)
		if !errors.Is(err, errEarly) || ctx.Err() != nil {
			break
		}
		count *= 3
	}
	return rate, lost, err
}

// estimate returns the packets per second of a short trial. On a busy machine, the trial may be
// over before the generator has sent a packet. Then estimate makes another trial of twice the
// duration. It returns an error if no trial shorter than longest sends a packet.
func (b *testbed) estimate(ctx context.Context) (rate float64, err error) {
	const longest = 30 * time.Second
	for duration := 200 * time.Millisecond; duration < longest; duration *= 2 {
		trial, cancel := context.WithTimeout(ctx, duration)
		result, err := b.generate(trial, b.packets(0, false))
		cancel()
		if err != nil || ctx.Err() != nil {
			return 0, errors.Join(err, context.Cause(ctx))
		}
		if result.Sent > 0 {
			return result.Rate(), nil
		}
	}
	// The last trial took at least half of longest.
	return 0, fmt.Errorf("the generator sent no packet within %s", longest/2)
}

// attempt makes a measurement in which each generator sends count packets. It returns errEarly if a
// generator ended too early. On the ways of the balancer, it returns an error if too few packets
// were of known flows.
func (b *testbed) attempt(
	ctx context.Context, way Way, cores int, count uint64,
) (rate, lost float64, err error) {
	known, err := b.known()
	if err != nil {
		return 0, 0, err
	}
	before, err := b.arrivals()
	if err != nil {
		return 0, 0, err
	}
	if rate, err = b.sample(ctx, before, count, cores, way == BalancedAlike); err != nil {
		return 0, 0, err
	}
	after, err := b.arrivals()
	if err != nil {
		return 0, 0, err
	}
	lost = 1 - float64(sum(after)-sum(before))/float64(count*uint64(cores))
	if way == Balanced || way == BalancedAlike {
		err = b.requireKnown(known, sum(after)-sum(before))
	}
	return rate, lost, err
}

// sample lets each core's generator send count packets. It returns the rate at which packets arrive
// while all generators send. before has the arrivals so far.
func (b *testbed) sample(
	ctx context.Context, before []uint64, count uint64, cores int, alike bool,
) (rate float64, err error) {
	group, ctx := errgroup.WithContext(ctx)
	allSend, cancel := context.WithCancel(ctx) // ends with the first generator that ends
	defer cancel()
	var generators []*pktgen.Generator
	for core := range cores {
		cfg := b.packets(core, alike)
		cfg.Count = count
		g, err := pktgen.New(cfg)
		if err != nil {
			return 0, err
		}
		defer g.Close()
		generators = append(generators, g)
	}
	for _, g := range generators {
		group.Go(func() error {
			defer cancel()
			_, err := b.run(ctx, g)
			return err
		})
	}
	group.Go(func() (err error) {
		rate, err = b.watch(allSend, before, cores)
		return err
	})
	err = group.Wait()
	return rate, err
}

// watch waits until packets arrive on all cores, and then measures the rate of arrivals for the
// duration of a measurement. It returns errEarly if the context ends before that: then a generator
// has ended. During the measurement it sleeps, so that it takes no CPU time from the generators.
func (b *testbed) watch(ctx context.Context, before []uint64, cores int) (float64, error) {
	first, start, err := b.awaitArrivals(ctx, before, cores)
	if err != nil {
		return 0, err
	}
	select {
	case <-ctx.Done():
		return 0, errEarly
	case <-time.After(b.options.Duration):
	}
	now, err := b.arrivals()
	elapsed := time.Since(start)
	if ctx.Err() != nil {
		return 0, errEarly
	}
	return float64(sum(now)-sum(first)) / elapsed.Seconds(), err
}

// errEarly is the error if a generator ended before the end of the measurement.
var errEarly = errors.New("the generators ended before enough was seen of them")

// awaitArrivals waits until packets arrive on the given number of cores. It returns the arrivals by
// CPU until then, and the present time. It returns errEarly if the context ends before.
func (b *testbed) awaitArrivals(
	ctx context.Context, before []uint64, cores int,
) (first []uint64, start time.Time, err error) {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil, start, errEarly
		case <-tick.C:
		}
		now, err := b.arrivals()
		if err != nil || arrivingCPUs(before, now) >= cores {
			return now, time.Now(), err
		}
	}
}

// strays is more than the number of frames that the host itself sends on a CPU while a generator
// starts, such as neighbour solicitations.
const strays = 100

// arrivingCPUs returns the number of CPUs on which packets of a generator have arrived.
func arrivingCPUs(before, now []uint64) (cpus int) {
	for cpu := range now {
		if now[cpu] > before[cpu]+strays {
			cpus++
		}
	}
	return cpus
}

// arrivals returns the number of packets that have arrived at the end of their way, by CPU.
func (b *testbed) arrivals() (perCPU []uint64, err error) {
	if err := b.programs.Arrived.Lookup(uint32(0), &perCPU); err != nil {
		return nil, fmt.Errorf("count the arrivals: %w", err)
	}
	return perCPU, nil
}

func sum(counts []uint64) (total uint64) {
	for _, n := range counts {
		total += n
	}
	return total
}

// known returns the number of packets of known flows that the balancer has forwarded.
func (b *testbed) known() (uint64, error) {
	view, err := inspect.OpenView(b.instance)
	if err != nil {
		return 0, err
	}
	defer view.Close()
	return view.Count(reasonKnown)
}

// requireKnown returns an error unless nearly all packets that arrived were of known flows: the
// measured throughput must be that of known flows. before is the result of known before the
// measurement, and arrived the number of packets that have arrived since.
func (b *testbed) requireKnown(before, arrived uint64) error {
	now, err := b.known()
	if err != nil {
		return err
	}
	const least = 0.99
	if float64(now-before) < least*float64(arrived) {
		return fmt.Errorf("of %d packets %d were of known flows", arrived, now-before)
	}
	return nil
}
