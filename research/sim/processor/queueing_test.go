// SPDX-License-Identifier: Apache-2.0

package processor_test

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/segue-lb/segue/internal/testhost"
	"github.com/segue-lb/segue/research/model"
	"github.com/segue-lb/segue/research/sim/processor"
)

// job is a job that has ended.
type job struct{ arrival, work, sojourn float64 }

// serve has jobs arrive at a station by a Poisson process of the rate. It returns them in the order
// of their ends, without the first twentieth.
func serve(c processor.Config, rate float64, work func(*rand.Rand) float64, seed uint64) []job {
	const jobs = 200_000
	random := rand.New(rand.NewPCG(seed, 0))
	station := processor.NewStation[job](c)
	var ended []job
	end := func() {
		at := station.End()
		j := station.Remove(at)
		j.sojourn = at - j.arrival
		ended = append(ended, j)
	}
	now := 0.0
	for range jobs {
		now += random.ExpFloat64() / rate
		for station.End() <= now {
			end()
		}
		j := job{arrival: now, work: work(random)}
		station.Add(now, j, j.work)
	}
	for station.Len() > 0 {
		end()
	}
	return ended[jobs/20:]
}

// meanSojourn returns the mean over the jobs that count.
func meanSojourn(jobs []job, counts func(job) bool) float64 {
	sum, n := 0.0, 0
	for _, j := range jobs {
		if counts(j) {
			sum += j.sojourn
			n++
		}
	}
	return sum / float64(n)
}

func all(job) bool { return true }

// sorted returns the sojourn times, the shortest first.
func sorted(jobs []job) (sojourns []float64) {
	for _, j := range jobs {
		sojourns = append(sojourns, j.sojourn)
	}
	slices.Sort(sojourns)
	return sojourns
}

// estimateRuns is the number of runs that estimate makes, with the seeds 0, 1 and so on.
const estimateRuns = 10

// estimate returns the mean of a statistic over independent runs, and half of its confidence
// interval of 99.9% (Student's t with 9 degrees of freedom).
func estimate(statistic func(seed uint64) float64) (mean, half float64) {
	const runs, t = estimateRuns, 4.781
	var sum, squares float64
	for seed := range uint64(runs) {
		x := statistic(seed)
		sum += x
		squares += x * x
	}
	mean = sum / runs
	return mean, t * math.Sqrt((squares/runs-mean*mean)/(runs-1))
}

// requireNear compares an estimate with theory. The interval must also be narrow, because a wide
// one contains anything.
func requireNear(t *testing.T, what string, mean, half, want float64) {
	t.Helper()
	t.Logf("%s %.4f ± %.4f, in theory %.4f", what, mean, half, want)
	if math.Abs(mean-want) > half || half > 0.08*want {
		t.Errorf("%s %.4f ± %.4f, want %.4f", what, mean, half, want)
	}
}

func exponential(r *rand.Rand) float64 { return r.ExpFloat64() }
func constant(*rand.Rand) float64      { return 1 }

// twoKinds is a distribution of mean 1 and coefficient of variation 2: most jobs are short.
func twoKinds(r *rand.Rand) float64 {
	// Balanced means: each kind brings half of the work.
	share := (1 + math.Sqrt(3.0/5)) / 2
	if r.Float64() < share {
		return r.ExpFloat64() / (2 * share)
	}
	return r.ExpFloat64() / (2 * (1 - share))
}

// erlang returns the model of single choice, whose servers are queues M/M/k. Its unit of time is
// the mean work, as here.
func erlang(t *testing.T, load float64, cores int) *model.Steady {
	t.Helper()
	s, err := model.SingleChoice(load, cores)
	testhost.Must(t, err)
	return s
}

