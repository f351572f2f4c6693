// SPDX-License-Identifier: Apache-2.0

package accept

import (
	"math"
	"math/big"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestStatic(t *testing.T) {
	for busy, want := range []bool{true, true, true, true, false, false} {
		if got := (Static{Threshold: 4}).Accepts(Load{Busy: uint32(busy), Capacity: 32}); got != want {
			t.Errorf("SR4 of busy %d: %v, want %v", busy, got, want)
		}
	}
	if !(Always{}).Accepts(Load{Busy: math.MaxUint32}) || (Never{}).Accepts(Load{}) {
		t.Error("always and never must not mind the load")
	}
}

// printed is algorithm 2 as 6LB prints it, with exact shares.
type printed struct {
	accepted, attempt, c, n, windowSize int64
	epsilon                             *big.Rat
}

func (p *printed) syn(b int64) bool {
	p.attempt++
	if p.attempt == p.windowSize {
		share := big.NewRat(p.accepted, p.windowSize)
		half := big.NewRat(1, 2)
		if share.Cmp(new(big.Rat).Sub(half, p.epsilon)) < 0 && p.c < p.n {
			p.c++
		} else if share.Cmp(new(big.Rat).Add(half, p.epsilon)) > 0 && p.c > 0 {
			p.c--
		}
		p.attempt, p.accepted = 0, 0
	}
	if b < p.c {
		p.accepted++
		return true
	}
	return false
}

func TestDynamicIsAlgorithm2(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		millionths := rapid.Int64Range(0, 499_999).Draw(t, "epsilon")
		want := printed{
			c: int64(rapid.IntRange(0, 6).Draw(t, "initial")), n: int64(rapid.IntRange(1, 8).Draw(t, "n")),
			windowSize: int64(rapid.IntRange(1, 60).Draw(t, "window")), epsilon: big.NewRat(millionths, 1_000_000),
		}
		got := NewDynamic(uint32(want.c), uint32(want.windowSize), float64(millionths)/1e6)
		for i, busy := range rapid.SliceOfN(rapid.Int64Range(0, 9), 100, 400).Draw(t, "busy") {
			a, b := got.Accepts(Load{uint32(busy), uint32(want.n)}), want.syn(busy)
			if a != b || int64(got.Threshold) != want.c || int64(got.Attempts) != want.attempt || int64(got.Accepted) != want.accepted {
				t.Fatalf("offer %d: %v with %+v, want %v with %+v", i, a, *got, b, want)
			}
		}
	})
}

func TestDynamicWithoutCapacity(t *testing.T) {
	d := NewDynamic(1, 1, 0)
	for i := range uint32(100) {
		d.Accepts(Load{Busy: 1000, Capacity: NoCapacity})
		if d.Threshold != i+2 {
			t.Fatalf("threshold %d after %d refusals", d.Threshold, i+1)
		}
	}
}

func TestLeast(t *testing.T) {
	full := func(busy uint32) Load { return Load{busy, 2} }
	alone := func(busy uint32) Load { return Load{busy, NoCapacity} }
	for _, c := range []struct {
		name   string
		own    Load
		passed []Load
		place  Place
		answer Answer
		back   int
	}{
		{"free", full(1), nil, First, Take, 0},
		{"free in the middle", full(1), []Load{full(2)}, Middle, Take, 0},
		{"free and last", full(1), []Load{full(2)}, Last, Take, 0},
		{"full", full(2), nil, First, Pass, 0},
		{"full in the middle", full(2), []Load{full(9)}, Middle, Pass, 0},
		{"full, but alone", full(7), nil, Last, Take, 0},
		{"the last is the least busy", full(3), []Load{full(4), full(5)}, Last, Take, 0},
		{"as busy: no hop more", full(3), []Load{full(3)}, Last, Take, 0},
		{"handed back", full(4), []Load{full(5), full(2), full(3)}, Last, Return, 1},
		{"to the first of two", full(4), []Load{full(3), full(3)}, Last, Return, 0},
		{"larger servers are less busy", Load{4, 2}, []Load{{3, 1}, {6, 4}}, Last, Return, 1},
		{"of full ones the larger", Load{1, 1}, []Load{{4, 4}, {2, 2}}, Last, Return, 0},
		{"without a capacity", alone(0), nil, First, Pass, 0},
		{"without a capacity, alone", alone(4), nil, Last, Take, 0},
		{"without capacities", alone(4), []Load{alone(5), alone(3)}, Last, Return, 1},
		{"a capacity against none", alone(1), []Load{{4, 2}, {3, 2}}, Last, Take, 0},
		{"none against a capacity", Load{5, 2}, []Load{alone(1)}, Last, Return, 0},
		{"unknown, first", Unknown, nil, First, Take, 0},
		{"unknown, in the middle", Unknown, []Load{full(2)}, Middle, Pass, 0},
		{"unknown, alone", Unknown, nil, Last, Take, 0},
		{"unknown, after known ones", Unknown, []Load{full(9), Unknown, full(8)}, Last, Return, 2},
		{"unknown, after unknown ones", Unknown, []Load{Unknown, Unknown}, Last, Take, 0},
		{"known, after unknown ones", full(9), []Load{Unknown, Unknown}, Last, Take, 0},
	} {
		if answer, back := Least(c.own, c.passed, c.place); answer != c.answer || back != c.back {
			t.Errorf("%s: %v, %d, want %v, %d", c.name, answer, back, c.answer, c.back)
		}
	}
}

// anyLoad draws loads of all kinds: small and large ones, unknown ones, those without a capacity.
func anyLoad() *rapid.Generator[Load] {
	number := rapid.OneOf(rapid.Uint32Range(0, 6), rapid.Uint32(), rapid.Just(uint32(NoCapacity)))
	return rapid.Custom(func(t *rapid.T) Load {
		return Load{number.Draw(t, "busy"), number.Draw(t, "capacity")}
	})
}

// sixteenths returns the exact load per unit of capacity, with one more connection, in sixteenths.
func sixteenths(l Load) *big.Rat {
	capacity := int64(l.Capacity)
	if capacity == NoCapacity {
		capacity = 1
	}
	return big.NewRat(16*(int64(l.Busy)+1), capacity)
}

// TestLeastIsExact compares Least at the last candidate with exact arithmetic: the connection gets
// to the first of the least loaded candidates, but stays if the last is one of them.
func TestLeastIsExact(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		own := anyLoad().Draw(t, "own")
		passed := rapid.SliceOfN(anyLoad(), 0, 7).Draw(t, "passed")
		want, least := -1, own
		for i, l := range passed {
			if l.Capacity == 0 {
				continue
			}
			if least.Capacity == 0 || sixteenths(l).Cmp(sixteenths(least)) < 0 {
				want, least = i, l
			}
		}
		if own.Capacity != NoCapacity && own.Busy < own.Capacity {
			want = -1
		}
		answer, back := Least(own, passed, Last)
		if answer == Take {
			back = -1
		}
		if answer == Pass || back != want {
			t.Fatalf("answer %v, back to %d, want %d", answer, back, want)
		}
	})
}

func TestBounds(t *testing.T) {
	for _, c := range []struct {
		window    uint32
		epsilon   float64
		few, many uint32
	}{{50, 0.1, 20, 30}, {50, 0, 25, 25}, {1, 0.1, 1, 0}, {10, 0.05, 5, 5}, {1000, 0.3, 200, 800}, {7, 0.499999, 1, 6}} {
		if few, many := Bounds(c.window, c.epsilon); few != c.few || many != c.many {
			t.Errorf("window %d, epsilon %v: %d and %d, want %d and %d", c.window, c.epsilon, few, many, c.few, c.many)
		}
	}
}

// TestWindowTime checks that a window lasts at least its time, and that its accepted share then
// counts, whatever the number of offers is.
func TestWindowTime(t *testing.T) {
	for name, test := range map[string]struct {
		busy []uint32 // of the offers, at a threshold of 4
		want uint32
	}{
		"all accepted":  {[]uint32{0, 3}, 3},
		"none accepted": {[]uint32{4, 9}, 5},
		"half accepted": {[]uint32{0, 9}, 4},
	} {
		now := time.Duration(0)
		clock := func() time.Duration { return now }
		d := NewDynamic(4, 10, 0.1).WithWindowTime(2*time.Second, clock)
		for i := range 10_000 {
			d.Accepts(Load{Busy: test.busy[i%2], Capacity: 8})
		}
		if d.Threshold != 4 || d.Attempts != 10_000 {
			t.Errorf("%s: threshold %d after %d offers at once", name, d.Threshold, d.Attempts)
		}
		now = 2 * time.Second
		d.Accepts(Load{Busy: test.busy[0], Capacity: 8})
		if d.Threshold != test.want || d.Attempts != 0 || d.Began != now {
			t.Errorf("%s: threshold %d, want %d; %+v", name, d.Threshold, test.want, d)
		}
		now += time.Hour
		for range 9 {
			d.Accepts(Load{Busy: test.busy[0], Capacity: 8})
		}
		if d.Attempts != 9 {
			t.Errorf("%s: a window of fewer offers than 10 has ended: %+v", name, d)
		}
	}
}