// TestMeanSojourn compares mean sojourn times with queueing theory. Under processor sharing, the
// mean of M/G/1 depends only on the mean work (insensitivity).
func TestMeanSojourn(t *testing.T) {
	const ps, fifo = processor.ProcessorSharing, processor.FIFO
	for _, test := range []struct {
		name       string
		discipline processor.Discipline
		cores      int
		load       float64
		work       func(*rand.Rand) float64
		want       float64
	}{
		{"M/M/1-PS", ps, 1, 0.8, exponential, 1 / (1 - 0.8)},
		{"M/M/1-PS at 0.5", ps, 1, 0.5, exponential, 1 / (1 - 0.5)},
		{"M/D/1-PS", ps, 1, 0.8, constant, 1 / (1 - 0.8)},
		{"M/G/1-PS", ps, 1, 0.7, twoKinds, 1 / (1 - 0.7)},
		{"M/M/2-PS", ps, 2, 0.88, exponential, erlang(t, 0.88, 2).MeanResponse()},
		{"M/M/4-PS", ps, 4, 0.8, exponential, erlang(t, 0.8, 4).MeanResponse()},
		{"M/M/1", fifo, 1, 0.8, exponential, 1 / (1 - 0.8)},
		{"M/M/2", fifo, 2, 0.88, exponential, erlang(t, 0.88, 2).MeanResponse()},
		{"M/D/1", fifo, 1, 0.8, constant, 1 + 0.8/(2*(1-0.8))},       // Pollaczek-Khinchine
		{"M/G/1", fifo, 1, 0.6, twoKinds, 1 + 0.6*(1+4)/(2*(1-0.6))}, // Pollaczek-Khinchine
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			c := processor.Config{Cores: test.cores, Speed: 1, Discipline: test.discipline}
			rate := test.load * float64(test.cores)
			got, half := estimate(func(seed uint64) float64 {
				return meanSojourn(serve(c, rate, test.work, seed), all)
			})
			requireNear(t, "mean", got, half, test.want)
		})
	}
}

// TestDistributionOfSojourns compares percentiles of M/M/k, first come, first served, with the
// model.
func TestDistributionOfSojourns(t *testing.T) {
	for _, cores := range []int{1, 2, 4} {
		c := processor.Config{Cores: cores, Speed: 1, Discipline: processor.FIFO}
		theory := erlang(t, 0.8, cores)
		var runs [][]float64
		for seed := range uint64(estimateRuns) {
			runs = append(runs, sorted(serve(c, 0.8*float64(cores), exponential, seed)))
		}
		for _, p := range []float64{50, 99} {
			want, err := theory.Percentile(p)
			testhost.Must(t, err)
			got, half := estimate(func(seed uint64) float64 {
				return runs[seed][int(p/100*float64(len(runs[seed])))]
			})
			requireNear(t, "percentile", got, half, want)
		}
	}
}

// TestSharingIsFair: in M/G/1-PS, the mean sojourn time of the jobs with work x is x/(1-ρ).
func TestSharingIsFair(t *testing.T) {
	const load, short, long = 0.7, 0.5, 3.0
	const shareOfShort = (long - 1) / (long - short) // so that the mean is 1
	work := func(r *rand.Rand) float64 {
		if r.Float64() < shareOfShort {
			return short
		}
		return long
	}
	for _, size := range []float64{short, long} {
		got, half := estimate(func(seed uint64) float64 {
			jobs := serve(processor.Config{Cores: 1, Speed: 1}, load, work, seed)
			return meanSojourn(jobs, func(j job) bool { return j.work == size })
		})
		requireNear(t, "mean", got, half, size/(1-load))
	}
}

// TestTimeScales: twice the speed with half of the gaps between arrivals gives half of the times,
// exactly.
func TestTimeScales(t *testing.T) {
	for _, d := range []processor.Discipline{processor.ProcessorSharing, processor.FIFO} {
		slow := serve(processor.Config{Cores: 2, Speed: 1, Discipline: d}, 1.7, exponential, 1)
		fast := serve(processor.Config{Cores: 2, Speed: 2, Discipline: d}, 3.4, exponential, 1)
		for i := range slow {
			if got, want := fast[i].sojourn, slow[i].sojourn/2; got != want {
				t.Fatalf("discipline %d, job %d: %v at twice the speed, want %v", d, i, got, want)
			}
		}
	}
}
